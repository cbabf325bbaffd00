"""Variable names: readable paths for people, and portable names for files.

    named_variables(model)       # {"encoder/dense_4/kernel": variable, ...}, as Keras names them
    portable_names(model)        # {"encoder/dense/kernel": variable, ...}, the same in every process

Keras numbers layers and variables without a name across the process, so the path of a variable may differ in the next
process; portable names count layers within the model, and variables within their layer. A model is a Keras model or
layer, a `tf.Module`, or a dict or list of them. This module does not know which variables are saved or trained.
"""

import hashlib
import itertools
import re
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.src.utils.naming import to_snake_case

WEIGHT_FILES = (".npz", ".safetensors")  # suffixes of files with variables by portable names
_IS_LEFT_OUT = "_distloop_is_left_out"  # an attribute of the variables that no update of a run trains
_UNNAMED = re.compile(r"(.*/|)variable(?:_(\d+))?")  # scope and number of a variable to which Keras gave a name


class ModelRunner:
    """Base class of objects that run a model in their own way and own no variables: names are those of the model.

    Attributes:
        model: the model.
        modules: those that it calls, nested in lists.
    """

    model: Any
    modules: Sequence[Any]


class ComposedVariable:
    """Base class of objects that are used as one variable, and whose value several TensorFlow variables hold.

    Attributes:
        dtype: of the value.
        shards: those of TensorFlow that have the same elements, or some of them each.
        is_mirrored: whether every replica has all of it.
        is_here: whether this worker has all of it; else all workers convert it to a tensor, or none.
    """

    dtype: tf.DType
    shards: tuple[Any, ...]
    is_mirrored: bool = True
    is_here: bool = True
    trainable: bool = False

    def value(self) -> tf.Tensor:
        """Returns the value, on the device of the caller."""
        raise NotImplementedError

    def __tf_tensor__(self, dtype: Any = None, name: str | None = None) -> tf.Tensor:
        """Returns the value."""
        return self.value() if dtype is None else tf.cast(self.value(), dtype)

    def __array__(self, dtype: Any = None) -> Any:
        """Returns the value as an array; eagerly."""
        return self.__tf_tensor__(dtype).numpy()

    numpy = __array__

    def raw(self) -> dict[str, tf.Tensor]:
        """Returns what is stored beside the value, by name, without which a run does not go on with the same bits."""
        return {}

    def restore_raw(self, values: Mapping[str, tf.Tensor]) -> None:
        """Sets what is stored to what `raw` returned."""


def unwrap_model(model: Any) -> Any:
    """Returns the model inside a `ModelRunner`; any other model as it is."""
    return model.model if isinstance(model, ModelRunner) else model


def walk(model: Any, path: str = "", *, is_sorted: bool = False) -> Iterator[tuple[str, Any]]:
    """Walks through nested dicts, lists and `tf.Module`s.

    Args:
        model: any of them, or a leaf.
        path: of the model.
        is_sorted: True to visit the attributes of a `tf.Module` by name, else in the order of their assignment.

    Yields:
        The path and the object of each leaf: Keras layers, `ModelRunner`s, variables, and everything else.
    """
    children: Any
    if isinstance(model, Mapping):
        children = model.items()
    elif isinstance(model, (list, tuple)):
        children = enumerate(model)
    elif isinstance(model, tf.Module) and not isinstance(model, keras.Layer):
        children = [
            (name, child)
            for name, child in vars(model).items()
            if name not in model._TF_MODULE_IGNORED_PROPERTIES and not name.startswith("_self_")
        ]
        children = sorted(children, key=lambda item: item[0]) if is_sorted else children
    else:
        yield path, model
        return
    for name, child in children:
        yield from walk(child, f"{path}/{name}" if path else str(name), is_sorted=is_sorted)


def named_variables(model: Any) -> dict[str, Any]:
    """Returns a model's variables by readable paths, as in `encoder/dense/kernel`.

    Args:
        model: a Keras model or layer, a `tf.Module`, or a dict or list of them.

    Returns:
        Path -> `keras.Variable` or `tf.Variable`, each variable once, in a fixed order.
    """
    named: dict[str, Any] = {}
    seen: set[int] = set()
    for path, variable in _walk_variables(model, ""):
        if id(tensorflow_variable(variable)) in seen:
            continue
        seen.add(id(tensorflow_variable(variable)))
        named[_unique(path, named)] = variable
    return named


def _unique(path: str, taken: Container[str]) -> str:
    """Returns a path, or if it is taken, the path with `#2` or a larger number behind it."""
    numbered = (f"{path}#{count}" for count in itertools.count(2))
    return path if path not in taken else next(unique for unique in numbered if unique not in taken)


def _walk_variables(model: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    """Yields the path and the object of each variable, shared ones several times."""
    for path, leaf in walk(model, prefix, is_sorted=True):
        if isinstance(leaf, ModelRunner):
            yield from _walk_variables(leaf.model, path)
        elif isinstance(leaf, keras.Layer):
            # Keras numbers random streams across the process, not by layer; here they count within the model.
            numbers = itertools.count()
            for variable in leaf.variables:
                name = f"seeds/{next(numbers)}" if is_seed(variable) else variable.path
                yield f"{path}/{name}" if path else name, variable
            for _, variable in recurrent_states(leaf):
                yield f"{path}/{variable.path}" if path else variable.path, variable
        elif isinstance(leaf, keras.random.SeedGenerator):
            yield path, leaf.state
        elif isinstance(leaf, (keras.Variable, tf.Variable)):
            yield path, leaf


def recurrent_states(layer: keras.Layer) -> Iterator[tuple[keras.layers.RNN, Any]]:
    """Yields the states that stateful recurrent layers below a layer keep; `layer.variables` has none of them.

    Yields:
        The recurrent layer, and one of its states: a variable `[B, ...]` of its last batch's rows.
    """
    for each in layer._flatten_layers():
        if isinstance(each, keras.layers.RNN) and each.stateful:
            for state in keras.tree.flatten(each.states or []):
                yield each, state


def top_layers(model: Any, *, in_modules: bool = False) -> Iterator[keras.Layer]:
    """Yields the Keras models and layers at the top of a model.

    Args:
        model: as for `named_variables`.
        in_modules: True to yield those of a `ModelRunner`'s modules, else of its model.
    """
    for _, leaf in walk(model):
        if isinstance(leaf, ModelRunner):
            yield from top_layers(leaf.modules if in_modules else leaf.model, in_modules=in_modules)
        elif isinstance(leaf, keras.Layer):
            yield leaf


def layers_by_path(model: Any) -> dict[str, keras.Layer]:
    """Returns all layers of a model by their paths, those within layers included, as in `encoder/attention/query`.

    Args:
        model: as for `named_variables`.

    Returns:
        Path -> layer, each once, as Keras names it; a second layer of one path has `#2` behind it.
    """
    layers = {id(layer): layer for top in top_layers(model) for layer in top._flatten_layers()}
    named: dict[str, keras.Layer] = {}
    for layer in layers.values():
        named[_unique(layer.path or layer.name, named)] = layer
    return named


def count_parameters(model: Any) -> dict[str, int]:
    """Returns the number of parameters of each top-level layer of a model, or of each of several models.

    Args:
        model: as for `named_variables`.

    Returns:
        Name -> number, in order, without layers that have no parameters. Variables outside all layers count under the
        model's own name.
    """
    children: list[tuple[str, Any]] = []
    model = unwrap_model(model)
    if isinstance(model, keras.Model):
        children = [(layer.name, layer) for layer in model.layers]
    elif isinstance(model, (Mapping, list, tuple)):
        items = model.items() if isinstance(model, Mapping) else enumerate(model)
        children = [(str(key), child) for key, child in items]
    elif isinstance(model, tf.Module) and not isinstance(model, keras.Layer):
        children = [(name, child) for name, child in sorted(vars(model).items()) if not name.startswith("_")]
    counts: dict[str, int] = {}
    seen: set[int] = set()
    for name, child in [*children, (getattr(model, "name", "others"), model)]:
        for variable in named_variables(child).values():
            if id(plain := tensorflow_variable(variable)) not in seen and _is_parameter(variable):
                counts[name] = counts.get(name, 0) + int(tf.TensorShape(plain.shape).num_elements() or 0)
            seen.add(id(plain))
    return counts


def summarize(model: Any) -> str:
    """Returns a table of a model's variables: path, shape, dtype, trainable or not, and number of parameters.

    Args:
        model: as for `named_variables`, such as `trainer.model`.

    Returns:
        One line per variable, columns two or more spaces apart, and a line of sums. States of random streams and of
        recurrent layers are left out. A variable that `ModelSpec(trainable=...)` leaves out is not trainable.
    """
    rows = [("variable", "shape", "dtype", "trainable", "parameters")]
    total = trainable = 0
    for path, variable in named_variables(model).items():
        if not _is_parameter(variable):
            continue
        plain = tensorflow_variable(variable)
        count = int(tf.TensorShape(plain.shape).num_elements() or 0)
        shape = " x ".join(map(str, plain.shape)) or "scalar"
        is_trained = variable.trainable and not is_left_out(variable)
        rows.append((path, shape, plain.dtype.name, "yes" if is_trained else "no", f"{count:,}"))
        total += count
        trainable += count if is_trained else 0
    rows.append((f"{len(rows) - 1} variables", "", "", f"{trainable:,}", f"{total:,}"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in rows]
    return "".join("  ".join([*cells[:-1], cells[-1].strip().rjust(widths[-1])]) + "\n" for cells in lines)


def mark_frozen(variables: Iterable[Any], trained: Container[int]) -> list[Any]:
    """Returns the variables that no update of a run trains, and marks each as frozen.

    Args:
        variables: of the model.
        trained: the `id` of those that updates train.
    """
    listed = list(variables)
    for variable in listed:
        setattr(variable, _IS_LEFT_OUT, id(variable) not in trained)
    return [variable for variable in listed if id(variable) not in trained]


def is_left_out(variable: Any) -> bool:
    """Returns whether no update of the run trains a variable, as `mark_frozen` has marked."""
    return bool(getattr(variable, _IS_LEFT_OUT, False))


def digest(model: Any) -> str:
    """Returns the SHA-256 of a model's weights, to compare the bits of runs by eye: 64 characters.

    Every variable counts in the order of the names, with its name, dtype, shape and bytes; random streams and the
    states of recurrent layers do not.

    Args:
        model: as for `named_variables`; of several replicas, the first one's is taken.
    """
    sha256 = hashlib.sha256()
    for name, variable in sorted(portable_names(model).items()):
        if _is_parameter(variable):
            variable = tensorflow_variable(variable)
            value = getattr(variable, "values", [variable])[0].numpy()
            sha256.update(f"{name} {value.dtype.name}{list(value.shape)}\n".encode() + value.tobytes())
    return sha256.hexdigest()


def portable_names(model: Any) -> dict[str, Any]:
    """Returns a model's variables by names that are the same in every process that creates the same model.

    Args:
        model: as for `named_variables`.

    Returns:
        Name -> variable, in the same order.
    """
    variables = named_variables(model)
    layers = [layer for top in top_layers(model) for layer in top._flatten_layers()]
    numbered = {to_snake_case(type(layer).__name__) for layer in layers}
    counted: dict[tuple[str, str], dict[str, str]] = defaultdict(dict)  # (scope, kind) -> name -> portable name
    portable: dict[str, Any] = {}
    for path, variable in variables.items():
        scope = ""
        for name in path.split("/"):
            kind = re.sub(r"_\d+$", "", name)
            if re.sub("^(forward|backward)_", "", kind) in numbered:  # the prefixes are those of Bidirectional
                known = counted[scope, kind]
                name = known.setdefault(name, f"{kind}_{len(known)}" if known else kind)
            scope = f"{scope}/{name}" if scope else name
        portable[scope] = variable
    assert len(portable) == len(variables), sorted(variables)
    return dict(zip(count_unnamed(portable).values(), portable.values(), strict=True))


def count_unnamed(names: Iterable[str]) -> dict[str, str]:
    """Returns names in which variables that were made without a name count within their layer.

    Keras names them `variable_<n>`, where n counts all that the process has made.

    Args:
        names: of all variables of a model, portable but for these; names that this function returned stay as they are.

    Returns:
        Name -> the name with another number, in the same order: 0, which is left out, is the variable made first.
    """
    counted = {name: name for name in names}
    unnamed = [(match[1], int(match[2] or 0), match[0]) for name in counted if (match := _UNNAMED.fullmatch(name))]
    for scope, of_scope in itertools.groupby(sorted(unnamed), lambda item: item[0]):
        for position, (_, _, name) in enumerate(of_scope):
            counted[name] = f"{scope}variable" + (f"_{position}" if position else "")
    return counted


def slot_names(optimizer: keras.optimizers.Optimizer, variables: Sequence[Any], names: Sequence[str]) -> dict[str, Any]:
    """Returns an optimizer's variables by the names of the trained variables, not by position.

    Args:
        optimizer: built with `variables`.
        variables: the trained variables.
        names: their names.

    Returns:
        `momentum/<name>`, `iteration`, ... -> variable.
    """
    by_prefix: dict[str, list[str]] = defaultdict(list)  # Keras's prefix of a slot's name -> names
    for variable, name in zip(variables, names, strict=True):
        path = variable.path if hasattr(variable, "path") else str(variable.name).replace(":", "_")
        by_prefix[path.replace("/", "_") + "_"].append(name)
    named: dict[str, Any] = {}
    for slot in optimizer.variables:
        name = slot.path.rpartition("/")[2]
        name = "variable" if _UNNAMED.fullmatch(name) else name  # as of Nadam: Keras counts all of the process
        prefix = max((p for p in by_prefix if name.startswith(p)), key=len, default="")
        # Variables of the same name have their slots in the same order. Adafactor's have the bare name of a variable.
        owners = (f"{name.removeprefix(prefix)}/{owner}" for owner in by_prefix[prefix])
        others = (f"{name}_{i}" if i else name for i in itertools.count())
        named[next(free for free in itertools.chain(owners, others) if free not in named)] = slot
    return named


def tensorflow_variable(variable: Any) -> Any:
    """Returns the TensorFlow variable of a Keras variable; any other variable as it is."""
    # Private: in a `keras.StatelessScope`, `value` is the scope's.
    return variable._value if isinstance(variable, keras.Variable) else variable


def is_seed(variable: Any) -> bool:
    """Returns whether a variable is the state of a random stream."""
    return "seed_generator_state" in getattr(variable, "path", "") and tuple(variable.shape) == (2,)


def _is_parameter(variable: Any) -> bool:
    """Returns whether a variable belongs to the model's size: it is no state of a random stream or recurrent layer."""
    return not is_seed(variable) and not getattr(variable, "path", "").endswith("/rnn_state")

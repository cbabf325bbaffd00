"""Owns the names of variables: readable paths for people, and portable ones for files.

    named_variables(model)       # {"encoder/dense_4/kernel": variable, ...}, as Keras calls them
    portable_names(model)        # {"encoder/dense/kernel": variable, ...}, the same in every process

Keras numbers layers without a name through the process, so a path may be another one in the next; portable names count
within the model. It does not know what is saved or trained.
"""

import itertools
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf


class Arrangement:
    """What says how a model runs, and adds nothing to it: names are those in the model.

    Attributes:
        whole: the model, as for `named_variables`.
    """

    whole: Any


def arranged(model: Any) -> Any:
    """Gives the model itself, where there is an `Arrangement` around it."""
    return model.whole if isinstance(model, Arrangement) else model


def named_variables(model: Any) -> dict[str, Any]:
    """Finds a model's variables by readable paths: `encoder/dense/kernel`.

    Args:
        model: a Keras model or layer, a `tf.Module`, or a dict or list of them.

    Returns:
        Path -> `keras.Variable` or `tf.Variable`, each variable once, in a fixed order.
    """
    named: dict[str, Any] = {}
    seen: set[int] = set()
    for path, variable in _walk(model, ""):
        if id(tensorflow_variable(variable)) in seen:
            continue
        seen.add(id(tensorflow_variable(variable)))
        unique, count = path, 2
        while unique in named:
            unique, count = f"{path}#{count}", count + 1
        named[unique] = variable
    return named


def _walk(node: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    def joined(name: Any) -> str:
        return f"{prefix}/{name}" if prefix else str(name)

    node = arranged(node)
    if isinstance(node, keras.Layer):
        # Keras numbers random streams through the process, not by layer; their order in the model is what lasts.
        numbers = itertools.count()
        for variable in node.variables:
            yield joined(f"seeds/{next(numbers)}" if is_seed(variable) else variable.path), variable
    elif isinstance(node, keras.random.SeedGenerator):
        yield prefix, node.state
    elif isinstance(node, keras.Variable):
        yield prefix, node
    elif isinstance(node, tf.Variable):
        yield prefix, node
    elif isinstance(node, Mapping):
        for key in node:
            yield from _walk(node[key], joined(key))
    elif isinstance(node, (list, tuple)):
        for i, child in enumerate(node):
            yield from _walk(child, joined(i))
    elif isinstance(node, tf.Module):
        for name in sorted(vars(node)):
            if name not in node._TF_MODULE_IGNORED_PROPERTIES and not name.startswith("_self_"):
                yield from _walk(vars(node)[name], joined(name))


def count_parameters(model: Any) -> dict[str, int]:
    """Counts a model's parameters by its top-level layers; of several models, by model.

    Args:
        model: as for `named_variables`.

    Returns:
        Name -> how many, in order; parts without any are left out, and what is in no layer has the model's own name.
    """
    parts: list[tuple[str, Any]] = []
    model = arranged(model)
    if isinstance(model, keras.Model):
        parts = [(layer.name, layer) for layer in model.layers]
    elif isinstance(model, (Mapping, list, tuple)):
        items = model.items() if isinstance(model, Mapping) else enumerate(model)
        parts = [(str(key), child) for key, child in items]
    elif isinstance(model, tf.Module) and not isinstance(model, keras.Layer):
        parts = [(name, child) for name, child in sorted(vars(model).items()) if not name.startswith("_")]
    counts: dict[str, int] = {}
    seen: set[int] = set()
    for name, part in [*parts, (getattr(model, "name", "others"), model)]:
        for variable in named_variables(part).values():
            plain = tensorflow_variable(variable)
            if id(plain) not in seen and not is_seed(variable):
                counts[name] = counts.get(name, 0) + int(tf.TensorShape(plain.shape).num_elements() or 0)
            seen.add(id(plain))
    return counts


def summarize(model: Any) -> str:
    """Lists a model's variables in a table: path, shape, dtype, whether it is trainable, and how many numbers it holds.

    Args:
        model: as for `named_variables`, such as `trainer.model`.

    Returns:
        A line a variable, columns two spaces or more apart, and a line of sums. Places in random streams are left out.
    """
    rows = [("variable", "shape", "dtype", "trainable", "parameters")]
    total = trainable = 0
    for path, variable in named_variables(model).items():
        if is_seed(variable):
            continue
        plain = tensorflow_variable(variable)
        count = int(tf.TensorShape(plain.shape).num_elements() or 0)
        shape = " x ".join(map(str, plain.shape)) or "scalar"
        rows.append((path, shape, plain.dtype.name, "yes" if variable.trainable else "no", f"{count:,}"))
        total += count
        trainable += count if variable.trainable else 0
    rows.append((f"{len(rows) - 1} variables", "", "", f"{trainable:,}", f"{total:,}"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in rows]
    return "".join("  ".join([*cells[:-1], cells[-1].strip().rjust(widths[-1])]) + "\n" for cells in lines)


def portable_names(model: Any) -> dict[str, Any]:
    """Names a model's variables alike in every process that makes the same model.

    Args:
        model: as for `named_variables`.

    Returns:
        Name -> variable, in the same order.
    """
    variables = named_variables(model)
    numbered = {_snake_case(type(layer).__name__) for layer in _all_layers(model)}
    counted: dict[tuple[str, str], dict[str, str]] = defaultdict(dict)  # (scope, kind) -> name -> portable name
    portable: dict[str, Any] = {}
    for path, variable in variables.items():
        scope = ""
        for part in path.split("/"):
            kind = re.sub(r"_\d+$", "", part)
            if kind in numbered:
                known = counted[scope, kind]
                part = known.setdefault(part, f"{kind}_{len(known)}" if known else kind)
            scope = f"{scope}/{part}" if scope else part
        portable[scope] = variable
    assert len(portable) == len(variables), sorted(variables)
    return portable


def slot_names(optimizer: keras.optimizers.Optimizer, variables: Sequence[Any], names: Sequence[str]) -> dict[str, Any]:
    """Names an optimizer's variables by what they belong to, not by their position.

    Args:
        optimizer: built with `variables`.
        variables: what it trains.
        names: of these.

    Returns:
        `momentum/<name>`, `iteration`, ... -> variable.
    """
    by_prefix: dict[str, list[str]] = defaultdict(list)  # as Keras begins the name of a slot
    for variable, name in zip(variables, names, strict=True):
        path = variable.path if hasattr(variable, "path") else str(variable.name).replace(":", "_")
        by_prefix[path.replace("/", "_") + "_"].append(name)
    named: dict[str, Any] = {}
    for slot in optimizer.variables:
        name = slot.path.rpartition("/")[2]
        prefix = max((p for p in by_prefix if name.startswith(p)), key=len, default="")
        # Variables that share a name have their slots in the same order.
        owners = [f"{name.removeprefix(prefix)}/{owner}" for owner in by_prefix[prefix]] if prefix else [name]
        free = next((owner for owner in owners if owner not in named), None)
        assert free is not None, f"the optimizer has two variables called {name}"
        named[free] = slot
    return named


def tensorflow_variable(variable: Any) -> Any:
    """Gives the TensorFlow variable of a Keras one."""
    return variable.value if isinstance(variable, keras.Variable) else variable


def is_seed(variable: Any) -> bool:
    """Says whether a variable is the place in a stream of random numbers."""
    return "seed_generator_state" in getattr(variable, "path", "") and tuple(variable.shape) == (2,)


def _all_layers(model: Any) -> Iterator[keras.Layer]:
    """Finds every layer in a model, at any depth."""
    model = arranged(model)
    if isinstance(model, keras.Layer):
        yield from model._flatten_layers()
    elif isinstance(model, Mapping):
        for child in model.values():
            yield from _all_layers(child)
    elif isinstance(model, (list, tuple)):
        for child in model:
            yield from _all_layers(child)
    elif isinstance(model, tf.Module):
        for name, child in vars(model).items():
            if name not in model._TF_MODULE_IGNORED_PROPERTIES:
                yield from _all_layers(child)


def _snake_case(name: str) -> str:
    """Spells a class as Keras does in the name of a layer."""
    name = re.sub("(.)([A-Z][a-z]+)", r"\1_\2", re.sub(r"\W+", "", name))
    return re.sub("([a-z])([A-Z])", r"\1_\2", name).lower()

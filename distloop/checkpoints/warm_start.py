r"""Owns the start from other weights: of another run, a Keras file, or any TensorFlow checkpoint.

    report = warm_start(state, "runs/first")                                        # all that fits
    report = warm_start(state, "bert.keras", r"^encoder/(.*)=>backbone/encoder/\1")  # a part, under other names

Only the model's weights are taken: the optimizer and all counts begin anew. Nothing is changed unless every variable
that is taken fits. It does not know how a run goes on; that is resuming.
"""

import os
import re
from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf

from distloop.checkpoints.store import Checkpoints, load
from distloop.training.state import TrainState
from distloop.variables import is_seed, portable_names, tensorflow_variable

_SUFFIX = "/.ATTRIBUTES/VARIABLE_VALUE"  # of names in a checkpoint of TensorFlow's objects


def warm_start(state: TrainState, path: str, rename: str = "") -> str:
    """Sets weights of a model to those in a file, by name.

    Args:
        state: of a model that is built.
        path: a workdir or a checkpoint of distloop, a `.keras` file, a `.weights.h5` file of a Keras model like this
            one, or the prefix of a TensorFlow checkpoint.
        rename: `PATTERN=>REPLACEMENT`: takes the file's names in which the regular expression is found, and replaces
            what it found; empty: takes all names as they are.

    Returns:
        What was taken, what the file lacks, and what of it was not used.

    Raises:
        ValueError: if the file cannot be read, a name occurs twice after renaming, nothing matches, or shapes differ.
    """
    names = portable_names(state.model)
    seeds = {name for name, v in names.items() if is_seed(v)}  # each replica's stream goes on from its own place
    here = {name: v for name, v in names.items() if name not in seeds}
    there = {name: v for name, v in _renamed(_read(path, state.model), rename, path).items() if name not in seeds}
    matched = [name for name in here if name in there]
    if not matched:
        raise ValueError(
            f"init_from={path!r} holds no variable of the model: it has {_some(there)}, the model {_some(here)}; give "
            "init_rename='PATTERN=>REPLACEMENT' to make the names equal."
        )
    different = [
        f"{name} is {list(there[name].shape)} there and {list(here[name].shape)} here"
        for name in matched
        if tuple(there[name].shape) != tuple(here[name].shape)
    ]
    if different:
        more = f" and {len(different) - 3} more" if len(different) > 3 else ""
        raise ValueError(
            f"init_from={path!r} has other shapes ({'; '.join(different[:3])}{more}) and nothing was taken: leave "
            "those names out with init_rename, or make the model as it was."
        )
    with state.strategy.scope():
        for name in matched:
            variable = tensorflow_variable(here[name])
            variable.assign(tf.cast(there[name], variable.dtype))
        if state.average is not None:
            state.average.start()
    missing, unused = [n for n in here if n not in there], [n for n in there if n not in here]
    report = f"{len(matched)} of {len(here)} variables start from {path}"
    report += f"; it lacks {_some(missing)}" if missing else ""
    return report + (f"; not used of it: {_some(unused)}" if unused else "")


def _read(path: str, model: Any) -> Mapping[str, Any]:
    """Reads a file's weights by name."""
    try:
        if path.endswith(".keras"):
            loaded = portable_names(keras.models.load_model(path, compile=False))
            values = {name: v.numpy() for name, v in loaded.items() if not is_seed(v)}
            here = [name for name, v in portable_names(model).items() if not is_seed(v)]
            if not set(values) & set(here):  # Keras leaves a model's own name out of the paths of one it has loaded
                root = here[0].partition("/")[0]
                values = {f"{root}/{name}": value for name, value in values.items()}
            return values
        if path.endswith(".weights.h5"):
            if not isinstance(model, keras.Model):
                raise ValueError("a .weights.h5 file has the names of one Keras model alone")
            other = keras.models.clone_model(model)
            other.load_weights(path)
            # Layers of the clone stand where the model's do, so its weights have their names.
            return dict(zip(portable_names(model), [v.numpy() for v in portable_names(other).values()], strict=True))
        if os.path.isdir(path):
            is_one = os.path.exists(os.path.join(path, "manifest.json"))
            saved = load(path) if is_one else Checkpoints(os.path.join(path, "checkpoints")).load_newest()
            if saved is None:
                raise ValueError("there is no checkpoint in it")
            prefix = "model/"
            return {name.removeprefix(prefix): v for name, v in saved.values.items() if name.startswith(prefix)}
        reader = tf.train.load_checkpoint(path)
        names = [name for name, dtype in reader.get_variable_to_dtype_map().items() if dtype != tf.string]
        return {name.removesuffix(_SUFFIX): reader.get_tensor(name) for name in sorted(names)}
    except (OSError, ValueError, TypeError, tf.errors.OpError) as error:
        message = error.message if isinstance(error, tf.errors.OpError) else str(error)
        what = (message.strip().splitlines() or [type(error).__name__])[0][:200].rstrip(" .:")
        raise ValueError(
            f"init_from={path!r} cannot be read ({what}): give a workdir, a checkpoint's directory, a .keras or "
            ".weights.h5 file, or the prefix of a TensorFlow checkpoint."
        ) from error


def _renamed(values: Mapping[str, Any], rename: str, path: str) -> dict[str, Any]:
    if not rename:
        return dict(values)
    pattern, arrow, replacement = rename.partition("=>")
    try:
        expression = re.compile(pattern)
        renamed: dict[str, Any] = {}
        for name, value in values.items():
            if expression.search(name):
                new = expression.sub(replacement, name) if arrow else name
                if new in renamed:
                    raise ValueError(
                        f"init_rename={rename!r} gives two variables of {path!r} the name {new!r}: correct it."
                    )
                renamed[new] = value
    except re.error as error:
        raise ValueError(
            f"init_rename={rename!r} is no regular expression ({error}): give PATTERN or PATTERN=>REPLACEMENT."
        ) from None
    return renamed


def _some(names: Any) -> str:
    names = list(names)
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")

r"""Warm start: restores weights from another run, a Keras file, or any TensorFlow checkpoint.

    summary = warm_start(state, "runs/first")                                        # every variable in it
    summary = warm_start(state, "bert.keras", r"^encoder/(.*)=>backbone/encoder/\1")  # a part, under other names

Only the model's weights are set; the optimizer and all counters start anew. Nothing changes unless the shapes of all
variables fit.
"""

import os
import re
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from distloop.checkpoints.checkpoint import is_checkpoint, load, plain_path
from distloop.checkpoints.loading import NoBestError, best_step
from distloop.checkpoints.store import BEST_FILE, Checkpoints, in_workdir
from distloop.errors import first_line
from distloop.model.state import TrainState
from distloop.urls import is_url
from distloop.variables import WEIGHT_FILES, count_unnamed, is_seed, portable_names, tensorflow_variable
from distloop.workdir.directory import local_copy

_SUFFIX = "/.ATTRIBUTES/VARIABLE_VALUE"  # of names in a checkpoint of `tf.train.Checkpoint`


def warm_start(state: TrainState, path: str, rename: str = "", given: str = "") -> str:
    """Sets a model's weights to those in a file, by name.

    Args:
        state: of a built model.
        path: a workdir, of which the newest checkpoint counts; its `checkpoints/best.json`: the best one; a checkpoint
            of distloop, an `.npz` or `.safetensors` file of `Trainer.export`, a `.keras` file, a `.weights.h5` file of
            a Keras model like this one, or the prefix of a TensorFlow checkpoint.
        rename: `PATTERN=>REPLACEMENT`: takes the variables whose names match the regular expression, and replaces the
            match; empty: takes all variables under their own names.
        given: how the user gave the path, for sentences; empty: as `init_from`.

    Returns:
        A summary: how many variables were set, which the file lacks, and which of the file's were not used.

    Raises:
        ValueError: if the model is not built, the file cannot be read, a name occurs twice after renaming, nothing
            matches, shapes differ, or the model lacks a variable of an `.npz` file.
    """
    given = given or f"init_from={path!r}"
    if not state.is_built:
        raise ValueError(
            f"{given} sets the weights of a model that is not built yet: call trainer.build(dataset) first, or give "
            "the model an input shape."
        )
    variables = {name: v for name, v in portable_names(state.model).items() if not is_seed(v)}
    seeds = portable_names(state.model).keys() - variables.keys()  # each random stream goes on from its position
    read = _renamed(_read(path, state.model, given), rename, path)
    values = {name: v for name, v in read.items() if name not in seeds}
    matched = [name for name in variables if name in values]
    if not matched:
        raise ValueError(
            f"{given} holds no variable of the model: it has {_some(values)}, the model {_some(variables)}; "
            "give init_from and init_rename='PATTERN=>REPLACEMENT' to make the names equal."
        )
    different = [
        f"{name} is {list(values[name].shape)} there and {list(variables[name].shape)} here"
        for name in matched
        if tuple(values[name].shape) != tuple(variables[name].shape)
    ]
    if different:
        more = f" and {len(different) - 3} more" if len(different) > 3 else ""
        raise ValueError(
            f"{given} has other shapes ({'; '.join(different[:3])}{more}) and nothing was taken: leave "
            "those names out with init_rename, or make the model as it was."
        )
    missing, unused = [n for n in variables if n not in values], [n for n in values if n not in variables]
    if unused and path.endswith(WEIGHT_FILES):  # a model without its adapters would be the frozen one
        raise ValueError(
            f"{path!r} holds {_some(unused)}, which the model lacks, and nothing was taken: make the model as in the "
            "run that wrote the file, enable_lora included, or select names with init_rename."
        )
    with state.strategy.scope():
        for name in matched:
            variable = tensorflow_variable(variables[name])
            variable.assign(tf.cast(values[name], variable.dtype))
        state.start_slots()
    summary = f"{len(matched)} of {len(variables)} variables start from {path}"
    summary += f"; it lacks {_some(missing)}" if missing else ""
    return summary + (f"; not used of it: {_some(unused)}" if unused else "")


def _read(path: str, model: Any, given: str) -> Mapping[str, Any]:
    """Returns a file's weights by name."""
    try:
        with local_copy(path) as local:
            return _read_local(local, model)
    except Exception as error:  # each package has errors of its own for a damaged file
        why = str(error).rstrip(".") if isinstance(error, NoBestError) else first_line(error)
        again = "start again when it can be reached, or " if is_url(path) and isinstance(error, OSError) else ""
        raise ValueError(
            f"{given} cannot be read ({why}): {again}give a workdir, a checkpoint's directory, a "
            ".keras, .weights.h5, .npz or .safetensors file, or the prefix of a TensorFlow checkpoint."
        ) from error


def _read_local(path: str, model: Any) -> Mapping[str, Any]:
    if path.endswith(".keras"):
        return _read_keras_file(path, model)
    if path.endswith(".weights.h5"):
        return _read_weights_file(path, model)
    if path.endswith(".npz"):
        with np.load(path) as file:
            return {name: file[old] for old, name in count_unnamed(file.files).items()}
    if path.endswith(".safetensors"):
        try:
            from safetensors.numpy import load_file
        except ImportError:
            raise ValueError("the package safetensors is missing: pip install safetensors") from None
        read = load_file(path)
        return {name: read[old] for old, name in count_unnamed(list(read)).items()}
    if os.path.basename(path) == BEST_FILE:
        directory = os.path.dirname(path)
        return _read_checkpoint(os.path.join(directory, str(best_step(Checkpoints(directory)))))
    if os.path.isdir(path):
        return _read_checkpoint(path)
    with plain_path(os.path.dirname(path) or ".") as plain:
        reader = tf.train.load_checkpoint(os.path.join(plain, os.path.basename(path)))
        names = [name for name, dtype in reader.get_variable_to_dtype_map().items() if dtype != tf.string]
        return {name.removesuffix(_SUFFIX): reader.get_tensor(name) for name in sorted(names)}


def _read_keras_file(path: str, model: Any) -> Mapping[str, Any]:
    loaded = portable_names(keras.models.load_model(path, compile=False))
    values = {name: v.numpy() for name, v in loaded.items() if not is_seed(v)}
    names = [name for name, v in portable_names(model).items() if not is_seed(v)]
    if not set(values) & set(names):  # Keras leaves the name of a model that it has loaded out of the variables' paths
        values = {f"{names[0].partition('/')[0]}/{name}": value for name, value in values.items()}
    return values


def _read_weights_file(path: str, model: Any) -> Mapping[str, Any]:
    if not isinstance(model, keras.Model):
        raise ValueError("a .weights.h5 file has the names of one Keras model alone")
    clone = keras.models.clone_model(model)
    clone.load_weights(path)
    # The clone's layers are in the model's order, so its weights get the model's names.
    return dict(zip(portable_names(model), [v.numpy() for v in portable_names(clone).values()], strict=True))


def _read_checkpoint(path: str) -> Mapping[str, Any]:
    saved = load(path) if is_checkpoint(path) else in_workdir(path).load_newest()
    if saved is None:
        raise ValueError("there is no checkpoint in it")
    return {name.removeprefix("model/"): v for name, v in saved.values.items() if name.startswith("model/")}


def _renamed(values: Mapping[str, Any], rename: str, path: str) -> dict[str, Any]:
    """Returns the values whose names match the pattern of `rename`, under their new names."""
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

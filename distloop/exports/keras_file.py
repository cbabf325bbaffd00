"""Keras files: writes the model as one `.keras` file, without optimizer and losses.

    write_keras_file(state, "model.keras")

The file is written with the averaged weights if there are any and with LoRA adapters merged, read back and compared
before it takes its name. It loads without distloop.
"""

import contextlib
import os
import random
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import keras
import tensorflow as tf

from distloop.errors import cause
from distloop.exports.export import call_on_ones, merged, output_difference, prepare_path, quiet_logging, writing
from distloop.model.state import TrainState
from distloop.variables import tensorflow_variable, unwrap_model


def write_keras_file(state: TrainState, path: str) -> None:
    """Writes a `.keras` file, with the averaged weights if there are any; whole or not at all.

    Args:
        state: of one built Keras model.
        path: ends with `.keras`; an existing file is replaced when the new one is whole.

    Raises:
        ValueError: if a file cannot hold this model, a directory is in the way, or the file cannot be read back or has
            other weights or outputs than the model.
    """
    model = unwrap_model(state.model)
    _require_keras(model)
    if not state.is_built:
        raise ValueError(
            f"The model {model.name!r} is not built, so it has no weights to write: call fit, evaluate or predict with "
            "a dataset before export, or give it an input shape."
        )
    path = prepare_path(path, state.strategy)
    if os.path.isdir(path):
        raise ValueError(f"{path!r} is a directory; a Keras model is a file: remove it, or give another path.")
    with (
        writing(path, state.strategy, ".keras") as temporary,
        state.averaged(),
        merged(model) as left_out,
        quiet_logging(),
    ):
        try:
            with _uncompiled(model):
                keras.saving.save_model(model, temporary)
            with _python_random_kept():
                copy = keras.models.load_model(temporary)
        except OSError:  # of the disk, not of the model
            raise
        except Exception as error:  # Keras raises whatever a layer's code does
            raise ValueError(
                f"The model {model.name!r} cannot be written and read back ({cause(error)}): decorate layers and "
                "functions of your own with @keras.saving.register_keras_serializable(), give them a get_config, and "
                "use no lambda."
            ) from error
        _compare_weights(model, copy, left_out)
        with state.random_streams.preserved():
            _compare_outputs(model, copy)


def _require_keras(model: Any) -> None:
    """Raises ValueError unless there is exactly one Keras model."""
    models: Mapping[Any, Any] = {}
    if isinstance(model, Mapping):
        models = model
    elif isinstance(model, (list, tuple)):
        models = dict(enumerate(model))
    if models and all(isinstance(one, keras.Model) for one in models.values()):
        raise ValueError(
            f"A .keras file holds one model, and there is a {type(model).__name__} of {len(models)}, each to be saved "
            f"by itself: with trainer.state.averaged(): trainer.model[{next(iter(models))!r}].save('path.keras')."
        )
    if not isinstance(model, keras.Model):
        raise ValueError(
            f"A .keras file holds a Keras model, and the model is a {type(model).__name__}, no keras.Model: give a "
            "path without .keras, for a SavedModel of predict_fn."
        )


@contextlib.contextmanager
def _uncompiled(model: keras.Model) -> Iterator[None]:
    """Hides optimizer and losses: serving does not need them, and they may refer to unregistered functions."""
    if not model.compiled:
        yield
        return
    optimizer, model.optimizer, model.compiled = model.optimizer, None, False
    try:
        yield
    finally:
        model.optimizer, model.compiled = optimizer, True


@contextlib.contextmanager
def _python_random_kept() -> Iterator[None]:
    """Restores Python's random state: Keras draws seeds from it for the layers that it makes."""
    before = random.getstate()
    try:
        yield
    finally:
        random.setstate(before)


def _compare_weights(model: keras.Model, copy: keras.Model, left_out: Collection[int]) -> None:
    """Raises ValueError unless a copy has the weights of the model, but for those left out, bit for bit."""
    weights = [weight for weight in model.weights if id(tensorflow_variable(weight)) not in left_out]
    names = [weight.path for weight in weights]
    expected, actual = ([weight.numpy() for weight in one] for one in (weights, copy.weights))
    if len(actual) != len(expected):
        wrong = f"{len(actual)} instead of {len(expected)}"
    elif different := [
        name
        for name, a, b in zip(names, actual, expected, strict=True)
        if (a.shape, a.dtype) != (b.shape, b.dtype) or a.tobytes() != b.tobytes()
    ]:
        wrong = ", ".join(different[:3])
    else:
        return
    raise ValueError(
        f"The model {model.name!r}, written and read back, has other weights ({wrong}): make all of its layers and "
        "variables in __init__ or build, where Keras finds them."
    )


def _compare_outputs(model: keras.Model, copy: keras.Model) -> None:
    """Raises ValueError if a copy has other outputs than the model; skipped if the model's inputs are unknown."""
    # Only a Sequential has no `input` before it was called by itself; it has one input.
    specs = model.inputs[0] if isinstance(model, keras.Sequential) else getattr(model, "input", None)
    if specs is None or (example := call_on_ones(model, specs, f"the model {model.name!r}")) is None:
        return
    examples, outputs = example
    expected, again, actual = (tf.nest.flatten(value) for value in (outputs, model(examples), copy(examples)))
    if any(output_difference(a, b) for a, b in zip(again, expected, strict=True)):
        return  # the model draws random numbers when it predicts, and a file does not hold the state of its streams
    if difference := max(output_difference(a, b) for a, b in zip(actual, expected, strict=True)):
        raise ValueError(
            f"The model {model.name!r}, written and read back, gives other outputs, by up to {difference:.3g}: let the "
            "get_config of layers of your own return every argument of __init__."
        )

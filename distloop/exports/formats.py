"""Formats: chooses the format by the suffix of the path; writes trained weights and TFLite files.

    write_export(state, predictor, element_spec, "model.keras", keep_dtypes=False)

`.npz` holds what training changes, by name: a few per cent of a model with adapters; `warm_start` reads it. A TFLite
file is a SavedModel with weights of 8 bits and activations of floating point, for phones and small computers.
"""

import os
import pathlib
import tempfile
import warnings
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from distloop.comparison import relative_difference
from distloop.distributed import workers
from distloop.evaluation.prediction import DEFAULT_SIGNATURE, Predictor
from distloop.exports.export import call_on_ones, layers_of, prepare_path, writing
from distloop.exports.keras_file import write_keras_file
from distloop.exports.saved_model import write_saved_model
from distloop.model.state import TrainState
from distloop.variables import portable_names

_TOLERANCE = 0.1  # of the outputs' norm; rounding to 8 bits changes them by a per cent or so


def write_export(state: TrainState, predictor: Predictor, element_spec: Any, path: str, keep_dtypes: bool) -> None:
    """Writes a Keras file, an `.npz` file of the trained weights, a TFLite file, or else a SavedModel.

    Args:
        state: holds the weights.
        predictor: has the functions to serve; Keras and `.npz` files need none.
        element_spec: of a batch.
        path: with the suffix.
        keep_dtypes: whether outputs keep their dtype; Keras files return what the layers return.

    Raises:
        ValueError: as the function of the format.
    """
    suffix = pathlib.Path(path).suffix
    if suffix == ".keras":
        write_keras_file(state, path)
    elif suffix == ".npz":
        _write_trained_weights(state, path)
    elif suffix != ".tflite":
        write_saved_model(state, predictor.predict_fns, element_spec, path, keep_dtypes)
    else:
        path = prepare_path(path, state.strategy)
        if os.path.isdir(path):
            raise ValueError(f"{path!r} is a directory; a TFLite model is a file: remove it, or give another path.")
        with tempfile.TemporaryDirectory() as directory, writing(path, state.strategy, suffix) as temporary:
            saved_model = os.path.join(directory, "saved_model")
            write_saved_model(state, predictor.predict_fns, element_spec, saved_model, keep_dtypes)
            if workers.is_chief(state.strategy):
                pathlib.Path(temporary).write_bytes(_as_tflite(saved_model))


def _as_tflite(saved_model: str) -> bytes:
    """Returns a SavedModel as the content of a `.tflite` file, which has been compared with it.

    Raises:
        ValueError: if it cannot be converted or run, or has other outputs.
    """
    signatures = tf.saved_model.load(saved_model).signatures
    served = signatures[DEFAULT_SIGNATURE]
    converter = tf.lite.TFLiteConverter.from_saved_model(saved_model, signature_keys=list(signatures))
    converter.optimizations = [tf.lite.Optimize.DEFAULT]
    example = call_on_ones(lambda entries: served(**entries), served.structured_input_signature[1], "the model")
    try:
        content: bytes = converter.convert()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the interpreter's move to a package of its own
            interpreter = tf.lite.Interpreter(model_content=content)
        runner = interpreter.get_signature_runner(DEFAULT_SIGNATURE)
        outputs = runner(**{name: entry.numpy() for name, entry in example[0].items()}) if example else {}
    except Exception as error:  # whatever the converter or the interpreter raises about an operation
        reason = " ".join(str(error).split())[:200]
        raise ValueError(
            f"TensorFlow Lite cannot hold this model ({reason}): export a SavedModel, a path without .tflite."
        ) from error
    for name, output in outputs.items():
        difference = relative_difference(output, example[1][name].numpy()) if example else 0.0
        if not difference <= _TOLERANCE:
            raise ValueError(
                f"The quantized model returns other values of {name!r} than the model, by {difference:.2g} of their "
                "norm: export a SavedModel, a path without .tflite."
            )
    return content


def _write_trained_weights(state: TrainState, path: str) -> None:
    """Writes the variables that training changes to an `.npz` file, by name; whole or not at all.

    They are averaged if there are averages. The file holds the statistics of BatchNormalization layers, too, unless
    these are frozen.

    Args:
        state: of a built model.
        path: ends with `.npz`; an existing file is replaced.

    Raises:
        ValueError: if the model is not built, or a directory is in the way.
    """
    if not state.is_built:
        raise ValueError(
            "The model is not built, so it has no weights to write: call fit, evaluate or predict with a dataset "
            "before export, or give it an input shape."
        )
    path = prepare_path(path, state.strategy)
    if os.path.isdir(path):
        raise ValueError(f"{path!r} is a directory; trained weights are a file: remove it, or give another path.")
    changed = {id(variable) for variables in state.variables_of_update.values() for variable in variables}
    with state.frozen:
        for layer in layers_of(state.model):
            if isinstance(layer, keras.layers.BatchNormalization) and layer.trainable:
                changed |= {id(v) for v in layer.non_trainable_variables}
    with writing(path, state.strategy, ".npz") as temporary, state.averaged():
        names = portable_names(state.model)
        np.savez(temporary, **{name: _portable(v.numpy()) for name, v in names.items() if id(v) in changed})


def _portable(value: np.ndarray) -> Any:
    """Returns an array that NumPy reads back: bfloat16 and others that it does not know become float32, exactly."""
    return value.astype(np.float32) if value.dtype.kind == "V" else value

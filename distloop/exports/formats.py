"""Formats: the one that the suffix of an export's path names.

    write_export(state, predictor, element_spec, "model.keras", keep_dtypes=False)

It does not know how a format is written.
"""

import pathlib
from typing import Any

from distloop.exports.adapters import write_trained_weights
from distloop.exports.keras_file import write_keras_file
from distloop.exports.saved_model import write_saved_model
from distloop.exports.tflite_file import write_tflite_file
from distloop.training.prediction import Predictor
from distloop.training.state import TrainState


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
        write_trained_weights(state, path)
    else:
        write_served = write_tflite_file if suffix == ".tflite" else write_saved_model
        write_served(state, predictor.predict_fns, element_spec, path, keep_dtypes)

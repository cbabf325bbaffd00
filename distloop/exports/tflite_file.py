"""TFLite files: `predict_fn` as one quantized `.tflite` file, for phones and small computers.

    write_tflite_file(state, {"serving_default": predict_fn}, element_spec, "model.tflite")

Weights become 8-bit integers and activations stay floating-point (dynamic-range quantization), which needs no examples.
The file is run and compared with the model before it takes its name.
"""

import os
import tempfile
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from distloop.comparison import relative_difference
from distloop.distributed import workers
from distloop.errors import first_line
from distloop.exports.export import prepare_path, writing
from distloop.exports.saved_model import write_saved_model
from distloop.training.prediction import DEFAULT_SIGNATURE
from distloop.training.state import TrainState

# Sizes to try for free axes: one that filters fit in, and others for models with a longest or shortest row.
_FREE_SIZES = (32, 256, 2)
_TOLERANCE = 0.1  # of the outputs' norm; rounding to 8 bits changes them by a per cent or so


def write_tflite_file(
    state: TrainState,
    predict_fns: Mapping[str, Callable[[Any], Any]],
    element_spec: Any,
    path: str,
    keep_dtypes: bool = False,
) -> None:
    """Writes a `.tflite` file with a signature for each function, with the averaged weights if there are any.

    Args:
        state: holds the weights.
        predict_fns: as for `write_saved_model`.
        element_spec: as for `write_saved_model`.
        path: ends with `.tflite`; an existing file is replaced when the new one is whole.
        keep_dtypes: as for `write_saved_model`.

    Raises:
        ValueError: as `write_saved_model`, or if TensorFlow Lite lacks an operation of the model, or the file gives
            other outputs than the model.
    """
    path = prepare_path(path, state.strategy)
    if os.path.isdir(path):
        raise ValueError(f"{path!r} is a directory; a TFLite model is a file: remove it, or give another path.")
    with tempfile.TemporaryDirectory() as directory, writing(path, state.strategy, ".tflite") as temporary:
        saved_model = os.path.join(directory, "saved_model")
        write_saved_model(state, predict_fns, element_spec, saved_model, keep_dtypes)
        if workers.is_chief(state.strategy):
            with open(temporary, "wb") as file:
                file.write(_convert(saved_model))


def _convert(saved_model: str) -> bytes:
    """Returns a SavedModel as the content of a `.tflite` file, which has been compared with it.

    Raises:
        ValueError: if it cannot be converted or run, or has other outputs.
    """
    signatures = tf.saved_model.load(saved_model).signatures
    served = signatures[DEFAULT_SIGNATURE]
    converter = tf.lite.TFLiteConverter.from_saved_model(saved_model, signature_keys=list(signatures))
    converter.optimizations = [tf.lite.Optimize.DEFAULT]
    entries, expected_outputs = _run_on_random_rows(served)
    try:
        content: bytes = converter.convert()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the interpreter's move to a package of its own
            interpreter = tf.lite.Interpreter(model_content=content)
        outputs = interpreter.get_signature_runner(DEFAULT_SIGNATURE)(**entries)
    except Exception as error:  # whatever the converter or the interpreter raises about an operation
        reason = " ".join(str(error).split())[:200]
        raise ValueError(
            f"TensorFlow Lite cannot hold this model ({reason}): export a SavedModel, a path without .tflite."
        ) from error
    for name, expected in expected_outputs.items():
        difference = relative_difference(outputs[name], expected.numpy())
        if not difference <= _TOLERANCE:
            raise ValueError(
                f"The quantized model gives {name!r} otherwise than the model, by {difference:.2g} of its norm: export "
                "a SavedModel, a path without .tflite."
            )
    return content


def _run_on_random_rows(served: Callable[..., Any]) -> tuple[dict[str, np.ndarray], Mapping[str, tf.Tensor]]:
    """Returns rows that a signature accepts, and its outputs: TFLite ends the process at sizes that no filter fits in.

    Raises:
        ValueError: if it accepts none.
    """
    failure: Exception | None = None
    for size in _FREE_SIZES:
        entries = _random_rows(served.structured_input_signature[1], size)  # type: ignore[attr-defined]
        try:
            return entries, served(**{name: tf.constant(value) for name, value in entries.items()})
        except tf.errors.OpError as error:
            failure = failure or error
    assert failure is not None
    raise ValueError(
        f"The file cannot be compared with the model, which cannot be run on random rows ({first_line(failure)}): "
        "export a SavedModel, a path without .tflite."
    ) from failure


def _random_rows(specs: Mapping[str, tf.TensorSpec], free_size: int) -> dict[str, np.ndarray]:
    """Returns two rows for each entry: normal random numbers, or ones for types that are not floating-point."""
    rng = np.random.default_rng(0)
    entries = {}
    for name, spec in specs.items():
        shape = [spec.shape[0] or 2, *(size or free_size for size in spec.shape[1:])] if spec.shape.rank else []
        values = rng.normal(size=shape) if spec.dtype.is_floating else np.ones(shape)
        entries[name] = values.astype(spec.dtype.as_numpy_dtype)
    return entries

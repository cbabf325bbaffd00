"""Chooses the format by the suffix of the path; writes Keras files, trained weights and TFLite files.

    write_export(state, predictor, element_spec, "model.keras", keep_dtypes=False)

`.keras` holds the model without optimizer and losses, with the averaged weights if there are any and with LoRA adapters
merged; it is read back and compared before it takes its name, and loads without distloop. `.npz` and `.safetensors`
hold what training changes, by name: a few per cent of a model with adapters; `warm_start` reads them. A TFLite file is
a SavedModel with weights of 8 bits and activations of floating point, for phones and small computers.
"""

import contextlib
import os
import pathlib
import random
import tempfile
import warnings
from collections.abc import Collection, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from distloop.distributed import collectives
from distloop.errors import cause, first_line
from distloop.evaluation.prediction import DEFAULT_SIGNATURE, Predictor
from distloop.exports.export import (
    call_on_ones,
    check_suffix,
    layers_of,
    merged,
    output_difference,
    prepare_path,
    quiet_logging,
    writing,
)
from distloop.exports.saved_model import write_saved_model
from distloop.model.saved_state import relative_difference
from distloop.model.state import TrainState
from distloop.model.variable_writes import preserved
from distloop.threads import replaced
from distloop.variables import WEIGHT_FILES, portable_names, tensorflow_variable, unwrap_model

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
    check_suffix(path)
    suffix = pathlib.Path(path).suffix
    if suffix == ".keras":
        _write_keras_file(state, path)
    elif suffix in WEIGHT_FILES:
        _write_trained_weights(state, path, suffix)
    elif suffix == ".onnx":
        _write_onnx(state, path)
    elif suffix != ".tflite":
        write_saved_model(state, predictor.predict_fns, element_spec, path, keep_dtypes)
    else:
        path = prepare_path(path, state.strategy, "a TFLite model is a file")
        with tempfile.TemporaryDirectory() as directory, writing(path, state.strategy, suffix) as temporary:
            saved_model = os.path.join(directory, "saved_model")
            write_saved_model(state, predictor.predict_fns, element_spec, saved_model, keep_dtypes)
            if collectives.is_chief(state.strategy):
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


def _write_onnx(state: TrainState, path: str) -> None:
    """Writes an ONNX file by Keras, with the averaged weights if there are any; atomically.

    Raises:
        ValueError: if there is not exactly one Keras model, the packages that Keras needs are missing, or it fails.
    """
    model = _built_keras_model(state)
    path = prepare_path(path, state.strategy, "an ONNX model is a file")
    with writing(path, state.strategy, ".onnx") as temporary, state.averaged(), merged(model), quiet_logging():
        try:
            model.export(temporary, format="onnx", verbose=False)
        except OSError:  # of the disk, not of the model
            raise
        except Exception as error:  # Keras and its converter raise whatever an operation does
            raise ValueError(
                f"Keras cannot write {path!r} ({cause(error)}): install what it names, such as tf2onnx, or export a "
                "SavedModel, a path without .onnx."
            ) from error


def _write_trained_weights(state: TrainState, path: str, suffix: str) -> None:
    """Writes the variables that training changes to an `.npz` or `.safetensors` file, by name; atomically.

    They are averaged if there are averages. The file holds what layers that are not frozen keep beside them, too, such
    as the statistics of BatchNormalization.

    Args:
        state: of a built model.
        path: an existing file is replaced.
        suffix: of the path.

    Raises:
        ValueError: if the model is not built, a directory is in the way, or the package safetensors is missing.
    """
    _require_built(state, "The model")
    path = prepare_path(path, state.strategy, "trained weights are a file")
    changed = {id(variable) for variables in state.variables_of_update.values() for variable in variables}
    with state.frozen:
        kept = [layer for layer in layers_of(state.model) if layer.trainable and layer.quantization_mode is None]
    # Of a quantized layer they are the weights; training does not move what `adapt` has found, as in Normalization.
    beside = [v for layer in kept if not hasattr(layer, "adapt") for v in layer._non_trainable_variables]
    changed |= {id(v) for v in beside} - {id(v) for v in state.recurrent_states}
    try:
        if suffix == ".safetensors":
            import safetensors.numpy
    except ImportError:
        raise ValueError(f"{path!r} needs the package safetensors: pip install safetensors, or give .npz.") from None
    with writing(path, state.strategy, suffix) as temporary, state.averaged():
        values = {name: v.numpy() for name, v in portable_names(state.model).items() if id(v) in changed}
        # NumPy does not read back bfloat16 and others that it does not know: they become float32, exactly.
        values = {n: value.astype(np.float32) if value.dtype.kind == "V" else value for n, value in values.items()}
        if suffix == ".npz":
            np.savez(temporary, **values)
            return
        try:
            safetensors.numpy.save_file(values, temporary)
        except safetensors.SafetensorError as error:
            raise OSError(first_line(error)) from error


def _require_built(state: TrainState, name: str) -> None:
    if not state.is_built:
        raise ValueError(
            f"{name} is not built, so it has no weights to write: call fit, evaluate or predict with a dataset "
            "before export, or give it an input shape."
        )


def _write_keras_file(state: TrainState, path: str) -> None:
    """Writes a `.keras` file, with the averaged weights if there are any; atomically.

    Args:
        state: of one built Keras model.
        path: ends with `.keras`; an existing file is replaced when the new one is complete.

    Raises:
        ValueError: if a file cannot hold this model, a directory is in the way, or the file cannot be read back or has
            other weights or outputs than the model.
    """
    model = _built_keras_model(state)
    path = prepare_path(path, state.strategy, "a Keras model is a file")
    with (
        writing(path, state.strategy, ".keras") as temporary,
        state.averaged(),
        merged(model) as left_out,
        quiet_logging(),
    ):
        random_state = random.getstate()  # Keras draws seeds from it for the layers that it makes
        try:
            with contextlib.ExitStack() as scopes:  # losses may refer to functions that are not registered
                for name, value in (("optimizer", None), ("compiled", False)) if model.compiled else ():
                    scopes.enter_context(replaced(model, name, value))
                keras.saving.save_model(model, temporary)
            copy = keras.models.load_model(temporary)
        except OSError:  # of the disk, not of the model
            raise
        except Exception as error:  # Keras raises whatever a layer's code does
            raise ValueError(
                f"The model {model.name!r} cannot be written and read back ({cause(error)}): decorate layers and "
                "functions of your own with @keras.saving.register_keras_serializable(), give them a get_config, and "
                "use no lambda."
            ) from error
        finally:
            random.setstate(random_state)
        _compare_weights(model, copy, left_out)
        with preserved(state):
            _compare_outputs(model, copy)


def _built_keras_model(state: TrainState) -> keras.Model:
    """Returns the model; raises ValueError unless it is exactly one of Keras, and built."""
    model = unwrap_model(state.model)
    models = dict(enumerate(model)) if isinstance(model, (list, tuple)) else model if isinstance(model, Mapping) else {}
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
    _require_built(state, f"The model {model.name!r}")
    return model


def _compare_weights(model: keras.Model, copy: keras.Model, left_out: Collection[int]) -> None:
    """Raises ValueError unless a copy has the weights of the model, but for those left out, bit for bit."""
    weights = [weight for weight in model.weights if id(tensorflow_variable(weight)) not in left_out]
    names = [weight.path for weight in weights]
    expected, actual = ([weight.numpy() for weight in one] for one in (weights, copy.weights))
    different = [f"{len(actual)} instead of {len(expected)}"] if len(actual) != len(expected) else []
    for name, a, b in zip(names, actual, expected, strict=False):
        if (a.shape, a.dtype) != (b.shape, b.dtype) or a.tobytes() != b.tobytes():
            different.append(name)
    if different:
        raise ValueError(
            f"The model {model.name!r}, written and read back, has other weights ({', '.join(different[:3])}): make "
            "all of its layers and variables in __init__ or build, where Keras finds them."
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

"""Replaces an older export, merges adapters, and compares the new export with the model.

    path = prepare_path("model", strategy)                       # after exports that were killed
    with writing(path, strategy) as temporary:                   # `path` is replaced at the end, unless an error comes
        ...

    with merged(model) as left_out:                              # the layers' matrices, with their LoRA adapters added
        ...

A layer has an adapter after Keras's `layer.enable_lora(rank)`: W x becomes (W + alpha / rank * A B) x, W frozen; Hu et
al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021, equation 3. An export is read back and compared before
it takes its name, so every export with that name is complete and was checked.
"""

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from absl import logging

from distloop.atomic_files import remove_leftovers, replacing
from distloop.distributed import collectives
from distloop.errors import as_user_error, explaining_disk_errors, first_line
from distloop.log import log
from distloop.urls import is_url
from distloop.variables import tensorflow_variable, top_layers
from distloop.workdir.directory import send

# Sizes to try for free axes: a small one, then ones that a convolution's filter fits in.
_FREE_SIZES = (1, 32, 256)


def check_suffix(path: str) -> None:
    """Raises a ValueError if a path has the suffix of a format that exports do not have."""
    if path.endswith((".h5", ".hdf5", ".pb", ".pt", ".pth", ".ckpt")):
        raise ValueError(
            f"{path!r} was given for an export; it is a .keras, .npz, .safetensors, .tflite or .onnx file, or else a "
            "directory, a SavedModel: give such a name, or call trainer.model.save_weights for a .weights.h5 file."
        )


def prepare_path(path: str, strategy: tf.distribute.Strategy, must_be_a_file: str = "") -> str:
    """Restores or removes, on the chief, the leftovers of exports to a path whose processes were killed.

    Args:
        path: of the export.
        strategy: of the model.
        must_be_a_file: why a directory is refused, a part of a sentence; empty: it is not.

    Returns:
        The path with symbolic links resolved, so that an export replaces what a link points to and not the link; a URL
        as it is.

    Raises:
        ValueError: if a directory is in the way.
    """
    if is_url(path):
        return path
    path = os.path.realpath(path)
    if collectives.is_chief(strategy) and remove_leftovers(os.path.dirname(path), os.path.basename(path)):
        log.warning("Restored the export %s: a process was killed while it replaced it.", path)
    if must_be_a_file and os.path.isdir(path):
        raise ValueError(f"{path!r} is a directory; {must_be_a_file}: remove it, or give another path.")
    return path


@contextlib.contextmanager
def writing(path: str, strategy: tf.distribute.Strategy, suffix: str = "") -> Iterator[str]:
    """Replaces an export by what is written to a temporary path; after an error, keeps the old one.

    All workers write, because reading a variable may be a collective; the files of workers other than the chief are
    removed. At a URL, a SavedModel that is replaced is not there until the new one is: its `saved_model.pb` is written
    last.

    Args:
        path: from `prepare_path`.
        strategy: of the model.
        suffix: of the temporary path.

    Yields:
        The temporary path.

    Raises:
        ValueError: if the disk is full, or the directory or URL cannot be written to.
    """
    temporary = ""
    with explaining_disk_errors(path):
        try:
            if is_url(path) or not collectives.is_chief(strategy):
                with tempfile.TemporaryDirectory() as directory:
                    yield (temporary := os.path.join(directory, f"export{suffix}"))
                    if collectives.is_chief(strategy):
                        send(temporary, path)
                return
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with replacing(path, suffix) as temporary:
                yield temporary
        except tf.errors.OpError as error:
            if temporary in error.message:
                raise OSError(first_line(error)) from error
            raise  # of an operation of the model


@contextlib.contextmanager
def merged(model: Any) -> Iterator[set[int]]:
    """Enters a scope in which layers with a LoRA adapter have it in their matrix, and count as layers without one.

    Quantized layers stay as they are: adding to their matrix would round it once more.

    Args:
        model: a Keras model or layer, a `tf.Module`, or a dict or list of them.

    Yields:
        The ids of the adapters' variables, TensorFlow's, which the model does not use inside.
    """
    layers = [
        layer for layer in layers_of(model) if getattr(layer, "lora_enabled", False) and layer.quantization_mode is None
    ]
    matrices, ranks = [], [layer.lora_rank for layer in layers]
    for layer in layers:
        name = "embeddings" if hasattr(layer, "embeddings") else "kernel"
        value = tf.identity(getattr(layer, name))  # a sum, as long as the adapter is enabled
        layer.lora_enabled, layer.lora_rank = False, None
        variable = getattr(layer, name)
        matrices.append((variable, variable.numpy()))
        variable.assign(value)
    try:
        yield {id(tensorflow_variable(v)) for layer in layers for v in layer.variables if v.name.startswith("lora_")}
    finally:
        for layer, rank, (variable, value) in zip(layers, ranks, matrices, strict=True):
            variable.assign(value)
            layer.lora_enabled, layer.lora_rank = True, rank


def layers_of(model: Any) -> list[keras.Layer]:
    """Returns the layers of a model, inner ones included."""
    return [layer for top in top_layers(model) for layer in top._flatten_layers()]


def call_on_ones(call: Callable[[Any], Any], specs: Any, name: str) -> tuple[Any, Any] | None:
    """Calls a function on two examples of ones, with larger and larger free axes until it accepts them.

    Args:
        call: from a structure of tensors to outputs.
        specs: the structure's specs.
        name: of the model or function, for the log.

    Returns:
        The examples and the outputs, or None if the function accepts none of them; this is logged.

    Raises:
        ValueError: if the function failed with an error that has an explanation for users.
    """
    for size in _FREE_SIZES:
        examples = tf.nest.map_structure(lambda spec, size=size: _ones(spec, size), specs)
        try:
            return examples, call(examples)
        except Exception as error:  # layers' code may raise anything
            if isinstance(error, tf.errors.OpError) and (explained := as_user_error(error)) is not None:
                raise explained from error
    log.warning("The export was not compared with %s, which cannot be run on ones.", name)
    return None


def _ones(spec: Any, free_size: int) -> Any:
    """Returns two examples, [2, ...], with the given size in every free axis."""
    if isinstance(spec, tf.RaggedTensorSpec):
        values = tf.ones([2, *(size or free_size for size in spec.shape[2:])], spec.dtype)
        return tf.RaggedTensor.from_row_splits(values, tf.constant([0, 1, 2], spec.row_splits_dtype))
    shape = [spec.shape[0] or 2, *(size or free_size for size in spec.shape[1:])]
    return tf.fill(shape, "1") if spec.dtype == "string" else tf.ones(shape, spec.dtype)


def output_difference(output: Any, expected: Any) -> float:
    """Returns the largest absolute difference of two outputs; 0.0 within the tolerance, or if not floating-point."""
    if not isinstance(expected, tf.Tensor) or not expected.dtype.is_floating:
        return 0.0
    output, expected = (tf.cast(value, tf.float32).numpy() for value in (output, expected))
    if output.shape != expected.shape:
        return np.inf
    if np.allclose(output, expected, rtol=1e-3, atol=1e-5, equal_nan=True):
        return 0.0
    return float(np.abs(output - expected).max())


@contextlib.contextmanager
def quiet_logging() -> Iterator[None]:
    """Hides TensorFlow's informational messages about writing."""
    logger = logging.get_absl_logger()
    level = logger.level
    logger.setLevel("WARNING")
    try:
        yield
    finally:
        logger.setLevel(level)

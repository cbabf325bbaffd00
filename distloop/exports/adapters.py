"""Adapters of a fine-tuned model: merged into the weights for an export, and written without the frozen weights.

    with merged(model) as left_out:                        # the layers' matrices, with their LoRA adapters added
        ...
    write_trained_weights(state, "adapters.npz")           # what training changes, by name, a few per cent of a model

A layer has an adapter after Keras's `layer.enable_lora(rank)`: W x becomes (W + alpha / rank * A B) x, W frozen; Hu et
al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021, equation 3. `warm_start` reads the file.
"""

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from distloop.exports.export import prepare_path, writing
from distloop.training.state import TrainState
from distloop.variables import portable_names, tensorflow_variable, top_layers


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
        layer for layer in _layers(model) if getattr(layer, "lora_enabled", False) and layer.quantization_mode is None
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


def _layers(model: Any) -> list[keras.Layer]:
    return [layer for top in top_layers(model) for layer in top._flatten_layers()]


def write_trained_weights(state: TrainState, path: str) -> None:
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
        for layer in _layers(state.model):
            if isinstance(layer, keras.layers.BatchNormalization) and layer.trainable:
                changed |= {id(v) for v in layer.non_trainable_variables}
    with writing(path, state.strategy, ".npz") as temporary, state.averaged():
        names = portable_names(state.model)
        np.savez(temporary, **{name: _portable(v.numpy()) for name, v in names.items() if id(v) in changed})


def _portable(value: np.ndarray) -> Any:
    """Returns an array that NumPy reads back: bfloat16 and others that it does not know become float32, exactly."""
    return value.astype(np.float32) if value.dtype.kind == "V" else value

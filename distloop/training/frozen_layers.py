"""Layers that `trainable=` leaves out: they compute as `layer.trainable = False` has them compute, in Keras's words.

    frozen = Frozen(frozen_layers(layers, updates, trained, paths))
    with frozen:
        model(x, training=True)                 # BatchNormalization uses its statistics, and does not move them

Outside, the layers are trainable as the user has left them, which files keep.
"""

import contextlib
import re
import threading
from collections.abc import Collection, Iterable, Mapping, Sequence

import keras

from distloop.training.spec import Update


def frozen_layers(
    layers: Iterable[keras.Layer], updates: Sequence[Update], trained: Collection[int], paths: Mapping[int, str]
) -> list[keras.Layer]:
    """Returns the trainable layers that regular expressions leave out: no update trains a variable of them.

    Lists of variables say nothing about layers, as in a loop written by hand: with one, no layer is frozen. A
    BatchNormalization without scale and center counts as trained if an expression is found in a path of its statistics.

    Args:
        layers: at the top of the model.
        updates: all updates.
        trained: the variables that they train, by `id`.
        paths: of the model's variables by `id`.
    """
    patterns = [update.variables for update in updates if isinstance(update.variables, str)]
    if len(patterns) < len(updates):
        return []
    frozen = []
    for layer in {id(part): part for top in layers for part in top._flatten_layers()}.values():
        trainable = [v for v in layer.variables if v.trainable]
        if trainable:
            is_frozen = not any(id(v) in trained for v in trainable)
        else:
            named = [paths[id(v)] for v in layer.variables if id(v) in paths]
            is_without = isinstance(layer, keras.layers.BatchNormalization) and not layer._trainable_variables
            is_frozen = is_without and not any(re.search(p, path) for p in patterns for path in named)
        if is_frozen and layer.trainable:
            frozen.append(layer)
    return frozen


class Frozen(contextlib.ContextDecorator):
    """A scope, and a decorator, in which layers are not trainable; threads of several replicas may be in it."""

    def __init__(self, layers: Sequence[keras.Layer]):
        """Takes trainable layers."""
        self._layers, self._lock, self._depth = list(layers), threading.Lock(), 0

    def __enter__(self) -> None:
        self._enter(1)

    def __exit__(self, *_: object) -> None:
        self._enter(-1)

    def _enter(self, change: int) -> None:
        with self._lock:
            self._depth += change
            for layer in self._layers:
                layer._trainable = self._depth == 0  # private: without the variables, which stay as they are

"""Keras hooks: replaces calls of layers within a scope, reads the masks of tensors.

    with ReplacedCalls({"block_0": layer}, replace):        # by `replace("block_0", layer, layer.call)`
        loss_fn(batch, True)

The private methods of Keras's layers that the loop relies on are named here; those of its optimizers, in `slot_store`.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

_METHODS = ("call", "quantized_call")  # by which Keras computes a layer
Replace = Callable[[str, Any, Callable[..., Any]], Callable[..., Any]]  # path, layer and its call -> another call


def is_schedule_free(optimizer: Any) -> bool:
    """Returns whether a model is to be evaluated with other weights than the optimizer trains; new in Keras 3.15."""
    return isinstance(optimizer, getattr(keras.optimizers, "ScheduleFreeAdamW", ()))


class ReplacedCalls:
    """A scope in which layers are called by other functions; several threads may be in it, as those of replicas."""

    def __init__(self, layers: Mapping[str, Any], replace: Replace):
        """Takes the layers by path, and a function that returns what to call in place of a layer's `call`."""
        self._layers, self._replace = dict(layers), replace
        self._lock = threading.Lock()
        self._num_inside = 0
        self._before: list[tuple[Any, str, Any]] = []

    def __enter__(self) -> None:
        with self._lock:
            self._num_inside += 1
            if self._num_inside > 1:
                return
            for path, layer in self._layers.items():
                for method in _METHODS:
                    self._before.append((layer, method, vars(layer).get(method)))
                    # Not by setattr, which Keras watches.
                    vars(layer)[method] = self._replace(path, layer, getattr(layer, method))

    def __exit__(self, *_: Any) -> None:
        with self._lock:
            self._num_inside -= 1
            while not self._num_inside and self._before:
                layer, method, function = self._before.pop()
                del vars(layer)[method]
                if function is not None:
                    vars(layer)[method] = function


def mask_of(tensor: Any) -> tf.Tensor | None:
    """Returns the mask that Keras has put on a tensor; Keras has no public function for it."""
    return getattr(tensor, "_keras_mask", None)


def masks_of(tensors: Any) -> list[Any]:
    """Returns the masks that Keras's layers have attached to the tensors of a structure; None: a tensor has none."""
    return [mask_of(tensor) for tensor in tf.nest.flatten(tensors)]


def with_masks(tensors: Any, masks: Sequence[Any]) -> Any:
    """Attaches masks to the tensors of a structure, for the next layer; returns the structure."""
    for tensor, mask in zip(tf.nest.flatten(tensors), masks, strict=False):
        if mask is not None:
            tensor._keras_mask = mask
    return tensors

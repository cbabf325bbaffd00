"""Keras hooks: replaces calls of layers within a scope, reads the masks of tensors, makes objects again from configs.

    with ReplacedCalls({"block_0": layer}, replace):        # by `replace("block_0", layer, layer.call)`
        loss_fn(batch, True)

The private methods of Keras's layers that the loop relies on are named here; those of its optimizers, in `slot_store`.
"""

import operator
import threading
from collections.abc import Callable, Mapping, Sequence
from inspect import Parameter, signature
from typing import Any

import keras
import numpy as np
import tensorflow as tf

_METHODS = ("call", "quantized_call")  # by which Keras computes a layer
_PLAIN = (bool, int, float, str, list, tuple, dict, np.ndarray, np.generic, type(None))  # settings, and no objects
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


def made_again(one: Any, what: str, instead: str, get_config: Any = operator.methodcaller("get_config")) -> Any:
    """Returns a new metric or optimizer with the settings of another, in the current scope.

    Args:
        one: the other.
        what: for a message, such as "The metric 'mae'".
        instead: for a message, what to do if the config is not complete.
        get_config: returns its config.

    Raises:
        ValueError: if its config is not complete.
    """
    try:
        config = get_config(one)
        again = type(one).from_config(config)
        if lost := lost_settings(one, again, config):
            raise ValueError(f"it lacks {', '.join(lost)}")
    except (AttributeError, NotImplementedError, TypeError, ValueError) as error:
        raise ValueError(
            f"{what}, a {type(one).__name__}, cannot be made again from its get_config() "
            f"({error or type(error).__name__}): let get_config return every argument of __init__, or {instead}."
        ) from error
    return again


def lost_settings(one: Any, again: Any, config: Mapping[str, Any]) -> list[str]:
    """Returns the arguments of a user's `__init__` that a config lacks, and that a copy has stored with other values.

    Of metrics and optimizers also those that are no attribute, if the config is that of a class further up.
    """
    classes: Sequence[Any] = type(one).__mro__
    init, said = (next(each for each in classes if name in vars(each)) for name in ("__init__", "get_config"))
    is_further_up = not isinstance(one, keras.Layer) and init is not said and issubclass(init, said)
    arguments = [] if init.__module__.startswith("keras.") else [*signature(init.__init__).parameters.values()][1:]
    lost = []
    for name in [p.name for p in arguments if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) and p.name not in config]:
        old, new = (vars(each).get(name, vars(each).get(f"_{name}", Parameter.empty)) for each in (one, again))
        is_other = isinstance(old, _PLAIN) and repr(old) != repr(new)  # NaN is not equal to itself
        if is_other or (is_further_up and old is Parameter.empty):
            lost.append(name)
    return lost

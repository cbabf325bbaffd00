"""Keras hooks: replaces calls of layers within a scope, reads the masks of tensors, makes objects again from configs.

    with ReplacedCalls({"block_0": layer}, replace):        # by `replace("block_0", layer, layer.call)`
        loss_fn(batch, True)

The private methods of Keras's layers that the loop relies on are named here; those of its optimizers, in `slot_store`.
"""

import functools
import operator
import threading
import types
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from inspect import Parameter, signature
from typing import Any

import keras
import numpy as np
import tensorflow as tf

_METHODS = ("call", "quantized_call")  # by which Keras computes a layer
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, functools.partial, np.ufunc, type)
_VALUES = (int, float, complex, str, bytes, list, tuple, set, frozenset, dict, np.ndarray, np.generic, tf.Tensor, Enum)
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

    Objects of one class count as alike, but in metrics whose config is that of a class further up, where arguments that
    are no attribute are lost, too. A name and `trainable` are not compared.
    """
    classes: Sequence[Any] = type(one).__mro__
    init, said = (next(each for each in classes if name in vars(each)) for name in ("__init__", "get_config"))
    is_unsaid = isinstance(one, keras.metrics.Metric) and init is not said and issubclass(init, said)
    arguments = [] if init.__module__.startswith("keras.") else [*signature(init.__init__).parameters.values()][1:]
    lost, known = [], {*config, "name", "trainable"}
    for name in [p.name for p in arguments if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) and p.name not in known]:
        old, new = (vars(each).get(name, vars(each).get(f"_{name}", Parameter.empty)) for each in (one, again))
        counts = is_unsaid or isinstance(old, (*_FUNCTIONS, *_VALUES)) or type(old) is not type(new)
        if (counts and old is not new and _text(old) != _text(new)) or (is_unsaid and old is Parameter.empty):
            lost.append(name)
    return lost


def _text(value: Any) -> str:
    """Returns what tells settings apart; functions that `__init__` makes anew are alike if what they hold is.

    So are lists of objects, such as layers, if their classes are. Numbers are compared as text, since NaN differs from
    itself, and 0 does not from False.
    """
    if isinstance(value, types.FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        # No deeper: a function may hold itself.
        held = [each if isinstance(each, _VALUES) else str(getattr(each, "__code__", type(each))) for each in cells]
        return f"{value.__code__}, {_text(value.__defaults__)}, {_text(held)}"
    if isinstance(value, functools.partial):
        value = value.func, value.args, value.keywords
    elif isinstance(value, dict):
        value = [*value.items()]
    if isinstance(value, (list, tuple)):
        return repr([_text(each) if isinstance(each, (*_FUNCTIONS, *_VALUES)) else type(each) for each in value])
    return repr(sorted(value, key=repr) if isinstance(value, (set, frozenset)) else value)

"""Layer calls: makes Keras call another function in place of a layer's own, within a scope.

    with ReplacedCalls({"block_0": layer}, replace):       # by `replace("block_0", layer, layer.call)`
        loss_fn(batch, True)

A layer may be called again later in the context of its first call. This module does not know what the functions do.
"""

import contextlib
import copy
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from keras.src.backend.common import global_state

_CONTEXT = ("current_call_ctx", "autocast_scope")  # what Keras knows in a call, such as `training`
_METHODS = ("call", "quantized_call")  # by which Keras computes a layer
Replace = Callable[[str, Any, Callable[..., Any]], Callable[..., Any]]  # path, layer and its call -> another call


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


def call_context() -> dict[str, Any]:
    """Returns the context in which Keras calls a layer now, for `in_call_context`.

    It is a copy: in Keras's own, a layer that is called with `training=False` changes `training` for all later ones.
    """
    return {name: copy.copy(global_state.get_global_attribute(name)) for name in _CONTEXT}


@contextlib.contextmanager
def in_call_context(values: Mapping[str, Any]) -> Iterator[None]:
    """Enters the context of an earlier call."""
    before = {name: global_state.get_global_attribute(name) for name in values}
    for name, value in values.items():
        global_state.set_global_attribute(name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            global_state.set_global_attribute(name, value)

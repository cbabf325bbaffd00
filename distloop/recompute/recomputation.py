"""Chooses the layers to recompute, and replaces their calls by recomputed calls.

    spec = with_recomputation(model_fn, "block_")()           # acts where loss_fn is under a tape, in a graph

Only the inputs of such a layer are kept (Chen et al. 2016, arXiv:1604.06174). Here is decided which calls of layers are
recomputed; how one is, stands in `recomputed_call.py`.
"""

import contextlib
import contextvars
import functools
import re
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf
from tensorflow.python.eager import record

from distloop.distributed import gathering
from distloop.model.placement import make_placement
from distloop.model.spec import ModelSpec
from distloop.optimizers.keras_hooks import ReplacedCalls
from distloop.recompute.recomputed_call import RecomputedCall, refusal
from distloop.variables import layers_by_path, top_layers

_MAX_PATHS = 8  # in an error message


def find_layers(model: Any, pattern: str) -> dict[str, Any]:
    """Returns the layers of a model in whose path a regular expression is found.

    Args:
        model: as for `named_variables`.
        pattern: the regular expression.

    Raises:
        ValueError: if there are none.
    """
    layers = {path: v for path, v in layers_by_path(model).items() if not isinstance(v, keras.layers.InputLayer)}
    chosen = {path: layer for path, layer in layers.items() if re.search(pattern, path)}
    if not chosen:
        paths = ", ".join([*list(layers)[:_MAX_PATHS], *(["..."] if len(layers) > _MAX_PATHS else [])])
        raise ValueError(
            f"recompute={pattern!r} was given, which is found in no path of a layer of the model ("
            f"{paths or 'it has no Keras layers'}): give another regular expression, or leave it out."
        )
    return chosen


def with_recomputation(model_fn: Callable[[], ModelSpec], pattern: str) -> Callable[[], ModelSpec]:
    """Returns a `model_fn` whose `loss_fn`s recompute the layers in whose path a regular expression is found.

    It raises a ValueError if no layer matches, as far as the layers are built, if the model has stages, or if there is
    no `loss_fn`.

    Args:
        model_fn: that of the user.
        pattern: the regular expression.
    """

    @functools.wraps(model_fn)
    def make() -> Any:
        spec: Any = model_fn()
        if not isinstance(spec, ModelSpec):
            return spec  # refused by the caller
        if stages := make_placement(spec.model).devices:
            raise ValueError(
                f"recompute={pattern!r} was given with a network of {len(stages)} stages, which are recomputed as "
                "a whole: give distloop.split(model, num_stages, recompute=True) in place of the setting."
            )
        if not all(update.has_loss for update in spec.updates):
            raise ValueError(
                f"recompute={pattern!r} was given with a step_fn and no loss_fn, and layers are recomputed in a "
                "loss_fn alone: give one whose gradients step_fn takes, or leave recompute out."
            )
        if all(layer.built for top in top_layers(spec.model) for layer in top._flatten_layers()):
            find_layers(spec.model, pattern)  # else when the model is built and called
        return spec.with_functions(functools.partial(recomputing, model=spec.model, pattern=pattern))

    return make


def recomputing(fn: Callable[..., Any], *, model: Any, pattern: str) -> Callable[..., Any]:
    """Returns a function that recomputes layers where it is differentiated; elsewhere it is `fn`.

    Args:
        fn: a `loss_fn`, called with a batch and `training`; or another function, called with a batch alone.
        model: as for `named_variables`.
        pattern: a regular expression; of the layers within each other that match, the outer one is recomputed.
    """

    @functools.cache
    def replaced() -> ReplacedCalls:
        return ReplacedCalls(find_layers(model, pattern), _replacement)

    @functools.wraps(fn)
    def call(batch: Any, *arguments: Any) -> Any:
        is_training = bool(arguments) and bool(arguments[0])
        if not is_training or tf.executing_eagerly() or not record.could_possibly_record():
            return fn(batch, *arguments)
        with _recomputed_in(tf.compat.v1.get_default_graph()), replaced():
            return fn(batch, *arguments)

    return call


_graph: contextvars.ContextVar[Any] = contextvars.ContextVar("graph", default=None)


@contextlib.contextmanager
def _recomputed_in(graph: Any) -> Iterator[None]:
    """Enters a scope in which this thread's calls of layers in a graph are recomputed; with None, none are."""
    before = _graph.set(graph)
    try:
        yield
    finally:
        _graph.reset(before)


def _replacement(path: str, layer: Any, call: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function in place of a layer's `call`."""

    @functools.wraps(call)
    def plain(*arguments: Any, **options: Any) -> Any:
        with _recomputed_in(None), gathering.refused(refusal(path, "calls gather_rows")):
            return call(*arguments, **options)

    @functools.wraps(call)
    def replacement(*arguments: Any, **options: Any) -> Any:
        if _graph.get() is not tf.compat.v1.get_default_graph():
            return call(*arguments, **options)  # within a recomputed layer, or in a loop, whose gradient has no tape
        return RecomputedCall(layer, path, plain, (arguments, options))()

    return replacement

"""Owns the search for where a number that is not finite came from: the first operation, its layer, its line.

A step is traced once more with the verdict "all finite" on every tensor in it. From a result that is not finite the
search goes back along what is not finite either, to operations whose inputs are all finite. So it does not stop at an
infinity that harms nobody, such as the mask of an attention layer.

    @tf.function
    def look(batch):
        results = ...
        looked_at = tensors(graph)
        return verdicts(looked_at)                         # [T]

    op = find_origin(results, looked_at, look(batch).numpy())

It does not know steps, batches or replicas.
"""

import os
import re
from collections.abc import Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf

_LIBRARIES = tuple(
    os.path.dirname(os.path.abspath(path)) + os.sep  # distloop itself, too
    for path in (tf.__file__, keras.__file__, os.path.dirname(__file__))
)
_BACKWARD = "gradient_tape/"  # the scope that TensorFlow gives to what a tape makes


def tensors(graph: tf.Graph) -> list[tf.Tensor]:
    """Lists the floating-point tensors that a graph has so far."""
    return [t for op in graph.get_operations() for t in op.outputs if t.dtype.is_floating]


def verdicts(of: Sequence[tf.Tensor]) -> tf.Tensor:
    """Says of each tensor whether all of it is finite: `[T]`, bool; in the graph that they belong to."""
    return tf.stack([tf.reduce_all(tf.math.is_finite(tensor)) for tensor in of])


def find_origin(
    results: Iterable[tf.Tensor], of: Sequence[tf.Tensor], are_finite: Sequence[bool]
) -> tf.Operation | None:
    """Finds the first operation whose result is not finite though its inputs are, and on which a bad result hangs.

    Args:
        results: symbolic tensors, from whichever the search starts.
        of: the tensors that were looked at.
        are_finite: the verdicts on them.

    Returns:
        The operation, or None if every result is finite.
    """
    bad = {id(tensor) for tensor, is_finite in zip(of, are_finite, strict=True) if not is_finite}
    place = {id(tensor): i for i, tensor in enumerate(of)}
    found: tuple[int, tf.Operation] | None = None
    seen: set[int] = set()
    to_visit = [tensor for tensor in results if id(tensor) in bad]
    while to_visit:
        tensor = to_visit.pop()
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        sources = [source for source in tensor.op.inputs if id(source) in bad]
        to_visit += sources
        if not sources and (found is None or place[id(tensor)] < found[0]):
            found = place[id(tensor)], tensor.op
    return None if found is None else found[1]


def describe(op: tf.Operation, layers: Iterable[Any]) -> str:
    """Says which operation it is: its type, its layer, whether it is part of the backward pass, the user's line.

    Args:
        op: of a graph that was traced with Keras layers in it.
        layers: Keras layers that it may belong to.
    """
    words = [op.type]
    if (layer := _layer_of(op, layers)) is not None:
        words.append(f"in layer {getattr(layer, 'path', None) or layer.name}")
    words.append("in the backward pass" if _BACKWARD in op.name else "in the forward pass")
    forward = _forward_op(op)
    if forward is not None and (line := user_line(forward.traceback)):
        words.append(f"({line})")
    return " ".join(words)


def _forward_op(op: tf.Operation) -> tf.Operation | None:
    """Finds the operation whose gradient an operation is part of: the user wrote a line for that one alone."""
    if _BACKWARD not in op.name:
        return op
    for source in op.inputs:  # SqrtGrad takes what Sqrt gave
        if _BACKWARD not in source.op.name and op.type.startswith(source.op.type):
            return source.op
    by_name = {other.name: other for other in op.graph.get_operations()}
    scopes = op.name.replace(_BACKWARD, "").split("/")  # gradient_tape/net/truediv/RealDiv
    names = ["/".join(scopes[:end]) for end in range(len(scopes) - 1, 0, -1)]
    return next((by_name[name] for name in names if name in by_name), None)


def _layer_of(op: tf.Operation, layers: Iterable[Any]) -> Any:
    """Finds the innermost layer by the scopes in the operation's name; a scope met again ends in a number."""
    by_name = {layer.name: layer for layer in layers}
    for scope in reversed(op.name.split("/")[:-1]):
        for name in (scope, re.sub(r"_\d+$", "", scope)):
            if name in by_name:
                return by_name[name]
    return None


def user_line(frames: Iterable[Any] | None) -> str | None:
    """Finds the user's innermost line in a traceback: `file.py:12`."""
    for frame in reversed(list(frames or [])):
        if not os.path.abspath(frame.filename).startswith(_LIBRARIES) and not frame.filename.startswith("<"):
            return f"{os.path.basename(frame.filename)}:{frame.lineno}"
    return None

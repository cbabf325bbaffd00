"""Broadcasts: refuses a loss in which [B] and [B, 1] were broadcast to [B, B] by mistake.

    outputs = loss_fn(rows, True)                          # {"loss": (labels - predictions) ** 2}, [B] and [B, 1]
    refuse_pairs(outputs, loss_fn, rows, True)             # raises: the loss pairs each label with each prediction

A value [B] that is reduced from such pairs is refused, too. Values [B, T] with T == B are accepted, and so are pairs
that a matrix product, `gather_rows` or an explicit axis as in `labels[None, :]` makes.
"""

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import tensorflow as tf

from distloop.distributed import gathering
from distloop.errors import user_line
from distloop.graph_functions import graph_function, reached
from distloop.model.metrics import Weighted

NUM_ROWS = 1009  # of the second trace: a prime that no other axis is likely to have
_REDUCTIONS = ("Mean", "Sum", "Max", "Min", "Prod", "EuclideanNorm")
_NEW_AXES = ("ExpandDims", "StridedSlice", "Reshape")
_FILLS = ("Const", "Fill")  # operations that make a tensor of one number, whose shape another operation decides


def refuse_pairs(outputs: Any, loss_fn: Callable[..., Any], rows: Any, training: bool) -> None:
    """Checks that no value that `loss_fn(rows, training)` returned is a broadcast of [B] against [B, 1]; not eagerly.

    Whether both axes of a value are those of the batch is seen in a second trace with another number of rows. Only a
    value that looks like such a broadcast causes one.

    Raises:
        ValueError: if a value is such a broadcast.
    """
    if tf.executing_eagerly() or not any(
        _broadcast_of([pairs]) for value in _values(outputs).values() for pairs in _pairs_of(value)
    ):
        return
    for name, value in _values(traced_apart(loss_fn, rows, training)).items():
        pairs = [tensor for tensor in _pairs_of(value) if tensor.shape[:2] == [NUM_ROWS, NUM_ROWS]]
        if (op := _broadcast_of(pairs)) is not None:
            line = user_line(op.traceback)
            shape = f"{'of' if pairs[0] is value else 'reduced from'} shape {_show(pairs[0])}"
            raise ValueError(
                f'loss_fn returned "{name}" {shape}, a number for each pair of rows, because '
                f"{' and '.join(map(_show, op.inputs))} were broadcast against each other{f' ({line})' if line else ''}"
                "; distloop needs one value per example, [B]: give both the same shape, as in predictions[:, 0] or "
                "labels[:, tf.newaxis]."
            )


def _values(outputs: Any) -> dict[str, tf.Tensor]:
    """Returns the dense values among the outputs of `loss_fn`, by name."""
    named = outputs.items() if isinstance(outputs, Mapping) else ()
    values = {name: value.values if isinstance(value, Weighted) else value for name, value in named}
    return {name: value for name, value in values.items() if isinstance(value, tf.Tensor)}


def traced_apart(loss_fn: Callable[..., Any], rows: Any, training: bool) -> Any:
    """Returns what `loss_fn` returns for a batch of `NUM_ROWS` rows; None if it cannot be traced for so many.

    It is traced in a thread of its own, which has no strategy, tape or graph. A loss that gathers the rows of all
    replicas raises an error there: its pairs are meant.
    """
    specs = tf.nest.map_structure(tf.type_spec_from_value, rows)
    specs = tf.nest.map_structure(
        lambda spec: tf.TensorSpec([NUM_ROWS, *spec.shape[1:]], spec.dtype) if type(spec) is tf.TensorSpec else spec,
        specs,
    )
    returned: list[Any] = []

    def trace(batch: Any) -> None:
        with gathering.shard(None, microbatches=2):
            returned.append(loss_fn(batch, training))

    with ThreadPoolExecutor(1) as thread:
        try:
            _ = thread.submit(graph_function(trace).get_concrete_function, specs).result()
        except Exception:  # of the user's code: the number of rows is fixed, or it looks at values
            return None
    return returned[0]


def _pairs_of(value: tf.Tensor) -> list[tf.Tensor]:
    """Returns the value if it may be pairs, else those that are reduced to vectors on the way to it."""
    if _may_be_pairs(value):
        return [value]
    vectors = reached([value], lambda t: (i for i in t.op.inputs if i.shape.rank is not None and i.shape.rank <= 1))
    reduced = [tensor.op.inputs[0] for tensor in vectors if tensor.op.type in _REDUCTIONS]
    return [tensor for tensor in reduced if _may_be_pairs(tensor) and not _has_meant_axis(tensor)]


def _broadcast_of(pairs: Iterable[tf.Tensor]) -> tf.Operation | None:
    """Returns the operation that broadcast [B] against [B, 1] to values; None if any of it comes from elsewhere."""
    origins = _origins(pairs)
    return origins[-1].op if origins and all(map(_is_broadcast, origins)) else None


def _has_meant_axis(pairs: tf.Tensor) -> bool:
    """Returns whether the [B, 1] of a broadcast got its axis in the user's code, as in `scores[:, None] - scores`."""
    operands = [source for tensor in _origins([pairs]) for source in tensor.op.inputs]
    return any(source.shape.rank and source.op.type in _NEW_AXES for source in operands)


def _origins(pairs: Iterable[tf.Tensor]) -> list[tf.Tensor]:
    """Returns the tensors on the way to pairs whose operations take no pairs, those of one number left out."""
    ways = reached(filter(_may_be_pairs, pairs), lambda t: filter(_may_be_pairs, t.op.inputs))
    return [t for t in ways if t.op.type not in _FILLS and not any(map(_may_be_pairs, t.op.inputs))]


def _may_be_pairs(tensor: tf.Tensor) -> bool:
    """Returns whether the first two axes may be those of the batch."""
    shape = tensor.shape
    return bool(shape.rank and shape.rank > 1 and shape[1] != 1 and shape[:1].is_compatible_with(shape[1:2]))


def _is_broadcast(tensor: tf.Tensor) -> bool:
    """Returns whether an operation got one operand [B, ...] and another [B, 1, ...] with an axis more."""
    shape, inputs = tensor.shape, [source.shape for source in tensor.op.inputs]
    has_short = any(s.rank == shape.rank - 1 and s[:1].is_compatible_with(shape[1:2]) for s in inputs)
    return has_short and any(s.rank == shape.rank and s[1] == 1 for s in inputs)


def _show(tensor: tf.Tensor) -> str:
    """Returns the shape of a tensor of the second trace, such as `[B, 1]`."""
    return f"[{', '.join('B' if size == NUM_ROWS else str(size) for size in tensor.shape)}]"

"""Values of shape [B, B] that a broadcast of [B] against [B, 1] made: an error in place of a wrong loss.

    outputs = loss_fn(rows, True)                          # {"loss": (labels - predictions) ** 2}, [B] and [B, 1]
    refuse_pairs(outputs, loss_fn, rows, True)             # raises: the loss pairs each label with each prediction

Values [B, T] with T == B are accepted, and so are pairs that a matrix product, `gather_rows` or an explicit axis as in
`labels[None, :]` makes. It does not know how values are summed.
"""

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import tensorflow as tf

from distloop.distributed import gathering
from distloop.errors import user_line
from distloop.graph_functions import graph_function
from distloop.training.metrics import Weighted

NUM_ROWS = 1009  # of the second trace: a prime that no other axis is likely to have
_FILLS = ("Const", "Fill")  # operations that make a tensor of one number, whose shape another operation decides


def refuse_pairs(outputs: Any, loss_fn: Callable[..., Any], rows: Any, training: bool) -> None:
    """Checks that no value is a broadcast of [B] against [B, 1]; eagerly, nothing is checked.

    Whether both axes of a value are those of the batch is seen in a second trace with another number of rows. Only a
    value that looks like such a broadcast causes one.

    Args:
        outputs: what `loss_fn` returned while it was traced.
        loss_fn: takes a batch and `training`.
        rows: its batch.
        training: its argument.

    Raises:
        ValueError: if a value is such a broadcast.
    """
    if tf.executing_eagerly() or all(_broadcast_of(value) is None for value in _values(outputs).values()):
        return
    for name, value in _values(traced_apart(loss_fn, rows, training)).items():
        if value.shape[:2] == [NUM_ROWS, NUM_ROWS] and (op := _broadcast_of(value)) is not None:
            line = user_line(op.traceback)
            raise ValueError(
                f'loss_fn returned "{name}" of shape {_show(value)}, a number for each pair of rows, because '
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

    def run() -> Any:
        return graph_function(trace).get_concrete_function(specs)

    with ThreadPoolExecutor(1) as thread:
        try:
            _ = thread.submit(run).result()
        except Exception:  # of the user's code: the number of rows is fixed, or it looks at values
            return None
    return returned[0]


def _broadcast_of(value: tf.Tensor) -> tf.Operation | None:
    """Returns the operation that broadcast [B] against [B, 1] to a value; None if any of it comes from elsewhere."""
    op = None
    seen: set[int] = set()
    stack = [value] if _may_be_pairs(value) else []
    while stack:
        tensor = stack.pop()
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        sources = [source for source in tensor.op.inputs if _may_be_pairs(source)]
        stack += sources
        if not sources and tensor.op.type not in _FILLS:
            if not _is_broadcast(tensor):
                return None
            op = tensor.op
    return op


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

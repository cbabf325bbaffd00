"""Owns *rows of all replicas on each of them*: for losses that compare an example with the others of its batch.

    def loss_fn(batch, training):
        own = model(batch["image"], training=training)            # [b, D], this replica's share
        everyone, place = distloop.gather_rows(own)               # [B, D], [b]: own[i] is everyone[place[i]]
        logits = tf.matmul(own, everyone, transpose_b=True)       # [b, B]

It does not know what is compared.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import tensorflow as tf

from distloop.distributed import strategies

T = TypeVar("T")

_current = threading.local()  # replicas are traced each in a thread of its own


def with_most_rows(fn: Callable[..., T], most_rows: int | None) -> Callable[..., T]:
    """Makes a replica's function know how many rows its share has at most; None: nobody knows."""

    def run(*arguments: Any) -> T:
        _current.most_rows = most_rows
        try:
            return fn(*arguments)
        finally:
            del _current.most_rows

    return run


@contextlib.contextmanager
def share(row_weights: tf.Tensor | None, microbatches: int = 1) -> Iterator[None]:
    """Says, while `loss_fn` is traced on a replica, which of its rows count, and whether it has all of its share.

    Args:
        row_weights: `[b]`, 0 for the padding, which comes last; None: all rows count.
        microbatches: into how many parts the share was cut.
    """
    _current.row_weights, _current.microbatches = row_weights, microbatches
    try:
        yield
    finally:
        del _current.row_weights, _current.microbatches


def gather_rows(values: Any) -> tuple[tf.Tensor, tf.Tensor]:
    """Joins the rows of all replicas, in the order of the global batch; in `loss_fn`, the same calls on each replica.

    The gradient is that of the sum over all replicas: each one's rows get what all of them say of them. Rows that pad a
    small batch are left out.

    Args:
        values: `[b, ...]`, a row for each example of this replica's share.

    Returns:
        The rows of the global batch, `[B, ...]`, and where this replica's rows stand in it, `[b]`, int32. Rows of the
        padding have no place; theirs is that of the last row.

    Raises:
        ValueError: with microbatches, each of which would see its own rows alone; on several workers or GPUs, where
            the dataset does not tell the size of its batches.
    """
    if (microbatches := getattr(_current, "microbatches", 1)) > 1:
        raise ValueError(
            f"loss_fn calls gather_rows, and {microbatches=} was given, each of which would see its own rows alone: "
            "use microbatches=1."
        )
    values = tf.convert_to_tensor(values)
    row_weights = getattr(_current, "row_weights", None)
    size = tf.shape(values)[0]
    count = size if row_weights is None else tf.math.count_nonzero(row_weights, dtype=tf.int32)
    context = tf.distribute.get_replica_context()
    if context is None or context.num_replicas_in_sync == 1:
        rows, first = values[:count], 0
    else:
        counts = join(count[tf.newaxis])  # [R]
        rows = _join_unequal(values[:count], counts, context.strategy)
        first = tf.reduce_sum(counts[: context.replica_id_in_sync_group])
    return rows, tf.minimum(first + tf.range(size), tf.shape(rows)[0] - 1)


def _join_unequal(rows: tf.Tensor, counts: tf.Tensor, strategy: tf.distribute.Strategy) -> tf.Tensor:
    """Joins rows, of which each replica has `counts`, other numbers in other steps of a loop."""
    most = getattr(_current, "most_rows", None)
    if most is None:
        if strategies.uses_collectives(strategy):
            raise ValueError(
                "loss_fn calls gather_rows, which on several workers or GPUs has to know the size of a batch, and this "
                "dataset does not tell it: let batch(size) be its last step, or use batch(size, drop_remainder=True)."
            )
        return join(rows)
    # TensorFlow's collectives take one shape in all steps of a loop.
    missing = tf.concat([most - tf.shape(rows)[:1], tf.shape(rows)[1:]], 0)
    joined = join(tf.concat([rows, tf.zeros(missing, rows.dtype)], 0))  # [R * most, ...]
    return tf.boolean_mask(joined, tf.reshape(tf.sequence_mask(counts, most), [-1]))


def join(rows: tf.Tensor) -> tf.Tensor:
    """Joins the rows of all replicas on all workers, in their order, however many each has; in a replica's context.

    With collectives, which several workers and GPUs use, each has as many in all steps of a compiled loop.
    """
    dtype, sent = rows.dtype, rows
    if dtype.is_integer or dtype.is_bool:  # the collectives know few types of numbers
        sent = tf.cast(rows, tf.int64)
    return tf.cast(tf.distribute.get_replica_context().all_gather(sent, axis=0), dtype)

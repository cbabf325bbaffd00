"""Gathering: `gather_rows`, for losses that compare an example with all others of the global batch.

    def loss_fn(batch, training):
        embeddings = model(batch["image"], training=training)     # [b, D], the shard of this replica
        everyone, place = distloop.gather_rows(embeddings)        # [B, D], [b]: embeddings[i] is everyone[place[i]]
        logits = tf.matmul(embeddings, everyone, transpose_b=True)  # [b, B]

It does not know what is compared.
"""

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import keras
import tensorflow as tf

from distloop.distributed import strategies, tensorflow_internals
from distloop.distributed.strategies import tree_sum
from distloop.errors import require
from distloop.graph_functions import reached
from distloop.variables import top_layers

T = TypeVar("T")
Model = TypeVar("Model")

_current = threading.local()  # each replica is traced in a thread of its own


@contextlib.contextmanager
def _scope(**values: Any) -> Iterator[None]:
    """Enters a scope in which `_current` has these values."""
    current = vars(_current)
    before = dict(current)
    current.update(values)
    try:
        yield
    finally:
        current.clear()
        current.update(before)


def largest_shard(max_rows: int | None) -> contextlib.AbstractContextManager[None]:
    """Returns a scope, for a replica, in which the largest shard has `max_rows` rows; None: unknown."""
    return _scope(max_rows=max_rows)


def shard(row_weights: tf.Tensor | None, microbatches: int = 1) -> contextlib.AbstractContextManager[None]:
    """Returns a scope that describes the rows of this replica to `gather_rows` while `loss_fn` is traced inside.

    Args:
        row_weights: `[b]`, 0 for padding, which comes last; None: no padding.
        microbatches: number of parts into which the shard was cut.
    """
    return _scope(row_weights=row_weights, microbatches=microbatches)


def refused(error: Exception) -> contextlib.AbstractContextManager[None]:
    """Returns a scope in which a call of `gather_rows` raises this error."""
    return _scope(refusal=error)


class NeedsRowsError(Exception):
    """`gather_rows` was called before all virtual replicas have given their rows."""


class RowExchange:
    """The rows that a virtual replica gives and gets in `gather_rows`.

    Attributes:
        given: the rows that each call gave, without padding, `[b, ...]`.
        rows: by call, those of all virtual replicas, `[B, ...]`; empty while they are collected and calls get zeros;
            None: a call is a `NeedsRowsError`.
        slopes: by call, the derivative of the objective by `rows`, float32; set where it is differentiated.
    """

    def __init__(self, first: tf.Tensor, total: tf.Tensor, rows: Sequence[tf.Tensor] | None):
        """Stores the index of its first row in the global batch, the rows that the batch has, and `rows`."""
        self._first, self._total = first, total
        self.given: list[tf.Tensor] = []
        self.rows = rows
        self.slopes: list[tf.Tensor] = []
        self._zeros: set[int] = set()

    def __call__(self, own: tf.Tensor, size: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns what `gather_rows` returns for `size` rows, of which those that count are given."""
        if self.rows is None:
            raise NeedsRowsError
        self.given.append(own)
        if self.rows:
            rows = self.rows[len(self.given) - 1]
        else:
            ways = () if tf.executing_eagerly() else reached([own], lambda tensor: tensor.op.inputs)
            if any(id(tensor.op) in self._zeros for tensor in ways):
                raise ValueError(
                    "The loss calls gather_rows for what it computed from other gathered rows, which virtual replicas "
                    "cannot do, as a device computes them one after the other: train without virtual replicas."
                )
            rows = tf.zeros(tf.concat([self._total[tf.newaxis], tf.shape(own)[1:]], 0), own.dtype)
            rows.set_shape([None, *own.shape[1:]])
            if not tf.executing_eagerly():
                self._zeros.add(id(rows.op))
        return rows, tf.minimum(self._first + tf.range(size), self._total - 1)

    def set_slopes(self, rows: Sequence[tf.Tensor], derivatives: Sequence[Any]) -> None:
        """Sets `slopes` from the derivatives by rows, None where there is none."""
        pairs = zip(rows, derivatives, strict=True)
        self.slopes = [
            tf.cast(tf.zeros_like(r) if d is None else tf.convert_to_tensor(d), tf.float32) for r, d in pairs
        ]

    def own(self, rows: tf.Tensor, like: tf.Tensor) -> tf.Tensor:
        """Returns the rows of this virtual replica, as many as another tensor has, of those of all."""
        return rows[self._first : self._first + tf.shape(like)[0]]


def exchanging(exchange: RowExchange) -> contextlib.AbstractContextManager[None]:
    """Returns a scope, for a virtual replica, in which what is traced gives and gets rows by an exchange."""
    return _scope(exchange=exchange)


def current_exchange() -> RowExchange | None:
    """Returns that of the virtual replica that is traced now; None: there is none."""
    exchange: RowExchange | None = getattr(_current, "exchange", None)
    return exchange


def gather_rows(values: Any) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the rows of all replicas, in the order of the global batch. Call it in `loss_fn`, on every replica.

    The gradient is that of the sum of the losses of all replicas. Rows that pad a small batch are left out.

    Args:
        values: `[b, ...]`, a row for each example in the shard of this replica.

    Returns:
        The rows of the global batch, `[B, ...]`, and the index of each row of this replica in it, `[b]`, int32. Padding
        rows have the index of the last row.

    Raises:
        ValueError: with microbatches, each of which would see its own rows alone; on several workers or GPUs, if the
            dataset's batch size is unknown.
    """
    if refusal := getattr(_current, "refusal", None):
        raise refusal
    if (microbatches := getattr(_current, "microbatches", 1)) > 1:
        raise ValueError(
            f"The loss compares all rows of a batch (gather_rows), and {microbatches=} was given, each of which would "
            "see its own rows alone: use microbatches=1."
        )
    values = tf.convert_to_tensor(values)
    row_weights = getattr(_current, "row_weights", None)
    size = tf.shape(values)[0]
    count = size if row_weights is None else tf.math.count_nonzero(row_weights, dtype=tf.int32)
    if (exchange := current_exchange()) is not None:
        return exchange(values[:count], size)
    context = tf.distribute.get_replica_context()
    if context is None or context.num_replicas_in_sync == 1:
        rows, first = values[:count], 0
    else:
        counts = all_gather(count[tf.newaxis])  # [R]
        rows = _all_gather_unequal(values[:count], counts, context.strategy, "The loss calls gather_rows")
        first = tf.reduce_sum(counts[: context.replica_id_in_sync_group])
    return rows, tf.minimum(first + tf.range(size), tf.shape(rows)[0] - 1)


def gather_all(tensors: Sequence[tf.Tensor], reason: str) -> list[tf.Tensor]:
    """Returns tensors with the rows of all replicas, in the order of the global batch. Call in replica context.

    Args:
        tensors: `[b, ...]`, rows of the shard of this replica.
        reason: what needs them, the start of a message.

    Raises:
        ValueError: on several workers or GPUs, if the dataset's batch size is unknown.
    """
    strategy = tf.distribute.get_replica_context().strategy
    if not strategies.uses_collectives(strategy):
        return [all_gather(tensor) for tensor in tensors]
    counts = all_gather(tf.stack([tf.shape(tensor)[0] for tensor in tensors])[tf.newaxis])  # [R, n]
    return [_all_gather_unequal(tensor, counts[:, i], strategy, reason) for i, tensor in enumerate(tensors)]


def _all_gather_unequal(rows: tf.Tensor, counts: tf.Tensor, strategy: tf.distribute.Strategy, reason: str) -> tf.Tensor:
    """Returns the rows of all replicas; replica i has `counts[i]` of them, another number in another step of a loop."""
    max_rows = getattr(_current, "max_rows", None)
    if max_rows is not None:
        return all_gather_padded(rows, counts, max_rows)
    if strategies.uses_collectives(strategy):
        raise ValueError(
            f"{reason}, which on several workers or GPUs has to know the size of a batch, and this "
            "dataset does not tell it: let batch(size) be its last step, or use batch(size, drop_remainder=True)."
        )
    return all_gather(rows)


def all_gather_padded(rows: tf.Tensor, counts: tf.Tensor, max_rows: int) -> tf.Tensor:
    """Returns the rows of all replicas; reading them fails if one has more than `max_rows`."""
    fits = require(
        tf.shape(rows)[0] <= max_rows,
        f"A replica takes more rows of a batch than the first batches had; on several workers or GPUs, what is "
        f"gathered from all replicas needs batches of which each replica takes {max_rows} at most: let no batch be "
        "larger than the first.",
    )
    # TensorFlow's collectives need the same shape in all steps of a loop: pad, gather, cut the padding out.
    num_missing = tf.where(fits, max_rows - tf.shape(rows)[:1], 0)
    missing = tf.concat([num_missing, tf.shape(rows)[1:]], 0)
    padded = all_gather(tf.concat([rows, tf.zeros(missing, rows.dtype)], 0))  # [R * max_rows, ...]
    return tf.boolean_mask(padded, tf.reshape(tf.sequence_mask(counts, max_rows), [-1]))


def all_gather(rows: tf.Tensor) -> tf.Tensor:
    """Returns the rows of all replicas on all workers, in their order. Call in replica context.

    Replicas may have different numbers of rows, except with collectives, which several workers and GPUs use: there all
    have the same number in all steps of a compiled loop.
    """
    # Collectives support few types.
    sent = tf.cast(rows, tf.int64) if rows.dtype.is_integer or rows.dtype.is_bool else rows
    return tf.cast(tf.distribute.get_replica_context().all_gather(sent, axis=0), rows.dtype)


def sum_in_tree(tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Returns the sums of tensors over the replicas of all workers, bit for bit as `tree_sum`. Call in replica context.

    Args:
        tensors: of the same shapes on all replicas.
    """
    context = tf.distribute.get_replica_context()
    if strategies.adds_in_tree(context.strategy):
        return tensorflow_internals.sum_over_replicas(tensors)
    return [tree_sum(tf.unstack(all_gather(t[tf.newaxis]), context.num_replicas_in_sync)) for t in tensors]


def synchronize(model: Model) -> Model:
    """Turns each BatchNormalization of a model, built or not, into `BatchNormalization(synchronized=True)`.

    Args:
        model: a Keras model or layer, a `tf.Module`, or a dict or list of them; layers in it at any depth are changed
            in place. A model without BatchNormalization stays as it is.

    Returns:
        The model.

    Raises:
        ValueError: if there is no Keras layer in it.
    """
    layers: list[Any] = [layer for top in top_layers(model) for layer in top._flatten_layers()]
    if not layers:
        raise ValueError(
            f"synchronize was given {model!r}, in which there is no Keras layer: give a Keras model, or a dict, list "
            "or tf.Module that holds some."
        )
    for layer in layers:
        if isinstance(layer, keras.layers.BatchNormalization):
            layer.synchronized = True
    return model

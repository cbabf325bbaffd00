"""Sparse packing: keeps sparse gradients of large tables as lists of rows, from the tape to the optimizer.

    packing = SparsePacking(variables, state, for_rows=True)
    gradients = [packing.sized(g, v) for g, v in zip(gradients, variables)]      # from the tape
    segments = packing.pack(gradients)                                           # flat vectors, and `Rows`
    segments, sums = packing.all_reduce(segments, sums, reduce, (batch, layout))
    gradients = packing.unpack_for(optimizer, segments, scale)                   # sparse where it updates rows alone

The functions at the end make lists of rows, and what becomes of them.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from distloop.data import shards
from distloop.distributed import gathering, strategies
from distloop.model.state import TrainState
from distloop.optimizers.gradients import Packing, Reduce, Rows, Segment
from distloop.tables import row_updates

_HAS_NO_SIZE = (
    "it is not known how many rows replicas exchange: let the dataset end with batch(size, drop_remainder=True), a "
    "size that replicas and microbatches divide"
)


class SparsePacking(Packing):
    """The layout of gradients of which those of large tables stay sparse; known once gradients are packed."""

    def __init__(self, variables: Sequence[Any], state: TrainState, *, for_rows: bool):
        """Plans the layout.

        Args:
            variables: with static shapes.
            state: what is trained.
            for_rows: whether optimizers get sparse gradients; else dense ones.
        """
        super().__init__(variables)
        self._variables, self._state, self._for_rows = list(variables), state, for_rows
        self._uses_collectives = strategies.uses_collectives(state.strategy)
        # Collectives need to know the size of what they gather. Virtual replicas do alike without collectives.
        self._needs_sizes = state.replicas.same_bits or self._uses_collectives

    def sized(self, gradient: Any, variable: Any) -> Any:
        """Returns a variable's gradient from a tape; a sparse one is dense if its size is to be known, and is not."""
        if isinstance(gradient, tf.IndexedSlices) and self._needs_sizes and gradient.indices.shape[0] is None:
            self.reasons[id(variable)] = _HAS_NO_SIZE
            return tf.convert_to_tensor(gradient)
        return gradient

    def _segment(self, group: Sequence[int], gradients: Sequence[Any], *, keeps_sparse: bool) -> Segment:
        if keeps_sparse and len(group) == 1 and isinstance(gradients[group[0]], tf.IndexedSlices):
            return from_slices(gradients[group[0]], self._shape(group))
        return super()._segment(group, gradients, keeps_sparse=keeps_sparse)

    def _sum(self, group: Sequence[int], a: Segment, b: Segment) -> Segment:
        if isinstance(a, Rows) and isinstance(b, Rows):
            return join([a, b])
        return self._dense(group, a) + self._dense(group, b)

    def _shaped(self, flat: Segment, shape: Sequence[int], *, keeps_sparse: bool) -> Any:
        if not isinstance(flat, Rows):
            return super()._shaped(flat, shape, keeps_sparse=keeps_sparse)
        return to_slices(flat, shape) if keeps_sparse else tf.reshape(to_dense(flat, shape), shape)

    def _dense(self, group: Sequence[int], segment: Segment) -> tf.Tensor:
        """Returns a segment as a flat vector."""
        if not isinstance(segment, Rows):
            return segment
        return tf.reshape(to_dense(segment, self._shape(group)), self._sizes(group))

    def all_reduce(
        self,
        segments: Sequence[Segment],
        sums: Mapping[str, Any],
        reduce: Reduce | None = None,
        shard: tuple[Any, Any] | None = None,
    ) -> tuple[list[Segment], dict[str, Any]]:
        """Sums gradients and other values, as `Packing` does; each row of a table occurs once in the sum."""
        segments, gather = self._gatherable(segments, shard)
        flat, sums = super().all_reduce([s for s in segments if not isinstance(s, Rows)], sums, reduce)
        dense = iter(flat)
        return [merge(gather(s)) if isinstance(s, Rows) else next(dense) for s in segments], sums

    def _gatherable(
        self, segments: Sequence[Segment], shard: tuple[Any, Any] | None
    ) -> tuple[list[Segment], Callable[[Rows], Rows]]:
        """Returns the segments of a replica, and a function that gathers sparse ones from all replicas.

        Where collectives cannot gather a sparse segment, for want of its size, it is dense.
        """
        is_alone = self._state.strategy.num_replicas_in_sync == 1
        if not self._uses_collectives or not any(isinstance(segment, Rows) for segment in segments):
            return list(segments), lambda rows: rows if is_alone else Rows(*_gather_lists(rows, None))
        assert shard is not None, "collectives gather the rows of a batch"
        batch, layout = shard
        indices = range(layout.per_device)
        sizes = [shards.batch_size(shards.take_shard(batch, layout, 1, index)[0]) for index in indices]
        shard_size = sum(sizes) if all(isinstance(size, int) for size in sizes) else None

        def max_rows(rows: Rows) -> int | None:
            size = rows.numbers.shape[0]
            if not size or not shard_size or size % shard_size or not layout.max_replica_rows:
                return None
            return int(size // shard_size * layout.max_replica_rows)

        kept = [
            segment if isinstance(segment, Rows) and max_rows(segment) else self._dense(group, segment)
            for group, segment in zip(self._groups, segments, strict=True)
        ]
        return kept, lambda rows: rows if is_alone else Rows(*_gather_lists(rows, max_rows(rows)))

    def unpack_for(
        self, optimizer: keras.optimizers.Optimizer, segments: Sequence[Segment], scale: tf.Tensor
    ) -> list[Any]:
        """Returns the gradients for an optimizer, one a variable, times a scale; sparse where it updates rows alone."""
        gradients = self.unpack(segments, scale, keeps_sparse=self._for_rows)
        self.reasons = {i: reason for i, reason in self.reasons.items() if reason == _HAS_NO_SIZE}
        for i, (gradient, variable) in enumerate(zip(gradients, self._variables, strict=True)):
            if isinstance(gradient, tf.IndexedSlices):
                reason = self.reasons[id(variable)] = row_updates.why_dense(optimizer, variable)
                if reason is not None:
                    gradients[i] = tf.convert_to_tensor(gradient)
        return gradients


def _gather_lists(tensors: Sequence[tf.Tensor], max_rows: int | None) -> list[tf.Tensor]:
    """Returns tensors with the rows of all replicas, in their order. Call in replica context.

    Args:
        tensors: `[n, ...]`, the same n for all, which may differ between replicas.
        max_rows: the largest n of any replica; None: unknown, where no collectives are used.
    """
    if max_rows is None:
        return [gathering.all_gather(tensor) for tensor in tensors]
    counts = gathering.all_gather(tf.shape(tensors[0])[:1])  # [R]
    return [gathering.all_gather_padded(tensor, counts, max_rows) for tensor in tensors]


def from_slices(gradient: tf.IndexedSlices, shape: Sequence[int]) -> Rows:
    """Returns the rows of a gradient from a tape.

    Args:
        gradient: indices `[n]`, values `[n, ...]`.
        shape: of the table, static.
    """
    numbers = tf.cast(tf.reshape(gradient.indices, [-1]), tf.int64)
    return Rows(numbers, tf.reshape(gradient.values, [tf.size(numbers), row_size(shape)]))


def to_slices(rows: Rows, shape: Sequence[int]) -> tf.IndexedSlices:
    """Returns rows as TensorFlow's optimizers take them; `shape` is that of the table."""
    values = tf.reshape(rows.values, [-1, *shape[1:]])
    return tf.IndexedSlices(values, rows.numbers, tf.constant(list(shape), tf.int64))


def to_dense(rows: Rows, shape: Sequence[int]) -> tf.Tensor:
    """Returns the whole gradient, `[rows of the table, width]`; duplicates are added in the order of the list."""
    return tf.math.unsorted_segment_sum(rows.values, rows.numbers, shape[0])


def row_size(shape: Sequence[int]) -> int:
    """Returns the elements in a row of a table."""
    return int(tf.TensorShape(shape[1:]).num_elements() or 1)


def join(summands: Sequence[Rows]) -> Rows:
    """Returns the sum of several gradients: their lists, one after the other."""
    return Rows(*(tf.concat(tensors, 0) for tensors in zip(*summands, strict=True)))


def merge(rows: Rows) -> Rows:
    """Returns rows whose numbers differ, in the order in which each occurs first.

    The values of a number are added in the order of the list, so that the same list gives the same bits anywhere.
    """
    numbers, segments = tf.unique(rows.numbers)
    return Rows(numbers, tf.math.unsorted_segment_sum(rows.values, segments, tf.size(numbers)))

"""Tables: what becomes of sparse gradients between the tape and the optimizer, and which tables a step walks.

    tables = Tables(state, update, variables, packing)
    gradients = [tables.sized(g, v) for g, v in zip(gradients, variables)]    # from the tape, before they are packed
    segments, gather = tables.gatherable(segments, batch, layout)             # before the reduction
    gradients = tables.unpack(segments, scale, optimizer)                     # for the optimizer
    report([tables], state, is_shown=True)                                    # once the step is traced

It does not know how a gradient is computed or a row updated.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf

from distloop.data import shards
from distloop.data.shards import Batch, Layout
from distloop.distributed import gathering, strategies
from distloop.monitoring.console import say
from distloop.optimizers import row_updates
from distloop.optimizers.gradients import Packing
from distloop.optimizers.sparse_gradients import Rows, Segment
from distloop.training.spec import Update
from distloop.training.state import TrainState

_HAS_NO_SIZE = (
    "it is not known how many rows replicas exchange: let the dataset end with batch(size, drop_remainder=True), a "
    "size that replicas and microbatches divide"
)
_MANY_ROWS = 100_000  # with fewer, a step hardly shows that it walks a table


class Tables:
    """The sparse gradients of an update.

    Attributes:
        variables: that the update trains.
        reasons: by `id`, the variables whose gradients are sparse, and why all of one is updated, as
            `row_updates.why_whole` returns it; known once the step is traced.
    """

    def __init__(self, state: TrainState, update: Update, variables: Sequence[Any], packing: Packing):
        """Stores the arguments: the state, the update, the variables that it trains and the layout of gradients."""
        self._state, self._update, self._packing = state, update, packing
        self.variables = variables
        self.reasons: dict[int, str | None] = {}
        # Collectives need to know the size of what they gather. Virtual replicas do alike without collectives.
        self._needs_sizes = state.virtual_replicas > 0 or strategies.uses_collectives(state.strategy)

    def sized(self, gradient: Any, variable: Any) -> Any:
        """Returns a variable's gradient; a sparse one is dense where sharding or an unknown size wants that."""
        if not isinstance(gradient, tf.IndexedSlices):
            return gradient
        if self._state.slot_placement.why_dense is not None:
            self.reasons[id(variable)] = self._state.slot_placement.why_dense
        elif self._needs_sizes and gradient.indices.shape[0] is None:
            self.reasons[id(variable)] = _HAS_NO_SIZE
        else:
            return gradient
        return tf.convert_to_tensor(gradient)

    def gatherable(
        self, segments: Sequence[Segment], batch: Batch, layout: Layout
    ) -> tuple[list[Segment], Callable[[Rows], Rows]]:
        """Returns the segments of a replica, and a function that gathers sparse ones from all replicas.

        Where collectives cannot gather a sparse segment, for want of its size, it is dense.

        Args:
            segments: packed gradients of a replica.
            batch: that they are of.
            layout: its layout.
        """
        if not strategies.uses_collectives(self._state.strategy):
            return list(segments), lambda rows: Rows(*gathering.gather_lists(rows, None))
        if not any(isinstance(segment, Rows) for segment in segments):
            return list(segments), lambda rows: rows
        turns = range(self._state.turns)
        sizes = [shards.batch_size(shards.take_shard(batch, layout, 1, turn)[0]) for turn in turns]
        shard_size = sum(sizes) if all(isinstance(size, int) for size in sizes) else None

        def max_rows(rows: Rows) -> int | None:
            size = rows.numbers.shape[0]
            if not size or not shard_size or size % shard_size or not layout.max_replica_rows:
                return None
            return int(size // shard_size * layout.max_replica_rows)

        kept = [
            segment if isinstance(segment, Rows) and max_rows(segment) else dense
            for segment, dense in zip(segments, self._packing.without_sparse(segments), strict=True)
        ]
        return kept, lambda rows: Rows(*gathering.gather_lists(rows, max_rows(rows)))

    def unpack(self, segments: Sequence[Segment], scale: tf.Tensor, optimizer: keras.optimizers.Optimizer) -> list[Any]:
        """Returns the gradients for an optimizer, one a variable, times a scale; sparse where it updates rows alone."""
        gradients = self._packing.unpack(segments, scale, keeps_sparse=self._update.gradient_fn is None)
        known = (self._state.slot_placement.why_dense, _HAS_NO_SIZE)
        self.reasons = {i: reason for i, reason in self.reasons.items() if reason is not None and reason in known}
        for i, (gradient, variable) in enumerate(zip(gradients, self.variables, strict=True)):
            if isinstance(gradient, tf.IndexedSlices):
                reason = self.reasons[id(variable)] = row_updates.why_whole(optimizer, variable)
                if reason is not None:
                    gradients[i] = tf.convert_to_tensor(gradient)
        return gradients

    @property
    def by_rows(self) -> set[int]:
        """The variables, by `id`, of which the optimizer updates the rows of the batch alone."""
        return {i for i, reason in self.reasons.items() if reason is None}


def report(tables: Iterable[Tables], state: TrainState, *, is_shown: bool) -> None:
    """Prints the tables of many rows that a step updates as a whole, and why, if anything is shown."""
    for of_update in tables if is_shown else ():
        for variable in (v for v in of_update.variables if id(v) in of_update.reasons and v.shape[0] >= _MANY_ROWS):
            if (reason := of_update.reasons[id(variable)]) is not None:
                table = f"the table {state.paths[id(variable)]} of {variable.shape[0]:,} rows"
                say(f"{table} is updated as a whole at each step, since {reason}")

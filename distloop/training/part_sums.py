"""The parts of a replica's rows, and what they add up to: microbatches in a loop, or virtual replicas in turn.

    sums = PartSums(update_pass, batch, layout, factor, "loss", before, is_first=True)
    segments, vector, metric_rows = sums.in_loop()                # in replica context

It does not know what is computed of a part, and sums nothing over replicas.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeAlias

import tensorflow as tf

from distloop.data import shards
from distloop.data.shards import Batch, Layout
from distloop.distributed import gathering
from distloop.distributed.placement import Sums
from distloop.distributed.strategies import TreeSum
from distloop.graph_functions import graph_function
from distloop.optimizers.gradients import Packing
from distloop.optimizers.sparse_gradients import Segment
from distloop.training.differentiation import divisor_of
from distloop.training.metric_state import Join
from distloop.training.state import TrainState
from distloop.training.variable_writes import WrittenValues
from distloop.training.virtual_replicas import Part, Turns, Written


@dataclass(frozen=True)
class Trace:
    """What tracing reveals about a pass: Python values, the same on every replica.

    Attributes:
        names: of the tallies, "loss" first, without the update's own name.
        outputs: the names that `loss_fn` returned, those of Keras metrics included.
        reached: by variable, whether the loss depends on it.
        written: the variables that the forward pass writes.
        has_tokens: whether the weight of the loss counts tokens.
        join: puts together the arguments of the Keras metrics.
    """

    names: list[str]
    outputs: set[str]
    reached: list[bool]
    written: list[Any]
    has_tokens: bool
    join: Join

    def divisor(self, value: str) -> int:
        """Returns the place of the weight that divides a value's gradients, among the flat tallies `[2 * M]`."""
        return 2 * self.names.index(divisor_of(value, self.names)) + 1


class _Pass(Protocol):
    """What is summed over the parts: `ForwardBackward`, whose attributes these are."""

    state: TrainState
    microbatches: int
    jit_compile: bool
    packing: Packing
    writable: list[Any]
    written_values: WrittenValues

    @property
    def name(self) -> str:
        """The name of the update."""

    def pull_back(
        self, rows: Any, row_weights: tf.Tensor | None, slopes: Sequence[tf.Tensor]
    ) -> tuple[list[Segment], list[bool]]:
        """Returns packed gradients by way of rows that virtual replicas exchanged, and which variables they reach."""

    def compute(
        self, rows: Any, row_weights: tf.Tensor | None, factor: tf.Tensor | None, value: str, *, is_first: bool
    ) -> tuple[list[Segment], tf.Tensor, list[tf.Tensor], list[tf.Tensor], Trace]:
        """Runs forward and backward over some rows."""


_Sum: TypeAlias = tuple[list[Segment], tf.Tensor]  # packed gradients; tallies and written values


class PartSums:
    """The sums over the parts of a replica's rows.

    Attributes:
        traces: of the parts, in order.
        joins: of their arguments of Keras metrics.
        after: by `id`, the values that virtual replicas wrote, which the variables do not have yet.
        pulled_back: packed gradients by way of the rows that virtual replicas exchanged; empty: they did not.
    """

    def __init__(
        self,
        update: _Pass,
        batch: Batch,
        layout: Layout,
        factor: tf.Tensor | None,
        value: str,
        before: Mapping[int, tf.Tensor],
        *,
        is_first: bool,
    ):
        """Prepares. `before` has the values that the written variables have when a part begins, by `id`.

        The other arguments are those of `ForwardBackward.__call__`.
        """
        self._update = update
        self._batch, self._layout, self._factor, self._value = batch, layout, factor, value
        self._before = before
        self._is_first = is_first
        self.traces: list[Trace] = []
        self.joins: list[Join] = []
        self.after: Written = {}
        self.pulled_back: list[tf.Tensor] = []

    def in_loop(self) -> Sums:
        """Adds up the microbatches of this replica, which go through a TensorFlow loop or a pipeline."""
        update, compute = self._update, self._compute
        if update.jit_compile:
            # No more than this: XLA cannot follow variables to another device, or a reduction. A function of its own
            # for each replica, which reads that replica's variables.
            compute = graph_function(compute, jit_compile=True)

        def microbatch(index: tf.Tensor | int) -> Sums:
            rows, row_weights, factor = self._arguments(index)
            results = compute(rows, row_weights, factor)
            written = self.traces[-1].written
            sums = self._summands(index, rows, row_weights, results, written)
            update.written_values.rewind(written, self._before, index)
            return sums

        row_specs = update.state.keras_metrics.row_specs.get(update.name, ()) if self._is_first else ()
        return update.state.placement.sum_microbatches(update.packing, update.microbatches, microbatch, row_specs)

    def in_turns(self) -> Sums:
        """Adds up the microbatches of each virtual replica of this replica, and these in a fixed tree."""
        update = self._update

        def compute(rows: Any, row_weights: tf.Tensor | None) -> Any:
            return self._compute(rows, row_weights, self._factor)

        data = self._batch, self._layout
        turns = Turns(update.state, *data, compute, microbatches=update.microbatches, before=self._before)
        sums = TreeSum[_Sum](self._add)
        slopes = TreeSum[list[tf.Tensor]](_add_lists)
        of_turn: list[_Sum] = []  # over its microbatches so far
        metric_rows: list[list[tf.Tensor]] = []

        def finish(part: Part) -> list[tf.Tensor]:
            variables = [v for v in update.writable if id(v) in part.written]
            self.traces[-1] = replace(self.traces[-1], written=variables)
            values = [part.written[id(v)] for v in variables]
            segments, vector, rows = self._summands(part.number, part.rows, part.row_weights, part.result, values)
            metric_rows.append(rows)
            kept = self._add(of_turn.pop(), (segments, vector)) if of_turn else (segments, vector)
            if (part.number + 1) % update.microbatches:
                of_turn.append(kept)
                return list(tf.nest.flatten(kept))
            kept = sums.append(kept)
            return [*tf.nest.flatten(kept), *slopes.append(part.slopes)]

        gathered, self.after = turns.run(finish)
        if gathered is not None:
            self.pulled_back = self._pull_back(turns, slopes.total())
        segments, vector = sums.total()
        return segments, vector, [tf.concat(rows, 0) for rows in zip(*metric_rows, strict=True)]

    def _pull_back(self, turns: Turns, slopes: list[tf.Tensor]) -> list[tf.Tensor]:
        """Returns the packed gradients by way of the rows that each virtual replica gave to all."""
        update = self._update
        if update.state.strategy.num_replicas_in_sync > 1:
            slopes = gathering.sum_in_tree(slopes)
        sums = TreeSum[list[tf.Tensor]](update.packing.add)

        def pull_back(rows: Any, row_weights: tf.Tensor | None) -> list[tf.Tensor]:
            segments, also = update.pull_back(rows, row_weights, slopes)
            reached = [a or b for a, b in zip(self.traces[-1].reached, also, strict=True)]
            self.traces[-1] = replace(self.traces[-1], reached=reached)
            return segments

        turns.again(pull_back, lambda part: sums.append(part.result))
        return sums.total()

    def _add(self, one: _Sum, other: _Sum) -> _Sum:
        return self._update.packing.add(one[0], other[0]), one[1] + other[1]

    def _arguments(self, part: tf.Tensor | int) -> tuple[Any, tf.Tensor | None, tf.Tensor | None]:
        """Returns the rows of a part, their weights, and the factor of the loss."""
        return *shards.take_shard(self._batch, self._layout, self._update.microbatches, part), self._factor

    def _compute(self, rows: Any, row_weights: tf.Tensor | None, factor: tf.Tensor | None) -> Any:
        *results, trace = self._update.compute(rows, row_weights, factor, self._value, is_first=self._is_first)
        self.traces.append(trace)
        return tuple(results)

    def _summands(
        self, part: tf.Tensor | int, rows: Any, row_weights: tf.Tensor | None, results: Any, values: Sequence[Any]
    ) -> Sums:
        """Returns what is summed of a part, which wrote these values to the written variables of its trace."""
        segments, tallies, fed, new_values = results
        trace = self.traces[-1]
        metric_rows = self._update.state.keras_metrics.add(trace.join(fed), row_weights)
        self.joins.append(metric_rows.join)
        count = shards.batch_size(rows) if row_weights is None else tf.reduce_sum(row_weights)
        flat = None
        if self._is_first:
            flat = self._update.written_values.flatten(trace.written, values, new_values, count, part)
        return segments, tallies if flat is None else tf.concat([tallies, flat], 0), metric_rows.tensors


def _add_lists(one: list[tf.Tensor], other: list[tf.Tensor]) -> list[tf.Tensor]:
    return [a + b for a, b in zip(one, other, strict=True)]

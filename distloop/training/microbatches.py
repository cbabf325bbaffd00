"""Microbatches of a replica's shard, the sums that they add up to, and virtual replicas.

    loop = LoopSums(packing, 4, row_specs)                         # of microbatches in a TensorFlow loop
    carried = loop.add(carried, sums)                              # in its body
    loop.total(carried)                                            # after it

    replicas = VirtualReplicas(state, compute, batch, layout, microbatches=2)
    microbatch = replicas(number, finished)                        # in replica context, numbers in their order

A device computes its virtual replicas one after the other, with random streams and statistics of their own. Of v on
each device, device d computes the virtual replicas from d * v on. What one computes has the same bits on any device of
a kind, as it is a function by itself: TensorFlow calls it as it stands, whatever surrounds it, and it writes nothing.
Where the function calls `gather_rows`, all virtual replicas give their rows in a first pass, and compute in a second
one, as GradCache does (Gao et al. 2021, arXiv:2101.06983).
"""

import contextlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from distloop.data.shards import Batch, BatchLayout, first_row_of, take_shard
from distloop.distributed import collectives, gathering, strategies
from distloop.distributed.gathering import NeedsRowsError, RowExchange
from distloop.graph_functions import graph_function
from distloop.model.keras_metrics import Join
from distloop.model.layers import stream_of
from distloop.model.state import TrainState
from distloop.model.variable_writes import own_values, recorded_writes, restored_writes
from distloop.optimizers.gradients import Packing, Rows, Segment
from distloop.training.differentiation import Objective, Trace
from distloop.training.window import RowLayout
from distloop.workers import environment

Compute = Callable[[Any, tf.Tensor | None], Any]  # of rows `[b, ...]` and their weights `[b]`
Values = Mapping[int, tf.Tensor]  # what a microbatch wrote: `id` of a variable -> its new value


class Microbatch(NamedTuple):
    """A microbatch of a replica, or of one of its virtual replicas, after it was computed."""

    number: tf.Tensor | int  # of the microbatch; with virtual replicas, of which each has all microbatches
    rows: Any  # [b, ...]
    row_weights: tf.Tensor | None  # [b]
    result: Any  # what the function returned
    mutated: Mapping[int, Any]  # by `id` of a variable, what the microbatch wrote, or the variable that has the value
    given: Sequence[tf.Tensor] = ()  # by call of `gather_rows`, the rows that it gave
    slopes: Sequence[tf.Tensor] = ()  # the derivatives by the rows that it got


class _Called(NamedTuple):
    """What a call of the function of a virtual replica gave, as a TensorFlow function returns it."""

    result: Any
    given: list[tf.Tensor]  # these two as of a `Microbatch`
    slopes: list[tf.Tensor]
    mutated: dict[str, tf.Tensor]  # the new values, by the index of their variable


class MicrobatchSums(NamedTuple):
    """The sums over one microbatch or several."""

    segments: list[Segment]  # packed gradients
    vector: tf.Tensor  # [n]: tallies and what else is summed
    slopes: Sequence[tf.Tensor]  # as of a `Microbatch`
    rows: list[list[tf.Tensor]]  # for Keras metrics, the rows of each microbatch, `[b, ...]`


class StateUpdate(NamedTuple):
    """What the forward pass makes of a variable, on a replica."""

    before: tf.Tensor  # its value before the step
    after: tf.Tensor  # its value after it


class Sums(NamedTuple):
    """An update's gradients after the reduction; all but `writes` is the same on every replica."""

    segments: list[Segment]  # packed gradients; of this replica alone if they are summed where they are used
    weight: tf.Tensor  # []: what divides them
    tallies: tf.Tensor  # [2 * m]: of all values; of a pass from other weights, total and weight of its value
    writes: dict[str, StateUpdate]  # of the variables that the forward pass writes, by their index in `writable`
    replacements: list[tf.Tensor]  # of the replaced variables
    secs: tf.Tensor | None  # [R]: of forward and backward on each replica; None: there is only one
    noise: tf.Tensor | None = None  # [2]: `gradient_noise.of_microbatch` over all; None: it is not measured
    are_finite: Sequence[tf.Tensor] = ()  # [] each: conditions on the passes that led to it


@dataclass
class ShardSums:
    """A replica's shard in one pass, and what its microbatches, of virtual replicas if there are any, add up to.

    Attributes:
        batch: the global one.
        layout: of it.
        before: by `id`, the values that the mutated variables have when a microbatch begins.
        objective: what is differentiated.
        traces: of the microbatches, in order.
        joins: of their arguments of Keras metrics.
        rows: the layouts of the vectors that they add up.
        after: by `id`, values that variables do not have yet.
        segments: packed gradients.
        vectors: what else is summed, by name: "tallies", "writes", "noise", "secs", and "pulled_back", packed gradients
            by way of rows that were exchanged.
        divisor: the position in the tallies of the weight that divides the gradients.
    """

    batch: Batch
    layout: BatchLayout
    before: Mapping[int, tf.Tensor]
    objective: Objective
    traces: list[Trace] = field(default_factory=list)
    joins: list[Join] = field(default_factory=list)
    rows: list[RowLayout] = field(default_factory=list)
    after: dict[int, tf.Tensor] = field(default_factory=dict)
    segments: Sequence[Segment] = ()
    vectors: dict[str, Any] = field(default_factory=dict)
    divisor: int = 1


class _Carried(NamedTuple):
    """The values that a loop over microbatches carries."""

    index: tf.Tensor  # []: of the next microbatch
    dense: list[tf.Tensor]  # the sums of the segments that are dense
    vector: tf.Tensor  # [n]; one zero before the first microbatch, for any n
    arrays: list[tf.TensorArray]  # rows of each microbatch: of sparse segments, then for Keras metrics


class SparseSegmentsError(Exception):
    """Other segments are sparse than a loop was made for."""


class LoopSums:
    """The sums that a TensorFlow loop adds up, in which the activations of one microbatch are in memory at a time.

    The lists of sparse segments become one list, as rows do.

    Attributes:
        start, shapes: what the loop carries into the first microbatch, and its shapes.
    """

    def __init__(self, packing: Packing, count: int, row_specs: Sequence[tf.TensorSpec]):
        """Prepares.

        Args:
            packing: the layout of the gradients.
            count: how many microbatches there are.
            row_specs: of the rows for Keras metrics.
        """
        self._packing, self._count, self._sparse = packing, count, sorted(packing.sparse)
        self._size = tf.TensorShape([None])  # of the vector, known once the body was traced
        self._lengths: list[int | None] = []  # of the sparse segments of a microbatch; likewise
        specs = [*(spec for i in self._sparse for spec in packing.row_specs(i)), *row_specs]
        self._are_dense = [i not in packing.sparse for i in range(len(packing.shapes))]
        shapes = list(itertools.compress(packing.shapes, self._are_dense))
        zeros = [*map(tf.zeros, shapes, itertools.compress(packing.dtypes, self._are_dense))]
        arrays = [tf.TensorArray(spec.dtype, count, infer_shape=False, element_shape=spec.shape) for spec in specs]
        self.start = _Carried(tf.constant(0), zeros, tf.zeros([1]), arrays)
        self.shapes = _Carried(tf.TensorShape([]), shapes, tf.TensorShape([None]), [tf.TensorShape(None)] * len(arrays))

    def add(self, carried: _Carried, more: MicrobatchSums) -> _Carried:
        """Returns what the loop carries after a microbatch.

        Raises:
            SparseSegmentsError: if the packing did not know which segments are sparse, which it knows now.
        """
        if self._packing.has_other_sparse(more.segments):
            raise SparseSegmentsError
        self._size, self._lengths = more.vector.shape, [more.segments[i].numbers.shape[0] for i in self._sparse]
        rows = [*(tensor for i in self._sparse for tensor in more.segments[i]), *more.rows[0]]
        dense = zip(carried.dense, itertools.compress(more.segments, self._are_dense), strict=True)
        arrays = [array.write(carried.index, new) for array, new in zip(carried.arrays, rows, strict=True)]
        return _Carried(carried.index + 1, [a + b for a, b in dense], carried.vector + more.vector, arrays)

    def total(self, carried: _Carried) -> MicrobatchSums:
        """Returns the sums after the loop."""
        joined, dense = iter([array.concat() for array in carried.arrays]), iter(carried.dense)
        lists = {i: Rows(next(joined), next(joined)) for i in self._sparse}
        for rows, length in zip(lists.values(), self._lengths, strict=True):  # TensorFlow does not see them
            rows.numbers.set_shape([None if length is None else self._count * length])
        segments = [lists[i] if i in lists else next(dense) for i in range(len(self._are_dense))]
        return MicrobatchSums(segments, tf.ensure_shape(carried.vector, self._size), [], [list(joined)])


class VirtualReplicas:
    """The virtual replicas that a device computes, one after the other; each may have microbatches.

    Attributes:
        rows: by call of `gather_rows`, those of all virtual replicas, `[B, ...]`; None: it does not gather rows.
        after: by `id`, what variables have after the first virtual replica, random streams included.
    """

    def __init__(
        self,
        state: TrainState,
        fn: Compute,
        batch: Batch,
        layout: BatchLayout,
        microbatches: int = 1,
        before: Values | None = None,
        *,
        rows: Sequence[tf.Tensor] | None = None,
    ):
        """Prepares; call it in replica context.

        Args:
            state: whose weights the function reads.
            fn: takes rows and their weights; returns tensors. It may write Keras variables that are not trained. It is
                called as that of `tf.function`, and knows nothing of virtual replicas.
            batch: the global batch.
            layout: its layout.
            microbatches: of each virtual replica; random streams go on from one to the next.
            before: by `id`, the values with which a virtual replica begins; None: those that variables have now.
            rows: as the attribute; empty: the function gives rows and gets zeros.
        """
        self._state, self._fn, self._batch, self._layout = state, fn, batch, layout
        self._microbatches, self.count = microbatches, layout.per_device * microbatches
        self._variables = [v for v in state.untrained_variables if isinstance(v, keras.Variable)]
        self._seeds = {id(seed) for seed in state.seeds}
        self._before = [tf.convert_to_tensor((before or {}).get(id(v), v)) for v in self._variables]
        self._width = side_by_side(state.strategy)
        self._call: Callable[..., Any] = self._isolated
        if not tf.executing_eagerly() and self.count > 1:
            self._call = graph_function(self._isolated, experimental_attributes={"_noinline": True})
        self.rows = rows
        self.after = self._mutated = dict[int, tf.Tensor]()

    def __call__(self, number: int, finished: Sequence[Any]) -> Microbatch:
        """Computes a microbatch, with the rows of all virtual replicas where the function gathers rows.

        Of a GPU one microbatch is in memory at a time, of a CPU as many as it has cores for.

        Args:
            number: of the microbatch, in their order: first those of the first virtual replica.
            finished: for each microbatch before it, tensors that are there when its memory is free.
        """
        index, microbatch = divmod(number, self._microbatches)
        values = self._values(index, self._mutated if microbatch else {})
        rows, row_weights = take_shard(self._batch, self._layout, self._microbatches, number)
        position = first_row_of(self._batch, self._layout, index)
        waits_for = finished[number - self._width] if number >= self._width else []
        with tf.control_dependencies(tf.nest.flatten(waits_for, expand_composites=True)):
            try:
                called = self._call(values, rows, row_weights, position, self.rows)
            except NeedsRowsError:
                self.rows = self._collect()
                called = self._call(values, rows, row_weights, position, self.rows)
        self._mutated = {id(self._variables[int(i)]): value for i, value in called.mutated.items()}
        if not index:
            self.after = self._mutated
        return Microbatch(number, rows, row_weights, called.result, self._mutated, called.given, called.slopes)

    def of_same_rows(self, fn: Compute) -> "VirtualReplicas":
        """Returns the virtual replicas of another function, which gives rows and gets none, from the same values."""
        before = {id(v): value for v, value in zip(self._variables, self._before, strict=True)}
        return VirtualReplicas(self._state, fn, self._batch, self._layout, self._microbatches, before, rows=())

    def _collect(self) -> list[tf.Tensor]:
        """Returns the rows that all virtual replicas give, in the order of the global batch."""
        replicas, given = self.of_same_rows(self._fn), list[Sequence[tf.Tensor]]()
        for number in range(self.count):
            given.append(replicas(number, given).given)
        rows = [join_rows(pieces) for pieces in zip(*given, strict=True)]
        if self._state.strategy.num_replicas_in_sync == 1:
            return rows
        if strategies.uses_collectives(self._state.strategy):
            setting = self._state.replicas.setting
            raise ValueError(
                f"The loss compares all rows of a batch (gather_rows), and {setting} was given with collectives, as "
                "several workers use, by which distloop does not exchange them bit for bit: use one worker, or no "
                "virtual replicas."
            )
        return gathering.gather_all(rows, "The loss calls gather_rows")

    def _values(self, index: int, earlier: Values) -> list[tf.Tensor]:
        """Returns the values with which a virtual replica's microbatch begins; `earlier`: what the one before wrote."""
        values = []
        for variable, value in zip(self._variables, self._before, strict=True):
            if id(variable) in self._seeds:
                value = earlier.get(id(variable), stream_of(value, index))
            values.append(value)
        return values

    def _isolated(
        self, values: Any, rows: Any, row_weights: tf.Tensor | None, position: Any, all_rows: Sequence[tf.Tensor] | None
    ) -> _Called:
        """Calls the function with values for the variables."""
        state, (first, total) = self._state, position
        trained = state.trained_variables
        candidates = [*state.untrained_variables, *trained, *state.created.values()]
        # Eagerly, it is not known which of them are written.
        nothing: contextlib.AbstractContextManager[list[Any]] = contextlib.nullcontext([])
        recorded = nothing if tf.executing_eagerly() else recorded_writes(candidates)
        with recorded as found, own_values(self._variables, values) as own:
            exchange = RowExchange(first, total, all_rows)
            with gathering.exchanging(exchange):
                result = self._fn(rows, row_weights)
        found += [v for v in trained if own.get_current_value(v) is not None]
        if found:
            name = state.paths.get(id(found[0]), found[0].name.partition(":")[0])
            raise ValueError(
                f"{state.replicas.setting} was given, but the forward pass writes {name!r}, of which "
                "virtual replicas cannot have values of their own: make it a weight of a Keras layer, with "
                "add_weight(trainable=False)."
            )
        after = [own.get_current_value(v) for v in self._variables]
        mutated = {str(i): new for i, (new, old) in enumerate(zip(after, values, strict=True)) if new is not old}
        return _Called(result, exchange.given, exchange.slopes, mutated)


def run_forward(
    state: TrainState, layout: BatchLayout, batch: Batch, fn: Callable[[Any, tf.Tensor | None], Any]
) -> list[Any]:
    """Runs a forward pass over a replica's rows, and restores what it wrote, random streams aside; in replica context.

    Args:
        state: whose model it is.
        layout: of the batch.
        batch: the global batch.
        fn: takes rows `[b, ...]` and their weights, and returns tensors.

    Returns:
        What `fn` returned for the rows of each virtual replica; without them, for those of this replica.
    """
    if not state.replicas.same_bits:
        with restored_writes(state):
            return [fn(*take_shard(batch, layout))]
    replicas, results = VirtualReplicas(state, fn, batch, layout), list[Any]()
    for number in range(replicas.count):
        results.append(replicas(number, results).result)
    for seed in state.seeds:
        if id(seed) in replicas.after:
            seed.assign(replicas.after[id(seed)])
    return results


def join_rows(pieces: Sequence[tf.Tensor]) -> tf.Tensor:
    """Returns the rows of several tensors in one."""
    return tf.concat(pieces, 0) if len(pieces) > 1 else pieces[0]


def side_by_side(strategy: tf.distribute.Strategy) -> int:
    """Returns how many microbatches a device computes at the same time; each holds the activations of its rows."""
    if strategies.has_gpus(strategy):
        return 1
    return max(1, environment.count_cores() // collectives.num_local_replicas(strategy))

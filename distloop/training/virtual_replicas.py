"""Virtual replicas, which a device computes one after the other, with random streams and statistics of their own.

    replicas = VirtualReplicas(state, batch, layout, microbatches=2)
    replicas.sum_microbatches(compute, of_microbatch, add)         # in replica context

Of v on each device, device d computes the virtual replicas from d * v on. What one computes has the same bits on any
device of a kind, as it is a function by itself: TensorFlow calls it as it stands, whatever surrounds it, and it writes
nothing. Where the function calls `gather_rows`, all virtual replicas give their rows in a first pass, and compute in a
second one, as GradCache does (Gao et al. 2021, arXiv:2101.06983).
"""

import contextlib
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import keras
import tensorflow as tf

from distloop.data.shards import Batch, BatchLayout, first_row_of, take_shard
from distloop.distributed import collectives, gathering, strategies
from distloop.distributed.gathering import NeedsRowsError, RowExchange
from distloop.distributed.strategies import TreeSum
from distloop.graph_functions import graph_function
from distloop.model.layers import stream_of
from distloop.model.state import TrainState
from distloop.model.variable_writes import own_values, recorded_writes, restored_writes
from distloop.workers import environment

T = TypeVar("T")
Compute = Callable[[Any, tf.Tensor | None], Any]  # of rows `[b, ...]` and their weights `[b]`
Values = Mapping[int, tf.Tensor]  # what a microbatch wrote: `id` of a variable -> its new value
Rows = Sequence[tf.Tensor]  # by call of `gather_rows`, those of all virtual replicas, `[B, ...]`


class Microbatch(NamedTuple):
    """A microbatch of a replica, or of one of its virtual replicas, after it was computed."""

    number: tf.Tensor | int  # of the microbatch; with virtual replicas, of which each has all microbatches
    rows: Any  # [b, ...]
    row_weights: tf.Tensor | None  # [b]
    result: Any  # what the function returned
    mutated: Mapping[int, Any]  # by `id` of a variable, what the microbatch wrote, or the variable that has the value
    given: Sequence[tf.Tensor] = ()  # by call of `gather_rows`, the rows that it gave
    slopes: Sequence[tf.Tensor] = ()  # the derivatives by the rows that it got


class VirtualReplicas:
    """The virtual replicas that a device computes, one after the other; each may have microbatches.

    Attributes:
        rows: that the function gathered from all virtual replicas; None: it does not gather rows.
        after: by `id`, what variables have after the first virtual replica, random streams included.
    """

    def __init__(
        self, state: TrainState, batch: Batch, layout: BatchLayout, microbatches: int = 1, before: Values | None = None
    ):
        """Prepares; call it in replica context.

        Args:
            state: whose weights the function reads.
            batch: the global batch.
            layout: its layout.
            microbatches: of each virtual replica; random streams go on from one to the next.
            before: by `id`, the values with which a virtual replica begins; None: those that variables have now.
        """
        self._state = state
        self._batch, self._layout = batch, layout
        self._microbatches = microbatches
        self._variables = [v for v in state.untrained_variables if isinstance(v, keras.Variable)]
        self._seeds = {id(seed) for seed in state.seeds}
        before = before or {}
        self._before = [tf.convert_to_tensor(before.get(id(v), v)) for v in self._variables]
        self.rows: Rows | None = None
        self.after: Values = {}

    def sum_microbatches(self, fn: Compute, of_microbatch: Callable[[Microbatch], T], add: Callable[[T, T], T]) -> T:
        """Adds up what is computed of each microbatch: microbatches in order, virtual replicas in a fixed tree.

        Where the function gathers rows, it is called with those of all virtual replicas. Of a GPU one microbatch is in
        memory at a time, of a CPU as many as it has cores for.

        Args:
            fn: takes rows and their weights; returns tensors. It may write Keras variables that are not trained.
            of_microbatch: returns what is summed of a microbatch, a structure of tensors.
            add: adds two of them.
        """
        try:
            total, self.after = self._sum_microbatches(fn, of_microbatch, add, None)
        except NeedsRowsError:
            self.rows = self._collect(fn)
            total, self.after = self._sum_microbatches(fn, of_microbatch, add, self.rows)
        return total

    def sum_again(self, fn: Compute, of_microbatch: Callable[[Microbatch], T], add: Callable[[T, T], T]) -> T:
        """Adds up the microbatches of another function, which gives rows and gets none, from the same values."""
        return self._sum_microbatches(fn, of_microbatch, add, ())[0]

    def _collect(self, fn: Compute) -> list[tf.Tensor]:
        """Returns the rows that all virtual replicas give, in the order of the global batch."""
        given = self.sum_again(fn, lambda microbatch: [microbatch.given], operator.add)
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

    def _sum_microbatches(
        self, fn: Compute, of_microbatch: Callable[[Microbatch], T], add: Callable[[T, T], T], all_rows: Rows | None
    ) -> tuple[T, Values]:
        """Returns the sum, and what variables have after the first virtual replica."""
        isolated: Callable[..., Any] = lambda *arguments: self._isolated(fn, *arguments)  # noqa: E731
        total = self._layout.per_device * self._microbatches
        if not tf.executing_eagerly() and total > 1:
            isolated = graph_function(isolated, experimental_attributes={"_noinline": True})
        width = side_by_side(self._state.strategy)
        sums = TreeSum[T](add)
        of_replica: T | None = None  # over its microbatches so far
        kept: list[list[tf.Tensor]] = []
        after_first: Values = {}
        mutated: Values = {}
        for number in range(total):
            index, microbatch = divmod(number, self._microbatches)
            values = self._values(index, mutated if microbatch else {})
            rows, row_weights = take_shard(self._batch, self._layout, self._microbatches, number)
            position = first_row_of(self._batch, self._layout, index)
            with tf.control_dependencies(kept[number - width] if number >= width else []):
                result, given, slopes, by_index = isolated(values, rows, row_weights, position, all_rows)
            mutated = {id(self._variables[int(i)]): value for i, value in by_index.items()}
            if not index:
                after_first = mutated
            more = of_microbatch(Microbatch(number, rows, row_weights, result, mutated, given, slopes))
            of_replica = more if of_replica is None else add(of_replica, more)
            largest = of_replica
            if microbatch + 1 == self._microbatches:
                largest, of_replica = sums.append(of_replica), None
            kept.append(tf.nest.flatten(largest, expand_composites=True))
        return sums.total(), after_first

    def _values(self, index: int, earlier: Values) -> list[tf.Tensor]:
        """Returns the values with which a virtual replica's microbatch begins; `earlier`: what the one before wrote."""
        values = []
        for variable, value in zip(self._variables, self._before, strict=True):
            if id(variable) in self._seeds:
                value = earlier.get(id(variable), stream_of(value, index))
            values.append(value)
        return values

    def _isolated(
        self, fn: Compute, values: Any, rows: Any, row_weights: tf.Tensor | None, position: Any, all_rows: Rows | None
    ) -> tuple[Any, list[tf.Tensor], list[tf.Tensor], dict[str, tf.Tensor]]:
        """Calls a function with values for the variables; returns result, given, slopes, and new values by index."""
        state, (first, total) = self._state, position
        trained = state.trained_variables
        candidates = [*state.untrained_variables, *trained, *state.created.values()]
        # Eagerly, it is not known which of them are written.
        nothing: contextlib.AbstractContextManager[list[Any]] = contextlib.nullcontext([])
        recorded = nothing if tf.executing_eagerly() else recorded_writes(candidates)
        with recorded as found, own_values(self._variables, values) as own:
            with gathering.exchanging(RowExchange(first, total, all_rows)) as exchange:
                result = fn(rows, row_weights)
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
        return result, exchange.given, exchange.slopes, mutated


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
    replicas = VirtualReplicas(state, batch, layout)
    results = replicas.sum_microbatches(fn, lambda microbatch: [microbatch.result], operator.add)
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

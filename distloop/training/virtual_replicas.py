"""The virtual replicas of a run, which take turns on each replica with random streams and statistics of their own.

    turns = Turns(state, batch, layout, compute, microbatches=2)
    turns.run(finish)                                              # in replica context

Turn t of replica r is virtual replica r * T + t. What it computes has the same bits on any device of a kind, as it is a
function by itself: TensorFlow calls it as it stands, whatever surrounds it, and it writes nothing. Where the function
calls `gather_rows`, all turns give their rows in a first pass, and compute in a second one, as GradCache does (Gao et
al. 2021, arXiv:2101.06983). It does not know what is computed, or how results are added.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from distloop.data.shards import Batch, Layout, place_of_shard, take_shard
from distloop.distributed import environment, gathering, strategies, workers
from distloop.distributed.gathering import NeedsRowsError, RowExchange
from distloop.graph_functions import graph_function
from distloop.training.random_streams import stream_of
from distloop.training.state import TrainState
from distloop.training.variable_writes import own_values, recorded_writes, restored_writes

Written = Mapping[int, tf.Tensor]  # what a part of a turn wrote: `id` of a variable -> its new value
Rows = Sequence[tf.Tensor]  # by call of `gather_rows`, those of all virtual replicas, `[B, ...]`


class Part(NamedTuple):
    """A microbatch of a virtual replica, after its turn."""

    number: int  # the turn times the microbatches, plus the microbatch
    rows: Any  # [b, ...]
    row_weights: tf.Tensor | None  # [b]
    result: Any  # what the function returned
    given: list[tf.Tensor]  # by call of `gather_rows`, the rows that it gave
    slopes: list[tf.Tensor]  # the derivatives by the rows that it got
    written: Written


class Turns:
    """Calls a function for each virtual replica of this replica, or for each microbatch of it, in order."""

    def __init__(
        self,
        state: TrainState,
        batch: Batch,
        layout: Layout,
        fn: Callable[[Any, tf.Tensor | None], Any],
        *,
        microbatches: int = 1,
        before: Mapping[int, tf.Tensor] | None = None,
    ):
        """Prepares; call it in replica context.

        Args:
            state: whose weights the function reads.
            batch: the global batch.
            layout: its layout.
            fn: takes rows and their weights; returns tensors. It may write Keras variables that are not trained.
            microbatches: of each virtual replica; random streams go on from one to the next.
            before: by `id`, the values that variables have when a turn begins; None: those that they have now.
        """
        self._state = state
        self._batch, self._layout = batch, layout
        self._microbatches = microbatches
        self._variables = [v for v in state.untrained_variables if isinstance(v, keras.Variable)]
        self._seeds = {id(seed) for seed in state.seeds}
        before = before or {}
        self._before = [tf.convert_to_tensor(before.get(id(v), v)) for v in self._variables]
        self._fn = fn

    def run(self, finish: Callable[[Part], Sequence[tf.Tensor]]) -> tuple[Rows | None, Written]:
        """Calls the function for each part of each turn; where it gathers rows, with those of all virtual replicas.

        Of a GPU one part is in memory at a time, of a CPU as many as it has cores for.

        Args:
            finish: takes a part after its turn; returns the tensors that are kept of it.

        Returns:
            The rows that the function gathered, None if it does not; and what the variables have after the first turn,
            random streams included.
        """
        try:
            return None, self._run(self._fn, finish, None)
        except NeedsRowsError:
            rows = self._collect()
        return rows, self._run(self._fn, finish, rows)

    def again(self, fn: Callable[[Any, tf.Tensor | None], Any], finish: Callable[[Part], Sequence[tf.Tensor]]) -> None:
        """Calls another function, of which the turns give rows and get none, from the same values as before."""
        self._run(fn, finish, ())

    def _collect(self) -> list[tf.Tensor]:
        """Returns the rows that all turns on all replicas give, in the order of the global batch."""
        given: list[list[tf.Tensor]] = []

        def finish(part: Part) -> list[tf.Tensor]:
            given.append(part.given)
            return part.given

        self._run(self._fn, finish, ())
        rows = [join_rows(pieces) for pieces in zip(*given, strict=True)]
        if self._state.strategy.num_replicas_in_sync == 1:
            return rows
        if strategies.uses_collectives(self._state.strategy):
            count = self._state.virtual_replicas
            raise ValueError(
                f"The loss compares all rows of a batch (gather_rows), and virtual_replicas={count} was given with "
                "collectives, as several workers use, by which distloop does not exchange them bit for bit: use one "
                "worker, or virtual_replicas=0."
            )
        return gathering.gather_all(rows, "The loss calls gather_rows")

    def _run(
        self, fn: Callable[..., Any], finish: Callable[[Part], Sequence[tf.Tensor]], all_rows: Rows | None
    ) -> Written:
        isolated: Callable[..., Any] = lambda *arguments: self._isolated(fn, *arguments)  # noqa: E731
        if not tf.executing_eagerly() and self._state.turns * self._microbatches > 1:
            isolated = graph_function(isolated, experimental_attributes={"_noinline": True})
        width = side_by_side(self._state.strategy)
        kept: list[Sequence[tf.Tensor]] = []
        after_first: Written = {}
        written: Written = {}
        for number in range(self._state.turns * self._microbatches):
            turn, microbatch = divmod(number, self._microbatches)
            values = self._values(turn, written if microbatch else {})
            rows, row_weights = take_shard(self._batch, self._layout, self._microbatches, number)
            place = place_of_shard(self._batch, self._layout, turn)
            with tf.control_dependencies(kept[number - width] if number >= width else []):
                result, given, slopes, by_place = isolated(values, rows, row_weights, place, all_rows)
            written = {id(self._variables[int(place)]): value for place, value in by_place.items()}
            if not turn:
                after_first = written
            kept.append(finish(Part(number, rows, row_weights, result, given, slopes, written)))
        return after_first

    def _values(self, turn: int, earlier: Written) -> list[tf.Tensor]:
        """Returns the values that a part of a turn begins with; `earlier` holds what the part before it wrote."""
        values = []
        for variable, value in zip(self._variables, self._before, strict=True):
            if id(variable) in self._seeds:
                value = earlier.get(id(variable), stream_of(value, turn))
            values.append(value)
        return values

    def _isolated(
        self,
        fn: Callable[..., Any],
        values: list[tf.Tensor],
        rows: Any,
        row_weights: tf.Tensor | None,
        place: tuple[tf.Tensor, tf.Tensor],
        all_rows: Rows | None,
    ) -> tuple[Any, list[tf.Tensor], list[tf.Tensor], dict[str, tf.Tensor]]:
        """Calls a function with values for the variables; returns result, given, slopes, and new values by place."""
        state = self._state
        trained = state.trained_variables
        candidates = [*state.untrained_variables, *trained, *state.created.values()]
        # Eagerly, it is not known which of them are written.
        nothing: contextlib.AbstractContextManager[list[Any]] = contextlib.nullcontext([])
        recorded = nothing if tf.executing_eagerly() else recorded_writes(candidates)
        with recorded as found, own_values(self._variables, values) as own:
            with gathering.exchanging(RowExchange(*place, all_rows)) as exchange:
                result = fn(rows, row_weights)
        found += [v for v in trained if own.get_current_value(v) is not None]
        if found:
            name = state.paths.get(id(found[0]), found[0].name.partition(":")[0])
            raise ValueError(
                f"virtual_replicas={state.virtual_replicas} was given, but the forward pass writes {name!r}, of which "
                "virtual replicas cannot have values of their own: make it a weight of a Keras layer, with "
                "add_weight(trainable=False)."
            )
        new_values = [own.get_current_value(v) for v in self._variables]
        written = {str(i): new for i, (new, old) in enumerate(zip(new_values, values, strict=True)) if new is not old}
        return result, exchange.given, exchange.slopes, written


def run_forward(
    state: TrainState, layout: Layout, batch: Batch, fn: Callable[[Any, tf.Tensor | None], Any]
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
    if not state.virtual_replicas:
        with restored_writes(state):
            return [fn(*take_shard(batch, layout))]
    results: list[Any] = []

    def finish(part: Part) -> list[tf.Tensor]:
        results.append(part.result)
        kept: list[tf.Tensor] = tf.nest.flatten(part.result, expand_composites=True)
        return kept

    _, after = Turns(state, batch, layout, fn).run(finish)
    for seed in state.seeds:
        if id(seed) in after:
            seed.assign(after[id(seed)])
    return results


def join_rows(pieces: Sequence[tf.Tensor]) -> tf.Tensor:
    """Returns the rows of several tensors in one."""
    return tf.concat(pieces, 0) if len(pieces) > 1 else pieces[0]


def side_by_side(strategy: tf.distribute.Strategy) -> int:
    """Returns how many turns of a replica run at the same time; each holds the activations of its rows."""
    if strategies.has_gpus(strategy):
        return 1
    return max(1, environment.count_cores() // workers.num_local_replicas(strategy))

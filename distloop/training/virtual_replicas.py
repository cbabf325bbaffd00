"""The virtual replicas of a run, which take turns on each replica with random streams and statistics of their own.

    turns = Turns(state, compute, microbatches=2)
    turns.run(lambda part: shards.take_shard(batch, layout, 2, part), finish)      # in replica context

Turn t of replica r is virtual replica r * T + t. What it computes has the same bits on any device of a kind, as it is a
function by itself: TensorFlow calls it as it stands, whatever surrounds it, and it writes nothing. It does not know
what is computed, or how results are added.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from distloop.data.shards import Batch, Layout, take_shard
from distloop.distributed import cores, gathering, strategies, workers
from distloop.graph_functions import graph_function
from distloop.training.random_streams import stream_of
from distloop.training.state import TrainState
from distloop.training.variable_writes import own_values, recorded_writes, restored_writes

Written = Mapping[int, tf.Tensor]  # what a part of a turn wrote: `id` of a variable -> its new value


class Turns:
    """Calls a function for each virtual replica of this replica, or for each microbatch of it, in order."""

    def __init__(
        self,
        state: TrainState,
        fn: Callable[..., Any],
        *,
        microbatches: int = 1,
        before: Mapping[int, tf.Tensor] | None = None,
    ):
        """Prepares; call it in replica context.

        Args:
            state: whose weights the function reads.
            fn: computes a part; returns tensors. It may write Keras variables that are not trained.
            microbatches: of each virtual replica; random streams go on from one to the next.
            before: by `id`, the values that variables have when a turn begins; None: those that they have now.
        """
        self._state = state
        self._microbatches = microbatches
        self._variables = [v for v in state.untrained_variables if isinstance(v, keras.Variable)]
        self._seeds = {id(seed) for seed in state.seeds}
        before = before or {}
        self._before = [tf.convert_to_tensor(before.get(id(v), v)) for v in self._variables]
        self._fn = fn
        self._call = self._isolated
        if not tf.executing_eagerly() and state.turns * microbatches > 1:
            self._call = graph_function(self._isolated, experimental_attributes={"_noinline": True})

    def run(
        self,
        arguments: Callable[[int], Sequence[Any]],
        finish: Callable[[int, Sequence[Any], Any, Written], Sequence[tf.Tensor]],
    ) -> Written:
        """Calls the function for each part of each turn.

        Of a GPU one part is in memory at a time, of a CPU as many as it has cores for.

        Args:
            arguments: of the function, by the number of a part: its turn times the microbatches, plus the microbatch.
            finish: takes the number of a part, the arguments, what the function returned, and what it wrote; returns
                the tensors that are kept of it.

        Returns:
            What the variables have after the first turn, random streams included.
        """
        width = side_by_side(self._state.strategy)
        kept: list[Sequence[tf.Tensor]] = []
        after_first: Written = {}
        written: Written = {}
        for part in range(self._state.turns * self._microbatches):
            turn, microbatch = divmod(part, self._microbatches)
            values = self._values(turn, written if microbatch else {})
            of_part = arguments(part)
            with tf.control_dependencies(kept[part - width] if part >= width else []):
                result, by_place = self._call(values, *of_part)
            written = {id(self._variables[int(place)]): value for place, value in by_place.items()}
            if not turn:
                after_first = written
            kept.append(finish(part, of_part, result, written))
        return after_first

    def _values(self, turn: int, earlier: Written) -> list[tf.Tensor]:
        """Returns the values that a part of a turn begins with; `earlier` holds what the part before it wrote."""
        values = []
        for variable, value in zip(self._variables, self._before, strict=True):
            if id(variable) in self._seeds:
                value = earlier.get(id(variable), stream_of(value, turn))
            values.append(value)
        return values

    def _isolated(self, values: list[tf.Tensor], *arguments: Any) -> tuple[Any, dict[str, tf.Tensor]]:
        """Calls the function with values for the variables; returns its result and, by their places, new values."""
        state = self._state
        trained = state.trained_variables
        candidates = [*state.untrained_variables, *trained, *state.created.values()]
        # Eagerly, it is not known which of them are written.
        nothing: contextlib.AbstractContextManager[list[Any]] = contextlib.nullcontext([])
        recorded = nothing if tf.executing_eagerly() else recorded_writes(candidates)
        with recorded as written, own_values(self._variables, values) as own:
            with gathering.taking_turns(state.virtual_replicas):
                result = self._fn(*arguments)
        written += [v for v in trained if own.get_current_value(v) is not None]
        if written:
            name = state.paths.get(id(written[0]), written[0].name.partition(":")[0])
            raise ValueError(
                f"virtual_replicas={state.virtual_replicas} was given, but the forward pass writes {name!r}, of which "
                "virtual replicas cannot have values of their own: make it a weight of a Keras layer, with "
                "add_weight(trainable=False)."
            )
        new_values = [own.get_current_value(v) for v in self._variables]
        return result, {
            str(place): new for place, (new, old) in enumerate(zip(new_values, values, strict=True)) if new is not old
        }


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

    def finish(part: int, arguments: Sequence[Any], result: Any, written: Written) -> list[tf.Tensor]:
        results.append(result)
        kept: list[tf.Tensor] = tf.nest.flatten(result, expand_composites=True)
        return kept

    after = Turns(state, fn).run(lambda part: take_shard(batch, layout, 1, part), finish)
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
    return max(1, cores.count() // workers.num_local_replicas(strategy))

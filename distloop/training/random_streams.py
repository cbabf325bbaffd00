"""Random streams: the states of a model's random generators, separate on each replica.

    streams = RandomStreams(strategy, seeds)
    with streams.preserved():                        # their states are restored on exit
        predict()

The replicas' streams of one generator start `SEED_STRIDE` apart and advance together. Of virtual replicas each has a
stream, and the variable on a replica holds that of its first one. The states of recurrent layers go
on from batch to batch as they do, and are read and written along with them. It does not know who draws the numbers.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from distloop.graph_functions import graph_function

# Offset between the keys of the random streams of two replicas; a prime, so that few streams meet.
SEED_STRIDE = 1_000_003


class RandomStreams:
    """The random streams of a model on all replicas.

    Attributes:
        seeds: the variables with their states, `[2]` each: key and counter.
    """

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        seeds: Sequence[Any],
        recurrent_states: Sequence[Any] = (),
        *,
        turns: int = 1,
    ):
        """Moves the replicas' streams apart: Keras starts them all alike, with equal dropout masks.

        Args:
            strategy: the strategy in whose scope the variables were created.
            seeds: as the attribute.
            recurrent_states: of a model on one replica.
            turns: the virtual replicas that each replica runs.
        """
        self.seeds = list(seeds)
        self._variables = [*seeds, *recurrent_states]

        def separate() -> None:
            replica = tf.distribute.get_replica_context().replica_id_in_sync_group
            for seed in self.seeds:
                seed.assign(stream_of(tf.convert_to_tensor(seed), replica * turns))

        def read() -> list[tf.Tensor]:
            return [tf.identity(variable) for variable in self._variables]

        def write(values: list[tf.Tensor]) -> None:
            for variable, value in zip(self._variables, values, strict=True):
                variable.assign(value)

        if self.seeds and strategy.num_replicas_in_sync > 1:
            graph_function(lambda: strategy.run(separate))()
        self._read = graph_function(lambda: strategy.run(read))
        self._write = graph_function(lambda values: strategy.run(write, args=(values,)))

    def read(self) -> Any:
        """Returns the states, a value per replica."""
        return self._read() if self._variables else []

    def write(self, states: Any) -> None:
        """Sets the states to a result of `read`."""
        if self._variables:
            self._write(states)

    @contextlib.contextmanager
    def preserved(self) -> Iterator[None]:
        """Restores the states on exit."""
        before = self.read()
        try:
            yield
        finally:
            self.write(before)


def stream_of(state: tf.Tensor, replica: tf.Tensor | int) -> tf.Tensor:
    """Returns the state of a replica's random stream, `[2]`.

    Args:
        state: that of another replica.
        replica: its number, counted from the other one's.
    """
    offset = tf.cast(replica, state.dtype) * SEED_STRIDE
    return state + tf.stack([offset, tf.zeros([], state.dtype)])

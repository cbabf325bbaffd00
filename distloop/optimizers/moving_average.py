"""Moving average of the weights, with `update()` after a step and `applied()` around an evaluation.

    a += (1 - min(d, (1 + t) / (10 + t))) * (w - a)      after applied step t, from the first weights

It does not know evaluations. The warm-up of the decay is that of `tf.train.ExponentialMovingAverage`.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from distloop.graph_functions import graph_function
from distloop.variables import tensorflow_variable


class MovingAverage(tf.Module):
    """The moving averages of some variables; the variables keep the weights that train."""

    def __init__(self, variables: Sequence[Any], decay: float):
        """Creates the averages with the variables' values; to be called in the strategy's scope.

        Args:
            variables: the variables to average.
            decay: d, in (0, 1).
        """
        super().__init__(name="average")
        self.decay = decay
        self._averaged: dict[int, Any] = {}
        for variable in variables:
            with tf.distribute.get_strategy().extended.colocate_vars_with(tensorflow_variable(variable)):
                self._averaged[id(variable)] = self._make(variable)
        self._variables = list(variables)

        @graph_function
        def swap() -> None:
            for variable, average in self._swapped():
                weight = tf.identity(variable)
                variable.assign(tf.identity(average))
                average.assign(weight)

        self._swap = swap

    def _make(self, variable: Any) -> Any:
        return tf.Variable(tf.convert_to_tensor(variable), trainable=False)

    def _swapped(self) -> list[tuple[Any, Any]]:
        return self.pairs

    @property
    def variables(self) -> tuple[Any, ...]:
        """The averages, in the order of their variables."""
        return tuple(self._averaged[id(v)] for v in self._variables)

    @property
    def stored(self) -> Sequence[tf.Variable]:
        """The variables that hold the averages."""
        return self.variables

    def start(self) -> None:
        """Sets the averages to the variables' values; in cross-replica context."""
        for variable, average in self.pairs:
            average.assign(tf.convert_to_tensor(variable))

    @property
    def pairs(self) -> list[tuple[Any, Any]]:
        """Each variable with its average."""
        return list(zip(self._variables, self.variables, strict=True))

    def touch(self, variables: Sequence[Any], gradients: Sequence[Any]) -> None:
        """Prepares for an update that applies gradients, one a variable, or None; in replica context."""

    def update(self, variables: Sequence[Any], applied_steps: tf.Tensor) -> None:
        """Moves the averages of some of the variables; in replica context, after an update was applied.

        Args:
            variables: the variables that the update trains.
            applied_steps: t, a scalar: the number of updates applied to them, including this one.
        """
        rate = self._rate(applied_steps)
        for variable in variables:
            self._move(variable, self._averaged[id(variable)], rate)

    def _move(self, variable: Any, average: Any, rate: tf.Tensor) -> None:
        with tf.device(average.device):
            average.assign_add(tf.cast(rate, average.dtype) * (tf.convert_to_tensor(variable) - average))

    def _rate(self, applied_steps: tf.Tensor) -> tf.Tensor:
        t = tf.cast(applied_steps, tf.float32)
        return 1.0 - tf.minimum(self.decay, (1.0 + t) / (10.0 + t))

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Enters a scope in which the variables have the averaged values; restores every bit on exit."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

"""Schedule-free weights: the averages at which a model of a schedule-free optimizer is evaluated.

    weights = ScheduleFreeWeights([(optimizer, variables), ...], find_slots)      # before optimizers are built
    with weights.applied():      # evaluation, prediction, export
        ...

A schedule-free optimizer (see `schedule_free_rule`) takes gradients at y, moves z, and the model is to be evaluated at
x, the average of all z:

    y = (1 - beta_1) z + beta_1 x        so        x = y + (y - z) (1 - beta_1) / beta_1

Keras's `ScheduleFreeAdamW` stores y in the model and z in its slots `momentum`. x is computed when it is needed, so
that a step costs no more, and checkpoints are as they were.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from distloop.graph_functions import graph_function
from distloop.optimizers.keras_hooks import is_schedule_free
from distloop.schedule_free.schedule_free_rule import follow_paper
from distloop.variables import ComposedVariable, tensorflow_variable

_Z = "momentum"  # Keras's name of the slots that hold z


class ScheduleFreeWeights:
    """The averages x of the variables that schedule-free optimizers train, which follow the paper from now on.

    Attributes:
        lines: for the console.
    """

    lines = ("schedule-free, by arXiv:2405.15682: evaluate, predict and export use the averages x",)

    def __init__(
        self, trained: Sequence[tuple[Any, Sequence[Any]]], find_slots: Callable[..., Any], average_decay: float = 0.0
    ):
        """Stores the optimizers.

        Args:
            trained: an optimizer with the variables that it trains, for each update; updates may share one.
            find_slots: as `variables.slot_names`; called when the optimizers are built.
            average_decay: of the moving average of the weights; 0: there is none.

        Raises:
            ValueError: if there is an average, a variable has two optimizers, or x cannot be computed.
        """
        self._trained, self._find_slots = trained, find_slots
        kind = next(type(optimizer).__name__ for optimizer, _ in trained if is_schedule_free(optimizer))
        if average_decay:
            raise ValueError(
                f"average_decay or average_from was given with {kind}, whose weights for evaluation are an average "
                "already: leave the setting out, or give keras.optimizers.AdamW."
            )
        owners: dict[int, Any] = {}
        for optimizer, variable in ((optimizer, variable) for optimizer, of in trained for variable in of):
            if owners.setdefault(id(variable), optimizer) is not optimizer:
                raise ValueError(
                    f"Two updates train {variable.name!r} by optimizers of their own, and {kind}, which one of the "
                    "updates has, averages its own steps alone: give both the same optimizer."
                )
        for optimizer, _ in trained:
            if is_schedule_free(optimizer):
                if not float(optimizer.beta_1) > 0:
                    raise ValueError(f"{kind}(beta_1={optimizer.beta_1}) was given, which leaves no x in y: give 0.9.")
                follow_paper(optimizer)

        @graph_function
        def enter() -> list[tf.Tensor]:
            weights = []
            for y, _, x in self._points:
                with tf.device(y.device):
                    weights.append(tf.identity(y))
                    y.assign(tf.convert_to_tensor(x))
            return weights

        @graph_function
        def leave(weights: list[tf.Tensor]) -> None:
            for (y, _, _), weight in zip(self._points, weights, strict=True):
                y.assign(weight)

        self._enter, self._leave = enter, leave

    @functools.cached_property
    def _points(self) -> list["_Point"]:
        points: dict[int, _Point] = {}
        for optimizer, variables in self._trained:
            if is_schedule_free(optimizer):
                slots = self._find_slots(optimizer, variables, list(map(str, range(len(variables)))))
                for number, variable in enumerate(variables):
                    y, z = map(tensorflow_variable, (variable, slots[f"{_Z}/{number}"]))
                    points[id(variable)] = _Point(y, z, _Average(optimizer, y, z))
        return list(points.values())

    @property
    def pairs(self) -> list[tuple[Any, Any]]:
        """Each variable with its average."""
        variables = {id(tensorflow_variable(v)): v for _, variables in self._trained for v in variables}
        return [(variables[id(y)], x) for y, _, x in self._points]

    def start(self) -> None:
        """Sets every z to the weights of the model, so that x is the same; in cross-replica context."""
        for y, z, _ in self._points:
            z.assign(tf.convert_to_tensor(y))

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Enters a scope in which the variables have the values x; restores every bit of y on exit."""
        weights = self._enter()
        try:
            yield
        finally:
            self._leave(weights)


class _Average(ComposedVariable):
    """The x of a variable, computed whenever it is read."""

    def __init__(self, optimizer: Any, y: Any, z: Any):
        self._optimizer, self._y, self._z = optimizer, y, z
        self.dtype, self.is_here = y.dtype, getattr(z, "is_here", True)

    def __tf_tensor__(self, dtype: Any = None, name: str | None = None) -> tf.Tensor:
        """Returns the value."""
        y, z = tf.convert_to_tensor(self._y), tf.convert_to_tensor(self._z)
        beta_1 = tf.cast(self._optimizer.beta_1, y.dtype)
        x = y + (y - z) * ((1 - beta_1) / beta_1)  # not (y - (1 - beta_1) z) / beta_1: x is y, to the bit, where z is
        return x if dtype is None else tf.cast(x, dtype)


class _Point(NamedTuple):
    """The variable of a model that holds y, its z, and its x."""

    y: Any
    z: Any
    x: _Average

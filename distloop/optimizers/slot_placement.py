"""Slot placement: optimizer slots and moving averages on every replica, which updates all weights.

    placement = make_slot_placement(strategy, shard_optimizer=False)
    store = placement.build(optimizer, plain_optimizer, variables, factors)
    packing = placement.make_packing(state, update, variables, needs_all=False)
    average = placement.make_average(variables, 0.99, trained)      # `update()` after a step, `applied()` to evaluate

`sharding/` has a placement with the same methods, under which each replica has some of the slots. `tables/` keeps the
sparse gradients of large tables sparse; without it they are dense, and train to the same weights.
"""

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from distloop.graph_functions import graph_function
from distloop.installed import import_part
from distloop.optimizers.gradients import Packing
from distloop.optimizers.slot_store import SlotStore, View
from distloop.variables import slot_names, tensorflow_variable

_NEVER = 2**62  # more steps than any optimizer takes


class MovingAverage(tf.Module):
    """The moving averages of some variables; the variables keep the weights that train.

        a += (1 - min(d, (1 + t) / (10 + t))) * (w - a)      after applied step t, from the first weights

    The warm-up of the decay is that of `tf.train.ExponentialMovingAverage`. With d = 1 it is the equal average of the
    weights after step `first_step` of the run and after each later one that is applied (Izmailov et al. 2018,
    arXiv:1803.05407, section 3.2), where t counts from `first_step`:

        a += (w - a) / max(1, t)

    It moves once a step, after the last update. An optimizer's own count may be that of a program before the run, and
    leaves out steps that were skipped: the host records what it was when the average began.

    Attributes:
        first_step: of the run, whose weights are the first that count; 0: it is not known yet.
    """

    first_step = 0
    _starts: Sequence[tuple[Any, tf.Variable]] = ()  # each optimizer, and its count when the average began

    def __init__(self, variables: Sequence[Any], decay: float):
        """Creates the averages with the variables' values; to be called in the strategy's scope."""
        super().__init__(name="average")
        self.decay, self._variables = decay, list(variables)
        self._averaged = {id(variable): self._colocate(variable) for variable in variables}
        self._swap = graph_function(self._exchange)

    def _colocate(self, variable: Any) -> Any:
        """Returns the average of a variable, where the variable is."""
        with tf.distribute.get_strategy().extended.colocate_vars_with(tensorflow_variable(variable)):
            return self._make(variable)

    def _make(self, variable: Any) -> Any:
        return tf.Variable(tf.convert_to_tensor(variable), trainable=False)

    def _stored_with(self, variables: Sequence[Any]) -> list[tuple[Any, Any]]:
        """Returns each variable, or each shard of variables, with the variable that holds its average."""
        return [(variable, self._averaged[id(variable)]) for variable in variables]

    def _exchange(self) -> None:
        """Gives the variables the values of their averages, and the averages the values of the variables."""
        for variable, average in self._swapped():
            weight = tf.identity(variable)
            variable.assign(tf.identity(average))
            average.assign(weight)

    def _swapped(self) -> list[tuple[Any, Any]]:
        return self.pairs

    @property
    def variables(self) -> tuple[Any, ...]:
        """The averages, in the order of their variables."""
        return tuple(self._averaged[id(v)] for v in self._variables)

    @property
    def stored(self) -> Sequence[tf.Variable]:
        """The variables that hold the averages."""
        return [average for _, average in self._stored_with(self._variables)]

    def start(self) -> None:
        """Sets the averages to the variables' values; in cross-replica context."""
        for variable, average in self.pairs:
            average.assign(tf.convert_to_tensor(variable))

    @property
    def pairs(self) -> list[tuple[Any, Any]]:
        """Each variable with its average."""
        return list(zip(self._variables, self.variables, strict=True))

    def follow(self, optimizers: Iterable[Any]) -> None:
        """Stores the optimizers whose steps count; to be called in the strategy's scope."""
        different = {id(optimizer): optimizer for optimizer in optimizers}
        self._starts = [(o, tf.Variable(0, dtype=tf.int64, trainable=False)) for o in different.values()]

    def begin_at(self, first_step: int, step: int) -> None:
        """Sets the first step for a run that is at a step.

        Raises:
            ValueError: if an equal average has begun at another step, or should have begun.
        """
        if self.decay == 1.0 and self.first_step and step >= first_step != self.first_step:
            raise ValueError(
                f"average_from is step {first_step} of the run now, and was step {self.first_step} before step {step}, "
                f"where the run is, so weights in between were averaged or are gone: give a step after {step}, or "
                f"'{self.first_step} steps'."
            )
        if step >= first_step != self.first_step:  # of a checkpoint that does not record it
            self._set_starts([first_step - 1 for _ in self._starts])
        self.first_step = first_step

    def begin(self, step: int) -> float:
        """Notes where the average begins, if it does; called before a loop.

        Args:
            step: the steps that are done.

        Returns:
            The most steps that the loop may take.
        """
        steps_left = self.first_step - 1 - step
        if steps_left >= 0:
            self._set_starts([_NEVER if steps_left else int(o.iterations.numpy()) for o, _ in self._starts])
        return steps_left if steps_left > 0 else math.inf

    def get_state(self) -> dict[str, Any]:
        """Returns what a checkpoint records beside the averages."""
        starts = [int(tf.convert_to_tensor(start)) for _, start in self._starts]
        return {"first_step": self.first_step, "starts": starts}

    def set_state(self, state: Mapping[str, Any] | None) -> None:
        """Restores what `get_state` returned; None: the checkpoint does not record it."""
        self.first_step = state["first_step"] if state else 0
        self._set_starts(state["starts"] if state else [])

    def _set_starts(self, values: Sequence[int]) -> None:
        for (_, start), value in zip(self._starts, values, strict=False):
            start.assign(value)

    def count(self, optimizers: Sequence[Any]) -> tf.Tensor:
        """Returns the applied steps since the average began; 0 or less: it has not.

        Args:
            optimizers: of each update that a step applies; updates may share one, which counts each of them.
        """
        (start,) = [start for of, start in self._starts if of is optimizers[0]]
        updates = tf.cast(tf.convert_to_tensor(optimizers[0].iterations), tf.int64) - tf.convert_to_tensor(start)
        return updates // optimizers.count(optimizers[0])

    def touch(self, variables: Sequence[Any], gradients: Sequence[Any]) -> None:
        """Prepares for an update that applies gradients, one a variable, or None; in replica context."""

    def update(self, variables: Sequence[Any], applied_steps: tf.Tensor) -> None:
        """Moves the averages of variables that were updated in `applied_steps` steps; in replica context."""
        rate = self._rate(applied_steps)
        for variable, average in self._stored_with(variables):
            self._move(variable, average, rate)

    def _move(self, variable: Any, average: Any, rate: tf.Tensor) -> None:
        with tf.device(average.device):
            average.assign_add(tf.cast(rate, average.dtype) * (tf.convert_to_tensor(variable) - average))

    def _rate(self, applied_steps: tf.Tensor) -> tf.Tensor:
        t = tf.cast(applied_steps, tf.float32)
        if self.decay == 1.0:
            return 1.0 / tf.maximum(1.0, t)
        return 1.0 - tf.minimum(self.decay, (1.0 + t) / (10.0 + t))

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Enters a scope in which the variables have the averaged values; restores every bit on exit."""
        self._swap()
        try:
            yield
        finally:
            self._swap()


class SlotPlacement:
    """The plain placement: each replica has all slots and averages.

    Attributes:
        num_shards: the number of shards into which replicas cut an update.
    """

    num_shards = 1

    def copies(self) -> list[tf.Variable]:
        """Returns the variables that have weights once more."""
        return []

    def describe(self, state: Any) -> list[str]:
        """Returns lines for the console about a `TrainState`."""
        return []

    def prepare(self, pairs: Iterable[tuple[keras.optimizers.Optimizer, Sequence[Any]]]) -> None:
        """Prepares to build optimizers, each with the variables that it trains."""

    def build(
        self, optimizer: Any, plain: keras.optimizers.Optimizer, variables: Sequence[Any], factors: Sequence[float]
    ) -> SlotStore:
        """Makes the slots of an optimizer, which may be within a `LossScaleOptimizer`; in the strategy's scope.

        Args:
            optimizer: the optimizer.
            plain: the Keras optimizer.
            variables: those that it trains.
            factors: of the learning rate of each.
        """
        if not optimizer.built:
            optimizer.build(variables)
        if (row_updates := _import("row_updates", variables)) is not None:
            row_updates.update_rows(plain)
        return SlotStore(plain, [View(v, v, factor) for v, factor in zip(variables, factors, strict=True)])

    def slots(
        self, optimizer: keras.optimizers.Optimizer, variables: Sequence[Any], names: Sequence[str]
    ) -> dict[str, Any]:
        """Returns an optimizer's variables, as `slot_names` does."""
        return slot_names(optimizer, variables, names)

    def make_average(self, variables: Sequence[Any], decay: float, trained: Sequence[tuple[Any, Any]]) -> MovingAverage:
        """Returns the moving averages of variables, given pairs of an optimizer and a variable that it trains."""
        is_lazy = any(getattr(optimizer, "is_lazy", False) for optimizer, _ in trained)
        if (tables := _import("table_average", variables, is_needed=is_lazy)) is not None:
            made: MovingAverage = tables.make_average(variables, decay, trained)
            return made
        return MovingAverage(variables, decay)

    def make_packing(self, state: Any, update: Any, variables: Sequence[Any], *, needs_all: bool) -> Packing:
        """Returns the layout of the gradients of an `Update`; `needs_all`: whether each worker needs all of them."""
        packing: Packing | None = state.placement.make_packing(variables)
        if packing is not None:
            return packing
        if (tables := _import("sparse_packing", variables)) is not None:
            packing = tables.SparsePacking(variables, state, for_rows=update.gradient_fn is None)
            return packing
        return Packing(variables, why_dense="the part of distloop that updates rows alone, the folder tables, is gone")

    def adapt(self, application: Any) -> Any:
        """Returns the application of updates that fits, given the plain `Application`."""
        return application


def make_slot_placement(strategy: tf.distribute.Strategy, *, shard_optimizer: bool) -> SlotPlacement:
    """Returns where slots and averages are, as `Config.shard_optimizer` says.

    Raises:
        ValueError: if they are to be cut over the replicas, and cannot be.
    """
    if not shard_optimizer:
        return SlotPlacement()
    placement: SlotPlacement = import_part("sharding.sharded_application", f"{shard_optimizer=}").place_slots(strategy)
    return placement


def _import(module: str, variables: Sequence[Any], *, is_needed: bool = False) -> Any:
    """Returns a module of `tables/` if variables may have sparse gradients that stay sparse, or it is needed; or None.

    Without that folder sparse gradients are dense, which trains to the same weights.
    """
    if is_needed or Packing(variables).may_be_sparse:
        with contextlib.suppress(ValueError):
            return import_part(f"tables.{module}", "a sparse gradient")
    return None

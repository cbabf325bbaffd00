"""Slot placement: optimizer slots and averages on every replica, which updates all weights.

    placement = make_slot_placement(strategy, shard_optimizer=False)
    placement.build(optimizer, variables)
    packing = placement.make_packing(state, update, variables, needs_all=False)
    average = placement.make_average(variables, 0.99, trained)

`sharding/` has a placement with the same methods, under which each replica has some of the slots. `tables/` keeps the
sparse gradients of large tables sparse; without it they are dense, and train to the same weights.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf

from distloop.installed import import_part
from distloop.optimizers.gradients import Packing
from distloop.optimizers.moving_average import MovingAverage
from distloop.variables import slot_names, tensorflow_variable


class SlotPlacement:
    """The plain placement: each replica has all slots and averages.

    Attributes:
        num_shares: the number of parts in which replicas share out an update.
    """

    num_shares = 1

    def copies(self) -> list[tf.Variable]:
        """Returns the variables that have weights once more."""
        return []

    def describe(self, state: Any) -> list[str]:
        """Returns lines for the console about a `TrainState`."""
        return []

    def prepare(self, pairs: Iterable[tuple[keras.optimizers.Optimizer, Sequence[Any]]]) -> None:
        """Prepares to build optimizers, each with the variables that it trains."""

    def build(self, optimizer: Any, plain: keras.optimizers.Optimizer, variables: Sequence[Any]) -> None:
        """Makes an optimizer's slots, if it has none yet; in the strategy's scope.

        Args:
            optimizer: the optimizer, or the `LossScaleOptimizer` around it.
            plain: the optimizer itself.
            variables: the variables that it trains.
        """
        if not optimizer.built:
            optimizer.build(variables)
        if (row_updates := _part("row_updates", variables)) is not None:
            row_updates.update_rows(plain)

    def views(self, variable: Any) -> Sequence[Any]:
        """Returns what an optimizer updates in place of a variable of the model."""
        return [variable]

    def weights(self, variables: Sequence[Any]) -> list[tf.Tensor]:
        """Returns the weights of which an optimizer has a slot each, in the order of its slots."""
        return [tensorflow_variable(variable).read_value() for variable in variables]

    def slots(
        self, optimizer: keras.optimizers.Optimizer, variables: Sequence[Any], names: Sequence[str]
    ) -> dict[str, Any]:
        """Returns an optimizer's variables, as `slot_names` does."""
        return slot_names(optimizer, variables, names)

    def make_average(self, variables: Sequence[Any], decay: float, trained: Sequence[tuple[Any, Any]]) -> MovingAverage:
        """Returns the moving averages of variables, given pairs of an optimizer and a variable that it trains."""
        is_lazy = any(getattr(optimizer, "is_lazy", False) for optimizer, _ in trained)
        if (tables := _part("table_average", variables, is_needed=is_lazy)) is not None:
            made: MovingAverage = tables.make_average(variables, decay, trained)
            return made
        return MovingAverage(variables, decay)

    def make_packing(self, state: Any, update: Any, variables: Sequence[Any], *, needs_all: bool) -> Packing:
        """Returns the layout of an update's gradients.

        Args:
            state: the `TrainState`.
            update: the `Update`.
            variables: the variables to differentiate by.
            needs_all: whether each worker needs all gradients.
        """
        if (devices := state.placement.gradient_devices(variables)) is not None:
            return Packing(variables, devices)
        if (tables := _part("sparse_packing", variables)) is not None:
            packing: Packing = tables.SparsePacking(variables, state, for_rows=update.gradient_fn is None)
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


def _part(module: str, variables: Sequence[Any], *, is_needed: bool = False) -> Any:
    """Returns a module of `tables/` if variables may have sparse gradients that stay sparse, or it is needed; or None.

    Without that folder sparse gradients are dense, which trains to the same weights.
    """
    if not is_needed and not Packing(variables).may_be_sparse:
        return None
    try:
        return import_part(f"tables.{module}", "a sparse gradient")
    except ValueError:
        return None

"""Placement of optimizers' slots and of averages: on every replica, which updates all weights.

    placement = make_slot_placement(strategy, shard_optimizer=False)
    placement.build(optimizer, variables)
    packing = placement.make_packing(variables, devices, needs_whole=False, needs_all=False)
    average = placement.make_average(variables, 0.99, tables)

`sharding/` has a placement with the same methods, under which each replica has some of the slots.
"""

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf

from distloop.optimizers.gradients import Packing
from distloop.optimizers.moving_average import MovingAverage
from distloop.parts import import_part
from distloop.variables import slot_names, tensorflow_variable


class SlotPlacement:
    """The plain placement: each replica has all slots and averages.

    Attributes:
        num_shares: the number of parts in which replicas share out an update.
        why_dense: why sparse gradients are made dense, the end of a sentence; None: they need not be.
    """

    num_shares = 1
    why_dense: str | None = None

    def copies(self) -> list[tf.Variable]:
        """Returns the variables that have weights once more."""
        return []

    def describe(self, state: Any) -> list[str]:
        """Returns lines for the console about a `TrainState`."""
        return []

    def prepare(self, pairs: Iterable[tuple[keras.optimizers.Optimizer, Sequence[Any]]]) -> None:
        """Prepares to build optimizers, each with the variables that it trains."""

    def build(self, optimizer: Any, variables: Sequence[Any]) -> None:
        """Makes an optimizer's slots, if it has none yet; in the strategy's scope; the loss scale's, too."""
        if not optimizer.built:
            optimizer.build(variables)

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

    def make_average(self, variables: Sequence[Any], decay: float, tables: Collection[int]) -> MovingAverage:
        """Returns the moving averages of variables, as `MovingAverage` makes them; in the strategy's scope."""
        return MovingAverage(variables, decay, tables)

    def make_packing(
        self, variables: Sequence[Any], devices: Sequence[str] | None, *, needs_whole: bool, needs_all: bool
    ) -> Packing:
        """Returns the layout of gradients.

        Args:
            variables: the variables to differentiate by.
            devices: as for `Packing`.
            needs_whole: whether each replica needs whole gradients.
            needs_all: whether each worker needs all gradients.
        """
        return Packing(variables, devices, keeps_sparse=devices is None)

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

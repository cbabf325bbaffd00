"""Application of an update: applies gradients to weights, slots and averages on all replicas.

    application = make_application(state)
    before = application.read(update)
    application.apply(update, segments, scale, replacements)
    application.restore(update, before, unless=is_finite)

All is called outside of replicas. It does not know when an update is skipped or undone.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from distloop.model import variable_writes
from distloop.model.state import TrainState
from distloop.optimizers import gradients
from distloop.training import gradient_step
from distloop.training.forward_backward import ForwardBackward, Summed


class Application:
    """The application of updates on every replica, which all have the same gradients.

    Attributes:
        state: what is trained.
    """

    def __init__(self, state: TrainState):
        """Stores what is trained."""
        self.state = state
        self._strategy = state.strategy

    def apply(self, update: ForwardBackward, segments: Any, scale: Any, replacements: Any) -> None:
        """Changes weights, slots and averages.

        Args:
            update: the pass that computed the gradients.
            segments: packed gradients, clipped, equal on all replicas.
            scale: the factor to multiply them by.
            replacements: of the replaced variables.
        """
        self._strategy.run(functools.partial(self._apply_on_replica, update), args=(segments, scale, replacements))

    def read(self, update: ForwardBackward) -> Any:
        """Returns the values of all that `apply` changes."""
        return self.read_all(self.state.changed_by(update.update))

    def restore(self, update: ForwardBackward, values: Any, unless: Any = None) -> None:
        """Assigns what `read` returned, unless a condition of each replica holds."""
        self.assign_all(self.state.changed_by(update.update), values, unless)

    def read_all(self, variables: Sequence[Any]) -> Any:
        """Returns the values of variables, per replica."""
        return self._strategy.run(functools.partial(variable_writes.read, variables))

    def assign_all(self, variables: Sequence[Any], values: Any, unless: Any = None) -> None:
        """Assigns what `read_all` returned, unless a condition of each replica holds."""
        self._strategy.run(functools.partial(variable_writes.assign, variables), args=(values, unless))

    def reduce(self, update: ForwardBackward, sums: Summed) -> Summed:
        """Returns an update's sums over all replicas, given those of each; replicas have added theirs up already."""
        return sums

    def call(self, update: ForwardBackward, fn: Callable[[Summed], Any], sums: Summed) -> Any:
        """Calls a function of an update's sums where `reduce` has left them: on each replica."""
        return self._strategy.run(fn, args=(sums,))

    def sum_over_owners(self, update: ForwardBackward) -> Callable[[tf.Tensor], tf.Tensor] | None:
        """Returns what adds up numbers about an update's gradients, if each worker has some; None: each has all."""
        return None

    def _apply_on_replica(
        self, update: ForwardBackward, segments: list[tf.Tensor], scale: tf.Tensor, replacements: list[tf.Tensor]
    ) -> None:
        summed, variables = self.gradients(update, segments, scale), reached(update)
        optimizer = self.state.plain_optimizers[update.name]
        if self.state.average is not None:
            by_variable = dict(zip(map(id, variables), summed, strict=True))
            self.state.average.touch(update.variables, [by_variable.get(id(v)) for v in update.variables])
        if not variables and not update.replaced:
            return  # a step_fn applies nothing
        # Keras assigns a variable's new value where it would apply a gradient.
        gradients.apply(optimizer, [*summed, *replacements], [*variables, *update.replaced])
        if self.state.average is not None:
            average = self.state.average
            average.update([*update.variables, *update.replaced], average.count(optimizer))

    def gradients(self, update: ForwardBackward, segments: list[tf.Tensor], scale: tf.Tensor) -> list[tf.Tensor]:
        """Returns the gradients of the variables that the loss reaches, as the user wants them; on a replica."""
        optimizer = self.state.plain_optimizers[update.name]
        pairs = zip(
            update.packing.unpack_for(optimizer, segments, scale), update.variables, update.trace.reached, strict=True
        )
        by_path = {self.state.paths[id(variable)]: gradient for gradient, variable, is_reached in pairs if is_reached}
        if update.update.gradient_fn is not None:
            returned = update.update.gradient_fn(dict(by_path))
            by_path = gradient_step.checked("gradient_fn returned", returned, by_path)
        return list(by_path.values())


def make_application(state: TrainState) -> Application:
    """Returns the application that fits where slots and averages are."""
    application: Application = state.slot_placement.adapt(Application(state))
    return application


def reached(update: ForwardBackward) -> list[Any]:
    """Returns the variables that the loss depends on."""
    return [v for v, is_reached in zip(update.variables, update.trace.reached, strict=True) if is_reached]

"""Application of an update: from gradients to weights, slots and averages, on all replicas or each part on one device.

    application = make_application(state)
    before = application.read(update)
    application.apply(update, segments, scale, new_values)
    application.restore(update, before)

All is called outside of replicas. It does not know when an update is skipped or undone.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from distloop.distributed import workers
from distloop.optimizers import gradients
from distloop.training import gradient_step, variable_writes
from distloop.training.forward_backward import ForwardBackward
from distloop.training.gradient_step import Look
from distloop.training.state import TrainState
from distloop.variables import tensorflow_variable


class Application:
    """The application of updates on every replica, which all have the same gradients."""

    def __init__(self, state: TrainState):
        """Stores what is trained."""
        self._state = state
        self._strategy = state.strategy

    def apply(self, update: ForwardBackward, segments: Any, scale: Any, new_values: Any) -> None:
        """Changes weights, slots and averages.

        Args:
            update: the pass that computed the gradients.
            segments: packed gradients, clipped, equal on all replicas.
            scale: the factor to multiply them by.
            new_values: of the overwritten variables.
        """
        self._strategy.run(functools.partial(self._apply_on_replica, update), args=(segments, scale, new_values))

    def read(self, update: ForwardBackward) -> Any:
        """Returns the values of all that `apply` changes."""
        return self.read_all(self._state.changed_by(update.update))

    def restore(self, update: ForwardBackward, values: Any) -> None:
        """Assigns what `read` returned."""
        self.assign_all(self._state.changed_by(update.update), values)

    def read_all(self, variables: Sequence[Any]) -> Any:
        """Returns the values of variables, per replica."""
        return self._strategy.run(functools.partial(variable_writes.read, variables))

    def assign_all(self, variables: Sequence[Any], values: Any) -> None:
        """Assigns what `read_all` returned."""
        self._strategy.run(functools.partial(variable_writes.assign, variables), args=(values,))

    def sum_apart(self, update: ForwardBackward, look: Look) -> Look:
        """Returns a look whose gradients are summed over the replicas."""
        return look

    def sum_over_owners(self, update: ForwardBackward) -> Callable[[tf.Tensor], tf.Tensor] | None:
        """Returns what adds up numbers about an update's gradients, if each worker has some; None: each has all."""
        return None

    def _apply_on_replica(
        self, update: ForwardBackward, segments: list[tf.Tensor], scale: tf.Tensor, new_values: list[tf.Tensor]
    ) -> None:
        summed, variables = self._gradients(update, segments, scale), _reached(update)
        optimizer = self._state.plain_optimizers[update.name]
        if self._state.average is not None:
            by_variable = dict(zip(map(id, variables), summed, strict=True))
            self._state.average.touch(update.variables, [by_variable.get(id(v)) for v in update.variables])
        # Keras assigns a variable's new value where it would apply a gradient.
        gradients.apply(optimizer, [*summed, *new_values], [*variables, *update.overwritten])
        if self._state.average is not None:
            applied_steps = tf.convert_to_tensor(optimizer.iterations)
            self._state.average.update([*update.variables, *update.overwritten], applied_steps)

    def _gradients(self, update: ForwardBackward, segments: list[tf.Tensor], scale: tf.Tensor) -> list[tf.Tensor]:
        """Returns the gradients of the variables that the loss reaches, as the user wants them; on a replica."""
        optimizer = self._state.plain_optimizers[update.name]
        pairs = zip(
            update.tables.unpack(segments, scale, optimizer), update.variables, update.trace.reached, strict=True
        )
        by_path = {self._state.paths[id(variable)]: gradient for gradient, variable, is_reached in pairs if is_reached}
        if update.update.gradient_fn is not None:
            returned = update.update.gradient_fn(dict(by_path))
            by_path = gradient_step.checked("gradient_fn returned", returned, by_path)
        return list(by_path.values())


class ShardedApplication(Application):
    """The application of updates where each part of the weights has its slots on one device."""

    def __init__(self, state: TrainState):
        """Stores what is trained."""
        super().__init__(state)
        assert state.sharding is not None
        self._sharding = state.sharding

    def apply(self, update: ForwardBackward, segments: Any, scale: Any, new_values: Any) -> None:
        """Changes weights, slots and averages; segments that were summed apart are each on the device of its part."""
        variables = _reached(update)
        optimizer = self._state.plain_optimizers[update.name]
        self._sharding.apply(optimizer, variables, self._gradients_of_parts(update, segments, scale))
        if update.overwritten:
            assign = functools.partial(variable_writes.assign, update.overwritten)
            self._strategy.run(assign, args=(new_values,))
        if self._state.average is not None:
            applied_steps = tf.convert_to_tensor(optimizer.iterations)
            self._state.average.update([*update.variables, *update.overwritten], applied_steps)

    def _gradients_of_parts(self, update: ForwardBackward, segments: Any, scale: Any) -> list[tf.Tensor]:
        """Returns the gradient of each part of the variables that the loss reaches, on the part's device."""
        if update.is_summed_apart:
            flat = iter(update.packing.unpack_parts(segments, scale))
            of_variables = [[next(flat) for _ in self._sharding.parts([v])] for v in update.variables]
            pairs = zip(of_variables, update.trace.reached, strict=True)
            return [gradient for of_parts, is_reached in pairs if is_reached for gradient in of_parts]
        if update.update.gradient_fn is not None:
            on_replicas = self._strategy.run(functools.partial(self._gradients, update), args=(segments, scale))
            pairs = zip(_reached(update), on_replicas, strict=True)
            return [gradient for variable, of in pairs for gradient in self._sharding.cut(variable, of)]
        on_replicas = self._strategy.run(update.packing.unpack, args=(segments,))
        (scale, *_) = self._strategy.experimental_local_results(scale)
        scaled = []
        for variable, of, is_reached in zip(update.variables, on_replicas, update.trace.reached, strict=True):
            for part in self._sharding.cut(variable, of) if is_reached else ():
                with tf.device(part.device):
                    scaled += gradients.scaled([part], scale)  # of the part alone
        return scaled

    def read_all(self, variables: Sequence[Any]) -> Any:
        """Returns the values of variables: per replica, and those that are on one device."""
        mirrored, single = self._apart(variables)
        values = []
        for variable in single:
            with tf.device(variable.device):
                values.append(tf.identity(variable))
        return super().read_all(mirrored), values

    def assign_all(self, variables: Sequence[Any], values: Any) -> None:
        """Assigns what `read_all` returned."""
        mirrored, single = self._apart(variables)
        super().assign_all(mirrored, values[0])
        variable_writes.assign(single, values[1])

    def _apart(self, variables: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Returns the variables that each replica has, and the others."""
        plain = [tensorflow_variable(v) for v in variables]
        are_mirrored = [isinstance(v, tf.distribute.DistributedValues) for v in plain]
        mirrored = [v for v, is_mirrored in zip(variables, are_mirrored, strict=True) if is_mirrored]
        return mirrored, [v for v, is_mirrored in zip(plain, are_mirrored, strict=True) if not is_mirrored]

    def sum_apart(self, update: ForwardBackward, look: Look) -> Look:
        """Returns a look whose gradients are summed on the devices that use them; all else is the first replica's."""
        if not update.is_summed_apart:
            return look

        def first(value: Any) -> Any:
            return tf.nest.map_structure(lambda v: self._strategy.experimental_local_results(v)[0], value)

        segments = []
        for of_replicas, device in zip(look.segments, update.packing.devices, strict=True):
            with tf.device(device):
                segments.append(tf.add_n(self._strategy.experimental_local_results(of_replicas)))
        if self._sharding.num_workers > 1:
            segments = self._sharding.exchange.collect(segments, update.packing.owners)
        return look._replace(
            segments=segments,
            weight=first(look.weight),
            tallies=first(look.tallies),
            new_values=first(look.new_values),
            secs=None if look.secs is None else first(look.secs),
        )

    def sum_over_owners(self, update: ForwardBackward) -> Callable[[tf.Tensor], tf.Tensor] | None:
        """Returns what adds up numbers about an update's gradients, if each worker has some; None: each has all."""
        is_shared = update.is_summed_apart and self._sharding.num_workers > 1
        return functools.partial(workers.sum_over_workers, self._strategy) if is_shared else None


def make_application(state: TrainState) -> Application:
    """Returns the application that fits the state."""
    return Application(state) if state.sharding is None else ShardedApplication(state)


def _reached(update: ForwardBackward) -> list[Any]:
    """Returns the variables that the loss depends on."""
    return [v for v, is_reached in zip(update.variables, update.trace.reached, strict=True) if is_reached]

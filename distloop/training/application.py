"""Application: checks and clips the sums of an update, and applies them to weights, slots and averages.

    application = make_application(state, clipping)
    gradients = application.check(update, sums)
    before = application.read_all(state.changed_by(update.update))
    application.apply(update, gradients)
    application.assign_all(state.changed_by(update.update), before, unless=gradients.finite)

All is called outside of replicas. It does not know when an update is skipped or undone.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from distloop.model import metrics, variable_writes
from distloop.model.state import TrainState
from distloop.model.user_functions import as_tensor
from distloop.optimizers import gradient_noise, gradients
from distloop.optimizers.gradients import Clipping, Segment
from distloop.training.forward_backward import ForwardBackward
from distloop.training.microbatches import StateUpdate, Sums


class Gradients(NamedTuple):
    """One update's gradients in a step, checked and clipped; all but `writes` is the same on every replica."""

    segments: list[Segment]  # summed over all replicas, and clipped by value
    squares: list[tf.Tensor]  # the squared norm of each
    scale: tf.Tensor  # []: the factor that divides, unscales and clips them; 0 if they are not finite
    tallies: tf.Tensor  # [2 * m]
    finite: tf.Tensor  # []
    replacements: list[tf.Tensor]  # of the replaced variables, if the step counts
    writes: dict[str, StateUpdate]  # as in `Sums`; the values after the step are for a step that is applied
    secs: tf.Tensor | None  # [R]: of forward and backward on each replica; None: there is only one


class Application:
    """The application of updates on every replica, which all have the same gradients.

    Attributes:
        state: what is trained.
        clipping: the limit of an update's gradients.
    """

    def __init__(self, state: TrainState, clipping: Clipping):
        """Stores what is trained, and the limit."""
        self.state, self.clipping = state, clipping
        self._applied: dict[str, Any] = {}  # by name of the update, the optimizers that a step applies
        self._strategy = state.strategy

    def first(self, value: Any) -> Any:
        """Returns the first replica's value of each leaf of a structure."""
        return tf.nest.map_structure(lambda leaf: self._strategy.experimental_local_results(leaf)[0], value)

    def reduce(self, update: ForwardBackward, sums: Sums) -> Sums:
        """Returns an update's sums over all replicas, given those of each; replicas have added theirs up already."""
        return sums

    def check(self, update: ForwardBackward, sums: Sums) -> Gradients:
        """Divides, unscales and clips an update's sums, if all of them are finite; on each replica."""
        gradients: Gradients = self._strategy.run(functools.partial(self._check, update), args=(sums,))
        return gradients

    def _check(self, update: ForwardBackward, sums: Sums) -> Gradients:
        """Checks sums where they are: on a replica, or for all at once."""
        squares = self._sum_over_owners(update, gradients.squared_norms(sums.segments))
        norm, scale = gradients.norm_and_scale(squares, sums.weight)
        tallies = metrics.elements(sums.tallies)
        finite = tf.math.is_finite(norm + tallies[0])
        for condition in (*sums.are_finite, *(tf.reduce_all(tf.math.is_finite(v)) for v in sums.replacements)):
            finite &= condition
        segments, scale, is_clipped = self.clipping.clip(update.packing, sums.segments, norm, scale, finite)
        if self.clipping.value and not self.has_all_gradients(update):
            is_clipped = self._sum_over_owners(update, [tf.cast(is_clipped, tf.float32)])[0] > 0
        own_tallies = [norm, 1.0, *([tf.cast(is_clipped, tf.float32), 1.0] if self.clipping else [])]
        if sums.noise is not None:
            own_tallies += gradient_noise.estimates(sums.noise, tallies[update.trace.divisor("loss")], norm)
        return Gradients(
            segments=segments,
            squares=squares,
            scale=tf.where(finite, scale, 0.0),
            tallies=tf.stack([*tallies, *own_tallies]),
            finite=finite,
            replacements=[tf.where(finite, *pair) for pair in zip(sums.replacements, update.replaced, strict=True)],
            writes=sums.writes,
            secs=sums.secs,
        )

    def has_all_gradients(self, update: ForwardBackward) -> bool:
        """Returns whether each worker has all gradients of an update after `reduce`, rather than those that it uses."""
        return True

    def _sum_over_owners(self, update: ForwardBackward, numbers: list[tf.Tensor]) -> list[tf.Tensor]:
        """Returns scalars about this worker's gradients, summed over the workers unless each has all gradients."""
        return numbers

    def apply(self, update: ForwardBackward, gradients: Gradients) -> None:
        """Changes weights, slots and averages by the gradients of an update."""
        args = gradients.segments, gradients.scale, gradients.replacements
        self._strategy.run(functools.partial(self._apply_on_replica, update), args=args)

    def read_all(self, variables: Sequence[Any]) -> list[tf.Tensor]:
        """Returns the values of variables on each replica of this worker, or of those that are on one device."""
        return variable_writes.read([copy for v in variables for copy in self.state.replica_variables(v)])

    def assign_all(self, variables: Sequence[Any], values: Any, unless: Any = None) -> None:
        """Assigns what `read_all` returned, unless a condition of each replica holds."""
        copies = [copy for v in variables for copy in self.state.replica_variables(v)]
        variable_writes.assign(copies, values, unless if unless is None else self.first(unless))

    def _apply_on_replica(
        self, update: ForwardBackward, segments: list[tf.Tensor], scale: tf.Tensor, replacements: list[tf.Tensor]
    ) -> None:
        summed, variables = self._wanted(update, segments, scale), reached(update)
        optimizer, store = self.state.plain_optimizers[update.name], self.state.slot_stores[update.name]
        if self.state.average is not None:
            by_variable = dict(zip(map(id, variables), summed, strict=True))
            self.state.average.touch(update.variables, [by_variable.get(id(v)) for v in update.variables])
        if variables or update.replaced:  # a step_fn may apply nothing
            packing = update.packing if update.update.gradient_fn is None else None
            pairs = store.join([*zip(summed, variables, strict=True)], packing, segments, scale)
            # Keras assigns a variable's new value where it would apply a gradient.
            optimizer.apply(*zip(*pairs, *zip(replacements, update.replaced, strict=True), strict=True))
            self._applied[update.name] = optimizer
        self._move_averages(update)

    def _move_averages(self, update: ForwardBackward) -> None:
        """Moves the averages once a step, with its last update; on a replica, or for all at once."""
        average, optimizers = self.state.average, list(self._applied.values())
        if average is not None and optimizers and update.name == self.state.spec.updates[-1].name:
            average.update(self.state.trained_variables, average.count(optimizers))

    def _wanted(self, update: ForwardBackward, segments: list[tf.Tensor], scale: tf.Tensor) -> list[tf.Tensor]:
        """Returns the gradients of the variables that the loss reaches, as the user wants them; on a replica."""
        optimizer = self.state.plain_optimizers[update.name]
        pairs = zip(
            update.packing.unpack_for(optimizer, segments, scale), update.variables, update.trace.reached, strict=True
        )
        by_path = {self.state.paths[id(variable)]: gradient for gradient, variable, is_reached in pairs if is_reached}
        if update.update.gradient_fn is not None:
            returned = update.update.gradient_fn(dict(by_path))
            by_path = checked("gradient_fn returned", returned, by_path)
        return list(by_path.values())


def make_application(state: TrainState, clipping: Clipping) -> Application:
    """Returns the application that fits where slots and averages are."""
    application: Application = state.slot_placement.adapt(Application(state, clipping))
    return application


def reached(update: ForwardBackward) -> list[Any]:
    """Returns the variables that the loss depends on, or for which a `step_fn` made a gradient."""
    return [v for v, is_reached in zip(update.variables, update.trace.reached, strict=True) if is_reached]


def checked(subject: str, returned: Any, expected: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
    """Returns tensors by path, in the order and of the dtypes of others; `subject` begins a message.

    Raises:
        ValueError: if they are not of the same paths and shapes.
    """
    names = sorted(map(str, returned)) if isinstance(returned, Mapping) else type(returned).__name__
    if names != sorted(expected):
        raise ValueError(
            f"{subject} {names}; it was given the gradients of {sorted(expected)}, by path: return a dict "
            "with one of the same shape for each."
        )
    tensors = {}
    for path, like in expected.items():
        tensors[path] = new = tf.cast(as_tensor(returned[path], subject, f" for {path}"), like.dtype)
        if not new.shape.is_compatible_with(like.shape):
            raise ValueError(
                f"{subject} a gradient of shape {list(new.shape)} for {path}, whose shape is "
                f"{list(like.shape)}: keep the shapes."
            )
    return tensors

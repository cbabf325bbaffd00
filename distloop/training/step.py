"""One train step over all updates: the order of its parts.

A train step, in the one right order; `forward` and `apply` run on every replica, the branch stands between them, where
TensorFlow can take it (a replica's function may hold no branch around what synchronizes):

    forward:  slice -> loss_fn -> weighted sums -> scale the loss -> gradients by microbatch -> one reduction;
              a step_fn repeats this as often as it asks for gradients
    finite?   on the reduced gradients and loss, so that every replica and worker decides alike
    settle:   keep what the forward pass wrote, averaged over the replicas, or put it back
    apply:    divide and unscale -> clip -> gradient_fn -> optimizer -> average
    rescale:  a loss scale falls after an overflow and rises after enough good steps

A branch around `apply` costs 10 to 20 % of a small step, so only a step that may be skipped has one. Where a step that
is not finite is an error, its gradients count as zero, which keeps the weights finite, and the loop ends on it.

It does not know of loops, boundaries or files.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import tensorflow as tf

from distloop.data import shards
from distloop.data.shards import Batch, Layout
from distloop.distributed import gathering, workers
from distloop.distributed.devices import HOST
from distloop.optimizers import gradients
from distloop.optimizers.clipping import Clipping
from distloop.optimizers.gradients import Packing
from distloop.optimizers.loss_scale import MAX_OVERFLOWS_AT_FLOOR, LossScaleOptimizer
from distloop.training import gradient_step, metrics, variable_writes
from distloop.training.application import make_application
from distloop.training.forward_backward import ForwardBackward
from distloop.training.gradient_step import Look
from distloop.training.state import TrainState

GRADIENT_NORM, CLIPPED_SHARE = "gradient_norm", "clipped_share"
NO_CLIPPING = Clipping()


class Outcome(NamedTuple):
    """The result of a train step: host tensors, the same on every worker."""

    applied: tf.Tensor  # []: whether it changed anything
    failed: tf.Tensor  # []: whether it is an error
    tallies: tf.Tensor  # [2 * M]: total and weight of each of `TrainStep.names`; zeros if the step was skipped
    diagnosis: tf.Tensor  # [D]: for `diagnosis.explain`; empty if a step cannot fail
    replica_secs: tf.Tensor | None  # [R]: how long each replica took, forward and backward; None: there is only one


class GradientRecorder(Protocol):
    """Stores the gradients of each step, as `WeightHistograms` does."""

    def allocate(self, update: str, packing: Packing) -> None:
        """Creates the variables for an update's gradients, before the step is traced."""

    def record(self, update: str, segments: Sequence[tf.Tensor], scale: tf.Tensor) -> None:
        """Stores an update's summed gradients and the factor that scales them."""


class _Forward(NamedTuple):
    """One update of a step on a replica, reduced; all fields but `before` and `after` are equal on all replicas."""

    segments: list[tf.Tensor]  # summed gradients
    squares: list[tf.Tensor]  # the squared norm of each
    scale: tf.Tensor  # []: the factor that divides, unscales and clips them; 0 if they are not finite
    tallies: tf.Tensor  # [2 * m]
    finite: tf.Tensor  # []
    new_values: list[tf.Tensor]  # of the overwritten variables, if the step counts
    before: list[tf.Tensor]  # the written variables' values before the forward pass
    after: list[tf.Tensor]  # their values after the step, if it counts
    secs: tf.Tensor | None  # [R]: of forward and backward on each replica; None: there is only one


class _Attempt(NamedTuple):
    """One update of a step, applied or not, with what undoes it."""

    update: ForwardBackward
    forward: _Forward  # a value per replica
    tallies: tf.Tensor  # [2 * m]: zeros if the update was not applied
    before: Any  # a value per replica: weights, slots and averages before the update; None: nothing undoes it


class TrainStep:
    """One train step over all updates.

    Attributes:
        state: what is trained.
        updates: the forward and backward pass of each update, in order.
        application: how an update's gradients change the weights.
        microbatches, jit_compile, skip_nonfinite, locate_nonfinite, loss_jump, histograms: the arguments.
        own_names: the tallies that the step adds to each update's.
        may_skip: whether a step may leave everything unchanged.
        may_fail: whether a step may be an error.
    """

    def __init__(
        self,
        state: TrainState,
        *,
        microbatches: int = 1,
        clipping: Clipping = NO_CLIPPING,
        skip_nonfinite: bool = False,
        jit_compile: bool = False,
        locate_nonfinite: bool = False,
        loss_jump: float | None = None,
        histograms: GradientRecorder | None = None,
    ):
        """Prepares; nothing is traced yet.

        Args:
            state: what is trained.
            microbatches: the number of parts that each replica's shard is cut into.
            clipping: the limit of an update's gradients.
            skip_nonfinite: whether a step that is not finite is skipped, every bit unchanged; else it is an error.
            jit_compile: whether XLA compiles the forward and backward pass.
            locate_nonfinite: whether a step that is an error leaves every bit unchanged, so that `diagnosis.explain`
                can run it again.
            loss_jump: how far above its usual value a loss makes the step an error, as for `LossWatch.check`; then a
                loss that is not finite is an error too, even if the loss is scaled; None: losses are not watched.
            histograms: records the gradients of each step; None: nothing does.
        """
        self.state = state
        self.skip_nonfinite = skip_nonfinite
        self.jit_compile = jit_compile
        self.locate_nonfinite = locate_nonfinite
        self.loss_jump = loss_jump
        self.histograms = histograms
        self.may_skip = skip_nonfinite or locate_nonfinite or bool(state.loss_scalers)
        self.may_fail = not skip_nonfinite or bool(state.loss_scalers) or loss_jump is not None
        self.application = make_application(state)
        self._needs_whole_gradients = bool(clipping.variable_norm) or histograms is not None
        self.set_microbatches(microbatches)
        self.own_names = [GRADIENT_NORM, CLIPPED_SHARE] if clipping else [GRADIENT_NORM]
        self._strategy = state.strategy
        self._clipping = clipping
        if histograms is not None:
            for update in self.updates:
                histograms.allocate(update.name, update.packing)

    def set_microbatches(self, microbatches: int) -> None:
        """Sets the number of parts that each replica's shard is cut into; the step has to be traced again."""
        self.microbatches = microbatches
        self.updates = [
            ForwardBackward(
                self.state,
                update,
                microbatches=microbatches,
                jit_compile=self.jit_compile,
                needs_whole_gradients=self._needs_whole_gradients,
            )
            for update in self.state.spec.updates
        ]

    @property
    def names(self) -> list[str]:
        """The names of the tallies; known once the step is traced."""
        return [update.full_name(name) for update in self.updates for name in (*update.trace.names, *self.own_names)]

    def __call__(self, batch: Batch, layout: Layout) -> Outcome:
        """Runs one step; in a `tf.function`, outside `strategy.run`."""
        examples = self.count_examples(batch, layout)
        finite = tf.constant(True)
        attempts: list[_Attempt] = []
        for update in self.updates:
            forward = self._forward(update, batch, layout, examples)
            finite &= self._first(forward.finite)
            self._settle(update, forward, finite)
            self._record_gradients(update, forward)
            attempts.append(self._apply(update, forward, finite, attempts))
        metrics.check_fed(self.state.keras_metrics, {name for u in self.updates for name in u.trace.outputs})
        failed = self._rescale(attempts, finite)
        if self.loss_jump is not None:
            failed |= self._has_diverged(attempts, self.loss_jump)
        return Outcome(
            applied=finite,
            failed=failed,
            tallies=self._join_tallies(attempts, finite),
            diagnosis=self._diagnosis(attempts),
            replica_secs=self._sum_secs(attempts),
        )

    def advance(self, update: ForwardBackward, batch: Batch, layout: Layout) -> None:
        """Takes one update, finite or not, for a second look at a step that failed."""
        forward = self._forward(update, batch, layout, self.count_examples(batch, layout))
        self._settle(update, forward, tf.constant(True))
        self.application.apply(update, forward.segments, forward.scale, forward.new_values)

    def _first(self, value: Any) -> Any:
        """Returns the first replica's value."""
        return self._strategy.experimental_local_results(value)[0]

    def count_examples(self, batch: Batch, layout: Layout) -> tf.Tensor:
        """Returns the number of examples in the step: over all workers if a loss scale needs it, else on this one."""
        examples = tf.cast(shards.count_examples(batch, self._strategy), tf.float32)
        is_local = (layout.is_sharded or layout.is_split) and workers.num_workers(self._strategy) > 1
        if is_local and any(update.is_loss_scaled for update in self.updates):  # alike on all workers
            return workers.sum_over_workers(self._strategy, examples)
        return examples

    def _forward(self, update: ForwardBackward, batch: Batch, layout: Layout, examples: tf.Tensor) -> _Forward:
        """Computes and reduces an update's gradients and sums, on all replicas."""

        def look(batch: Batch, examples: tf.Tensor) -> Look:
            return gradient_step.run(update, batch, layout, update.loss_factor(examples))

        look_fn = gathering.with_max_rows(look, layout.max_replica_rows)
        judge = functools.partial(self._judge, update)
        forward: _Forward = self.application.reduce(update, look_fn, judge, (batch, examples))
        return forward

    def _judge(self, update: ForwardBackward, look: Look) -> _Forward:
        """Computes norm and factor of summed gradients, and whether all is finite; on a replica, or for all at once."""
        add = self.application.sum_over_owners(update)
        squares, norm, scale = gradients.norm_and_scale(look.segments, look.weight, add)
        finite = tf.math.is_finite(norm + look.tallies[0])
        for condition in (*look.are_finite, *(tf.reduce_all(tf.math.is_finite(v)) for v in look.new_values)):
            finite &= condition
        segments, scale, is_clipped = self._clipping.clip(update.packing, look.segments, norm, scale, finite)
        own_tallies = [norm, 1.0]
        if self._clipping.value and add is not None:
            is_clipped = add(tf.cast(is_clipped, tf.float32)) > 0
        if self._clipping:
            own_tallies += [tf.cast(is_clipped, tf.float32), 1.0]
        return _Forward(
            segments,
            squares,
            tf.where(finite, scale, 0.0),
            tf.concat([look.tallies, own_tallies], 0),
            finite,
            [tf.where(finite, new, v) for new, v in zip(look.new_values, update.overwritten, strict=True)],
            look.before,
            look.after,
            look.secs,
        )

    def _settle(self, update: ForwardBackward, forward: _Forward, finite: tf.Tensor) -> None:
        """Keeps what the forward pass wrote, averaged over the replicas, if the step is finite; else restores it."""

        def settle(finite: tf.Tensor, before: list[Any], after: list[Any]) -> None:
            for variable, old, new in zip(update.trace.written, before, after, strict=True):
                variable.assign(tf.where(finite, new, old))

        self._strategy.run(settle, args=(finite, forward.before, forward.after))

    def _record_gradients(self, update: ForwardBackward, forward: _Forward) -> None:
        if self.histograms is not None:
            segments = tf.nest.map_structure(self._first, forward.segments)
            self.histograms.record(update.name, segments, self._first(forward.scale))

    def _apply(
        self, update: ForwardBackward, forward: _Forward, finite: tf.Tensor, earlier: Sequence[_Attempt]
    ) -> _Attempt:
        """Applies an update if all is finite so far, else undoes the earlier ones."""
        tallies = self._first(forward.tallies)
        if not self.may_skip:
            self.application.apply(update, forward.segments, forward.scale, forward.new_values)
            return _Attempt(update, forward, tallies, None)
        is_last = update is self.updates[-1]  # a later update may still fail, and take this one with it
        before = None if is_last else self.application.read(update)

        def applied() -> tf.Tensor:
            self.application.apply(update, forward.segments, forward.scale, forward.new_values)
            return tf.identity(tallies)

        def undone() -> tf.Tensor:
            for attempt in reversed(earlier):  # the first one's values are the oldest
                self._undo(attempt)
            return tf.zeros_like(tallies)

        return _Attempt(update, forward, tf.cond(finite, applied, undone), before)

    def _undo(self, attempt: _Attempt) -> None:
        """Restores the variables that applying an update changed, and then those that its forward pass wrote."""
        self.application.restore(attempt.update, attempt.before)
        written = functools.partial(variable_writes.assign, attempt.update.trace.written)
        self._strategy.run(written, args=(attempt.forward.before,))

    def _rescale(self, attempts: Sequence[_Attempt], finite: tf.Tensor) -> tf.Tensor:
        """Adapts the loss scales; returns whether the step is an error. With a loss scale, one overflow is none."""
        failed = tf.constant(False)
        for scaler, forwards in _by_loss_scaler(attempts):
            is_finite = functools.reduce(tf.logical_and, [self._first(forward.finite) for forward in forwards])
            if scaler is not None:
                scaler.update_scale(is_finite, finite)
                failed |= tf.convert_to_tensor(scaler.streak) <= -MAX_OVERFLOWS_AT_FLOOR
            elif not self.skip_nonfinite:
                failed |= ~is_finite
        return failed

    def _has_diverged(self, attempts: Sequence[_Attempt], jump: float) -> tf.Tensor:
        """Returns whether the loss of any update jumped, or is not finite."""
        losses = tf.stack([self._first(attempt.forward.tallies)[:2] for attempt in attempts])  # [U, 2]
        totals, weights = tf.unstack(losses, axis=1)
        means = tf.math.divide_no_nan(totals, weights)
        with tf.device(HOST):
            has_diverged = self.state.loss_watch.check(means, weights > 0, jump)
        # A loss scale is not to blame for a loss that is not finite: it is computed before it is scaled.
        return has_diverged if self.skip_nonfinite else has_diverged | ~tf.reduce_all(tf.math.is_finite(means))

    def _join_tallies(self, attempts: Sequence[_Attempt], finite: tf.Tensor) -> tf.Tensor:
        tallies = tf.concat([attempt.tallies for attempt in attempts], 0)
        if self.may_skip and len(attempts) > 1:
            tallies = tf.where(finite, tallies, 0.0)  # the tallies of a good update count only with the others
        return tallies

    def _diagnosis(self, attempts: Sequence[_Attempt]) -> tf.Tensor:
        """Returns tallies and gradients of all updates for `diagnosis.explain`, if the step may be an error."""
        if not self.may_fail:
            return tf.zeros([0])
        parts = []
        for update, forward, *_ in attempts:
            segments, squares = tf.nest.map_structure(self._first, (forward.segments, forward.squares))
            parts += [self._first(forward.tallies), update.packing.diagnosis(segments, squares)]
        return tf.concat(parts, 0)

    def _sum_secs(self, attempts: Sequence[_Attempt]) -> tf.Tensor | None:
        secs = [self._first(attempt.forward.secs) for attempt in attempts if attempt.forward.secs is not None]
        return tf.add_n(secs) if secs else None


def _by_loss_scaler(attempts: Sequence[_Attempt]) -> list[tuple[LossScaleOptimizer | None, list[_Forward]]]:
    """Returns each loss scaler, None for those without one, with the forward passes whose loss it scales."""
    groups: dict[int, tuple[LossScaleOptimizer | None, list[_Forward]]] = {}
    for attempt in attempts:
        scaler = attempt.update.loss_scaler
        groups.setdefault(id(scaler), (scaler, []))[1].append(attempt.forward)
    return list(groups.values())

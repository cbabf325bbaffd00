"""One train step over all updates, and the order of its parts.

A train step, in the one right order; `compute` and `apply` run on every replica, the branch stands between them, where
TensorFlow can take it (a replica's function may hold no branch around what synchronizes):

    compute:  slice -> loss_fn -> weighted sums -> scale the loss -> gradients by microbatch -> one reduction;
              a step_fn repeats this as often as it asks for gradients
    check:    divide and unscale -> finite? on the reduced gradients and loss, so that every replica and worker decides
              alike -> clip
    commit:   keep what the forward pass wrote, averaged over the replicas, or put it back
    apply:    gradient_fn -> optimizer -> average
    rescale:  a loss scale is halved after an overflow and grows after enough good steps

A branch around `apply` costs 10 to 20 % of a small step, so only a step that may be skipped has one. Where a step that
is not finite is an error, its gradients count as zero, which keeps the weights finite, and the loop ends on it.

On GPUs a branch waits until its condition is on the host, and the GPUs wait for the host. So steps run ahead on GPUs:
the host asks whether a step failed when the next step has begun, which then changes nothing. A step that may be skipped
changes its variables, and restores them if it is skipped, which takes memory for a copy of them.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from distloop.data import shards
from distloop.data.shards import Batch, BatchLayout
from distloop.distributed import strategies, tensorflow_internals
from distloop.distributed.devices import HOST
from distloop.installed import import_part
from distloop.model import metrics, variable_writes
from distloop.model.state import TrainState
from distloop.optimizers import gradient_noise
from distloop.optimizers.gradients import Clipping
from distloop.optimizers.loss_scale import MAX_OVERFLOWS_AT_FLOOR, LossScaleOptimizer
from distloop.training.application import Gradients, make_application
from distloop.training.forward_backward import ForwardBackward
from distloop.training.microbatches import StateUpdate, Sums

GRADIENT_NORM, CLIPPED = "gradient_norm", "clipped_share"
NO_CLIPPING = Clipping()


class Outcome(NamedTuple):
    """The result of a train step, on the device of the first replica; the same on every worker."""

    applied: tf.Tensor  # []: whether it changed anything
    failed: tf.Tensor  # []: whether it is an error
    tallies: tf.Tensor  # [2 * M]: total and weight of each of `TrainStep.names`; zeros if the step was skipped
    diagnosis: list[tf.Tensor]  # pieces of [D], for `diagnosis.explain`; none if a step cannot fail
    replica_secs: tf.Tensor | None  # [R]: how long each replica took, forward and backward; None: there is only one


class Applied(NamedTuple):
    """What an update has done in a step."""

    update: ForwardBackward
    gradients: Gradients
    tallies: tf.Tensor  # [2 * m]; zeros if it was not applied
    is_applied: Any  # [] on each replica: whether this update and all before it count
    before: Any  # the values before it, as `Application.read_all` returns them; None: nothing restores them


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
        runs_ahead: whether a step begins before the host knows whether the one before failed.
    """

    def __init__(
        self,
        state: TrainState,
        *,
        microbatches: int = 1,
        clipping: Clipping = NO_CLIPPING,
        skip_nonfinite: bool = False,
        jit_compile: str = "none",
        measures_noise: bool = False,
        locate_nonfinite: bool = False,
        loss_jump: float | None = None,
        histograms: Any = None,
        runs_ahead: bool | None = None,
        needs_full_gradients: bool = False,
    ):
        """Prepares; nothing is traced yet.

        Args:
            state: what is trained.
            microbatches: into how many each replica's shard is cut.
            clipping: the limit of an update's gradients.
            skip_nonfinite: whether a step that is not finite is skipped, every bit unchanged; else it is an error.
            jit_compile: what XLA compiles, as `Config.jit_compile`.
            measures_noise: whether the gradients of microbatches are compared, for `GradientNoise`.
            locate_nonfinite: whether a step that is an error leaves every bit unchanged, so that `diagnosis.explain`
                can run it again.
            loss_jump: how far above its usual value a loss makes the step an error, as for `LossWatch.check`; then a
                loss that is not finite is an error too, even if the loss is scaled; None: losses are not watched.
            histograms: the `WeightHistograms` that record the gradients of each step; None: there are none.
            runs_ahead: whether the host may look at a step after the next one has begun; None: it may on GPUs.
            needs_full_gradients: whether every worker needs all gradients, to look at them.
        """
        self.state, self.skip_nonfinite, self.jit_compile = state, skip_nonfinite, jit_compile
        self.locate_nonfinite, self.loss_jump, self.histograms = locate_nonfinite, loss_jump, histograms
        self.may_skip = skip_nonfinite or locate_nonfinite or bool(state.loss_scalers)
        self.may_fail = not skip_nonfinite or bool(state.loss_scalers) or loss_jump is not None
        self.application = make_application(state, clipping)
        runs_ahead = strategies.has_gpus(state.strategy) if runs_ahead is None else runs_ahead
        self.runs_ahead = runs_ahead and not locate_nonfinite  # `explain` needs the last batch and its weights
        self._lead = strategies.lead_device(state.strategy)
        needs_full_gradients |= bool(clipping.variable_norm) or histograms is not None
        self.microbatches, self._strategy = microbatches, state.strategy
        self.updates = [
            ForwardBackward(
                state,
                update,
                microbatches=microbatches,
                jit_compile=jit_compile,
                needs_full_gradients=needs_full_gradients,
                measures_noise=measures_noise,
            )
            for update in state.spec.updates
        ]
        self._passes = {update.name: _pass_of(update) for update in self.updates}
        self.own_names = [GRADIENT_NORM] + [CLIPPED] * bool(clipping) + [*gradient_noise.NAMES] * measures_noise
        if histograms is not None:
            for update in self.updates:
                histograms.allocate(update.name, update.packing)

    @property
    def names(self) -> list[str]:
        """The names of the tallies; known once the step is traced."""
        return [update.full_name(name) for update in self.updates for name in (*update.trace.names, *self.own_names)]

    def __call__(self, batch: Batch, layout: BatchLayout, is_over: tf.Tensor | None = None) -> Outcome:
        """Runs one step; in a `tf.function`, outside `strategy.run`.

        Args:
            batch: the global batch.
            layout: its layout.
            is_over: whether an earlier step failed, so that this one changes nothing, a scalar on the device of the
                first replica; None: the host knows that none did.
        """
        examples = self.count_examples(batch, layout)
        done: list[Applied] = []
        with tf.device(self._lead):
            for update in self.updates:
                sums = self.compute(update, batch, layout, examples)
                sums = self.reduce(update, sums)
                gradients = self.application.check(update, sums)
                done.append(self.apply(update, gradients, done, is_over))
            is_applied = done[-1].is_applied
            for applied in done[-2::-1] if self.may_skip and self.runs_ahead else ():  # a later update may have failed
                self._undo(applied, unless=is_applied)
            metrics.check_fed(self.state.keras_metrics, {name for u in self.updates for name in u.trace.outputs})
            return self._outcome(done, self.application.first(is_applied), is_over)

    def advance(self, update: ForwardBackward, sums: Sums) -> None:
        """Applies an update's sums, finite or not, to inspect a step."""
        gradients = self.application.check(update, sums)
        self._commit_writes(update, gradients, tf.constant(True))
        self.application.apply(update, gradients)

    def _outcome(self, done: Sequence[Applied], is_applied: tf.Tensor, is_over: tf.Tensor | None) -> Outcome:
        """Adapts the loss scales, and returns what the step has come to."""
        failed = self._rescale(done, is_applied, is_over)
        if self.loss_jump is not None:
            failed |= self._has_diverged(done, self.loss_jump, is_over)
        secs = [self.application.first(each.gradients.secs) for each in done if each.gradients.secs is not None]
        tallies = tf.concat([each.tallies for each in done], 0)
        if self.may_skip and len(done) > 1:
            tallies = tf.where(is_applied, tallies, 0.0)  # those of a good update count only with the others
        return Outcome(is_applied, failed, tallies, self._diagnosis(done), tf.add_n(secs) if secs else None)

    def count_examples(self, batch: Batch, layout: BatchLayout) -> tf.Tensor:
        """Returns the number of examples in the step: over all workers if a loss scale needs it, else on this one.

        It divides the loss, so of a batch without rows it is 1.
        """
        examples = tf.cast(shards.count_examples(batch), tf.float32)
        if any(update.is_loss_scaled for update in self.updates):  # alike on all workers
            examples = layout.sum_over_batches(self._strategy, examples)
        return tf.maximum(examples, 1.0)

    def compute(self, update: ForwardBackward, batch: Batch, layout: BatchLayout, examples: tf.Tensor) -> Any:
        """Runs an update's forward and backward pass on all replicas; returns the sums of each, as `reduce` takes them.

        Args:
            update: the pass.
            batch: the global batch.
            layout: its layout.
            examples: how many it has, as `count_examples` returns them.
        """
        with tensorflow_internals.all_reduce_without_graph_walks():
            return self._strategy.run(self._passes[update.name], args=(batch, examples, layout))

    def reduce(self, update: ForwardBackward, sums: Any) -> Sums:
        """Adds up an update's sums over all replicas and workers, unless its `step_fn` has done so."""
        with tensorflow_internals.all_reduce_without_graph_walks():
            sums = self._strategy.run(self._passes[update.name].all_reduce, args=(sums,))
        return self.application.reduce(update, sums)

    def sums(self, update: ForwardBackward, batch: Batch, layout: BatchLayout) -> Sums:
        """Computes an update's sums outside of a step."""
        return self.reduce(update, self.compute(update, batch, layout, self.count_examples(batch, layout)))

    def _commit_writes(self, update: ForwardBackward, gradients: Gradients, finite: Any) -> None:
        """Keeps what the forward pass wrote, averaged over the replicas, if the step is finite; else restores it."""

        def commit(finite: tf.Tensor, writes: dict[str, StateUpdate]) -> None:
            for variable, change in zip(update.variables_of(writes), writes.values(), strict=True):
                variable.assign(tf.where(finite, change.after, change.before))

        self._strategy.run(commit, args=(finite, gradients.writes))

    def apply(
        self, update: ForwardBackward, gradients: Gradients, earlier: Sequence[Applied], is_over: tf.Tensor | None
    ) -> Applied:
        """Applies an update if the step counts so far, else restores what it and the earlier updates have changed.

        Args:
            update: the pass.
            gradients: of it.
            earlier: what the updates before it have done.
            is_over: as for `__call__`.
        """
        is_applied = gradients.finite
        if earlier or is_over is not None:
            so_far = earlier[-1].is_applied if earlier else tf.logical_not(is_over)
            is_applied = self._strategy.run(tf.logical_and, args=(so_far, is_applied))
        self._commit_writes(update, gradients, is_applied)
        if self.histograms is not None:
            self.histograms.record(update.name, *self.application.first((gradients.segments, gradients.scale)))
        may_be_undone = self.runs_ahead or update is not self.updates[-1]  # by a later update that fails
        changed = self.state.changed_by(update.update)
        before = self.application.read_all(changed) if self.may_skip and may_be_undone else None
        tallies = self.application.first(gradients.tallies)

        def applied() -> tf.Tensor:
            self.application.apply(update, gradients)
            return tf.identity(tallies)

        def undone() -> tf.Tensor:
            for each in reversed(earlier):  # the first one's values are the oldest
                self._undo(each)
            return tf.zeros_like(tallies)

        if not self.may_skip and is_over is not None:
            with tf.device(HOST):  # which has long known it, as a forward and a backward pass were in between
                is_over = tf.identity(is_over)
            tf.cond(is_over, lambda: None, lambda: self.application.apply(update, gradients))
        elif not self.may_skip:
            self.application.apply(update, gradients)
        elif self.runs_ahead:
            self.application.apply(update, gradients)
            self.application.assign_all(changed, before, unless=is_applied)
            tallies = tf.where(self.application.first(is_applied), tallies, 0.0)
        else:
            tallies = tf.cond(self.application.first(is_applied), applied, undone)
        return Applied(update, gradients, tallies, is_applied, before)

    def _undo(self, applied: Applied, unless: Any = None) -> None:
        """Restores what an update and its forward pass have changed, unless a condition of each replica holds."""
        self.application.assign_all(self.state.changed_by(applied.update.update), applied.before, unless)
        writes = applied.gradients.writes
        assign = functools.partial(variable_writes.assign, applied.update.variables_of(writes))
        self._strategy.run(assign, args=([change.before for change in writes.values()], unless))

    def _rescale(self, done: Sequence[Applied], is_applied: tf.Tensor, is_over: tf.Tensor | None) -> tf.Tensor:
        """Adapts the loss scales; returns whether the step is an error. With a loss scale, one overflow is none."""
        failures: list[tf.Tensor] = []
        by_scaler: dict[LossScaleOptimizer | None, list[tf.Tensor]] = {}
        for each in done:
            by_scaler.setdefault(each.update.loss_scaler, []).append(self.application.first(each.gradients.finite))
        for scaler, are_finite in by_scaler.items():
            is_finite = functools.reduce(tf.logical_and, are_finite)
            if scaler is not None:
                scaler.update_scale(is_finite if is_over is None else is_finite | is_over, is_applied)
                failures.append(tf.convert_to_tensor(scaler.streak) <= -MAX_OVERFLOWS_AT_FLOOR)
            elif not self.skip_nonfinite:
                failures.append(~is_finite)
        return functools.reduce(tf.logical_or, failures) if failures else tf.constant(False)

    def _has_diverged(self, done: Sequence[Applied], jump: float, is_over: tf.Tensor | None) -> tf.Tensor:
        """Returns whether the loss of any update jumped, or is not finite."""
        losses = tf.stack([self.application.first(each.gradients.tallies)[:2] for each in done])  # [U, 2]
        totals, weights = tf.unstack(losses, axis=1)
        means = tf.math.divide_no_nan(totals, weights)
        has_weight = weights > 0 if is_over is None else (weights > 0) & ~is_over
        has_diverged = self.state.loss_watch.check(means, has_weight, jump)
        # A loss scale is not to blame for a loss that is not finite: it is computed before it is scaled.
        return has_diverged if self.skip_nonfinite else has_diverged | ~tf.reduce_all(tf.math.is_finite(means))

    @property
    def num_diagnosis_pieces(self) -> int:
        """The length of `Outcome.diagnosis`."""
        return 2 * len(self.updates) if self.may_fail else 0

    def _diagnosis(self, done: Sequence[Applied]) -> list[tf.Tensor]:
        """Returns tallies and gradients of all updates for `diagnosis.explain`, if the step may be an error."""
        pieces: list[tf.Tensor] = []
        for update, gradients, *_ in done if self.may_fail else ():
            segments, squares = self.application.first((gradients.segments, gradients.squares))
            pieces += [self.application.first(gradients.tallies), update.packing.diagnosis(segments, squares)]
        return pieces


def loss_weight(step: TrainStep) -> int | None:
    """Returns the index of the weight of the first update's loss in the tallies; None: it has none."""
    names = list(step.updates[0].trace.names)
    return 2 * names.index("loss") + 1 if "loss" in names else None


def _pass_of(update: ForwardBackward) -> Any:
    """Returns what computes the sums of an update: its forward and backward pass, or the user's `step_fn`."""
    if update.update.step_fn is None:
        return update
    return import_part("step_fn.gradient_step", "step_fn").StepFnPass(update)

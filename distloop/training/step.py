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
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import tensorflow as tf

from distloop.data import shards
from distloop.data.shards import Batch, BatchLayout
from distloop.distributed import strategies, tensorflow_internals
from distloop.distributed.devices import HOST
from distloop.model import metrics, variable_writes
from distloop.model.state import TrainState
from distloop.optimizers import gradient_noise
from distloop.optimizers.gradients import Clipping, Packing, Segment, norm_and_scale
from distloop.optimizers.loss_scale import MAX_OVERFLOWS_AT_FLOOR, LossScaleOptimizer
from distloop.training.application import make_application
from distloop.training.forward_backward import ForwardBackward, StateUpdate, Summed
from distloop.training.gradient_step import call_step_fn

GRADIENT_NORM, CLIPPED = "gradient_norm", "clipped_share"
NO_CLIPPING = Clipping()


class Outcome(NamedTuple):
    """The result of a train step, on the device of the first replica; the same on every worker."""

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


class Gradients(NamedTuple):
    """One update's gradients in a step, checked and clipped; all but `writes` is the same on every replica."""

    segments: list[Segment]  # summed over all replicas, and clipped by value
    squares: list[tf.Tensor]  # the squared norm of each
    scale: tf.Tensor  # []: the factor that divides, unscales and clips them; 0 if they are not finite
    tallies: tf.Tensor  # [2 * m]
    finite: tf.Tensor  # []
    replacements: list[tf.Tensor]  # of the replaced variables, if the step counts
    writes: dict[str, StateUpdate]  # as in `Summed`; the values after the step are for a step that is applied
    secs: tf.Tensor | None  # [R]: of forward and backward on each replica; None: there is only one


class TrainStep:
    """One train step over all updates.

    Attributes:
        state: what is trained.
        updates: the forward and backward pass of each update, in order.
        application: how an update's gradients change the weights.
        microbatches, jit_compile, skip_nonfinite, locate_nonfinite, loss_jump, histograms, inspect: the arguments.
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
        jit_compile: bool = False,
        measures_noise: bool = False,
        locate_nonfinite: bool = False,
        loss_jump: float | None = None,
        histograms: GradientRecorder | None = None,
        runs_ahead: bool | None = None,
        inspect: Callable[[ForwardBackward, Sequence[Segment], tf.Tensor], None] | None = None,
    ):
        """Prepares; nothing is traced yet.

        Args:
            state: what is trained.
            microbatches: into how many each replica's shard is cut.
            clipping: the limit of an update's gradients.
            skip_nonfinite: whether a step that is not finite is skipped, every bit unchanged; else it is an error.
            jit_compile: whether XLA compiles the forward and backward pass.
            measures_noise: whether the gradients of microbatches are compared, for `GradientNoise`.
            locate_nonfinite: whether a step that is an error leaves every bit unchanged, so that `diagnosis.explain`
                can run it again.
            loss_jump: how far above its usual value a loss makes the step an error, as for `LossWatch.check`; then a
                loss that is not finite is an error too, even if the loss is scaled; None: losses are not watched.
            histograms: records the gradients of each step; None: nothing does.
            inspect: gets each update, its summed gradients before clipping, packed, and the factor that divides them.
            runs_ahead: whether the host may look at a step after the next one has begun; None: it may on GPUs.
        """
        self.state, self.skip_nonfinite, self.jit_compile = state, skip_nonfinite, jit_compile
        self.locate_nonfinite, self.loss_jump = locate_nonfinite, loss_jump
        self.histograms, self.inspect = histograms, inspect
        self.may_skip = skip_nonfinite or locate_nonfinite or bool(state.loss_scalers)
        self.may_fail = not skip_nonfinite or bool(state.loss_scalers) or loss_jump is not None
        self.application = make_application(state)
        runs_ahead = strategies.has_gpus(state.strategy) if runs_ahead is None else runs_ahead
        self.runs_ahead = runs_ahead and not locate_nonfinite  # `explain` needs the last batch and its weights
        self._lead = strategies.lead_device(state.strategy)
        needs_full_gradients = bool(clipping.variable_norm) or histograms is not None or inspect is not None
        self.microbatches = microbatches
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
        self.own_names = [GRADIENT_NORM] + [CLIPPED] * bool(clipping) + [*gradient_noise.NAMES] * measures_noise
        self._strategy, self._clipping = state.strategy, clipping
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
        gradients: list[Gradients] = []  # of each update
        tallies: list[tf.Tensor] = []  # likewise; zeros if it was not applied
        undo: list[Callable[..., None]] = []  # what restores the values before each
        with tf.device(self._lead):
            is_applied: Any = None if is_over is None else ~is_over  # on each replica
            for update in self.updates:
                sums = self.compute(update, batch, layout, examples)
                of_update = self.check(update, sums)
                both = is_applied, of_update.finite
                is_applied = both[1] if is_applied is None else self._strategy.run(tf.logical_and, args=both)
                self._commit_writes(update, of_update, is_applied)
                if self.histograms is not None:
                    segments = tf.nest.map_structure(self._first, of_update.segments)
                    self.histograms.record(update.name, segments, self._first(of_update.scale))
                tallies.append(self._apply(update, of_update, is_applied, is_over, undo))
                gradients.append(of_update)
            for restore in undo[-2::-1] if self.runs_ahead else ():  # a later update may have failed
                restore(unless=is_applied)
            metrics.check_fed(self.state.keras_metrics, {name for u in self.updates for name in u.trace.outputs})
            applied = self._first(is_applied)
            failed = self._rescale(gradients, applied, is_over)
            if self.loss_jump is not None:
                failed |= self._has_diverged(gradients, self.loss_jump, is_over)
            secs = [self._first(of_update.secs) for of_update in gradients if of_update.secs is not None]
            return Outcome(
                applied=applied,
                failed=failed,
                tallies=_join_tallies(tallies, applied, self.may_skip),
                diagnosis=self._diagnosis(gradients),
                replica_secs=tf.add_n(secs) if secs else None,
            )

    def advance(self, update: ForwardBackward, batch: Batch, layout: BatchLayout) -> None:
        """Takes one update, finite or not, to inspect a step that failed."""
        gradients = self.gradients(update, batch, layout)
        self._commit_writes(update, gradients, tf.constant(True))
        self.application.apply(update, gradients.segments, gradients.scale, gradients.replacements)

    def _first(self, value: Any) -> Any:
        """Returns the first replica's value."""
        return self._strategy.experimental_local_results(value)[0]

    def count_examples(self, batch: Batch, layout: BatchLayout) -> tf.Tensor:
        """Returns the number of examples in the step: over all workers if a loss scale needs it, else on this one."""
        examples = tf.cast(shards.count_examples(batch), tf.float32)
        if any(update.is_loss_scaled for update in self.updates):  # alike on all workers
            return layout.sum_over_batches(self._strategy, examples)
        return examples

    def compute(self, update: ForwardBackward, batch: Batch, layout: BatchLayout, examples: tf.Tensor) -> Summed:
        """Runs an update's forward and backward pass on all replicas; returns the sums over all of them."""
        fn = update if update.update.step_fn is None else functools.partial(call_step_fn, update)
        with tensorflow_internals.all_reduce_without_graph_walks():
            sums = self._strategy.run(functools.partial(fn, layout=layout), args=(batch, examples))
        return self.application.reduce(update, sums)

    def check(self, update: ForwardBackward, sums: Summed) -> Gradients:
        """Divides, unscales and clips an update's sums, if all of them are finite."""
        gradients: Gradients = self.application.call(update, functools.partial(self._check_and_clip, update), sums)
        return gradients

    def gradients(self, update: ForwardBackward, batch: Batch, layout: BatchLayout) -> Gradients:
        """Computes an update's gradients and checks them, outside of a step."""
        return self.check(update, self.compute(update, batch, layout, self.count_examples(batch, layout)))

    def _check_and_clip(self, update: ForwardBackward, summed: Summed) -> Gradients:
        """Computes norm and factor of summed gradients, and whether all is finite; on a replica, or for all at once."""
        add = self.application.sum_over_owners(update)
        squares, norm, scale = norm_and_scale(summed.segments, summed.weight, add)
        if self.inspect is not None:
            self.inspect(update, summed.segments, scale)
        finite = tf.math.is_finite(norm + summed.tallies[0])
        for condition in (*summed.are_finite, *(tf.reduce_all(tf.math.is_finite(v)) for v in summed.replacements)):
            finite &= condition
        segments, scale, is_clipped = self._clipping.clip(update.packing, summed.segments, norm, scale, finite)
        if self._clipping.value and add is not None:
            is_clipped = add(tf.cast(is_clipped, tf.float32)) > 0
        own_tallies = [norm, 1.0, *([tf.cast(is_clipped, tf.float32), 1.0] if self._clipping else [])]
        if summed.noise is not None:
            own_tallies += gradient_noise.estimates(summed.noise, summed.tallies[update.trace.divisor("loss")], norm)
        return Gradients(
            segments=segments,
            squares=squares,
            scale=tf.where(finite, scale, 0.0),
            tallies=tf.concat([summed.tallies, own_tallies], 0),
            finite=finite,
            replacements=[tf.where(finite, *pair) for pair in zip(summed.replacements, update.replaced, strict=True)],
            writes=summed.writes,
            secs=summed.secs,
        )

    def _commit_writes(self, update: ForwardBackward, gradients: Gradients, finite: Any) -> None:
        """Keeps what the forward pass wrote, averaged over the replicas, if the step is finite; else restores it."""

        def commit(finite: tf.Tensor, writes: dict[str, StateUpdate]) -> None:
            for variable, change in zip(update.variables_of(writes), writes.values(), strict=True):
                variable.assign(tf.where(finite, change.after, change.before))

        self._strategy.run(commit, args=(finite, gradients.writes))

    def _apply(
        self,
        update: ForwardBackward,
        gradients: Gradients,
        is_applied: Any,
        is_over: tf.Tensor | None,
        undo: list[Callable[..., None]],
    ) -> tf.Tensor:
        """Applies an update if the step counts so far, else undoes the earlier ones.

        Args:
            update: the pass.
            gradients: of it.
            is_applied: whether the step is finite so far, on each replica.
            is_over: as for `__call__`.
            undo: what restores the values before each earlier update; gets what restores those before this one.

        Returns:
            Its tallies, `[2 * m]`; zeros if it was not applied.
        """
        tallies = self._first(gradients.tallies)
        apply = functools.partial(
            self.application.apply, update, gradients.segments, gradients.scale, gradients.replacements
        )
        if not self.may_skip:
            if is_over is None:
                apply()
            else:
                with tf.device(HOST):  # which has long known it, as a forward and a backward pass were in between
                    is_over = tf.identity(is_over)
                tf.cond(is_over, lambda: None, apply)
            return tallies
        is_last = update is self.updates[-1]  # a later update may still fail, and take this one with it
        before = None if is_last and not self.runs_ahead else self.application.read(update)
        earlier = undo[::-1]  # the first one's values are the oldest

        def restore(unless: Any = None) -> None:
            self.application.restore(update, before, unless)
            assign = functools.partial(variable_writes.assign, update.variables_of(gradients.writes))
            self._strategy.run(assign, args=([change.before for change in gradients.writes.values()], unless))

        undo.append(restore)
        if self.runs_ahead:
            apply()
            self.application.restore(update, before, unless=is_applied)
            return tf.where(self._first(is_applied), tallies, 0.0)

        def applied() -> tf.Tensor:
            apply()
            return tf.identity(tallies)

        def undone() -> tf.Tensor:
            for restore_earlier in earlier:
                restore_earlier()
            return tf.zeros_like(tallies)

        return tf.cond(self._first(is_applied), applied, undone)

    def _rescale(self, gradients: Sequence[Gradients], applied: tf.Tensor, is_over: tf.Tensor | None) -> tf.Tensor:
        """Adapts the loss scales; returns whether the step is an error. With a loss scale, one overflow is none."""
        failed = tf.constant(False)
        by_scaler: dict[int, tuple[LossScaleOptimizer | None, list[tf.Tensor]]] = {}
        for update, of_update in zip(self.updates, gradients, strict=True):
            scaled = by_scaler.setdefault(id(update.loss_scaler), (update.loss_scaler, []))
            scaled[1].append(self._first(of_update.finite))
        for scaler, are_finite in by_scaler.values():
            is_finite = functools.reduce(tf.logical_and, are_finite)
            if scaler is not None:
                scaler.update_scale(is_finite if is_over is None else is_finite | is_over, applied)
                failed |= tf.convert_to_tensor(scaler.streak) <= -MAX_OVERFLOWS_AT_FLOOR
            elif not self.skip_nonfinite:
                failed |= ~is_finite
        return failed

    def _has_diverged(self, gradients: Sequence[Gradients], jump: float, is_over: tf.Tensor | None) -> tf.Tensor:
        """Returns whether the loss of any update jumped, or is not finite."""
        losses = tf.stack([self._first(of_update.tallies)[:2] for of_update in gradients])  # [U, 2]
        totals, weights = tf.unstack(losses, axis=1)
        means = tf.math.divide_no_nan(totals, weights)
        has_weight = weights > 0 if is_over is None else (weights > 0) & ~is_over
        has_diverged = self.state.loss_watch.check(means, has_weight, jump)
        # A loss scale is not to blame for a loss that is not finite: it is computed before it is scaled.
        return has_diverged if self.skip_nonfinite else has_diverged | ~tf.reduce_all(tf.math.is_finite(means))

    def _diagnosis(self, gradients: Sequence[Gradients]) -> tf.Tensor:
        """Returns tallies and gradients of all updates for `diagnosis.explain`, if the step may be an error."""
        if not self.may_fail:
            return tf.zeros([0])
        pieces = []
        for update, of_update in zip(self.updates, gradients, strict=True):
            segments, squares = tf.nest.map_structure(self._first, (of_update.segments, of_update.squares))
            pieces += [self._first(of_update.tallies), update.packing.diagnosis(segments, squares)]
        return tf.concat(pieces, 0)


def loss_weight(step: TrainStep) -> int | None:
    """Returns the index of the weight of the first update's loss in the tallies; None: it has none."""
    names = list(step.updates[0].trace.names)
    return 2 * names.index("loss") + 1 if "loss" in names else None


def _join_tallies(of_updates: Sequence[tf.Tensor], finite: tf.Tensor, may_skip: bool) -> tf.Tensor:
    """Returns the tallies of all updates in one vector, zeros if the step is skipped."""
    tallies = tf.concat(of_updates, 0)
    if may_skip and len(of_updates) > 1:
        tallies = tf.where(finite, tallies, 0.0)  # the tallies of a good update count only with the others
    return tallies

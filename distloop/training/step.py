"""Owns one step of training. The only module with a tape.

A train step, in the one right order; `forward` and `apply` run on every replica, the branch stands between them, where
TensorFlow can take it (a replica's function may hold no branch around what synchronizes):

    forward:  slice -> loss_fn -> weighted sums -> scale the loss -> gradients by microbatch -> one reduction
    finite?   on the reduced gradients and loss, so that every replica and worker decides alike
    settle:   keep what the forward pass wrote, averaged over the replicas, or put it back
    apply:    divide and unscale -> clip -> gradient_fn -> optimizer -> average
    rescale:  a loss scale falls after an overflow and rises after enough good steps

A branch around `apply` costs 10 to 20 % of a small step, so only a step that may be skipped has one. Where a step that
is not finite is an error, its gradients count as zero, which keeps the weights finite, and the loop ends on it.

It does not know of loops, boundaries or files.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf
from absl import logging

from distloop.actions.histograms import WeightHistograms
from distloop.data import shards
from distloop.data.shards import Batch
from distloop.distributed import gathering, workers
from distloop.distributed.devices import HOST
from distloop.distributed.placement import Placement
from distloop.optimizers import gradients
from distloop.optimizers.loss_scale import MAX_OVERFLOWS_AT_FLOOR
from distloop.training import metrics, nonfinite, variable_writes
from distloop.training.spec import GradientFn, Update
from distloop.training.state import TrainState
from distloop.variables import named_variables, tensorflow_variable

GRADIENT_NORM, CLIPPED_SHARE, REGULARIZATION = "gradient_norm", "clipped_share", "regularization"


class Outcome(NamedTuple):
    """What a train step says of itself: host tensors, alike on every worker."""

    applied: tf.Tensor  # []: whether it changed anything
    failed: tf.Tensor  # []: whether it is an error
    tallies: tf.Tensor  # [2 * M]: total and weight of each of `TrainStep.names`; zeros where the step was skipped
    diagnosis: tf.Tensor  # [D]: for `explain`, of a step that may turn out to be an error
    replica_secs: tf.Tensor | None  # [R]: how long each replica took, forward and backward; None: there is only one


class _Forward(NamedTuple):
    """What a replica knows before it applies an update; all but `before` and `after` is equal on all replicas."""

    segments: list[tf.Tensor]  # summed gradients
    squares: list[tf.Tensor]  # the squared norm of each
    scale: tf.Tensor  # []: what turns them into the update's gradients
    tallies: tf.Tensor  # [2 * m]
    finite: tf.Tensor  # []
    before: list[tf.Tensor]  # what stood where the forward pass wrote
    after: list[tf.Tensor]  # what is to stand there if the step counts
    secs: list[tf.Tensor]  # [R], of forward and backward on each replica; of a single one nothing


class _UpdateTrace:
    """What tracing found out about one update: the names it reports, and the variables its forward pass writes."""

    def __init__(self, state: TrainState, update: Update):
        self.update = update
        self.optimizer = state.plain_optimizers[update.name]
        self.loss_scaler = state.loss_scalers.get(update.name)
        self.variables = list(state.variables_of_update[update.name])
        self.packing = gradients.Packing(self.variables, state.placement.gradient_devices(self.variables))
        self.reached: list[bool] = []  # by variable: whether the loss depends on it
        self.names: list[str] = []  # what the tallies hold, without the update's own name
        self.fed: set[str] = set()  # Keras metrics that its loss_fn returns something for
        self.written: list[Any] = []

    def factor(self, examples: tf.Tensor) -> tf.Tensor | None:
        """Gives what the loss, a sum over examples, is multiplied by before its gradient; None: nothing."""
        if self.loss_scaler is None:
            return None
        # Of the mean, as everywhere else: so no gradient in float16 is larger for a larger batch.
        return self.loss_scaler.scale_loss(1.0) / examples

    def full_name(self, name: str) -> str:
        return f"{self.update.name}/{name}" if self.update.name else name


class TrainStep:
    """One train step over all updates."""

    def __init__(
        self,
        state: TrainState,
        *,
        microbatches: int = 1,
        clip_norm: float = 0.0,
        skip_nonfinite: bool = False,
        jit_compile: bool = False,
        locate_nonfinite: bool = False,
        loss_jump: float | None = None,
        histograms: WeightHistograms | None = None,
    ):
        """Prepares; nothing is traced yet.

        Args:
            state: what is trained.
            microbatches: into how many parts each replica's share is cut.
            clip_norm: the largest global norm of an update's gradients; 0: no clipping.
            skip_nonfinite: whether a step that is not finite is skipped, every bit unchanged; else it is an error.
            jit_compile: whether XLA compiles the forward and backward pass.
            locate_nonfinite: whether a step that is an error leaves every bit unchanged, so that `explain` can look at
                it again.
            loss_jump: by how much a loss must exceed what it usually is for the step to be an error, as for
                `LossWatch.check`; where it is given, so is a loss that is not finite, even if the loss is scaled; None:
                nobody looks.
            histograms: records the gradients of some steps; None: nothing does.
        """
        self._state = state
        self._strategy = state.strategy
        self._microbatches = microbatches
        self._clip_norm = clip_norm
        self._skip_nonfinite = skip_nonfinite
        self._jit_compile = jit_compile
        self._traces = [_UpdateTrace(state, update) for update in state.spec.updates]
        self._own_names = [GRADIENT_NORM, CLIPPED_SHARE] if clip_norm else [GRADIENT_NORM]
        self.locate_nonfinite = locate_nonfinite
        self.may_skip = skip_nonfinite or locate_nonfinite or bool(state.loss_scalers)
        self._loss_jump = loss_jump
        self.histograms = histograms
        if histograms is not None:
            for trace in self._traces:
                histograms.allocate(trace.update.name, trace.packing)
        self.may_fail = not skip_nonfinite or bool(state.loss_scalers) or loss_jump is not None

    @property
    def names(self) -> list[str]:
        """The names of the tallies; known once the step was traced."""
        return [trace.full_name(name) for trace in self._traces for name in (*trace.names, *self._own_names)]

    def __call__(self, batch: Batch, layout: shards.Layout) -> Outcome:
        """Runs one step; in a `tf.function`, outside `strategy.run`."""
        finite = tf.constant(True)
        examples = self._count_examples(batch, layout)
        each_finite: list[tf.Tensor] = []
        all_tallies: list[tf.Tensor] = []
        losses: list[tf.Tensor] = []  # total and weight of each update's
        diagnoses: list[tf.Tensor] = []
        undo: list[tuple[list[Any], Any]] = []  # variables, and per replica what to put back
        secs: list[tf.Tensor] = []
        for trace in self._traces:
            forward = self._strategy.run(self._replica_fn(trace, layout), args=(batch, examples))
            secs += map(self._first, forward.secs)
            tallies = self._first(forward.tallies)
            losses.append(tallies[:2])
            each_finite.append(self._first(forward.finite))
            finite &= each_finite[-1]
            if self.may_fail:
                segments, squares = (tf.nest.map_structure(self._first, part) for part in forward[:2])
                diagnoses += [tallies, trace.packing.diagnosis(segments, squares)]
            self._strategy.run(functools.partial(self._settle, trace), args=(finite, forward.before, forward.after))
            if self.histograms is not None:
                segments = [self._first(segment) for segment in forward.segments]
                self.histograms.record(trace.update.name, segments, self._first(forward.scale))
            apply = functools.partial(self._strategy.run, functools.partial(self._apply, trace))
            if not self.may_skip:
                apply(args=(forward.segments, forward.scale))
            else:
                changed = self._changed_by(trace)
                is_last = trace is self._traces[-1]  # a later update may still fail, and take this one with it
                before = [] if is_last else self._strategy.run(functools.partial(variable_writes.read, changed))
                tallies = self._apply_or_undo(finite, apply, forward, list(undo))
                undo += [(trace.written, forward.before), (changed, before)]
            all_tallies.append(tallies)
        metrics.check_fed(self._state.train_metrics, (name for trace in self._traces for name in trace.fed))
        tallies = tf.concat(all_tallies, 0)
        if self.may_skip and len(self._traces) > 1:
            tallies = tf.where(finite, tallies, 0.0)  # those of an update that went well count only with the others
        failed = self._rescale(each_finite, finite)
        if self._loss_jump is not None:
            failed |= self._has_diverged(tf.stack(losses), self._loss_jump)
        diagnosis = tf.concat(diagnoses or [tf.zeros([0])], 0)
        return Outcome(finite, failed, tallies, diagnosis, tf.add_n(secs) if secs else None)

    def _replica_fn(self, trace: _UpdateTrace, layout: shards.Layout) -> Callable[[Batch, tf.Tensor], _Forward]:
        return gathering.with_max_rows(functools.partial(self._forward, trace, layout), layout.max_replica_rows)

    def _count_examples(self, batch: Batch, layout: shards.Layout) -> tf.Tensor:
        """Counts the rows of a step; those of this worker alone where it has rows of its own and nobody asks."""
        examples = tf.cast(shards.count_examples(batch, self._strategy), tf.float32)
        is_local = (layout.is_sharded or layout.is_split) and workers.num_workers(self._strategy) > 1
        if is_local and self._state.loss_scalers:  # a loss is scaled alike on all workers
            return workers.sum_over_workers(self._strategy, examples)
        return examples

    def _has_diverged(self, losses: tf.Tensor, jump: float) -> tf.Tensor:
        """Judges the losses of a step: totals and weights, `[U, 2]`."""
        totals, weights = tf.unstack(losses, axis=1)
        means = tf.math.divide_no_nan(totals, weights)
        with tf.device(HOST):
            has_diverged = self._state.loss_watch.check(means, weights > 0, jump)
        # A loss scale is not to blame for a loss that is not finite: it is computed before it is scaled.
        return has_diverged if self._skip_nonfinite else has_diverged | ~tf.reduce_all(tf.math.is_finite(means))

    def _rescale(self, each_finite: Sequence[tf.Tensor], finite: tf.Tensor) -> tf.Tensor:
        """Adapts the loss scales; says whether the step is an error. With a loss scale, one overflow is none."""
        failed = tf.constant(False)
        for trace, is_finite in zip(self._traces, each_finite, strict=True):
            if trace.loss_scaler is not None:
                trace.loss_scaler.update_scale(is_finite, finite)
                failed |= tf.convert_to_tensor(trace.loss_scaler.streak) <= -MAX_OVERFLOWS_AT_FLOOR
            elif not self._skip_nonfinite:
                failed |= ~is_finite
        return failed

    def _apply_or_undo(
        self, finite: tf.Tensor, apply: Callable[..., Any], forward: Any, undo: list[tuple[list[Any], Any]]
    ) -> tf.Tensor:
        """Applies an update, or undoes the ones before it; gives the tallies that count."""
        tallies = self._first(forward.tallies)

        def applied() -> tf.Tensor:
            apply(args=(forward.segments, forward.scale))
            return tf.identity(tallies)

        def undone() -> tf.Tensor:
            for variables, values in undo:
                self._strategy.run(functools.partial(variable_writes.assign, variables), args=(values,))
            return tf.zeros_like(tallies)

        return tf.cond(finite, applied, undone)

    def explain_error(self, error: tf.errors.OpError) -> ValueError | None:
        """Says in one sentence that XLA cannot compile a model, where an error of TensorFlow's is about that."""
        message = error.message or ""
        if not self._jit_compile or not ("tf2xla" in message or "XLA" in message):
            return None
        what = next((line for line in message.splitlines() if "INVALID_ARGUMENT:" in line), message.partition("\n")[0])
        what = what.rpartition("}}")[2].rpartition("INVALID_ARGUMENT:")[2].strip(" .:")
        return ValueError(
            f"jit_compile=True was given, but XLA cannot compile the forward and backward pass ({what[:200]}): leave "
            "out what XLA does not know, often an operation whose result has a size that depends on its values, or use "
            "jit_compile=False."
        )

    def explain(self, step: int, diagnosis: np.ndarray, last: tuple[Batch, shards.Layout] | None = None) -> str:
        """Says what was not finite in a step that is an error, the likely cause, and what to do.

        Args:
            step: its number.
            diagnosis: its `Outcome.diagnosis`.
            last: its batch, to look at again with `locate_nonfinite`.
        """
        losses: list[tuple[str, float]] = []
        for trace in self._traces:
            names = [*trace.names, *self._own_names]
            sizes = np.cumsum([2 * len(names), trace.packing.diagnosis_size])
            sums, of_gradients, diagnosis = np.split(diagnosis, sizes)
            values = metrics.means(names, sums)
            losses.append((trace.full_name("loss"), values["loss"]))
            paths = [self._state.paths[id(trace.variables[i])] for i in trace.packing.find_nonfinite(of_gradients)]
            is_at_floor = trace.loss_scaler is not None and trace.loss_scaler.streak.numpy() <= -MAX_OVERFLOWS_AT_FLOOR
            is_loss_bad = self._loss_jump is not None and not np.isfinite(values["loss"])
            is_to_blame = is_at_floor or (not self._skip_nonfinite and (is_loss_bad or trace.loss_scaler is None))
            if is_to_blame and not np.isfinite(values["loss"] + values[GRADIENT_NORM]):
                break
        else:
            return self._explain_jump(step, losses)
        if paths:
            del values[GRADIENT_NORM]  # what follows says it better
        found = [f"{trace.full_name(name)} is {value}" for name, value in values.items() if not np.isfinite(value)]
        if paths:
            more = f" and {len(paths) - 3} more" if len(paths) > 3 else ""
            of_update = f" of update {trace.update.name!r}" if trace.update.name else ""
            found.append(f"the gradient{of_update} of {', '.join(paths[:3])}{more} is not finite")
        if last is None:
            cause = _likely_cause(step, is_loss_finite=bool(np.isfinite(values["loss"])), has_paths=bool(paths))
        else:
            cause = self._locate(*last)
        if not is_at_floor:
            since = f"Step {step} is the first that was not finite"
            advice = "lower the learning rate, set clip_norm, or skip such steps with on_nonfinite=skip"
        else:
            assert trace.loss_scaler is not None
            scale, count = trace.loss_scaler.loss_scale.numpy(), -trace.loss_scaler.streak.numpy()
            since = f"Step {step} is number {count} in a row that was not finite at the smallest loss scale, {scale:g}"
            advice = "keep large numbers in float32 layers, lower the learning rate, or use precision=mixed_bfloat16"
        return f"{since}: {', '.join(found)}; {cause}: {advice}."

    def _explain_jump(self, step: int, losses: Sequence[tuple[str, float]]) -> str:
        """Says which loss jumped, and from where."""
        statistics = self._state.loss_watch.statistics.numpy()
        found = [
            f"{name} jumped to {loss:.6g} from {mean:.6g} (mean of the steps before; deviation {variance**0.5:.3g})"
            for (name, loss), (_, mean, variance) in zip(losses, statistics, strict=True)
            if loss - mean > (self._loss_jump or 0.0) * (variance**0.5 + abs(mean))
        ]
        return (
            f"At step {step} {', '.join(found)}; the batch is of another kind, or the learning rate too high for this "
            "part of the way: look at the batch, lower the learning rate, set clip_norm, or raise loss_jump."
        )

    def _locate(self, batch: Batch, layout: shards.Layout) -> str:
        """Takes a step that failed again, update by update, and says where the first bad number came from."""
        variables = [*self._state.untrained_variables, *(v for trace in self._traces for v in self._changed_by(trace))]
        changed = list({id(v): v for v in variables}.values())

        def read() -> Any:
            return self._strategy.run(functools.partial(variable_writes.read, changed))

        def write(values: Any) -> None:
            self._strategy.run(functools.partial(variable_writes.assign, changed), args=(values,))

        def advance(trace: _UpdateTrace) -> None:
            examples = self._count_examples(batch, layout)
            forward = self._strategy.run(self._replica_fn(trace, layout), args=(batch, examples))
            self._strategy.run(functools.partial(self._settle, trace), args=(True, forward.before, forward.after))
            self._strategy.run(functools.partial(self._apply, trace), args=(forward.segments, forward.scale))

        read, write = (tf.function(fn, autograph=False) for fn in (read, write))
        first = read()
        try:
            for trace in self._traces:
                before = read()
                for microbatch in range(self._microbatches):
                    where = self._look(trace, batch, layout, microbatch)
                    seen_by = np.flatnonzero(workers.gather(self._strategy, where is not None))
                    if len(seen_by):
                        return where or f"worker {seen_by[0]} tells where they came from"
                write(before)
                tf.function(functools.partial(advance, trace), autograph=False)()
        finally:
            write(first)
        return (
            "a second look at its batch found every number finite, so a sum over replicas or microbatches is too "
            "large, or an operation is not deterministic"
        )

    def _look(self, trace: _UpdateTrace, batch: Batch, layout: shards.Layout, microbatch: int) -> str | None:
        """Runs forward and backward of an update with a verdict on every tensor; says which was bad first, if any."""
        looked_at: list[tf.Tensor] = []
        results: list[tf.Tensor] = []

        def replica(batch: Batch, examples: tf.Tensor) -> Any:
            rows, row_weights = shards.take_shard(batch, layout, self._microbatches, microbatch)
            return self._gradients(trace, rows, row_weights, trace.factor(examples))

        @tf.function(autograph=False)
        def look(batch: Batch) -> tf.Tensor:
            examples = self._count_examples(batch, layout)
            found = self._strategy.run(replica, args=(batch, examples))
            results[:] = [t for part in tf.nest.flatten(found) for t in self._strategy.experimental_local_results(part)]
            looked_at[:] = nonfinite.tensors(tf.compat.v1.get_default_graph())
            return nonfinite.verdicts(looked_at)

        are_finite = look(batch).numpy()
        op = nonfinite.find_origin(results, looked_at, are_finite)
        if op is None:
            return None
        if op.type == "Placeholder":
            return f"the batch itself holds such numbers, {_find_entry(batch.rows)}"
        if op.type == "ReadVariableOp":
            return f"the variable {self._path_of(op.inputs[0])} holds such numbers"
        return f"they came from {nonfinite.describe(op, self._parts(trace))}"

    def _parts(self, trace: _UpdateTrace) -> list[Any]:
        """Lists the layers that an update trains, and those in them."""
        layers = self._state.layers_of_update[trace.update.name]
        return [part for layer in layers for part in layer._flatten_layers()]

    def _path_of(self, resource: tf.Tensor) -> str:
        handle = variable_writes.outermost(resource)
        for path, variable in named_variables(self._state.model).items():
            for local in self._strategy.experimental_local_results(tensorflow_variable(variable)):
                if local.handle is handle:
                    return path
        return "that loss_fn reads"

    def _forward(self, trace: _UpdateTrace, layout: shards.Layout, batch: Batch, examples: tf.Tensor) -> _Forward:
        """Computes an update's gradients and sums, and reduces them; in a replica's context."""
        replicas = self._strategy.num_replicas_in_sync
        begun = _now(tf.nest.flatten(batch.rows, expand_composites=True)[:1]) if replicas > 1 else None
        factor = trace.factor(examples)
        candidates = self._state.untrained_variables + [
            variable for metric in self._state.train_metrics.values() for variable in metric.variables
        ]
        before = {id(v): tf.identity(v) for v in candidates}  # those that are not needed leave the graph again
        written: dict[int, Any] = {}

        def compute(rows: Any, row_weights: tf.Tensor | None, factor: tf.Tensor | None) -> Any:
            with variable_writes.recorded_writes(candidates) as writes:
                result = self._gradients(trace, rows, row_weights, factor)
            written.update((id(v), v) for v in writes)
            return result

        if self._jit_compile:
            # No more than this: XLA cannot follow variables to another device, or a reduction. A function of its own
            # for each replica, which reads that replica's variables.
            compute = tf.function(compute, autograph=False, jit_compile=True)

        def microbatch(index: tf.Tensor | int) -> tuple[list[tf.Tensor], tf.Tensor]:
            return compute(*shards.take_shard(batch, layout, self._microbatches, index), factor)

        with _without_meeting(self._microbatches, self._jit_compile):
            segments, tallies = self._state.placement.sum_microbatches(trace.packing, self._microbatches, microbatch)
        trace.written = [v for v in candidates if id(v) in written]
        after = {id(v): tf.identity(v) for v in trace.written}
        drifting = self._drifting(trace.written) if replicas > 1 else []
        extras = tallies
        if drifting:
            # A statistic's mean over the replicas is weighted with their rows, and divided once, as every other value.
            share = tf.cast(shards.shard_size(batch, layout), tf.float32)
            statistics = [tf.reshape(tf.cast(after[id(v)], tf.float32) * share, [-1]) for v in drifting]
            extras = tf.concat([tallies, [share], *statistics], 0)
        secs = []
        if begun is not None:
            with tf.device(HOST):  # a copy: what merely depends on a GPU's tensor starts before that is computed
                last = tf.identity(segments[-1][:1])
            took = tf.cast(_now([*segments, last]) - begun, tf.float32)
            replica = tf.distribute.get_replica_context().replica_id_in_sync_group
            extras = tf.concat([extras, tf.one_hot(replica, replicas) * took], 0)
        segments, extras = trace.packing.all_reduce(segments, extras)
        if begun is not None:
            extras, *secs = tf.split(extras, [-1, replicas])
        tallies = extras[: 2 * len(trace.names)]
        if drifting:
            share, *sums = tf.split(extras[2 * len(trace.names) :], [1, *(s.shape[0] for s in statistics)])
            for v, total in zip(drifting, sums, strict=True):
                after[id(v)] = tf.cast(tf.reshape(tf.math.divide_no_nan(total, share), v.shape), v.dtype)
        weight = tallies[1] if factor is None else tallies[1] * factor
        squares, norm, scale = gradients.norm_and_scale(segments, weight, self._clip_norm)
        finite = tf.math.is_finite(norm + tallies[0])
        own = [norm, 1.0]
        if self._clip_norm:
            own += [tf.cast(norm > self._clip_norm, tf.float32), 1.0]
        return _Forward(
            segments,
            squares,
            tf.where(finite, scale, 0.0),
            tf.concat([tallies, own], 0),
            finite,
            [before[id(v)] for v in trace.written],
            [after[id(v)] for v in trace.written],
            secs,
        )

    def _gradients(
        self, trace: _UpdateTrace, rows: Any, row_weights: tf.Tensor | None, factor: tf.Tensor | None
    ) -> tuple[list[tf.Tensor], tf.Tensor]:
        """Runs forward and backward over some rows of one replica.

        Returns:
            Packed gradients of `factor * sum(w * loss)`, and a total and a weight of each value that `loss_fn`
            returned, "loss" first: `[2 * m]`.
        """
        trace.fed, found, tallies = self._differentiate(trace, rows, row_weights, factor)
        trace.reached = [gradient is not None for gradient in found]
        if not any(trace.reached):
            raise ValueError(
                f"The loss{' of update ' + repr(trace.update.name) if trace.update.name else ''} does not depend on "
                "any variable that is to be trained: compute it from the model's outputs inside loss_fn."
            )
        filled = [tf.zeros(v.shape, v.dtype) if g is None else g for g, v in zip(found, trace.variables, strict=True)]
        names = ["loss", *(name for name in tallies if name != "loss")]
        if trace.names and names != trace.names:
            raise ValueError(
                f"loss_fn returned {names}, and {trace.names} before; it returns the same names for all data."
            )
        trace.names = names
        return trace.packing.pack(filled), metrics.flatten([tallies[name] for name in names])

    def gradients_of(
        self, name: str, rows: Any, examples: tf.Tensor, *, training: bool
    ) -> tuple[dict[str, tf.Tensor | None], dict[str, metrics.Tally]]:
        """Computes an update's gradients over some rows, for a look at the user's code; reduces and applies nothing.

        Args:
            name: of the update.
            rows: `[b, ...]`.
            examples: rows of the global batch that they belong to, a scalar.
            training: what `loss_fn` gets.

        Returns:
            By path the gradient of `sum(w * loss)`, None where the loss does not depend on the variable; and the tally
            of each value, but of what Keras metrics take.
        """
        trace = next(trace for trace in self._traces if trace.update.name == name)
        factor = trace.factor(tf.cast(examples, tf.float32))
        _, found, tallies = self._differentiate(trace, rows, None, factor, training=training, has_metrics=False)
        gradients_by_path = {
            self._state.paths[id(v)]: None
            if g is None
            else tf.convert_to_tensor(g) / (1.0 if factor is None else factor)
            for v, g in zip(trace.variables, found, strict=True)
        }
        return gradients_by_path, tallies

    def _differentiate(
        self,
        trace: _UpdateTrace,
        rows: Any,
        row_weights: tf.Tensor | None,
        factor: tf.Tensor | None,
        *,
        training: bool = True,
        has_metrics: bool = True,
    ) -> tuple[set[str], list[tf.Tensor | None], dict[str, metrics.Tally]]:
        """Gives the names that `loss_fn` returned, the gradients, and the tallies; with Keras metrics, feeds them."""
        state = self._state
        tensors = [tensorflow_variable(v) for v in trace.variables]
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            for tensor in tensors:
                tape.watch(tensor)
            with gathering.shard(row_weights, self._microbatches):
                outputs = trace.update.loss_fn(rows, training)
            if not has_metrics and isinstance(outputs, Mapping):
                outputs = {name: value for name, value in outputs.items() if name not in state.train_metrics}
            tallies = tally_outputs(outputs, rows, row_weights, state.train_metrics)
            loss = tallies["loss"]
            objective = loss.total
            regularization = _regularization(state.layers_of_update[trace.update.name], state.placement)
            if regularization is not None:
                # Weighted like a value of every example, so that the one division makes it count once.
                tallies[REGULARIZATION] = metrics.Tally(regularization * loss.weight, loss.weight)
                objective += tallies[REGULARIZATION].total
            if factor is not None:
                objective *= factor
        return set(outputs), state.placement.differentiate(tape, objective, tensors), tallies

    def _settle(self, trace: _UpdateTrace, finite: tf.Tensor, before: list[Any], after: list[Any]) -> None:
        """Keeps what the forward pass wrote, equal on all replicas, or puts back what stood there."""
        for variable, old, new in zip(trace.written, before, after, strict=True):
            variable.assign(tf.where(finite, new, old))

    def _apply(self, trace: _UpdateTrace, segments: list[tf.Tensor], scale: tf.Tensor) -> None:
        """Changes weights, slots and averages; in a replica's context, where all is equal on all."""
        found = zip(trace.packing.unpack(segments, scale), trace.variables, trace.reached, strict=True)
        updated = [(gradient, variable) for gradient, variable, reached in found if reached]
        if trace.update.gradient_fn is not None:
            updated = self._transformed(trace.update.gradient_fn, updated)
        gradients.apply(trace.optimizer, [g for g, _ in updated], [v for _, v in updated])
        if self._state.average is not None:
            applied_steps = tf.convert_to_tensor(trace.optimizer.iterations)
            self._state.average.update(trace.variables, applied_steps)

    def _transformed(self, gradient_fn: GradientFn, updated: Sequence[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
        """Lets the user's function change the gradients.

        Raises:
            ValueError: if it returned something else than as many gradients of the same shapes.
        """
        paths = [self._state.paths[id(variable)] for _, variable in updated]
        given = {path: gradient for path, (gradient, _) in zip(paths, updated, strict=True)}
        found = gradient_fn(dict(given))
        names = sorted(map(str, found)) if isinstance(found, Mapping) else type(found).__name__
        if names != sorted(given):
            raise ValueError(
                f"gradient_fn returned {names}; it was given the gradients of {sorted(given)}, by path: return a dict "
                "with one of the same shape for each."
            )
        changed = []
        for path, (gradient, variable) in zip(paths, updated, strict=True):
            new = tf.cast(tf.convert_to_tensor(found[path]), gradient.dtype)
            if not new.shape.is_compatible_with(gradient.shape):
                raise ValueError(
                    f"gradient_fn returned a gradient of shape {list(new.shape)} for {path}, whose shape is "
                    f"{list(gradient.shape)}: keep the shapes."
                )
            changed.append((new, variable))
        return changed

    def _drifting(self, written: Sequence[Any]) -> list[Any]:
        """Picks what must be averaged over the replicas: all that the forward pass writes, but random streams."""
        apart = {id(v) for v in self._state.seeds}
        apart |= {id(v) for metric in self._state.train_metrics.values() for v in metric.variables}
        return [v for v in written if id(v) not in apart and tf.as_dtype(v.dtype).is_floating]

    def warn(self) -> None:
        """Names, once the step was traced, what the user may not expect."""
        for trace in self._traces:
            unreached = [v for v, reached in zip(trace.variables, trace.reached, strict=True) if not reached]
            if unreached:
                logging.warning(
                    "The loss does not depend on %s, which stays as it is: leave it out with ModelSpec(trainable=...).",
                    ", ".join(self._state.paths[id(v)] for v in unreached),
                )
            layers = self._parts(trace)
            if trace.loss_scaler is None and any(layer.compute_dtype == "float16" for layer in layers):
                logging.warning(
                    "Layers such as %s compute in float16 and the loss is not scaled, so small gradients become 0: set "
                    "precision=mixed_float16, or give distloop.LossScaleOptimizer.",
                    next(layer.name for layer in layers if layer.compute_dtype == "float16"),
                )
            if self._strategy.num_replicas_in_sync > 1:
                metric_ids = {id(v) for metric in self._state.train_metrics.values() for v in metric.variables}
                averaged = {id(v) for v in [*self._drifting(trace.written), *self._state.seeds]} | metric_ids
                for variable in trace.written:
                    if id(variable) not in averaged and not _is_aggregated(variable):
                        logging.warning(
                            "The forward pass writes %s, of dtype %s, which has no mean: each replica keeps its own, "
                            "and a checkpoint the first's. Make it a float, or add_weight(..., aggregation='mean').",
                            self._state.paths[id(variable)],
                            tf.as_dtype(variable.dtype).name,
                        )

    def _changed_by(self, trace: _UpdateTrace) -> list[Any]:
        """Lists what applying an update changes, beside what the forward pass wrote."""
        average = self._state.average
        variables = [*trace.variables, *trace.optimizer.variables]
        return variables + (list(average.variables) if average is not None else [])

    def _first(self, value: Any) -> tf.Tensor:
        return self._strategy.experimental_local_results(value)[0]


def tally_outputs(
    outputs: Any, rows: Any, row_weights: tf.Tensor | None, keras_metrics: Any
) -> dict[str, metrics.Tally]:
    """Sums what `loss_fn` returned, and feeds Keras metrics theirs.

    Raises:
        ValueError: if `loss_fn` returned something that is not per example, or fed no metric that was declared.
    """
    metrics.check_names(outputs, keras_metrics)
    size = shards.batch_size(rows)
    tallies = {}
    for name, value in outputs.items():
        if name in keras_metrics:
            metrics.update_keras_metric(name, keras_metrics[name], value, row_weights)
        else:
            tallies[name] = metrics.weigh(name, value, size, row_weights)
    if checks := [check for tally in tallies.values() for check in tally.checks]:
        # The step fails anyway; a loss that is not finite keeps it from applying anything before it does.
        failed = tf.where(tf.reduce_all(tf.stack(checks)), 0.0, np.nan)
        tallies["loss"] = tallies["loss"]._replace(total=tallies["loss"].total + failed)
    return tallies


@contextlib.contextmanager
def _without_meeting(microbatches: int, jit_compile: bool) -> Iterator[None]:
    """Says what to do where a model's forward pass talks to other replicas, and TensorFlow cannot do that here."""
    try:
        yield
    except RuntimeError as error:
        if "merge_call" not in str(error):
            raise
        given, use = (
            ("jit_compile=True", "jit_compile=False") if jit_compile else (f"{microbatches=}", "microbatches=1")
        )
        raise ValueError(
            f"{given} was given with a model that talks to other replicas in its forward pass, such as "
            "BatchNormalization(synchronized=True), which TensorFlow cannot do inside a loop or what XLA compiles: use "
            f"{use}."
        ) from error


def _likely_cause(step: int, *, is_loss_finite: bool, has_paths: bool) -> str:
    """Guesses why, from what is known without a second look at the batch."""
    if is_loss_finite and has_paths:
        return "the loss is finite, so a derivative is not, often of a square root, a norm, a power or a division at 0"
    if is_loss_finite:
        return "every gradient is finite, but not the norm of all, so the loss or its weights are huge"
    if step == 1:
        return "in a first step often the data holds such numbers or is not scaled, or loss_fn divides by 0"
    return "often the weights grew too large, or this batch holds such numbers, or loss_fn takes a log of 0"


def _regularization(layers: Sequence[Any], placement: Placement) -> tf.Tensor | None:
    """Returns the sum of the losses that Keras layers carry, such as L2 terms; None if there are none."""
    losses = []
    for layer in layers:
        with placement.layer_scope(layer):
            losses += layer.losses
    return tf.add_n([tf.cast(loss, tf.float32) for loss in losses]) if losses else None


def _find_entry(rows: Any) -> str:
    """Says in which entry of a batch, and in which row of it, there is a number that is not finite."""
    for path, value in keras.tree.flatten_with_path(rows):
        if isinstance(value, tf.Tensor) and value.dtype.is_floating:
            bad = np.argwhere(~np.isfinite(tf.cast(value, tf.float32).numpy()))
            if len(bad):
                return f"in {'/'.join(map(str, path)) or 'its only entry'}, first in row {bad[0][0]}"
    return "in one of its entries"


def _now(after: Sequence[tf.Tensor]) -> tf.Tensor:
    """Tells the time at which some tensors are there."""
    with tf.control_dependencies(after):
        return tf.timestamp()


def _is_aggregated(variable: Any) -> bool:
    return tensorflow_variable(variable).aggregation != tf.VariableAggregation.NONE

"""Diagnosis: explains why a step failed, and warns of surprises in a traced step; on the host.

    outcome = train_step(batch, layout)                                   # in the compiled loop
    explain(train_step, 17, outcome.diagnosis.numpy())                    # "Step 17 is the first that ...: lower ..."

It changes no variable: if it runs the step again, it restores everything.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from distloop.data import shards
from distloop.data.shards import Batch, BatchLayout
from distloop.distributed import workers
from distloop.graph_functions import graph_function, outermost, with_called
from distloop.log import log
from distloop.model import metrics
from distloop.model.user_functions import SEED_ADVICE
from distloop.optimizers.loss_scale import MAX_OVERFLOWS_AT_FLOOR
from distloop.settings.precision import BFLOAT16, FLOAT16
from distloop.training import step_operations
from distloop.training.forward_backward import ForwardBackward
from distloop.training.step import GRADIENT_NORM, TrainStep
from distloop.variables import named_variables, tensorflow_variable

_NOISE_LAYERS = (
    keras.layers.Dropout,
    keras.layers.AlphaDropout,
    keras.layers.GaussianDropout,
    keras.layers.GaussianNoise,
)
_DRAWS_BY_SEED = re.compile("Stateless(?!.*Get).*(Random|Normal|Multinomial)")  # types of operations


@dataclass
class UpdateReport:
    """What the host knows of one update in a step that failed.

    Attributes:
        name: of the update; "" if there is only one.
        values: the means of its values, by name, "loss" and "gradient_norm" among them.
        nonfinite_paths: the variables whose gradients are not finite.
        loss_scale: None if the loss is not scaled.
        overflows: the steps in a row that overflowed at the smallest loss scale.
    """

    name: str
    values: dict[str, float]
    nonfinite_paths: list[str]
    loss_scale: float | None = None
    overflows: int = 0

    @property
    def is_at_floor(self) -> bool:
        """Whether so many steps overflowed at the smallest loss scale that the scale is not to blame."""
        return self.overflows >= MAX_OVERFLOWS_AT_FLOOR

    def full_name(self, name: str) -> str:
        """Returns the reported name of a value: `discriminator/loss`."""
        return f"{self.name}/{name}" if self.name else name

    def is_to_blame(self, *, skip_nonfinite: bool, is_loss_watched: bool) -> bool:
        """Returns whether numbers of this update that are not finite made the step an error."""
        loss, norm = self.values["loss"], self.values[GRADIENT_NORM]
        is_unscaled = self.loss_scale is None or (is_loss_watched and not np.isfinite(loss))
        return (self.is_at_floor or (not skip_nonfinite and is_unscaled)) and not np.isfinite(loss + norm)


class Cause(NamedTuple):
    """Where numbers came from that are not finite, and what to do about it; no advice: the usual one."""

    words: str
    advice: str = ""


def explain(
    train_step: TrainStep, step: int, diagnosis: np.ndarray, last: tuple[Batch, BatchLayout] | None = None
) -> str:
    """Returns one sentence: what in a step was not finite or jumped, the likely cause, and what to do.

    `diagnosis` is that of the step's `Outcome`. Given its batch, the step runs again, else the cause is guessed.
    """
    reports = _read(train_step, _of_all_workers(train_step, diagnosis))
    is_watched = train_step.loss_jump is not None
    for report in reports:
        if report.is_to_blame(skip_nonfinite=train_step.skip_nonfinite, is_loss_watched=is_watched):
            cause = guess_cause(step, report) if last is None else _locate(train_step, *last)
            return explain_nonfinite(step, report, cause)
    statistics = train_step.state.loss_watch.statistics.numpy()
    return explain_jump(step, reports, statistics, train_step.loss_jump or 0.0)


def _of_all_workers(train_step: TrainStep, diagnosis: np.ndarray) -> np.ndarray:
    """Returns an `Outcome.diagnosis` with NaN where that of another worker is not finite; all workers call it."""
    if all(train_step.application.sum_over_owners(update) is None for update in train_step.updates):
        return diagnosis  # each worker has all gradients
    is_finite = np.isfinite(workers.gather(train_step.state.strategy, diagnosis.tolist())).all(0)
    return np.where(~is_finite & np.isfinite(diagnosis), np.nan, diagnosis)


def _read(train_step: TrainStep, diagnosis: np.ndarray) -> list[UpdateReport]:
    """Returns the reports in an `Outcome.diagnosis`."""
    reports = []
    for update in train_step.updates:
        names = [*update.trace.names, *train_step.own_names]
        tallies, gradients, diagnosis = np.split(diagnosis, np.cumsum([2 * len(names), update.packing.diagnosis_size]))
        nonfinite_paths = [
            train_step.state.paths[id(update.variables[i])] for i in update.packing.find_nonfinite(gradients)
        ]
        report = UpdateReport(update.name, metrics.means(names, tallies), nonfinite_paths)
        if (scaler := update.loss_scaler) is not None:
            report.loss_scale = float(scaler.loss_scale.numpy())
            report.overflows = max(0, -int(scaler.streak.numpy()))
        reports.append(report)
    return reports


def explain_nonfinite(step: int, report: UpdateReport, cause: Cause) -> str:
    """Returns one sentence about an update whose loss or gradients are not finite."""
    paths = report.nonfinite_paths
    problems = [
        f"{report.full_name(name)} is {value}"
        for name, value in report.values.items()
        if not np.isfinite(value) and not (paths and name == GRADIENT_NORM)  # the paths say more than the norm
    ]
    if paths:
        more = f" and {len(paths) - 3} more" if len(paths) > 3 else ""
        of_update = f" of update {report.name!r}" if report.name else ""
        problems.append(f"the gradient{of_update} of {', '.join(paths[:3])}{more} is not finite")
    if report.is_at_floor:
        subject = (
            f"Step {step} is number {report.overflows} in a row that was not finite at the smallest loss scale, "
            f"{report.loss_scale:g}"
        )
        advice = f"keep large numbers in float32 layers, lower the learning rate, or use precision={BFLOAT16.name}"
    else:
        subject = f"Step {step} is the first that was not finite"
        advice = "lower the learning rate, set clip_norm, or skip such steps with on_nonfinite=skip"
    return f"{subject}: {', '.join(problems)}; {cause.words}: {cause.advice or advice}."


def explain_jump(step: int, reports: Sequence[UpdateReport], statistics: np.ndarray, jump: float) -> str:
    """Returns one sentence about losses that jumped; `statistics` and `jump` are those of `LossWatch`."""
    jumps = []
    for report, (_, mean, variance) in zip(reports, statistics, strict=True):
        loss = report.values["loss"]
        if loss - mean > jump * (variance**0.5 + abs(mean)):
            usual = f"{mean:.6g} (mean of the steps before; deviation {variance**0.5:.3g})"
            jumps.append(f"{report.full_name('loss')} jumped to {loss:.6g} from {usual}")
    return (
        f"At step {step} {', '.join(jumps)}; the batch is of another kind, or the learning rate too high for this "
        "part of the way: look at the batch, lower the learning rate, set clip_norm, or raise loss_jump."
    )


def guess_cause(step: int, report: UpdateReport) -> Cause:
    """Returns the likely cause of numbers that are not finite, without a second look at the batch."""
    is_loss_finite = np.isfinite(report.values["loss"])
    if is_loss_finite and report.nonfinite_paths:
        return Cause(
            "the loss is finite, so a derivative is not, often of a square root, a norm, a power or a division at 0, "
            "or the data holds an infinite number",
            "keep what they get away from 0, as in sqrt(x + 1e-7), take infinite numbers out of the data, or skip such "
            "steps with on_nonfinite=skip",
        )
    if is_loss_finite:
        return Cause("every gradient is finite, but not the norm of all, so the loss or its weights are huge")
    if step == 1:  # no learning rate has had a part in it
        return Cause(
            "in a first step often the data holds such numbers or is not scaled, the loss divides by 0, or, on a GPU, "
            "a label is no number of a class",
            "look at the batch and at the loss; locate_nonfinite=True names the entry or the operation",
        )
    return Cause("often the weights grew too large, or this batch holds such numbers, or the loss takes a log of 0")


def explain_compile_error(train_step: TrainStep, error: tf.errors.OpError) -> ValueError | None:
    """Returns one sentence saying that XLA cannot compile the model; None: the error is about something else."""
    message = error.message or ""
    if not train_step.jit_compile or ("tf2xla" not in message and "XLA" not in message):
        return None
    line = next((line for line in message.splitlines() if "INVALID_ARGUMENT:" in line), message.partition("\n")[0])
    reason = line.rpartition("}}")[2].rpartition("INVALID_ARGUMENT:")[2].strip(" .:")
    return ValueError(
        f"jit_compile=True was given, but XLA cannot compile the forward and backward pass ({reason[:200]}): leave "
        "out what XLA does not know, often an operation whose result has a size that depends on its values, or use "
        "jit_compile=False."
    )


def _locate(train_step: TrainStep, batch: Batch, layout: BatchLayout) -> Cause:
    """Runs a failed step again, update by update, and returns where the first number came from that is not finite."""
    state = train_step.state
    variables = [*state.untrained_variables, *(v for u in train_step.updates for v in state.changed_by(u.update))]
    changed = list({id(v): v for v in variables}.values())

    read = graph_function(lambda: train_step.application.read_all(changed))
    write = graph_function(lambda values: train_step.application.assign_all(changed, values))
    first = read()
    try:
        for update in train_step.updates:
            before = read()
            for microbatch in range(layout.turns * train_step.microbatches):
                origin = _find_origin(train_step, update, batch, layout, microbatch)
                seen_by = np.flatnonzero(workers.gather(state.strategy, origin is not None))
                if len(seen_by):
                    return origin or Cause(f"worker {seen_by[0]} tells where they came from", "do what it advises")
            write(before)
            graph_function(lambda rows, update=update: train_step.advance(update, rows, layout))(batch)
    finally:
        write(first)
    looks = ", a step_fn made them" if any(update.update.step_fn for update in train_step.updates) else ""
    return Cause(
        "a second look at its batch found every number finite, so a sum over replicas or microbatches is too "
        f"large{looks}, or an operation is not deterministic"
    )


def _find_origin(
    train_step: TrainStep, update: ForwardBackward, batch: Batch, layout: BatchLayout, microbatch: int
) -> Cause | None:
    """Runs an update forward and backward with a verdict on every tensor; returns where the first bad one came from."""
    strategy = train_step.state.strategy
    checked: list[tf.Tensor] = []
    results: list[tf.Tensor] = []

    def compute(batch: Batch, examples: tf.Tensor) -> Any:
        rows, row_weights = shards.take_shard(batch, layout, train_step.microbatches, microbatch)
        segments, tallies, *_ = update.compute(rows, row_weights, update.loss_factor(examples))
        return segments, tallies

    @graph_function
    def check(batch: Batch) -> tf.Tensor:
        per_replica = strategy.run(compute, args=(batch, train_step.count_examples(batch, layout)))
        results[:] = [t for part in tf.nest.flatten(per_replica) for t in strategy.experimental_local_results(part)]
        checked[:] = step_operations.floating_tensors(tf.compat.v1.get_default_graph())
        return step_operations.are_finite(checked)

    op = step_operations.find_origin(results, checked, check(batch).numpy())
    if op is None:
        return None
    if op.type == "Placeholder":
        return Cause(
            f"the batch itself holds such numbers, {_describe_entry(batch.rows)}",
            "correct the data or leave such rows out, as no setting of the training helps, or skip such steps with "
            "on_nonfinite=skip",
        )
    if op.type == "ReadVariableOp":
        return Cause(
            f"the variable {_path_of(train_step, op.inputs[0])} holds such numbers",
            "correct what made them, its initializer or the weights that were read, or go back to a checkpoint before",
        )
    return Cause(f"they came from {step_operations.describe(op, _layers(train_step, update))}")


def _describe_entry(rows: Any) -> str:
    """Returns which entry of a batch, and which row of it, first holds a number that is not finite."""
    for path, value in keras.tree.flatten_with_path(rows):
        if isinstance(value, tf.Tensor) and value.dtype.is_floating:
            positions = np.argwhere(~np.isfinite(tf.cast(value, tf.float32).numpy()))
            if len(positions):
                return f"in {'/'.join(map(str, path)) or 'its only entry'}, first in row {positions[0][0]}"
    return "in one of its entries"


def _path_of(train_step: TrainStep, resource: tf.Tensor) -> str:
    """Returns the path of the variable that an operation reads."""
    handle = outermost(resource)
    for path, variable in named_variables(train_step.state.model).items():
        for local in train_step.state.strategy.experimental_local_results(tensorflow_variable(variable)):
            if local.handle is handle:
                return path
    return "that the loss reads"


def _layers(train_step: TrainStep, update: ForwardBackward) -> list[Any]:
    """Returns the layers that an update trains, at any depth."""
    layers = train_step.state.layers_of_update[update.name]
    return [part for layer in layers for part in layer._flatten_layers()]


def warn(train_step: TrainStep, graph: tf.Graph) -> None:
    """Logs what the user may not expect of a step, once it is traced."""
    for sentence in surprises(train_step, graph):
        log.warning("%s", sentence)


def surprises(train_step: TrainStep, graph: tf.Graph) -> Iterator[str]:
    """Yields sentences about what the user may not expect of a traced step; `graph` holds its operations."""
    for update in train_step.updates:
        if update.update.has_loss:
            yield from _of_loss(train_step, update)
        half = [layer.name for layer in _layers(train_step, update) if layer.compute_dtype == FLOAT16.compute_dtype]
        if half and update.loss_scaler is None:
            yield (
                f"Layers such as {half[0]} compute in float16 and the loss is not scaled, so small gradients become 0: "
                f"set precision={FLOAT16.name}, or give distloop.LossScaleOptimizer."
            )
        yield from _of_written(train_step, update)
    layers = [layer for update in train_step.updates for layer in _layers(train_step, update)]
    draws = [op for op in with_called(graph.get_operations()) if _DRAWS_BY_SEED.match(op.type)]
    for op in dict.fromkeys(step_operations.describe(op, layers) for op in draws if step_operations.has_fixed_seed(op)):
        yield f"{op} draws the same numbers in each step and on each replica, as its seed is a constant: {SEED_ADVICE}."


def _of_loss(train_step: TrainStep, update: ForwardBackward) -> Iterator[str]:
    """Yields sentences about variables that the loss does not reach, and layers that compute as in evaluation."""
    state, written = train_step.state, {id(v) for v in update.trace.written}
    unreached = [v for v, is_reached in zip(update.variables, update.trace.reached, strict=True) if not is_reached]
    if unreached:
        paths = ", ".join(state.paths[id(v)] for v in unreached)
        yield f"The loss does not depend on {paths}, which stays as it is: leave it out with ModelSpec(trainable=...)."
    with state.frozen:
        layers = list(_layers_with_modes(state.layers_of_update[update.name], {id(v) for v in update.variables}))
    if layers and not any(id(v) in written for layer in layers for v in layer.variables):
        names = ", ".join(layer.path or layer.name for layer in layers[:3])
        yield (
            f"Layers such as {names} compute in the step as in evaluation, or not at all: pass the argument training "
            "of loss_fn on, as in model(x, training=training)."
        )


def _layers_with_modes(layers: Iterable[Any], trained: set[int]) -> Iterator[Any]:
    """Yields the layers that compute otherwise in training, those in parts that no update trains left out."""
    for layer in layers:
        if isinstance(layer, keras.layers.BatchNormalization):
            if layer.trainable:
                yield layer
        elif isinstance(layer, _NOISE_LAYERS):
            if getattr(layer, "rate", 0) or getattr(layer, "stddev", 0):
                yield layer
        elif not layer.weights or any(id(weight) in trained for weight in layer.weights):
            yield from _layers_with_modes(layer._flatten_layers(include_self=False, recursive=False), trained)


def _of_written(train_step: TrainStep, update: ForwardBackward) -> Iterator[str]:
    """Yields sentences about variables that the forward pass writes, and that differ between replicas from then on."""
    state = train_step.state
    if state.strategy.num_replicas_in_sync == 1 or state.virtual_replicas:
        return
    kept_equal = {id(v) for v in update.written_values.with_mean(update.trace.written)}
    kept_equal |= update.written_values.carried
    for variable in (v for v in update.trace.written if id(v) not in kept_equal):
        if tensorflow_variable(variable).aggregation == tf.VariableAggregation.NONE:
            yield (
                f"The forward pass writes {state.paths[id(variable)]}, of dtype {tf.as_dtype(variable.dtype).name}, "
                "which has no mean, so each replica keeps its own, and a checkpoint the first's: make it a float, or "
                "add_weight(..., aggregation='mean')."
            )

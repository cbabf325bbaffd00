"""Diagnosis: explains why a step failed; on the host.

    outcome = train_step(batch, layout)                                   # in the compiled loop
    explain(train_step, 17, outcome.diagnosis.numpy(), source, 16)        # "Step 17 is the first that ...: lower ..."

It changes no variable: if it runs the step again, it restores everything.
"""

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from distloop.data import shards
from distloop.data.shards import Batch, BatchLayout
from distloop.data.source import Source
from distloop.distributed import collectives, gathering
from distloop.graph_functions import graph_function, outermost
from distloop.model import metrics
from distloop.optimizers.loss_scale import MAX_OVERFLOWS_AT_FLOOR
from distloop.settings.precision import BFLOAT16
from distloop.training import step_operations
from distloop.training.differentiation import Objective
from distloop.training.forward_backward import ForwardBackward
from distloop.training.step import GRADIENT_NORM, TrainStep
from distloop.variables import named_variables, tensorflow_variable

_READ_AGAIN_SECS = 10.0  # after which a batch that failed is no longer looked for


@dataclass
class UpdateReport:
    """What the host knows of one update in a step that failed.

    Attributes:
        name: of the update; "" if there is only one.
        values: the means of its values, by name, the watched one first, and "gradient_norm".
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

    @property
    def watched(self) -> str:
        """The name of the value that is watched: "loss", or the first one that a `step_fn` reports."""
        return next(iter(self.values))

    def is_to_blame(self, *, skip_nonfinite: bool, is_loss_watched: bool) -> bool:
        """Returns whether numbers of this update that are not finite made the step an error."""
        loss, norm = self.values[self.watched], self.values[GRADIENT_NORM]
        is_unscaled = self.loss_scale is None or (is_loss_watched and not np.isfinite(loss))
        return (self.is_at_floor or (not skip_nonfinite and is_unscaled)) and not np.isfinite(loss + norm)


class Cause(NamedTuple):
    """Where numbers came from that are not finite, and what to do about it; no advice: the usual one."""

    words: str
    advice: str = ""


def explain(
    train_step: TrainStep, step: int, diagnosis: np.ndarray, source: Source, number: int, batch: Batch | None = None
) -> str:
    """Returns one sentence: what in a step was not finite or jumped, the likely cause, and what to do.

    Args:
        train_step: the step.
        step: its number.
        diagnosis: that of the step's `Outcome`.
        source: its data.
        number: of its batch, over all epochs.
        batch: a copy of it, on which the step runs again; None: there is none, so the batch is read again, if it can
            be, and where it holds no such number, the cause is guessed.
    """
    reports = _read(train_step, _of_all_workers(train_step, diagnosis))
    is_watched = train_step.loss_jump is not None
    for report in reports:
        if report.is_to_blame(skip_nonfinite=train_step.skip_nonfinite, is_loss_watched=is_watched):
            if batch is None:
                return explain_nonfinite(step, report, _inspect_data(step, source, number, report))
            cause = _locate(train_step, batch, source.layout, source.examples_of(number))
            return explain_nonfinite(step, report, cause)
    statistics = train_step.state.loss_watch.statistics.numpy()
    return explain_jump(step, reports, statistics, train_step.loss_jump or 0.0)


def _of_all_workers(train_step: TrainStep, diagnosis: np.ndarray) -> np.ndarray:
    """Returns an `Outcome.diagnosis` with NaN where that of another worker is not finite; all workers call it."""
    if all(map(train_step.application.has_all_gradients, train_step.updates)):
        return diagnosis  # each worker has all gradients
    is_finite = np.isfinite(collectives.gather(train_step.state.strategy, diagnosis.tolist())).all(0)
    return np.where(~is_finite & np.isfinite(diagnosis), np.nan, diagnosis)


def _read(train_step: TrainStep, diagnosis: np.ndarray) -> list[UpdateReport]:
    """Returns the reports in an `Outcome.diagnosis`."""
    reports = []
    for update in train_step.updates:
        names = [*update.trace.names, *train_step.own_names]
        tallies, gradients, diagnosis = np.split(diagnosis, np.cumsum([2 * len(names), update.packing.diagnosis_size]))
        nonfinite = [update.variables[i] for i in update.packing.find_nonfinite(gradients)]
        paths = [train_step.state.paths[id(variable)] for variable in nonfinite]
        report = UpdateReport(update.name, metrics.means(names, tallies), paths)
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
        advice = "look at the loss" if step == 1 else "lower the learning rate, set clip_norm"  # no rate had a part yet
        advice += ", or skip such steps with on_nonfinite=skip"
    return f"{subject}: {', '.join(problems)}; {cause.words}: {cause.advice or advice}."


def explain_jump(step: int, reports: Sequence[UpdateReport], statistics: np.ndarray, jump: float) -> str:
    """Returns one sentence about losses that jumped; `statistics` and `jump` are those of `LossWatch`."""
    jumps = []
    for report, (_, mean, variance) in zip(reports, statistics, strict=True):
        loss = report.values[report.watched]
        if loss - mean > jump * (variance**0.5 + abs(mean)):
            usual = f"{mean:.6g} (mean of the steps before, deviation {variance**0.5:.3g})"
            jumps.append(f"{report.full_name(report.watched)} jumped to {loss:.6g} from {usual}")
    return (
        f"At step {step} {', '.join(jumps)}; the batch is of another kind, or the learning rate too high for this "
        "part of the way: look at the batch, lower the learning rate, set clip_norm, or raise loss_jump."
    )


def guess_cause(step: int, report: UpdateReport, *, is_batch_finite: bool = False) -> Cause:
    """Returns the likely cause of numbers that are not finite, without another run of the step.

    `is_batch_finite` is True if the batch is known to be finite.
    """
    is_loss_finite = np.isfinite(report.values[report.watched])
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
        held = "" if is_batch_finite else "holds such numbers or "
        return Cause(
            f"in a first step often the data {held}is not scaled, the loss divides by 0, or, on a GPU, a label is no "
            "number of a class",
            "look at the batch and at the loss; locate_nonfinite=True names the entry or the operation",
        )
    held = "" if is_batch_finite else "this batch holds such numbers, or "
    return Cause(f"often the weights grew too large, or {held}the loss takes a log of 0")


def explain_compile_error(train_step: TrainStep, error: tf.errors.OpError) -> ValueError | None:
    """Returns one sentence saying that XLA cannot compile the model; None: the error is about something else."""
    message = error.message or ""
    mode = train_step.jit_compile
    if mode == "none" or ("tf2xla" not in message and "XLA" not in message):
        return None
    line = next((line for line in message.splitlines() if "INVALID_ARGUMENT:" in line), message.partition("\n")[0])
    reason = line.rpartition("}}")[2].rpartition("INVALID_ARGUMENT:")[2].strip(" .:")
    return ValueError(
        f"jit_compile={mode} was given, but XLA cannot compile the {mode.replace('loop', 'step')} ({reason[:200]}): "
        "leave out what XLA does not know, often an operation whose result has a size that depends on its values, or "
        "use jit_compile=none."
    )


def _inspect_data(step: int, source: Source, number: int, report: UpdateReport) -> Cause:
    """Reads a batch again, and returns the likely cause; all workers call it, and each may read other rows."""
    found = None
    with contextlib.suppress(Exception):  # of the user's data, which is read while another error is explained
        found = _first_nonfinite(source, number, is_first=report.is_at_floor)
    of_workers = collectives.Workers(source.strategy).gather(found)
    for entry, row in filter(None, of_workers):
        return _of_data(entry, row, source.examples_of(number))
    return guess_cause(step, report, is_batch_finite=None not in of_workers)


def _first_nonfinite(source: Source, number: int, *, is_first: bool) -> tuple[str, int] | tuple[()] | None:
    """Returns an entry of a batch, and the first row of it that is not finite; (): there is none; None: unknown.

    An entry in which a batch before has such numbers, with which the step was finite, is not to blame, unless
    `is_first`.
    """
    ends_at, harmless = time.monotonic() + _READ_AGAIN_SECS, set[str]()
    entries: dict[str, int] | None = None
    for rows in source.read_again(number):
        harmless |= set() if is_first or entries is None else entries.keys()
        entries = _nonfinite_rows(rows)
        if time.monotonic() > ends_at:
            return None
    return None if entries is None else next((item for item in entries.items() if item[0] not in harmless), ())


def _nonfinite_rows(rows: Any) -> dict[str, int]:
    """Returns the entries of a batch with numbers that are not finite, each with the first row that has one."""
    found = {}
    for path, value in keras.tree.flatten_with_path(rows):
        if isinstance(value, tf.Tensor) and value.dtype.is_floating:
            positions = np.argwhere(~tf.math.is_finite(value).numpy())
            if len(positions):
                found[_entry(path)] = int(positions[0][0])
    return found


def _entry(path: Sequence[Any]) -> str:
    return "/".join(map(str, path)) or "its only entry"


def _of_data(entry: str, row: int | None, examples: np.ndarray | None) -> Cause:
    """Returns the cause that an entry of the batch is not finite; `examples` are the numbers of its rows, if known."""
    of_data = "" if examples is None or row is None else f", row {examples[row]} of the data"
    return Cause(
        f"the batch itself holds such numbers, in {entry}{'' if row is None else f', first in row {row}'}{of_data}",
        "correct the data or leave such rows out, as no setting of the training helps",
    )


def _locate(train_step: TrainStep, batch: Batch, layout: BatchLayout, examples: np.ndarray | None) -> Cause:
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
            for microbatch in range(layout.per_device * train_step.microbatches if update.update.has_loss else 0):
                origin = _find_origin(train_step, update, batch, layout, microbatch, examples)
                seen_by = np.flatnonzero(collectives.gather(state.strategy, origin is not None))
                if len(seen_by):
                    return origin or Cause(f"worker {seen_by[0]} says where they came from", "do what it advises")
            write(before)
            graph_function(lambda rows, of=update: train_step.advance(of, train_step.sums(of, rows, layout)))(batch)
    finally:
        write(first)
    others = ", a step_fn made them" if any(update.update.step_fn for update in train_step.updates) else ""
    return Cause(
        "a second look at its batch found every number finite, so a sum over replicas or microbatches is too "
        f"large{others}, or an operation is not deterministic"
    )


def _find_origin(
    train_step: TrainStep,
    update: ForwardBackward,
    batch: Batch,
    layout: BatchLayout,
    microbatch: int,
    examples: np.ndarray | None,
) -> Cause | None:
    """Runs an update forward and backward with a verdict on every tensor; returns where the first bad one came from."""
    strategy = train_step.state.strategy
    checked: list[tf.Tensor] = []
    inputs: list[tf.Tensor] = []
    results: list[tf.Tensor] = []

    def compute(batch: Batch, examples: tf.Tensor) -> Any:
        rows, row_weights = shards.take_shard(batch, layout, train_step.microbatches, microbatch)
        with gathering.largest_shard(layout.max_replica_rows):
            computed = update.compute(rows, row_weights, Objective(update.loss_factor(examples)))
        return computed.segments, computed.tallies

    @graph_function
    def check(batch: Batch) -> tf.Tensor:
        per_replica = strategy.run(compute, args=(batch, train_step.count_examples(batch, layout)))
        results[:] = [t for value in tf.nest.flatten(per_replica) for t in strategy.experimental_local_results(value)]
        graph = tf.compat.v1.get_default_graph()
        checked[:], inputs[:] = step_operations.floating_tensors(graph), graph.inputs
        return step_operations.are_finite(checked)

    op = step_operations.find_origin(results, checked, check(batch).numpy())
    if op is None:
        return None
    if op.type == "Placeholder":
        bad, position = _nonfinite_rows(batch.rows), [tensor is op.outputs[0] for tensor in inputs].index(True)
        entries = [_entry(path) for path, _ in keras.tree.flatten_with_path(batch.rows)]
        entry = next((entry for entry in entries[position : position + 1] if entry in bad), next(iter(bad), None))
        return _of_data(entry or "one of its entries", bad.get(entry or ""), examples)
    if op.type == "ReadVariableOp":
        return Cause(
            f"the variable {_path_of(train_step, op.inputs[0])} holds such numbers",
            "correct what made them, its initializer or the weights that were read, or go back to a checkpoint before",
        )
    return Cause(f"they came from {step_operations.describe(op, step_operations.layers_of(train_step, update))}")


def _path_of(train_step: TrainStep, resource: tf.Tensor) -> str:
    """Returns the path of the variable that an operation reads."""
    handle = outermost(resource)
    for path, variable in named_variables(train_step.state.model).items():
        for local in train_step.state.strategy.experimental_local_results(tensorflow_variable(variable)):
            if local.handle is handle:
                return path
    return "that the loss reads"

"""Checks of data, code, gradients and GPU kernels: functions from a probe to findings; the audit that these make up."""

import functools
import re
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from distloop.audit.gpu_kernels import RUN_PYTHON, off_the_gpu
from distloop.audit.probe import NUM_BATCHES, Probe
from distloop.audit.tracing import as_replica, compiled
from distloop.data import shards
from distloop.errors import as_operation_error, as_user_error, innermost_line, user_line
from distloop.model.guards import SEED_ADVICE
from distloop.training import step_operations
from distloop.training.forward_backward import ForwardBackward

_NUM_NAMES = 3  # in a line


class Finding(NamedTuple):
    """A mistake in the user's code or data.

    Attributes:
        what: its kind, as in "identical random numbers".
        name: of the culprit: a value, a variable, a layer, or an operation with its line.
        hint: what to do.
    """

    what: str
    name: str
    hint: str

    def __str__(self) -> str:
        return _line([self])


def failure(error: Exception) -> Finding:
    """Returns the finding of an error that the user's code or data raised."""
    if isinstance(error, tf.errors.OpError):
        error = as_user_error(error) or as_operation_error(error) or error
    line = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
    links = (error, error.__cause__)  # the cause of a refusal may have the line
    lines = [user_line(traceback.extract_tb(link.__traceback__)) for link in links if link is not None]
    where = next(filter(None, lines), type(error).__name__)
    return Finding("stops with an error", where, line.strip().rstrip("."))


@dataclass(frozen=True)
class Audit:
    """The result of an audit; printed, a line for each kind of finding and hint, with the first few names.

    Attributes:
        findings: empty if nothing is wrong.
        unchecked: what could not be checked, and why.
    """

    findings: tuple[Finding, ...]
    unchecked: tuple[str, ...] = ()

    def __str__(self) -> str:
        alike: dict[tuple[str, str], list[Finding]] = {}
        for finding in self.findings:
            alike.setdefault((finding.what, finding.hint), []).append(finding)
        lines = [_line(findings) for findings in alike.values()] or ["nothing found."]
        return "\n".join([*lines, *(f"not checked: {text}." for text in self.unchecked)])


def _line(findings: Sequence[Finding]) -> str:
    """Returns the line about findings that differ in their names alone."""
    names = [finding.name for finding in findings[:_NUM_NAMES]]
    more = f" and {len(findings) - _NUM_NAMES} more" if len(findings) > _NUM_NAMES else ""
    return f"{findings[0].what}: {', '.join(names)}{more}: {findings[0].hint}."


def data_order(probe: Probe) -> Iterator[Finding]:
    """Checks that two passes over the data with the same seed begin with the same batches."""
    first, second = probe.passes
    if first != second:
        batch = next((i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), len(second))
        yield Finding(
            "data in another order",
            f"batch {batch}",
            "two passes with the same seed differ from there on, so a resumed run sees other rows: give shuffle and "
            "Python generators a seed, start each pass alike, and keep the dataset deterministic",
        )


def refusals(probe: Probe) -> Iterator[Finding]:
    """Checks that `fit` can take a step: raises what it refuses, and yields what it stops with."""
    assert probe.traced_step
    if text := probe.two_steps.failure:
        yield failure(FloatingPointError(text))


def surprises(probe: Probe) -> Iterator[Finding]:
    """Yields the warnings that `fit` gives once it has traced a step."""
    for sentence in step_operations.surprises(probe.traced_step.step, probe.traced_step.run.graph):
        what, _, advice = sentence.rstrip(".").partition(": ")
        yield Finding("fit warns", what, advice)


def labels(probe: Probe) -> Iterator[Finding]:
    """Checks that the labels of the first batches are numbers of classes; -1 stands for no class in `tf.one_hot`."""
    if not probe.trace.labels:
        return
    specs = functools.partial(tf.nest.map_structure, tf.type_spec_from_value)
    with probe.restored():
        batches = [rows for rows in probe.dataset().take(NUM_BATCHES) if specs(rows) == specs(probe.rows)]
        ranges = np.array([probe.trace.run(rows, rows)[1] for rows in batches])  # [N, L, 2]
    for (op, _, num_classes), lowest, highest in zip(
        probe.trace.labels, ranges.min(0)[:, 0], ranges.max(0)[:, 1], strict=True
    ):
        if lowest < (-1 if op.type == "OneHot" else 0) or highest >= num_classes:
            yield Finding(
                "labels out of range",
                step_operations.describe(op, probe.layers, has_direction=False),
                f"they go from {lowest} to {highest}, and there are {num_classes} classes, 0 to {num_classes - 1}: "
                "number them from 0, or give the last layer more outputs",
            )


def python_values(probe: Probe) -> Iterator[Finding]:
    """Checks that two traces of `loss_fn` hold the same Python values."""
    first, second, _ = probe.trace.calls
    if [op.type for op in first] != [op.type for op in second]:
        return  # the model keeps something from its first trace, as a cache does
    for one, other in zip(first, second, strict=True):
        if "PartitionedCall" in one.type and (changed := _changed_argument(one, other)):
            function, argument, values = changed
            yield Finding(
                "traced again and again",
                f"{function}({argument})",
                f"this tf.function gets the Python values {values} one after the other and is traced for each: "
                "give it a tensor",
            )
            return
        if one.type == "Const" and one.node_def.attr["value"] != other.node_def.attr["value"]:
            yield Finding(
                "Python value that changes",
                user_line(one.traceback) or one.name,
                "the loss is traced once, so a Python counter or random number keeps its first value: use a "
                "tf.Variable in the model, such as the optimizer's iterations, or keras.random",
            )
            return


def _changed_argument(one: tf.Operation, other: tf.Operation) -> tuple[str, str, list[Any]] | None:
    """Returns a `tf.function`, its argument that has another Python value in each of two calls, and both values."""
    types = []
    for op in (one, other):
        function = op.graph._get_function(op.node_def.attr["f"].func.name)
        if function is None:
            return None
        types.append(function.function_type)
    for name, parameter in types[0].parameters.items():
        constraints = [parameter.type_constraint, getattr(types[1].parameters.get(name), "type_constraint", None)]
        values = [getattr(constraint, "value", None) for constraint in constraints]
        if constraints[0] != constraints[1] and None not in values:
            return re.sub(r"^__(inference|forward)_(.*?)_\d+$", r"\2", one.node_def.attr["f"].func.name), name, values
    return None


def identical_draws(probe: Probe) -> Iterator[Finding]:
    """Checks that two replicas draw different random numbers."""
    names = set()
    for op, one, other in probe.draws:
        is_telling = one.dtype.is_floating or tf.size(one) >= 16  # a few whole numbers may be equal by chance
        if is_telling and not step_operations.has_fixed_seed(op) and np.array_equal(one.numpy(), other.numpy()):
            names.add(step_operations.describe(op, probe.layers))
    for name in sorted(names):
        yield Finding("identical random numbers", name, f"every replica draws the same: {SEED_ADVICE}")


def gradients(probe: Probe) -> Iterator[Finding]:
    """Checks that no gradient is zero both before and after two steps."""
    before, after = probe.two_steps.gradients_before, probe.two_steps.gradients_after
    for path, gradient in after.items():
        if gradient is not None and not np.any(gradient) and not np.any(before[path]):
            yield Finding(
                "zero gradient",
                path,
                "it is exactly 0 for a whole batch, at the start and after two steps: look for dead units, a "
                "factor or a mask of 0 on the way to the loss",
            )


def host_operations(probe: Probe) -> Iterator[Finding]:
    """Checks that the forward and the backward pass, which is traced and not run, have kernels for a GPU."""
    count = tf.constant(shards.batch_size(probe.rows), tf.float32)
    for update in probe.updates:
        update_pass = ForwardBackward(probe.state, update)

        def compute(rows: Any, of: ForwardBackward = update_pass) -> Any:
            with as_replica(0, 1, set()), probe.state.unplaced():
                return of.differentiate.by_path(rows, of.loss_factor(count), training=True)

        for op in off_the_gpu(compiled(compute, probe.rows).graph):
            line = innermost_line(op.traceback)
            is_users = line is not None and not line.startswith("distloop/")
            yield Finding(
                "runs on the host when this model is on a GPU",
                f"{op.type}({', '.join(t.dtype.name for t in op.inputs)}) ({line if is_users else op.name})",
                "the GPU waits for Python in each step: write it with TensorFlow's operations, or do it in the dataset"
                if op.type in RUN_PYTHON
                else "TensorFlow has no GPU kernel for it: compute it in another dtype or by other operations, or do "
                "it in the dataset, which prepares batches while the GPU computes",
            )

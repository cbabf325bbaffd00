"""Checks of data, code, gradients and GPU kernels: functions from a probe to findings; the audit that these make up."""

import functools
import re
import traceback
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from distloop.audit.gpu_kernels import RUN_PYTHON, off_the_gpu
from distloop.audit.probe import NUM_BATCHES, REPLICAS, Probe
from distloop.audit.tracing import as_replica, compiled
from distloop.data import shards
from distloop.errors import as_operation_error, as_user_error, innermost_line, user_line
from distloop.graph_functions import with_called
from distloop.model.spec import Update
from distloop.training import step_operations
from distloop.training.forward_backward import ForwardBackward
from distloop.variables import named_variables

_NUM_NAMES = 3  # in a line
_NOISE_LAYERS = (
    keras.layers.Dropout,
    keras.layers.AlphaDropout,
    keras.layers.GaussianDropout,
    keras.layers.GaussianNoise,
)
_GIVE_SEED = "give a keras.random.SeedGenerator as seed, an attribute of a layer in the model or of the model itself"


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
    where = user_line(traceback.extract_tb(error.__traceback__)) or type(error).__name__
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


def created_variables(probe: Probe) -> Iterator[Finding]:
    """Checks that `loss_fn` creates no variable."""
    if (created := probe.trace.created) is not None:
        assert created.__cause__ is not None, "it has the traceback"
        advice = "create it, or its layer, in model_fn, and put it into ModelSpec's model"
        yield Finding(
            "variable made in a step",
            f"{created.variable} ({user_line(traceback.extract_tb(created.__cause__.__traceback__))})",
            _GIVE_SEED if "seed_generator_state" in created.variable else f"each trace creates another one: {advice}",
        )


def unsaved_random_states(probe: Probe) -> Iterator[Finding]:
    """Checks that checkpoints hold the state of every random number that `loss_fn` draws."""
    for op in step_operations.unsaved_draws(probe.trace.calls[0] if probe.trace.calls else [], probe.state):
        yield Finding(
            "random numbers in no checkpoint",
            step_operations.describe(op, probe.layers, has_direction=False),
            f"a resumed run would draw others, so fit refuses it: {step_operations.ADVICE}",
        )


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


def training_argument(probe: Probe) -> Iterator[Finding]:
    """Checks that `loss_fn` passes `training` on to layers that need it."""
    for update in probe.state.spec.updates:
        trained = {id(v) for v in probe.state.variables_of_update[update.name]}
        layers = [*_layers_with_modes(probe.state.layers_of_update[update.name], trained)]
        if layers and _ignores_training(probe, update):
            for layer in layers:
                yield Finding(
                    "training has no effect",
                    layer.path or layer.name,
                    "loss_fn computes the same with training=True and training=False, so the layer works in one mode "
                    "in both: pass the argument on, as in model(x, training=training)",
                )


def _ignores_training(probe: Probe, update: Update) -> bool:
    """Returns whether an update's `loss_fn` has the same operations for training as for evaluation."""
    types: list[list[str]] = []

    def trace(rows: Any) -> None:
        for training in (True, False):
            with as_replica(0, REPLICAS, set()) as operations:
                update.loss_fn(rows, training)
            types.append([op.type for op in with_called(operations)])

    compiled(trace, probe.rows)
    return types[0] == types[1]


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


def foreign_variables(probe: Probe) -> Iterator[Finding]:
    """Checks that every variable that `loss_fn` reads or writes is saved in checkpoints."""
    for variable, is_written in probe.foreign_variables:
        yield Finding(
            "state in no checkpoint",
            variable.name.removesuffix(":0"),
            f"the loss {'writes' if is_written else 'reads'} a variable outside ModelSpec's model, which a resumed run "
            "starts anew: put it, or the layer that holds it, into the model, as in ModelSpec([model, it], ...)",
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


def variables_left_out(probe: Probe) -> Iterator[Finding]:
    """Checks that every trainable variable is trained by an update."""
    trained = {id(v) for variables in probe.state.variables_of_update.values() for v in variables}
    seeds = {id(seed) for seed in probe.state.seeds}
    left_out: dict[str, list[str]] = {}  # layer -> variables
    for path, variable in named_variables(probe.state.model).items():
        if variable.trainable and id(variable) not in trained | seeds:
            left_out.setdefault(path.rpartition("/")[0] or path, []).append(path)
    for layer, paths in left_out.items():
        yield Finding(
            "left out of training",
            layer,
            f"no update trains {', '.join(path.rpartition('/')[2] for path in paths)}: widen the pattern of trainable "
            "or of the update, or set layer.trainable = False if it is to stay as it is",
        )


def identical_draws(probe: Probe) -> Iterator[Finding]:
    """Checks that two replicas draw different random numbers."""
    names = set()
    for op, one, other in probe.draws:
        is_telling = one.dtype.is_floating or tf.size(one) >= 16  # a few whole numbers may be equal by chance
        if is_telling and np.array_equal(one.numpy(), other.numpy()):
            names.add(step_operations.describe(op, probe.layers))
    for name in sorted(names):
        yield Finding("identical random numbers", name, f"every replica draws the same: {_GIVE_SEED}")


def gradients(probe: Probe) -> Iterator[Finding]:
    """Checks that every trained variable has a gradient, and that it is not zero both before and after two steps."""
    before, after = probe.two_steps.gradients_before, probe.two_steps.gradients_after
    for path, gradient in after.items():
        if gradient is None:
            yield Finding(
                "no gradient",
                path,
                "the loss does not depend on it: compute the loss from it without tf.stop_gradient, NumPy or "
                "whole numbers between, or leave it out with ModelSpec(trainable=...)",
            )
        elif not np.any(gradient) and not np.any(before[path]):
            yield Finding(
                "zero gradient",
                path,
                "it is exactly 0 for a whole batch, at the start and after two steps: look for dead units, a "
                "factor or a mask of 0 on the way to the loss",
            )


def host_operations(probe: Probe) -> Iterator[Finding]:
    """Checks that the forward and the backward pass, which is traced and not run, have kernels for a GPU."""
    count = tf.constant(shards.batch_size(probe.rows), tf.float32)
    for update in probe.state.spec.updates:
        update_pass = ForwardBackward(probe.state, update)

        def compute(rows: Any, of: ForwardBackward = update_pass) -> Any:
            with as_replica(0, 1, set()), probe.state.placement.unplaced():
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

"""The audit's probe: runs a user's model and data, and keeps its observations for the checks.

    probe = Probe(state, dataset)
    probe.trace.calls                                            # the operations of loss_fn
    measurements, _ = probe.measure(update, probe.halves, training=True)

Each observation is made once, when a check first asks for it. It starts from the same state as the others and restores
every variable. The probe judges nothing.
"""

import contextlib
import functools
import hashlib
import random
from collections.abc import Callable, Iterator, Sequence, Set
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from distloop.audit.tracing import as_replica, compiled, drawing_operations, hold_draws, labelled_operations
from distloop.data import shards
from distloop.data.iterators import fresh_copy
from distloop.data.opening import open_batches
from distloop.data.source import Data, Source
from distloop.distributed import devices
from distloop.model.layers import stream_of
from distloop.model.spec import Update
from distloop.model.state import TrainState
from distloop.settings.precision import HALF_DTYPES
from distloop.training.diagnosis import explain
from distloop.training.forward_backward import ForwardBackward
from distloop.training.step import TrainStep
from distloop.training.step_operations import unsaved_draws_refused
from distloop.variables import named_variables

REPLICAS = 2  # to compare with one
NUM_BATCHES = 8  # of a pass over the data, whose order and labels are looked at
_TOLERANCE, _HALF_PRECISION_TOLERANCE = 1e-3, 5e-2


class CallTrace(NamedTuple):
    """Three calls of `loss_fn` in one graph: two as replica 0, one as replica 1 with its rows in reverse order.

    Attributes:
        calls: the operations of each call.
        run: the compiled function of the rows in both orders; returns the random numbers of the first and third call,
            and the least and the largest number of each of `labels`.
        used: how `loss_fn` communicates with other replicas, and what it asks about where it runs, as of `as_replica`.
        labels: the operations of the first call that take class numbers, each with these and the number of classes.
    """

    calls: list[list[tf.Operation]]
    run: Any
    used: Set[str]
    labels: Sequence[tuple[tf.Operation, tf.Tensor, int]] = ()


class Measurement(NamedTuple):
    """What an update computes from some rows.

    Attributes:
        gradients: by the variable's path; None if the loss does not depend on it.
        values: the metrics.
        weight: the sum of the loss's weights.
        statistics: by path, the untrained variables after the forward pass.
        is_random: whether another measurement may draw other random numbers.
    """

    gradients: dict[str, np.ndarray | None]
    values: dict[str, float]
    weight: float
    statistics: dict[str, np.ndarray]
    is_random: bool = False


class TracedStep(NamedTuple):
    """A train step, as `fit` traces it.

    Attributes:
        step: the step.
        run: the compiled function of an iterator; returns whether the step is an error, and its diagnosis.
        iterator: at the beginning of the data.
        source: of the data.
        last: keeps the last batch.
    """

    step: TrainStep
    run: Any
    iterator: Any
    source: Source
    last: shards.LastBatch


class TwoSteps(NamedTuple):
    """What two steps of training change.

    Attributes:
        gradients_before: of all updates over the whole batch, by path.
        gradients_after: the same, after the steps.
        paths_apart: variables that have other values on other replicas after the steps.
        failure: a sentence about a step whose numbers were not finite; empty: both were.
    """

    gradients_before: dict[str, np.ndarray | None]
    gradients_after: dict[str, np.ndarray | None]
    paths_apart: list[str]
    failure: str = ""


class Probe:
    """Runs a model on its first batch.

    Attributes:
        state: of the model.
        rows: the first batch.
        halves: its shards for two replicas.
        updates: those with a `loss_fn`.
        layers: all layers of the model.
        tolerance: the largest relative difference of values that are to be equal.
    """

    def __init__(self, state: TrainState, data: Data, *, seed: int = 0, microbatches: int = 1):
        """Reads the first batch; the arguments are those of `audit`."""
        self.state = state
        self._data = data
        self._seed = seed
        self._microbatches = microbatches
        self.rows = next(iter(self.dataset()), None)
        if self.rows is None or shards.batch_size(self.rows) < REPLICAS:
            raise ValueError(
                f"The dataset's first batch has less than {REPLICAS} rows; an audit splits it between as many "
                "replicas: give larger batches."
            )
        size = int(shards.batch_size(self.rows))
        bounds = [shards.shard_bounds(i, REPLICAS, size) for i in range(REPLICAS)]
        self.halves = [tf.nest.map_structure(lambda t, cut=slice(*cut): t[cut], self.rows) for cut in bounds]
        self._reversed_rows = tf.nest.map_structure(lambda t: tf.gather(t, tf.range(size)[::-1]), self.rows)
        self.updates = [update for update in state.spec.updates if update.has_loss]
        self.layers = [
            layer for layers in state.layers_of_update.values() for top in layers for layer in top._flatten_layers()
        ]
        is_half_precision = any(layer.compute_dtype in HALF_DTYPES for layer in self.layers)
        self.tolerance = _HALF_PRECISION_TOLERANCE if is_half_precision else _TOLERANCE

    @functools.cached_property
    def passes(self) -> list[list[str]]:
        """Checksums of the first batches of two passes over the data, each as in a new process with the same seed."""
        passes = []
        for _ in range(2):
            random.seed(self._seed)
            np.random.seed(self._seed)
            tf.random.set_seed(self._seed)
            passes.append([_checksum(rows) for rows in self.dataset().take(NUM_BATCHES)])
        return passes

    @functools.cached_property
    def trace(self) -> CallTrace:
        """Three calls of `loss_fn`, which are traced and not run."""
        state, calls, used = self.state, [], set[str]()
        labels: list[tuple[tf.Operation, tf.Tensor, int]] = []

        def trace(rows: Any, other_rows: Any) -> Any:
            first_seeds = [tf.convert_to_tensor(seed) for seed in state.seeds]
            for replica, batch in ((0, rows), (0, rows), (1, other_rows)):
                for seed, value in zip(state.seeds, first_seeds, strict=True):
                    seed.assign(stream_of(value, replica))
                with as_replica(replica, REPLICAS, used) as operations:
                    for update in self.updates:
                        update.loss_fn(batch, True)
                calls.append(operations)
            labels.extend(labelled_operations(calls[0]))
            draws = [[op.outputs[0] for op in drawing_operations(calls[call])] for call in (0, 2)]
            return draws, [(tf.reduce_min(numbers), tf.reduce_max(numbers)) for _, numbers, _ in labels]

        return CallTrace(calls, compiled(trace, self.rows, self._reversed_rows), used, labels)

    @functools.cached_property
    def draws(self) -> list[tuple[tf.Operation, tf.Tensor, tf.Tensor]]:
        """Operations of `loss_fn` that draw random numbers, each with what replicas 0 and 1 draw."""
        with self.restored():
            drawn, _ = self.trace.run(self.rows, self._reversed_rows)
        return list(zip(drawing_operations(self.trace.calls[0]), *drawn, strict=False))

    def untrained_values(self) -> dict[str, np.ndarray]:
        """Returns the values by path that the forward pass may write on the first replica, random streams apart."""
        state, seeds = self.state, {id(seed) for seed in self.state.seeds}
        variables = [v for v in state.untrained_variables if id(v) not in seeds]
        return {state.paths[id(v)]: state.replica_variables(v)[0].numpy() for v in variables}

    def measure(self, update: Update, batches: Sequence[Any], *, training: bool) -> tuple[list[Measurement], set[str]]:
        """Computes an update for several batches, each as a replica of its own, and each from the same start.

        Random numbers count as one constant, where `hold_draws` can replace them.

        Returns:
            A measurement for each batch, and what `loss_fn` uses of a replica, as of `as_replica`.
        """
        update_pass = ForwardBackward(self.state, update)
        num_examples = tf.constant(shards.batch_size(self.rows), tf.float32)
        used: set[str] = set()
        are_random: list[bool] = []  # set by tracing

        def compute(replica: int, rows: Any) -> Any:
            with as_replica(replica, len(batches), used) as operations:
                factor = update_pass.loss_factor(num_examples)
                results = update_pass.differentiate.by_path(rows, factor, training=training)
            are_random.append(hold_draws(operations))
            return results

        measurements = []
        with self.restored() as restore:
            for replica, rows in enumerate(batches):
                run = compiled(functools.partial(compute, replica), rows)
                restore()
                gradients, tallies = run(rows)
                weight = float(tallies["loss"].weight)
                measurements.append(
                    Measurement(
                        {path: None if g is None else _divide(g.numpy(), weight) for path, g in gradients.items()},
                        {name: _divide(float(tally.total), float(tally.weight)) for name, tally in tallies.items()},
                        weight,
                        self.untrained_values(),
                        are_random[replica],
                    )
                )
        return measurements, used

    def compare_operations(
        self, update: Update, *, training: bool
    ) -> list[tuple[tf.Operation, tf.Tensor, list[tf.Tensor]]]:
        """Runs `loss_fn` on the whole batch and on its halves.

        Returns:
            Each operation with one floating-point output, in order: its output for the whole batch, and for each half.
            Empty if the graph for a half is another one.
        """
        calls: list[list[tf.Operation]] = []

        def trace(full: Any, halves: Any) -> Any:
            for replica, rows in enumerate([full, *halves]):
                with as_replica(max(replica - 1, 0), REPLICAS if replica else 1, set()) as operations:
                    update.loss_fn(rows, training)
                hold_draws(operations)
                calls.append(operations)
            if len({tuple(op.type for op in operations) for operations in calls}) > 1:
                calls.clear()
            return [
                [op.outputs[0] for op in operations]
                for operations in zip(*calls, strict=True)
                if _is_comparable(operations[0])
            ]

        with self.restored():
            outputs = compiled(trace, self.rows, self.halves)(self.rows, self.halves)
        operations = [op for op in calls[0] if _is_comparable(op)] if calls else []
        return [(op, full, halves) for op, (full, *halves) in zip(operations, outputs, strict=True)]

    @functools.cached_property
    def traced_step(self) -> TracedStep:
        """A step of training, which is traced and has not run."""
        state = self.state
        microbatches, replicas = self._microbatches, state.replicas
        source = Source(self.dataset(), state.strategy, microbatches=microbatches, replicas=replicas)
        step = TrainStep(state, microbatches=microbatches, locate_nonfinite=True)
        iterator = source.new_iterator()
        last = shards.LastBatch(iterator)

        def train(iterator: Any) -> tuple[tf.Tensor, tf.Tensor]:
            with tf.device(devices.HOST):
                batch = shards.next_batch(iterator, source.layout)
                last.keep(batch)
            with unsaved_draws_refused(state):
                outcome = step(batch, source.layout)
            return outcome.failed, tf.concat(outcome.diagnosis, 0)

        return TracedStep(step, compiled(train, iterator), iterator, source, last)

    @functools.cached_property
    def two_steps(self) -> TwoSteps:
        """Two steps of training on the beginning of the data; the second one is left out if the first fails."""
        with self.restored():
            before = self._gradients()
            step, run, iterator, source, last = self.traced_step
            for number in (1, 2):
                failed, values = run(iterator)
                if failed:
                    failure = explain(step, number, values.numpy(), source, number - 1, last.get())
                    return TwoSteps(before, {}, [], failure)
            apart = self._paths_apart()
            return TwoSteps(before, self._gradients(), apart)

    def _gradients(self) -> dict[str, np.ndarray | None]:
        """Returns the gradients of all updates over the whole batch, from the current state."""
        gradients: dict[str, np.ndarray | None] = {}
        for update in self.updates:
            (full,), _ = self.measure(update, [self.rows], training=True)
            gradients |= full.gradients
        return gradients

    def _paths_apart(self) -> list[str]:
        state = self.state
        variables = dict(named_variables(state.model))
        variables |= {f"{name}/{v.path}": v for name, o in state.plain_optimizers.items() for v in o.variables}
        per_replica = {id(v) for v in state.seeds} | {id(v) for v in state.keras_metrics.variables().values()}
        return [
            path
            for path, variable in variables.items()
            if id(variable) not in per_replica
            and len({copy.numpy().tobytes() for copy in self.state.replica_variables(variable)}) > 1
        ]

    @contextlib.contextmanager
    def restored(self) -> Iterator[Callable[[], None]]:
        """Restores all variables on exit; yields a function that does so at once."""
        copies = [copy for v in _variables_of(self.state) for copy in self.state.replica_variables(v)]
        values = [tf.identity(copy) for copy in copies]

        def restore() -> None:
            for copy, value in zip(copies, values, strict=True):
                copy.assign(value)

        try:
            yield restore
        finally:
            restore()

    def dataset(self) -> tf.data.Dataset:
        """Returns the data, to be read from its beginning."""
        return open_batches(fresh_copy(self._data), batch_size=1)


def _variables_of(state: TrainState) -> list[Any]:
    """Returns every variable that a step or an evaluation may change, except those that only `loss_fn` knows."""
    return [*state.all_variables().values(), *state.keras_metrics.variables().values()]


def _is_comparable(op: tf.Operation) -> bool:
    is_tensor = len(op.outputs) == 1 and op.outputs[0].dtype.is_floating and bool(op.outputs[0].shape.rank)
    return is_tensor and not drawing_operations([op])


def _divide(value: Any, weight: float) -> Any:
    return value / weight if weight else value


def _checksum(rows: Any) -> str:
    """Returns a checksum of a batch of any structure and types."""
    checksum = hashlib.sha256()
    for tensor in tf.nest.flatten(rows, expand_composites=True):
        checksum.update(tf.io.serialize_tensor(tensor).numpy())
    return checksum.hexdigest()

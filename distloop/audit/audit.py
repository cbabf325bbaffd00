"""The audit: runs a list of checks of the user's code and data, and returns findings with remedies.

    result = trainer.audit(dataset)
    print(result)                       # findings that differ in their names alone share a line
    assert not result.findings

A check is a function from a `Probe` to findings, and to sentences on what it could not check; those that compare one
replica on a whole batch with two replicas on its halves are here, the others in `checks`. The probe runs on any number
of devices, trains two steps, and restores everything. A new check is one more function in the list. This module does
not know how a run goes.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from distloop.audit import checks
from distloop.audit.checks import Audit, Finding, failure
from distloop.audit.probe import REPLICAS, Measurement, Probe
from distloop.audit.tracing import COLLECTIVES, preserved_random_state
from distloop.data import shards
from distloop.data.arrays import as_dataset, with_labels
from distloop.data.iterators import fresh_copy
from distloop.data.source import Data
from distloop.distributed import collectives
from distloop.log import log
from distloop.model.memory import explain_pass
from distloop.model.saved_state import relative_difference
from distloop.model.spec import Update
from distloop.trainer import Trainer
from distloop.training import step_operations
from distloop.variables import named_variables


def dependence_on_replicas(probe: Probe) -> Iterator[Finding | str]:
    """Checks that no update's statistics, values or gradients depend on the number of replicas."""
    if [*checks.python_values(probe), *checks.identical_draws(probe)]:  # then no two calls compute the same
        yield "one replica against several, until the findings are repaired"
        return
    if not probe.updates:
        yield "loss and gradients on several replicas, as a step_fn does the whole step"
    for update in probe.updates:
        (full,), used = probe.measure(update, [probe.rows], training=True)
        unsynchronized = _unsynchronized_normalizations(probe, full)
        # Virtual replicas have statistics of their own on any number of devices.
        for path in unsynchronized if not probe.state.replicas.same_bits else ():
            yield Finding(
                "statistics of one replica",
                path,
                "each replica normalizes by its own rows, so the numbers depend on how many there are: use "
                "distloop.synchronize(model), or BatchNormalization(synchronized=True)",
            )
        training = not (full.is_random or unsynchronized or (used | probe.trace.used) & COLLECTIVES)
        if training:
            halves, _ = probe.measure(update, probe.halves, training=True)
            yield from _compare_statistics(probe, full, halves)
        else:
            (full,), used_for_full = probe.measure(update, [probe.rows], training=False)
            halves, used_for_halves = probe.measure(update, probe.halves, training=False)
            if reason := _incomparable((used_for_full | used_for_halves) & COLLECTIVES, full.is_random):
                yield f"loss and gradients{_of(update)} on several replicas, because the loss {reason}"
                continue
        yield from _values_and_gradients(probe, update, full, halves, training)


def _incomparable(collectives: set[str], is_random: bool) -> str | None:
    """Returns what `loss_fn` does that keeps one replica from being compared with several; None: nothing."""
    if collectives:
        names = " and ".join(sorted(collectives))
        return f"communicates by {names}: distloop.testing.assert_replica_law compares them"
    return "draws other random numbers for other rows, also where training is False" if is_random else None


def _unsynchronized_normalizations(probe: Probe, full: Measurement) -> list[str]:
    """Returns the paths of BatchNormalization layers that update their statistics from one replica's rows."""
    start, variables = probe.untrained_values(), named_variables(probe.state.model)
    changed = {id(variables[path]) for path, v in full.statistics.items() if not np.array_equal(v, start[path])}
    layers = [x for x in probe.layers if isinstance(x, keras.layers.BatchNormalization) and not x.synchronized]
    return [layer.path for layer in layers if not changed.isdisjoint(map(id, layer.variables))]


def _compare_statistics(probe: Probe, full: Measurement, halves: Sequence[Measurement]) -> Iterator[Finding]:
    """Compares the statistics that the forward pass wrote; of floats distloop keeps the mean over the replicas."""
    sizes = [int(shards.batch_size(half)) for half in probe.halves]
    for path, value in full.statistics.items():
        of_halves = [half.statistics[path] for half in halves]
        if np.issubdtype(value.dtype, np.floating):
            if _differ(value, np.average(of_halves, axis=0, weights=sizes), probe.tolerance):
                yield Finding(
                    "statistics of one replica",
                    path,
                    "its mean over the replicas differs from the value of one replica with all rows: sum over the "
                    "replicas first, with tf.distribute.get_replica_context().all_reduce",
                )
        elif any(not np.array_equal(each, of_halves[0]) for each in of_halves) and not probe.state.replicas.same_bits:
            yield _apart(path)  # else all replicas get the value of the first virtual one


def _values_and_gradients(
    probe: Probe, update: Update, full: Measurement, halves: Sequence[Measurement], training: bool
) -> Iterator[Finding]:
    """Compares values, then gradients; names the operation from which on the rows differ."""
    weights = [half.weight for half in halves]  # all 0 where a mask leaves out the whole batch
    mean = functools.partial(np.average, axis=0, weights=weights if any(weights) else None)
    means = {name: mean([half.values[name] for half in halves]) for name in full.values}
    numbers = {
        name: f"{name} is {value:.6g} on 1 and {means[name]:.6g} on {REPLICAS}"
        for name, value in full.values.items()
        if _differ(value, means[name], probe.tolerance)
    }
    if not numbers:
        least = 0.01 * np.sqrt(sum(np.sum(np.square(g)) for g in full.gradients.values() if g is not None))
        for path, gradient in full.gradients.items():
            of_halves = [half.gradients[path] for half in halves]
            if gradient is not None and all(each is not None for each in of_halves):
                if _differ(gradient, mean(of_halves), probe.tolerance, least or 1e-30):
                    numbers[path] = f"the gradient of {path} differs between 1 and {REPLICAS}"
    if numbers:
        name, text = next(iter(numbers.items()))
        operation = _first_difference(probe, update, training)
        yield Finding(
            "depends on the number of replicas",
            f"{name}{_of(update)}{f', by {operation}' if operation else ''}",
            f"{text} replicas: take no mean, sum, size or statistic over the rows, and divide by no number of rows or "
            "replicas; distloop sums over all of them and divides once",
        )


def _first_difference(probe: Probe, update: Update, training: bool) -> str | None:
    """Returns the first operation whose rows differ between halves and whole batch although its inputs' rows do not."""
    differing: set[int] = set()
    for op, full, halves in probe.compare_operations(update, training=training):
        if full.shape[:1] == [sum(half.shape[0] for half in halves)]:
            joined = np.concatenate([half.numpy() for half in halves])
            if _differ(full.numpy(), joined, probe.tolerance):
                if not any(id(source) in differing for source in op.inputs):
                    return step_operations.describe(op, probe.layers)
                differing.add(id(op.outputs[0]))
    return None


def drift(probe: Probe) -> Iterator[Finding]:
    """Checks that after two steps every replica holds the same value of each variable."""
    return (_apart(path) for path in probe.two_steps.paths_apart)


def same_bits(probe: Probe) -> Iterator[Finding]:
    """Checks that no virtual replica uses what others compute, or the number of a device."""
    if not (replicas := probe.state.replicas).same_bits:
        return
    collectives = probe.trace.used & COLLECTIVES
    if others := collectives - {"all_gather"}:  # as `gather_rows` calls it
        yield Finding(
            "talks to other replicas",
            " and ".join(sorted(others)),
            "a device computes virtual replicas one after the other, so none has what another one computes: use plain "
            f"BatchNormalization, distloop.gather_rows for the rows of others, or leave {replicas.setting} out",
        )
    elif (asked := probe.trace.used) and not collectives:  # `gather_rows` asks, too
        yield Finding(
            "asks where it runs",
            " and ".join(sorted(asked)),
            "it counts devices, not virtual replicas, so the bits depend on how many devices there are: leave it out",
        )


def _apart(path: str) -> Finding:
    return Finding(
        "replicas apart",
        path,
        "each replica writes another value, and a checkpoint holds only the first replica's: make it a float, of which "
        "distloop keeps the mean, or give add_weight(..., aggregation='sum' or 'mean')",
    )


def _differ(value: Any, reference: Any, tolerance: float, least_norm: float = 1e-6) -> bool:
    return relative_difference(value, reference, least_norm) > tolerance


def _of(update: Update) -> str:
    return f" of update {update.name!r}" if update.name else ""


Check = Callable[[Probe], Iterator[Finding | str]]

# The other checks need steps that run, so they wait until these find nothing.
FIRST_CHECKS: tuple[Check, ...] = (checks.refusals, checks.labels)
CHECKS: tuple[Check, ...] = (
    checks.surprises,
    checks.python_values,
    checks.identical_draws,
    dependence_on_replicas,
    drift,
    same_bits,
    checks.gradients,
    checks.host_operations,
)


def audit(trainer: Trainer, dataset: Data, y: Any = None) -> Audit:
    """Checks a trainer's model and data; changes neither. As `Trainer.audit`."""
    if collectives.num_workers(trainer.strategy) > 1:
        raise ValueError("audit was called on several workers: call it in one process, without TF_CONFIG.")
    config = trainer.config
    data = as_dataset(with_labels(dataset, y), config.global_batch_size(trainer.strategy), config.seed)
    trainer.build(fresh_copy(data))
    with preserved_random_state():
        probe = Probe(trainer.state, data, seed=config.seed, microbatches=config.microbatches)
        results = _results([checks.data_order], probe)
        obstacles = _results(FIRST_CHECKS, probe)
        results += obstacles or _results(CHECKS, probe)
    findings = dict.fromkeys(result for result in results if isinstance(result, Finding))  # each once, in order
    return Audit(tuple(findings), tuple(result for result in results if isinstance(result, str)))


def _results(checks: Iterable[Check], probe: Probe) -> list[Finding | str]:
    """Returns the results of checks; an error in the user's code or data is one of them and ends its check."""
    results: list[Finding | str] = []
    for check in checks:
        try:
            results += check(probe)
        except Exception as error:
            log.info("The audit's check %s stopped.", check.__name__, exc_info=True)
            if has_ended := isinstance(error, tf.errors.ResourceExhaustedError):
                error = explain_pass(error, probe.state, "auditing", int(shards.batch_size(probe.rows)))
            results.append(failure(error))
            if has_ended:  # so would the other checks, after ten seconds each in which TensorFlow waits for memory
                break
    return results

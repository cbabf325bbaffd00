"""The audit: runs a list of checks of the user's code and data, and returns findings with remedies.

    result = trainer.audit(dataset)
    print(result)                       # findings that differ in their names alone share a line
    assert not result.findings

A check is a function from a `Probe` to findings. The probe runs one batch as a whole and in two halves, as two replicas
would, on any number of devices, and trains two steps; then it restores everything. A new check is one more function in
the list. This module does not know how a run goes.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import tensorflow as tf

from distloop.audit import checks, replica_checks
from distloop.audit.checks import Audit, Finding, Unchecked, failure
from distloop.audit.probe import Probe
from distloop.data import shards
from distloop.data.arrays import as_dataset, with_labels
from distloop.data.iterators import fresh_copy
from distloop.data.source import Data
from distloop.distributed import devices, workers
from distloop.log import log
from distloop.trainer import Trainer
from distloop.training.out_of_memory import explain_pass

Check = Callable[[Probe], Iterator[Finding | Unchecked]]

# The other checks need steps that run, so they wait until these find nothing.
FIRST_CHECKS: tuple[Check, ...] = (checks.created_variables, checks.unsaved_random_states, checks.labels)
CHECKS: tuple[Check, ...] = (
    checks.foreign_variables,
    checks.python_values,
    checks.variables_left_out,
    checks.training_argument,
    checks.identical_draws,
    replica_checks.dependence_on_replicas,
    replica_checks.drift,
    replica_checks.same_bits,
    checks.gradients,
)


def audit(trainer: Trainer, dataset: Data, y: Any = None) -> Audit:
    """Checks a trainer's model and data; changes neither. As `Trainer.audit`."""
    if workers.num_workers(trainer.strategy) > 1:
        raise ValueError("audit was called on several workers: call it in one process, without TF_CONFIG.")
    config = trainer.config
    data = as_dataset(with_labels(dataset, y), config.global_batch_size(trainer.strategy), config.seed)
    trainer.build(fresh_copy(data))
    results: list[Finding | Unchecked]
    with devices.preserved_random_state():
        probe = Probe(trainer.state, data, seed=config.seed, microbatches=config.first_microbatches)
        results = _results([checks.data_order], probe)
        obstacles = _results(FIRST_CHECKS, probe)
        results += obstacles or _results(CHECKS, probe)
    findings = dict.fromkeys(result for result in results if isinstance(result, Finding))  # each once, in order
    return Audit(tuple(findings), tuple(result.what for result in results if isinstance(result, Unchecked)))


def _results(checks: Iterable[Check], probe: Probe) -> list[Finding | Unchecked]:
    """Returns the results of checks; an error in the user's code or data is one of them and ends its check."""
    results: list[Finding | Unchecked] = []
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

"""What `fit` does in place of training: `--audit`, `--autotune_batch`, `--memory`.

    run_instead(trainer, read_arguments(train, evals, {}))      # returns if none of them is asked for

It does not know how any of them works.
"""

from typing import Protocol

from distloop.data.source import Data
from distloop.diagnostics import audit, memory_estimate, tuning
from distloop.diagnostics.findings import Audit
from distloop.keras_models.fit_arguments import FitData


class Verbs(tuning.Trainable, Protocol):
    """The part of a `Trainer` that is needed."""

    def audit(self, dataset: Data) -> Audit:
        """As for `Trainer`."""


def run_instead(trainer: Verbs, data: FitData) -> None:
    """Does what the settings ask for in place of training, and ends the process; returns if they ask for nothing.

    Args:
        trainer: of the call of `fit`.
        data: what it was given.

    Raises:
        SystemExit: with code 0, or 1 if an audit found mistakes or a step does not fit into memory.
    """
    if trainer.config.audit:
        audit.print_and_exit(trainer.audit(data.train))
    if trainer.config.autotune_batch:
        tuning.autotune_batch(trainer, data.train)
        raise SystemExit(0)
    if trainer.config.memory:
        memory_estimate.print_and_exit(trainer, data)

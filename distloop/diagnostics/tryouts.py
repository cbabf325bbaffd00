"""What `fit` does in place of training: `--audit`, `--autotune_batch`, `--memory`.

    run_instead(trainer, read_arguments(train, evals, {}))      # returns if none of them is asked for

It does not know how any of them works.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Protocol

import tensorflow as tf

from distloop.data.arrays import as_dataset
from distloop.data.opening import open_data
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
    config = trainer.config
    if not (config.audit or config.autotune_batch or config.memory):
        return
    data = _as_trained_on(data, config.global_batch_size(trainer.state.strategy), config.seed)
    if config.audit:
        audit.print_and_exit(trainer.audit(data.train))
    if config.autotune_batch:
        tuning.autotune_batch(trainer, data.train)
        raise SystemExit(0)
    if config.memory:
        memory_estimate.print_and_exit(trainer, data)


def _as_trained_on(data: FitData, batch_size: int, seed: int) -> FitData:
    """Returns data that gives the batches which `fit` would train on, without its arguments.

    Args:
        data: of the call.
        batch_size: of arrays, if the call gave none.
        seed: of the run.
    """
    train = as_dataset(data.train, data.batch_size or batch_size, seed)
    if data.map_batch is not None:
        train = _mapped(train, data.map_batch)
    return dataclasses.replace(data, train=train, map_batch=None)


def _mapped(data: Data, map_batch: Callable[..., Any]) -> Data:
    """Returns data with mapped batches: a dataset of a dataset, a function with the same arguments of a function."""
    if isinstance(data, tf.data.Dataset):
        mapped: tf.data.Dataset = open_data(data, 1, 0, map_batch=map_batch).dataset
        return mapped
    if not callable(data):
        return lambda: open_data(data, 1, 0, map_batch=map_batch).dataset

    @functools.wraps(data)
    def make(*context: Any) -> tf.data.Dataset:
        return open_data(lambda: data(*context), 1, 0, map_batch=map_batch).dataset

    return make

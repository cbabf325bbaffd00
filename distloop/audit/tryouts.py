"""Tryouts: `--audit`, `--autotune_batch` and `--memory` in place of training, and `--fast_dev_run`.

    run_instead(trainer, read_arguments(train, evals, {}))              # ends the process
    config = dry_settings(config, owner=trainer)                        # of a run in a temporary workdir
    check_dry_run(trainer, data, another_step, print)                   # after its step: restores, predicts, exports

The trainer imports this module, and by it the part `audit`, where one of these settings is given.
"""

import dataclasses
import functools
import os
import shutil
import tempfile
import traceback
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from distloop.actions.evaluate import Evaluate
from distloop.audit import memory_estimate, tuning
from distloop.audit.audit import audit
from distloop.data.arrays import as_dataset
from distloop.data.opening import open_data
from distloop.data.source import Data
from distloop.distributed import collectives
from distloop.errors import first_line, user_line
from distloop.evaluation.prediction import DEFAULT_SIGNATURE
from distloop.keras_models.fit_arguments import FitData
from distloop.log import say
from distloop.model.saved_state import SavedState
from distloop.settings.config import Config
from distloop.trainer import Trainer


def run_instead(trainer: Trainer, data: FitData) -> None:
    """Runs the audit, the memory estimate or the batch search in place of a call of `fit`, and ends the process.

    Raises:
        SystemExit: with code 0, or 1 if an audit found mistakes or a step does not fit into memory.
    """
    config = trainer.config
    data = _as_trained_on(data, config.global_batch_size(trainer.strategy), config.seed)
    if config.audit:
        result = audit(trainer, data.train)
        count = len(result.findings)
        for line in [f"audit: {count} {'finding' if count == 1 else 'findings'}", *str(result).splitlines()]:
            say(line)
        raise SystemExit(1 if result.findings else 0)
    if config.autotune_batch:
        tuning.autotune_batch(trainer, data.train)
        raise SystemExit(0)
    memory_estimate.print_and_exit(trainer, data)


def _as_trained_on(data: FitData, batch_size: int, seed: int) -> FitData:
    """Returns data that gives the batches which `fit` would train on, without its arguments."""
    train = as_dataset(data.train, data.batch_size or batch_size, seed)
    if data.map_batch is not None:
        mapped = functools.partial(_mapped, train, data.map_batch)
        train = mapped() if isinstance(train, tf.data.Dataset) else mapped
    return dataclasses.replace(data, train=train, map_batch=None)


def _mapped(data: Data, map_batch: Callable[..., Any]) -> Any:
    return open_data(data, 1, 0, map_batch=map_batch).dataset


def dry_settings(config: Config, owner: object) -> Config:
    """Returns the settings of a dry run: evaluations of one batch, and a workdir that is removed with its owner."""
    directory = tempfile.mkdtemp(prefix="distloop_fast_dev_run_")
    weakref.finalize(owner, shutil.rmtree, directory, ignore_errors=True)
    return dataclasses.replace(config, workdir=directory, limit_eval_batches=1)


def export_path(path: str, config: Config, say: Callable[[str], None]) -> str:
    """Returns the path in a dry run's workdir that an export goes to, and says so if another one was given."""
    directory = os.path.join(config.workdir, "export")
    if os.path.dirname(path) == directory:
        return path
    say(f"fast_dev_run: {path!r} is not written; the export goes to a directory that is removed.")
    return os.path.join(directory, os.path.basename(os.path.normpath(path)))


def check_dry_run(
    trainer: Trainer,
    data: Data,
    evaluations: Sequence[Evaluate],
    another_step: Callable[[], object],
    say: Callable[[str], None],
) -> None:
    """Tries, after the step of a dry run, which was saved, what else a run may need: restore, predict, export.

    Args:
        trainer: of the run.
        data: that was trained on; it is predicted for, or else the first evaluation's that `predict_fn` takes.
        evaluations: of the run.
        another_step: trains one more step.
        say: prints a line for each step of the trial, done or not.

    Raises:
        RuntimeError: if a restored value is not the saved one.
        ValueError: from any of them.
    """

    def report(line: str) -> None:
        say(f"fast_dev_run: {line}")

    state = trainer.state
    report(f"step {int(state.step)} trained, all evaluations measured on a batch")
    if collectives.num_workers(trainer.strategy) > 1:
        report("saved; not restored, as other workers do not see the directory")
    else:
        saved_state = SavedState(state)
        saved = saved_state.snapshot()
        another_step()
        trainer.restore()
        restored = saved_state.snapshot()
        if different := [name for name in saved if _bytes(saved[name]) != _bytes(restored[name])]:
            raise RuntimeError(f"{', '.join(different[:3])} came back from a checkpoint with other values.")
        report(f"saved, took another step, restored: all {len(saved)} values are as they were")
    predict_fn = state.spec.predict_fn
    if predict_fn is None:
        report("nothing predicted or exported: ModelSpec has no predict_fn")
        return
    for name in predict_fn if isinstance(predict_fn, Mapping) else [DEFAULT_SIGNATURE]:
        for rows in [data, *(evaluation.data for evaluation in evaluations)]:
            try:
                outputs = next(trainer.stream_predictions(rows, signature=name))
                break
            except Exception as error:  # batches to train on may lack what predict_fn reads
                where = f" at {line}" if (line := user_line(traceback.extract_tb(error.__traceback__))) else ""
                reason = f"{type(error).__name__}{where}: {first_line(error)}"
        else:
            report(f"not tried: {name} and the export, as predict_fn takes no batch of fit's data ({reason})")
            return
        report(f"predicted {len(tf.nest.flatten(outputs)[0])} rows with {name}")
    trainer.export(os.path.join(trainer.config.workdir, "export", "dry_run"))
    report("exported, and read the export back")


def _bytes(value: tf.Tensor) -> bytes:
    return bytes(tf.io.serialize_tensor(value).numpy())

"""The dry run, `--fast_dev_run`: every part of a run once, in a temporary workdir.

    config = dry_run.settings(config, owner=trainer)
    for line in dry_run.check(trainer, data, another_step):     # after a step: restores, predicts, exports
        print(line)

This module does not know how the parts work.
"""

import dataclasses
import os
import shutil
import tempfile
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import tensorflow as tf

from distloop.config import Config
from distloop.data.source import Data
from distloop.distributed import workers
from distloop.errors import first_line, user_line
from distloop.training.prediction import DEFAULT_SIGNATURE
from distloop.training.saved_state import SavedState
from distloop.training.state import TrainState
from distloop.urls import expand


def settings(config: Config, owner: object) -> Config:
    """Returns the settings; of a dry run: evaluations of one batch, and a workdir that is removed with its owner."""
    if not config.fast_dev_run:
        return config
    directory = tempfile.mkdtemp(prefix="distloop_fast_dev_run_")
    weakref.finalize(owner, shutil.rmtree, directory, ignore_errors=True)
    return dataclasses.replace(config, workdir=directory, limit_eval_batches=1)


def export_path(path: str, config: Config, say: Callable[[str], None]) -> str:
    """Returns the path that an export goes to; in a dry run one in its workdir, and says so if it is another."""
    path, directory = expand(path), os.path.join(config.workdir, "export")
    if not config.fast_dev_run or os.path.dirname(path) == directory:
        return path
    say(f"fast_dev_run: {path!r} is not written; the export goes to a directory that is removed.")
    return os.path.join(directory, os.path.basename(os.path.normpath(path)))


class Verbs(Protocol):
    """The part of `Trainer` that a dry run tries."""

    config: Config
    state: TrainState
    strategy: tf.distribute.Strategy

    def restore(self) -> None:
        """As for `Trainer`."""

    def stream_predictions(self, dataset: Data, *, signature: str) -> Iterator[Any]:
        """As for `Trainer`."""

    def export(self, path: str) -> None:
        """As for `Trainer`."""


def check(trainer: Verbs, datasets: Sequence[Data], another_step: Callable[[], object]) -> Iterator[str]:
    """Tries, after the step of a dry run, which was saved, what else a run may need: restore, predict, export.

    Args:
        trainer: whose verbs to try.
        datasets: to predict for; the first whose batches `predict_fn` takes.
        another_step: trains one more step.

    Yields:
        A line for each part, tried or not; none if the run is no dry run.

    Raises:
        RuntimeError: if a restored value is not the saved one.
        ValueError: from any part.
    """
    if not trainer.config.fast_dev_run:
        return
    state = trainer.state
    yield f"step {int(state.step)} trained, all evaluations measured on a batch"
    if workers.num_workers(trainer.strategy) > 1:
        yield "saved; not restored, as other workers do not see the directory"
    else:
        saved_state = SavedState(state)
        saved = saved_state.snapshot()
        another_step()
        trainer.restore()
        restored = saved_state.snapshot()
        if different := [name for name in saved if _bytes(saved[name]) != _bytes(restored[name])]:
            raise RuntimeError(f"{', '.join(different[:3])} came back from a checkpoint other than they were saved.")
        yield f"saved, took another step, restored: all {len(saved)} values are as they were"
    predict_fn = state.spec.predict_fn
    if predict_fn is None:
        yield "nothing predicted or exported: ModelSpec has no predict_fn"
        return
    for name in predict_fn if isinstance(predict_fn, Mapping) else [DEFAULT_SIGNATURE]:
        for data in datasets:
            try:
                outputs = next(trainer.stream_predictions(data, signature=name))
                break
            except Exception as error:  # batches to train on may lack what predict_fn reads
                where = f" at {line}" if (line := user_line(traceback.extract_tb(error.__traceback__))) else ""
                reason = f"{type(error).__name__}{where}: {first_line(error)}"
        else:
            yield f"not tried: {name} and the export, as predict_fn takes no batch of fit's data ({reason})"
            return
        yield f"predicted {len(tf.nest.flatten(outputs)[0])} rows with {name}"
    trainer.export(os.path.join(trainer.config.workdir, "export", "dry_run"))
    yield "exported, and read the export back"


def _bytes(value: tf.Tensor) -> bytes:
    return bytes(tf.io.serialize_tensor(value).numpy())

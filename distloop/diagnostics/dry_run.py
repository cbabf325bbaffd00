"""The dry run, `--fast_dev_run`: every part of a run once, in a temporary workdir.

    config = dry_run.settings(config, owner=trainer)
    for line in dry_run.check(state, ...):                 # after a step of training: restores, predicts, exports
        print(line)

This module does not know how the parts work.
"""

import dataclasses
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator

import tensorflow as tf

from distloop.config import Config
from distloop.training.saved_state import SavedState
from distloop.training.state import TrainState


def settings(config: Config, owner: object) -> Config:
    """Returns the settings of a dry run: evaluations of one batch, and a workdir that is removed with its owner."""
    directory = tempfile.mkdtemp(prefix="distloop_fast_dev_run_")
    weakref.finalize(owner, shutil.rmtree, directory, ignore_errors=True)
    return dataclasses.replace(config, workdir=directory, limit_eval_batches=1)


def export_path(path: str, workdir: str) -> str:
    """Returns the path in a dry run's workdir that an export to `path` goes to; `path` itself if it is there."""
    if os.path.dirname(path) == os.path.join(workdir, "export"):
        return path
    return os.path.join(workdir, "export", os.path.basename(os.path.normpath(path)))


def check(
    state: TrainState,
    *,
    train: Callable[[], object],
    restore: Callable[[], None] | None,
    predict: dict[str, Callable[[], int]],
    export: Callable[[], None],
) -> Iterator[str]:
    """Tries, after a step that was saved, what else a run may need.

    Args:
        state: what is trained.
        train: takes one more step.
        restore: restores the last save; None if other workers cannot see the directory.
        predict: by signature, predicts a batch and returns the number of its rows.
        export: writes and reads back an export.

    Yields:
        A line for each part.

    Raises:
        RuntimeError: if a restored value is not the saved one.
        ValueError: from any part.
    """
    if restore is None:
        yield "saved; not restored, as other workers do not see the directory"
    else:
        saved_state = SavedState(state)
        saved = saved_state.snapshot()
        train()
        restore()
        restored = saved_state.snapshot()
        if different := [name for name in saved if _bytes(saved[name]) != _bytes(restored[name])]:
            raise RuntimeError(f"{', '.join(different[:3])} came back from a checkpoint other than they were saved.")
        yield f"saved, took another step, restored: all {len(saved)} values are as they were"
    for name, predict_one in predict.items():
        yield f"predicted {predict_one()} rows with {name}"
    if predict:
        export()
        yield "exported, and read the export back"
    else:
        yield "nothing predicted or exported: ModelSpec has no predict_fn"


def _bytes(value: tf.Tensor) -> bytes:
    return bytes(tf.io.serialize_tensor(value).numpy())

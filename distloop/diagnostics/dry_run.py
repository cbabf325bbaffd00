"""Owns the rehearsal of a run, `--fast_dev_run`: every part of it once, in a directory of its own that is removed.

    settings = rehearsal.settings(config, owner=trainer)       # with a temporary workdir
    for line in rehearsal.check(state, ...):                   # after a step of training: restore, predict, export
        print(line)

It does not know how the parts do what they do.
"""

import dataclasses
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator

import tensorflow as tf

from distloop.config import Config
from distloop.training.state import TrainState


def settings(config: Config, owner: object) -> Config:
    """Makes the settings of a rehearsal: a workdir that is removed with its owner, and evaluations of one batch."""
    directory = tempfile.mkdtemp(prefix="distloop_fast_dev_run_")
    weakref.finalize(owner, shutil.rmtree, directory, ignore_errors=True)
    return dataclasses.replace(config, workdir=directory, limit_eval_batches=1)


def aside(path: str, workdir: str) -> str:
    """Gives the path inside a rehearsal's workdir that stands for one elsewhere."""
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
        restore: goes back to what was saved; None: nobody else sees the directory.
        predict: by signature, predicts for a batch and tells how many rows it gave.
        export: writes what can be served.

    Yields:
        A line for each part.

    Raises:
        RuntimeError: if what was restored is not what was saved.
        ValueError: whatever a part says.
    """
    if restore is None:
        yield "saved; not restored, as other workers do not see the directory"
    else:
        saved = state.snapshot()
        train()
        restore()
        restored = state.snapshot()
        if different := [name for name in saved if _bits(saved[name]) != _bits(restored[name])]:
            raise RuntimeError(f"{', '.join(different[:3])} came back from a checkpoint other than they were saved.")
        yield f"saved, took another step, restored: all {len(saved)} values are as they were"
    for name, predict_one in predict.items():
        yield f"predicted {predict_one()} rows with {name}"
    if predict:
        export()
        yield "exported, and read the export back"
    else:
        yield "nothing predicted or exported: ModelSpec has no predict_fn"


def _bits(value: tf.Tensor) -> bytes:
    return bytes(tf.io.serialize_tensor(value).numpy())

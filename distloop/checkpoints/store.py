"""Checkpoint store: writes, verifies and loads checkpoints; none is deleted before its successor is whole.

    checkpoints = Checkpoints("run/checkpoints", keep=3)
    checkpoints.save(500, {"model/dense/kernel": tensor, ...}, {"replicas": 2})      # in the background
    checkpoints.wait()
    saved = checkpoints.load_newest()                                                # Saved(path, step, values, notes)

A checkpoint is a directory named by its step. It holds `manifest.json`, and `variables.index` and `variables.data-*` in
TensorFlow's own format, which `tf.train.load_checkpoint(".../variables")` reads by name. It is written to a temporary
path and renamed when every file is on the disk, so it is whole or absent. This module does not know what the values
mean.
"""

import hashlib
import json
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

import tensorflow as tf
from absl import logging

from distloop.atomic_files import delete, leftovers, remove, replacing
from distloop.distributed.devices import HOST

_FORMAT = 1
_MANIFEST, _VARIABLES, _BEST = "manifest.json", "variables", "best.json"


class Saved(NamedTuple):
    """The contents of a checkpoint."""

    path: str
    step: int
    values: dict[str, tf.Tensor]
    notes: dict[str, Any]


class DamagedError(ValueError):
    """A checkpoint is missing or differs from what was written; the message says how."""


class Checkpoints:
    """The checkpoints of a run, in one directory."""

    def __init__(self, directory: str, keep: int = 3):
        """Touches no disk.

        Args:
            directory: created at the first save.
            keep: number of the newest checkpoints to keep, at least 1.
        """
        self._directory = directory
        self._keep = keep
        self._writer: threading.Thread | None = None
        self._failure: Exception | None = None  # of the last save

    @property
    def steps(self) -> list[int]:
        """The steps of all checkpoints, damaged ones included, in ascending order."""
        names = os.listdir(self._directory) if os.path.isdir(self._directory) else []
        return sorted(int(name) for name in names if name.isdigit())

    @property
    def best_steps(self) -> dict[str, list[int]]:
        """The steps at which each metric was best, which are kept, by metric; read from `best.json`."""
        try:
            with open(self._path(_BEST), encoding="utf-8") as file:
                return {str(metric): [int(step) for step in steps] for metric, steps in json.load(file).items()}
        except (OSError, ValueError, AttributeError, TypeError):
            return {}

    def save(
        self,
        step: int,
        values: Mapping[str, tf.Tensor],
        notes: Mapping[str, Any],
        best_steps: Mapping[str, list[int]] | None = None,
    ) -> None:
        """Writes a checkpoint in the background, after the previous one.

        Args:
            step: of the values; an existing checkpoint of this step is replaced.
            values: tensors that will not change.
            notes: a dict that JSON can represent.
            best_steps: the value of the property once the checkpoint is whole; None keeps the current one.
        """
        self._join()
        notes = json.loads(json.dumps(notes))  # a copy, with the checksum of what the file will hold

        def write() -> None:
            try:
                _write(self._path(step), step, values, notes)
                self._failure = None
                if best_steps and best_steps != self.best_steps:
                    self._write_best(best_steps)
                self._prune()
            except Exception as error:  # a full disk raises many kinds of errors
                self._failure = error
                logging.error(
                    "The checkpoint of step %d could not be written (%s); training goes on, and earlier ones are kept.",
                    step,
                    first_line(error),
                )

        self._writer = threading.Thread(target=write, name="distloop-checkpoint")
        self._writer.start()

    def wait(self) -> None:
        """Waits until the current save has ended.

        Raises:
            OSError: if the last save failed.
        """
        self._join()
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise OSError(
                f"The last checkpoint could not be written to {self._directory!r} ({first_line(failure)}): make room "
                "or give a directory that you may write to, and run the same command again from the one before it."
            ) from failure

    def load_newest(self, is_wanted: Callable[[Saved], bool] = lambda saved: True) -> Saved | None:
        """Loads the newest checkpoint that is whole; logs the damaged ones that it passes.

        Args:
            is_wanted: whether to load a checkpoint. Newer ones that are not wanted are renamed to `<step>.diverged`,
                and deleted after the next save.

        Returns:
            The checkpoint; None if there is none, or none is wanted.

        Raises:
            DamagedError: if there are checkpoints, but none is whole.
        """
        self._join()
        self._restore_replaced()
        steps = self.steps
        num_whole = 0
        for step in reversed(steps):
            path = self._path(step)
            try:
                saved = load(path)
            except DamagedError as error:
                logging.error("%s Trying the one before it.", error)
                continue
            num_whole += 1
            if is_wanted(saved):
                return saved
            os.rename(path, f"{path}.diverged")
        if steps and not num_whole:
            raise DamagedError(
                f"None of the {len(steps)} checkpoints in {self._directory!r} is whole; nothing was restored: give "
                "another workdir to start anew, or put a copy of one there."
            )
        return None

    def load(self, step: int) -> Saved:
        """Loads the checkpoint of a step that another worker has chosen.

        Raises:
            DamagedError: if it is missing or damaged.
        """
        path = self._path(step)
        if not os.path.isdir(path):
            raise DamagedError(
                f"The checkpoint {path!r} is not there, but the chief has it: give a workdir on a disk that all "
                "workers share."
            )
        return load(path)

    def follow(self, done: Collection[int], poll_secs: float, timeout_secs: float) -> Iterator[Saved]:
        """Yields each checkpoint that another process writes, until the last one of its run.

        Checkpoints that are deleted before they are read are skipped: the run keeps its newest only.

        Args:
            done: steps to skip.
            poll_secs: time between two looks.
            timeout_secs: the longest time to wait for a checkpoint; 0: without limit.

        Raises:
            TimeoutError: if no checkpoint came in that time.
        """
        seen = set(done)
        last_time = time.monotonic()
        while True:
            new = [step for step in self.steps if step not in seen]
            for step in new:
                seen.add(step)
                last_time = time.monotonic()
                try:
                    yield load(self._path(step))
                except DamagedError as error:
                    if step in self.steps:
                        logging.error("%s It is skipped.", error)
            if not new:
                if self._is_complete():
                    return
                if timeout_secs and time.monotonic() - last_time > timeout_secs:
                    raise TimeoutError(
                        f"No checkpoint came to {self._directory!r} for {timeout_secs:g} seconds, and the newest is "
                        "not the last of its run: has that ended? Wait longer with timeout_secs."
                    )
                time.sleep(poll_secs)

    def _is_complete(self) -> bool:
        """Returns whether the newest checkpoint is the last one of its run."""
        try:
            newest = self.steps[-1]
            notes = _read_manifest(self._path(newest))["notes"]
        except (IndexError, OSError, ValueError, KeyError):
            return False
        return bool(notes["stop_reason"]) or newest >= notes["until"]

    def _path(self, name: int | str) -> str:
        return os.path.join(self._directory, str(name))

    def _join(self) -> None:
        if self._writer is not None:
            self._writer.join()
            self._writer = None

    def _write_best(self, best_steps: Mapping[str, list[int]]) -> None:
        path = self._path(_BEST)
        with replacing(path) as temporary, open(temporary, "w", encoding="utf-8") as file:
            json.dump(dict(best_steps), file, indent=1)

    def _restore_replaced(self) -> None:
        """Renames back a checkpoint whose process was killed while it replaced it."""
        for leftover in leftovers(self._directory):
            if leftover.is_old and not os.path.exists(leftover.target):
                os.rename(leftover.path, leftover.target)

    def _prune(self) -> None:
        """Deletes old checkpoints, and temporary files of processes that were killed."""
        best = {step for steps in self.best_steps.values() for step in steps}
        for step in self.steps[: -self._keep]:
            if step not in best:
                delete(self._path(step))
        diverged = [name for name in os.listdir(self._directory) if name.endswith(".diverged")]
        for path in [*(leftover.path for leftover in leftovers(self._directory)), *map(self._path, diverged)]:
            remove(path)


def in_workdir(workdir: str, keep: int = 3) -> Checkpoints:
    """Returns the checkpoints of a run.

    Args:
        workdir: of the run.
        keep: as for `Checkpoints`.
    """
    return Checkpoints(os.path.join(workdir, "checkpoints"), keep)


def is_checkpoint(path: str) -> bool:
    """Returns whether a path is the directory of one checkpoint."""
    return os.path.exists(os.path.join(path, _MANIFEST))


def load(path: str) -> Saved:
    """Loads a checkpoint and verifies every byte of it.

    Args:
        path: its directory.

    Raises:
        DamagedError: if it differs from what was written.
    """
    try:
        manifest = _read_manifest(path)
        entries = manifest["entries"]
        with tf.device(HOST):
            tensors = tf.raw_ops.RestoreV2(
                prefix=os.path.join(path, _VARIABLES),
                tensor_names=list(entries),
                shape_and_slices=[""] * len(entries),
                dtypes=[tf.as_dtype(entry["dtype"]) for entry in entries.values()],
            )
        return Saved(path, manifest["step"], dict(zip(entries, tensors, strict=True)), manifest["notes"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, tf.errors.OpError) as error:
        raise DamagedError(f"The checkpoint {path!r} is damaged ({first_line(error)}).") from error


def _read_manifest(path: str) -> dict[str, Any]:
    with open(os.path.join(path, _MANIFEST), "rb") as file:
        manifest = json.loads(file.read())
    if manifest.pop("checksum") != _checksum(manifest):
        raise ValueError(f"{_MANIFEST} was altered")
    if manifest["format"] != _FORMAT:
        raise ValueError(f"its format is {manifest['format']}, and this version of distloop reads {_FORMAT}")
    for name, size in manifest["files"].items():
        actual_size = os.path.getsize(os.path.join(path, name))
        if actual_size != size:
            raise ValueError(f"{name} has {actual_size} bytes instead of {size}")
    return manifest


def _write(path: str, step: int, values: Mapping[str, tf.Tensor], notes: Mapping[str, Any]) -> None:
    """Writes a checkpoint whole or not at all."""
    with replacing(path) as temporary:
        os.makedirs(temporary)
        with tf.device(HOST):
            tf.raw_ops.SaveV2(
                prefix=os.path.join(temporary, _VARIABLES),
                tensor_names=list(values),
                shape_and_slices=[""] * len(values),
                tensors=list(values.values()),
            )
        manifest = {
            "format": _FORMAT,
            "step": step,
            "entries": {name: {"shape": list(v.shape), "dtype": v.dtype.name} for name, v in values.items()},
            "files": {name: os.path.getsize(os.path.join(temporary, name)) for name in sorted(os.listdir(temporary))},
            "notes": dict(notes),
        }
        with open(os.path.join(temporary, _MANIFEST), "w", encoding="utf-8") as file:
            file.write(json.dumps({**manifest, "checksum": _checksum(manifest)}, indent=1))


def _checksum(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def first_line(error: Exception) -> str:
    """Returns the first line of an error's message, TensorFlow's or any other; its type's name if it has none."""
    message = error.message if isinstance(error, tf.errors.OpError) else str(error)
    return (message.strip().splitlines() or [type(error).__name__])[0][:200].rstrip(" .:")

"""Checkpoint store: the checkpoints of a run, none of which is deleted before its successor is complete.

    checkpoints = Checkpoints("run/checkpoints", keep=3)
    checkpoints.save(500, {"model/dense/kernel": tensor, ...}, {"replicas": 2})      # in the background
    checkpoints.wait()
    saved = checkpoints.load_newest()                                              # Saved(path, step, values, metadata)

A checkpoint is a directory named by its step. It is written to a temporary path and renamed when every file is on the
disk, so it is complete or absent. The one that was saved last has the largest step: later ones, of a run that has gone
back, are renamed before. This module does not know what the values mean; see `checkpoint` for the files.
"""

import contextlib
import itertools
import json
import os
import re
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

import tensorflow as tf

from distloop.atomic_files import delete, make_directory, open_at_once, put_back, remove_leftovers, replacing, sync
from distloop.checkpoints.checkpoint import DamagedError, Saved, load, patiently, read_manifest, write_files
from distloop.errors import first_line
from distloop.log import log
from distloop.monitoring.timing import SaveTimes
from distloop.workdir.records import as_best_steps, parse_json

BEST_FILE = "best.json"
_STEP = re.compile(r"0|[1-9][0-9]{0,17}")
# Ends of the names of checkpoints later than the one that a run goes on from.
_ABANDONED, _DIVERGED = "abandoned", "diverged"

_CHECKED_AGAIN = 3  # of the newest checkpoints after each save; a process checks others once
_Best = Mapping[str, list[int]]  # steps by metric
Watch = Callable[[str], contextlib.AbstractContextManager[Any]]


class _Seen(NamedTuple):
    """What was found when a checkpoint was checked."""

    files: list[tuple[str, int, int]]  # `_sizes_and_times`
    is_complete: bool
    stays: bool  # whether it is never deleted


class Checkpoints:
    """The checkpoints of a run.

    Attributes:
        directory: where they are.
        seen: what this process has found when it checked each one last, by step.
    """

    def __init__(
        self,
        directory: str,
        keep: int = 3,
        watch: Watch = contextlib.nullcontext,
        verify: Callable[[], None] = lambda: None,
        times: SaveTimes | None = None,
    ):
        """Touches no disk.

        Args:
            directory: created at the first save.
            keep: number of the newest checkpoints to keep.
            watch: called with what is done to the disk; its context is entered meanwhile.
            verify: called before each rename; raises if this process may no longer write.
            times: gets `write`, of the last checkpoint.
        """
        self.directory = directory
        self._keep = keep
        self._watch, self._verify = watch, verify
        self._times = times or SaveTimes()
        self._writer: threading.Thread | None = None
        self._failure: Exception | None = None  # of the last save
        self.seen: dict[int, _Seen] = {}

    @property
    def steps(self) -> list[int]:
        """The steps of all checkpoints, damaged ones included, in ascending order.

        Raises:
            OSError: if the directory cannot be read.
        """

        def read() -> list[int]:
            with os.scandir(self.directory) as entries:
                return sorted(int(entry.name) for entry in entries if _STEP.fullmatch(entry.name) and entry.is_dir())

        try:
            return patiently(read, self.directory)
        except (FileNotFoundError, NotADirectoryError):
            return []

    @property
    def newest_complete(self) -> int:
        """The step of the newest checkpoint whose files are there; the bytes of its values are not read. -1: none.

        Raises:
            OSError: if the directory or a manifest cannot be read.
        """
        return next((step for step in reversed(self.steps) if _check(self._path(step), step).is_complete), -1)

    @property
    def best_steps(self) -> dict[str, list[int]]:
        """The steps at which each metric was best, which are kept, by metric; read from `best.json`.

        Raises:
            OSError: if the file cannot be read.
        """

        def read() -> dict[str, list[int]]:
            with open_at_once(self._path(BEST_FILE)) as file:
                return parse_json(file.read(), as_best_steps)

        try:
            return patiently(read, self._path(BEST_FILE))
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            return {}
        except ValueError as error:
            log.error("%s is damaged (%s): the best ones that it listed count as others.", self._path(BEST_FILE), error)
            return {}

    def save(
        self,
        step: int,
        values: Mapping[str, tf.Tensor],
        metadata: Mapping[str, Any],
        best_steps: Mapping[str, list[int]] | None = None,
    ) -> None:
        """Writes a checkpoint in the background, after the previous one.

        Args:
            step: of the values; an existing checkpoint of this step is replaced.
            values: tensors that will not change.
            metadata: a dict that JSON can represent; a checkpoint in which "stays" is true is never deleted.
            best_steps: by metric, the steps to keep once the checkpoint is complete; those of other metrics stay.
        """
        self.join()
        metadata = json.loads(json.dumps(metadata))  # a copy, with the checksum of what the file will hold

        def write() -> None:
            began_at, self._failure = time.monotonic(), None
            try:
                with self._watch(f"saving the checkpoint of step {step}"):
                    self._write(step, values, metadata, best_steps or {})
            except Exception as error:  # a full disk raises many kinds of errors
                self._failure = error
                sentence = "The checkpoint of step %d could not be written (%s); training goes on; earlier ones stay."
                log.error(sentence, step, first_line(error))
                return
            self._times.record(write=time.monotonic() - began_at)
            try:
                with self._watch("deleting old checkpoints"):
                    self._prune()
            except Exception as error:
                log.warning("Old checkpoints could not be deleted (%s); the next save does it.", first_line(error))

        self._writer = threading.Thread(target=write, name="distloop-checkpoint")
        self._writer.start()

    def wait(self) -> None:
        """Waits until the current save has ended.

        Raises:
            OSError: if the last save failed.
        """
        self.join()
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise OSError(
                f"The last checkpoint could not be written to {self.directory!r} ({first_line(failure)}): make room "
                "or give a directory that you may write to, and run the same command again from the one before it."
            ) from failure

    def load_newest(self, is_wanted: Callable[[Saved], bool] = lambda saved: True) -> Saved | None:
        """Loads the newest checkpoint that is complete and wanted, if any; logs the damaged ones on its way.

        Raises:
            DamagedError: if there are checkpoints, but none is complete.
            OSError: if one cannot be read, though it may be complete.
        """
        self.join()
        put_back(self.directory)
        steps, num_complete = self.steps, 0
        for step in reversed(steps):
            try:
                saved = self._load(step)
            except DamagedError as error:
                log.error("%s Trying the one before it.", error)
                continue
            num_complete += 1
            if is_wanted(saved):
                return saved
        if steps and not num_complete:
            which = f"None of the {len(steps)} checkpoints in {self.directory!r} is complete"
            which = which if len(steps) > 1 else f"The only checkpoint in {self.directory!r} is damaged"
            raise DamagedError(
                f"{which}; nothing was restored: give another workdir to start anew, or put a copy of one there."
            )
        return None

    def load(self, step: int) -> Saved:
        """Loads the checkpoint of a step that another worker has chosen.

        Raises:
            DamagedError: if it is missing or damaged.
            OSError: if it cannot be read.
        """
        path = self._path(step)
        if not os.path.isdir(path):
            raise DamagedError(
                f"The checkpoint {path!r} is not there, but the chief has it: give a workdir on a disk that all "
                "workers share."
            )
        return self._load(step)

    def drop_later(self, step: int) -> None:
        """Renames the checkpoints after a step, from which a run diverged, to `<step>.diverged`; a save deletes them.

        Raises:
            OSError: if one cannot be renamed.
        """
        self._rename_later(step, _DIVERGED)

    def _path(self, name: int | str) -> str:
        return os.path.join(self.directory, str(name))

    def join(self) -> None:
        """Waits until the current save has ended, well or not."""
        if self._writer is not None:
            self._writer.join()
            self._writer = None

    def _load(self, step: int) -> Saved:
        saved = load(self._path(step))
        if saved.step != step:
            raise DamagedError(f"The checkpoint {saved.path!r} is damaged (it holds step {saved.step}).")
        return saved

    def _write(self, step: int, values: Mapping[str, tf.Tensor], metadata: Mapping[str, Any], best: _Best) -> None:
        """Writes a checkpoint atomically, and the steps of the best ones that are there."""
        self._verify()
        make_directory(self.directory)
        remove_leftovers(self.directory)
        if os.path.isdir(self._path(step)) and _check(self._path(step), step).stays:
            metadata = {**metadata, "stays": True}  # also if it is saved again without the setting
        with replacing(self._path(step), verify=self._verify) as temporary:
            write_files(temporary, step, values, metadata)
            self._rename_later(step, _ABANDONED)
        self.seen[step] = _Seen(_sizes_and_times(self._path(step)), True, bool(metadata.get("stays")))
        listed = self.best_steps
        best = _best_there({**listed, **best}, listed, self.steps)
        if best != listed:
            path = self._path(BEST_FILE)
            with replacing(path, verify=self._verify) as name, open(name, "w", encoding="utf-8") as file:
                json.dump(best, file, indent=1)

    def _rename_later(self, step: int, end: str) -> None:
        """Renames the checkpoints after a step to `<step>.<end>`, so that no run goes on from them."""
        later = [later for later in self.steps if later > step]
        for path in map(self._path, later):  # the newest last: until then a killed process has changed nothing
            names = itertools.chain([f"{path}.{end}"], (f"{path}.{end}-{i}" for i in itertools.count(2)))
            self._verify()
            os.rename(path, next(name for name in names if not os.path.lexists(name)))
        if later:
            sync(self.directory)
            sentence = "The checkpoints of steps %s are renamed to <step>.%s: the run has gone back to an earlier one."
            log.warning(sentence, ", ".join(map(str, later)), end)

    def _prune(self) -> None:
        """Deletes the superfluous checkpoints, and those of which the run diverged."""
        for path in itertools.chain(superfluous(self, self._keep), set_aside(self.directory, _DIVERGED)):
            delete(path, verify=self._verify)


def _best_there(wanted: _Best, listed: _Best, steps: Collection[int]) -> dict[str, list[int]]:
    """Returns the best steps that are there: in place of one that could not be written, one that was listed before."""
    ranked = {metric: dict.fromkeys([*best, *listed.get(metric, [])]) for metric, best in wanted.items()}
    return {metric: [step for step in ranked[metric] if step in steps][: len(best)] for metric, best in wanted.items()}


def in_workdir(workdir: str, keep: int = 3, **settings: Any) -> Checkpoints:
    """Returns the checkpoints of a run; the settings are those of `Checkpoints`."""
    return Checkpoints(os.path.join(workdir, "checkpoints"), keep, **settings)


def superfluous(checkpoints: Checkpoints, keep: int) -> Iterator[str]:
    """Yields the paths of the checkpoints that a run no longer needs.

    It needs the `keep` newest complete ones, the damaged later ones, the best, and those that stay.

    Raises:
        OSError: if the directory or a manifest cannot be read.
    """
    best = {step for steps in checkpoints.best_steps.values() for step in steps}
    num_complete, seen = 0, checkpoints.seen
    for i, step in enumerate(reversed(checkpoints.steps)):
        path = os.path.join(checkpoints.directory, str(step))
        if (is_old := num_complete == keep) and step in best:
            continue
        files = _sizes_and_times(path) if i < _CHECKED_AGAIN or step not in seen else seen[step].files
        if step not in seen or seen[step].files != files:
            seen[step] = _check(path, step)
        num_complete += not is_old and seen[step].is_complete
        if is_old and not seen[step].stays:
            del seen[step]
            yield path


def set_aside(directory: str, *ends: str) -> list[str]:
    """Returns the paths of checkpoints that were renamed, to one of some ends or any, as the run has gone back.

    Raises:
        OSError: if the directory cannot be read.
    """
    pattern = rf"({_STEP.pattern})\.({'|'.join(ends or (_ABANDONED, _DIVERGED))})(-\d+)?"
    names = os.listdir(directory) if os.path.isdir(directory) else []
    return [os.path.join(directory, name) for name in names if re.fullmatch(pattern, name)]


def _sizes_and_times(path: str) -> list[tuple[str, int, int]]:
    """Returns the name, the bytes and the time of the last change (ns) of each file in a directory, if it is there."""
    try:
        with os.scandir(path) as entries:
            return sorted((entry.name, entry.stat().st_size, entry.stat().st_mtime_ns) for entry in entries)
    except OSError:  # `_check` says what that means
        return []


def _check(path: str, step: int) -> _Seen:
    """Checks whether a checkpoint has its files; the bytes of the values are not read."""
    files = _sizes_and_times(path)
    try:
        manifest = patiently(lambda: read_manifest(path), path)
    except DamagedError:
        return _Seen(files, is_complete=False, stays=False)
    return _Seen(files, manifest["step"] == step, stays=bool(manifest["notes"].get("stays")))

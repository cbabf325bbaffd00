"""Mirror: uploads the files of a run to its bucket, in a thread that training never waits for.

    mirror = Mirror(root, directory, verify=lease.look, keep=3)
    mirror.start()
    mirror.finish()         # the files that could not be uploaded; waits as long as anything comes through

A pass uploads what has changed since the last one, in this order: the rows and other files; the most urgent checkpoint,
its manifest last; `best.json`, once all that it lists is there; then old checkpoints are deleted. So rows are there up
to the step of every whole checkpoint, and nothing is deleted before its successor is whole. The checkpoint that is
being uploaded is held by hard links, so the run may delete its own as it always does.
"""

import contextlib
import itertools
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

from distloop.atomic_files import remove, replacing
from distloop.log import log
from distloop.monitoring.console import say
from distloop.monitoring.records import read_json
from distloop.monitoring.run_lock import LockLost
from distloop.remote import tree
from distloop.remote.directory import RemoteDirectory, RemoteError
from distloop.remote.tree import BEST, CHECKPOINTS, OLD, TOKEN, Stamp, Unit

PASS_SECS = 5.0  # between two passes, at least
STALLED_SECS = 300.0  # at the end of a run, without an answer
_LONGEST_PAUSE_SECS = 60.0  # between two passes while requests fail
_SHARE = 10  # a pass comes after this many times what the last one took for files that are uploaded whole
_PATIENT_SECS = 3.0  # that the end of a run waits without a word
_HELD = ".upload"  # what is being uploaded
_STATE = ".uploaded.json"  # the stamps of what is uploaded, for the next process on this machine


class Mirror:
    """The upload of one run."""

    def __init__(
        self,
        root: str,
        directory: RemoteDirectory,
        *,
        verify: Callable[[], None],
        keep: int,
        is_quiet: bool = False,
    ):
        """Reads what is uploaded already; sends no request.

        Args:
            root: the workdir on this machine.
            directory: where its files go.
            verify: called before a seal is written and before anything is deleted; raises if another process writes.
            keep: number of the newest checkpoints to keep.
            is_quiet: whether nothing is printed but warnings.
        """
        self._root, self._directory, self._verify, self._keep = root, directory, verify, keep
        self._say = (lambda text: None) if is_quiet else say
        self._uploaded: dict[str, list[Any]] = _read_state(root)
        self._must_prune = True
        self._is_ending = False
        self._wake, self._passed = threading.Event(), threading.Condition()
        self._thread = threading.Thread(target=self._run, name="distloop-upload", daemon=True)
        self.failure = ""  # of the last pass; empty: it succeeded
        self._is_late = False

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def finish(self) -> list[str]:
        """Uploads the rest, and ends the thread; waits as long as requests are answered.

        Returns:
            What could not be uploaded: the paths of files and directories.
        """
        self._directory.answered_at, self._is_ending = time.monotonic(), True
        self._directory.patience_secs = STALLED_SECS
        self._wake.set()
        self._thread.join(_PATIENT_SECS)
        if self._thread.is_alive():
            self._say(f"uploading to {self._directory.url}: {listed(self.missing())}")
        self._thread.join()
        return self.missing()

    def missing(self) -> list[str]:
        """Returns what is not uploaded as it is now: the paths of files and directories, checkpoints first."""
        files, units = tree.scan(self._root)
        late = [unit.path for unit in sorted(units, key=_urgency) if self._is_changed(unit.path, unit.files)]
        return late + [path for path, stamp in files.items() if self._is_changed(path, stamp)]

    def wait_for(self, steps: Collection[int] | None) -> None:
        """Waits until the checkpoints of some steps are uploaded, if the run has them; None: all, with `best.json`.

        Raises:
            OSError: if nothing is heard for too long.
        """
        paths = {f"{CHECKPOINTS}/{step}" for step in steps or ()}

        def late() -> list[str]:
            return [p for p in self.missing() if p in paths or (steps is None and p.startswith(f"{CHECKPOINTS}/"))]

        self._directory.answered_at = time.monotonic()
        self._wake.set()
        with self._passed:
            while waited_for := late():
                if self._is_stalled() or not self._thread.is_alive():
                    raise OSError(f"{waited_for[0]} could not be uploaded ({self.failure})")
                self._passed.wait(1.0)

    def _run(self) -> None:
        pause, num_failed = 0.0, 0
        while True:
            self._wake.wait(pause)
            self._wake.clear()
            began_at, is_ending = time.monotonic(), self._is_ending  # what is saved until then is in this pass
            try:
                has_more = self._pass()
                self._note_success()
                num_failed = 0
                pause = 0.0 if has_more else max(PASS_SECS, _SHARE * (time.monotonic() - began_at))
                if is_ending and not has_more and self._is_all_there():
                    return
            except LockLost as error:
                self.failure = str(error)
                return
            except Exception as error:  # a full disk too: the next pass tries again
                is_final = isinstance(error, RemoteError) and error.is_final
                if self._is_ending and (is_final or self._is_stalled()):
                    self.failure = str(error)
                    return
                self._note_failure(error)
                num_failed += 1
                pause = min(_LONGEST_PAUSE_SECS, PASS_SECS * 2 ** min(num_failed - 1, 10))
                pause = min(pause, PASS_SECS) if self._is_ending else pause
            finally:
                with self._passed:
                    self._passed.notify_all()

    def _pass(self) -> bool:
        """Uploads the files that have changed, and one checkpoint or export; returns whether there are more."""
        unit = _hold(self._root, self._most_urgent())
        files, _ = tree.scan(self._root)  # after the unit: these rows are at least those of its step
        best = files.pop(BEST, None)
        for path, stamp in files.items():
            if self._is_changed(path, stamp):
                self._upload_file(path, stamp)
        if unit is not None:
            self._must_prune = self._must_prune or unit.step >= 0
            self._upload_unit(unit)
        _, units = tree.scan(self._root)
        late = [unit for unit in units if self._is_changed(unit.path, unit.files)]
        self._note_lag([unit.step for unit in late if unit.step >= 0])
        if best is not None and self._is_changed(BEST, best):
            with open(os.path.join(self._root, BEST), "rb") as file:
                listed = tree.best_steps(file.read())
            if not listed & {unit.step for unit in late}:
                self._upload_file(BEST, best)
        steps = [unit.step for unit in units if unit.step >= 0]
        if self._must_prune and steps and max(steps) not in (unit.step for unit in late):
            self._prune(max(steps))
            self._must_prune = False
        if not late:
            self._delete_vanished()
        _write_state(self._root, self._uploaded)
        return bool(late)

    def _most_urgent(self) -> Unit | None:
        """Returns the unit to upload next: the newest checkpoint, then older ones, then exports."""
        _, units = tree.scan(self._root)
        return min((u for u in units if self._is_changed(u.path, u.files)), key=_urgency, default=None)

    def _upload_file(self, path: str, stamp: Stamp) -> None:
        """Uploads a file as it is at this moment: the run may write to it meanwhile."""
        held = os.path.join(self._root, _HELD, "file")
        os.makedirs(os.path.dirname(held), exist_ok=True)
        try:
            shutil.copyfile(os.path.join(self._root, path), held)
        except FileNotFoundError:
            return
        self._directory.upload(held, path)
        self._uploaded[path] = list(stamp)

    def _upload_unit(self, unit: Unit) -> None:
        """Uploads a directory, its seal last; one that is there already stays whole meanwhile, as `<unit>.old`."""
        sizes = self._directory.list(unit.path)
        if (seal := tree.seal_of(sizes)) is not None:
            tree.copy(self._directory, unit.path, f"{unit.path}{OLD}", sizes)
            self._verify()
            self._directory.delete(f"{unit.path}/{seal}")
        for name in unit.names:
            if name == unit.seal:
                self._verify()
            self._directory.upload(os.path.join(self._root, _HELD, unit.path, name), f"{unit.path}/{name}")
        self._uploaded[unit.path] = _as_stamps(unit.files)
        for name in sizes.keys() - unit.files.keys():
            self._directory.delete(f"{unit.path}/{name}")
        tree.delete(self._directory, f"{unit.path}{OLD}")

    def _prune(self, newest: int) -> None:
        """Deletes and renames checkpoints of the bucket as the store does those of a disk; the newest is whole there.

        Args:
            newest: the step of the newest checkpoint of the run.
        """
        self._verify()
        files = {f"{CHECKPOINTS}/{path}": size for path, size in self._directory.list(CHECKPOINTS).items()}
        units, sealed = tree.by_unit(files), tree.sealed_steps(files)
        if newest not in sealed:
            return
        kept = {*[step for step in sealed if step <= newest][-self._keep :], *self._best_steps()}
        for later in [step for step in reversed(sealed) if step > newest]:
            path = f"{CHECKPOINTS}/{later}"
            if not os.path.isdir(os.path.join(self._root, f"{path}.diverged")):
                names = itertools.chain([f"{path}.abandoned"], (f"{path}.abandoned-{i}" for i in itertools.count(2)))
                tree.copy(self._directory, path, next(name for name in names if name not in units), units[path])
        for path in units:
            step = Unit(path.removesuffix(OLD), "", {}).step
            if step >= 0 and (step not in kept or path.endswith(OLD) and step in sealed):
                tree.delete(self._directory, path)
                self._uploaded.pop(path, None)

    def _best_steps(self) -> Collection[int]:
        """Returns the best steps that the run lists, and those that the bucket lists still."""
        with contextlib.suppress(FileNotFoundError), open(os.path.join(self._root, BEST), "rb") as file:
            return tree.best_steps(file.read()) | tree.best_steps(self._directory.read(BEST))
        return tree.best_steps(self._directory.read(BEST))

    def _delete_vanished(self) -> None:
        """Deletes what the run has deleted since it was uploaded, but for checkpoints."""
        if not os.path.exists(os.path.join(self._root, TOKEN)):  # the directory itself is gone
            return
        for path in [path for path in self._uploaded if not os.path.exists(os.path.join(self._root, path))]:
            if not path.startswith(f"{CHECKPOINTS}/"):
                self._verify()
                is_file = isinstance(self._uploaded[path][0], int)
                self._directory.delete(path) if is_file else tree.delete(self._directory, path)
                del self._uploaded[path]

    def _is_changed(self, path: str, stamp: Stamp | dict[str, Stamp]) -> bool:
        return self._uploaded.get(path) != (_as_stamps(stamp) if isinstance(stamp, dict) else list(stamp))

    def _is_all_there(self) -> bool:
        """Returns whether the bucket has each uploaded file with its size; what it lacks is uploaded again.

        A request that was given up may have been done late.
        """
        sizes, is_all_there = self._directory.list(), True
        for path, stamp in list(self._uploaded.items()):
            files = {path: stamp[0]} if isinstance(stamp[0], int) else {f"{path}/{n}": size for n, size, _ in stamp}
            if any(sizes.get(name) != size for name, size in files.items()):
                is_all_there = False
                del self._uploaded[path]
        return is_all_there

    def _is_stalled(self) -> bool:
        return time.monotonic() - self._directory.answered_at > STALLED_SECS

    def _note_success(self) -> None:
        if self.failure:
            self._say(f"{self._directory.url} answers again: the upload goes on.")
        self.failure = ""

    def _note_failure(self, error: Exception) -> None:
        if not self.failure:
            log.warning(
                "%s does not take the upload (%s); training goes on, and the upload tries again.",
                *(self._directory.url, error),
            )
        self.failure = str(error)

    def _note_lag(self, late: list[int]) -> None:
        """Prints once that checkpoints come faster than they are uploaded, and once that the upload has caught up."""
        if len(late) > 1 and not self._is_late and not self._is_ending:
            self._is_late = True
            self._say(f"the upload to {self._directory.url} lags: the checkpoint of step {max(late)} is not there yet.")
        elif not late and self._is_late:
            self._is_late = False
            self._say(f"the upload to {self._directory.url} has caught up.")


def mark_uploaded(root: str, paths: Collection[str]) -> None:
    """Notes that some files of a workdir, which have just come from the bucket, are there.

    Args:
        root: the workdir on this machine.
        paths: of its files.
    """
    files, units = tree.scan(root)
    state: dict[str, list[Any]] = {path: list(stamp) for path, stamp in files.items() if path in paths}
    state |= {u.path: _as_stamps(u.files) for u in units if all(f"{u.path}/{name}" in paths for name in u.files)}
    _write_state(root, state)


def listed(paths: Sequence[str], most: int = 3) -> str:
    """Returns the first paths, and how many more there are."""
    return ", ".join(paths[:most]) + (f" and {len(paths) - most} more" if len(paths) > most else "")


def _write_state(root: str, state: dict[str, list[Any]]) -> None:
    with replacing(os.path.join(root, _STATE)) as temporary, open(temporary, "w", encoding="utf-8") as file:
        json.dump(state, file)


def _read_state(root: str) -> dict[str, list[Any]]:
    return read_json(os.path.join(root, _STATE), instead="all files are uploaded again") or {}


def _as_stamps(files: dict[str, Stamp]) -> list[Any]:
    """Returns the stamps of a unit as JSON holds them."""
    return [[name, *files[name]] for name in sorted(files)]


def _urgency(unit: Unit) -> tuple[int, str]:
    return -unit.step, unit.path


def _hold(root: str, unit: Unit | None) -> Unit | None:
    """Links the files of a unit, so that they stay when the run deletes it; None: it is not there any more."""
    held = os.path.join(root, _HELD)
    remove(held)
    if unit is None:
        return None
    try:
        for name in unit.files:
            target = os.path.join(held, unit.path, name)
            os.makedirs(os.path.dirname(target), exist_ok=True)
            _link(os.path.join(root, unit.path, name), target)
    except FileNotFoundError:
        return None
    return unit


def _link(path: str, target: str) -> None:
    try:
        os.link(path, target)
    except OSError as error:
        if isinstance(error, FileNotFoundError):
            raise
        shutil.copyfile(path, target)  # a file system without links

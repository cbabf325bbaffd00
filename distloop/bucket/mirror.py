"""Mirror: uploads the files of a run to its bucket, in a thread that training never waits for.

    mirror = Mirror(root, directory, verify=lease.look, keep=3)
    mirror.start()
    mirror.finish()         # the files that could not be uploaded; waits as long as anything comes through

A checkpoint that is whole is uploaded at once and before anything else: the rows up to it, its files, its manifest,
`best.json` once all that it lists is there; then old checkpoints are deleted. So rows are there up to the step of every
whole checkpoint, and nothing is deleted before its successor is whole. Other files follow, at intervals. A file that
the bucket refuses, while it takes others, is left out, and is tried again when it has changed, and at the end.
"""

import contextlib
import os
import shutil
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from distloop.atomic_files import remove
from distloop.bucket import tree
from distloop.bucket.directory import RemoteDirectory, RemoteError
from distloop.bucket.staging import STATE, as_stamps, digest, read, read_state, write_state
from distloop.bucket.tree import BEST, CHECKPOINTS, OLD, ROWS, Stamp, Unit
from distloop.log import log, printable
from distloop.monitoring.console import say
from distloop.monitoring.run_lock import LockLost

PASS_SECS = 5.0  # between two passes over all files, at least
STALLED_SECS = 300.0  # at the end of a run, without an answer
_LOOK_SECS = 0.2  # between two looks for a new checkpoint
_LONGEST_PAUSE_SECS = 60.0  # between two passes while requests fail
_SHARE = 10  # a pass comes after this many times what the last one took for files that are uploaded whole
_PATIENT_SECS = 3.0  # that the end of a run waits without a word
_HELD = ".upload"  # what is being uploaded


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
        self._directory, self._say = directory, (lambda text: None) if is_quiet else say
        self._failure, self._is_ending, self._is_late = "", False, False
        self._wake, self._passed = threading.Event(), threading.Condition()
        self._upload = _Upload(root, directory, verify, keep, self._note)
        self._thread = threading.Thread(target=self._run, name="distloop-upload", daemon=True)

    @property
    def failure(self) -> str:
        """Why the last pass failed, or a file was refused; empty: all went well."""
        return self._failure or self._upload.refusal

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def finish(self) -> list[str]:
        """Uploads the rest, and ends the thread; waits as long as requests are answered.

        Returns:
            What could not be uploaded: the paths of files and directories.
        """
        self._directory.answered_at = self._upload.progress_at = time.monotonic()
        self._directory.patience_secs, self._is_ending = STALLED_SECS, True
        self._wake.set()
        self._thread.join(_PATIENT_SECS)
        if self._thread.is_alive():
            self._say(f"uploading to {self._directory.url}: {listed(self.missing())}")
        self._thread.join()
        return self.missing()

    def missing(self) -> list[str]:
        """Returns what is not uploaded as it is now: the paths of files and directories, checkpoints first."""
        return self._upload.missing()

    def wait_for(self, steps: Collection[int] | None) -> None:
        """Waits until the checkpoints of some steps are uploaded, if the run has them; None: all, with `best.json`.

        Raises:
            OSError: if the bucket does not take one, or nothing is heard for too long.
        """
        paths = {f"{CHECKPOINTS}/{step}" for step in steps or ()}

        def late() -> list[str]:
            return [p for p in self.missing() if p in paths or (steps is None and p.startswith(f"{CHECKPOINTS}/"))]

        self._directory.answered_at = self._upload.progress_at = time.monotonic()
        self._wake.set()
        with self._passed:
            while waited_for := late():
                if self._is_stalled() or not self._thread.is_alive() or waited_for[0] in self._upload.refused:
                    raise OSError(f"{waited_for[0]} could not be uploaded ({self.failure})")
                self._passed.wait(1.0)

    def _run(self) -> None:
        pass_at, num_failed = 0.0, 0  # when the next pass over all files is due, by `time.monotonic`
        while True:
            pause = max(0.0, pass_at - time.monotonic())
            is_woken = self._wake.wait(pause if num_failed else min(pause, _LOOK_SECS))
            self._wake.clear()
            is_ending = self._is_ending  # what is saved until then is in this pass
            try:
                if not (is_woken or is_ending) and time.monotonic() < pass_at:
                    self._upload.checkpoints()
                    continue
                secs = self._upload.all(is_last=is_ending)
                if self._failure:
                    self._say(f"{self._directory.url} answers again: the upload goes on.")
                    self._failure = ""
                pass_at, num_failed = time.monotonic() + max(PASS_SECS, _SHARE * secs), 0
                if is_ending and self._upload.is_all_there():
                    return
            except LockLost as error:
                self._failure = str(error)
                return
            except Exception as error:  # a full disk too: the next pass tries again
                is_first, self._failure = not self._failure, str(error)
                is_final = isinstance(error, RemoteError) and error.is_final
                if self._is_ending and (is_final or self._is_stalled()):
                    return
                if is_first:
                    text = "%s does not take the upload (%s); training goes on, and the upload tries again."
                    log.warning(text, self._directory.url, error)
                num_failed += 1
                pause = min(_LONGEST_PAUSE_SECS, PASS_SECS * 2 ** min(num_failed - 1, 10))
                pass_at = time.monotonic() + (min(pause, PASS_SECS) if self._is_ending else pause)
            finally:
                with self._passed:
                    self._passed.notify_all()

    def _is_stalled(self) -> bool:
        heard_at = self._upload.progress_at if self._failure else self._directory.answered_at
        return time.monotonic() - heard_at > STALLED_SECS

    def _note(self, late: list[int]) -> None:
        """Wakes who waits for checkpoints; prints once that they come faster than they are uploaded, once if not."""
        with self._passed:
            self._passed.notify_all()
        if len(late) > 1 and not self._is_late and not self._is_ending:
            self._is_late = True
            self._say(f"the upload to {self._directory.url} lags: the checkpoint of step {max(late)} is not there yet.")
        elif not late and self._is_late:
            self._is_late = False
            self._say(f"the upload to {self._directory.url} has caught up.")


class _Upload:
    """What is uploaded in which order.

    Attributes:
        refused: the stamps of files and units that the bucket does not take, while it takes the rest.
        refusal: why, of the last one; empty: there is none.
        progress_at: when something was uploaded last, by `time.monotonic`.
    """

    def __init__(
        self,
        root: str,
        directory: RemoteDirectory,
        verify: Callable[[], None],
        keep: int,
        note: Callable[[list[int]], None],
    ):
        """Reads what is uploaded already; `note` is called after each checkpoint, with the steps of the late ones."""
        self._root, self._directory, self._verify, self._keep, self._note = root, directory, verify, keep, note
        self._state = read_state(root)
        write_state(root, self._state)
        self.refused: dict[str, list[Any]] = {}
        self._named: set[str] = set()  # of these, in the log
        self.refusal, self.progress_at = "", 0.0
        self._must_prune = True

    def missing(self) -> list[str]:
        """Returns what is not uploaded as it is now: the paths of files and directories, checkpoints first."""
        files, units = tree.scan(self._root)
        units = self._kept() + [unit for unit in units if unit.step < 0]
        stamps = {unit.path: as_stamps(unit) for unit in units} | {path: list(stamp) for path, stamp in files.items()}
        return [path for path, stamp in stamps.items() if self._is_changed(path, stamp)]

    def all(self, is_last: bool) -> float:
        """Uploads all that has changed; returns the seconds that went to other files than checkpoints."""
        if is_last:
            self.refused.clear()
            self.refusal = ""
        self.checkpoints()
        files, units = tree.scan(self._root)
        secs = 0.0
        for path in sorted(files, key=lambda path: path in self.refused):
            if path != BEST and self._is_due(path, list(files[path])):
                began_at = time.monotonic()
                self._upload_file(path, files[path])
                secs += time.monotonic() - began_at
                self.checkpoints()
        for unit in units:
            if unit.step < 0 and self._is_due(unit.path, as_stamps(unit)):
                began_at = time.monotonic()
                self._upload_unit(unit)
                secs += time.monotonic() - began_at
                self.checkpoints()
        self._delete_vanished()
        self._write_state()
        return secs

    def _kept(self) -> list[Unit]:
        """Returns the checkpoints of the run that are to stay, the newest first."""
        best = tree.best_steps(read(self._root, BEST))
        return [u for i, u in enumerate(tree.checkpoints(self._root)) if i < self._keep or u.step in best]

    def checkpoints(self) -> None:
        """Uploads the checkpoints that have changed, the newest first, each after the rows up to it."""
        while due := [unit for unit in self._kept() if self._is_due(unit.path, as_stamps(unit))]:
            self._upload_unit(due[0])
            self._note([unit.step for unit in due[1:]])
        self._note([])
        units = self._kept()
        late = {unit.step for unit in units if self._is_changed(unit.path, as_stamps(unit))}
        best = tree.stamp(os.path.join(self._root, BEST))
        if best and self._is_due(BEST, list(best)) and not late & tree.best_steps(read(self._root, BEST)):
            self._upload_file(BEST, best)
        if self._must_prune and units and units[0].step not in late:
            self._verify()
            kept = {unit.step for unit in units} | tree.best_steps(self._directory.read(BEST))
            for path in tree.prune(self._directory, self._root, units[0].step, self._keep, kept):
                self._state.uploaded.pop(path, None)
            self._must_prune = False

    def _upload_file(self, path: str, stamp: Stamp) -> None:
        """Uploads a file as it is at this moment: the run may write to it meanwhile."""
        held = os.path.join(self._root, _HELD, "file")

        def upload() -> None:
            os.makedirs(os.path.dirname(held), exist_ok=True)
            shutil.copyfile(os.path.join(self._root, path), held)
            self._directory.upload(held, path)

        self._upload(path, list(stamp), upload)

    def _upload_unit(self, unit: Unit) -> None:
        """Uploads a directory, its seal last; a checkpoint of the same step stays whole meanwhile, as `<unit>.old`."""

        def upload() -> None:
            with _held(self._root, unit) as held:
                if unit.step < 0:
                    return tree.upload(self._directory, held, unit, self._verify)
                rows = tree.stamp(os.path.join(self._root, ROWS))  # after the unit: at least those up to its step
                if rows and self._is_changed(ROWS, list(rows)) and ROWS not in self.refused:
                    self._upload_file(ROWS, rows)
                there, old = self._directory.list(unit.path), f"{unit.path}{OLD}"
                if unit.seal in there:
                    tree.copy(self._directory, unit.path, old, there)
                self._state.manifests.append(digest(read(held, unit.seal)))
                self._write_state()  # a machine that is lost after the seal knows its checkpoint again
                tree.upload(self._directory, held, unit, self._verify)
                if unit.seal in there:
                    tree.delete(self._directory, old)
                self._must_prune = True

        self._upload(unit.path, as_stamps(unit), upload)

    def _upload(self, path: str, stamp: list[Any], upload: Callable[[], None]) -> None:
        """Uploads a file or unit, or notes that the bucket refuses it; raises if the bucket takes nothing at all."""
        for _ in range(2):  # the bucket may have come back before the probe
            try:
                upload()
            except FileNotFoundError:  # the run has deleted it
                return
            except OSError as error:
                reason = str(error)
                try:
                    self._directory.probe()
                except RemoteError:
                    raise error from None
            else:
                self.refused.pop(path, None)
                self._state.uploaded[path], self.progress_at = stamp, time.monotonic()
                return
        self.refused[path], self.refusal = stamp, reason
        if path not in self._named:
            self._named.add(path)
            text = "%s cannot be uploaded to %s (%s): it is left out and tried again at the end; the rest goes on."
            log.warning(text, path, self._directory.url, reason)

    def _write_state(self) -> None:
        if self._is_there():
            write_state(self._root, self._state)

    def _is_there(self) -> bool:
        """Returns whether the directory of this machine is the one that it was; somebody may have deleted it."""
        return os.path.exists(os.path.join(self._root, STATE))

    def _delete_vanished(self) -> None:
        """Deletes what the run has deleted since it was uploaded, but for checkpoints."""
        if not self._is_there():
            return
        for path in [path for path in self._state.uploaded if not os.path.exists(os.path.join(self._root, path))]:
            if not path.startswith(f"{CHECKPOINTS}/"):
                self._verify()
                is_file = isinstance(self._state.uploaded[path][0], int)
                self._directory.delete(path) if is_file else tree.delete(self._directory, path)
                self._state.uploaded.pop(path, None)

    def _is_changed(self, path: str, stamp: list[Any]) -> bool:
        return self._state.uploaded.get(path) != stamp

    def _is_due(self, path: str, stamp: list[Any]) -> bool:
        return self._is_changed(path, stamp) and self.refused.get(path) != stamp

    def is_all_there(self) -> bool:
        """Returns whether the bucket has each uploaded file with its size; what it lacks is uploaded again.

        A request that was given up may have been done late.
        """
        sizes, is_all_there = self._directory.list(), True
        for path, stamp in list(self._state.uploaded.items()):
            files = {path: stamp[0]} if isinstance(stamp[0], int) else {f"{path}/{n}": size for n, size, _ in stamp}
            if any(sizes.get(name) != size for name, size in files.items()):
                is_all_there = False
                del self._state.uploaded[path]
        return is_all_there


def listed(paths: Sequence[str], most: int = 3) -> str:
    """Returns the first paths, and how many more there are."""
    return ", ".join(map(printable, paths[:most])) + (f" and {len(paths) - most} more" if len(paths) > most else "")


@contextlib.contextmanager
def _held(root: str, unit: Unit) -> Iterator[str]:
    """Yields a directory with links to the files of a unit, which stay when the run deletes it.

    Raises:
        FileNotFoundError: if the run has deleted it already.
    """
    held = os.path.join(root, _HELD, "unit")
    remove(held)
    try:
        for name in unit.files:
            path, target = os.path.join(root, unit.path, name), os.path.join(held, name)
            os.makedirs(os.path.dirname(target), exist_ok=True)
            try:
                os.link(path, target)
            except FileNotFoundError:
                raise
            except OSError:  # a file system without links
                shutil.copyfile(path, target)
        yield held
    finally:
        remove(held)

"""The upload of a run to its bucket, in a thread that training never waits for; and of single exports.

    upload = Upload(root, directory, verify=lease.look, keep=3)
    upload.start()
    upload.finish()         # the files that could not be uploaded; waits as long as anything comes through

A checkpoint that is whole is uploaded at once and before anything else: the rows up to it, its files, its manifest,
`best.json` once all that it lists is there; then old checkpoints are deleted. So rows are there up to the step of every
whole checkpoint, and nothing is deleted before its successor is whole. Other files follow, at intervals. A file that
the bucket refuses, while it takes others, is left out, and is tried again when it has changed, and at the end.
"""

import contextlib
import functools
import itertools
import os
import shutil
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, TypeAlias

from distloop.atomic_files import remove
from distloop.bucket import tree
from distloop.bucket.directory import RemoteDirectory, RemoteError
from distloop.bucket.tree import BEST, CHECKPOINTS, MANIFEST, OLD, ROWS, SEALS, STATE, Unit
from distloop.log import log, printable
from distloop.monitoring.console import say
from distloop.monitoring.run_lock import LockLost

PASS_SECS = 5.0  # between two passes over all files, at least
STALLED_SECS = 300.0  # at the end of a run, without an answer
_LOOK_SECS = 0.2  # between two looks for a new checkpoint
_LONGEST_PAUSE_SECS = 60.0  # between two passes while requests fail
_SHARE = 10  # a pass comes after this many times what the last one took for files that are uploaded whole
_PATIENT_SECS = 3.0  # that the end of a run waits without a word
_COPY = ".uploading"  # of a file that the run may write to meanwhile
_Item: TypeAlias = tuple[str, list[Any], Callable[[], None]]  # path, stamp, and what uploads it


class Upload:
    """The upload of one run.

    Attributes:
        failure: why the last pass failed, or a file was refused; empty: all went well.
        refused: the stamps of files and units that the bucket does not take, while it takes the rest.
    """

    def __init__(
        self, root: str, directory: RemoteDirectory, *, verify: Callable[[], None], keep: int, is_quiet: bool = False
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
        self._state = tree.read_state(root)
        tree.write_state(root, self._state)
        self.failure, self.refused = "", dict[str, list[Any]]()
        self._is_away = False  # the last pass failed
        self._named: set[str] = set()  # of those that are refused, in the log
        self._is_ending, self._is_late, self._must_prune = False, False, True
        self._sent_at = 0.0  # when something was uploaded last, by `time.monotonic`
        self._wake, self._passed = threading.Event(), threading.Condition()
        self._thread = threading.Thread(target=self._run, name="distloop-upload", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def finish(self) -> list[str]:
        """Uploads the rest, and ends the thread; waits as long as requests are answered.

        Returns:
            What could not be uploaded: the paths of files and directories.
        """
        self._directory.answered_at = self._sent_at = time.monotonic()
        self._directory.patience_secs, self._is_ending = STALLED_SECS, True
        self._wake.set()
        self._thread.join(_PATIENT_SECS)
        if self._thread.is_alive():
            self._say(f"uploading to {self._directory.url}: {listed(self.missing())}")
        self._thread.join()
        return self.missing()

    def missing(self) -> list[str]:
        """Returns what is not uploaded as it is now: the paths of files and directories, checkpoints first."""
        kept = [(unit.path, tree.as_stamps(unit)) for unit in _kept(self._root, self._keep)]
        others = [(path, stamp) for path, stamp, _ in reversed(self._others())]  # files last
        return [path for path, stamp in kept + others if self._state.uploaded.get(path) != stamp]

    def wait_for(self, steps: Collection[int] | None) -> None:
        """Waits until the checkpoints of some steps are uploaded, if the run has them; None: all, with `best.json`.

        Raises:
            OSError: if the bucket does not take one, or nothing is heard for too long.
        """
        paths = {f"{CHECKPOINTS}/{step}" for step in steps or ()}

        def late() -> list[str]:
            return [p for p in self.missing() if p in paths or (steps is None and p.startswith(f"{CHECKPOINTS}/"))]

        self._directory.answered_at = self._sent_at = time.monotonic()
        self._wake.set()
        with self._passed:
            while waited_for := late():
                if self._is_stalled() or not self._thread.is_alive() or waited_for[0] in self.refused:
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
                    self._upload_checkpoints()
                    continue
                secs = self._upload_all(is_last=is_ending)
                if self._is_away:
                    self._say(f"{self._directory.url} answers again: the upload goes on.")
                self._is_away, num_failed, pass_at = False, 0, time.monotonic() + max(PASS_SECS, _SHARE * secs)
                if is_ending and self._is_all_there():
                    return
            except LockLost as error:
                self.failure = str(error)
                return
            except Exception as error:  # a full disk too: the next pass tries again
                is_first, self._is_away, self.failure = not self._is_away, True, str(error)
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
                self._tell()

    def _is_stalled(self) -> bool:
        return time.monotonic() - (self._sent_at if self._is_away else self._directory.answered_at) > STALLED_SECS

    def _tell(self, late: Sequence[int] | None = None) -> None:
        """Wakes waiting threads; prints once when uploads fall behind, and once when they have caught up."""
        with self._passed:
            self._passed.notify_all()
        if late and len(late) > 1 and not self._is_late and not self._is_ending:
            self._is_late = True
            self._say(f"the upload to {self._directory.url} lags: the checkpoint of step {max(late)} is not there yet.")
        elif late == [] and self._is_late:
            self._is_late = False
            self._say(f"the upload to {self._directory.url} has caught up.")

    def _others(self) -> list[_Item]:
        """Returns all but checkpoints: path, stamp and how each is uploaded; what was refused last of the files."""
        files, units = tree.scan(self._root)
        items = [(path, list(s), functools.partial(self._upload_file, path)) for path, s in files.items()]
        others = [unit for unit in units if unit.step < 0]
        items.sort(key=lambda item: item[0] in self.refused)
        return items + [(u.path, tree.as_stamps(u), functools.partial(self._upload_unit, u)) for u in others]

    def _upload_all(self, is_last: bool) -> float:
        """Uploads all that has changed; returns the seconds that went to other files than checkpoints."""
        if is_last:
            self.refused.clear()
            self.failure = ""
        self._upload_checkpoints()
        secs = 0.0
        for path, stamp, upload in self._others():
            if path != BEST and self._is_due(path, stamp):
                began_at = time.monotonic()
                self._try(path, stamp, upload)
                secs += time.monotonic() - began_at
                self._upload_checkpoints()
        self._delete_vanished()
        self._write_state()
        return secs

    def _upload_checkpoints(self) -> None:
        """Uploads the checkpoints that have changed, the newest first, each after the rows up to it."""
        while due := [unit for unit in _kept(self._root, self._keep) if self._is_due(unit.path, tree.as_stamps(unit))]:
            self._try(due[0].path, tree.as_stamps(due[0]), functools.partial(self._upload_unit, due[0]))
            self._tell([unit.step for unit in due[1:]])
        self._tell([])
        units = _kept(self._root, self._keep)
        late = {unit.step for unit in units if self._state.uploaded.get(unit.path) != tree.as_stamps(unit)}
        if not late & tree.best_steps(tree.read(self._root, BEST)):
            self._upload_if_due(BEST)
        if self._must_prune and units and units[0].step not in late:
            self._verify()
            kept = {unit.step for unit in units} | tree.best_steps(self._directory.read(BEST))
            for path in _prune(self._directory, self._root, units[0].step, self._keep, kept):
                self._state.uploaded.pop(path, None)
            self._must_prune = False

    def _upload_if_due(self, path: str) -> None:
        stamp = tree.stamp(os.path.join(self._root, path))
        if stamp and self._is_due(path, list(stamp)):
            self._try(path, list(stamp), functools.partial(self._upload_file, path))

    def _upload_file(self, path: str) -> None:
        """Uploads a file as it is at this moment: the run may write to it meanwhile."""
        copied = os.path.join(self._root, _COPY)
        shutil.copyfile(os.path.join(self._root, path), copied)
        try:
            self._directory.upload(copied, path)
        finally:
            remove(copied)

    def _upload_unit(self, unit: Unit) -> None:
        """Uploads a directory, its seal last; a checkpoint of the same step stays whole meanwhile, as `<unit>.old`."""
        with _opened(self._root, unit) as files:
            if unit.step < 0:
                return _upload(self._directory, unit, files, self._verify)
            if ROWS not in self.refused:
                self._upload_if_due(ROWS)  # after the unit: at least those up to its step
            there, old = self._directory.list(unit.path), f"{unit.path}{OLD}"
            if unit.seal in there:
                _copy(self._directory, unit.path, old, there)
            self._state.manifests.append(tree.digest(tree.read(files[unit.seal])))
            self._write_state()  # a machine that is lost after the seal knows its checkpoint again
            _upload(self._directory, unit, files, self._verify)
            if unit.seal in there:
                _delete(self._directory, old)
            self._must_prune = True

    def _try(self, path: str, stamp: list[Any], upload: Callable[[], None]) -> None:
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
                self._state.uploaded[path], self._sent_at = stamp, time.monotonic()
                return
        self.refused[path], self.failure = stamp, reason
        if path not in self._named:
            self._named.add(path)
            text = "%s cannot be uploaded to %s (%s): it is left out and tried again at the end; the rest goes on."
            log.warning(text, path, self._directory.url, reason)

    def _write_state(self) -> None:
        if os.path.exists(os.path.join(self._root, STATE)):  # else somebody has deleted the directory
            tree.write_state(self._root, self._state)

    def _delete_vanished(self) -> None:
        """Deletes what the run has deleted since it was uploaded, but for checkpoints."""
        if not os.path.exists(os.path.join(self._root, STATE)):
            return
        for path in [path for path in self._state.uploaded if not os.path.exists(os.path.join(self._root, path))]:
            if not path.startswith(f"{CHECKPOINTS}/"):
                self._verify()
                is_file = isinstance(self._state.uploaded[path][0], int)
                self._directory.delete(path) if is_file else _delete(self._directory, path)
                self._state.uploaded.pop(path, None)

    def _is_due(self, path: str, stamp: list[Any]) -> bool:
        return self._state.uploaded.get(path) != stamp and self.refused.get(path) != stamp

    def _is_all_there(self) -> bool:
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


def _kept(root: str, keep: int) -> list[Unit]:
    """Returns the checkpoints of a run that are to stay, the newest first."""
    best = tree.best_steps(tree.read(root, BEST))
    return [u for i, u in enumerate(tree.checkpoints(root)) if i < keep or u.step in best]


def listed(paths: Sequence[str], most: int = 3) -> str:
    """Returns the first paths, and how many more there are."""
    return ", ".join(map(printable, paths[:most])) + (f" and {len(paths) - most} more" if len(paths) > most else "")


def send(path: str, url: str) -> None:
    """Writes a file or a unit of this machine to a URL, for good; what was there before of a directory is deleted.

    Raises:
        ValueError: if the URL cannot be written to.
    """
    try:
        if os.path.isfile(path):
            parent, _, name = url.rstrip("/").rpartition("/")
            RemoteDirectory(parent).upload(path, name)
        else:
            _, (unit,) = tree.scan(path)
            _upload(RemoteDirectory(url), unit, {name: os.path.join(path, name) for name in unit.files})
    except RemoteError as error:
        raise ValueError(
            f"{url!r} cannot be written ({error}): give a bucket that is there, and credentials in the way of its "
            "package, or another path."
        ) from error


@contextlib.contextmanager
def _opened(root: str, unit: Unit) -> Iterator[dict[str, str]]:
    """Yields the paths of the open files of a unit, by name; they can be read when the run has deleted it.

    Raises:
        FileNotFoundError: if the run has deleted it already.
    """
    with contextlib.ExitStack() as stack:
        files = {n: stack.enter_context(open(os.path.join(root, unit.path, n), "rb")) for n in unit.files}
        yield {name: f"/proc/self/fd/{file.fileno()}" for name, file in files.items()}


def _upload(
    directory: RemoteDirectory, unit: Unit, files: dict[str, str], verify: Callable[[], None] = lambda: None
) -> None:
    """Uploads the files of a unit, by their local paths, its seal last; what is there of an earlier one is deleted."""
    there = directory.list(unit.path)
    prefix = f"{unit.path}/" if unit.path else ""
    if unit.seal in there:
        verify()
        directory.delete(prefix + unit.seal)
    for name in unit.names:
        if name == unit.seal:
            verify()
        directory.upload(files[name], prefix + name)
    for name in there.keys() - unit.files.keys():
        directory.delete(prefix + name)


def _copy(directory: RemoteDirectory, path: str, new: str, names: Collection[str]) -> None:
    """Copies a checkpoint within a bucket, its manifest last."""
    for name in sorted(names, key=lambda name: (name == MANIFEST, name)):
        directory.copy(f"{path}/{name}", f"{new}/{name}")


def _delete(directory: RemoteDirectory, path: str) -> None:
    """Deletes a unit of a bucket, its seal first."""
    for name in sorted(directory.list(path), key=lambda name: (name not in SEALS, name)):
        directory.delete(f"{path}/{name}")


def _prune(directory: RemoteDirectory, root: str, newest: int, keep: int, others: Collection[int]) -> list[str]:
    """Deletes and renames checkpoints of a bucket as the store does those of a disk; returns the paths that are gone.

    Args:
        directory: of the workdir.
        root: the workdir on this machine.
        newest: the step of the newest checkpoint of the run; nothing is done unless it is in the bucket.
        keep: number of the newest checkpoints to keep.
        others: the steps of others to keep.
    """
    files = {f"{CHECKPOINTS}/{path}": size for path, size in directory.list(CHECKPOINTS).items()}
    folders, sealed = tree.by_checkpoint(files), tree.sealed_steps(files)
    if newest not in sealed:
        return []
    kept = {*[step for step in sealed if step <= newest][-keep:], *(step for step in others if step <= newest)}
    for later in [step for step in reversed(sealed) if step > newest]:
        path = f"{CHECKPOINTS}/{later}"
        if not os.path.isdir(os.path.join(root, f"{path}.diverged")):
            names = itertools.chain([f"{path}.abandoned"], (f"{path}.abandoned-{i}" for i in itertools.count(2)))
            _copy(directory, path, next(name for name in names if name not in folders), folders[path])
    steps = {path: tree.step_of(path.removesuffix(OLD)) for path in folders}
    gone = [p for p, s in steps.items() if s >= 0 and (s not in kept or p.endswith(OLD) and s in sealed)]
    for path in gone:
        _delete(directory, path)
    return gone

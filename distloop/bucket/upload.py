"""The upload of a run to its bucket, in a thread that training never waits for; and of single exports.

    upload = Upload(root, directory, verify=lock.verify)
    upload.start()
    upload.finish()         # the files that could not be uploaded; waits as long as anything comes through

A checkpoint that is whole is uploaded at once and before anything else: the rows up to it, its files, its manifest,
`best.json` once all that it lists is there; then what the run has deleted is deleted. Other files follow, at intervals.
What the bucket has refused is tried again after all else, so that it keeps nothing else back.
"""

import contextlib
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from distloop.atomic_files import remove
from distloop.bucket import tree
from distloop.bucket.directory import RemoteDirectory, RemoteError
from distloop.bucket.tree import BEST, CHECKPOINTS, MANIFEST, OLD, ROWS, STATE, Unit, seals_last
from distloop.log import log, printable
from distloop.monitoring.console import say
from distloop.monitoring.run_lock import LockLost

PASS_SECS = 5.0  # between two passes over all files, at least
STALLED_SECS = 300.0  # at the end of a run, while nothing comes through
_POLL_SECS = 0.2  # between two searches for a new checkpoint
_LONGEST_PAUSE_SECS = 60.0  # between two passes while requests fail
_SHARE = 10  # a pass over all files comes after this many times what the last one took
_PATIENT_SECS = 3.0  # that the end of a run waits without a word
_COPY = ".uploading"  # of a file that the run may write to meanwhile


class Upload:
    """The upload of one run.

    Attributes:
        failure: why the last pass failed, or a file was refused; empty: all went well.
    """

    def __init__(
        self, root: str, directory: RemoteDirectory, *, verify: Callable[[], None], say: Callable[[str], None] = say
    ):
        """Reads what is uploaded already; sends no request.

        Args:
            root: the workdir on this machine.
            directory: where its files go.
            verify: called before a manifest is written and before anything is deleted; raises if another process
                writes.
            say: prints what is no warning.
        """
        self._root, self._directory, self._verify, self._say = root, directory, verify, say
        tree.write_state(root, state := tree.read_state(root))
        self._uploaded, self._manifests = state
        self.failure = ""
        self._failed = set[str]()  # units that could not be uploaded, and are not tried again yet
        self._num_failed = 0  # passes, since one over all files went well
        self._must_prune = True
        self._sent_at = 0.0  # when something was uploaded last, by `time.monotonic`
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="distloop-upload", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def finish(self) -> list[str]:
        """Uploads the rest, and ends the thread; waits as long as anything comes through.

        Returns:
            What could not be uploaded: the paths of files and checkpoints.
        """
        self._sent_at = time.monotonic()
        self._ending.set()
        self._thread.join(_PATIENT_SECS)
        if self._thread.is_alive():
            self._say(f"uploading to {self._directory.url}: {listed(self.missing())}")
        self._thread.join()
        return self.missing()

    def missing(self) -> list[str]:
        """Returns what is not uploaded as it is now: the paths of files and checkpoints, checkpoints first."""
        return [unit.path for unit in tree.units(self._root) if not self._is_there(unit)]

    def wait_for(self, step: int) -> None:
        """Waits until the checkpoint of a step is uploaded, if the run has it.

        Raises:
            OSError: if the bucket does not take it, or nothing is heard for too long.
        """
        path, until = f"{CHECKPOINTS}/{step}", time.monotonic() + STALLED_SECS
        while any(unit.path == path and not self._is_there(unit) for unit in tree.checkpoints(self._root)):
            if not self._thread.is_alive() or path in self._failed and time.monotonic() > until:
                raise OSError(f"{path} could not be uploaded ({self.failure})")
            time.sleep(_POLL_SECS / 4)

    def _run(self) -> None:
        full_at = 0.0  # when the next pass over all files is due, by `time.monotonic`
        while True:
            is_ending, began_at = self._ending.is_set(), time.monotonic()  # what is saved until now is in this pass
            try:
                self._upload_due(is_full := is_ending or began_at >= full_at)
                if is_full:
                    full_at = time.monotonic() + max(PASS_SECS, _SHARE * (time.monotonic() - began_at))
                    if self._num_failed:
                        self._say(f"{self._directory.url} answers again: the upload goes on.")
                    self._num_failed, self.failure = 0, ""
                if is_ending:
                    return
            except LockLost as error:
                self.failure = str(error)
                return
            except Exception as error:  # a full disk too: the next pass tries again
                self._num_failed, self.failure = self._num_failed + 1, str(error)
                if is_ending and time.monotonic() - self._sent_at > STALLED_SECS:
                    return
                if self._num_failed == 1:
                    text = "%s does not take the upload (%s); training goes on, and the upload tries again."
                    log.warning(text, self._directory.url, error)
                full_at = time.monotonic() + min(_LONGEST_PAUSE_SECS, PASS_SECS * 2 ** min(self._num_failed - 1, 10))
                if is_ending:
                    time.sleep(PASS_SECS)
            self._ending.wait(_POLL_SECS)

    def _upload_due(self, is_full: bool) -> None:
        """Uploads what has changed, the newest checkpoint first; files that are no checkpoints only if it is full."""
        is_new = is_full
        for unit in [None, *self._due("")] if is_full else [None]:
            if unit and unit.is_file and self._is_due(unit):
                self._upload(unit)
            while due := self._due(CHECKPOINTS):
                self._upload(due[0])
                is_new = True
        if is_new and self._write_state():
            self._delete_gone()
        if is_full and self._failed:
            self._failed.clear()
            self._upload_due(is_full)

    def _due(self, below: str) -> list[Unit]:
        """Returns what is to be uploaded below a directory of the run, in order."""
        units = tree.units(self._root, below)
        late = {unit.step for unit in units if not self._is_there(unit)}
        is_best_there = late.isdisjoint(tree.best_steps(tree.read(self._root, BEST)))
        return [unit for unit in units if self._is_due(unit) and (unit.path != BEST or is_best_there)]

    def _upload(self, unit: Unit) -> None:
        """Uploads a unit; after an error it is not due until all else has been tried."""
        self._failed.add(unit.path)
        with contextlib.suppress(FileNotFoundError):  # the run has deleted it
            with _frozen(self._root, unit) as files:
                self._send(unit, files)
            self._uploaded.update(unit.files)
            self._sent_at = time.monotonic()
        self._failed.remove(unit.path)

    def _send(self, unit: Unit, files: dict[str, str]) -> None:
        """Sends a unit; a checkpoint that is saved again stays whole meanwhile, as `<step>.old`."""
        if unit.is_file:
            return self._directory.upload(files[unit.path], unit.path)
        there = self._directory.list(unit.path)
        if unit.step >= 0:
            stamp = tree.stamp_of(os.path.join(self._root, ROWS))
            if stamp and self._is_due(rows := Unit(ROWS, {ROWS: stamp})):
                with contextlib.suppress(RemoteError):  # the checkpoint does not wait for them
                    self._upload(rows)  # as they are after the checkpoint: at least those up to its step
            for name in sorted(there, key=seals_last) if MANIFEST in there else ():
                self._directory.copy(f"{unit.path}/{name}", f"{unit.path}{OLD}/{name}")
            self._manifests.append(tree.digest(tree.read(files[f"{unit.path}/{MANIFEST}"])))
            self._write_state()  # a machine that is lost after the manifest knows its checkpoint again
            self._must_prune = True
        _send(self._directory, files, [f"{unit.path}/{name}" for name in there], self._verify)

    def _write_state(self) -> bool:
        """Notes what is uploaded; returns False if somebody has deleted the directory."""
        if is_there := os.path.exists(os.path.join(self._root, STATE)):
            tree.write_state(self._root, (self._uploaded, self._manifests))
        return is_there

    def _delete_gone(self) -> None:
        """Deletes what the run has deleted, once its newest checkpoint is there: manifests before other files."""
        folders = {f"{CHECKPOINTS}/{name}" for name in tree.names_kept(self._root)}
        units = tree.checkpoints(self._root)  # read last: one that is saved meanwhile is among them
        if not units or not self._is_there(units[0]) or any(map(self._is_due, units)):
            return
        gone = {path for path in self._uploaded if not os.path.exists(os.path.join(self._root, path))}
        if self._must_prune:
            gone.update(path for path in self._directory.list() if tree.step_of(tree.folder_of(path)) >= 0)
        gone = {path for path in gone if tree.folder_of(path) not in folders}
        if gone:
            self._verify()
        for path in sorted(gone, key=lambda path: (tree.step_of(tree.folder_of(path)), not seals_last(path)[0], path)):
            self._directory.delete(path)
            self._uploaded.pop(path, None)
        self._must_prune = not all(os.path.exists(os.path.join(self._root, folder)) for folder in folders)

    def _is_there(self, unit: Unit) -> bool:
        return unit.files.items() <= self._uploaded.items()

    def _is_due(self, unit: Unit) -> bool:
        return not self._is_there(unit) and unit.path not in self._failed


def listed(paths: Sequence[str], most: int = 3) -> str:
    """Returns the first paths, and how many more there are."""
    return ", ".join(map(printable, paths[:most])) + (f" and {len(paths) - most} more" if len(paths) > most else "")


def send(path: str, url: str) -> None:
    """Writes a file or a directory of this machine to a URL, for good; what was there before of a directory is deleted.

    Raises:
        ValueError: if the URL cannot be written to.
    """
    try:
        if os.path.isdir(path):
            names = [os.path.relpath(os.path.join(folder, n), path) for folder, _, ns in os.walk(path) for n in ns]
            directory = RemoteDirectory(url)
            files = {name: os.path.join(path, name) for name in sorted(names, key=seals_last)}
            _send(directory, files, directory.list())
        else:
            parent, _, name = url.rstrip("/").rpartition("/")
            RemoteDirectory(parent).upload(path, name)
    except RemoteError as error:
        raise ValueError(
            f"{url!r} cannot be written ({error}): give a bucket that is there, and credentials in the way of its "
            "package, or another path."
        ) from error


@contextlib.contextmanager
def _frozen(root: str, unit: Unit) -> Iterator[dict[str, str]]:
    """Yields paths of a unit's files, by name, which can be read as they are now whatever the run does meanwhile.

    Raises:
        FileNotFoundError: if the run has deleted it already.
    """
    with contextlib.ExitStack() as stack:
        if unit.is_file:
            stack.callback(remove, copied := os.path.join(root, _COPY))
            shutil.copyfile(os.path.join(root, unit.path), copied)
            yield {unit.path: copied}
        else:
            files = {name: stack.enter_context(open(os.path.join(root, name), "rb")) for name in unit.files}
            yield {name: f"/proc/self/fd/{file.fileno()}" for name, file in files.items()}


def _send(
    directory: RemoteDirectory,
    files: dict[str, str],
    there: Iterable[str],
    verify: Callable[[], None] = lambda: None,
) -> None:
    """Sends the files of a directory by their local paths, the last one when the others are there.

    Args:
        directory: where they go.
        files: local paths, by path in the directory.
        there: what is there of an earlier one, whose last file is deleted first.
        verify: called before the last one is written or deleted.
    """
    last = next(reversed(files))
    if last in there:
        verify()
        directory.delete(last)
    for name, path in files.items():
        if name == last:
            verify()
        directory.upload(path, name)
    for name in set(there) - files.keys():
        directory.delete(name)

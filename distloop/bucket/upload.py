"""The upload of a run to its bucket, in a thread that training never waits for; and of single exports.

    upload = Upload(root, directory, verify=lock.verify)
    upload.start()
    upload.finish()         # what could not be uploaded; waits as long as anything comes through

A checkpoint that is complete is uploaded at once and before anything else: the rows up to it, its files, its manifest.
`best.json` follows once all that it lists is there, then other files that have changed; then what the run has deleted
is deleted. What the bucket refuses keeps nothing else back, and is tried again in the next pass.
"""

import contextlib
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Sequence

from distloop.atomic_files import remove
from distloop.bucket import tree
from distloop.bucket.remote_directory import RemoteDirectory, RemoteError
from distloop.bucket.tree import BEST, CHECKPOINTS, MANIFEST, OLD, ROWS, STATE, seals_last
from distloop.log import log, printable, say
from distloop.workdir.run_lock import LockLost

PASS_SECS = 5.0  # between two passes over all files, at least
STALLED_SECS = 300.0  # at the end of a run, while nothing comes through
_POLL_SECS = 0.2  # between two searches for a new checkpoint, which begins a pass at once
_PAUSE_FACTOR = 10  # else a pass comes after this many times what the last one took
_PATIENT_SECS = 3.0  # that the end of a run waits without a word
_COPY = ".uploading"  # of a file that the run may write to meanwhile


class Upload:
    """The upload of one run.

    Attributes:
        failure: why something was refused last; empty: all went well.
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
        self._state = tree.read_state(root)
        tree.write_state(root, self._state)
        self.failure = ""
        self._refused = set[str]()  # units that could not be uploaded in this pass
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
        return [path for path, stamp in tree.units(self._root).items() if not self._is_there(path, stamp)]

    def wait_for(self, step: int) -> None:
        """Waits until the checkpoint of a step is uploaded, if the run has it.

        Raises:
            OSError: if the bucket does not take it, or nothing is heard for too long.
        """
        path, until = f"{CHECKPOINTS}/{step}", time.monotonic() + STALLED_SECS
        while (stamp := tree.checkpoints(self._root).get(path)) and not self._is_there(path, stamp):
            if not self._thread.is_alive() or path in self._refused and time.monotonic() > until:
                raise OSError(f"{path} could not be uploaded ({self.failure})")
            time.sleep(_POLL_SECS / 4)

    def _run(self) -> None:
        while True:
            is_ending, began_at = self._ending.is_set(), time.monotonic()  # what is saved until now is in this pass
            saved, uploaded = tree.checkpoints(self._root), dict(self._state.uploaded)
            self._refused.clear()
            try:
                self._upload_changes()
                self._delete_gone()
            except LockLost as error:
                self.failure = str(error)
                return
            except Exception as error:
                self._log_refusal("", error)
            if self._state.uploaded != uploaded:
                self._write_state()
            if self.failure and not self._refused:
                self._say(f"{self._directory.url} answers again: the upload goes on.")
                self.failure = ""
            if is_ending and (not self._refused or self._is_stalled()):
                return
            if is_ending:
                time.sleep(PASS_SECS)
            else:
                self._pause(PASS_SECS if self._refused else _PAUSE_FACTOR * (time.monotonic() - began_at), saved)

    def _pause(self, secs: float, saved: dict[str, tree.Stamp]) -> None:
        """Waits until a pass is due: after a time, at the end of the run, or when other checkpoints are there."""
        until = time.monotonic() + max(PASS_SECS, secs)
        while time.monotonic() < until and tree.checkpoints(self._root) == saved:
            if self._ending.wait(_POLL_SECS):
                return

    def _upload_changes(self) -> None:
        """Uploads what has changed, first the checkpoints, also those that are saved meanwhile."""
        for path in tree.units(self._root):
            while due := [it for it, stamp in tree.checkpoints(self._root).items() if self._is_due(it, stamp)]:
                self._upload(due[0])
            if self._refused and self._is_stalled():
                return
            if path != BEST or not any(map(tree.is_checkpoint, self._refused)):  # it lists only what is there
                self._upload(path)

    def _upload(self, path: str) -> None:
        """Uploads a file or checkpoint that has changed; after an error it is not due until the next pass."""
        stamp = tree.stamp_of(os.path.join(self._root, path))
        if stamp is None or not self._is_due(path, stamp):
            return
        try:
            if tree.is_checkpoint(path):
                self._send_checkpoint(path)
            else:
                self._send_file(path)
        except LockLost:
            raise
        except Exception as error:  # a full disk too
            if isinstance(error, FileNotFoundError) and tree.stamp_of(os.path.join(self._root, path)) != stamp:
                return  # the run has deleted it
            self._log_refusal(path, error)
            return
        self._state.uploaded[path] = stamp
        self._sent_at = time.monotonic()

    def _send_file(self, path: str) -> None:
        copied = os.path.join(self._root, _COPY)
        try:
            shutil.copyfile(os.path.join(self._root, path), copied)
            self._directory.upload(copied, path)
        finally:
            remove(copied)

    def _send_checkpoint(self, path: str) -> None:
        """Sends a checkpoint after its rows; one that is saved again stays complete meanwhile, as `<step>.old`."""
        folder, files = os.path.join(self._root, path), {}
        with contextlib.ExitStack() as stack:
            for name in sorted(os.listdir(folder), key=seals_last):  # open files can be read when they are deleted
                file = stack.enter_context(open(os.path.join(folder, name), "rb"))
                files[f"{path}/{name}"] = f"/proc/self/fd/{file.fileno()}"
            self._upload(ROWS)  # as they are after the checkpoint, which does not wait for them if they are refused
            there = self._directory.list(path)
            for name in sorted(there, key=seals_last) if MANIFEST in there else ():
                self._directory.copy(f"{path}/{name}", f"{path}{OLD}/{name}")
            self._state.manifests.append(tree.digest(tree.read(files[f"{path}/{MANIFEST}"])))
            self._write_state()  # a machine that is lost after the manifest knows its checkpoint again
            self._must_prune = True
            _send(self._directory, files, [f"{path}/{name}" for name in there], self._verify)

    def _delete_gone(self) -> None:
        """Deletes what the run has deleted, once its newest checkpoint is there: manifests before other files.

        An abandoned checkpoint that another machine has uploaded stays: it was not brought to this one.
        """
        kept, uploaded = tree.paths_kept(self._root), self._state.uploaded
        saved = tree.checkpoints(self._root)  # read last: one that is saved meanwhile is among them
        newest = next(iter(saved.items()), None)
        if newest is None or not self._is_there(*newest) or not os.path.exists(os.path.join(self._root, STATE)):
            return  # somebody has deleted the directory, if its state is gone
        files = {path for path in uploaded if not tree.is_checkpoint(path)}
        if self._must_prune or self._ending.is_set():
            there = [f"{CHECKPOINTS}/{name}" for name in self._directory.list(CHECKPOINTS)]
            files |= {p for p in there if tree.step_of(f := tree.folder_of(p)) >= 0 or f.removesuffix(OLD) in uploaded}
        gone = [p for p in files if tree.folder_of(p) not in kept and not os.path.exists(os.path.join(self._root, p))]
        if gone:
            self._verify()
        for path in sorted(gone, key=lambda path: (tree.step_of(tree.folder_of(path)), not seals_last(path)[0], path)):
            self._directory.delete(path)
            uploaded.pop(tree.folder_of(path), None)
        self._must_prune = False

    def _log_refusal(self, path: str, error: Exception) -> None:
        if not self.failure:
            text = "%s does not take the upload (%s); training goes on, and the upload tries again."
            log.warning(text, self._directory.url, error)
        self._refused.add(path)
        self.failure = str(error)

    def _write_state(self) -> None:
        if os.path.exists(os.path.join(self._root, STATE)):  # else somebody has deleted the directory
            tree.write_state(self._root, self._state)

    def _is_there(self, path: str, stamp: tree.Stamp) -> bool:
        return self._state.uploaded.get(path) == stamp

    def _is_due(self, path: str, stamp: tree.Stamp) -> bool:
        return not self._is_there(path, stamp) and path not in self._refused

    def _is_stalled(self) -> bool:
        return self._ending.is_set() and time.monotonic() - self._sent_at > STALLED_SECS


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


def _send(
    directory: RemoteDirectory, files: dict[str, str], there: Iterable[str], verify: Callable[[], None] = lambda: None
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

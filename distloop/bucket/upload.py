"""The upload of a run to its bucket, in a thread that training never waits for; and of single exports.

    upload = Upload(root, directory, verify=lease.check)
    upload.start()
    upload.finish()         # the files that could not be uploaded; waits as long as anything comes through

A checkpoint that is whole is uploaded at once and before anything else: the rows up to it, its files, its manifest,
`best.json` once all that it lists is there; then what the run has deleted is deleted. Other files follow, at intervals.
A file that the bucket refuses, while it takes others, is left out until the next pass over all files.
"""

import contextlib
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from distloop.atomic_files import remove
from distloop.bucket import tree
from distloop.bucket.directory import RemoteDirectory, RemoteError
from distloop.bucket.tree import BEST, CHECKPOINTS, MANIFEST, OLD, ROWS, SEALS, STATE, Unit
from distloop.log import log, printable
from distloop.monitoring.console import say
from distloop.monitoring.run_lock import LockLost

PASS_SECS = 5.0  # between two passes over all files, at least
STALLED_SECS = 300.0  # at the end of a run, without an answer
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
            verify: called before a seal is written and before anything is deleted; raises if another process writes.
            say: prints what is no warning.
        """
        self._root, self._directory, self._verify, self._say = root, directory, verify, say
        self._state = tree.read_state(root)
        tree.write_state(root, self._state)
        self.failure = ""
        self._refused, self._named = set[str](), set[str]()  # units that the last pass could not upload; in the log
        self._num_failed = 0  # passes, since one went well
        self._is_late, self._must_prune = False, True
        self._sent_at = 0.0  # when something was uploaded last, by `time.monotonic`
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="distloop-upload", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def finish(self) -> list[str]:
        """Uploads the rest, and ends the thread; waits as long as requests are answered.

        Returns:
            What could not be uploaded: the paths of files and directories.
        """
        self._sent_at = time.monotonic()
        self._ending.set()
        self._thread.join(_PATIENT_SECS)
        if self._thread.is_alive():
            self._say(f"uploading to {self._directory.url}: {listed(self.missing())}")
        self._thread.join()
        return self.missing()

    def missing(self) -> list[str]:
        """Returns what is not uploaded as it is now: the paths of files and directories, checkpoints first."""
        return [unit.path for unit in tree.units(self._root) if not self._is_there(unit)]

    def wait_for(self, step: int) -> None:
        """Waits until the checkpoint of a step is uploaded, if the run has it.

        Raises:
            OSError: if the bucket does not take it, or nothing is heard for too long.
        """
        path, self._sent_at = f"{CHECKPOINTS}/{step}", time.monotonic()
        while (unit := tree.sealed_unit(self._root, path)) and not self._is_there(unit):
            if path in self._refused or self._is_stalled() or not self._thread.is_alive():
                raise OSError(f"{path} could not be uploaded ({self.failure})")
            time.sleep(_POLL_SECS / 4)

    def _run(self) -> None:
        full_at, pause_secs = 0.0, 0.0  # when the next pass over all files is due, by `time.monotonic`
        while True:
            self._ending.wait(pause_secs)
            is_ending, began_at = self._ending.is_set(), time.monotonic()  # what is saved until now is in this pass
            try:
                self._upload_due(is_full := is_ending or began_at >= full_at)
                if is_full:
                    full_at = time.monotonic() + max(PASS_SECS, _SHARE * (time.monotonic() - began_at))
                if self._num_failed:
                    self._say(f"{self._directory.url} answers again: the upload goes on.")
                self._num_failed, pause_secs = 0, _POLL_SECS
                if is_ending and self._is_all_there():
                    return
            except LockLost as error:
                self.failure = str(error)
                return
            except Exception as error:  # a full disk too: the next pass tries again
                self._num_failed, self.failure = self._num_failed + 1, str(error)
                if is_ending and (isinstance(error, RemoteError) and error.is_final or self._is_stalled()):
                    return
                if self._num_failed == 1:
                    text = "%s does not take the upload (%s); training goes on, and the upload tries again."
                    log.warning(text, self._directory.url, error)
                full_at, pause_secs = 0.0, min(_LONGEST_PAUSE_SECS, PASS_SECS * 2 ** min(self._num_failed - 1, 10))
            if is_ending:
                time.sleep(min(pause_secs, PASS_SECS))

    def _is_stalled(self) -> bool:
        return self._num_failed > 0 and time.monotonic() - self._sent_at > STALLED_SECS

    def _upload_due(self, is_full: bool) -> None:
        """Uploads what has changed, the newest checkpoint first; files that are no checkpoints only if it is full."""
        if is_full:
            self._refused, self.failure = set(), ""
        is_new = is_full
        for unit in [None, *self._due("")] if is_full else [None]:
            if unit and not unit.is_checkpoint and self._is_due(unit):
                self._upload(unit)
            while due := self._due(CHECKPOINTS):
                self._upload(due[0])
                is_new = True
        if is_new and self._write_state():
            self._delete_gone()

    def _due(self, below: str) -> list[Unit]:
        """Returns what is to be uploaded below a directory of the run, in order."""
        units = tree.units(self._root, below)
        late = [unit.step for unit in units if unit.step >= 0 and not self._is_there(unit)]
        if len(late) > 2 and not self._is_late and not self._ending.is_set():
            self._is_late, url = True, self._directory.url
            self._say(f"the upload to {url} lags: the checkpoint of step {late[1]} is not there yet.")
        is_best_there = not tree.best_steps(tree.read(self._root, BEST)) & {*late}
        return [unit for unit in units if self._is_due(unit) and (unit.path != BEST or is_best_there)]

    def _upload(self, unit: Unit) -> None:
        """Uploads a unit, or notes that the bucket refuses it; raises if the bucket takes nothing at all."""
        for _ in range(2):  # the bucket may have come back before it was asked whether it takes files
            try:
                with _frozen(self._root, unit) as files:
                    self._send(unit, files)
                self._state.uploaded.update(unit.files)
                self._sent_at = time.monotonic()
                return
            except FileNotFoundError:  # the run has deleted it
                return
            except OSError as error:
                if self._is_stalled() or not self._directory.takes_files():
                    raise
                self.failure = str(error)
        self._refused.add(unit.path)
        if unit.path not in self._named:
            self._named.add(unit.path)
            text = "%s cannot be uploaded to %s (%s): it is left out and tried again; the rest goes on."
            log.warning(text, unit.path, self._directory.url, self.failure)

    def _send(self, unit: Unit, files: dict[str, str]) -> None:
        """Sends a unit, its seal last; a checkpoint that is saved again stays whole meanwhile, as `<unit>.old`."""
        if unit.is_file:
            return self._directory.upload(files[unit.path], unit.path)
        if unit.step >= 0:
            if (rows := tree.file_unit(self._root, ROWS)) and self._is_due(rows):
                self._upload(rows)  # as they are after the unit: at least those up to its step
            there = self._directory.list(unit.path)
            for name in sorted(there, key=_seals_first, reverse=True) if MANIFEST in there else ():
                self._directory.copy(f"{unit.path}/{name}", f"{unit.path}{OLD}/{name}")
            self._state.manifests.append(tree.digest(tree.read(files[unit.seal])))
            self._write_state()  # a machine that is lost after the seal knows its checkpoint again
            self._must_prune = True
        _send(self._directory, unit, files, self._verify)

    def _write_state(self) -> bool:
        """Notes what is uploaded; returns False if somebody has deleted the directory."""
        if is_there := os.path.exists(os.path.join(self._root, STATE)):
            tree.write_state(self._root, self._state)
        return is_there

    def _delete_gone(self) -> None:
        """Deletes what the run has deleted: checkpoints once the newest is there, and seals before what they seal."""
        units = tree.checkpoints(self._root)
        gone = [path for path in self._state.uploaded if not os.path.exists(os.path.join(self._root, path))]
        gone = [path for path in gone if tree.step_of(tree.folder_of(path)) < 0]
        if self._must_prune and units and self._is_there(units[0]) and not any(map(self._is_due, units)):
            there = tree.by_checkpoint(self._directory.list())
            old = {path for path in there if tree.step_of(path) >= 0 and path not in {unit.path for unit in units}}
            changing = {path for path in old if not path.endswith(OLD) and tree.is_changing(self._root, path)}
            gone += [f"{path}/{name}" for path in old - changing for name in there[path]]
            self._must_prune = bool(changing)
        if gone:
            self._verify()
        for path in sorted(gone, key=lambda path: (tree.step_of(tree.folder_of(path)), *_seals_first(path))):
            self._directory.delete(path)
            self._state.uploaded.pop(path, None)

    def _is_there(self, unit: Unit) -> bool:
        return unit.files.items() <= self._state.uploaded.items()

    def _is_due(self, unit: Unit) -> bool:
        return not self._is_there(unit) and unit.path not in self._refused

    def _is_all_there(self) -> bool:
        """Returns whether the bucket has each uploaded file with its size; what it lacks is uploaded again.

        A request that was given up may have been done late.
        """
        sizes, uploaded = self._directory.list(), self._state.uploaded
        lacking = [path for path, (size, _) in uploaded.items() if sizes.get(path) != size]
        for path in lacking:
            del uploaded[path]
        return not lacking


def _seals_first(path: str) -> tuple[bool, str]:
    return os.path.basename(path) not in SEALS, path


def listed(paths: Sequence[str], most: int = 3) -> str:
    """Returns the first paths, and how many more there are."""
    return ", ".join(map(printable, paths[:most])) + (f" and {len(paths) - most} more" if len(paths) > most else "")


def send(path: str, url: str) -> None:
    """Writes a file or a unit of this machine to a URL, for good; what was there before of a directory is deleted.

    Raises:
        ValueError: if the URL cannot be written to.
    """
    try:
        if unit := tree.sealed_unit(path, ""):
            _send(RemoteDirectory(url), unit, {name: os.path.join(path, name) for name in unit.files})
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
    directory: RemoteDirectory, unit: Unit, files: dict[str, str], verify: Callable[[], None] = lambda: None
) -> None:
    """Sends a directory by the local paths of its files, its seal last; what is there of an earlier one is deleted."""
    there = {os.path.join(unit.path, name) for name in directory.list(unit.path)}
    if unit.seal in there:
        verify()
        directory.delete(unit.seal)
    for name in unit.files:
        if name == unit.seal:
            verify()
        directory.upload(files[name], name)
    for name in there - unit.files.keys():
        directory.delete(name)

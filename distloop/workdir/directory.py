"""Run directory: the workdir of a run: its path, its lock, the watch over its disk, and the seam to one at a URL.

    config = with_absolute_paths(config)            # "runs/a" becomes "/home/me/runs/a"
    directory = directory_of(config, workers)
    with directory:                                 # on every worker; the chief takes the lock
        train()                                     # in config.local_workdir, as in any directory
    with local_copy("s3://bucket/run") as path:     # a local path stays as it is
        load_newest(path)
    with DiskWatch("runs/first/checkpoints", hang_timeout=600, fail=heartbeat.fail).over("saving step 500"):
        write()

No other module of the loop knows that the part `bucket` is there.
"""

import contextlib
import dataclasses
import os
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

from distloop import urls
from distloop.installed import import_part
from distloop.log import say_soon
from distloop.settings.config import Config
from distloop.urls import is_url, without_credentials
from distloop.workdir import run_lock

EXIT_CODE = 74  # EX_IOERR of sysexits.h

_CHECKPOINT = re.compile(r"\d+(\.(abandoned|diverged)(-\d+)?)?$")
_CHECKS_PER_TIMEOUT = 10
_TIMEOUTS = 3  # after the first a line is printed, after the last the process ends; a long fsync changes no size


class Directory:
    """The workdir of a run, which the chief locks for all workers; on a disk, `send_to_hosts` has nothing to do.

    It may be entered several times, one inside the other. On a disk it notices the checkpoints that another process has
    made since this one held the lock last.
    """

    def __init__(self, config: Config, workers: Any):
        """Touches no disk, and sends no request.

        Args:
            config: `workdir` is read; if it is empty, there is nothing to lock.
            workers: the `Workers` of the run.
        """
        self._url, self._root, self._workers = config.workdir, config.local_workdir, workers
        self._is_writer = bool(config.workdir) and workers.is_chief
        self._lock = run_lock.RunLock(self._root)
        self._seen: set[str] | None = None  # the checkpoints when this process recorded them last; None: it has not
        self._depth, self._held = 0, contextlib.ExitStack()

    def __enter__(self) -> None:
        """Takes the lock, and brings the files that the run goes on from to `config.local_workdir`.

        All workers call it.

        Raises:
            ValueError: if another process writes to it, has saved since this one held the lock last, or it cannot be
                read or written.
        """
        if self._depth == 0 and self._root:
            with contextlib.ExitStack() as stack:
                self._agree((lambda: self._begin(stack)) if self._is_writer else None)
                self._held = stack.pop_all()
        self._depth += 1

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        """Waits until all files are uploaded, and releases the lock. All workers call it.

        Raises:
            OSError: if something could not be uploaded, unless another error ends the block.
        """
        self._depth -= 1
        if self._depth == 0:
            with contextlib.suppress(run_lock.LockLost, OSError):
                self.verify()
                self.record_saved()
            self._held.__exit__(kind, error, trace)

    def _begin(self, stack: contextlib.ExitStack) -> None:
        """Takes the lock, on the chief; what ends with the block is entered into a stack."""
        stack.enter_context(self._lock)
        others: list[str] = []
        with contextlib.suppress(OSError):  # a disk that cannot be read says so later
            others = sorted(self._saved() - self._seen) if self._seen is not None else []
        if others:
            raise ValueError(
                f"Another process has saved {', '.join(others)} under workdir={self._url!r} since this one looked "
                "last, and nothing was written: call restore() to go on from its newest checkpoint, or give another "
                "workdir."
            )

    def _agree(self, act: Callable[[], Any] | None) -> Any:
        """Does what this worker has to do, and returns the result; if that fails on any worker, all raise."""
        result, failure = None, None
        try:
            if act is not None:
                result = act()
        except ValueError as error:
            failure = error
        except OSError as error:
            failure = ValueError(
                f"workdir={self._url!r} cannot be used ({error}): give a bucket that is there, and credentials in the "
                "way of its package, or a directory on a disk."
            )
            failure.__cause__ = error
        if any(self._workers.gather(failure is not None)):
            raise failure or ValueError(f"workdir={self._url!r} cannot be used; another worker says why.")
        return result

    def record_saved(self) -> None:
        """Records the names of the run's checkpoints: this process knows of them."""
        if self._is_writer and self._url == self._root:
            with contextlib.suppress(OSError):
                self._seen = self._saved()

    def _saved(self) -> set[str]:
        """Returns the names of all checkpoints, with those that were renamed as the run has gone back."""
        folder = os.path.join(self._root, "checkpoints")
        return set(filter(_CHECKPOINT.match, os.listdir(folder) if os.path.isdir(folder) else ()))

    def verify(self) -> None:
        """Checks that the chief still holds the lock, as `RunLock.verify`; other workers write nothing."""
        if self._is_writer:
            self._lock.verify()

    def send_to_hosts(self, step: int) -> None:
        """Brings a checkpoint that the chief has chosen to the hosts that lack it. All workers call it."""

    @contextlib.contextmanager
    def reading(self, path: str, *, best: bool = False) -> Iterator[str]:
        """Yields a local path with what is at a path or URL, as `local_copy`. All workers call it.

        Raises:
            ValueError: if it cannot be read.
        """
        with contextlib.ExitStack() as stack:
            try:
                local = stack.enter_context(local_copy(path, best=best))
            except OSError as error:
                raise ValueError(f"{path!r} cannot be read ({error}): correct it, or try again later.") from error
            yield local


def directory_of(config: Config, workers: Any) -> Directory:
    """Returns the directory of a run; sends no request.

    Args:
        config: of the run.
        workers: the `Workers` of the run.
    """
    if config.workdir == config.local_workdir:
        return Directory(config, workers)
    directory: Directory = _bucket("bucket_workdir", config.workdir).Workdir(config, workers)
    return directory


@contextlib.contextmanager
def local_copy(path: str, *, best: bool = False) -> Iterator[str]:
    """Yields a local path with what is at a URL, for as long as the block runs; a local path stays as it is.

    Args:
        path: of a workdir, of which the newest complete checkpoint comes; a checkpoint; an `.npz`, `.keras` or
            `.weights.h5` file; or the prefix of a TensorFlow checkpoint.
        best: whether the best checkpoints of a workdir come, with their list, in place of the newest.

    Raises:
        OSError: if it cannot be read.
    """
    if not is_url(path):
        yield path
        return
    with _bucket("tree", path).fetched(path, best=best) as local:
        yield local


def send(path: str, url: str) -> None:
    """Writes a file, or the directory of an export, to a URL, for good; what a directory was before is deleted.

    Raises:
        ValueError: if the URL cannot be written to.
    """
    _bucket("upload", url).send(path, url)


def fetch_reports(path: str, root: str) -> str:
    """Returns a local path with what a report reads of a run, or of the runs in a directory.

    Args:
        path: of a workdir, or of a directory of them; of a URL, the files are brought below `root`.
        root: a local directory.

    Raises:
        ValueError: if a URL cannot be read, or is no run.
    """
    return str(_bucket("tree", path).fetch_reports(path, root)) if is_url(path) else path


def _bucket(module: str, url: str) -> Any:
    return import_part(f"bucket.{module}", f"the URL {without_credentials(url)!r}")


def with_absolute_paths(config: Config) -> Config:
    """Returns settings with which a program that changes its directory goes on in the same workdir."""
    return dataclasses.replace(config, workdir=urls.absolute(config.workdir), init_from=urls.absolute(config.init_from))


class DiskWatch:
    """Watches operations on a directory, each in a thread that lasts as long as the operation.

    A write to a disk that hangs never returns, and nothing interrupts its thread. A large checkpoint may take hours,
    but its files grow: what counts is how long nothing has changed in the directory.
    """

    def __init__(self, directory: str, hang_timeout: float, fail: Callable[[str], None]):
        """Touches no disk.

        Args:
            directory: whose files grow.
            hang_timeout: seconds without a change after which a line is printed; after three times as many the process
                ends. 0: never.
            fail: is called with the reason before the end.
        """
        self._directory, self._hang_timeout, self._fail = directory, hang_timeout, fail

    @contextlib.contextmanager
    def over(self, action: str) -> Iterator[None]:
        """Watches while the block runs; `action` is what it does, as in "saving the checkpoint of step 500"."""
        has_ended = threading.Event()
        if self._hang_timeout:
            threading.Thread(target=self._watch, args=[action, has_ended], name="distloop-disk", daemon=True).start()
        try:
            yield
        finally:
            has_ended.set()

    def _watch(self, action: str, has_ended: threading.Event) -> None:
        """Counts checks of the directory, not seconds: a suspended process checks nothing."""
        check_secs = self._hang_timeout / _CHECKS_PER_TIMEOUT
        sizes: list[int] = []  # every size that was measured, as long as it differed from the one before
        if has_ended.wait(check_secs):
            return
        measuring = threading.Thread(target=self._measure, args=[sizes, has_ended, check_secs], daemon=True)
        measuring.start()
        num_sizes = num_checks = 0
        while not has_ended.wait(check_secs):
            num_checks = num_checks + 1 if len(sizes) == num_sizes else 0
            num_sizes = len(sizes)
            reason = f"nothing in {self._directory!r} has changed for {{:g}} seconds while {action}"
            if num_checks == _CHECKS_PER_TIMEOUT:
                end_secs = _TIMEOUTS * self._hang_timeout
                reason = reason.format(self._hang_timeout)
                say_soon(f"{reason}. Does the disk answer? After {end_secs:g} seconds this process ends.")
            elif num_checks >= _TIMEOUTS * _CHECKS_PER_TIMEOUT:
                self._end(f"{reason.format(_TIMEOUTS * self._hang_timeout)}: the disk does not answer")
                return

    def _measure(self, sizes: list[int], has_ended: threading.Event, check_secs: float) -> None:
        """Measures the directory in a thread of its own: on a disk that hangs this does not return either."""
        while not has_ended.is_set():
            size = _size(self._directory)
            if not sizes or size != sizes[-1]:
                sizes.append(size)
            has_ended.wait(check_secs)

    def _end(self, reason: str) -> None:
        threading.Timer(5.0, os._exit, [EXIT_CODE]).start()  # telling the others may wait for a device
        say_soon(f"{reason}. This process ends.")
        self._fail(reason)
        os._exit(EXIT_CODE)


def _size(directory: str) -> int:
    """Returns the bytes of all files below a directory, and 1 for each file."""
    total = 0
    for folder, _, files in os.walk(directory):
        for name in files:
            with contextlib.suppress(OSError):  # renamed since
                total += os.path.getsize(os.path.join(folder, name)) + 1
    return total

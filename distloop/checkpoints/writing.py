"""Writing: the lock of a run, held for all workers, and the end of a process whose disk hangs.

    with WorkersLock("runs/first", is_chief, gather):       # on every worker; the chief takes the lock
        with DiskWatch("runs/first/checkpoints", hang_timeout=600, fail=heartbeat.fail).over("saving step 500"):
            write()

A write to a disk that hangs never returns, and nothing interrupts its thread. A large checkpoint may take hours, but
its files grow: what counts is how long nothing has changed in the directory.
"""

import contextlib
import os
import threading
from collections.abc import Callable, Collection, Iterator
from typing import Any

from distloop.distributed import output
from distloop.monitoring.directory import Directory
from distloop.monitoring.run_lock import LockLost, RunLock

EXIT_CODE = 74  # EX_IOERR of sysexits.h

_CHECKS_PER_TIMEOUT = 10
_TIMEOUTS = 3  # after the first a line is printed, after the last the process ends; a long fsync changes no size


class WorkersLock:
    """The lock of a run of one worker or several: the chief takes it, and if it is refused, every worker raises.

    Attributes:
        finish: waits until nothing is being written; called before the lock is released.
        saved: returns the names of the run's checkpoints, to notice those that another process has made since this
            one held the lock last; None: it is not noticed.
    """

    def __init__(
        self,
        workdir: str,
        is_chief: bool,
        gather: Callable[[bool], Any],
        outer: Directory | None = None,
    ):
        """Touches no disk.

        Args:
            workdir: empty: there is nothing to lock.
            is_chief: whether this worker writes the files of the run.
            gather: returns a truth of every worker, on every worker.
            outer: is entered before the lock is taken, and left once it is released; all workers do so.
        """
        self._workdir = workdir
        self._lock = RunLock(workdir) if workdir and is_chief else None
        self._gather = gather
        self._outer = outer or Directory()
        self.finish: Callable[[], None] = lambda: None
        self.saved: Callable[[], Collection[str]] | None = None
        self._seen: set[str] | None = None  # the names when this process noted them last
        self._depth = 0

    def __enter__(self) -> None:
        """Takes the lock, as `RunLock`; all workers call it.

        Raises:
            ValueError: if the chief is refused, or another process has saved since this one held the lock last.
        """
        if not self._workdir:
            return
        refusal = None
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._outer)
            try:
                if self._lock is not None:
                    stack.enter_context(self._lock)
                    self._check()
            except ValueError as error:
                refusal = error
            if any(self._gather(refusal is not None)):
                raise refusal or ValueError(
                    f"The chief may not write to workdir={self._workdir!r}; its own message says why."
                )
            stack.pop_all()  # keeps the lock
            self._depth += 1

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        """Releases the lock once nothing is being written.

        Raises:
            OSError: if it could not be written, unless another error ends the block.
        """
        if not self._workdir:
            return
        try:
            self.finish()
        except OSError:
            if error is None:
                raise
        finally:
            self._depth -= 1
            if self._lock is not None:
                with contextlib.suppress(LockLost, OSError):
                    self._lock.verify()
                    self.note_saved()
                self._lock.__exit__(kind, error, trace)
            self._outer.__exit__(kind, error, trace)

    def note_saved(self) -> None:
        """Notes the names of the run's checkpoints: this process knows of them."""
        if self._lock is not None and self.saved is not None:
            with contextlib.suppress(OSError):
                self._seen = set(self.saved())

    def _check(self) -> None:
        """Raises a ValueError if another process has saved meanwhile; a disk that cannot be read says so later."""
        others: list[str] = []
        with contextlib.suppress(OSError):
            if self.saved is not None and self._seen is not None and not self._depth:
                others = sorted(set(self.saved()) - self._seen)
        if others:
            raise ValueError(
                f"Another process has saved {', '.join(others)} under workdir={self._workdir!r} since this one looked "
                "last, and nothing was written: call restore() to go on from its newest checkpoint, or give another "
                "workdir."
            )

    def verify(self) -> None:
        """Checks that the chief still holds the lock, as `RunLock.verify`; other workers write nothing."""
        if self._lock is not None:
            self._lock.verify()
            self._outer.verify()


class DiskWatch:
    """Watches operations on a directory, each in a thread that lasts as long as the operation."""

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
                output.say(f"distloop: {reason}. Does the disk answer? After {end_secs:g} seconds this process ends.")
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
        output.say(f"distloop: {reason}. This process ends.")
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

"""Writing: ends a process whose disk hangs.

    with DiskWatch("runs/first/checkpoints", hang_timeout=600, fail=heartbeat.fail).over("saving step 500"):
        write()

A write to a disk that hangs never returns, and nothing interrupts its thread. A large checkpoint may take hours, but
its files grow: what counts is how long nothing has changed in the directory.
"""

import contextlib
import os
import threading
from collections.abc import Callable, Iterator

from distloop.workers import output

EXIT_CODE = 74  # EX_IOERR of sysexits.h

_CHECKS_PER_TIMEOUT = 10
_TIMEOUTS = 3  # after the first a line is printed, after the last the process ends; a long fsync changes no size


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

"""Disk watch: ends a process whose disk no longer answers.

    watch = DiskWatch("run/checkpoints", hang_timeout=600, fail=heartbeat.fail)
    with watch.over("saving the checkpoint of step 500"):
        write()

A write to a disk that hangs never returns, and nothing interrupts its thread. A large checkpoint may take hours, but
its files grow: what counts is how long nothing has changed in the directory. It does not know what is written.
"""

import contextlib
import os
import threading
from collections.abc import Callable, Iterator

from distloop.distributed import output

EXIT_CODE = 74  # EX_IOERR of sysexits.h

_LOOKS_PER_TIMEOUT = 10
_TIMEOUTS = 3  # after the first a line is printed, after the last the process ends; a long fsync changes no size


class DiskWatch:
    """Watches what is done to a directory, in threads that last as long as that."""

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
        """Counts looks, not seconds: a process that was suspended has not looked."""
        look_secs = self._hang_timeout / _LOOKS_PER_TIMEOUT
        sizes: list[int] = []  # every size that was measured, as long as it differed from the one before
        if has_ended.wait(look_secs):
            return
        measuring = threading.Thread(target=self._measure, args=[sizes, has_ended, look_secs], daemon=True)
        measuring.start()
        num_sizes = num_looks = 0
        while not has_ended.wait(look_secs):
            num_looks = num_looks + 1 if len(sizes) == num_sizes else 0
            num_sizes = len(sizes)
            reason = f"nothing in {self._directory!r} has changed for {{:g}} seconds while {action}"
            if num_looks == _LOOKS_PER_TIMEOUT:
                end_secs = _TIMEOUTS * self._hang_timeout
                reason = reason.format(self._hang_timeout)
                output.say(f"distloop: {reason}. Does the disk answer? After {end_secs:g} seconds this process ends.")
            elif num_looks >= _TIMEOUTS * _LOOKS_PER_TIMEOUT:
                self._end(f"{reason.format(_TIMEOUTS * self._hang_timeout)}: the disk does not answer")
                return

    def _measure(self, sizes: list[int], has_ended: threading.Event, look_secs: float) -> None:
        """Measures the directory in a thread of its own: on a disk that hangs this does not return either."""
        while not has_ended.is_set():
            size = _size(self._directory)
            if not sizes or size != sizes[-1]:
                sizes.append(size)
            has_ended.wait(look_secs)

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

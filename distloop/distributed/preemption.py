"""Owns being asked to stop: SIGTERM, Ctrl-C, and the time that a run may take.

    with Interrupts(max_secs=3600) as interrupts:
        while not interrupts.reason:
            ...                       # a loop; then save, and leave with EXIT_CODE

The first signal is noted and the loop in flight ends; the second ends the process at once. Signals within a second are
one: schedulers send theirs to every process, and a launcher passes its own on. It does not know what is saved.
"""

import math
import os
import signal
import sys
import threading
import time
from types import TracebackType
from typing import Any

EXIT_CODE = 75  # EX_TEMPFAIL of sysexits.h: run the same command again

_ONE_SIGNAL_SECS = 1.0
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Interrupted(Exception):
    """The run is to be saved and left; the message says why."""


class Interrupts:
    """Notes signals while it is entered, if that is done in the main thread: Python delivers them nowhere else."""

    def __init__(self, max_secs: float = 0.0, *, catch_signals: bool = True):
        """Starts the clock.

        Args:
            max_secs: after which time the run is to end, in seconds; 0: never.
            catch_signals: whether SIGTERM and SIGINT are noted.
        """
        self._deadline = time.monotonic() + max_secs if max_secs else float("inf")
        self._max_secs = max_secs
        self._catch_signals = catch_signals
        self._signal: str | None = None
        self._before: dict[int, Any] = {}

    @property
    def reason(self) -> str | None:
        """Why the run is to end; None: it goes on."""
        if self._signal is not None:
            return self._signal
        return f"{self._max_secs:g} seconds are over" if time.monotonic() >= self._deadline else None

    def __enter__(self) -> "Interrupts":
        if self._catch_signals and threading.current_thread() is threading.main_thread():
            # While TensorFlow computes, Python calls no handler; the byte that it writes for each signal comes at once.
            self._read_end, self._write_end = os.pipe()
            os.set_blocking(self._write_end, False)
            self._wakeup = signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)
            self._before = {number: signal.signal(number, lambda *_: None) for number in _SIGNALS}
            threading.Thread(target=self._watch, args=(self._read_end,), name="distloop-signals", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._before:
            for number, handler in self._before.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(self._wakeup)
            os.close(self._write_end)  # ends the thread, which closes the other end
            self._before = {}

    def _watch(self, read_end: int) -> None:
        came = -math.inf  # the last one, on the monotonic clock
        with os.fdopen(read_end, "rb", buffering=0) as pipe:
            while byte := pipe.read(1):
                if byte[0] not in _SIGNALS:
                    continue
                name = signal.Signals(byte[0]).name
                if self._signal is not None and time.monotonic() - came < _ONE_SIGNAL_SECS:
                    continue
                came = time.monotonic()
                if self._signal is not None:
                    print(f"distloop: {name} again, leaving at once.", file=sys.stderr, flush=True)
                    threading.Timer(1.0, os._exit, [128 + byte[0]]).start()  # where a thread hangs while it prints
                    sys.stdout.flush()
                    os._exit(128 + byte[0])
                self._signal = f"{name} came"
                print(
                    f"distloop: {name}, the run is saved and left when this loop ends; again to leave at once.",
                    file=sys.stderr,
                    flush=True,
                )

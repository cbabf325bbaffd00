"""Preemption: requests to stop a run by SIGTERM, Ctrl-C or a time limit.

    with StopRequests(max_secs=3600) as requests:
        while not requests.reason:
            ...                       # a loop; then save, and leave with EXIT_CODE

After the first signal the current step ends and the run is saved; the second ends the process at once. Signals within a
second count as one: schedulers signal every process, and a launcher passes its own signal on. A forked child has the
handlers that the process had before, and shares nothing with it. It does not know what is saved.
"""

import contextlib
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any, NoReturn

from distloop.atomic_files import start_ticks
from distloop.log import say_soon
from distloop.workers import heartbeat, messages

EXIT_CODE = 75  # EX_TEMPFAIL of sysexits.h: run the same command again

SAVES = "saving after this step"
_ONE_SIGNAL_SECS = 1.0
_CHECK_SECS = 0.5  # from one look at the process that called this one to the next
_WORDS: dict[int, tuple[str, str]] = {signal.SIGTERM: ("Send", "SIGTERM"), signal.SIGINT: ("Press", "Ctrl-C")}

_live: list["StopRequests"] = []  # those that are entered, the outermost first: all runs stop for one signal
_catching: list["StopRequests"] = []  # the one of them that catches signals, if there is one


class Interrupted(Exception):
    """Raised when a run has to be saved and left; the message holds the reason.

    Attributes:
        has_trained: whether the run has trained since it was restored, so that there is something to save.
        exit_code: of the process.
    """

    exit_code = EXIT_CODE

    def __init__(self, reason: str, *, has_trained: bool = True):
        """Keeps whether there is something to save beside the reason."""
        super().__init__(reason)
        self.has_trained = has_trained


class OtherFailed(Interrupted):
    """Raised when another worker has failed, and waits until all have saved the run."""

    exit_code = heartbeat.EXIT_CODE


def end_with(parent: int, grace_secs: float = 5.0) -> None:
    """Sends this process SIGTERM when its caller has ended, however that ended, and SIGKILL after `grace_secs`.

    There may be others between the two, such as a shell or a fork server, and they may end before.

    Args:
        parent: the number of the caller.
        grace_secs: from SIGTERM to SIGKILL.

    Raises:
        ValueError: if there is no such process.
    """
    start = start_ticks(parent)
    if start is None:
        raise ValueError(f"parent={parent} is no process of this machine: give the caller's number, or leave it out.")

    def watch() -> None:
        while start_ticks(parent) == start:
            time.sleep(_CHECK_SECS)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(grace_secs)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="distloop-parent", daemon=True).start()


@contextlib.contextmanager
def interrupted_together(step: int) -> Iterator[None]:
    """Raises Interrupted where a fit within this one has been interrupted: both are saved, and the process leaves."""
    try:
        yield
    except SystemExit as end:
        if end.code != EXIT_CODE:
            raise
        raise Interrupted(f"Interrupted at step {step} with a fit that an action has begun") from None


class StopRequests:
    """Catches signals while entered, in the main thread only: Python delivers signals to no other thread.

    Attributes:
        max_secs: seconds after which the run has to end; 0: never.
        plan: what the line about a signal says that the run does next.
    """

    def __init__(self, max_secs: float = 0.0, *, catch_signals: bool = True, may_quit: bool = True):
        """Starts the clock.

        Args:
            max_secs: seconds after which the run has to end; 0: never.
            catch_signals: whether to catch SIGTERM and SIGINT.
            may_quit: whether the second signal ends the process; else it is ignored.
        """
        self._deadline = time.monotonic() + max_secs if max_secs else float("inf")
        self.max_secs = max_secs
        self.plan = SAVES
        self._catch_signals = catch_signals
        self._may_quit = may_quit
        self._signal: str | None = None
        self._original_handlers: dict[int, Any] = {}

    @property
    def reason(self) -> str | None:
        """What the run is interrupted by, as in "by SIGTERM" or "after 90 seconds"; None if it goes on."""
        if self._signal is not None:
            return self._signal
        return f"after {self.max_secs:g} seconds" if self.is_out_of_time else None

    @property
    def is_out_of_time(self) -> bool:
        """Whether no signal has come, and the time limit has passed."""
        return self._signal is None and time.monotonic() >= self._deadline

    def __enter__(self) -> "StopRequests":
        _live.append(self)
        is_main = threading.current_thread() is threading.main_thread()
        if self._catch_signals and is_main and not _catching:
            # While TensorFlow computes, Python calls no handler, but it writes a byte for each signal at once.
            self._read_end, self._write_end = os.pipe()
            os.set_blocking(self._write_end, False)
            self._wakeup = signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)
            self._original_handlers = {number: signal.signal(number, lambda *_: None) for number in _WORDS}
            threading.Thread(target=self._watch, args=(self._read_end,), name="distloop-signals", daemon=True).start()
            _catching.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        _live.remove(self)
        if self in _catching:  # not in a forked child
            self._restore()  # closing the write end ends the thread, which closes the read end

    def _restore(self) -> None:
        """Restores the handlers from before, and closes the write end of the pipe."""
        _catching.remove(self)
        for number, handler in self._original_handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup)
        os.close(self._write_end)

    def _watch(self, read_end: int) -> None:
        last_signal_at = -math.inf  # on the monotonic clock
        while byte := os.read(read_end, 1):
            number, now = byte[0], time.monotonic()
            if number not in _WORDS or now - last_signal_at < _ONE_SIGNAL_SECS:
                continue
            last_signal_at = now
            if self._signal is not None and self._may_quit:
                _leave(128 + number)
            verb, name = _WORDS[number]
            for requests in tuple(_live):
                requests._signal = f"by {name}"
            messages.send(leaves=True)
            if self._may_quit:
                say_soon(f"Stopping: {(_live or [self])[-1].plan}. {verb} {name} again to quit now.", 0.1)
        os.close(read_end)


def _leave(code: int) -> NoReturn:
    """Ends the process within a second, whether somebody reads its output or not."""
    threading.Timer(1.0, os._exit, [code]).start()
    say_soon("quitting now, without saving.")
    sys.stdout.flush()
    os._exit(code)


def _restore_in_child() -> None:
    for requests in tuple(_catching):
        os.close(requests._read_end)  # its thread is not in the child
        requests._restore()


os.register_at_fork(after_in_child=_restore_in_child)

"""Consoles: shows what workers print, without waiting for a console or pipe that blocks; without TensorFlow.

    consoles.write(2, line)                                 # a thread writes to stderr
    consoles.show_lines(pipe, b"[worker 0] ", write)        # another one shows what a worker writes

A stopped pager or a full pipe blocks whoever writes to it, so no thread that decides anything writes. This module does
not know what the lines are about.
"""

import atexit
import errno
import os
import queue
import threading
import time
from collections.abc import Callable
from typing import IO

from distloop.threads import once

_UNREAD_SECS = 5.0  # without a byte read, after which nobody reads
_PENDING_LINES = 1000  # that wait for the reader
_WRITE_BYTES = 4096  # of one call: a longer one returns only after all of it was read
_LINE_BYTES = 2**20  # of the longest line that is shown whole
_AGAIN_SECS = 0.1  # after which a write is tried again


class LineConsole:
    """Writes lines to a descriptor in a thread; while nobody reads them, further ones are dropped and counted."""

    def __init__(self, descriptor: int):
        """Starts the thread; at the end of the process, lines are written as long as somebody reads them."""
        self._descriptor = descriptor
        self._lines: queue.Queue[bytes] = queue.Queue(_PENDING_LINES)
        self._writing = threading.Lock()
        self._num_dropped = 0  # since a line was taken
        threading.Thread(target=self._write_forever, name="distloop-console", daemon=True).start()
        atexit.register(self.finish)

    def write(self, line: bytes) -> None:
        """Writes a line, soon; waits for a reader who is slow, and not for one who has read nothing for 5 seconds."""
        with self._writing:
            warning = f"distloop.launch: {self._num_dropped:,} lines were not shown: nobody read them.\n"
            try:
                text = warning.encode() + line if self._num_dropped else line
                self._lines.put(text, timeout=0.0 if self._num_dropped else _UNREAD_SECS)
                self._num_dropped = 0
            except queue.Full:
                self._num_dropped += 1

    def finish(self) -> None:
        """Waits until all lines are written, or nobody reads them."""
        if self._num_dropped:
            self.write(b"")
        count, changed_at = 0, time.monotonic()
        while self._lines.unfinished_tasks and time.monotonic() < changed_at + _UNREAD_SECS:
            if count != (count := self._lines.unfinished_tasks):
                changed_at = time.monotonic()
            time.sleep(0.01)

    def _write_forever(self) -> None:
        while True:
            self._write(self._lines.get())
            self._lines.task_done()

    def _write(self, text: bytes) -> None:
        while text:
            try:
                text = text[os.write(self._descriptor, text[:_WRITE_BYTES]) :]
            except OSError as error:
                if error.errno in (errno.EPIPE, errno.EIO):  # SIGPIPE or SIGHUP, which come with them, end the run
                    os.dup2(os.open(os.devnull, os.O_WRONLY), self._descriptor)
                else:  # a full disk; or another program has made the descriptor non-blocking
                    time.sleep(_AGAIN_SECS)


@once
def _console(descriptor: int) -> LineConsole:
    return LineConsole(descriptor)  # two would cut each other's lines


def write(descriptor: int, line: bytes) -> None:
    """Writes a line to stdout (1) or stderr (2) of this process, as `LineConsole.write`."""
    _console(descriptor).write(line)


def show_lines(pipe: IO[bytes], prefix: bytes, write: Callable[[bytes], None]) -> threading.Thread:
    """Starts a thread that calls `write` with each line of a worker's pipe, those of more than a mebibyte in parts.

    Args:
        pipe: from the worker, closed at its end.
        prefix: stands in front of each line.
        write: takes a line.

    Returns:
        The thread, which ends with the pipe.
    """

    def show() -> None:
        with pipe:
            for line in iter(lambda: pipe.readline(_LINE_BYTES), b""):
                visible = line.rstrip(b"\r\n").rpartition(b"\r")[2]  # as on a terminal
                write(prefix + visible + b"\n")

    thread = threading.Thread(target=show, name="distloop-output", daemon=True)
    thread.start()
    return thread

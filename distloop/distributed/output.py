"""Output: prints lines without waiting for a console or pipe that blocks; without TensorFlow.

    output.say("distloop: SIGTERM came.")                   # in a worker: returns within a second
    console = output.console(1)                             # in the launcher: a thread writes to stdout
    lines = output.WorkerPipe(pipe, b"[worker 0] ", console)

A stopped pager or a full pipe blocks whoever writes to it, so no thread that decides anything writes. This module does
not know what the lines are about.
"""

import atexit
import collections
import contextlib
import errno
import functools
import os
import sys
import threading
import time
from typing import IO

from distloop.log import printable

_PROMPT_SECS = 0.1  # that a write waits for a reader who keeps up, so that stdout and stderr stay in order
_UNREAD_SECS = 5.0  # without a byte read, after which nobody reads
_PENDING_BYTES = 2**22  # that wait for the reader
_WRITE_BYTES = 4096  # of one call: a longer one returns only after all of it was read
_LINE_BYTES = 2**20  # of the longest line that is shown whole
_PROGRESS_SECS = 10  # how often a line is shown that carriage returns overwrite


def say(text: str, wait_secs: float = 1.0) -> None:
    """Prints a line to stderr, and waits at most `wait_secs` until it is written."""
    printing = threading.Thread(target=_print, args=[text], name="distloop-output", daemon=True)
    printing.start()
    printing.join(wait_secs)


def _print(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # stderr is closed
        print(printable(text), file=sys.stderr, flush=True)


class LineConsole:
    """Writes lines to a descriptor in a thread; if nobody reads them, the oldest are dropped and counted."""

    def __init__(self, descriptor: int):
        """Starts the thread; at the end of the process, lines are written as long as somebody reads them."""
        self._descriptor = descriptor
        self._changed = threading.Condition()
        self._pending: collections.deque[bytes] = collections.deque()  # whole lines
        self._num_bytes = 0  # pending, and those that are being written
        self._num_dropped_lines = 0
        self._is_prompt = True  # all was written at the last write
        self._written_at = time.monotonic()
        threading.Thread(target=self._write_forever, name="distloop-console", daemon=True).start()
        atexit.register(self.finish)

    def has_room(self) -> bool:
        """Returns False while a reader who is slow has to catch up; True if nobody reads: lines are dropped then."""
        return self._num_bytes < _PENDING_BYTES or not self._is_read()

    def write(self, lines: bytes) -> None:
        """Writes whole lines, soon."""
        with self._changed:
            if not self._num_bytes:
                self._written_at = time.monotonic()
            self._pending.append(lines)
            self._num_bytes += len(lines)
            while self._num_bytes > _PENDING_BYTES and len(self._pending) > 1 and not self._is_read():
                oldest = self._pending.popleft()
                self._num_bytes -= len(oldest)
                self._num_dropped_lines += oldest.count(b"\n")
            self._changed.notify_all()
            if self._is_prompt:
                self._is_prompt = self._changed.wait_for(lambda: not self._num_bytes, _PROMPT_SECS)

    def finish(self) -> None:
        """Waits until all lines are written, or nobody reads them."""
        with self._changed:
            self._written_at = time.monotonic()
            while self._num_bytes and self._is_read():
                self._changed.wait(_PROMPT_SECS)

    def _is_read(self) -> bool:
        return time.monotonic() < self._written_at + _UNREAD_SECS

    def _write_forever(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._pending)
                lines, note = self._pending.popleft(), b""
                if self._num_dropped_lines:
                    text = f"distloop.launch: {self._num_dropped_lines:,} lines were not shown: nobody read them.\n"
                    self._num_dropped_lines, note = 0, text.encode()
            self._write(note + lines)
            with self._changed:
                self._num_bytes -= len(lines)
                self._is_prompt = not self._num_bytes
                self._changed.notify_all()

    def _write(self, text: bytes) -> None:
        while text:
            try:
                text = text[os.write(self._descriptor, text[:_WRITE_BYTES]) :]
                self._written_at = time.monotonic()
            except OSError as error:
                if error.errno in (errno.EPIPE, errno.EIO):  # SIGPIPE or SIGHUP, which come with them, end the run
                    os.dup2(os.open(os.devnull, os.O_WRONLY), self._descriptor)
                else:  # a full disk; or another program has made the descriptor non-blocking
                    time.sleep(_PROMPT_SECS)


@functools.cache
def console(descriptor: int) -> LineConsole:
    """Returns the console of this process for stdout (1) or stderr (2)."""
    return LineConsole(descriptor)


class WorkerPipe:
    """A pipe from a worker, shown in whole lines; one of more than a mebibyte is shown in parts."""

    def __init__(self, pipe: IO[bytes], prefix: bytes, console: LineConsole):
        """Takes over the pipe; `prefix` is shown in front of each line."""
        os.set_blocking(pipe.fileno(), False)
        self._pipe, self._prefix, self._console = pipe, prefix, console
        self._rest = bytearray()  # a line without its end; each byte is searched once
        self._shown_at = time.monotonic()
        self.is_open = self._is_shown = True

    def fileno(self) -> int:
        """Returns the descriptor to wait for."""
        return self._pipe.fileno()

    def has_room(self) -> bool:
        """Returns True if what is read now can be shown."""
        return not self._is_shown or self._console.has_room()

    def read(self) -> None:
        """Shows the lines that are in the pipe."""
        try:
            chunk = os.read(self.fileno(), 2**20)  # more than a pipe holds
        except BlockingIOError:
            return
        self.is_open = bool(chunk)
        searched = len(self._rest)
        self._rest += chunk
        end = self._rest.rfind(b"\n", searched) + 1
        lines = bytes(self._rest[:end]).split(b"\n")[:-1]
        del self._rest[:end]
        begin = self._rest.rfind(b"\r", max(0, searched - end - 1), -1) + 1  # the text before it is overwritten
        if begin and time.monotonic() > self._shown_at + _PROGRESS_SECS:
            lines.append(bytes(self._rest[:begin]))
        del self._rest[:begin]
        if len(self._rest) > _LINE_BYTES:
            lines.append(bytes(self._rest))
            self._rest.clear()
        self._show(lines)

    def finish(self) -> None:
        """Shows the rest of the pipe, a line without an end too, and nothing from then on."""
        if self.is_open:
            self.read()
        self._show([bytes(self._rest)] if self._rest else [])
        self._is_shown = False

    def close(self) -> None:
        """Shows the rest of the pipe and closes it."""
        self.finish()
        self._pipe.close()
        self.is_open = False

    def _show(self, lines: list[bytes]) -> None:
        if lines and self._is_shown:
            self._shown_at = time.monotonic()
            visible = [line.rstrip(b"\r").rpartition(b"\r")[2] for line in lines]  # as on a terminal
            self._console.write(b"".join(self._prefix + line + b"\n" for line in visible))

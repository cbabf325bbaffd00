"""The pipe through which the workers of a membership send to their launcher, and what they have sent.

    inbox = Inbox()                             # for one membership, whose workers inherit `inbox.pipe`
    inbox.read()                                # after a worker's `membership.send(begins=20)`, inbox.step is 20

What a worker sends, and how, is a matter of `workers/messages`.
"""

import contextlib
import fcntl
import json
import os
import time
from typing import Any

_DESCRIPTOR = 100  # the least of the pipe, which has the same number in all workers: a program has no file there


class Inbox:
    """What the workers of one membership have sent.

    Attributes:
        step: from which the run went on; None: no worker came so far.
        began_at: when a worker came so far, in seconds on the monotonic clock; None: the run does not train now.
        start_secs: from here until a worker came so far for the first time; 0: none did.
        sizes: numbers of workers that the run can have; empty: it sent none.
        leaving: indices of the workers that somebody asked to leave.
    """

    def __init__(self) -> None:
        """Opens the pipe, whose end for the workers is `write_end`."""
        self._read_end, write_end = os.pipe()
        self.write_end = fcntl.fcntl(write_end, fcntl.F_DUPFD_CLOEXEC, _DESCRIPTOR)
        os.close(write_end)
        os.set_blocking(self._read_end, False)
        self._rest = b""  # of a line
        self.step: int | None = None
        self.began_at: float | None = None
        self.start_secs, self._made_at = 0.0, time.monotonic()
        self.sizes: tuple[int, ...] = ()
        self.leaving: set[int] = set()

    @property
    def pipe(self) -> tuple[int, int]:
        """What a worker recognizes the pipe by: the descriptor and the inode."""
        return self.write_end, os.fstat(self.write_end).st_ino

    def fileno(self) -> int:
        """Returns the descriptor to wait for."""
        return self._read_end

    def read(self) -> list[dict[str, Any]]:
        """Takes the messages that have come, and returns them."""
        messages: list[dict[str, Any]] = []
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self._read_end, 65536):
                *lines, self._rest = (self._rest + data).split(b"\n")
                messages += map(json.loads, lines)
        for message in messages:
            self._take(message)
        return messages

    def _take(self, message: dict[str, Any]) -> None:
        if "begins" in message:
            self.step, self.began_at = message["begins"], time.monotonic()
            self.start_secs = self.start_secs or self.began_at - self._made_at
        if "sizes" in message:
            self.sizes = tuple(message["sizes"])
        if "ends" in message:
            self.began_at = None
        if "leaves" in message:
            self.leaving.add(message["worker"])

    def send(self, **values: Any) -> None:
        """Sends a message from another thread of the launcher."""
        os.write(self.write_end, json.dumps(values).encode() + b"\n")

    def close(self) -> None:
        """Closes the pipe."""
        os.close(self._read_end)
        os.close(self.write_end)

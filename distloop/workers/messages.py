"""Messages: from a launcher to its workers at their start, and back; without TensorFlow.

    inbox = Inbox()                                                     # in the launcher, for one membership
    variables = Membership(2, "ab", 1, 3, "worker 1 failed", worker=0, pipe=inbox.pipe).variables()
    membership = find_membership()                                      # in a worker; None without a launcher
    membership.send(begins=20)                                          # a line through the pipe
    inbox.read()                                                        # in the launcher: inbox.step is 20

What follows from a message is a matter of `launcher/elastic`.
"""

import contextlib
import fcntl
import itertools
import json
import os
import time
from typing import Any, NamedTuple

_VARIABLE = "DISTLOOP_MEMBERSHIP"
_DESCRIPTOR = 100  # the least of the pipe, which has the same number in all workers: a program has no file there


class Membership(NamedTuple):
    """The workers that were started together with this one."""

    number: int  # from 1, of the launcher's starts
    launch: str  # a random name of the launcher
    least: int  # workers, of the launcher's --workers
    most: int
    cause: str  # why the membership before it ended; "": there was none
    worker: int  # the index of this worker
    pipe: tuple[int, int]  # descriptor and inode of the launcher's pipe
    lost_at: float = 0.0  # when the first worker of the membership before it ended; Unix, seconds
    ended_at: float = 0.0  # when the last one did
    started_at: float = 0.0  # when there were slots for this one

    @property
    def is_elastic(self) -> bool:
        """Whether the next membership may have another number of workers."""
        return self.least < self.most

    def variables(self) -> dict[str, str]:
        """Returns the environment variable that `find_membership` reads."""
        return {_VARIABLE: json.dumps(self._asdict())}

    def send(self, **values: Any) -> None:
        """Sends the launcher a message, if this process has its pipe; a process that a worker started has not."""
        descriptor, inode = self.pipe
        with contextlib.suppress(OSError):  # the launcher has ended, or the descriptor is closed
            if os.fstat(descriptor).st_ino == inode:
                os.write(descriptor, json.dumps({"worker": self.worker, **values}).encode() + b"\n")


def find_membership() -> Membership | None:
    """Returns the membership of this process; None if no launcher started it."""
    text = os.environ.get(_VARIABLE)
    return Membership(**json.loads(text)) if text else None


def send(**values: Any) -> None:
    """Sends a message to the launcher of this process, if there is one."""
    if (membership := find_membership()) is not None:
        membership.send(**values)


_marks: dict[str, float] = {}  # when this process came to a point for the first time; Unix, seconds


def mark(point: str) -> bool:
    """Keeps the time at which this process comes to a point; returns whether it is the first time."""
    is_first = point not in _marks
    _marks.setdefault(point, time.time())
    return is_first


def start_times(membership: Membership) -> dict[str, float]:
    """Returns the seconds from one mark of a start to the next, from the end of the membership before, in order."""
    times = {"lost": membership.lost_at, "ended": membership.ended_at, "waited": membership.started_at}
    pairs = itertools.pairwise([*times.items(), *_marks.items()])
    return {name: max(0.0, end - start) for (_, start), (name, end) in pairs}


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

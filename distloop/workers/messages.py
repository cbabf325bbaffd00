"""What a launcher tells its workers at their start, and what they send back; without TensorFlow.

    variables = Membership(2, "ab", 1, 3, "worker 1 failed", worker=0, pipe=inbox.pipe).variables()
    membership = find_membership()                                      # in a worker; None without a launcher
    membership.send(begins=20)                                          # a line through the pipe of `launcher/inbox`

What follows from a message is a matter of `launcher/elastic`.
"""

import contextlib
import itertools
import json
import os
import time
from typing import Any, NamedTuple

_VARIABLE = "DISTLOOP_MEMBERSHIP"


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

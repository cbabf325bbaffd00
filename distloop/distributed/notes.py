"""Notes: what a launcher tells its workers when they start, and what they tell it; without TensorFlow.

    notes = Notes()                                                     # in the launcher, for one membership
    variables = Membership(2, "ab", 1, 3, "worker 1 fell", worker=0, pipe=notes.pipe).variables()
    membership = find_membership()                                      # in a worker; None without a launcher
    membership.tell(begins=20)                                          # a line through the pipe
    notes.read()                                                        # in the launcher: notes.step is 20

It does not know what follows from a note (`membership`).
"""

import contextlib
import fcntl
import itertools
import json
import math
import os
import site
import sys
import sysconfig
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

_VARIABLE = "DISTLOOP_MEMBERSHIP"
_DESCRIPTOR = 100  # the least of the pipe, which has the same number in all workers: a program has no file there
_NAMES = 30  # of modules in a note: a pipe keeps 4,096 bytes together


class Membership(NamedTuple):
    """The workers that were started together with this one."""

    number: int  # from 1, of the launcher's starts
    launch: str  # a random name of the launcher
    least: int  # workers, of the launcher's --workers
    most: int
    cause: str  # why the membership before it ended; "": there was none
    worker: int  # the index of this worker
    pipe: tuple[int, int]  # descriptor and inode of the launcher's pipe
    fell_at: float = 0.0  # when the first worker of the membership before it ended; Unix, seconds
    ended_at: float = 0.0  # when the last one did
    started_at: float = 0.0  # when there were places for this one
    tells_modules: bool = False  # whether this worker tells the launcher what it has imported

    @property
    def is_elastic(self) -> bool:
        """Whether the next membership may have another number of workers."""
        return self.least < self.most

    def variables(self) -> dict[str, str]:
        """Returns the environment variable that `find_membership` reads."""
        return {_VARIABLE: json.dumps(self._asdict())}

    def tell(self, **values: Any) -> None:
        """Sends the launcher a note, if this process has its pipe; a process that a worker started has not."""
        descriptor, inode = self.pipe
        with contextlib.suppress(OSError):  # the launcher has ended, or the descriptor is closed
            if os.fstat(descriptor).st_ino == inode:
                os.write(descriptor, json.dumps({"worker": self.worker, **values}).encode() + b"\n")

    def tell_modules(self, names: Sequence[str]) -> None:
        """Sends the launcher names of modules, in notes that are short enough not to be mixed with another worker's."""
        for i in range(0, len(names), _NAMES):
            self.tell(modules=names[i : i + _NAMES], are_all=i + _NAMES >= len(names))


def find_membership() -> Membership | None:
    """Returns the membership of this process; None if no launcher started it."""
    text = os.environ.get(_VARIABLE)
    return Membership(**json.loads(text)) if text else None


def tell(**values: Any) -> None:
    """Sends a note to the launcher of this process, if there is one."""
    if (membership := find_membership()) is not None:
        membership.tell(**values)


def installed_modules() -> list[str]:
    """Returns the modules that this process has imported, but for those of the user's program."""
    paths = sysconfig.get_paths()
    folders = [paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    folders += [*site.getsitepackages(), site.getusersitepackages(), os.path.dirname(os.path.dirname(__file__))]
    prefixes = tuple(os.path.join(place, "") for folder in folders for place in (folder, os.path.realpath(folder)))
    program = getattr(sys.modules["__main__"], "__spec__", None)
    own = program.name.partition(".")[0] if program is not None else "__main__"
    modules = [(name, module) for name, module in list(sys.modules.items()) if name.partition(".")[0] != own]
    return [name for name, module in modules if name != "__main__" and _origin(module).startswith(prefixes)]


def _origin(module: Any) -> str:
    """Returns the file of a module; "" if it has none."""
    with contextlib.suppress(Exception):  # of a module that is no module
        return module.__spec__.origin or ""
    return ""


_marks: dict[str, float] = {}  # when this process came to a point for the first time; Unix, seconds


def mark(point: str) -> bool:
    """Keeps the time at which this process comes to a point; returns whether it is the first time."""
    is_first = point not in _marks
    _marks.setdefault(point, time.time())
    return is_first


def phases(membership: Membership) -> dict[str, float]:
    """Returns the seconds of each phase from the fall of the membership before to the last mark, in order."""
    times = {"fell": membership.fell_at, "ended": membership.ended_at, "waited": membership.started_at, **_marks}
    pairs = itertools.pairwise(times.items())
    return {name: max(0.0, end - start) for (_, start), (name, end) in pairs}


def change() -> dict[str, float]:
    """Returns when the membership before this one fell and had ended, and how long this one took to meet.

    Returns:
        `fell_at`, `ended_at` (Unix, seconds), `meet_secs`; only what is known.
    """
    membership = find_membership()
    known = {"meet_secs": _marks["met"] - _marks["imported"]} if "met" in _marks else {}
    if membership is not None and membership.cause:
        known |= {"fell_at": membership.fell_at, "ended_at": membership.ended_at}
    return known


class Notes:
    """What the workers of one membership have told.

    Attributes:
        step: from which the run went on; None: no worker came so far.
        began_at: when a worker came so far, in seconds on the monotonic clock; None: the run does not train now.
        start_secs: from here until a worker came so far for the first time; 0: none did.
        sizes: numbers of workers that the run can have; empty: nothing was told.
        leavers: indices of the workers that somebody asked to leave.
        on_modules: called with the names of the modules that a worker has imported, once it has told all.
    """

    def __init__(self, on_traced: Callable[[int, dict[str, float]], None] | None = None) -> None:
        """Opens the pipe, whose end for the workers is `write_end`.

        Args:
            on_traced: called with step and `phases` once the chief has traced a step.
        """
        self._on_traced = on_traced
        self._read_end, write_end = os.pipe()
        self.write_end = fcntl.fcntl(write_end, fcntl.F_DUPFD_CLOEXEC, _DESCRIPTOR)
        os.close(write_end)
        os.set_blocking(self._read_end, False)
        self._rest = b""  # of a line
        self.step: int | None = None
        self.began_at: float | None = None
        self.start_secs, self._made_at = 0.0, time.monotonic()
        self.sizes: tuple[int, ...] = ()
        self.leavers: set[int] = set()
        self.on_modules: Callable[[list[str]], None] = lambda names: None
        self._modules: list[str] = []
        self._stop_at = math.inf

    @property
    def pipe(self) -> tuple[int, int]:
        """What a worker recognizes the pipe by: the descriptor and the inode."""
        return self.write_end, os.fstat(self.write_end).st_ino

    def fileno(self) -> int:
        """Returns the descriptor to wait for."""
        return self._read_end

    def read(self) -> None:
        """Takes the notes that have come."""
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self._read_end, 65536):
                *lines, self._rest = (self._rest + data).split(b"\n")
                for line in lines:
                    self._take(json.loads(line))

    def _take(self, note: dict[str, Any]) -> None:
        if "begins" in note:
            self.step, self.began_at = note["begins"], time.monotonic()
            self.start_secs = self.start_secs or self.began_at - self._made_at
        if "sizes" in note:
            self.sizes = tuple(note["sizes"])
        if "traced" in note and self._on_traced is not None:
            self._on_traced(note["step"], note["traced"])
        if "modules" in note:
            self._modules += note["modules"]
            if note["are_all"]:
                self.on_modules(self._modules)
        if "ends" in note:
            self.began_at = None
        if "leaves" in note:
            self.leavers.add(note["worker"])
        if "stop_secs" in note:
            self._stop_at = min(self._stop_at, time.monotonic() + note["stop_secs"])

    def tell(self, **values: Any) -> None:
        """Sends a note from another thread of the launcher; with `stop_secs`, the workers are stopped after so long."""
        os.write(self.write_end, json.dumps(values).encode() + b"\n")

    def take_stop_at(self) -> float:
        """Returns when the workers are to be stopped, on the monotonic clock, once; inf: nothing new was told."""
        stop_at, self._stop_at = self._stop_at, math.inf
        return stop_at

    def close(self) -> None:
        """Closes the pipe."""
        os.close(self._read_end)
        os.close(self.write_end)

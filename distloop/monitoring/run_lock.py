"""Run lock: one process at a time writes to a workdir, also on a disk that several hosts share.

    with RunLock("runs/first") as lock:     # a second process is refused in a sentence that names this one
        lock.verify()                       # before a rename: raises LockLost if another process has taken over

The lock is the file `run.lock`. It names the process that holds it (host, number, start) and a token of its own. A
thread touches it every 5 seconds. Where a process ended without releasing it, the next one replaces it:

- on the same host at once: its number belongs to no process, or to one with another start;
- on another host, after another boot or in another container, when it has shown no sign of life for 30 seconds, by the
  clock of the process that waits for it and says so.

Workers that a launcher started again have a higher number of their membership: the new chief takes the lock from one of
an older membership, whether that is alive or not, and an older one is refused.

No `flock` is needed, which some shared file systems lack. A process that was stopped for longer finds another token
when it goes on, and writes no more. Who only reads a workdir needs no lock.
"""

import contextlib
import errno
import json
import os
import socket
import threading
import time
import uuid
from typing import Any, NamedTuple

from distloop.atomic_files import identify_directory, open_at_once, start_ticks
from distloop.distributed.notes import find_membership
from distloop.monitoring.console import say
from distloop.monitoring.records import parse_json

FILE = "run.lock"
_READ_ONLY = (errno.EACCES, errno.EPERM, errno.EROFS)

held: set[str] = set()  # the tokens of all locks that this process holds


class LockLost(RuntimeError):  # noqa: N818 - what happened
    """Another process writes to the workdir; this one writes no more."""


class Holder(NamedTuple):
    """The content of the file."""

    token: str
    host: str
    machine: str  # differs between boots and containers that have one host name; empty: unknown
    process: int
    start: str  # of the process, in ticks since the boot; empty: unknown
    since: float  # when it took the lock; Unix, seconds
    launch: str = ""  # the name of its launcher; empty: there is none
    membership: int = 0  # the number of the launcher's start
    place: str = ""  # where the locked directory is, by `LockFile.place`; empty: unknown

    def __str__(self) -> str:
        is_here = self.token in held and self.process == os.getpid()
        process = "another fit of this process" if is_here else f"process {self.process} on {self.host}"
        process += f" (membership {self.membership})" if self.membership > 1 else ""
        return f"{process}, since {time.strftime('%Y-%m-%d %H:%M:%S %z', time.localtime(self.since))}"


class LockView(NamedTuple):
    """What a lock's file shows."""

    holder: Holder | None  # None: the file holds something else, or only a part of it yet
    sign: Any  # of life: another one each time


class LockFile:
    """The file of a lock on a disk."""

    heartbeat_secs, stale_secs = 5.0, 30.0  # between two signs of life; without one, after which a process is dead
    poll_secs = 0.5  # after which a lock is read again whose process may be alive or dead
    settle_secs = 0.2  # in which processes that replace a lock at once have all done so; the last one has it

    def __init__(self, path: str):
        """Touches no disk."""
        self._path = path

    def place(self) -> str:
        """Returns a text that the file does not have in a copy of its directory, which is made if it is missing."""
        folder = os.path.dirname(self._path) or "."
        with contextlib.suppress(OSError):
            os.makedirs(folder, exist_ok=True)
            return identify_directory(folder)
        return ""

    def read(self) -> LockView:
        """Returns what the file shows.

        Raises:
            OSError: if it cannot be read, or there is none.
        """
        sign = os.lstat(self._path).st_mtime_ns
        if os.path.islink(self._path):
            return LockView(None, sign)
        with open_at_once(self._path) as file:
            return LockView(parse(file.read(10_000)), sign)

    def create(self, holder: Holder) -> bool:
        """Writes the file, whole or not at all; returns False if there is one."""
        return _create(self._path, holder)

    def replace(self, holder: Holder) -> None:
        """Writes the file over another one."""
        try:
            _create(beside := f"{self._path}.{holder.token}", holder)
            os.replace(beside, self._path)
        finally:
            with contextlib.suppress(OSError):
                os.remove(beside)

    def touch(self, holder: Holder) -> None:
        """Shows a sign of life."""
        os.utime(self._path)

    def remove(self) -> None:
        """Removes the file."""
        os.remove(self._path)


class RunLock:
    """The lock of a workdir; may be entered several times, one inside the other.

    Attributes:
        lost: why another process has the lock, when it was read last; empty: this one had it.
    """

    def __init__(self, workdir: str, file: LockFile | None = None):
        """Touches no disk; the file is another one in a bucket, or for what is locked apart from the run."""
        self._workdir = workdir
        self._file = file or LockFile(os.path.join(workdir, FILE))
        self._holder: Holder | None = None  # this process, while it holds the lock
        self._depth = 0
        self._mutex = threading.RLock()  # held while a thread of this process reads the file, or writes it
        self._released = threading.Event()
        self.lost = ""

    def __enter__(self) -> "RunLock":
        """Takes the lock; waits while it is not known whether the process that has it is alive.

        In a directory that may only be read it goes on without one: the first write fails anyway.

        Raises:
            ValueError: if another process has it, or the workdir cannot be written to.
            OSError: if a bucket cannot be written to.
        """
        if not self._is_held():
            holder = _this_process(self._file.place())
            held.add(holder.token)
            try:
                self._acquire(holder)
            except BaseException:
                held.discard(holder.token)
                raise
            self._holder, self._depth, self.lost = holder, 0, ""
            self._mutex, self._released = threading.RLock(), threading.Event()  # a forked child's may be locked
            beat = threading.Thread(target=self._beat, args=[self._released], name="distloop-run-lock", daemon=True)
            beat.start()
        self._depth += 1
        return self

    def __exit__(self, *error: object) -> None:
        """Releases the lock once every entry has been left; a forked child leaves it to its parent."""
        if not self._is_held():
            return
        self._depth -= 1
        if self._depth:
            return
        self._released.set()
        with self._mutex, contextlib.suppress(OSError):
            holder, self._holder = self._holder, None
            assert holder is not None
            held.discard(holder.token)
            if self._file.read().holder == holder:
                self._file.remove()

    def verify(self) -> None:
        """Checks that this process still holds the lock; writes the file again if somebody has removed it.

        Raises:
            LockLost: if another process holds it, or this one never did.
            OSError: if the file cannot be read.
        """
        if not self._is_held():
            raise LockLost(
                f"Nothing was written to workdir={self._workdir!r}, whose lock this process does not hold: train and "
                "save in the process that called fit, not in a child of it."
            )
        with self._mutex:
            own = self._holder
            if own is None or self._shows(own) or self._file.create(own):
                return
            if (holder := self._file.read().holder) == own:
                return
            is_older = holder is not None and _has_newer_membership(holder, own)
            stood_still = f"stood still for {self._file.stale_secs:g} seconds or more"
            self.lost = (
                f"workdir={self._workdir!r} was taken over by {holder or 'another process'}, as this one "
                f"{f'is of membership {own.membership}' if is_older else stood_still}; it writes no more there: end "
                "one of the two."
            )
            raise LockLost(self.lost)

    def _is_held(self) -> bool:
        return self._holder is not None and self._holder.process == os.getpid()

    def _shows(self, holder: Holder | None) -> bool:
        """Returns whether the file is there and has this content."""
        try:
            return self._file.read().holder == holder
        except FileNotFoundError:
            return False

    def _beat(self, released: threading.Event) -> None:
        """Shows that this process lives until the lock is released or lost."""
        while not released.wait(self._file.heartbeat_secs) and not self.lost:
            with self._mutex, contextlib.suppress(LockLost, OSError):  # who writes next to that disk will notice
                if (own := self._holder) is not None:
                    self.verify()
                    self._file.touch(own)

    def _acquire(self, own: Holder) -> None:
        """Creates the file, or replaces that of a dead process.

        Raises:
            ValueError: if another process holds the lock, or the file cannot be written.
        """
        first, since, stale_secs = None, 0.0, self._file.stale_secs
        try:
            while not self._file.create(own):
                try:
                    view = self._file.read()
                except FileNotFoundError:
                    continue  # it was released at this moment
                holder, lives = view.holder or "another process", _is_alive(own, view.holder)
                if first is not None and lives is None and view != first:
                    lives = True
                if lives:
                    raise ValueError(
                        f"workdir={self._workdir!r} is being written to by {holder}: wait until that run has ended, "
                        "end it, or give another workdir."
                    )
                if first is None:
                    first, since = view, time.monotonic()
                    if lives is None:
                        say(
                            f"workdir={self._workdir!r} is locked by {holder}; if it shows no sign of life for "
                            f"{stale_secs:g} seconds, this run goes on."
                        )
                if lives is None and time.monotonic() - since < stale_secs:
                    time.sleep(self._file.poll_secs)
                elif self._shows(view.holder):
                    self._file.replace(own)
                    time.sleep(self._file.settle_secs)
                    if self._shows(own):
                        return
        except OSError as error:
            if error.errno in _READ_ONLY:
                return
            if error.errno is None:  # of a bucket
                raise
            raise ValueError(
                f"workdir={self._workdir!r} cannot be written ({error.strerror}): give a directory that you may write "
                "to, or leave workdir empty to write nothing."
            ) from error


def is_held(workdir: str) -> bool:
    """Returns True if a process on this machine that is alive holds the workdir's lock."""
    try:
        holder = LockFile(os.path.join(workdir, FILE)).read().holder
    except OSError:
        return False
    return holder is not None and holder.machine == _machine() and start_ticks(holder.process) == holder.start


def _this_process(place: str) -> Holder:
    """Returns what a lock's file holds while this process has the lock, with a new token."""
    number, membership = os.getpid(), find_membership()
    launch = (membership.launch, membership.number) if membership else ("", 0)
    start = start_ticks(number) or ""
    return Holder(uuid.uuid4().hex, socket.gethostname(), _machine(), number, start, time.time(), *launch, place)


def _is_alive(own: Holder, holder: Holder | None) -> bool | None:
    """Returns whether the process that holds a lock is alive, or of a newer membership than this one; None: unknown."""
    if holder is None:
        return None
    if _has_newer_membership(own, holder) or _has_newer_membership(holder, own):
        return _has_newer_membership(holder, own)
    if (holder.host, holder.machine) != (own.host, own.machine):
        return None
    if holder.place and own.place and holder.place != own.place:
        return False  # the file was copied with its directory
    if holder.process == own.process:
        return holder.token in held  # else of a process with the same number, or of this one before `exec`
    start = start_ticks(holder.process)
    return start == holder.start if start is None or start and holder.start else None


def _has_newer_membership(one: Holder, other: Holder) -> bool:
    """Returns whether both have the same launcher, and it started `one` after `other`."""
    return bool(one.launch) and one.launch == other.launch and one.membership > other.membership


def _machine() -> str:
    """Returns a text that processes have in common if they see each other's numbers."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _create(path: str, holder: Holder) -> bool:
    """Writes a lock's file, whole or not at all; returns False if there is one."""
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    try:
        with open(path, "x", encoding="utf-8") as file:
            try:
                json.dump(holder._asdict(), file)
                file.flush()
            except OSError:
                os.remove(path)
                raise
    except FileExistsError:
        return False
    return True


def parse(text: bytes) -> Holder | None:
    """Returns the holder that a lock's file names; None if it holds something else."""

    def as_holder(fields: Any) -> Holder:
        time.localtime(fields["since"])  # which is shown
        kinds = Holder.__annotations__  # older files lack some fields
        return Holder(**{name: kind(fields[name]) for name, kind in kinds.items() if name in fields})

    try:
        return parse_json(text, as_holder)
    except ValueError:
        return None

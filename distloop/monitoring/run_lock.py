"""Run lock: one process at a time writes to a workdir, also on a disk that several hosts share.

    with RunLock("runs/first") as lock:     # a second process is refused in a sentence that names this one
        lock.verify()                       # before a rename: raises LockLost if another process has taken over

The lock is the file `run.lock`. It names the process that holds it (host, number, start) and a token of its own. A
thread touches it every HEARTBEAT_SECS. Where a process ended without releasing it, the next one replaces it:

- on the same host at once: its number belongs to no process, or to one with another start;
- on another host, after another boot or in another container, when the file was not touched for STALE_SECS. Both times
  are the file server's, as the clocks of hosts may differ. The wait is printed.

Workers that a launcher started again have a higher number of their membership: the new chief takes the lock from one of
an older membership, whether that is alive or not, and an older one is refused.

No `flock` is needed, which some shared file systems lack. A process that was stopped for longer than STALE_SECS finds
another token when it goes on, and writes no more. Who only reads a workdir needs no lock.
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

HEARTBEAT_SECS = 5.0
STALE_SECS = 30.0
_POLL_SECS = 0.5  # after which a lock is read again whose process may be alive or dead
_SETTLE_SECS = 0.2  # if several processes replace a lock at once, all have done so after this time, and the last has it
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
    place: str = ""  # where the locked directory is, by `identify_directory`; empty: unknown

    def __str__(self) -> str:
        is_here = self.token in held and self.process == os.getpid()
        process = "another fit of this process" if is_here else f"process {self.process} on {self.host}"
        process += f" (membership {self.membership})" if self.membership > 1 else ""
        return f"{process}, since {time.strftime('%Y-%m-%d %H:%M:%S %z', time.localtime(self.since))}"


class LockView(NamedTuple):
    """What a process sees that wants the lock."""

    holder: Holder | None  # None: the file holds something else, or only a part of it yet
    touched_at: float  # by the file server's clock, in seconds
    now: float  # by the same clock


class RunLock:
    """The lock of a workdir; may be entered several times, one inside the other."""

    def __init__(self, workdir: str, file: str = "run.lock"):
        """Touches no disk; the file is another one for what is locked apart from the run."""
        self._workdir = workdir
        self._path = os.path.join(workdir, file)
        self._holder: Holder | None = None  # this process, while it holds the lock
        self._depth = 0
        self._mutex = threading.Lock()  # held while a thread of this process reads the file or removes it
        self._released = threading.Event()

    def __enter__(self) -> "RunLock":
        """Takes the lock; waits while it is not known whether the process that has it is alive.

        In a directory that may only be read it goes on without one: the first write fails anyway.

        Raises:
            ValueError: if another process has it, or the workdir cannot be written to.
        """
        if not self._is_held():
            holder = this_process(self._workdir)
            held.add(holder.token)
            try:
                self._acquire(holder)
            except BaseException:
                held.discard(holder.token)
                raise
            self._holder, self._depth = holder, 0
            self._mutex, self._released = threading.Lock(), threading.Event()  # a forked child's may be locked for ever
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
            if _holds(self._path, holder):
                os.remove(self._path)

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
            if own is None or _create(self._path, own) or (holder := _read(self._path)) == own:
                return
            is_older = holder is not None and _has_newer_membership(holder, own)
            stood_still = f"stood still for {STALE_SECS:g} seconds or more"
            raise LockLost(
                f"workdir={self._workdir!r} was taken over by {holder or 'another process'}, as this one "
                f"{f'is of membership {own.membership}' if is_older else stood_still}; it writes no more there: end "
                "one of the two."
            )

    def _is_held(self) -> bool:
        return self._holder is not None and self._holder.process == os.getpid()

    def _beat(self, released: threading.Event) -> None:
        """Touches the file until the lock is released or lost."""
        while not released.wait(HEARTBEAT_SECS):
            try:
                self.verify()
                os.utime(self._path)
            except LockLost:
                return
            except OSError:  # who writes next to that disk will notice
                continue

    def _acquire(self, own: Holder) -> None:
        """Creates the file, or replaces that of a dead process.

        Raises:
            ValueError: if another process holds the lock, or the file cannot be written.
        """
        beside = f"{self._path}.{own.token}"
        try:
            first = None
            while not _create(self._path, own):
                view = _view(self._path, beside, own)
                if view is None:
                    continue  # it was released at this moment
                is_first, first = first is None, first or view
                holder, lives = view.holder or "another process", is_alive(own, first, view)
                if lives:
                    raise ValueError(
                        f"workdir={self._workdir!r} is being written to by {holder}: wait until that run has ended, "
                        "end it, or give another workdir."
                    )
                if lives is None:
                    if is_first:
                        say(
                            f"workdir={self._workdir!r} is locked by {holder}, whose last sign of life is "
                            f"{view.now - view.touched_at:.0f} seconds old; if there is none for {STALE_SECS:g}, this "
                            "run goes on."
                        )
                    time.sleep(_POLL_SECS)
                elif _holds(self._path, view.holder):
                    os.replace(beside, self._path)
                    time.sleep(_SETTLE_SECS)
                    if _holds(self._path, own):
                        return
        except OSError as error:
            if error.errno in _READ_ONLY:
                return
            raise ValueError(
                f"workdir={self._workdir!r} cannot be written ({error.strerror}): give a directory that you may write "
                "to, or leave workdir empty to write nothing."
            ) from error
        finally:
            with contextlib.suppress(OSError):
                os.remove(beside)


def is_held(workdir: str) -> bool:
    """Returns True if a process on this machine that is alive holds the workdir's lock."""
    try:
        holder = _read(os.path.join(workdir, "run.lock"))
    except OSError:
        return False
    return holder is not None and holder.machine == _machine() and start_ticks(holder.process) == holder.start


def _view(path: str, beside: str, own: Holder) -> LockView | None:
    """Returns what the lock's file shows; None if there is none.

    Args:
        path: of the lock.
        beside: of a file of this process, which has the file server's time when it is touched.
        own: the content of that file.
    """
    _create(beside, own)
    os.utime(beside)
    try:
        return LockView(_read(path), os.lstat(path).st_mtime, os.stat(beside).st_mtime)
    except FileNotFoundError:
        return None


def this_process(workdir: str = "") -> Holder:
    """Returns what a lock's file holds while this process has the lock, with a new token.

    Args:
        workdir: the locked directory, made if it is missing; empty: it is in a bucket.
    """
    number, membership = os.getpid(), find_membership()
    holder = Holder(uuid.uuid4().hex, socket.gethostname(), _machine(), number, start_ticks(number) or "", time.time())
    with contextlib.suppress(OSError):
        os.makedirs(workdir, exist_ok=True)
        holder = holder._replace(place=identify_directory(workdir))
    return holder._replace(launch=membership.launch, membership=membership.number) if membership else holder


def is_alive(own: Holder, first: LockView, last: LockView, stale_secs: float | None = None) -> bool | None:
    """Returns whether the process that holds the lock is alive; None: it is not known yet.

    Args:
        own: this process.
        first: what it saw first.
        last: what it saw last.
        stale_secs: without a sign of life, after which the holder is not alive; None: STALE_SECS.
    """
    holder = last.holder
    if holder is not None and (_has_newer_membership(own, holder) or _has_newer_membership(holder, own)):
        return _has_newer_membership(holder, own)
    if holder is not None and (holder.host, holder.machine) == (own.host, own.machine):
        if holder.place and own.place and holder.place != own.place:
            return False  # the file was copied with its directory
        if holder.process == own.process:
            return holder.token in held  # else of a process with the same number, or of this one before `exec`
        start = start_ticks(holder.process)
        if start is None or start and holder.start:
            return start == holder.start
    if last[:2] != first[:2]:
        return True  # it has been touched
    touched_at = min(last.touched_at, first.now)  # later only by a clock that was set back since
    return False if last.now - touched_at > (stale_secs or STALE_SECS) else None


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


def _read(path: str) -> Holder | None:
    """Returns the content of a lock's file; None if it is something else.

    Raises:
        OSError: if it cannot be read.
    """
    if os.path.islink(path):
        return None
    with open_at_once(path) as file:
        return parse(file.read(10_000))


def parse(text: bytes) -> Holder | None:
    """Returns the holder that a lock's file names; None if it holds something else."""
    try:
        return parse_json(text, _as_holder)
    except ValueError:
        return None


def _as_holder(fields: Any) -> Holder:
    time.localtime(fields["since"])  # which is shown
    kinds = Holder.__annotations__  # older files lack some fields
    return Holder(**{name: kind(fields[name]) for name, kind in kinds.items() if name in fields})


def _holds(path: str, holder: Holder | None) -> bool:
    """Returns whether a lock's file is there and has this content."""
    try:
        return _read(path) == holder
    except FileNotFoundError:
        return False

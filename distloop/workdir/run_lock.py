"""Run lock: one process at a time writes to a workdir, also on a disk that several hosts share.

    with RunLock("runs/first") as lock:     # a second process is refused in a sentence that names this one
        lock.verify()                       # before a rename: raises LockLost if another process has taken over

The lock is the file `run.lock`. It names the process that holds it (host, number, start) and a token of its own. A
thread touches it every 5 seconds; in a bucket it is written again every 10, with a number that grows. Where a process
ended without releasing it, the next one replaces it:

- on the same host at once: its number belongs to no process, or to one with another start;
- on another host, after another boot or in another container, when the file was not touched for 30 seconds, in a bucket
  60, by the clock of the process that waits for it and says so.

Workers that a launcher started again have a higher number of their membership: the new chief takes the lock from one of
an older membership, whether that is alive or not, and an older one is refused.

No `flock` is needed, which some shared file systems lack. A process that was stopped for longer finds another token
when it goes on, and writes no more; so does one whose directory was moved or removed, which it does not make anew. Who
only reads a workdir needs no lock.
"""

import contextlib
import errno
import json
import os
import secrets
import socket
import threading
import time
import uuid
from typing import Any, NamedTuple

from distloop.atomic_files import identify_directory, open_at_once, start_ticks
from distloop.log import say
from distloop.workdir.records import parse_json
from distloop.workers.messages import find_membership

FILE = "run.lock"
_READ_ONLY = (errno.EACCES, errno.EPERM, errno.EROFS)

held: set[str] = set()  # the tokens of all locks that this process holds


class LockLost(RuntimeError):  # noqa: N818 - what happened
    """Another process writes to the workdir, or it was moved or removed; this process writes no more."""


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
    place: str = ""  # where the locked directory is, by `identify`; empty: unknown

    def __str__(self) -> str:
        is_here = self.token in held and self.process == os.getpid()
        process = "another fit of this process" if is_here else f"process {self.process} on {self.host}"
        process += f" (membership {self.membership})" if self.membership > 1 else ""
        return f"{process}, since {time.strftime('%Y-%m-%d %H:%M:%S %z', time.localtime(self.since))}"


class Pace(NamedTuple):
    """Times of a lock, in seconds."""

    heartbeat_secs: float = 5.0  # between two signs of life
    stale_secs: float = 30.0  # without a sign of life, after which a process counts as dead
    poll_secs: float = 0.5  # after which a lock is read again whose process may be alive or dead
    race_secs: float = 0.2  # in which processes that replace a lock at once have all done so; the last one has it


class DiskDirectory:
    """A directory on a disk, with what a lock needs of one; `bucket.remote_directory` has one behind a URL.

    Attributes:
        pace: of a lock.
    """

    pace = Pace()

    def __init__(self, path: str):
        """Touches no disk."""
        self._path = path

    def identify(self) -> str:
        """Returns a text that differs between the directory and its copy; makes the directory if it is missing."""
        with contextlib.suppress(OSError):
            os.makedirs(self._path, exist_ok=True)
            return identify_directory(self._path)
        return ""

    def is_still(self, identity: str) -> bool:
        """Returns whether the path is the directory that `identify` named; an unknown one counts as still there."""
        try:
            return not identity or identify_directory(self._path) == identity
        except (FileNotFoundError, NotADirectoryError):
            return False

    def read(self, name: str) -> bytes | None:
        """Returns the first bytes of a file, none of a link or a pipe; None: there is no file.

        Raises:
            OSError: if it cannot be read.
        """
        try:
            if os.path.islink(path := os.path.join(self._path, name)):
                return b""
            with open_at_once(path) as file:
                return file.read(10_000) or b""
        except FileNotFoundError:
            return None

    def create(self, name: str, data: bytes) -> bool:
        """Writes a file atomically; returns False if there is one."""
        os.makedirs(self._path, exist_ok=True)
        path = os.path.join(self._path, name)
        try:
            with open(path, "xb") as file:
                try:
                    file.write(data)
                    file.flush()
                except OSError:
                    os.remove(path)
                    raise
        except FileExistsError:
            return False
        return True

    def write(self, name: str, data: bytes) -> None:
        """Writes a file, over another one."""
        beside = f"{name}.{os.getpid()}-{secrets.token_hex(4)}.tmp"
        try:
            self.create(beside, data)
            os.replace(os.path.join(self._path, beside), os.path.join(self._path, name))
        finally:
            with contextlib.suppress(OSError):
                self.delete(beside)

    def renew(self, name: str, data: bytes) -> None:
        """Touches a file; where `sign` cannot show that, it is written again with other data."""
        os.utime(os.path.join(self._path, name))

    def sign(self, name: str) -> Any:
        """Returns what `renew` changes; nothing if there is no file."""
        with contextlib.suppress(FileNotFoundError):
            return os.lstat(os.path.join(self._path, name)).st_mtime_ns
        return None

    def delete(self, name: str) -> None:
        """Deletes a file."""
        os.remove(os.path.join(self._path, name))


class RunLock:
    """The lock of a workdir.

    Attributes:
        lost: why this process has the lock no more, when it was read last; empty: this one had it.
    """

    def __init__(self, workdir: str, file: str = FILE, directory: Any = None):
        """Touches no disk.

        Args:
            workdir: the directory.
            file: the name of the file, another one for what is locked apart from the run.
            directory: with the methods of a `DiskDirectory`, which it is if it is None.
        """
        self._workdir, self._file = workdir, file
        self._directory = DiskDirectory(workdir) if directory is None else directory
        self._pace: Pace = self._directory.pace
        self._num_beats = 0
        self._holder: Holder | None = None  # this process, while it holds the lock
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
        holder = _this_process(self._directory.identify())
        held.add(holder.token)
        try:
            self._acquire(holder)
        except BaseException:
            held.discard(holder.token)
            raise
        self._holder, self.lost = holder, ""
        self._mutex, self._released = threading.RLock(), threading.Event()  # a forked child's may be locked
        threading.Thread(target=self._beat, args=[self._released], name="distloop-run-lock", daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        """Releases the lock; a forked child leaves it to its parent."""
        if not self._is_held():
            return
        self._released.set()
        with self._mutex, contextlib.suppress(OSError):
            holder, self._holder = self._holder, None
            assert holder is not None
            held.discard(holder.token)
            if parse(self._directory.read(self._file)) == holder:
                self._directory.delete(self._file)

    def verify(self) -> None:
        """Checks that this process still holds the lock; writes the file again if somebody has removed it.

        Raises:
            LockLost: if another process holds it, this one never did, or the directory was moved or removed.
            OSError: if the file cannot be read.
        """
        if not self._is_held():
            raise LockLost(
                f"Nothing was written to workdir={self._workdir!r}, whose lock this process does not hold: train and "
                "save in the process that called fit, not in a child of it."
            )
        with self._mutex:
            own = self._holder
            if own is None or self._is_holder(own):
                return
            if not self._directory.is_still(own.place):
                self.lost = (
                    f"workdir={self._workdir!r} was moved or removed while this run trained there, and nothing was "
                    "made anew in its place: give the workdir as it is called now, to go on from its last checkpoint."
                )
                raise LockLost(self.lost)
            if self._directory.create(self._file, self._content(own)):
                return
            if (holder := parse(self._directory.read(self._file))) == own:
                return
            is_older = holder is not None and _has_newer_membership(holder, own)
            stood_still = f"stood still for {self._pace.stale_secs:g} seconds or more"
            self.lost = (
                f"workdir={self._workdir!r} was taken over by {holder or 'another process'}, as this one "
                f"{f'is of membership {own.membership}' if is_older else stood_still}; it writes no more there: end "
                "one of the two."
            )
            raise LockLost(self.lost)

    def _is_held(self) -> bool:
        return self._holder is not None and self._holder.process == os.getpid()

    def _is_holder(self, holder: Holder | None) -> bool:
        """Returns whether the file is there and has this content."""
        content = self._directory.read(self._file)
        return content is not None and parse(content) == holder

    def _content(self, own: Holder) -> bytes:
        return json.dumps({**own._asdict(), "beats": self._num_beats}).encode()

    def _beat(self, released: threading.Event) -> None:
        """Shows that this process lives until the lock is released or lost."""
        while not released.wait(self._pace.heartbeat_secs) and not self.lost:
            with self._mutex, contextlib.suppress(LockLost, OSError):  # who writes next to that disk will notice
                if (own := self._holder) is not None:
                    self.verify()
                    self._num_beats += 1
                    self._directory.renew(self._file, self._content(own))

    def _acquire(self, own: Holder) -> None:
        """Creates the file, or replaces that of a dead process.

        Raises:
            ValueError: if another process holds the lock, or the file cannot be written.
        """
        first, since, stale_secs = None, 0.0, self._pace.stale_secs
        try:
            while not self._directory.create(self._file, self._content(own)):
                if (content := self._directory.read(self._file)) is None:
                    continue  # it was released at this moment
                holder, sign = parse(content), (content, self._directory.sign(self._file))
                lives = _is_alive(own, holder)
                if lives is None and first is not None and sign != first:
                    lives = True
                if lives:
                    raise ValueError(
                        f"workdir={self._workdir!r} is being written to by {holder or 'another process'}: wait until "
                        "that run has ended, end it, or give another workdir."
                    )
                if first is None:
                    first, since = sign, time.monotonic()
                    if lives is None:
                        say(
                            f"workdir={self._workdir!r} is locked by {holder or 'another process'}; if it shows no "
                            f"sign of life for {stale_secs:g} seconds, this run goes on."
                        )
                if lives is None and time.monotonic() - since < stale_secs:
                    time.sleep(self._pace.poll_secs)
                elif self._is_holder(holder):
                    self._directory.write(self._file, self._content(own))
                    time.sleep(self._pace.race_secs)
                    if self._is_holder(own):
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


def parse(content: bytes | None) -> Holder | None:
    """Returns the holder that a lock's file names; None if it holds something else, or there is none."""

    def as_holder(fields: Any) -> Holder:
        time.localtime(fields["since"])  # which is shown
        kinds = Holder.__annotations__  # older files lack some fields
        return Holder(**{name: kind(fields[name]) for name, kind in kinds.items() if name in fields})

    try:
        return parse_json(content or b"", as_holder)
    except ValueError:
        return None

"""Meeting: files in a directory that all hosts share, by which their launchers agree on the next membership.

    with Meeting("runs/first/membership", "a-1f3c", describe, on_look) as meeting:  # describe() returns this Host
        view = meeting.view                         # hosts, the newest membership, and how long each host is silent
        meeting.propose(Record(view.number + 1))    # False: another launcher was first

There are two kinds of files. `<host>.host` belongs to one launcher, which replaces it twice a second, with another
content each time. `<number>.membership` is created once, exclusively, and never changes: two launchers that act on the
same look at the directory cannot both create the next number. Whoever creates it has seen the one before.

No clock of another host is read: a host is silent for as long as this process looked and saw its file not change.
A directory in which each host renames a file shows new names at once, over NFS too. It does not know who proposes when.
"""

import json
import os
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, NamedTuple

from distloop.launcher import processes

LOOK_SECS = 0.5
_KEPT = 10  # memberships before the newest one, to read what happened


class Report(NamedTuple):
    """How a membership ended on a host; see `processes.Outcome` and `notes.Notes`."""

    number: int  # of the membership
    code: int
    is_crash: bool
    is_last: bool
    has_fallen: bool  # a worker of this host failed by itself
    cause: str
    has_left_for_more: bool
    fell_at: float  # Unix, seconds
    step: int | None
    sizes: tuple[int, ...]
    leavers: tuple[int, ...]


class Host(NamedTuple):
    """A launcher, as it announces itself."""

    name: str
    since: float  # Unix, seconds
    address: str  # under which the others reach it
    ports: tuple[int, ...]  # one for each worker that it has a place for now
    has_left: bool = False  # for good
    report: Report | None = None  # of the last membership of which it was a part


class Member(NamedTuple):
    """The part of a host in a membership."""

    name: str
    address: str
    ports: tuple[int, ...]  # one for each of its workers


class Record(NamedTuple):
    """A membership, or the end of a run."""

    number: int
    members: tuple[Member, ...] = ()  # in the order of the workers, the chief first
    code: int | None = None  # with which all launchers end; None: it is a membership
    launch: str = ""  # a random name, the same in all records of a directory
    secret: str = ""  # that signs the messages of its workers
    cause: str = ""  # why the membership before ended; "": there was none
    fell_at: float = 0.0  # as in `elastic.Change`
    ended_at: float = 0.0
    started_at: float = 0.0
    step: int = -1  # as in `membership.Plan`
    restarts: int = 0
    sizes: tuple[int, ...] = ()

    @property
    def addresses(self) -> list[str]:
        """`host:port` of each worker."""
        return [f"{member.address}:{port}" for member in self.members for port in member.ports]

    def workers_of(self, name: str) -> range:
        """Returns the indices of the workers on a host; empty if it is no member."""
        first = 0
        for member in self.members:
            if member.name == name:
                return range(first, first + len(member.ports))
            first += len(member.ports)
        return range(0)


class View(NamedTuple):
    """What a launcher sees of the directory."""

    hosts: Mapping[str, Host]
    silent_secs: Mapping[str, float]  # since a host's file changed, or was seen first
    alive: frozenset[str]  # hosts whose files have changed
    number: int  # the highest; of a record that may be written just now
    record: Record | None  # the newest that is whole


def find_directory(given: str | None, program: Sequence[str]) -> str:
    """Returns the directory in which the launchers of a run meet.

    Args:
        given: a directory that all hosts share; None: the program's --workdir.
        program: the program and its flags.

    Raises:
        ValueError: if there is none.
    """
    matches = [re.fullmatch(r"--?workdir(?:=(.*))?", flag) for flag in program]
    flags = [(match[1], following) for match, following in zip(matches, [*program[1:], ""], strict=True) if match]
    values = [following if value is None else value for value, following in flags]
    directory = given or (values[-1] if values else "")
    if not directory or "://" in directory or "{" in directory:
        named = (
            f"{'meet' if given else 'workdir'}={directory} was given" if directory else "the program has no --workdir"
        )
        raise ValueError(
            f"{named}, but the hosts of a run meet in a directory that all of them share: give its path, as "
            "--workdir=DIR to the program or --meet=DIR to the launcher."
        )
    return os.path.join(directory, "membership")


class Meeting:
    """This launcher's part in the directory; announces it and looks, in a thread.

    Attributes:
        view: the last look.
    """

    def __init__(
        self, directory: str, name: str, describe: Callable[[], Host], on_look: Callable[[View], None]
    ) -> None:
        """Makes the directory and looks for the first time.

        Args:
            directory: that all hosts share.
            name: of this host.
            describe: returns this host as it is now.
            on_look: called after each look, in the thread.

        Raises:
            ValueError: if the directory cannot be written.
        """
        self._directory, self._name, self._describe, self._on_look = directory, name, describe, on_look
        self._lock = threading.Lock()
        self._contents: dict[str, bytes] = {}  # of the hosts' files
        self._silent_secs: dict[str, float] = {}
        self._alive = {name}
        self._records: dict[int, Record] = {}  # the newest one
        self._looked_at = time.monotonic()
        self._beat = 0
        self._is_over = threading.Event()
        try:
            os.makedirs(directory, exist_ok=True)
            self.announce()
            self.view = self._look()
        except OSError as error:
            raise ValueError(
                f"the hosts cannot meet in {directory!r} ({error.strerror}): give a directory that all hosts share and "
                "may write to, as the program's --workdir or as --meet."
            ) from error
        self._thread = threading.Thread(target=self._run, name="distloop-meeting", daemon=True)

    def __enter__(self) -> "Meeting":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_over.set()
        self._thread.join(5)  # a file server that hangs holds no launcher
        if not self._describe().has_left:  # else its report is read before somebody removes it
            _remove(self._path(self._name, "host"))

    def announce(self) -> None:
        """Writes this host's file now.

        Raises:
            OSError: if it cannot be written.
        """
        with self._lock:
            self._beat += 1
            path, content = self._path(self._name, "host"), json.dumps([self._beat, self._describe()])
            _write(f"{path}.tmp", content, os.O_TRUNC)
            os.replace(f"{path}.tmp", path)

    def propose(self, record: Record) -> bool:
        """Writes a record; returns False if there is one of this number, which is then the one that counts.

        Raises:
            OSError: if it cannot be written.
        """
        try:
            _write(self._path(f"{record.number:06}", "membership"), json.dumps(record), os.O_EXCL)
        except FileExistsError:
            return False
        for name in os.listdir(self._directory):
            number = _number_of(name)
            if number is not None and number < record.number - _KEPT:
                _remove(os.path.join(self._directory, name))
        return True

    def forget(self, name: str) -> None:
        """Removes the file of a host that has gone."""
        _remove(self._path(name, "host"))

    def _path(self, name: str, kind: str) -> str:
        return os.path.join(self._directory, f"{name}.{kind}")

    def _run(self) -> None:
        was_written = True
        while not self._is_over.wait(LOOK_SECS):
            try:
                self.announce()
                self.view = self._look()
                was_written = True
            except OSError as error:
                if was_written:
                    processes.log(
                        f"{self._directory!r} cannot be reached ({error.strerror}), and the other hosts go on without "
                        "this one until it can."
                    )
                was_written = False
            self._on_look(self.view)

    def _look(self) -> View:
        """Returns what the directory shows now."""
        now = time.monotonic()
        watched_secs = min(now - self._looked_at, 2 * LOOK_SECS)  # not the time in which this process stood still
        self._looked_at = now
        names = os.listdir(self._directory)
        contents = {name.removesuffix(".host"): self._read(name) for name in names if name.endswith(".host")}
        contents = {name: content for name, content in contents.items() if content}
        for name, content in contents.items():
            before = self._contents.get(name)
            self._silent_secs[name] = self._silent_secs[name] + watched_secs if content == before else 0.0
            if before not in (None, content):
                self._alive.add(name)
        self._contents = contents
        hosts = {name: host for name, content in contents.items() if (host := _parse_host(content))}
        numbers = sorted(number for name in names if (number := _number_of(name)) is not None)
        return View(
            hosts,
            {name: self._silent_secs[name] for name in hosts},
            frozenset(self._alive),
            numbers[-1] if numbers else 0,
            self._newest(numbers),
        )

    def _newest(self, numbers: list[int]) -> Record | None:
        for number in reversed(numbers):
            if number not in self._records:
                record = _parse_record(self._read(f"{number:06}.membership"))
                if record is None:  # it is being written, or its writer was killed
                    continue
                self._records = {number: record}
            return self._records[number]
        return None

    def _read(self, name: str) -> bytes:
        try:
            with open(os.path.join(self._directory, name), "rb") as file:
                return file.read()
        except FileNotFoundError:
            return b""


def _write(path: str, content: str, flag: int) -> None:
    """Writes a file that only this user may read, as records hold secrets."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | flag, 0o600), "w", encoding="utf-8") as file:
        file.write(content)


def _remove(path: str) -> None:
    try:
        os.remove(path)
    except OSError:  # another launcher did, or the disk is gone
        pass


def _number_of(name: str) -> int | None:
    match = re.fullmatch(r"(\d+)\.membership", name)
    return int(match[1]) if match else None


def _parse_host(content: bytes) -> Host | None:
    """Returns the host that a file describes; None if it describes none."""
    try:
        host = Host(*json.loads(content)[1])
        report = None if host.report is None else Report(*_tuples(host.report))
        return host._replace(ports=tuple(host.ports), report=report)
    except (ValueError, TypeError, IndexError, KeyError):
        return None


def _parse_record(content: bytes) -> Record | None:
    """Returns the record that a file holds; None if it is not whole."""
    try:
        record = Record(*json.loads(content))
        members = tuple(Member(*_tuples(member)) for member in record.members)
        return record._replace(members=members, sizes=tuple(record.sizes))
    except (ValueError, TypeError):
        return None


def _tuples(values: Any) -> list[Any]:
    return [tuple(value) if isinstance(value, list) else value for value in values]

"""Atomic files: writes beside a path, then renames, so that the path holds the old file or the new one, complete.

    with replacing("run/flags.txt") as temporary, open(temporary, "w") as file:     # takes its name at the end
        file.write(text)
    put_back("run")                 # what a killed process was replacing
    remove_leftovers("run")         # and what it had not finished

A file is replaced by one rename. A directory needs two: a process killed between them leaves the old one as
`<path>.<process>-<token>.old`, which is always complete; what ends with `.tmp` may not be. This module does not know
what the files hold. It tells processes of one machine apart; those of several need a lock.
"""

import contextlib
import errno
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from typing import IO, NamedTuple

# Older versions made names without a token, as a user's may be: they count in directories of checkpoints alone.
_PROCESS = r"(?P<process>\d{1,7}|\d{1,9}(?P<token>-[0-9a-f]{8}))"
_LEFTOVER = re.compile(rf"(?P<target>.+)\.{_PROCESS}\.(?P<kind>tmp|old)(\.\w+)?", re.DOTALL)
_CLOCK_SECS = 5  # by which the clock of a file server may be behind
# What a file system answers that cannot wait for the disk, or that opens no directory.
_UNKNOWN = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOTTY, errno.EBADF)
_UNKNOWN_OF_DIRECTORIES = (errno.EACCES, errno.EPERM, errno.EISDIR)
_in_use: set[str] = set()  # temporary names of this process


class Leftover(NamedTuple):
    """A temporary name that a process has left."""

    path: str
    target: str  # the path that it was written for, or that it had before it was to be replaced
    process: int
    is_old: bool  # whether it was complete under its old name; else it may be half-written


@contextlib.contextmanager
def replacing(path: str, suffix: str = "", verify: Callable[[], None] = lambda: None) -> Iterator[str]:
    """Replaces a file or directory by what is written to a temporary path beside it; after an error, keeps the old one.

    A directory is replaced by a directory alone.

    Args:
        path: its parent directory exists by the end of the block.
        suffix: of the temporary path, for writers that go by it.
        verify: called right before the rename; raises if this process may no longer write.

    Yields:
        The temporary path, free to become a file or a directory. It is flushed to disk before it is renamed.

    Raises:
        OSError: if it cannot be written or renamed, or is a file, and a directory is at the path.
    """
    remove_leftovers(os.path.dirname(path) or ".", os.path.basename(path))
    with _temporary_name(path, f"tmp{suffix}") as temporary:
        try:
            yield temporary
            for folder, folders, files in os.walk(temporary):
                for name in [*folders, *files]:
                    sync(os.path.join(folder, name))
            sync(temporary)
            verify()
            _rename(temporary, path)
        finally:
            remove(temporary)


def delete(path: str, owner: str | None = None, verify: Callable[[], None] = lambda: None) -> None:
    """Deletes a directory in one step as seen by others: it is renamed first, so `path` never names a part of it.

    The temporary name is made from `owner`, if the directory has a temporary name itself. `verify`: as in `replacing`.
    """
    with _temporary_name(owner or path, "tmp") as temporary:
        verify()
        os.rename(path, temporary)
        remove(temporary)


def make_directory(path: str) -> None:
    """Creates a directory and its missing parents; they are on the disk when it returns.

    Raises:
        OSError: if it cannot be created, or a file is in the way.
    """
    if os.path.isdir(path):
        return
    parent = os.path.dirname(path) or "."
    make_directory(parent)
    try:
        os.mkdir(path)
    except FileExistsError:
        if not os.path.isdir(path):
            raise
    sync(parent)


def leftovers(directory: str, name: str | None = None) -> list[Leftover]:
    """Returns the temporary names in a directory that no running process of this machine uses, in alphabetical order.

    They are those of one path's name, or without a name all, those of older versions too. A directory may be missing.
    """
    result = []
    for found in sorted(os.listdir(directory)) if os.path.isdir(directory) else []:
        match = _LEFTOVER.fullmatch(found)
        if match and (name is None or (name == match["target"] and match["token"])):
            path, target = os.path.join(directory, found), os.path.join(directory, match["target"])
            leftover = Leftover(path, target, int(match["process"].partition("-")[0]), match["kind"] == "old")
            if not _is_used(leftover):
                result.append(leftover)
    return result


def put_back(directory: str, name: str | None = None) -> list[str]:
    """Gives their names back to directories, or one, whose processes were killed while they replaced them.

    Returns:
        The paths that exist again.

    Raises:
        OSError: if one cannot be renamed.
    """
    result = []
    for leftover in leftovers(directory, name):
        if leftover.is_old and not os.path.lexists(leftover.target):
            os.rename(leftover.path, leftover.target)
            result.append(leftover.target)
    return result


def remove_leftovers(directory: str, name: str | None = None) -> list[str]:
    """Removes what killed processes have left, if it can, after `put_back`, whose result it returns.

    Raises:
        OSError: if one cannot be put back.
    """
    result = put_back(directory, name)
    for leftover in leftovers(directory, name):
        with contextlib.suppress(OSError):
            if leftover.is_old:  # it is complete, and a part of it must not bear this name
                delete(leftover.path, leftover.target)
            else:
                remove(leftover.path)
    return result


def remove(path: str) -> None:
    """Removes a file or directory if it exists; ignores what cannot be removed."""
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            os.remove(path)


def identify_directory(path: str) -> str:
    """Returns a text that differs between a directory and its copy: its inode, which a move keeps and a copy does not.

    Where inodes do not last, it is the path.
    """
    return f"inode {os.stat(path).st_ino}" if _has_lasting_inodes(path) else os.path.realpath(path, strict=True)


def _has_lasting_inodes(path: str) -> bool:
    """Returns whether files keep their inodes while a file system is mounted again, which FUSE does not promise."""
    device = os.stat(path).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as file:
            lines = [line.split() for line in file]
    except OSError:
        return True
    return not any(line[2] == number and line[line.index("-") + 1].startswith("fuse") for line in lines)


def sync(path: str) -> None:
    """Waits until a file, or the names in a directory, are on the disk, if its file system can do that.

    Raises:
        OSError: if the disk fails. That it knows no such request is no failure: git and SQLite go on, too.
    """
    unknown = (*_UNKNOWN, *_UNKNOWN_OF_DIRECTORIES) if os.path.isdir(path) else _UNKNOWN
    try:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno not in unknown:
            raise


@contextlib.contextmanager
def _temporary_name(path: str, kind: str) -> Iterator[str]:
    """Yields a name beside a path that no process uses or has used: in a container the first process is always 1."""
    name = f"{path}.{os.getpid()}-{secrets.token_hex(4)}.{kind}"
    _in_use.add(name)
    try:
        yield name
    finally:
        _in_use.discard(name)


def _is_used(leftover: Leftover) -> bool:
    """Returns whether a process may still be writing."""
    if leftover.process == os.getpid():
        return os.path.abspath(leftover.path) in map(os.path.abspath, tuple(_in_use))
    try:
        os.kill(leftover.process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:  # another user's process
        pass
    try:
        return start_time(leftover.process) < os.stat(leftover.path).st_ctime + _CLOCK_SECS
    except (OSError, ValueError, IndexError):
        return True


def open_at_once(path: str, mode: str = "rb") -> IO[bytes]:
    """Opens a file; one that is a FIFO without waiting for another process, which its reader or writer would be."""
    return open(path, mode, opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK, 0o666))


def start_time(process: int) -> float:
    """Returns when a process was started (Unix, seconds); 0 if that is not known."""
    ticks = int(process_fields(process)[19])
    with open("/proc/uptime", encoding="ascii") as file:
        boot_time = time.time() - float(file.read().split()[0])
    start = boot_time + ticks / os.sysconf("SC_CLK_TCK")
    return start if start <= time.time() else 0.0  # a container may have another uptime than its processes


def start_ticks(process: int) -> str | None:
    """Returns when a process was started, in ticks since the boot; empty: unknown; None: there is no such process."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return None
    except (OSError, OverflowError):
        pass  # another user's
    try:
        fields = process_fields(process)
    except OSError:
        return ""
    return None if fields[0] in ("Z", "X") else fields[19]  # a zombie has ended


def process_fields(process: int) -> list[str]:
    """Returns the fields of `/proc/<process>/stat` that follow the name: its state, ..., and at 19 its start, in ticks.

    Raises:
        OSError: if there is no such process, or the system keeps no such file.
    """
    with open(f"/proc/{process}/stat", "rb") as file:
        return file.read().rpartition(b")")[2].decode().split()  # the name may hold spaces


def _rename(temporary: str, path: str) -> None:
    """Gives a temporary path its name, on the disk too, before what had the name is removed."""
    parent = os.path.dirname(path) or "."
    if not (os.path.isdir(path) and os.path.isdir(temporary)):
        os.replace(temporary, path)  # an error, if it is a file in place of a directory
        sync(parent)
        return
    with _temporary_name(path, "old") as old:
        os.rename(path, old)  # a directory that is not empty cannot be renamed over
        try:
            os.rename(temporary, path)
        except OSError:
            os.rename(old, path)
            raise
        sync(parent)
        with contextlib.suppress(OSError):
            delete(old, path)

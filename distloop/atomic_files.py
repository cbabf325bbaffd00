"""Atomic files: write beside a path, then rename, so that the path names the old whole or the new whole, never a part.

    with replacing("run/flags.txt") as temporary, open(temporary, "w") as file:     # takes its name at the end
        file.write(text)
    for leftover in leftovers("run"):                                               # of processes that were killed
        ...

A file is replaced by one rename. A directory needs two: a process killed between them leaves the old one as
`<path>.<process>.old`, and `leftovers` lists it for the caller to rename back. This module does not know what the
files hold, or which process may still be writing.
"""

import contextlib
import os
import re
import shutil
from collections.abc import Iterator
from typing import NamedTuple

_LEFTOVER = re.compile(r"(?P<target>.+)\.(?P<process>\d{1,9})\.(?P<kind>tmp|old)(\.\w+)?")


class Leftover(NamedTuple):
    """A temporary name that a process has left.

    Attributes:
        path: where it is.
        target: the path that it was written for, or that it had before it was to be replaced.
        process: the id of the process.
        is_old: True if it was whole under its old name; False if it may be half-written.
    """

    path: str
    target: str
    process: int
    is_old: bool


@contextlib.contextmanager
def replacing(path: str, suffix: str = "") -> Iterator[str]:
    """Replaces a file or directory by what is written to a temporary path beside it; after an error, keeps the old one.

    Args:
        path: its parent directory exists by the end of the block.
        suffix: of the temporary path, for writers that go by it.

    Yields:
        The temporary path, free to become a file or a directory. It is flushed to disk before it is renamed.

    Raises:
        OSError: if it cannot be written or renamed.
    """
    temporary = f"{path}.{os.getpid()}.tmp{suffix}"
    remove(temporary)  # of a killed process with the same id: in a container the first process is always 1
    try:
        yield temporary
        for folder, folders, files in os.walk(temporary):
            for name in [*folders, *files]:
                _sync(os.path.join(folder, name))
        _sync(temporary)
        _rename(temporary, path)
        _sync(os.path.dirname(path) or ".")
    finally:
        remove(temporary)


def delete(path: str) -> None:
    """Deletes a directory in one step as seen by others: it is renamed first, so `path` never names a part of it."""
    temporary = f"{path}.{os.getpid()}.tmp"
    os.rename(path, temporary)
    remove(temporary)


def leftovers(directory: str) -> list[Leftover]:
    """Returns the temporary names in a directory, in alphabetical order; none if the directory does not exist."""
    result = []
    for name in sorted(os.listdir(directory)) if os.path.isdir(directory) else []:
        if match := _LEFTOVER.fullmatch(name):
            path, target = os.path.join(directory, name), os.path.join(directory, match["target"])
            result.append(Leftover(path, target, int(match["process"]), match["kind"] == "old"))
    return result


def remove(path: str) -> None:
    """Removes a file or directory if it exists; ignores what cannot be removed."""
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            os.remove(path)


def _rename(temporary: str, path: str) -> None:
    if not os.path.isdir(path):
        os.replace(temporary, path)
        return
    old = f"{path}.{os.getpid()}.old"
    remove(old)
    os.rename(path, old)  # a directory that is not empty cannot be renamed over
    try:
        os.rename(temporary, path)
    except OSError:
        os.rename(old, path)
        raise
    remove(old)


def _sync(path: str) -> None:
    """Waits until a file or directory is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

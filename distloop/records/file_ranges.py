"""Reads byte ranges of many files, on a disk or behind URLs, from any number of threads.

    paths = expand("gs://bucket/train-*.tfrecord")        # sorted
    files = Files(paths)                                  # opens none yet
    header, footer = files.read([(0, 0, 12), (0, 112, 116)])     # file number, begin, end in bytes

It does not know what the files hold.
"""

import functools
import glob
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

from distloop.urls import absolute, file_system, is_url, keep_password

MAX_OPEN_FILES = 128  # of one `Files`; a process may usually have 1024

FileNames: TypeAlias = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]


class Files:
    """Files on a disk, read by `pread`, or behind URLs, read through fsspec, which requests several ranges at once.

    Several threads may read them; files on a disk that were used last stay open.

    Attributes:
        paths: paths, or URLs of one file system.
        window_bytes: how much to read at once when a file is read from its beginning to its end.
    """

    def __init__(self, paths: Sequence[str]):
        """Opens no file.

        Raises:
            ValueError: if only some are URLs, or the package for their file system is not installed.
        """
        if len({path.partition("://")[0] if is_url(path) else "" for path in paths}) > 1:
            raise ValueError("Files of several file systems were given; give those of one, or copy them to one.")
        self.paths = paths
        self._system = file_system(paths[0]) if is_url(paths[0]) else None
        self.window_bytes = 1 << 18 if self._system is None else 1 << 23
        self._open = functools.lru_cache(MAX_OPEN_FILES)(_OpenFile)

    def __reduce__(self) -> tuple[Any, ...]:
        return Files, (self.paths,)

    def stat(self, file: int) -> tuple[int, str]:
        """Returns the size of a file in bytes, and a text that is another one once the file has been written again."""
        path = self.paths[file]
        if self._system is not None:
            return int(self._system.size(path)), self._system.ukey(path)
        status = os.stat(path)
        return status.st_size, str(status.st_mtime_ns)

    def read(self, ranges: Sequence[tuple[int, int, int]]) -> Iterable[bytes]:
        """Returns the bytes of ranges, each the number of a file, its begin and its end; fewer where a file ends."""
        if self._system is None:
            return (self._open(self.paths[file]).read(begin, end) for file, begin, end in ranges)
        files, begins, ends = map(list, zip(*ranges, strict=True))
        return self._system.cat_ranges([self.paths[file] for file in files], begins, ends, on_error="raise")


class _OpenFile:
    """A file that is closed when the last thread that reads it has let go of it."""

    def __init__(self, path: str):
        self._descriptor = -1
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self, close: Callable[[int], None] = os.close) -> None:  # at exit, `os` may be gone
        if self._descriptor >= 0:
            close(self._descriptor)

    def read(self, begin: int, end: int) -> bytes:
        data = more = os.pread(self._descriptor, end - begin, begin)
        while more and len(data) < end - begin:  # the system reads no more than 2 GB at once
            data += (more := os.pread(self._descriptor, end - begin - len(data), begin + len(data)))
        return data


def expand(files: FileNames) -> list[str]:
    """Returns the paths of the files that are meant.

    Args:
        files: a path, a pattern such as `train-*.tfrecord`, or several of them; URLs of fsspec, too.

    Returns:
        The paths in the order given; those of a pattern in alphabetical order, without directories and hidden files.

    Raises:
        ValueError: if nothing matches, or a directory is given.
    """
    names = [files] if isinstance(files, str | os.PathLike) else list(files)
    if not names:
        raise ValueError("An empty list of files was given; give a path or a pattern, such as 'data/train-*.tfrecord'.")
    return [path for name in names for path in _matches(os.fspath(name))]


def _matches(name: str) -> list[str]:
    """Returns the files that one path or pattern means."""
    if is_url(name):
        name = keep_password(name)
        system = file_system(name)
        exists, is_directory = system.exists(name), system.isdir(name)
        infos = {} if exists else system.glob(name, detail=True)
        paths = [system.unstrip_protocol(path) for path, info in infos.items() if info["type"] == "file"]
    else:
        name = absolute(os.path.expanduser(name))
        exists, is_directory = os.path.exists(name), os.path.isdir(name)
        paths = [] if exists else [path for path in glob.glob(name, recursive=True) if not os.path.isdir(path)]
    if is_directory:
        raise ValueError(
            f"The directory {name!r} was given; name its files by a pattern, such as {name.rstrip('/') + '/*'!r}."
        )
    paths = [name] if exists else sorted(path for path in paths if not path.rpartition("/")[2].startswith("."))
    if not paths:
        raise ValueError(f"No file matches {name!r}: correct the path or the pattern.")
    return paths

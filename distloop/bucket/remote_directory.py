"""A directory behind a URL, whose requests may fail or be cut short: each is tried again, and its size compared.

    directory = RemoteDirectory("s3://bucket/run")
    directory.upload("/tmp/index", "checkpoints/500/variables.index")
    directory.list()                                    # {"checkpoints/500/variables.index": 1204}
    directory.create("run.lock", b"...")                # False if it is there

A file has its name when it is complete: a store of objects writes each atomically, and elsewhere it is written
under another name and moved. Retries, timeouts, credentials and limits of the package of a file system come before.
"""

import hashlib
import os
import random
import re
import secrets
import time
from collections.abc import Callable
from typing import Any, TypeVar

from distloop.log import log
from distloop.urls import file_system
from distloop.workdir.run_lock import Pace

# Protocols of stores where a write is seen atomically.
_OBJECT_STORES = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "oss", "oci", "ocilake", "tos", "hf"})
_PAUSES_SECS = (0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4)  # before a request is tried again, half to all of it
_FINAL = (PermissionError, FileNotFoundError, NotADirectoryError, IsADirectoryError, ImportError)  # not tried again
_LEFTOVER = re.compile(r".+\.[0-9a-f]{8}\.tmp")
_MOST_LETTERS = 1024  # of a key; S3 and Google Cloud Storage have none that is longer
_RAISE = object()
_T = TypeVar("_T")


class RemoteError(OSError):
    """A request failed as often as it is tried."""


class RemoteDirectory:
    """A directory behind a URL; its methods may be called from several threads.

    Attributes:
        url: of the directory.
        pace: of a lock there.
    """

    pace = Pace(heartbeat_secs=10.0, stale_secs=60.0, poll_secs=2.0, race_secs=2.0)

    def __init__(self, url: str):
        """Sends no request.

        Args:
            url: of fsspec's.

        Raises:
            ValueError: if the package for it is not installed, or nothing reads such URLs.
        """
        self.url = url.rstrip("/")
        self._system = file_system(url, use_listings_cache=False)
        self._root = self._system._strip_protocol(self.url).rstrip("/")
        protocols = self._system.protocol
        self._protocols = {protocols} if isinstance(protocols, str) else {*protocols}
        self._is_store = bool(_OBJECT_STORES & self._protocols)
        self._token = secrets.token_hex(4)
        self._has_named_keys = False  # in the log

    def identify(self) -> str:
        """Returns a text that differs between the directory and its copy: a digest of the URL."""
        return hashlib.sha256(self.url.encode()).hexdigest()

    def is_still(self, identity: str) -> bool:
        """Returns True: a URL is not moved."""
        return True

    def list(self, below: str = "") -> dict[str, int]:
        """Returns the size of each file below a directory, by its path there; none if the directory is not there.

        A key of a store may be any text. One that no file of a directory can have, such as `a/../../b`, or `a` beside
        `a/b`, is named in the log and left out.

        Args:
            below: the directory, by its path in this one; empty: this one.
        """

        def find() -> dict[str, Any]:
            self._system.invalidate_cache()
            return dict(self._system.find(self._path(below), detail=True))

        start = len(self._path(below)) + 1
        sizes = {path[start:]: int(info["size"] or 0) for path, info in self._try(find, "list", {}).items()}
        folders = {name[:i] for name in sizes for i, letter in enumerate(name) if letter == "/"}
        files = {name: size for name, size in sizes.items() if name not in folders and is_path(name)}
        refused = sorted(name for name in sizes.keys() - files.keys() if not name.endswith("/") and name)
        if refused and not self._has_named_keys:
            self._has_named_keys = True
            text = "%s holds keys that no file of a directory can have, which are left alone: %s"
            log.warning(text, self.url, ", ".join(map(ascii, refused[:3])))
        return files

    def read(self, name: str) -> bytes | None:
        """Returns the bytes of a file; None: there is none."""

        def read() -> bytes:
            data = bytes(self._system.cat_file(self._path(name)))
            self._require_size(self._path(name), len(data))
            return data

        return self._try(read, f"read {name}", None)

    def write(self, name: str, data: bytes) -> None:
        """Writes a file."""
        self._replace(name, len(data), lambda path: self._system.pipe_file(path, data))

    renew, sign = write, read  # of a lock, by which others see that its process lives

    def create(self, name: str, data: bytes) -> bool:
        """Writes a file where there is none; returns whether these bytes are there now.

        Of several processes at once one succeeds where the file system can refuse to overwrite: S3, Google Cloud
        Storage, local disks, memory. Elsewhere the file is read first, then written.
        """
        path = self._path(name)

        def create() -> None:
            self._make_parent(path)
            try:
                if "file" in self._protocols:  # whose `pipe_file` overwrites a file that another process has just made
                    with self._system.open(path, "xb") as file:
                        file.write(data)
                else:
                    self._system.pipe_file(path, data, mode="create")
            except FileExistsError:  # another process's, or this one's before an answer that did not come
                pass
            except (TypeError, NotImplementedError):
                self._system.pipe_file(path, data)

        there = self.read(name)
        if there is None:
            self._try(create, name)
            there = self.read(name)
        return there == data

    def upload(self, path: str, name: str) -> None:
        """Writes a local file, which does not change meanwhile."""
        self._replace(name, os.path.getsize(path), lambda target: self._system.put_file(path, target))

    def download(self, name: str, path: str) -> None:
        """Writes a file to a local path in a directory that is there; after an error a part of it may be there."""

        def get() -> None:
            self._system.get_file(self._path(name), path)
            self._require_size(self._path(name), os.path.getsize(path))

        self._try(get, f"read {name}")

    def copy(self, name: str, new: str) -> None:
        """Copies a file within the directory, without its bytes coming here."""

        def copy() -> None:
            self._make_parent(self._path(new))
            self._system.cp_file(self._path(name), self._path(new))

        self._try(copy, f"copy {name}")

    def delete(self, name: str) -> None:
        """Deletes a file if it is there."""
        self._try(lambda: self._system.rm_file(self._path(name)), f"delete {name}", None)

    def remove_leftovers(self) -> None:
        """Deletes what killed processes have left; no other process may write meanwhile."""
        for name in () if self._is_store else self.list():
            if _LEFTOVER.fullmatch(name):
                self.delete(name)

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    def _require_size(self, path: str, size: int) -> None:
        """Raises an OSError, after which a request is tried again, unless a file has a size."""
        if (actual := int(self._system.info(path)["size"])) != size:
            raise OSError(f"there are {actual} bytes, not {size}")

    def _make_parent(self, path: str) -> None:
        if not self._is_store:
            self._system.makedirs(path.rpartition("/")[0], exist_ok=True)

    def _replace(self, name: str, size: int, write: Callable[[str], Any]) -> None:
        """Writes a file so that it has its name when it is complete."""
        path = self._path(name)
        temporary = f"{path}.{self._token}.tmp"  # the same for each try, so that no more than one is left

        def write_and_move() -> None:
            self._make_parent(path)
            write(temporary)
            self._require_size(temporary, size)
            self._move(temporary, path)

        self._try((lambda: write(path)) if self._is_store else write_and_move, name)

    def _move(self, path: str, new: str) -> None:
        from fsspec import AbstractFileSystem

        if type(self._system).mv is not AbstractFileSystem.mv:
            self._system.mv(path, new)
        else:  # which takes paths for patterns
            self._system.cp_file(path, new)
            self._system.rm_file(path)

    def _try(self, request: Callable[[], _T], what: str, absent: Any = _RAISE) -> _T:
        """Returns what a request does, or `absent` if there is no such file; tries again after an error.

        Raises:
            RemoteError: if it fails each time; its message begins with `what`.
        """
        for pause_secs in (*_PAUSES_SECS, None):
            try:
                return request()
            except Exception as error:  # the packages raise errors of many kinds
                if absent is not _RAISE and isinstance(error, FileNotFoundError):
                    return absent
                if pause_secs is None or isinstance(error, _FINAL) or "Credentials" in type(error).__name__:
                    raise RemoteError(f"{what}: {_first_line(error)}") from error
            time.sleep(pause_secs * random.uniform(0.5, 1.0))
        raise AssertionError("the last try returns or raises")


def is_path(key: str) -> bool:
    """Returns whether a key of a store can be the path of a file in a directory: it is relative, and goes never up."""
    try:
        names = os.fsencode(key).split(b"/")
    except UnicodeEncodeError:
        return False
    is_short = len(key) <= _MOST_LETTERS  # a path of Linux has 4,096 bytes, with the directory's
    return is_short and all(n not in (b"", b".", b"..") and b"\0" not in n and len(n) <= 255 for n in names)


def _first_line(error: Exception) -> str:
    """Returns the first line of an error's message, with its kind where the message alone says little."""
    message = (str(error).strip().splitlines() or [""])[0][:200].rstrip(" .:")
    return message if " " in message else f"{type(error).__name__}{f': {message}' if message else ''}"

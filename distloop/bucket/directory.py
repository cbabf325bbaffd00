"""A directory behind a URL, whose requests may fail, hang or be cut short: each is tried again, and its size compared.

    directory = RemoteDirectory("s3://bucket/run")
    directory.upload("/tmp/index", "checkpoints/500/variables.index")
    directory.list()                                    # {"checkpoints/500/variables.index": 1204}
    directory.create("run.lock", b"...")                # False if it is there

A file has its name when it is whole: a store of objects writes each whole or not at all, and elsewhere it is written
under another name and moved. Retries, credentials and limits of the package of a file system come before these.
"""

import contextlib
import errno
import functools
import math
import os
import random
import re
import secrets
import threading
import time
from collections.abc import Callable
from concurrent import futures
from typing import Any, TypeVar

from distloop.log import log
from distloop.urls import file_system

# Protocols of stores where a write is seen whole or not at all.
_OBJECT_STORES = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "oss", "oci", "ocilake", "tos", "hf"})
_PAUSES_SECS = (0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4)  # before a request is tried again, half to the whole of it
_SILENT_SECS = 60.0  # after which a request that shows no progress counts as hanging
_PART_BYTES, _LEAST_BYTES_PER_SEC = 2**27, 2**18  # of what packages send at once; they show no progress within it
_LEFTOVER = re.compile(r".+\.[0-9a-f]{8}\.tmp")
_MOST_LETTERS = 1024  # of a key; S3 and Google Cloud Storage have none that is longer
_RAISE = object()
_T = TypeVar("_T")


class RemoteError(OSError):
    """A request failed as often as it is tried.

    Attributes:
        is_final: whether trying again will not help: nobody may do this, or there is no such bucket.
    """

    def __init__(self, message: str, is_final: bool = False):
        super().__init__(message)
        self.is_final = is_final


class RemoteDirectory:
    """A directory behind a URL; its methods may be called from several threads.

    Attributes:
        url: of the directory.
        answered_at: when a request last succeeded or showed progress, by `time.monotonic`.
        patience_secs: without an answer, after which a request that fails is not tried again.
    """

    def __init__(self, url: str):
        """Sends no request.

        Args:
            url: of fsspec's.

        Raises:
            ValueError: if the package for it is not installed, or nothing reads such URLs.
        """
        self.url = url.rstrip("/")
        self._system = file_system(url, "remote", use_listings_cache=False)
        from fsspec import AbstractFileSystem

        self._root = self._system._strip_protocol(self.url).rstrip("/")
        protocols = self._system.protocol
        self._is_store = bool(_OBJECT_STORES & {protocols, *([] if isinstance(protocols, str) else protocols)})
        self._takes_patterns = type(self._system).mv is AbstractFileSystem.mv  # in place of paths
        self.answered_at, self.patience_secs = time.monotonic(), math.inf
        self._refused: set[str] = set()  # keys that were named in the log

    def list(self, below: str = "") -> dict[str, int]:
        """Returns the size of each file below a directory, by its path there; none if the directory is not there.

        A key of a store may be any text. One that no file of a directory can have, such as `a/../../b`, or `a` beside
        `a/b`, is named in the log and left out.

        Args:
            below: the directory, by its path in this one; empty: this one.
        """

        def find(_: Any) -> dict[str, Any]:
            self._system.invalidate_cache()
            return dict(self._system.find(self._path(below), detail=True))

        start = len(self._path(below)) + 1
        names = {path[start:]: int(info["size"] or 0) for path, info in self._try(find, "list", {}).items()}
        names = {name: size for name, size in names.items() if name and not name.endswith("/")}  # not folders' own
        folders = {name[:i] for name in names for i, letter in enumerate(name) if letter == "/"}
        files = {name: size for name, size in names.items() if name not in folders and is_path(name)}
        if refused := sorted(names.keys() - files.keys() - self._refused):
            self._refused.update(refused)
            log.warning(
                "%s holds keys that no file of a directory can have, which are left alone: %s",
                *(self.url, ", ".join(map(ascii, refused[:3])) + (", ..." if len(refused) > 3 else "")),
            )
        return files

    def read(self, name: str) -> bytes | None:
        """Returns the bytes of a file; None: there is none."""
        for _ in range(len(_PAUSES_SECS) + 1):
            data = self._try(lambda _: bytes(self._system.cat_file(self._path(name))), f"read {name}", None)
            if data is None or len(data) == self._size(name):
                return data
        raise RemoteError(f"read {name}: a part of it came")

    def write(self, name: str, data: bytes) -> None:
        """Writes a file."""
        self._replace(name, len(data), lambda path, progress: self._system.pipe_file(path, data))

    def create(self, name: str, data: bytes) -> bool:
        """Writes a file where there is none; returns whether these bytes are there now.

        Of several processes at once one succeeds where the file system can refuse to overwrite: S3, Google Cloud
        Storage, local disks, memory. Elsewhere it looks first, then writes.
        """
        there = self.read(name)
        if there is not None:
            return there == data
        self._make_parent(name)

        def create(_: Any) -> bool:
            try:
                self._system.pipe_file(self._path(name), data, mode="create")
            except FileExistsError:  # another process's, or this one's before an answer that did not come
                return False
            except (TypeError, NotImplementedError):
                self._system.pipe_file(self._path(name), data)
            return True

        if self._try(create, name) and self._size(name) != len(data):  # a part was written
            self.write(name, data)
        return self.read(name) == data

    def upload(self, path: str, name: str) -> None:
        """Writes a local file, which does not change meanwhile."""
        self._replace(
            name,
            os.path.getsize(path),
            lambda target, progress: self._system.put_file(path, target, callback=progress),
        )

    def download(self, name: str, size: int, path: str) -> None:
        """Writes a file to a local path, where it has its name when it is whole.

        Args:
            name: of the file.
            size: that it had when it was listed; it may have been replaced since.
            path: of a file in a directory that is there.
        """
        parts: list[str] = []  # of each try: one that was given up may go on writing

        def get(progress: Any) -> None:
            parts.append(os.path.join(os.path.dirname(path), f".{secrets.token_hex(4)}.part"))
            self._system.get_file(self._path(name), parts[-1], callback=progress)

        try:
            for _ in range(len(_PAUSES_SECS) + 1):
                self._try(get, f"read {name}", size=size)
                actual = os.path.getsize(parts[-1])
                if actual == size or actual == (size := self._size(name)):
                    os.replace(parts[-1], path)
                    return
            raise RemoteError(f"read {name}: {actual} of {size} bytes came")
        finally:
            for part in parts:
                with contextlib.suppress(FileNotFoundError):
                    os.remove(part)

    def copy(self, name: str, new: str) -> None:
        """Copies a file within the directory, without its bytes coming here."""
        self._make_parent(new)

        def copy() -> int:
            self._try(lambda _: self._system.cp_file(self._path(name), self._path(new)), f"copy {name}")
            return self._size(new)

        _until_whole(f"copy {name}", copy, self._size(name))

    def delete(self, name: str) -> None:
        """Deletes a file if it is there."""
        self._try(lambda _: self._system.rm_file(self._path(name)), f"delete {name}", None)

    def probe(self) -> None:
        """Writes a file and deletes it.

        Raises:
            RemoteError: if the directory takes no file at all.
        """
        self.write(".probe", b"distloop")
        self.delete(".probe")

    def remove_leftovers(self) -> None:
        """Deletes what killed processes have left; no other process may write meanwhile."""
        for name in () if self._is_store else self.list():
            if _LEFTOVER.fullmatch(name):
                self.delete(name)

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    def _size(self, name: str) -> int:
        """Returns the size of a file; -1: it is not there."""
        return self._try(lambda _: int(self._system.info(self._path(name))["size"]), f"look at {name}", -1)

    def _make_parent(self, name: str) -> None:
        if not self._is_store:
            parent = self._path(name).rpartition("/")[0]
            self._try(lambda _: self._system.makedirs(parent, exist_ok=True), f"make a directory for {name}")

    def _replace(self, name: str, size: int, write: Callable[[str, Any], Any]) -> None:
        """Writes a file so that it has its name when it is whole."""
        temporary = name if self._is_store else f"{name}.{secrets.token_hex(4)}.tmp"
        self._make_parent(name)

        def write_again() -> int:
            self._try(functools.partial(write, self._path(temporary)), name, size=size)
            return self._size(temporary)

        def mv(_: Any) -> bool:
            if self._takes_patterns:
                self._system.cp_file(self._path(temporary), self._path(name))
                self._system.rm_file(self._path(temporary))
            else:
                self._system.mv(self._path(temporary), self._path(name))
            return True

        try:
            _until_whole(name, write_again, size)
            if temporary != name:
                is_moved = self._try(mv, name, False)  # absent: it was moved, and the answer did not come
                if not is_moved and self._size(name) != size:
                    raise RemoteError(f"{name}: it was not moved")
        except RemoteError:
            if temporary != name:
                with contextlib.suppress(RemoteError):
                    self.delete(temporary)
            raise

    def _try(self, request: Callable[[Any], _T], what: str, absent: Any = _RAISE, *, size: int = 0) -> _T:
        """Returns what a request does; tries again after an error or a silence.

        Args:
            request: is called with a callback of fsspec's, which shows progress.
            what: is done, for the message.
            absent: is returned if there is no such file; left out: that is an error.
            size: of the bytes that are sent.

        Raises:
            RemoteError: if it fails each time.
        """
        silent_secs = _SILENT_SECS + min(size, _PART_BYTES) / _LEAST_BYTES_PER_SEC
        for pause in (*_PAUSES_SECS, None):
            try:
                result = _call_in_thread(request, silent_secs, self._hear)
                self._hear()
                return result
            except Exception as error:  # the packages raise errors of many kinds
                if absent is not _RAISE and isinstance(error, FileNotFoundError):
                    self._hear()
                    return absent
                is_final = _is_final(error)
                if is_final or pause is None or time.monotonic() > self.answered_at + self.patience_secs:
                    raise RemoteError(f"{what}: {_first_line(error)}", is_final) from error
            time.sleep(pause * random.uniform(0.5, 1.0))
        raise AssertionError

    def _hear(self) -> None:
        self.answered_at = time.monotonic()


def _call_in_thread(request: Callable[[Any], _T], silent_secs: float, hear: Callable[[], None]) -> _T:
    """Calls a request in a thread of its own, which is left behind if nothing is heard from it.

    Args:
        request: as for `RemoteDirectory._try`.
        silent_secs: without progress, after which it is given up.
        hear: is called when it shows progress.

    Raises:
        TimeoutError: if it is given up.
    """
    from fsspec.callbacks import Callback

    progress_at, is_given_up = time.monotonic(), False
    outcome: futures.Future[_T] = futures.Future()

    def note(*_: Any, **__: Any) -> None:
        nonlocal progress_at
        if is_given_up:
            raise TimeoutError("the request was given up")
        progress_at = time.monotonic()
        hear()

    def call() -> None:
        try:
            outcome.set_result(request(Callback(hooks={"progress": note})))
        except BaseException as error:  # raised again by whoever waits
            outcome.set_exception(error)

    threading.Thread(target=call, name="distloop-request", daemon=True).start()
    while not outcome.done():
        if (left := progress_at + silent_secs - time.monotonic()) <= 0:
            is_given_up = True
            raise TimeoutError(f"no answer for {silent_secs:.0f} seconds")
        futures.wait([outcome], left)
    return outcome.result()


def is_path(key: str) -> bool:
    """Returns whether a key of a store can be the path of a file in a directory: it is relative, and goes never up."""
    try:
        names = os.fsencode(key).split(b"/")
    except UnicodeEncodeError:
        return False
    is_short = len(key) <= _MOST_LETTERS  # a path of Linux has 4,096 bytes, with the directory's
    return is_short and all(n not in (b"", b".", b"..") and b"\0" not in n and len(n) <= 255 for n in names)


def local_path(root: str, key: str) -> str:
    """Returns where a file of a bucket goes below a local directory.

    Args:
        root: the directory.
        key: of the file.

    Raises:
        RemoteError: if that would be elsewhere, through a link too.
    """
    if not is_path(key):
        raise RemoteError(f"no file of a directory can have the key {key!r}", is_final=True)
    path, real = os.path.join(root, key), os.path.realpath(root)
    if os.path.commonpath([os.path.realpath(os.path.dirname(path)), real]) != real:
        raise RemoteError(f"a link leads from {os.path.dirname(path)!r} out of {root!r}: remove it", is_final=True)
    return path


def _until_whole(what: str, act: Callable[[], int], size: int) -> None:
    """Does something again until as many bytes came as there are.

    Raises:
        RemoteError: if they never do.
    """
    for _ in range(len(_PAUSES_SECS) + 1):
        if (actual := act()) == size:
            return
    raise RemoteError(f"{what}: {actual} of {size} bytes came")


def _is_final(error: Exception) -> bool:
    """Returns whether another try would end alike: no permission, no credentials, no bucket, no such name."""
    kinds = (PermissionError, FileNotFoundError, NotADirectoryError, IsADirectoryError, ImportError)
    is_name = isinstance(error, OSError) and error.errno in (errno.ENAMETOOLONG, errno.EINVAL)
    return isinstance(error, kinds) or is_name or "Credentials" in type(error).__name__


def _first_line(error: Exception) -> str:
    """Returns the first line of an error's message, with its kind where the message alone says little."""
    message = (str(error).strip().splitlines() or [""])[0][:200].rstrip(" .:")
    return message if " " in message else f"{type(error).__name__}{f': {message}' if message else ''}"

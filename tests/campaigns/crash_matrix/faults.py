"""Faults in file operations: numbers those below a directory, and makes one fail, or be the last of the process.

    with Faults("/tmp/run", "kill", at=7) as faults:
        ...                                              # raises Killed at operation 7, and at each after it
    faults.operations                                    # what was done, in order

A kill is an exception that nothing catches, after which no operation is done: what `finally` blocks try has no effect.
The half of a file that was being written stays. TensorFlow writes a checkpoint's two files outside of Python; they are
two operations here.
"""

import builtins
import contextlib
import errno
import functools
import os
import threading
from typing import Any, NamedTuple

import tensorflow as tf

KILL, EIO, ENOSPC = "kill", "EIO", "ENOSPC"
_WRITING = {"mkdir", "create", "write"}  # what a full disk refuses


class Killed(BaseException):
    """The process is dead."""


class Operation(NamedTuple):
    """An operation on a file: its kind, the paths, and what was written."""

    kind: str
    path: str
    target: str = ""
    content: bytes = b""


class Faults:
    """Records file operations below a directory and makes one fail."""

    def __init__(self, directory: str, fault: str | None = None, at: int = -1):
        """Operations below the directory count from 0; kill ends the process at that one, EIO fails it, ENOSPC all that
        write from there on."""
        self.operations: list[Operation] = []
        self.is_dead = False
        self._directory, self._fault, self._at = os.path.abspath(directory), fault, at
        self._descriptors: dict[int, str] = {}
        self._patches: list[tuple[Any, str, Any]] = []

    def can_fail(self, number: int, fault: str) -> bool:
        """Returns whether a fault at a recorded operation differs from one at the next."""
        return fault != ENOSPC or self.operations[number].kind in _WRITING

    def do(self, operation: Operation) -> None:
        """Numbers an operation before it is done; raises Killed if the process is dead, OSError if it is to fail."""
        if self.is_dead:
            raise Killed
        number = len(self.operations)
        self.operations.append(operation)
        if self._fault is None or number < self._at:
            return
        if self._fault == KILL:
            self.is_dead = True
            raise Killed
        if (self._fault == EIO and number == self._at) or (self._fault == ENOSPC and operation.kind in _WRITING):
            code = getattr(errno, self._fault)
            raise OSError(code, os.strerror(code), operation.path)

    def __enter__(self) -> "Faults":
        """Replaces functions of `os`, `open` and TensorFlow's writer."""
        for name in ("rename", "replace", "mkdir", "unlink", "remove", "rmdir", "scandir", "listdir", "fsync", "open"):
            self._patch(os, name, functools.partial(self._call, name, getattr(os, name)))
        self._patch(builtins, "open", functools.partial(self._open, builtins.open))
        self._patch(tf.raw_ops, "SaveV2", functools.partial(self._save_variables, tf.raw_ops.SaveV2))
        self._patch(threading, "excepthook", lambda arguments: None)  # a thread that is killed says nothing
        return self

    def __exit__(self, *_: object) -> None:
        """Puts the functions back."""
        for owner, name, real in reversed(self._patches):
            setattr(owner, name, real)

    def _patch(self, owner: Any, name: str, replacement: Any) -> None:
        self._patches.append((owner, name, getattr(owner, name)))
        setattr(owner, name, replacement)

    def _is_below(self, path: str) -> bool:
        return path == self._directory or path.startswith(self._directory + os.sep)

    def _resolve(self, path: Any, dir_fd: int | None) -> str:
        if isinstance(path, int):
            return self._descriptors.get(path, "")
        folder = self._descriptors.get(dir_fd, "") if dir_fd is not None else ""
        return os.path.join(folder, os.path.abspath(path) if dir_fd is None else path)

    def _call(self, name: str, real: Any, path: Any = ".", *arguments: Any, **settings: Any) -> Any:
        resolved = self._resolve(path, settings.get("dir_fd"))
        if not self._is_below(resolved):
            return real(path, *arguments, **settings)
        kind = {"replace": "rename", "remove": "unlink", "scandir": "list", "listdir": "list"}.get(name, name)
        target = os.path.abspath(arguments[0]) if kind == "rename" else ""
        self.do(Operation(kind, resolved, target))
        result = real(path, *arguments, **settings)
        if name == "open":
            self._descriptors[result] = resolved
        return result

    def _open(self, real: Any, path: Any, mode: str = "r", *arguments: Any, **settings: Any) -> Any:
        if isinstance(path, int) or not self._is_below(os.path.abspath(path)):
            return real(path, mode, *arguments, **settings)
        if "w" not in mode:
            self.do(Operation("read", os.path.abspath(path)))
            return real(path, mode, *arguments, **settings)
        self.do(Operation("create", os.path.abspath(path)))
        return _WrittenAtOnce(self, real, os.path.abspath(path))

    def write(self, path: str, content: bytes, real: Any) -> None:
        """Writes a file; its first half, if that fails."""
        try:
            self.do(Operation("write", path, content=content))
        except BaseException:
            if self.operations[-1].path == path:  # not after the death
                with real(path, "wb") as file:
                    file.write(content[: len(content) // 2])
            raise
        with real(path, "wb") as file:
            file.write(content)

    def _save_variables(self, real: Any, *, prefix: str, **arguments: Any) -> None:
        if self.is_dead:
            raise Killed
        real_open = next(function for owner, name, function in self._patches if owner is builtins)
        real(prefix=prefix, **arguments)
        paths = [f"{prefix}.data-00000-of-00001", f"{prefix}.index"]
        contents = []
        for path in paths:
            with real_open(path, "rb") as file:
                contents.append(file.read())
            next(function for _, name, function in self._patches if name == "unlink")(path)
        for path, content in zip(paths, contents, strict=True):
            self.do(Operation("create", path))
            self.write(path, content, real_open)


class _WrittenAtOnce(contextlib.AbstractContextManager):
    """A file that is written when it is closed, so that one operation writes it."""

    def __init__(self, faults: Faults, real_open: Any, path: str):
        self._faults, self._open, self._path = faults, real_open, path
        self._content = bytearray()
        real_open(path, "wb").close()

    def write(self, content: str | bytes) -> None:
        self._content += content.encode() if isinstance(content, str) else content

    def close(self) -> None:
        self._faults.write(self._path, bytes(self._content), self._open)

    def __exit__(self, *_: object) -> None:
        self.close()

"""Loss of power: the directories that a disk may hold after each recorded operation, by what was flushed until then.

The model is POSIX's, with one assumption that journaling file systems keep: operations on the names of one directory
reach the disk in order. What was written to a file and not flushed is absent; names that were created, renamed or
removed in a directory that was not flushed since may be as before, from any operation on.
"""

import dataclasses
import os
import pathlib
import shutil
from collections.abc import Iterator, Sequence

from tests.campaigns.crash_matrix.faults import Operation


@dataclasses.dataclass
class _File:
    content: bytes = b""
    flushed: bytes = b""


@dataclasses.dataclass
class _Folder:
    names: dict[str, "_File | _Folder"] = dataclasses.field(default_factory=dict)
    pending: list[dict[str, "_File | _Folder"]] = dataclasses.field(default_factory=list)  # names since the last flush


def _read(path: pathlib.Path) -> _Folder:
    folder = _Folder()
    for entry in path.iterdir():
        folder.names[entry.name] = _read(entry) if entry.is_dir() else _File(content := entry.read_bytes(), content)
    return folder


class Disk:
    """A directory as programs see it, and as it was flushed."""

    def __init__(self, template: str, directory: str):
        """Reads what is there before, from a copy of the directory that the recorded operations name."""
        self._root = _read(pathlib.Path(template))
        self._directory = os.path.abspath(directory)

    def do(self, operation: Operation) -> None:
        """Repeats a recorded operation."""
        kind, path = operation.kind, operation.path
        if kind == "fsync":
            node = self._node(path)
            if isinstance(node, _File):
                node.flushed = node.content
            elif node is not None:
                node.pending.clear()
        elif kind == "write":
            self._node(path).content = operation.content
        elif kind in ("mkdir", "create", "rename", "unlink", "rmdir"):
            if (self._node(path) is None) != (kind in ("mkdir", "create")):
                return  # it failed, as making what exists and removing what does not
            folder, name = self._node(os.path.dirname(path)), os.path.basename(path)
            folder.pending.append(dict(folder.names))
            if kind in ("unlink", "rmdir"):
                del folder.names[name]
            elif kind == "rename":
                assert os.path.dirname(operation.target) == os.path.dirname(path)
                folder.names[os.path.basename(operation.target)] = folder.names.pop(name)
            elif kind == "mkdir":
                folder.names[name] = _Folder()
            else:
                folder.names[name] = _File()

    def after_power_loss(self) -> Iterator[dict[str, bytes | None]]:
        """Yields what the disk may hold: contents by relative path, None for a directory."""
        for num_lost in range(len(self._root.pending) + 1):
            for is_data_lost in (True, False):
                for are_names_lost in (True, False):
                    names = self._root.pending[-num_lost] if num_lost else self._root.names
                    yield dict(_contents(names, "", is_data_lost, are_names_lost))

    def _node(self, path: str) -> "_File | _Folder | None":
        node: _File | _Folder | None = self._root
        relative = os.path.relpath(path, self._directory)
        for name in [] if relative == "." else relative.split(os.sep):
            node = node.names.get(name) if isinstance(node, _Folder) else None
        return node


def _contents(
    names: dict[str, _File | _Folder], prefix: str, is_data_lost: bool, are_names_lost: bool
) -> Iterator[tuple[str, bytes | None]]:
    for name, node in names.items():
        if isinstance(node, _File):
            yield prefix + name, node.flushed if is_data_lost else node.content
        else:
            yield prefix + name, None
            below = node.pending[0] if are_names_lost and node.pending else node.names
            yield from _contents(below, f"{prefix}{name}/", is_data_lost, are_names_lost)


def states(template: str, directory: str, operations: Sequence[Operation]) -> Iterator[tuple[int, dict]]:
    """Yields each different state of the disk, with the number of operations that were done before."""
    disk, seen = Disk(template, directory), set()
    for number in range(len(operations) + 1):
        for state in disk.after_power_loss():
            # A checkpoint by its random name is the same as by another one.
            key = (number == len(operations), frozenset(state.items()))
            if key not in seen:
                seen.add(key)
                yield number, state
        if number < len(operations):
            disk.do(operations[number])


def write_state(state: dict[str, bytes | None], directory: str) -> None:
    """Makes a directory hold a state, and nothing else."""
    shutil.rmtree(directory, ignore_errors=True)
    os.makedirs(directory)
    for name, content in state.items():
        path = os.path.join(directory, name)
        if content is None:
            os.makedirs(path, exist_ok=True)
        else:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "wb") as file:
                file.write(content)

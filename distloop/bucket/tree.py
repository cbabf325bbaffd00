"""The tree of a workdir: which of its files a bucket gets, and which directories count only when they are whole.

    files, units = scan("staging")          # {"metrics.jsonl": (1204, ...)}, [Unit("checkpoints/500", ...)]
    whole = whole_checkpoints(directory, directory.list())      # {500: "checkpoints/500"}

A unit is a directory with a seal: a checkpoint with `manifest.json`, an export with `saved_model.pb`. Its seal is
written last and deleted first, so that who sees the seal sees the whole. While a checkpoint is written again, the one
before is `<unit>.old`.
"""

import itertools
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import NamedTuple, TypeAlias

from distloop.bucket.directory import RemoteDirectory, RemoteError
from distloop.monitoring.records import as_best_steps, parse_json

CHECKPOINTS = "checkpoints"
BEST = f"{CHECKPOINTS}/best.json"
ROWS = "metrics.jsonl"
OLD = ".old"

MANIFEST = "manifest.json"
_SEALS = (MANIFEST, "saved_model.pb")
_STEP = re.compile(r"0|[1-9][0-9]{0,17}")
# Locks, temporary names, and the token of older versions.
_SKIPPED = re.compile(
    r"\..*|run\.lock.*|staging\.json|.*\.part|.*\.[0-9a-f]{8}\.tmp|.*\.\d{1,9}(-[0-9a-f]{8})?\.(tmp|old)(\.\w+)?"
)

Stamp: TypeAlias = tuple[int, int]  # size, and when it was written (nanoseconds)


class Unit(NamedTuple):
    """A directory that counts when its seal is there.

    Attributes:
        path: in the workdir.
        seal: the name of the file that is written last.
        files: by their paths in it.
    """

    path: str
    seal: str
    files: dict[str, Stamp]

    @property
    def step(self) -> int:
        """The step of a checkpoint; -1: it is none."""
        return step_of(self.path)

    @property
    def names(self) -> list[str]:
        """The files in the order in which they are written."""
        return sorted(self.files, key=lambda name: (name == self.seal, name))


def scan(root: str) -> tuple[dict[str, Stamp], list[Unit]]:
    """Returns the files of a workdir that are uploaded: those on their own by path, and the units.

    Args:
        root: the workdir; it may change meanwhile.
    """
    files: dict[str, Stamp] = {}
    units = checkpoints(root)
    for folder, folders, names in os.walk(root):
        below = os.path.relpath(folder, root)
        folders[:] = [name for name in folders if not is_skipped(name)]
        if below == CHECKPOINTS:
            folders.clear()
        if seal := next((seal for seal in _SEALS if seal in names), None):
            folders.clear()
            units.append(Unit("" if below == "." else below, seal, dict(_stamps(folder))))
        else:
            paths = (os.path.normpath(os.path.join(below, name)) for name in names if not is_skipped(name))
            files.update((path, s) for path in paths if (s := stamp(os.path.join(root, path))))
    return files, units


def checkpoints(root: str) -> list[Unit]:
    """Returns the checkpoints of a workdir that have their manifest, the newest first.

    Args:
        root: the workdir; it may change meanwhile.
    """
    folder = os.path.join(root, CHECKPOINTS)
    names = os.listdir(folder) if os.path.isdir(folder) else []
    steps = sorted((int(name) for name in names if _STEP.fullmatch(name)), reverse=True)
    found = (Unit(f"{CHECKPOINTS}/{s}", MANIFEST, dict(_stamps(os.path.join(folder, str(s))))) for s in steps)
    return [unit for unit in found if MANIFEST in unit.files]


def is_skipped(name: str) -> bool:
    """Returns whether a file or directory of this name stays where it is."""
    return bool(_SKIPPED.fullmatch(name))


def step_of(path: str) -> int:
    """Returns the step of a checkpoint by its path in the workdir; -1: it is none."""
    folder, _, name = path.rpartition("/")
    return int(name) if folder == CHECKPOINTS and _STEP.fullmatch(name) else -1


def by_checkpoint(files: Mapping[str, int]) -> dict[str, dict[str, int]]:
    """Returns the files of a bucket that are in a directory of checkpoints: directory -> path in it -> size.

    Args:
        files: by path, as `RemoteDirectory.list` returns them.
    """
    folders: dict[str, dict[str, int]] = {}
    for path, size in files.items():
        first, *rest = path.split("/", 2)
        if first == CHECKPOINTS and len(rest) == 2:
            folders.setdefault(f"{first}/{rest[0]}", {})[rest[1]] = size
    return folders


def whole_checkpoints(directory: RemoteDirectory, files: Mapping[str, int]) -> dict[int, str]:
    """Returns the checkpoints of a bucket that are whole: the path of each by its step.

    Args:
        directory: of the workdir.
        files: in it, as it lists them.
    """
    return {step: path for step, path, _ in whole(directory, files)}


def whole(directory: RemoteDirectory, files: Mapping[str, int]) -> Iterator[tuple[int, str, bytes]]:
    """Yields step, path and manifest of each whole checkpoint of a bucket, the newest first.

    Args:
        directory: of the workdir.
        files: in it, as it lists them.
    """
    folders, last = by_checkpoint(files), -1
    steps = {path: step_of(path.removesuffix(OLD)) for path in folders}
    for path in sorted(folders, key=lambda path: (-steps[path], path.endswith(OLD))):
        if steps[path] not in (-1, last) and (manifest := _manifest_of_whole(directory, path, folders[path])):
            last = steps[path]
            yield last, path, manifest


def sealed_steps(files: Mapping[str, int]) -> list[int]:
    """Returns the steps of the checkpoints in a bucket that have their seal, in ascending order."""
    sealed = (step_of(path) for path, names in by_checkpoint(files).items() if MANIFEST in names)
    return sorted(step for step in sealed if step >= 0)


def best_steps(best: bytes | None) -> set[int]:
    """Returns the steps that a `best.json` lists; none if there is no such file, or it is damaged."""
    try:
        return {step for steps in parse_json(best or b"{}", as_best_steps).values() for step in steps}
    except ValueError:
        return set()


def upload(directory: RemoteDirectory, folder: str, unit: Unit, verify: Callable[[], None] = lambda: None) -> None:
    """Uploads a unit, its seal last; what is there of an earlier one is deleted.

    Args:
        directory: of the workdir.
        folder: the local directory of the unit.
        unit: what it holds, and where it goes.
        verify: called before a seal is deleted or written; raises if another process writes there.
    """
    there = directory.list(unit.path)
    prefix = f"{unit.path}/" if unit.path else ""
    if unit.seal in there:
        verify()
        directory.delete(prefix + unit.seal)
    for name in unit.names:
        if name == unit.seal:
            verify()
        directory.upload(os.path.join(folder, name), prefix + name)
    for name in there.keys() - unit.files.keys():
        directory.delete(prefix + name)


def send(path: str, url: str) -> None:
    """Writes a file or a unit of this machine to a URL, for good; what was there before of a directory is deleted.

    Args:
        path: of this machine.
        url: where it goes.

    Raises:
        ValueError: if the URL cannot be written to.
    """
    try:
        if os.path.isfile(path):
            parent, _, name = url.rstrip("/").rpartition("/")
            RemoteDirectory(parent).upload(path, name)
        else:
            _, (unit,) = scan(path)
            upload(RemoteDirectory(url), path, unit)
    except RemoteError as error:
        raise ValueError(
            f"{url!r} cannot be written ({error}): give a bucket that is there, and credentials in the way of its "
            "package, or another path."
        ) from error


def copy(directory: RemoteDirectory, path: str, new: str, names: Collection[str]) -> None:
    """Copies a checkpoint within a bucket, its manifest last.

    Args:
        directory: of the workdir.
        path: of the checkpoint in it.
        new: where the copy goes.
        names: of its files.
    """
    for name in sorted(names, key=lambda name: (name == MANIFEST, name)):
        directory.copy(f"{path}/{name}", f"{new}/{name}")


def delete(directory: RemoteDirectory, path: str) -> None:
    """Deletes a unit of a bucket, its seal first."""
    for name in sorted(directory.list(path), key=lambda name: (name not in _SEALS, name)):
        directory.delete(f"{path}/{name}")


def stamp(path: str) -> Stamp | None:
    """Returns the stamp of a file; None: it is not there any more, or no file."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return (status.st_size, status.st_mtime_ns) if os.path.isfile(path) else None


def prune(directory: RemoteDirectory, root: str, newest: int, keep: int, others: Collection[int]) -> list[str]:
    """Deletes and renames checkpoints of a bucket as the store does those of a disk.

    Args:
        directory: of the workdir.
        root: the workdir on this machine.
        newest: the step of the newest checkpoint of the run; nothing is done unless it is in the bucket.
        keep: number of the newest checkpoints to keep.
        others: the steps of others to keep.

    Returns:
        The paths that are gone.
    """
    files = {f"{CHECKPOINTS}/{path}": size for path, size in directory.list(CHECKPOINTS).items()}
    folders, sealed = by_checkpoint(files), sealed_steps(files)
    if newest not in sealed:
        return []
    kept = {*[step for step in sealed if step <= newest][-keep:], *(step for step in others if step <= newest)}
    for later in [step for step in reversed(sealed) if step > newest]:
        path = f"{CHECKPOINTS}/{later}"
        if not os.path.isdir(os.path.join(root, f"{path}.diverged")):
            names = itertools.chain([f"{path}.abandoned"], (f"{path}.abandoned-{i}" for i in itertools.count(2)))
            copy(directory, path, next(name for name in names if name not in folders), folders[path])
    steps = {path: step_of(path.removesuffix(OLD)) for path in folders}
    gone = [p for p, s in steps.items() if s >= 0 and (s not in kept or p.endswith(OLD) and s in sealed)]
    for path in gone:
        delete(directory, path)
    return gone


def _manifest_of_whole(directory: RemoteDirectory, path: str, sizes: Mapping[str, int]) -> bytes:
    """Returns a checkpoint's manifest if the files that it names are there, with their sizes; else nothing."""
    content = directory.read(f"{path}/{MANIFEST}") if MANIFEST in sizes else None
    try:
        named = parse_json(content or b"", lambda manifest: manifest["files"].items())
    except ValueError:
        return b""
    return content or b"" if all(sizes.get(name) == size for name, size in named) else b""


def _stamps(folder: str) -> Iterator[tuple[str, Stamp]]:
    for inner, _, names in os.walk(folder):
        for name in names:
            path = os.path.join(inner, name)
            if found := stamp(path):
                yield os.path.relpath(path, folder), found

"""The tree of a workdir: which of its files a bucket gets, and which directories count only when they are whole.

    files, units = scan("staging")          # {"metrics.jsonl": (1204, ...)}, [Unit("checkpoints/500", ...)]
    whole = whole_checkpoints(directory, directory.list())      # {500: "checkpoints/500"}

A unit is a directory with a seal: a checkpoint with `manifest.json`, an export with `saved_model.pb`. Its seal is
written last and deleted first, so that who sees the seal sees the whole. While a unit is written again, the one before
is `<unit>.old`.
"""

import os
import re
from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple, TypeAlias

from distloop.monitoring.records import as_best_steps, parse_json
from distloop.remote.directory import RemoteDirectory

CHECKPOINTS = "checkpoints"
BEST = f"{CHECKPOINTS}/best.json"
TOKEN = "staging.json"  # of the staging directory that wrote here last
OLD = ".old"

_MANIFEST = "manifest.json"
_SEALS = (_MANIFEST, "saved_model.pb")
_STEP = re.compile(r"0|[1-9][0-9]{0,17}")
# Locks, temporary names, and checkpoints of which a run has gone back: they are renamed where they are.
_SKIPPED = re.compile(r"\..*|run\.lock.*|.*\.part|.*\.[0-9a-f]{8}\.tmp|.*\.\d{1,9}(-[0-9a-f]{8})?\.(tmp|old)(\.\w+)?")
_SET_ASIDE = re.compile(r".*\.(abandoned|diverged)(-\d+)?")

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
        folder, _, name = self.path.rpartition("/")
        return int(name) if folder == CHECKPOINTS and _STEP.fullmatch(name) else -1

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
    units = []
    for folder, folders, names in os.walk(root):
        below = os.path.relpath(folder, root)
        is_checkpoints = below == CHECKPOINTS
        folders[:] = [n for n in folders if not (is_skipped(n) or is_checkpoints and _SET_ASIDE.fullmatch(n))]
        if seal := next((seal for seal in _SEALS if seal in names), None):
            folders.clear()
            units.append(Unit(below, seal, dict(_stamps(folder))))
        elif Unit(below, "", {}).step >= 0:  # a damaged checkpoint
            folders.clear()
        else:
            paths = (os.path.normpath(os.path.join(below, name)) for name in names if not is_skipped(name))
            files.update((path, stamp) for path in paths if (stamp := _stamp(os.path.join(root, path))))
    files.pop(TOKEN, None)
    return files, units


def is_skipped(name: str) -> bool:
    """Returns whether a file or directory of this name stays where it is."""
    return bool(_SKIPPED.fullmatch(name))


def by_unit(files: Mapping[str, int]) -> dict[str, dict[str, int]]:
    """Returns the files of a bucket, with their sizes, by the checkpoint or sealed directory they are in.

    Args:
        files: by path, as `RemoteDirectory.list` returns them.

    Returns:
        Directory -> path in it -> size; those that are in none are under the empty text.
    """
    sealed = {path.rpartition("/")[0] for path in files if path.rpartition("/")[2] in _SEALS}
    units: dict[str, dict[str, int]] = {}
    for path, size in files.items():
        parents = path.split("/")[:-1]
        outer = ("/".join(parents[: i + 1]) for i in range(len(parents)))
        in_checkpoints = "/".join(parents[:2]) if parents[:1] == [CHECKPOINTS] and len(parents) > 1 else ""
        unit = next((folder for folder in outer if folder in sealed), in_checkpoints)
        units.setdefault(unit, {})[path.removeprefix(f"{unit}/") if unit else path] = size
    return units


def whole_checkpoints(directory: RemoteDirectory, files: Mapping[str, int]) -> dict[int, str]:
    """Returns the checkpoints of a bucket that are whole: the path of each by its step.

    Args:
        directory: of the workdir.
        files: in it, as it lists them.
    """
    units, whole = by_unit(files), {}
    for path in sorted(units, key=lambda path: path.endswith(OLD)):
        name = path.removesuffix(OLD)
        unit = Unit(name, _MANIFEST, {})
        if unit.step >= 0 and unit.step not in whole and _is_whole(directory, path, units[path]):
            whole[unit.step] = path
    return whole


def sealed_steps(files: Mapping[str, int]) -> list[int]:
    """Returns the steps of the checkpoints in a bucket that have their seal, in ascending order."""
    paths = (path.split("/") for path in files)
    return sorted(
        int(parts[1])
        for parts in paths
        if len(parts) == 3 and parts[0] == CHECKPOINTS and parts[2] == _MANIFEST and _STEP.fullmatch(parts[1])
    )


def best_steps(best: bytes | None) -> set[int]:
    """Returns the steps that a `best.json` lists; none if there is no such file, or it is damaged."""
    try:
        return {step for steps in parse_json(best or b"{}", as_best_steps).values() for step in steps}
    except ValueError:
        return set()


def seal_of(names: Mapping[str, int]) -> str | None:
    """Returns the name of the file among those of a unit that seals it; None: it is not there."""
    return next((seal for seal in _SEALS if seal in names), None)


def copy(directory: RemoteDirectory, path: str, new: str, names: Collection[str]) -> None:
    """Copies a unit within a bucket, its seal last.

    Args:
        directory: of the workdir.
        path: of the unit in it.
        new: where the copy goes.
        names: of its files.
    """
    seal = seal_of(dict.fromkeys(names, 0))
    for name in sorted(names, key=lambda name: (name == seal, name)):
        directory.copy(f"{path}/{name}", f"{new}/{name}")


def delete(directory: RemoteDirectory, path: str) -> None:
    """Deletes a unit of a bucket, its seal first."""
    names = directory.list(path)
    seal = seal_of(names)
    for name in sorted(names, key=lambda name: (name != seal, name)):
        directory.delete(f"{path}/{name}")


def _is_whole(directory: RemoteDirectory, path: str, sizes: Mapping[str, int]) -> bool:
    """Returns whether a checkpoint has a manifest and the files that it names, with their sizes."""
    if _MANIFEST not in sizes:
        return False
    try:
        named = parse_json(directory.read(f"{path}/{_MANIFEST}") or b"", lambda manifest: manifest["files"].items())
    except ValueError:
        return False
    return all(sizes.get(name) == size for name, size in named)


def _stamps(folder: str) -> Iterator[tuple[str, Stamp]]:
    for inner, _, names in os.walk(folder):
        for name in names:
            path = os.path.join(inner, name)
            if stamp := _stamp(path):
                yield os.path.relpath(path, folder), stamp


def _stamp(path: str) -> Stamp | None:
    """Returns the stamp of a file; None: it is not there any more, or no file."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return (status.st_size, status.st_mtime_ns) if os.path.isfile(path) else None

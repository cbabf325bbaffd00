"""Prune: finds and removes files that a finished or stopped run no longer needs.

    with RunLock("run") as lock:
        found = find("run", keep=1)             # [Superfluous(path, why, size), ...]
        remove(found, lock.verify)

Rows, event files, settings, the newest checkpoint and the best ones stay. `distloop.report --prune` asks before.
"""

import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from distloop import atomic_files
from distloop.checkpoints import memory_copies, store
from distloop.checkpoints.checkpoint import read_manifest
from distloop.variables import WEIGHT_FILES


class Superfluous(NamedTuple):
    """A file or directory of a run that nothing needs.

    Attributes:
        path: where it is.
        why: why nothing needs it.
        num_bytes: its size, with all that is in it.
    """

    path: str
    why: str
    num_bytes: int


def find(workdir: str, keep: int = 1, *, with_memory: bool = False) -> list[Superfluous]:
    """Returns what a run has no use for; call it under the run's lock.

    Args:
        workdir: of the run.
        keep: how many of the newest checkpoints, and of the last exports of a directory, to keep.
        with_memory: whether to return also what runs that are gone have left in this machine's memory.

    Raises:
        OSError: if something cannot be read.
    """
    checkpoints = store.in_workdir(workdir)
    unfinished = (leftover.path for leftover in atomic_files.leftovers(checkpoints.directory) if not leftover.is_old)
    reasons: list[tuple[str, Iterable[str]]] = [
        ("older than the newest, and not the best", store.superfluous(checkpoints, keep)),
        ("later than the one that the run went on from", store.set_aside(checkpoints.directory)),
        ("not finished by a process that was killed", unfinished),
        ("an older export", _older_exports(workdir, keep)),
        ("a copy in memory whose run is gone", memory_copies.left_in_memory() if with_memory else []),
    ]
    return [Superfluous(path, why, _size(path)) for why, paths in reasons for path in sorted(paths, key=_by_number)]


def remove(found: Iterable[Superfluous], verify: Callable[[], None]) -> None:
    """Removes what was found, each in one step as seen by others; `verify` is called before each.

    Raises:
        OSError: if something cannot be removed.
    """
    for superfluous in found:
        if os.path.isdir(superfluous.path):
            atomic_files.delete(superfluous.path, verify=verify)
        else:
            verify()
            os.remove(superfluous.path)


def _older_exports(workdir: str, keep: int) -> Iterator[str]:
    """Yields the exports that are numbered by step, as `distloop.Export` numbers them, without the last ones.

    A file of arrays may be anything: it is an export where the newest checkpoint names its directory. Where that has
    the steps that the run exported, others are another run's.
    """
    named = _export_directories(workdir)
    for entry in os.scandir(workdir):
        if not entry.is_dir(follow_symlinks=False) or entry.name == "checkpoints":
            continue
        by_kind: defaultdict[str, dict[int, str]] = defaultdict(dict)
        for export in os.scandir(entry.path):
            match = re.fullmatch(r"(0|[1-9]\d*)(|\.keras|\.tflite|\.onnx|\.npz|\.safetensors)", export.name)
            if not match or (match[2] in WEIGHT_FILES and os.path.realpath(entry.path) not in named):
                continue
            if match[2] or os.path.isfile(os.path.join(export.path, "saved_model.pb")):
                written = named.get(os.path.realpath(entry.path))
                if written is None or int(match[1]) in written:
                    by_kind[match[2]][int(match[1])] = export.path
        for paths in by_kind.values():
            yield from (paths[step] for step in sorted(paths)[:-keep])


def _export_directories(workdir: str) -> dict[str, list[int] | None]:
    """Returns the directories of the `Export`s whose state the newest checkpoint has; relative ones are read here.

    Each has the steps that the run has exported; None: an older version did not note them.
    """
    checkpoints = store.in_workdir(workdir)
    if (step := checkpoints.newest_whole) < 0:
        return {}
    states = read_manifest(os.path.join(checkpoints.directory, str(step)))["notes"].get("actions", {})
    matches = {name: re.fullmatch(r"Export\((.*)\)", name, re.DOTALL) for name in states}
    return {os.path.realpath(match[1]): states[name].get("written") for name, match in matches.items() if match}


def _size(path: str) -> int:
    """Returns the bytes of a file, or of all files in a directory."""
    if not os.path.isdir(path):
        return os.lstat(path).st_size
    return sum(os.lstat(os.path.join(folder, name)).st_size for folder, _, names in os.walk(path) for name in names)


def _by_number(path: str) -> list[int | str]:
    return [int(part) if i % 2 else part for i, part in enumerate(re.split(r"(\d+)", path))]

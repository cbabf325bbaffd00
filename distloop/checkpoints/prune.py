"""Prune: finds and removes files that a finished or stopped run no longer needs.

    with RunLock("run") as lock:
        found = find("run", keep=1)             # [Superfluous(path, why, size), ...]
        remove(found, lock.verify)

Rows, event files, settings, exports, the newest checkpoint and the best ones stay. `distloop.report --prune` asks.
"""

import contextlib
import itertools
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from distloop import atomic_files
from distloop.checkpoints import memory_copies, store
from distloop.monitoring import text_tables
from distloop.monitoring.records import show_bytes
from distloop.monitoring.run_files import Run
from distloop.monitoring.run_lock import RunLock
from distloop.monitoring.text_tables import Table


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
        keep: how many of the newest checkpoints to keep.
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


def _size(path: str) -> int:
    """Returns the bytes of a file, or of all files in a directory."""
    if not os.path.isdir(path):
        return os.lstat(path).st_size
    return sum(os.lstat(os.path.join(folder, name)).st_size for folder, _, names in os.walk(path) for name in names)


def _by_number(path: str) -> list[int | str]:
    return [int(part) if i % 2 else part for i, part in enumerate(re.split(r"(\d+)", path))]


def prune(runs: Sequence[Run], keep: int, complain: Callable[[str], None], *, is_agreed: bool) -> int:
    """Removes what runs do not need, once somebody has agreed; returns the exit code: 2 if a run is left as it is.

    Args:
        runs: those that train are left as they are.
        keep: as for `find`.
        complain: prints a sentence about a run that is left as it is.
        is_agreed: whether to remove it without a question.

    Raises:
        ValueError: if something cannot be removed.
    """
    superfluous: dict[RunLock, list[Superfluous]] = {}
    is_any_left = False
    with contextlib.ExitStack() as locks:
        for run in runs:
            try:
                lock = locks.enter_context(RunLock(run.path))
                superfluous[lock] = find(run.path, keep, with_memory=not superfluous)
            except (ValueError, OSError) as error:
                complain(f"{run.name} is left as it is: {error}")
                is_any_left = True
        listed = list(itertools.chain(*superfluous.values()))
        root = os.path.commonpath([os.path.dirname(os.path.abspath(run.path)) for run in runs])
        what = f"{len(listed)} path{'s' * (len(listed) != 1)}, {show_bytes(sum(item.num_bytes for item in listed))}"
        if listed:
            rows = [[os.path.relpath(item.path, root), show_bytes(item.num_bytes), item.why] for item in listed]
            text_tables.print_lines(Table("", ["path", "size", "why"], rows))
        if not listed:
            print("There is nothing to remove.")
        elif not is_agreed and not sys.stdin.isatty():
            print(f"Nothing was removed: give --yes to remove {what}.")
        elif is_agreed or _agrees(f"Remove {what}? [y/N] "):
            try:
                for lock, items in superfluous.items():
                    remove(items, lock.verify)
            except OSError as error:
                raise ValueError(f"{error.filename!r} cannot be removed ({error.strerror}).") from error
            print(f"Removed {what}.")
        else:
            print("Nothing was removed.")
    return 2 if is_any_left else 0


def _agrees(question: str) -> bool:
    try:
        return input(question).strip().lower() in ("y", "yes")
    except (EOFError, KeyboardInterrupt):
        print()
        return False

"""Cores of this machine that the process may use, and how to split them between processes; without TensorFlow.

cores.count()          # 16
cores.split(2)         # [[0, 8, 1, 9, ...], [4, 12, 5, 13, ...]]: whole physical cores
"""

import contextlib
import os

_TOPOLOGY = "/sys/devices/system/cpu/cpu{core}/topology/{name}"  # Linux


def count() -> int:
    """Returns the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def split(parts: int, size: int | None = None) -> list[list[int]]:
    """Returns the cores of each part, neighbours together; cores left over belong to no part.

    Args:
        parts: number of parts.
        size: cores in each part; None: as many as possible.

    Returns:
        Core numbers by part; empty lists if the system cannot bind a process to cores.
    """
    if not hasattr(os, "sched_setaffinity"):
        return [[]] * parts
    cores = sorted(os.sched_getaffinity(0), key=_position)
    size = len(cores) // parts if size is None else size
    return [cores[i * size : (i + 1) * size] for i in range(parts)]


def _position(core: int) -> tuple[int, ...]:
    """Returns the position of a core: package, physical core, thread."""
    position = []
    for name in ("physical_package_id", "core_id"):
        with contextlib.suppress(OSError), open(_TOPOLOGY.format(core=core, name=name)) as file:
            position.append(int(file.read()))
    return (*position, core)

"""Owns which cores of this machine the process may use; without TensorFlow.

Programs that work side by side are faster where each has some of its own:

    cores.count()          # 16
    cores.shares(2)        # [[0, 8, 1, 9, ...], [4, 12, 5, 13, ...]]: whole physical cores
"""

import contextlib
import os

_TOPOLOGY = "/sys/devices/system/cpu/cpu{core}/topology/{name}"  # Linux


def count() -> int:
    """Counts them."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def shares(parts: int, size: int | None = None) -> list[list[int]]:
    """Deals them out, neighbours together; what is left over belongs to nobody.

    Args:
        parts: how many shares.
        size: cores in each; None: as many as there are for all.

    Returns:
        The numbers of each share's cores; empty ones where the system cannot bind a process to cores.
    """
    if not hasattr(os, "sched_setaffinity"):
        return [[]] * parts
    cores = sorted(os.sched_getaffinity(0), key=_place_of)
    size = len(cores) // parts if size is None else size
    return [cores[i * size : (i + 1) * size] for i in range(parts)]


def _place_of(core: int) -> tuple[int, ...]:
    """Returns where a core is: package, physical core, thread."""
    parts = []
    for name in ("physical_package_id", "core_id"):
        with contextlib.suppress(OSError), open(_TOPOLOGY.format(core=core, name=name)) as file:
            parts.append(int(file.read()))
    return (*parts, core)

"""Memory file: `memory.json`, the memory of a run on each device, estimated and measured; without TensorFlow.

write("run", Memory({"CPU:0": {"weights": 4_000_000, "activations": 138_000_000}}, {"host": 150_000_000}))
read("run")             # None: there is none
"""

import json
import os
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from distloop import atomic_files
from distloop.log import log
from distloop.monitoring.records import is_count, read_json

FILE = "memory.json"
TABLES = "embedding tables"
# What devices hold, in the order in which it is shown: from step to step; what a step needs besides, as estimated.
HELD = ("weights", TABLES, "optimizer slots", "averages of weights")
ESTIMATED = ("batch", "activations", "gradients")
PARTS = (*HELD, *ESTIMATED)
HOST = "host"  # stands for all virtual CPUs, which share the memory of a process


class Memory(NamedTuple):
    """Bytes of the first worker's devices.

    Attributes:
        devices: device -> what they hold -> bytes: of variables as they are placed, and what `--memory` estimated.
        taken: device -> the peak of a GPU; "host" -> how much the process grew since `fit` began, on CPUs; the most of
            all calls of `fit`.
    """

    devices: dict[str, dict[str, int]]
    taken: dict[str, int]


def write(workdir: str, memory: Memory) -> None:
    """Writes the file; an error is logged, and the report will lack it."""
    try:
        os.makedirs(workdir, exist_ok=True)
        with atomic_files.replacing(os.path.join(workdir, FILE)) as temporary:
            with open(temporary, "w", encoding="utf-8") as file:
                json.dump(memory._asdict(), file, indent=2)
    except OSError as error:
        log.warning("The report will lack the memory of this run: %s.", error.strerror or error)


def read(workdir: str, warn: Callable[[str], None] = log.warning) -> Memory | None:
    """Returns the content; None if the file is missing or damaged."""
    return read_json(os.path.join(workdir, FILE), _as_memory, instead="the memory of the run is unknown", warn=warn)


def _as_memory(content: Any) -> Memory:
    devices = {device: _counts(parts) for device, parts in content["devices"].items()}
    return Memory(devices, _counts(content["taken"]))


def _counts(values: dict[str, Any]) -> dict[str, int]:
    counts = {name: int(value) for name, value in values.items()}
    if not all(map(is_count, counts.values())):
        raise ValueError(f"no numbers of bytes: {values}")
    return counts


def measured(devices: Iterable[str]) -> list[str]:
    """Returns of which devices, such as `CPU:0`, the memory that was taken is known: the GPUs, or "host"."""
    return [device for device in devices if not device.startswith("CPU")] or [HOST]


def taken_on(memory: Memory | None, devices: Iterable[str]) -> dict[str, int]:
    """Returns what an earlier run took on such devices; an empty dict if that is unknown."""
    names = measured(devices)
    return {name: count for name, count in memory.taken.items() if name in names} if memory is not None else {}

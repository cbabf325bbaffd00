"""Owns what a profile tells of each device: which operations ran there, how busy it was, how much memory they held.

    found = read_usage("run/summaries/train")       # {"CPU:0": Usage(...), "CPU:1": ...}

Virtual CPUs share their threads and their allocator, so nothing else can tell them apart: the profiler says in which
part of the program each operation ran, and each part belongs to a device.
"""

import collections
import glob
import os
import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from tensorflow.tsl.profiler.protobuf import xplane_pb2

from distloop.distributed.devices import short_device

_OPERATION = re.compile(r"^[^:\s]+:(_?[A-Z]\w*)$")
_WAITS = ("IteratorGetNext",)  # operations that wait for others


class Usage(NamedTuple):
    """What one device did while it was profiled.

    Attributes:
        busy_share: of the time of the steps, that with an operation at work.
        step_bytes: the most that operations of a step have allocated and not yet given back; variables, which were
            there before, do not count. On CPUs, of tensors of 256 KB and more: the allocator tells of no others.
        operations: the types of the operations that ran, with how often, such as `{"MatMul": 24}`.
    """

    busy_share: float
    step_bytes: int
    operations: collections.Counter[str]


class _Event(NamedTuple):
    name: str
    start: int  # picoseconds
    end: int
    stats: dict[str, Any]


class _Operation(NamedTuple):
    part: tuple[Any, Any]  # of the program: a call of it, and the part that one device runs
    kind: str
    start: int
    end: int


def read_usage(directory: str) -> dict[str, Usage]:
    """Reads the newest profile of a run.

    Args:
        directory: of a TensorBoard run, as for `Profile`.

    Returns:
        By device, as in `CPU:1`: those that passed something on to others. Empty if there is no profile.
    """
    paths = glob.glob(os.path.join(glob.escape(directory), "plugins", "profile", "*", "*.xplane.pb"))
    if not paths:
        return {}
    space = xplane_pb2.XSpace()
    with open(max(paths, key=os.path.getmtime), "rb") as file:
        space.ParseFromString(file.read())
    steps: list[tuple[int, int]] = []
    operations: list[_Operation] = []
    memory: list[tuple[int, str, int, Any]] = []  # when, at which address, how much (0: given back), by which part
    devices: dict[Any, str] = {}  # by part
    kernels: dict[str, list[tuple[int, int]]] = {}  # by GPU
    for plane in space.planes:
        for line in plane.lines:
            events = list(_events(plane, line))
            if plane.name.startswith("/device:GPU"):
                if line.name.startswith("Stream"):
                    kernels.setdefault(short_device(plane.name), []).extend((e.start, e.end) for e in events)
                continue
            steps += [(event.start, event.end) for event in events if event.name == "train"]
            part, until = None, 0
            for event in events:
                if event.name == "ExecutorState::Process":
                    part, until = (event.stats.get("id"), event.stats.get("_c")), event.end
                elif event.name == "MemoryDeallocation":
                    memory.append((event.start, event.stats["addr"], 0, None))
                elif part is None or event.start >= until:
                    continue
                elif event.name == "MemoryAllocation":
                    memory.append((event.start, event.stats["addr"], int(event.stats["allocation_bytes"]), part))
                elif (match := _OPERATION.match(event.name)) and not match[1].startswith(_WAITS):
                    operations.append(_Operation(part, match[1], event.start, event.end))
                    if match[1] == "_Send":  # the key begins with who sends
                        devices[part] = short_device(event.stats["key"].partition(";")[0])
    held = _peaks(memory, devices)
    found = {}
    for device in sorted(set(devices.values())):
        own = [operation for operation in operations if devices.get(operation.part) == device]
        busy = kernels.get(device) or [(operation.start, operation.end) for operation in own]
        share = _covered(busy) / max(1, _covered(steps))
        found[device] = Usage(share, held.get(device, 0), collections.Counter(operation.kind for operation in own))
    return found


def _events(plane: Any, line: Any) -> Iterator[_Event]:
    """Gives the events of a thread as they began, those that hold others before them."""
    names = {key: value.name for key, value in plane.stat_metadata.items()}
    begun = line.timestamp_ns * 1000
    for event in sorted(line.events, key=lambda event: (event.offset_ps, -event.duration_ps)):
        stats = {}
        for stat in event.stats:
            kind = stat.WhichOneof("value")
            value = getattr(stat, kind)
            stats[names[stat.metadata_id]] = names.get(value, "") if kind == "ref_value" else value
        start = begun + event.offset_ps
        yield _Event(plane.event_metadata[event.metadata_id].name, start, start + event.duration_ps, stats)


def _peaks(memory: Iterable[tuple[int, str, int, Any]], devices: dict[Any, str]) -> dict[str, int]:
    """Finds the most that each device held at a time, in bytes."""
    owners: dict[str, tuple[str, int]] = {}  # by address
    held: collections.Counter[str] = collections.Counter()
    most: dict[str, int] = {}
    for _, address, size, part in sorted(memory, key=lambda event: event[0]):
        if before := owners.pop(address, None):
            held[before[0]] -= before[1]
        if size and part in devices:
            device = devices[part]
            owners[address] = device, size
            held[device] += size
            most[device] = max(most.get(device, 0), held[device])
    return most


def _covered(spans: Iterable[tuple[int, int]]) -> int:
    """Measures the time that spans cover, which may overlap."""
    total = until = 0
    for start, end in sorted(spans):
        total += max(0, end - max(start, until))
        until = max(until, end)
    return total

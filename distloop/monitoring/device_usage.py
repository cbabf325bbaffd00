"""Device usage: the operations of each device in profiled steps, and how busy the device was.

    usage = read_usage("run/train")       # {"CPU:0": Usage(...), "CPU:1": ...}

Virtual CPUs share their threads, so only the profile can tell them apart: TensorFlow runs a step as one subgraph per
device, the profile names the subgraph of each operation, and a subgraph's first `_Send` names its device.
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
_WAITING = ("IteratorGetNext",)  # operations that wait rather than compute


class Usage(NamedTuple):
    """The usage of one device while it was profiled.

    Attributes:
        busy_share: fraction of the steps' time in which an operation ran.
        operations: number of operations that ran, by type, such as `{"MatMul": 24}`.
    """

    busy_share: float
    operations: collections.Counter[str]


class _Event(NamedTuple):
    name: str
    start: int  # picoseconds
    end: int
    stats: dict[str, Any]


class _Operation(NamedTuple):
    subgraph: tuple[Any, Any]  # the id of the call, and the id of the subgraph
    kind: str
    start: int
    end: int


def read_usage(directory: str) -> dict[str, Usage]:
    """Reads the newest profile of a run.

    Args:
        directory: the TensorBoard run that the profile belongs to, as for `Profile`.

    Returns:
        The usage by device, such as `CPU:1`, for devices that sent a tensor to another one. Empty if there is no
        profile.
    """
    paths = glob.glob(os.path.join(glob.escape(directory), "plugins", "profile", "*", "*.xplane.pb"))
    if not paths:
        return {}
    space = xplane_pb2.XSpace()
    with open(max(paths, key=os.path.getmtime), "rb") as file:
        space.ParseFromString(file.read())
    steps: list[tuple[int, int]] = []
    operations: list[_Operation] = []
    devices: dict[Any, str] = {}  # by subgraph
    kernels: dict[str, list[tuple[int, int]]] = {}  # by GPU
    for plane in space.planes:
        for line in plane.lines:
            events = list(_events(plane, line))
            if plane.name.startswith("/device:GPU"):
                if line.name.startswith("Stream"):
                    kernels.setdefault(short_device(plane.name), []).extend((e.start, e.end) for e in events)
                continue
            steps += [(event.start, event.end) for event in events if event.name == "train"]
            for operation, event in _operations(events):
                operations.append(operation)
                if operation.kind == "_Send":  # its key begins with the sending device
                    devices[operation.subgraph] = short_device(event.stats["key"].partition(";")[0])
    usage = {}
    for device in sorted(set(devices.values())):
        of_device = [operation for operation in operations if devices.get(operation.subgraph) == device]
        busy = kernels.get(device) or [(operation.start, operation.end) for operation in of_device]
        share = _covered(busy) / max(1, _covered(steps))
        usage[device] = Usage(share, collections.Counter(operation.kind for operation in of_device))
    return usage


def _events(plane: Any, line: Any) -> Iterator[_Event]:
    """Yields the events of a thread by their start, outer events before those inside them."""
    names = {key: value.name for key, value in plane.stat_metadata.items()}
    line_start = line.timestamp_ns * 1000
    for event in sorted(line.events, key=lambda event: (event.offset_ps, -event.duration_ps)):
        stats = {}
        for stat in event.stats:
            kind = stat.WhichOneof("value")
            value = getattr(stat, kind)
            stats[names[stat.metadata_id]] = names.get(value, "") if kind == "ref_value" else value
        start = line_start + event.offset_ps
        yield _Event(plane.event_metadata[event.metadata_id].name, start, start + event.duration_ps, stats)


def _operations(events: Iterable[_Event]) -> Iterator[tuple[_Operation, _Event]]:
    """Yields the operations of a thread that ran within a subgraph, with their events."""
    subgraph, until = None, 0
    for event in events:
        if event.name == "ExecutorState::Process":
            subgraph, until = (event.stats.get("id"), event.stats.get("_c")), event.end
        elif subgraph is not None and event.start < until and (match := _OPERATION.match(event.name)):
            if not match[1].startswith(_WAITING):
                yield _Operation(subgraph, match[1], event.start, event.end), event


def _covered(spans: Iterable[tuple[int, int]]) -> int:
    """Returns the total time that spans cover; time covered twice counts once."""
    total = until = 0
    for start, end in sorted(spans):
        total += max(0, end - max(start, until))
        until = max(until, end)
    return total

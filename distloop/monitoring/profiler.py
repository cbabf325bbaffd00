"""Profiler: profiles a window of steps for TensorBoard's profile plugin, and reads how busy each device was.

    profile = Profile("100:110", "run/train")
    boundary = min(boundary, profile.next_boundary(step))
    with profile.loop(step):        # profiled if the step is in the window
        ...
    profile.close()
    busy_fractions("run/train")        # {"CPU:0": 0.8, "CPU:1": 0.7}

The plugin does not recognize the steps inside a compiled loop. Therefore steps are called one by one in the window, and
the one before it, which traces; the gap between two of them in the profile is the cost of such a call.
"""

import collections
import contextlib
import glob
import os
import re
from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

import tensorflow as tf
from tensorflow.tsl.profiler.protobuf import xplane_pb2

from distloop.distributed.devices import short_device
from distloop.log import log
from distloop.settings.durations import profile_window

_OPERATION = re.compile(r"^[^:\s]+:(_?[A-Z]\w*)$")
_WAITING = "IteratorGetNext"  # the beginning of the types of operations that wait rather than compute

_Span: TypeAlias = tuple[int, int]  # start and end, picoseconds


class Profile:
    """Starts the profiler at the first step of a window, marks each step, and stops it after the last.

    One process writes; in the others it only says which steps run by themselves, which must be alike everywhere.

    Attributes:
        directory: the TensorBoard run that the profile is written to.
        is_written: whether the profile has been written.
    """

    def __init__(self, window: str, directory: str, *, writes: bool = True):
        """Stores the window; starts nothing.

        Args:
            window: `"100:110"` for steps 101 to 110; empty: no profile.
            directory: as the attribute.
            writes: whether this process profiles.
        """
        self._window = profile_window(window)
        self._writes = writes
        self.directory = directory
        self.is_written = False
        self._is_on = False

    def next_boundary(self, step: int) -> float:
        """Returns the step at which a loop that starts at `step` must end at the latest."""
        start, stop = self._window
        return start - 1 if step < start - 1 else step + 1 if step < stop else float("inf")

    def is_single(self, step: int) -> bool:
        """Returns True if the next step must be called by itself."""
        start, stop = self._window
        return start - 1 <= step < stop

    @contextlib.contextmanager
    def loop(self, step: int) -> Iterator[None]:
        """Profiles the block if its step is in the window.

        Args:
            step: number of steps done before it.
        """
        start, stop = self._window
        if not self._writes or not start <= step < stop:
            yield
            return
        if not self._is_on:
            try:
                tf.profiler.experimental.start(self.directory)
                self._is_on = True
            except tf.errors.OpError as error:  # another profiler is running, or a GPU's tools are missing
                log.warning("These steps are not profiled: %s", error.message)
                self._writes = False
        with tf.profiler.experimental.Trace("train", step_num=step + 1, _r=1):  # _r=1: a step, for the plugin
            yield
        if step + 1 == stop:
            self.close()

    def close(self) -> None:
        """Stops the profiler and writes the profile, also if the run ends inside the window.

        Nothing is written if the directory is gone.
        """
        if self._is_on:
            self._is_on = self._writes = False
            try:
                is_there = os.path.isdir(self.directory)
                tf.profiler.experimental.stop(save=is_there)
                self.is_written = is_there
            except (tf.errors.OpError, OSError) as error:
                log.error("The profile is lost: %s", error)


def busy_fractions(directory: str) -> dict[str, float]:
    """Returns the fraction of the profiled steps' time in which an operation ran on each device, such as `CPU:1`.

    Virtual CPUs share their threads, so only the profile can tell them apart: TensorFlow runs a step as one subgraph
    per device, the profile names the subgraph of each operation, and a subgraph's first `_Send` names its device.

    Args:
        directory: the TensorBoard run that the profile belongs to, as for `Profile`; the newest profile is read.

    Returns:
        The fractions of devices that sent a tensor to another one; empty if there is no profile.
    """
    paths = glob.glob(os.path.join(glob.escape(directory), "plugins", "profile", "*", "*.xplane.pb"))
    if not paths:
        return {}
    space = xplane_pb2.XSpace()
    with open(max(paths, key=os.path.getmtime), "rb") as file:
        space.ParseFromString(file.read())
    steps: list[_Span] = []
    operations: dict[Any, list[_Span]] = collections.defaultdict(list)  # by subgraph
    devices: dict[Any, str] = {}  # by subgraph
    kernels: dict[str, list[_Span]] = collections.defaultdict(list)  # by GPU
    lines = [(plane, line) for plane in space.planes for line in plane.lines]
    for plane, line in lines:
        if plane.name.startswith("/device:GPU"):
            if line.name.startswith("Stream"):
                kernels[short_device(plane.name)] += [span for _, span, _ in _events(plane, line)]
            continue
        subgraph, until = None, 0
        for name, span, stats in _events(plane, line):
            if name == "train":
                steps.append(span)
            elif name == "ExecutorState::Process":
                subgraph, until = (stats.get("id"), stats.get("_c")), span[1]
            elif subgraph is not None and span[0] < until and (match := _OPERATION.match(name)):
                if not match[1].startswith(_WAITING):
                    operations[subgraph].append(span)
                if match[1] == "_Send":  # its key begins with the sending device
                    devices[subgraph] = short_device(stats["key"].partition(";")[0])
    fractions = {}
    for device in sorted(set(devices.values())):
        computed = [span for subgraph, spans in operations.items() if devices.get(subgraph) == device for span in spans]
        fractions[device] = _covered(kernels.get(device) or computed) / max(1, _covered(steps))
    return fractions


def _events(plane: Any, line: Any) -> Iterator[tuple[str, _Span, dict[str, Any]]]:
    """Yields name, span and stats of a thread's events by their start, outer events before those inside them."""
    names = {key: value.name for key, value in plane.stat_metadata.items()}
    line_start = line.timestamp_ns * 1000
    for event in sorted(line.events, key=lambda event: (event.offset_ps, -event.duration_ps)):
        stats = {}
        for stat in event.stats:
            kind = stat.WhichOneof("value")
            value = getattr(stat, kind)
            stats[names[stat.metadata_id]] = names.get(value, "") if kind == "ref_value" else value
        start = line_start + event.offset_ps
        yield plane.event_metadata[event.metadata_id].name, (start, start + event.duration_ps), stats


def _covered(spans: Iterable[_Span]) -> int:
    """Returns the total time that spans cover; time covered twice counts once."""
    total = until = 0
    for start, end in sorted(spans):
        total += max(0, end - max(start, until))
        until = max(until, end)
    return total

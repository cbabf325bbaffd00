"""Stage placement: puts each stage on its device, with its variables, gradients, slots and averages.

placement = StagePlacement(networks)        # in place of the plain `Placement`
busy_fractions("run/train")                 # {"CPU:0": 0.8, "CPU:1": 0.7}, of the steps in a profile
"""

import collections
import contextlib
import glob
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import keras
import tensorflow as tf
from tensorflow.tsl.profiler.protobuf import xplane_pb2

from distloop.distributed.devices import short_device
from distloop.model import memory
from distloop.model.placement import Placement, wrong_num_stages
from distloop.monitoring.profiler import Profile
from distloop.optimizers.gradients import Packing
from distloop.training.action import Report, RowAction
from distloop.variables import tensorflow_variable

_OPERATION = re.compile(r"^[^:\s]+:(_?[A-Z]\w*)$")
_WAITING = "IteratorGetNext"  # the beginning of the types of operations that wait rather than compute

_Span: TypeAlias = tuple[int, int]  # start and end, picoseconds


class StagePlacement(Placement):
    """The placement of networks whose stages are on several devices.

    A stage's variables, slots, averages and gradients stay on its device, and its forward and backward pass run there.
    The loss is computed on the last stage's device. The microbatches of a step are in one graph, so that stages work on
    different ones at the same time.
    """

    def __init__(self, networks: Sequence[Any]):
        """Keeps the networks, each a `Pipeline`, at least one."""
        self._networks = list(networks)
        self.devices = [device for network in self._networks for device in network.devices]

    def describe(self) -> list[str]:
        """Returns a line for each network, as in `stages 2 = 1,024 on CPU:0 + 512 on CPU:1`."""
        return [f"stages {network.describe()}" for network in self._networks]

    def make_actions(self, profile: Profile) -> "list[RowAction]":
        """Returns the action that reports on the stages."""
        return [StageUsage(self.devices, profile)]

    def require_stages(self, num_stages: int) -> None:
        """Checks that a network has as many stages as the settings say."""
        if num_stages > 1 and num_stages not in [len(network) for network in self._networks]:
            raise wrong_num_stages(num_stages, f"a network of {len(self._networks[0])} stages")

    def check_microbatches(self, microbatches: int, batch_size: int) -> None:
        """Checks that no microbatch is empty."""
        if microbatches > batch_size:
            raise ValueError(
                f"microbatches={microbatches} was given for batches of {batch_size} rows, so stages would work on "
                f"empty ones: give microbatches={batch_size} or fewer, or larger batches."
            )

    def make_packing(self, variables: Sequence[Any]) -> Packing:
        """Returns a layout in which the gradients of a stage stay on its device."""
        return StagePacking(variables)

    def layer_scope(self, layer: keras.Layer) -> contextlib.AbstractContextManager[Any]:
        """Returns a scope that places operations on a layer's device."""
        return tf.device(tensorflow_variable(layer.variables[0]).device)

    def differentiate(self, tape: Any, objective: tf.Tensor, tensors: Sequence[Any]) -> list[Any]:
        """Computes gradients; each operation runs beside its forward operation, which a tape cannot do."""
        is_eager, differentiate = tf.executing_eagerly(), super().differentiate
        return differentiate(tape, objective, tensors) if is_eager else list(tf.gradients(objective, tensors))

    @contextlib.contextmanager
    def in_order(self, finished: Sequence[Sequence[tf.Tensor]]) -> Iterator[None]:
        """Enters a scope in which a microbatch is traced; what is in no stage, as the loss, is on the last one.

        A stage waits for the sum of the gradients, not for those of a microbatch: else TensorFlow may add up late and
        keep both.
        """
        with contextlib.ExitStack() as stack:
            for network in self._networks:
                stack.enter_context(network.ordered(finished))
            stack.enter_context(tf.device(self._networks[-1].device(-1)))
            yield

    @contextlib.contextmanager
    def unplaced(self) -> Any:
        """Enters a scope in which the networks are traced without devices, to be served anywhere."""
        with contextlib.ExitStack() as stack:
            for network in self._networks:
                stack.enter_context(network.unplaced())
            yield


class StagePacking(Packing):
    """The layout of gradients in vectors, each of variables on one device, which is another one on each replica."""

    def __init__(self, variables: Sequence[Any]):
        """Plans the layout; call it outside of replicas."""
        plain = [tensorflow_variable(variable) for variable in variables]
        self._one_on = {variable.device: variable for variable in plain}
        super().__init__(variables, [variable.device for variable in plain])

    def _on(self, device: str) -> contextlib.AbstractContextManager[Any]:
        return tf.device(self._one_on[device].device)


class StageUsage(RowAction):
    """Reports `stage_N/device_memory_gb` and `stage_N/device_busy_share` for each stage of a pipeline.

    The memory is the peak of the stage's device, at each log; virtual CPUs share the host's memory and have none. The
    busy share is the fraction of a step's time in which an operation runs on the device; it is read from the profile,
    once `--profile` has written one. With several workers these are the chief's numbers.
    """

    def __init__(self, devices: Sequence[str], profile: Profile):
        """Stores the device of each stage, and the profile."""
        self._devices, self._profile, self._was_read = devices, profile, False

    def __call__(self, report: Report) -> dict[str, float]:
        """Returns the metrics; stages that share a device have the same."""
        metrics, fractions = {}, {}
        if self._profile.is_written and not self._was_read:
            self._was_read, fractions = True, busy_fractions(self._profile.directory)
        for stage, device in enumerate(self._devices):
            if not device.startswith("CPU"):
                metrics[f"stage_{stage}/device_memory_gb"] = memory.device_peak_gb(device)
            if device in fractions:
                metrics[f"stage_{stage}/device_busy_share"] = fractions[device]
        return metrics


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
    with open(max(paths, key=os.path.getmtime), "rb") as file:
        space = xplane_pb2.XSpace.FromString(file.read())
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
    for event in sorted(line.events, key=lambda event: (event.offset_ps, -event.duration_ps)):
        stats = {}
        for stat in event.stats:
            kind = stat.WhichOneof("value")
            value = getattr(stat, kind)
            stats[names[stat.metadata_id]] = names.get(value, "") if kind == "ref_value" else value
        start = line.timestamp_ns * 1000 + event.offset_ps
        yield plane.event_metadata[event.metadata_id].name, (start, start + event.duration_ps), stats


def _covered(spans: Iterable[_Span]) -> int:
    """Returns the total time that spans cover; time covered twice counts once."""
    total = until = 0
    for start, end in sorted(spans):
        total += max(0, end - max(start, until))
        until = max(until, end)
    return total

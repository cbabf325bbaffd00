"""`--memory`: an estimate of the memory that each device needs for a train step, before the first one.

    estimate = estimate_memory(trainer, dataset)
    print(estimate)                                   # weights, optimizer slots, batch, activations, gradients

The forward and backward pass of one replica is traced for its rows of the first batch, and not run. What it leaves out:
work space of libraries such as cuDNN, memory that the allocator cannot use, and what XLA saves.
"""

import contextlib
import math
import os
import pathlib
import re
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from distloop.audit.bug_report import query_gpus
from distloop.audit.tracing import as_replica, compiled
from distloop.data import shards
from distloop.data.source import Data, Source
from distloop.distributed import collectives, strategies
from distloop.graph_functions import BACKWARD_SCOPE, RECOMPUTED_SCOPE, called_graphs, reached
from distloop.keras_models.fit_arguments import FitData, read_arguments
from distloop.log import say
from distloop.model.memory import embedding_tables, held_by_device, known_bytes, variable_bytes
from distloop.model.spec import Update
from distloop.model.state import TrainState
from distloop.optimizers.gradients import Rows, values_of
from distloop.run.assembly import reading
from distloop.settings.precision import BFLOAT16
from distloop.trainer import Trainer
from distloop.training.differentiation import Objective
from distloop.training.forward_backward import ForwardBackward
from distloop.training.microbatches import side_by_side
from distloop.workdir import ledger
from distloop.workdir.records import show_bytes

_COPY = "copy to undo a step that is skipped"
_NAMED_BYTES = 10**6  # the least size of an embedding table that is named
_MAX_NAMES = 5
_RECOMPUTED = re.compile(rf"(^|/){RECOMPUTED_SCOPE}(_\d+)?/")  # those of a forward pass within the backward pass
# Operations that pass on their first input: TensorFlow copies nothing.
_SAME_MEMORY = {"Identity", "IdentityN", "Reshape", "Squeeze", "ExpandDims", "StopGradient", "PreventGradient"}
_SAME_MEMORY |= {"CheckNumerics", "EnsureShape"}
# There before, or a few numbers.
_NO_MEMORY = {"Placeholder", "ReadVariableOp", "Const", "VarHandleOp", "BroadcastGradientArgs", "Shape"}
_LOOPS = {"While", "StatelessWhile"}
_ELEMENTS = {"TensorListPushBack": 1, "TensorListSetItem": 2}  # operation -> which input becomes an element of a list


class Peak(NamedTuple):
    """The contents of memory, in bytes, at the moment when a function needs most.

    Attributes:
        activations: results of the forward pass that the backward pass still reads, recomputed ones included.
        gradients: results of the backward pass.
        num_unknown: tensors of unknown size, which are not counted.
    """

    activations: int = 0
    gradients: int = 0
    num_unknown: int = 0

    @property
    def total(self) -> int:
        """The sum."""
        return self.activations + self.gradients


class MemoryEstimate(NamedTuple):
    """An estimate of the memory of each device where a train step needs most.

    Attributes:
        devices: bytes of each device of this worker by what they hold, such as "weights" and "activations".
        available: bytes that a device has for them; None: unknown.
        rows: of the batch on a device.
        microbatches: in which it computes them.
        enough_microbatches: what to set `microbatches` to so that the step fits; None: it fits, or nothing makes it.
        num_unknown: tensors of unknown size, which are not counted.
        tables: bytes of the larger embedding tables, by the paths of their layers.
    """

    devices: dict[str, dict[str, int]]
    available: int | None
    rows: int
    microbatches: int
    enough_microbatches: int | None
    num_unknown: int
    tables: dict[str, int]

    @property
    def parts(self) -> dict[str, int]:
        """The bytes of the device that needs most, by what they hold."""
        return max(self.devices.values(), key=lambda sizes: sum(sizes.values()))

    @property
    def total(self) -> int:
        """The sum, in bytes."""
        return sum(self.parts.values())

    @property
    def fits(self) -> bool:
        """Whether there is enough memory, as far as is known."""
        return self.available is None or self.total <= self.available

    def __str__(self) -> str:
        cut = f" in {self.microbatches} microbatches" if self.microbatches > 1 else ""
        lines = [f"Estimated memory of each device, where a step of {self.rows} rows{cut} needs most:"]
        columns = list(self.devices.values())
        if any(column != columns[0] for column in columns):
            lines.append("  " + "  ".join(f"{device:>8}" for device in self.devices))
        else:
            columns = columns[:1]
        names = dict.fromkeys(name for column in columns for name in column)
        lines += ["  " + "  ".join(_show(c.get(name, 0)) for c in columns) + f"  {name}" for name in names]
        shown = list(self.tables.items())[:_MAX_NAMES]
        lines += [f"  {_show(size)}  in {path}, of the {ledger.TABLES}" for path, size in shown]
        of = "" if self.available is None else f", of {show_bytes(self.available)} that are available"
        lines.append(f"  {_show(self.total)}  together{of}")
        if self.num_unknown:
            lines.append(f"  {self.num_unknown} tensors of unknown size are not counted.")
        return "\n".join([*lines, *([] if self.fits else [self._advice()])])

    def _advice(self) -> str:
        """Returns what to do about a step that does not fit."""
        if self.enough_microbatches is not None:
            return (
                f"It does not fit: give --microbatches={self.enough_microbatches}, a smaller batch, or "
                f"--precision={BFLOAT16.name}, which about halves the activations."
            )
        return "It does not fit with any number of microbatches: give a smaller model, or optimizers with fewer slots."


def estimate_memory(trainer: Trainer, dataset: Data) -> MemoryEstimate:
    """Estimates the memory that each device needs for a train step; runs none and changes nothing.

    On CPUs it is a part of the process's memory: TensorFlow itself takes about half a gigabyte more. A model of several
    pipeline stages is estimated as a whole, as if it were on one device.

    Args:
        trainer: its model and settings are used; a model that is not built yet is built.
        dataset: as for `Trainer.fit`; its first batch is read.

    Raises:
        ValueError: if the data or `loss_fn` breaks a rule.
    """
    return _estimate(trainer, read_arguments(dataset, None, {}))


def print_and_exit(trainer: Trainer, data: FitData) -> None:
    """Prints the estimate for the data of a call of `fit` and ends the process; with a workdir, the report knows it.

    Raises:
        SystemExit: with code 1 if the step does not fit, else 0.
    """
    estimate = _estimate(trainer, data)
    if collectives.is_chief(trainer.state.strategy):
        for line in str(estimate).splitlines():
            say(line)
        if (workdir := trainer.config.workdir) and workdir == trainer.config.local_workdir:
            os.makedirs(workdir, exist_ok=True)
            ledger.write_memory(workdir, estimate.devices)
    raise SystemExit(0 if estimate.fits else 1)


def _estimate(trainer: Trainer, data: FitData) -> MemoryEstimate:
    state, settings = trainer.state, trainer.config
    trainer.build(data.train)
    given = data.source_settings(settings.global_batch_size(state.strategy))
    source = Source(data.train, state.strategy, repeat=False, **{**reading(state, settings), **given})
    rows = _rows_of_replica(source, state.strategy)
    count, held = int(shards.batch_size(rows)), held_by_device(state)
    batch = sum(variable_bytes(t) for t in tf.nest.flatten(rows, expand_composites=True) if t.dtype != tf.string)
    available = _available(state.strategy, max(sum(sizes.values()) for sizes in held.values()))
    if strategies.has_gpus(state.strategy):
        batch *= 2  # the next one arrives while a step computes
        if settings.on_nonfinite == "skip" or state.loss_scalers:
            held = {device: sizes | {_COPY: sum(sizes.values())} for device, sizes in held.items()}
    sizes = {path: variable_bytes(table) for path, table in embedding_tables(state.model).items()}
    tables = dict(sorted(((path, n) for path, n in sizes.items() if n >= _NAMED_BYTES), key=lambda item: -item[1]))

    def estimate(microbatches: int) -> MemoryEstimate:
        peaks = [_peak_of_update(state, update, rows, microbatches) for update in state.spec.updates]
        peak = max(peaks, key=lambda peak: peak.total)
        needed = dict(zip(ledger.ESTIMATED, (batch, peak.activations, peak.gradients), strict=True))
        devices = {device: sizes | needed for device, sizes in held.items()}
        return MemoryEstimate(devices, available, count, microbatches, None, peak.num_unknown, tables)

    asked_for = estimate(first := min(settings.microbatches, count))
    doublings = 0 if asked_for.fits else (math.ceil(count / first) - 1).bit_length()
    more = (min(first << i, count) for i in range(1, doublings + 1))
    return asked_for._replace(enough_microbatches=next((n for n in more if estimate(n).fits), None))


def _rows_of_replica(source: Source, strategy: tf.distribute.Strategy) -> Any:
    """Returns the first batch's rows that one replica gets, the largest share."""
    rows = source.first_rows()
    count = max(source.layout.shard_sizes(source.layout.replicas_of(strategy), int(shards.batch_size(rows))))
    return tf.nest.map_structure(lambda t: t[:count], rows)


def _peak_of_update(state: TrainState, update: Update, rows: Any, microbatches: int) -> Peak:
    """Returns the peak of an update on a replica; the gradients of all parameters count at least twice.

    They are there as sums of replicas, and scaled for the optimizer, which has a part of them if updates are sharded;
    with several microbatches once more, and with virtual replicas as the sums of their tree. A table's gradient stays
    the rows of the batch where the step keeps it.
    """
    count = int(shards.batch_size(rows))
    cut = tf.nest.map_structure(lambda t: t[: math.ceil(count / (microbatches * state.replicas.per_device))], rows)
    num_microbatches = microbatches * state.replicas.count
    update_pass = ForwardBackward(state, update, microbatches=microbatches)
    sizes: list[int] = []  # of summed and of scaled gradients

    def trace(rows: Any) -> Any:
        with as_replica(0, state.strategy.num_replicas_in_sync, set()):
            computed = update_pass.compute(rows, None, Objective(update_pass.loss_factor(tf.constant(float(count)))))
        optimizer, segments = state.plain_optimizers[update.name], computed.segments
        scaled = update_pass.packing.unpack_for(optimizer, segments, tf.constant(1.0))
        sizes[:] = [sum(_bytes_of_gradient(g, num_microbatches) for g in gradients) for gradients in (segments, scaled)]
        return computed

    peak = peak_of(compiled(trace, cut).graph)
    if update.gradient_fn is None:
        sizes[1] //= state.num_shards
    per_device = state.replicas.per_device
    held = max(microbatches > 1, per_device.bit_length() - 1)
    at_once = min(side_by_side(state.strategy), per_device * microbatches) if state.replicas.same_bits else 1
    peak = peak._replace(activations=at_once * peak.activations, gradients=peak.gradients + held * sizes[0])
    return max(peak, Peak(0, sum(sizes), peak.num_unknown), key=lambda peak: peak.total)


def _bytes_of_gradient(gradient: Any, microbatches: int) -> int:
    """Returns the bytes of a gradient; a sparse one has rows of each microbatch."""
    if not isinstance(gradient, (Rows, tf.IndexedSlices)):
        return variable_bytes(gradient)
    return microbatches * variable_bytes(values_of(gradient))


def _available(strategy: tf.distribute.Strategy, held: int) -> int | None:
    """Returns the bytes for each replica, with those that its variables hold already; None: unknown."""
    if strategies.has_gpus(strategy):
        size = gpu_memory_gb()
        return None if size is None else int(1e9 * size)
    return int(1e9 * available_gb()) // collectives.num_local_replicas(strategy) + held


def gpu_memory_gb() -> float | None:
    """Returns the memory of the smallest GPU of this machine, in GB (10^9 bytes), by NVIDIA's tool; None: unknown."""
    sizes = [int(size) for size in query_gpus("memory.total") if size.isdecimal()]
    return min(sizes) * 2**20 / 1e9 if sizes else None  # it counts in MiB


def available_gb() -> float:
    """Returns the host memory that a process can still allocate without swapping, in GB (10^9 bytes).

    On Linux this is the kernel's estimate, or the rest of a container's limit (cgroup 2) if that is smaller; on other
    systems half of the physical memory.
    """
    try:
        lines = pathlib.Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    with contextlib.suppress(OSError, ValueError):  # no limit
        limit, used = (int(pathlib.Path(f"/sys/fs/cgroup/memory.{name}").read_text()) for name in ("max", "current"))
        available = min(available, limit - used)
    return max(0, available) / 1e9


def _show(size: int) -> str:
    return f"{show_bytes(size):>8}"


def peak_of(graph: Any) -> Peak:
    """Returns the most memory that the tensors of a function's graph take at a time.

    Args:
        graph: a `FuncGraph`; operations that its outputs do not need are left out.
    """
    operations = _needed(graph)
    last_use = {id(_memory_of(tensor)): i for i, op in enumerate(operations) for tensor in op.inputs}
    last_use |= {id(_memory_of(tensor)): len(operations) for tensor in graph.outputs}
    freed: dict[int, list[tuple[bool, int]]] = {}  # after which operation: bytes, and of which pass
    live = {False: 0, True: 0}  # whether of the backward pass -> bytes
    peaks, num_unknown, has_turned = [Peak()], 0, False
    for i, op in enumerate(operations):
        has_turned |= BACKWARD_SCOPE in op.name
        is_backward = has_turned and (BACKWARD_SCOPE in op.name or not _RECOMPUTED.search(op.name))
        for most in [peak_of(called) for called in called_graphs(op)]:
            num_unknown += most.num_unknown
            more = (0, most.total) if is_backward else (most.activations, most.gradients)
            peaks.append(Peak(live[False] + more[0], live[True] + more[1]))
        for tensor in op.outputs:
            size = _bytes(tensor)
            num_unknown += size is None
            if size and _memory_of(tensor) is tensor:
                live[is_backward] += size
                freed.setdefault(last_use.get(id(tensor), i), []).append((is_backward, size))
        peaks.append(Peak(live[False], live[True]))
        for is_of_backward, size in freed.pop(i, []):
            live[is_of_backward] -= size
    return max(peaks, key=lambda peak: peak.total)._replace(num_unknown=num_unknown)


def _needed(graph: Any) -> list[tf.Operation]:
    """Returns the operations that a function runs, in order: TensorFlow leaves out those that no result needs."""
    results = [*(tensor.op for tensor in graph.outputs), *graph.control_outputs]
    needed = set(reached(results, lambda op: [*(tensor.op for tensor in op.inputs), *op.control_inputs]))
    return [op for op in graph.get_operations() if op in needed]


def _memory_of(tensor: tf.Tensor) -> tf.Tensor:
    """Returns the tensor whose memory a tensor shares; itself if it has its own."""
    while tensor.op.type in _SAME_MEMORY:
        tensor = tensor.op.inputs[tensor.value_index]
    return tensor


def _bytes(tensor: tf.Tensor) -> int | None:
    """Returns the bytes that a tensor adds; None: its size is unknown while tracing."""
    if tensor.op.type in _NO_MEMORY or tensor.dtype in (tf.resource, tf.string):
        return 0
    return _bytes_of_list(tensor) if tensor.dtype == tf.variant else known_bytes(tensor)


def _bytes_of_list(tensor: tf.Tensor) -> int | None:
    """Returns the bytes that a loop collects in a list of tensors, an element in each iteration."""
    op = tensor.op
    if op.type == "TensorListFromTensor":
        return _bytes(op.inputs[0])
    if op.type not in _LOOPS:
        return 0
    (body,) = called_graphs(op, "body")
    added = _memory_of(body.outputs[tensor.value_index])
    if added.op.type not in _ELEMENTS:
        return 0
    element = _memory_of(added.op.inputs[_ELEMENTS[added.op.type]])
    after = [_memory_of(b) for a, b in zip(body.inputs, body.outputs, strict=True) if a is element]
    if after and (after[0] is element or id(after[0]) in _elements(body)):
        return 0  # it is the same in all iterations, or an element of another list since the iteration before
    size, iterations = known_bytes(element), _most_iterations(op)
    return None if size is None or iterations is None else size * iterations


def _elements(body: Any) -> set[int]:
    """Returns the `id` of each tensor that a loop's body adds to a list."""
    operations = [op for op in body.get_operations() if op.type in _ELEMENTS]
    return {id(_memory_of(op.inputs[_ELEMENTS[op.type]])) for op in operations}


def _most_iterations(loop: tf.Operation) -> int | None:
    """Returns the `maximum_iterations` of a loop; None: it has none, or it is unknown while tracing."""
    limit = loop.inputs[1]
    if limit.op.type == "Max":  # of one number, as Keras's recurrent layers give it
        limit = limit.op.inputs[0]
    value = tf.get_static_value(limit)
    return None if value is None or np.max(value) < 0 else int(np.max(value))

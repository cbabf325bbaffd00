"""Built-in actions: actions that `fit` adds itself, for data seen, goodput, memory, devices, gradient noise.

`Fit` makes them.
"""

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from distloop.data.numbered import NumberedDataset
from distloop.data.source import Source
from distloop.distributed import collectives, devices, strategies
from distloop.model import memory
from distloop.model.saved_state import ReplicaComparison
from distloop.optimizers.gradient_noise import SQUARE, TRACE
from distloop.training.action import Action, Report, RowAction
from distloop.workdir import ledger
from distloop.workdir.records import unix_time
from distloop.workdir.run_lock import LockLost
from distloop.workers import environment

_RECORD_SECS = 1.0  # the least time between two records of the progress
SCALE = "gradient_noise_scale"
_DECAY = 0.9  # of the moving averages of gradient noise, from one measurement to the next
_OVER_GPUS: dict[str, Callable[[Sequence[float]], Any]] = {
    "gpu_utilization": np.mean,
    "gpu_memory_gb": max,
    "gpu_watts": sum,
    "gpu_temperature": max,
    ledger.ENERGY: sum,
}
_MACHINE_SECS = 1.0  # the least time between two questions to the machine, which take longer than a small step


class DataSeen(RowAction):
    """Reports the epochs of the data and, of a mixture, the examples of each source that the run has trained on."""

    has_fixed_metrics = True

    def __init__(self, source: Source):
        """Stores the data to train on."""
        self._source = source

    def __call__(self, report: Report) -> dict[str, float]:
        """Returns the numbers, which follow from the position in the data; nothing is read."""
        source = self._source
        length = source.steps_per_epoch or source.info.num_batches
        numbers = {"epochs_seen": source.batches_taken / length} if length and length != math.inf else {}
        counts = source.feed.seen(source.batches_taken) if isinstance(source.feed, NumberedDataset) else {}
        return {**numbers, **{f"{name}/examples_seen": float(count) for name, count in counts.items()}}


class Goodput(RowAction):
    """Writes `progress.json`, and reports the goodput and the energy of GPUs over all starts of the run."""

    def __init__(
        self, workdir: str, seconds: Callable[[], Mapping[str, float]], is_chief: bool, verify: Callable[[], None]
    ):
        """Stores where to read and write.

        Args:
            workdir: of the run.
            seconds: returns the seconds of this start by phase, as `Clock.seconds`.
            is_chief: whether this worker writes.
            verify: called before a record; raises if this process may no longer write.
        """
        self._workdir, self._seconds, self._is_chief, self._verify = workdir, seconds, is_chief, verify
        self._start: dict[str, Any] = {}
        self._secs_before: Mapping[str, float] = {}  # of this process, when it went back to a checkpoint
        self._recorded_at = -math.inf
        self._energy: dict[str, float] = {}  # over all starts, at the last call; empty: unknown

    def __call__(self, report: Report) -> dict[str, float]:
        """Returns the goodput, and the energy if it is known."""
        self._start = self._start or ledger.last_start(self._workdir)
        if not self._start:  # the disk is full
            return {}
        if energy := ledger.energy_before(self._start) + report.metrics.get(ledger.ENERGY, 0.0):
            self._energy = {ledger.ENERGY: energy}
        progress = self._progress(report.step)
        if time.monotonic() > self._recorded_at + _RECORD_SECS:
            self._record(progress)
        return {"goodput": ledger.goodput(ledger.account(self._start, progress)), **self._energy}

    @contextlib.contextmanager
    def between_starts(self, step: int) -> Iterator[None]:
        """Enters a scope in which the run goes back to a checkpoint, from a step; it counts as another start."""
        if self._start:
            self._record(self._progress(step))
        yield
        self._start, self._secs_before = {}, self._seconds()

    def on_end(self, report: Report) -> None:
        """Notes the end."""
        self._start = self._start or ledger.last_start(self._workdir)
        if self._start:
            with contextlib.suppress(LockLost):  # which has ended the run, or the next write says so
                self._record(self._progress(report.step))

    def _progress(self, step: int) -> dict[str, Any]:
        secs = {name: secs - self._secs_before.get(name, 0.0) for name, secs in self._seconds().items()}
        return {"time": unix_time(), "step": step, "secs": secs, **self._energy}

    def _record(self, progress: Mapping[str, Any]) -> None:
        if self._is_chief:
            self._verify()
            with contextlib.suppress(OSError):  # of a full disk, on which a run may train
                ledger.record_progress(self._workdir, **progress)
                self._recorded_at = time.monotonic()


class MemoryUse(Action):
    """Writes `memory.json` before the first step; it is called at no boundary.

    What `--memory` estimated in the same workdir, such as the activations, stays in it.
    """

    every = 0
    phase = "logging"
    chief_only = True

    def __init__(self, workdir: str):
        """Stores the workdir of the run."""
        self._workdir = workdir

    def __call__(self, report: Report) -> None:
        """Does nothing."""

    def on_start(self, report: Report) -> None:
        """Writes what is held."""
        held, earlier = memory.held_by_device(report.state), ledger.read_memory(self._workdir) or {}
        for device, sizes in held.items():
            known = earlier.get(device, {})
            sizes |= {kind: known[kind] for kind in ledger.ESTIMATED if kind in known}
        if held != earlier:
            ledger.write_memory(self._workdir, held)


class Utilization(RowAction):
    """Reports how busy devices are, peak memory and, of known operations, the floating-point operations per second.

    Over all GPUs, `gpu_utilization` is the mean, `gpu_memory_gb` and `gpu_temperature` are the largest, `gpu_watts` and
    `energy_kwh` the sum. Of several GPUs, all but the energy are reported of each one, too, as
    `worker_1/gpu_0/gpu_utilization`, or `gpu_0/...` in a run of one worker. Without a utilization of GPUs,
    `cpu_utilization` is the fraction of the first worker's cores that its process has used since the last report.
    """

    has_fixed_metrics = True

    def __init__(
        self,
        flops_per_example: float | None = None,
        peak_flops: float | None = None,
        strategy: tf.distribute.Strategy | None = None,
    ):
        """Stores what is known of the model and the devices.

        Args:
            flops_per_example: floating-point operations that training on one example takes; None: unknown.
            peak_flops: peak performance of all devices together, in operations per second; None: unknown.
            strategy: of the run; None: one worker.
        """
        self._flops_per_example = flops_per_example
        self._peak_flops = peak_flops
        self._gather: Callable[[Any], list[Any]] | None = None
        if strategy is not None and collectives.num_workers(strategy) > 1 and strategies.has_gpus(strategy):
            self._gather = collectives.Workers(strategy).gather
        self._machine: dict[str, float] = {}
        self._asked_at = -math.inf
        self._cpu_secs, self._cpu_time = time.process_time(), time.monotonic()
        self._uses_before = devices.gpu_use()

    def __call__(self, report: Report) -> dict[str, float]:
        """Returns the metrics; asks the machine at most once a second, and at the end."""
        is_due = report.time > self._asked_at + _MACHINE_SECS or report.step >= report.until
        if is_due or self._gather is not None:  # the clocks of workers differ
            self._machine, self._asked_at = memory.peaks() | self._device_use(), report.time
        metrics = dict(self._machine)
        if self._flops_per_example:
            metrics["model_flops_per_sec"] = self._flops_per_example * report.metrics["examples_per_sec"]
            if self._peak_flops:
                metrics["model_flops_utilization"] = metrics["model_flops_per_sec"] / self._peak_flops
        return metrics

    def _device_use(self) -> dict[str, float]:
        """Returns what the drivers of all GPUs report, or else how busy the CPU is."""
        own = devices.gpu_use()
        for use, before in zip(own, self._uses_before, strict=False):
            energy = use.pop(ledger.ENERGY, math.nan) - before.get(ledger.ENERGY, math.nan)
            use |= {ledger.ENERGY: energy} if energy >= 0 else {}
        of_workers = [own] if self._gather is None else self._gather(own)
        uses = {(worker, gpu): use for worker, of in enumerate(of_workers) for gpu, use in enumerate(of)}
        numbers = {
            name: float(combine([use[name] for use in uses.values()]))
            for name, combine in _OVER_GPUS.items()
            if uses and all(name in use for use in uses.values())
        }
        if "gpu_utilization" not in numbers:
            secs, now = time.process_time(), time.monotonic()
            fraction = (secs - self._cpu_secs) / max(now - self._cpu_time, 1e-3) / environment.count_cores()
            self._cpu_secs, self._cpu_time = secs, now
            numbers["cpu_utilization"] = min(fraction, 1.0)
        for (worker, gpu), use in uses.items() if len(uses) > 1 else ():
            prefix = f"worker_{worker}/gpu_{gpu}" if len(of_workers) > 1 else f"gpu_{gpu}"
            numbers |= {f"{prefix}/{name}": number for name, number in use.items() if name != ledger.ENERGY}
        return numbers


class GradientNoise(RowAction):
    """Reports the gradient noise scale of each update, from moving averages of its two estimates."""

    name = "GradientNoise"

    def __init__(self, every: int | str, updates: Sequence[str]):
        """Stores when it is due, and the names of the updates; "" for a single one."""
        self.every = every
        self._prefixes = [f"{name}/" if name else "" for name in updates]
        self._averages: dict[str, float] = {}  # each with a weight that grows to 1

    def get_state(self) -> dict[str, float]:
        """Returns the moving averages."""
        return dict(self._averages)

    def set_state(self, state: dict[str, float]) -> None:
        """Goes on with moving averages."""
        self._averages = dict(state)

    def __call__(self, report: Report) -> dict[str, Any]:
        """Returns the scales; of an update without a measurement since the last row, none."""
        scales = {}
        for prefix in self._prefixes:
            trace, square = (report.metrics.get(f"{prefix}{name}", float("nan")) for name in (TRACE, SQUARE))
            if trace - trace != 0 or square - square != 0:  # not finite
                continue
            for name, value in ((TRACE, trace), (SQUARE, square)):
                before = self._averages.get(f"{prefix}{name}", 0.0)
                self._averages[f"{prefix}{name}"] = _DECAY * before + (1 - _DECAY) * value
            square = self._averages[f"{prefix}{SQUARE}"]
            if square > 0:
                scales[f"{prefix}{SCALE}"] = self._averages[f"{prefix}{TRACE}"] / square
        return scales


class CheckReplicas(Action):
    """Compares the variables of all replicas and workers."""

    phase = "checking replicas"

    def __init__(self, every: int | str):
        """Stores when; `every` is as for `Action`."""
        self.every: int | str | None = every
        self._comparison: ReplicaComparison | None = None

    def __call__(self, report: Report) -> None:
        """Compares them, on all workers.

        Raises:
            ValueError: on every worker, if a variable differs.
        """
        state = report.state
        if self._comparison is None:  # traced once
            self._comparison = ReplicaComparison(state, [*state.seeds, *state.recurrent_states])
        self._comparison.require_equal(
            report.step,
            "the forward pass writes an integer variable, a gradient_fn or step_fn draws random numbers, code outside "
            "the step changes variables on one replica or worker alone, or a device computes wrong: run without each, "
            "and go on from an older checkpoint",
        )

"""`MemoryUse`: the action that notes in the workdir what a run's memory holds on each device, and what it took."""

from collections.abc import Callable, Mapping
from typing import Any

from distloop.actions.action import Action, Report
from distloop.log import log
from distloop.monitoring import memory, memory_file


class MemoryUse(Action):
    """Writes `memory.json` before the first step, and once more when `fit` ends; it is called at no boundary.

    What `--memory` estimated in the same workdir, such as the activations, stays in it. So does what an earlier call of
    `fit` took, if that was more.
    """

    every = 0
    phase = "logging"
    chief_only = True

    def __init__(self, workdir: str, hold: Callable[[Any], Mapping[str, Mapping[str, int]]]):
        """Stores what to measure.

        Args:
            workdir: of the run.
            hold: of a `TrainState`, returns the bytes of variables by device, as in `CPU:0`, and by what they are.
        """
        self._workdir = workdir
        self._hold = hold
        self._gb_before = 0.0

    def __call__(self, report: Report) -> None:
        """Does nothing."""

    def on_start(self, report: Report) -> None:
        """Writes what is held."""
        self._gb_before = memory.peaks()["host_memory_gb"]
        self._write(self._held(report), {})

    def on_end(self, report: Report) -> None:
        """Writes what is held and was taken: the peak of each GPU, or on CPUs how much the process has grown."""
        held = self._held(report)
        taken = {device: self._gb_taken(device) for device in memory_file.measured(held)}
        self._write(held, {device: int(1e9 * gigabytes) for device, gigabytes in taken.items()})

    def _gb_taken(self, device: str) -> float:
        if device == memory_file.HOST:
            return memory.peaks()["host_memory_gb"] - self._gb_before
        return memory.device_peak_gb(device)

    def _held(self, report: Report) -> dict[str, dict[str, int]]:
        """Returns the bytes by device and part, estimated ones included."""
        earlier = memory_file.read(self._workdir)
        held = {}
        for device, parts in self._hold(report.state).items():
            known = earlier.devices.get(device, {}) if earlier is not None else {}
            held[device] = {**parts, **{part: known[part] for part in memory_file.ESTIMATED if part in known}}
        return held

    def _write(self, held: dict[str, dict[str, int]], taken: dict[str, int]) -> None:
        """Writes what is held and was taken, unless an earlier call of `fit` took more."""
        most = memory_file.taken_before(self._workdir, held)
        most |= {device: max(count, most.get(device, 0)) for device, count in taken.items()}
        try:
            memory_file.write(self._workdir, memory_file.Memory(held, most))
        except OSError as error:
            log.warning("The report will lack the memory of this run: %s.", error.strerror or error)

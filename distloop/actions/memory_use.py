"""`MemoryUse`: the action that notes in the workdir what a run's memory holds on each device, and what it took."""

from collections.abc import Callable, Mapping
from typing import Any

from distloop.actions.action import Action, Report
from distloop.log import log
from distloop.monitoring import memory, memory_file


class MemoryUse(Action):
    """Writes `memory.json` at the first log and at the end; it measures nothing at other logs.

    What `--memory` estimated in the same workdir, such as the activations, stays in it.
    """

    every = None
    phase = "logging"
    only_writes = True

    def __init__(self, workdir: str, hold: Callable[[Any], Mapping[str, Mapping[str, int]]]):
        """Stores what to measure.

        Args:
            workdir: of the run.
            hold: of a `TrainState`, returns the bytes of variables by device, as in `CPU:0`, and by what they are.
        """
        self._workdir = workdir
        self._hold = hold
        self._before_gb = memory.peaks()["host_memory_gb"]
        self._was_called = False

    def __call__(self, report: Report) -> dict[str, float]:
        """Returns no metrics."""
        if not self._was_called or report.step >= report.until:
            self._was_called = True
            earlier = memory_file.read(self._workdir)
            estimated = {} if earlier is None else earlier.devices
            devices = {
                device: {**estimated.get(device, {}), **parts} for device, parts in self._hold(report.state).items()
            }
            try:
                memory_file.write(self._workdir, memory_file.Memory(devices, self._taken(list(devices))))
            except OSError as error:
                log.warning("The report will lack the memory of this run: %s.", error.strerror or error)
        return {}

    def _taken(self, devices: list[str]) -> dict[str, int]:
        """Returns the peak bytes of each GPU; on CPUs those by which the process grew, under "host"."""
        gpus = [device for device in devices if not device.startswith("CPU")]
        if gpus:
            return {device: int(1e9 * memory.device_peak_gb(device)) for device in gpus}
        return {memory_file.HOST: int(1e9 * (memory.peaks()["host_memory_gb"] - self._before_gb))}

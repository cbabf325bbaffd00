"""`PipelineUsage`: the action that reports the memory and the load of each pipeline stage's device."""

from collections.abc import Sequence

from distloop.actions import memory_use
from distloop.actions.action import Action, Report
from distloop.monitoring import device_usage
from distloop.monitoring.profiler import Profile


class PipelineUsage(Action):
    """Reports `stage_N/device_memory_gb` and `stage_N/device_busy_share` for each stage of a pipeline.

    The memory is the peak of the stage's device, at each log; virtual CPUs share the host's memory and have none. The
    busy share is the fraction of a step's time in which an operation runs on the device; it is read from the profile,
    once `--profile` has written one. With several workers these are the chief's numbers.
    """

    every = None
    phase = "logging"
    only_writes = True

    def __init__(self, devices: Sequence[str], profile: Profile):
        """Stores the device of each stage, none if the model is no pipeline, and the profile."""
        self._devices = devices
        self._profile = profile
        self._was_read = False

    def __call__(self, report: Report) -> dict[str, float]:
        """Returns the metrics; stages that share a device have the same."""
        usage = {}
        if self._devices and self._profile.is_written and not self._was_read:
            self._was_read = True
            usage = device_usage.read_usage(self._profile.directory)
        metrics = {}
        for stage, device in enumerate(self._devices):
            if not device.startswith("CPU"):
                metrics[f"stage_{stage}/device_memory_gb"] = memory_use.device_peak_gb(device)
            if device in usage:
                metrics[f"stage_{stage}/device_busy_share"] = usage[device].busy_share
        return metrics

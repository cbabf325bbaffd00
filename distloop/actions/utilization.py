"""`Utilization`: the action that reports how much of the machine a run uses."""

import math

from distloop.actions import memory_use
from distloop.actions.action import Action, Report

_MEMORY_SECS = 1.0  # the least time between two queries of the peak memory, which take longer than a small step


class Utilization(Action):
    """Reports the peak memory and, if the model's operations are known, the floating-point operations per second."""

    every = None
    phase = "logging"
    only_writes = True
    has_fixed_metrics = True

    def __init__(self, flops_per_example: float | None = None, peak_flops: float | None = None):
        """Stores what is known of the model and the devices.

        Args:
            flops_per_example: floating-point operations that training on one example takes; None: unknown.
            peak_flops: peak performance of all devices together, in operations per second; None: unknown.
        """
        self._flops_per_example = flops_per_example
        self._peak_flops = peak_flops
        self._memory: dict[str, float] = {}
        self._memory_time = -math.inf

    def __call__(self, report: Report) -> dict[str, float]:
        """Returns the metrics; queries the memory at most once a second, and at the end."""
        if report.time > self._memory_time + _MEMORY_SECS or report.step >= report.until:
            self._memory, self._memory_time = memory_use.peaks(), report.time
        metrics = dict(self._memory)
        if self._flops_per_example:
            metrics["model_flops_per_sec"] = self._flops_per_example * report.metrics["examples_per_sec"]
            if self._peak_flops:
                metrics["model_flops_utilization"] = metrics["model_flops_per_sec"] / self._peak_flops
        return metrics

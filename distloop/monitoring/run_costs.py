"""Run costs: what steps, saves and starts of a run took, from its files; without TensorFlow.

    measure(run)        # {"step_secs": Cost(0.012, 3200), "save_secs": Cost(0.4, 9), ...}

It does not know what the costs are for.
"""

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from distloop.monitoring.records import as_number
from distloop.monitoring.run_files import Run


class Cost(NamedTuple):
    """The median of some measurements."""

    secs: float
    times: int


def measure(run: Run) -> dict[str, Cost]:
    """Returns what is known of a run's costs, by name.

    `step_secs`; `save_pause_secs`, that a save holds training up, and `save_secs`, until its checkpoint is whole;
    `copy_secs`, that a copy in memory holds training up; `restore_secs`; `start_secs`, from a new process to its first
    step, without restoring.

    Args:
        run: whose rows and starts are read.
    """
    names = {"save_pause_secs": "save_pause_secs", "save_secs": "save_secs", "copy_secs": "copy_pause_secs"}
    measured = {name: [row[column] for row in run.rows if column in row] for name, column in names.items()}
    measured["restore_secs"] = [as_number(start.get("restore_secs")) for start in run.starts]
    measured["start_secs"] = _start_secs(run.starts, run.rows)
    known = {name: [secs for secs in values if math.isfinite(secs)] for name, values in measured.items()}
    costs = {name: Cost(statistics.median(values), len(values)) for name, values in known.items() if values}
    if run.steps_per_sec:
        costs["step_secs"] = Cost(1 / run.steps_per_sec, run.step)
    return costs


def _start_secs(starts: Sequence[Mapping[str, Any]], rows: Sequence[Mapping[str, float]]) -> list[float]:
    """Returns, for each start with a row, the seconds from its process to its first step, without restoring."""
    times = [as_number(start.get("time")) for start in starts]
    all_secs = []
    for start, (begin, end) in zip(starts, itertools.pairwise([*times, math.inf]), strict=True):
        row = next((row for row in rows if begin < row.get("time", math.nan) < end), {})
        steps = row.get("step", math.nan) - as_number(start.get("step"))
        before = as_number(start.get("process_secs")) - (start.get("restore_secs") or 0.0)
        tracing = row.get("time", math.nan) - begin - steps / (row.get("steps_per_sec") or math.nan)
        all_secs.append(before + max(tracing, 0.0))  # nan without a row
    return all_secs

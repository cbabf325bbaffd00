"""Runs: reads a run's status, speed, metrics and settings from its workdir; without TensorFlow.

    for run in load_all(["runs"]):
        print(run.name, run.status, {name: series.last for name, series in run.series.items()})

A run can be read while it trains. This module does not know how runs are displayed.
"""

import functools
import math
import os
import re
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from distloop.reports.row_scan import Curve, RowScan, scan_rows
from distloop.workdir import ledger, records
from distloop.workdir.ledger import Memory
from distloop.workdir.run_files import better

# A run counts as running if its last row is at most this old,
_FRESH_SECS = 60
_FRESH_GAPS = 5  # or this many times the median time between two rows.


@dataclass(frozen=True)
class Run:
    """A run as its files describe it.

    Attributes:
        name: path relative to the directory that all loaded runs have in common.
        path: the workdir.
        file: its `metrics.jsonl` on this machine.
        rows: what is shown of the rows in it.
        incidents: the rows of `incidents.jsonl`.
        settings: the values in `config.json`, without `workdir`.
        until: the step at which it ends; None: unknown.
        stop_reason: why an action ended it early; None: no action did.
        silent_secs: age of the last row.
        starts: the rows of `starts.jsonl`.
        memory: the content of `memory.json`; None: there is none.
        time_spent: the seconds of all starts together by what they went to, as `ledger.account` returns them.
    """

    name: str
    path: str
    file: str
    rows: RowScan
    incidents: list[dict[str, Any]]
    settings: dict[str, Any]
    until: int | None
    stop_reason: str | None
    silent_secs: float
    starts: list[dict[str, Any]]
    memory: Memory | None = None
    time_spent: Mapping[str, float] = field(default_factory=dict)

    @property
    def step(self) -> int:
        """The step of the last row."""
        return int(self.rows.last.get("step", 0))

    @functools.cached_property
    def series(self) -> dict[str, Curve]:
        """The model's metrics by name, in order of appearance; with `skipped_steps` if any step was skipped."""
        curves = dict(self.rows.curves)
        if "skipped_steps" in curves and curves["skipped_steps"].least == curves["skipped_steps"].largest == 0:
            del curves["skipped_steps"]
        return curves

    @property
    def status(self) -> str:
        """One of complete, stopped (by an action), diverged, running, interrupted, ended (its length is unknown).

        Or planned: its memory was estimated, and it has not begun. Whether a run is still training is a guess from the
        age of its last row.
        """
        if self.incidents and self.incidents[-1].get("action") == "raise":
            last = self.rows.last
            if not last or records.as_number(self.incidents[-1].get("time", 0)) >= last.get("time", 0):
                return "diverged"
        if not self.rows.last and not self.starts and self.memory is not None:
            return "planned"
        if self.stop_reason is not None:
            return "stopped"
        if self.until and self.step >= self.until:
            return "complete"
        times = self.rows.recent_times
        gap = statistics.median(b - a for a, b in zip(times, times[1:], strict=False)) if len(times) > 1 else 0.0
        if self.silent_secs <= max(_FRESH_SECS, _FRESH_GAPS * gap):
            return "running"
        return "interrupted" if self.until else "ended"

    @property
    def training_secs(self) -> float:
        """The time of the steps, without tracing, evaluations, saves and pauses."""
        return self.rows.secs

    @property
    def elapsed_secs(self) -> float | None:
        """The time from the first step to the last row, with pauses; None: unknown."""
        ends = [row.get("time", math.nan) for row in (self.rows.first, self.rows.last)]
        return ends[1] - ends[0] + self.rows.first_secs if self.rows.steps else None

    @property
    def device_hours(self) -> float | None:
        """The hours that devices were held by all starts together, up to the last row; None: unknown."""
        return ledger.device_hours(self.starts, self.rows.last.get("time", math.nan))

    @property
    def steps_per_sec(self) -> float | None:
        """Steps per second of training time; None: unknown."""
        return self.rows.steps / self.rows.secs if self.rows.steps else None

    @property
    def examples_per_sec(self) -> float | None:
        """Examples per second of training time; None: unknown."""
        return self.rows.examples / self.rows.secs if self.rows.steps else None

    @property
    def seen(self) -> dict[str, float]:
        """What the last row has of the data: `examples_seen`, `epochs_seen`, `<source>/examples_seen`."""
        last = self.rows.last
        return {name: value for name, value in last.items() if name.rpartition("/")[2] in records.GROUPS["data"]}

    @property
    def step_flops(self) -> float | None:
        """The floating-point operations of a training step, as of the last row; None: unknown."""
        flops, steps = (self.rows.last.get(name, math.nan) for name in ("model_flops_per_sec", "steps_per_sec"))
        return flops / steps if flops > 0 < steps else None

    @property
    def busy_fraction(self) -> float | None:
        """The fraction of the time in which its GPUs, or else its cores, computed at the last log; None: unknown."""
        return self.rows.last.get("gpu_utilization", self.rows.last.get("cpu_utilization"))

    @property
    def gpus(self) -> dict[str, float]:
        """What the last row has of all GPUs together: `gpu_memory_gb`, `energy_kwh`, ...; empty without GPUs."""
        return {name: value for name, value in self.rows.last.items() if name in records.OF_GPUS}


def load_all(paths: Sequence[str], leave_out: Callable[[str], None] = lambda sentence: None) -> list[Run]:
    """Reads the runs in some directories, each once.

    Args:
        paths: workdirs, and directories of workdirs.
        leave_out: called with a sentence about each run that cannot be read, if others can, and about files of others.

    Returns:
        The runs in the order of `paths`; the runs of one directory are sorted by name.

    Raises:
        ValueError: if a path holds no run, or none of the runs can be read.
    """
    try:
        workdirs = {
            os.path.realpath(workdir): os.path.normpath(workdir) for path in paths for workdir in _workdirs(path)
        }
    except OSError as error:
        raise ValueError(_unreadable(error)) from error
    root = os.path.commonpath([os.path.dirname(os.path.abspath(path)) for path in workdirs.values()])
    runs, sentences = [], []
    for path in workdirs.values():
        try:
            runs.append(_load(path, os.path.relpath(path, root), leave_out))
        except (OSError, ValueError) as error:
            sentences.append(_unreadable(error) if isinstance(error, OSError) else str(error))
    if not runs:
        raise ValueError(sentences[0])
    for sentence in sentences:
        leave_out(sentence)
    return runs


def different_settings(runs: Sequence[Run]) -> dict[str, list[Any]]:
    """Returns the settings that differ between runs: name -> one value per run, None if a run does not have it."""
    names = dict.fromkeys(name for run in runs for name in run.settings)
    values = {name: [run.settings.get(name) for run in runs] for name in names}
    return {name: column for name, column in values.items() if len(set(map(str, column))) > 1}


def by_metric(runs: Sequence[Run]) -> Iterator[tuple[str, list[tuple[Run, Curve]]]]:
    """Yields each metric with its runs and their series, the best run first if the name says what is better.

    Args:
        runs: the runs, which may have different metrics.
    """
    for name in dict.fromkeys(name for run in runs for name in run.series):
        group = [(run, run.series[name]) for run in runs if name in run.series]
        sign = -1 if better(name) == "larger" else 1
        yield name, sorted(group, key=lambda pair: sign * pair[1].best[0] if pair[1].best else math.inf)


def is_workdir(path: str) -> bool:
    """Returns whether a directory is the workdir of a run."""
    return any(os.path.isfile(os.path.join(path, file)) for file in ("metrics.jsonl", ledger.MEMORY))


def _workdirs(path: str) -> list[str]:
    """Returns the path itself if it is a run's workdir, else the workdirs in it."""
    path = os.path.expanduser(path)
    if not os.path.isdir(path):
        raise ValueError(f"There is no directory {path!r}: give workdirs of runs, or a directory of them.")
    for candidates in ([path], [os.path.join(path, name) for name in sorted(os.listdir(path), key=_by_number)]):
        if workdirs := list(filter(is_workdir, candidates)):
            return workdirs
    raise ValueError(
        f"Neither {path!r} nor a directory in it holds a metrics.jsonl: give the workdirs of runs that have begun."
    )


def _unreadable(error: OSError) -> str:
    return f"{error.filename!r} cannot be read ({error.strerror}): give what you may read."


def _by_number(name: str) -> list[Any]:
    """Returns a sort key that orders run2 before run10, and lr0.003 before lr0.01."""
    return [float(piece) if i % 2 else piece for i, piece in enumerate(re.split(r"(\d+(?:\.\d+)?)", name))]


def _load(path: str, name: str, warn: Callable[[str], None]) -> Run:
    starts, memory = ledger.read_starts(path, warn), ledger.read_memory(path, warn)
    time_spent = ledger.account(starts[-1], ledger.read_progress(path, warn)) if starts else {}
    began = records.as_number(starts[0].get("step")) if starts else 0.0  # of another run, if restored
    file = os.path.join(path, "metrics.jsonl")
    has_begun = os.path.isfile(file)  # else its memory was estimated
    rows = scan_rows(file, int(began) if math.isfinite(began) else 0) if has_begun else RowScan()
    is_unknown = "whether the run diverged is unknown"
    incidents = records.read_rows_if_any(f"{path}/incidents.jsonl", instead=is_unknown, warn=warn)
    is_unknown = "the settings of the run are unknown"
    settings: dict[str, Any] = records.read_json(f"{path}/config.json", instead=is_unknown, warn=warn) or {}
    settings.pop("workdir", None)
    written = os.path.getmtime(file if has_begun else os.path.join(path, ledger.MEMORY))
    saved, steps = _read_end(os.path.join(path, "checkpoints"), warn), settings.get("steps")
    step, until, reason = rows.last.get("step", 0), steps if steps and records.is_count(steps) else None, None
    if saved.get("step", -1) >= step:  # else the run may have another end since
        until, reason = saved["until"], saved["stop_reason"]
    elif (until is None or until <= step) and (saved.get("until") or 0) > step:  # given by `epochs`, or to `fit`
        until = saved["until"]
    silent_secs = max(0.0, time.time() - (rows.last.get("time", 0.0) if rows.last else written))
    return Run(name, path, file, rows, incidents, settings, until, reason, silent_secs, starts, memory, time_spent)


def _read_end(directory: str, warn: Callable[[str], None]) -> dict[str, Any]:
    """Returns `step`, `until` and `stop_reason` of the newest checkpoint; an empty dict if there is none."""
    names = os.listdir(directory) if os.path.isdir(directory) else []
    steps = [int(name) for name in names if re.fullmatch("[0-9]{1,18}", name)]
    path = os.path.join(directory, str(max(steps, default="")), "manifest.json")
    return records.read_json(path, _end_of, instead="whether the run has ended is unknown", warn=warn) or {}


def _end_of(manifest: Any) -> dict[str, Any]:
    step, until, reason = manifest["step"], manifest["notes"]["until"], manifest["notes"]["stop_reason"]
    if not records.is_count(step) or not (until is None or records.is_count(until)):
        raise TypeError(f"a step of {step!r} and an end at {until!r}")
    if not isinstance(reason, str | None):
        raise TypeError(f"a reason of {reason!r}")
    return {"step": step, "until": until, "stop_reason": reason}

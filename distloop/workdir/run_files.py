"""Run files: reads a run's status, speed, metrics and settings from its workdir; without TensorFlow.

    for run in load_all(["runs"]):
        print(run.name, run.status, {name: series.last for name, series in run.series.items()})

A run can be read while it trains. This module does not know how runs are displayed.
"""

import dataclasses
import functools
import math
import os
import re
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from distloop.workdir import ledger, records
from distloop.workdir.ledger import Memory

# A run counts as running if its last row is at most this old,
_FRESH_SECS = 60
_FRESH_GAPS = 5  # or this many times the median time between two rows.

# Words in a metric's name that say whether smaller or larger is better; the last one in a name counts.
_HIDDEN = records.ABOUT_THE_RUN - {"gradient_noise_scale"}  # numbers of a row that are not compared
_SMALLER = "loss|error|mae|mse|rmse|nll|perplexity|crossentropy|cross_entropy"
_LARGER = r"accuracy|acc|auc|precision|recall|f1(?!\d)|r2(?!\d)|iou|bleu"
_KNOWN = re.compile(rf"(?<![a-z])(?:(?P<smaller>{_SMALLER})|(?P<larger>{_LARGER}))(?![a-z])")


def better(name: str) -> str | None:
    """Returns whether "smaller" or "larger" is better, by the metric's name; None: unknown."""
    words = [match.lastgroup for match in _KNOWN.finditer(name.lower())]
    return words[-1] if words else None


@dataclass(frozen=True)
class Series:
    """The measurements of one metric in a run.

    Attributes:
        name: name of the metric.
        steps: the steps where it was measured, in order.
        values: one value per step; nan if it was not finite.
    """

    name: str
    steps: list[int]
    values: list[float]

    @property
    def last(self) -> float:
        """The last value."""
        return self.values[-1]

    @functools.cached_property
    def finite(self) -> list[float]:
        """The finite values."""
        return [value for value in self.values if math.isfinite(value)]

    @property
    def least(self) -> float:
        """The least finite value; nan if there is none."""
        return min(self.finite, default=math.nan)

    @property
    def largest(self) -> float:
        """The largest finite value; nan if there is none."""
        return max(self.finite, default=math.nan)

    @property
    def best(self) -> tuple[float, int] | None:
        """The best value and its first step; None if the name does not say what is better."""
        direction = better(self.name)
        if direction is None or not self.finite:
            return None
        value = self.least if direction == "smaller" else self.largest
        return value, self.steps[self.values.index(value)]


@dataclass(frozen=True)
class Run:
    """A run as its files describe it.

    Attributes:
        name: path relative to the directory that all loaded runs have in common.
        path: the workdir.
        rows: the rows of `metrics.jsonl`, as `read_metrics` returns them.
        incidents: the rows of `incidents.jsonl`.
        settings: the values in `config.json`, without `workdir`.
        until: the step at which it ends; None: unknown.
        stop_reason: why an action ended it early; None: no action did.
        silent_secs: age of the last row.
        starts: the rows of `starts.jsonl`.
        memory: the content of `memory.json`; None: there is none.
        time_spent: the seconds of all starts together by what they went to, as `ledger.account` returns them.
        saved_step: the step of the newest checkpoint; None: unknown.
    """

    name: str
    path: str
    rows: list[dict[str, float]]
    incidents: list[dict[str, Any]]
    settings: dict[str, Any]
    until: int | None
    stop_reason: str | None
    silent_secs: float
    starts: list[dict[str, Any]]
    memory: Memory | None = None
    time_spent: Mapping[str, float] = field(default_factory=dict)
    saved_step: int | None = None

    @property
    def step(self) -> int:
        """The step of the last row."""
        return int(self.rows[-1]["step"]) if self.rows else 0

    @functools.cached_property
    def series(self) -> dict[str, Series]:
        """The model's metrics by name, in order of appearance; with `skipped_steps` if any step was skipped."""
        series_by_name: dict[str, Series] = {}
        for row in self.rows:
            for name, value in row.items():
                if (series := series_by_name.get(name)) is None:
                    series = series_by_name[name] = Series(name, [], [])
                series.steps.append(int(row["step"]))
                series.values.append(value)
        hidden = {"step", "time"}
        hidden |= {name for name in series_by_name if name.rpartition("/")[2] in _HIDDEN}
        if "skipped_steps" in series_by_name and not any(series_by_name["skipped_steps"].values):
            hidden.add("skipped_steps")
        return {name: series for name, series in series_by_name.items() if name not in hidden}

    @property
    def status(self) -> str:
        """One of complete, stopped (by an action), diverged, running, interrupted, ended (its length is unknown).

        Or planned: its memory was estimated, and it has not begun. Whether a run is still training is a guess from the
        age of its last row.
        """
        if self.incidents and self.incidents[-1].get("action") == "raise":
            if not self.rows or records.as_number(self.incidents[-1].get("time", 0)) >= self.rows[-1].get("time", 0):
                return "diverged"
        if not self.rows and not self.starts and self.memory is not None:
            return "planned"
        if self.stop_reason is not None:
            return "stopped"
        if self.until and self.step >= self.until:
            return "complete"
        times = self._times
        gap = statistics.median(b - a for a, b in zip(times, times[1:], strict=False)) if len(times) > 1 else 0.0
        if self.silent_secs <= max(_FRESH_SECS, _FRESH_GAPS * gap):
            return "running"
        return "interrupted" if self.until else "ended"

    @property
    def training_secs(self) -> float:
        """The time of the steps, without tracing, evaluations, saves and pauses."""
        return sum(secs for _, secs, _ in self._windows.values())

    @property
    def elapsed_secs(self) -> float | None:
        """The time from the first step to the last row, with pauses; None: unknown."""
        times = self._times
        until_first_row = self._windows[0][1] if 0 in self._windows else 0.0
        return times[-1] - times[0] + until_first_row if self._windows else None

    @property
    def device_hours(self) -> float | None:
        """The hours that devices were held by all starts together, up to the last row; None: unknown."""
        return ledger.device_hours(self.starts, self._times[-1] if self.rows else math.nan)

    @property
    def steps_per_sec(self) -> float | None:
        """Steps per second of training time; None: unknown."""
        return sum(steps for steps, _, _ in self._windows.values()) / self.training_secs if self._windows else None

    @property
    def examples_per_sec(self) -> float | None:
        """Examples per second of training time; None: unknown."""
        examples = sum(examples for _, _, examples in self._windows.values())
        return examples / self.training_secs if self._windows else None

    @property
    def seen(self) -> dict[str, float]:
        """What the last row has of the data: `examples_seen`, `epochs_seen`, `<source>/examples_seen`."""
        last = self.rows[-1] if self.rows else {}
        return {name: value for name, value in last.items() if name.rpartition("/")[2] in records.GROUPS["data"]}

    @property
    def busy_fraction(self) -> float | None:
        """The fraction of the time in which its GPUs, or else its cores, computed at the last log; None: unknown."""
        last = self.rows[-1] if self.rows else {}
        return last.get("gpu_utilization", last.get("cpu_utilization"))

    @property
    def _times(self) -> list[float]:
        return [row.get("time", math.nan) for row in self.rows]

    @functools.cached_property
    def _windows(self) -> dict[int, tuple[int, float, float]]:
        """Returns steps, seconds and examples since the previous row, by the row's index, for rows with a speed."""
        first = records.as_number(self.starts[0].get("step")) if self.starts else 0.0  # of another run, if restored
        windows, previous = {}, int(first) if math.isfinite(first) else 0
        for i, row in enumerate(self.rows):
            steps, speed = int(row["step"]) - previous, row.get("steps_per_sec", math.nan)
            previous = int(row["step"])
            if 0 < speed < math.inf and steps > 0:
                secs = steps / speed
                windows[i] = (steps, secs, secs * row.get("examples_per_sec", math.nan))
        return windows


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


def by_metric(runs: Sequence[Run]) -> Iterator[tuple[str, list[tuple[Run, Series]]]]:
    """Yields each metric with its runs and their series, the best run first if the name says what is better.

    Args:
        runs: the runs, which may have different metrics.
    """
    for name in dict.fromkeys(name for run in runs for name in run.series):
        group = [(run, run.series[name]) for run in runs if name in run.series]
        sign = -1 if better(name) == "larger" else 1
        yield name, sorted(group, key=lambda pair: sign * pair[1].best[0] if pair[1].best else math.inf)


def _workdirs(path: str) -> list[str]:
    """Returns the path itself if it is a run's workdir, else the workdirs in it."""
    path = os.path.expanduser(path)
    if not os.path.isdir(path):
        raise ValueError(f"There is no directory {path!r}: give workdirs of runs, or a directory of them.")
    for candidates in ([path], [os.path.join(path, name) for name in sorted(os.listdir(path), key=_by_number)]):
        files = ("metrics.jsonl", ledger.MEMORY)
        if workdirs := [c for c in candidates if any(os.path.isfile(os.path.join(c, file)) for file in files)]:
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
    has_begun = os.path.isfile(os.path.join(path, "metrics.jsonl"))
    rows = records.read_metrics(path) if has_begun else []  # else its memory was estimated
    file = os.path.join(path, "incidents.jsonl")
    incidents = records.read_rows_if_any(file, instead="whether the run diverged is unknown", warn=warn)
    starts, memory = ledger.read_starts(path, warn), ledger.read_memory(path, warn)
    time_spent = ledger.account(starts[-1], ledger.read_progress(path, warn)) if starts else {}
    run = _from_rows(path, name, rows, incidents, warn)
    return dataclasses.replace(run, starts=starts, memory=memory, time_spent=time_spent)


def _from_rows(
    path: str, name: str, rows: list[dict[str, float]], incidents: list[dict[str, Any]], warn: Callable[[str], None]
) -> Run:
    """Returns a run with its settings and its end."""
    file = os.path.join(path, "config.json")
    settings: dict[str, Any] = records.read_json(file, instead="the settings of the run are unknown", warn=warn) or {}
    settings.pop("workdir", None)
    saved = _read_end(os.path.join(path, "checkpoints"), warn)
    steps = settings.get("steps")
    step, until, reason = rows[-1]["step"] if rows else 0, steps if steps and records.is_count(steps) else None, None
    if saved.get("step", -1) >= step:  # else the run may have another end since
        until, reason = saved["until"], saved["stop_reason"]
    elif (until is None or until <= step) and (saved.get("until") or 0) > step:  # given by `epochs`, or to `fit`
        until = saved["until"]
    files = (os.path.join(path, file) for file in ("metrics.jsonl", ledger.MEMORY))
    since = rows[-1].get("time", 0.0) if rows else os.path.getmtime(next(filter(os.path.isfile, files)))
    silent_secs = max(0.0, time.time() - since)
    return Run(name, path, rows, incidents, settings, until, reason, silent_secs, [], saved_step=saved.get("step"))


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

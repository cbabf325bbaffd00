"""Owns what the files of a run tell: how far it came, how fast, its numbers, its settings; without TensorFlow.

    for run in load_all(["runs"]):
        print(run.name, run.status, {name: series.last for name, series in run.series.items()})

A run that is still training can be read at any time. It does not know how runs are shown.
"""

import functools
import json
import math
import os
import re
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from distloop.monitoring import records

_FRESH_SECS = 60  # a run whose last row is younger may still train, and so
_FRESH_GAPS = 5  # may one whose last row is younger than so many times the usual time between two rows

# Words in names that tell what is better; where there are several, the last one does.
_SMALLER = "loss error mae mse rmse nll perplexity crossentropy cross_entropy".split()
_LARGER = r"accuracy acc auc precision recall f1(?!\d) r2(?!\d) iou bleu".split()
_KNOWN = re.compile(rf"(?<![a-z])(?:(?P<smaller>{'|'.join(_SMALLER)})|(?P<larger>{'|'.join(_LARGER)}))(?![a-z])")


def better(name: str) -> str | None:
    """Says by a metric's name whether `smaller` or `larger` is better; None: the name does not tell."""
    found = [match.lastgroup for match in _KNOWN.finditer(name.lower())]
    return found[-1] if found else None


@dataclass(frozen=True)
class Series:
    """One metric of a run, where it was measured.

    Attributes:
        name: the metric's.
        steps: in order.
        values: one a step; nan where it was not finite.
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
        """The values that are finite."""
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
        """The best value and the first step that had it; None if the name does not tell what is better."""
        which = better(self.name)
        if which is None or not self.finite:
            return None
        value = self.least if which == "smaller" else self.largest
        return value, self.steps[self.values.index(value)]


@dataclass(frozen=True)
class Run:
    """What the files of a run tell.

    Attributes:
        name: its path, from the directory that all runs shown have in common.
        path: its workdir.
        rows: of `metrics.jsonl`, as `read_metrics` gives them.
        incidents: the rows of `incidents.jsonl`.
        settings: those of `config.json`, and the program's own flags in `flags.txt`; `workdir` is left out.
        until: the step that it is to end with; None: nothing tells.
        stop_reason: why an action ended it before that.
        silent_secs: how old its last row is.
    """

    name: str
    path: str
    rows: list[dict[str, float]]
    incidents: list[dict[str, Any]]
    settings: dict[str, Any]
    until: int | None
    stop_reason: str | None
    silent_secs: float

    @property
    def step(self) -> int:
        """The last step that it told of."""
        return int(self.rows[-1]["step"]) if self.rows else 0

    @functools.cached_property
    def series(self) -> dict[str, Series]:
        """The metrics by name, as they came; what is about the run is left out, and skipped steps if there are none."""
        found: dict[str, Series] = {}
        for row in self.rows:
            for name, value in row.items():
                series = found.setdefault(name, Series(name, [], []))
                series.steps.append(int(row["step"]))
                series.values.append(value)
        hidden = {"step", "time", *(name for name in found if name.rpartition("/")[2] in records.ABOUT_THE_RUN)}
        if "skipped_steps" in found and not any(found["skipped_steps"].values):
            hidden.add("skipped_steps")
        return {name: series for name, series in found.items() if name not in hidden}

    @property
    def status(self) -> str:
        """What became of it: complete, stopped (by an action), diverged, running, interrupted; else ended.

        Whether a run still trains is a guess by the time of its last row.
        """
        if self.incidents and self.incidents[-1].get("action") == "raise":
            if not self.rows or self.incidents[-1].get("time", 0) >= self.rows[-1].get("time", 0):
                return "diverged"
        if self.stop_reason is not None:
            return "stopped"
        if self.until and self.step >= self.until:
            return "complete"
        times = self._times
        gap = statistics.median(b - a for a, b in zip(times, times[1:], strict=False)) if len(times) > 1 else 0.0
        if self.silent_secs <= max(_FRESH_SECS, _FRESH_GAPS * gap):
            return "running"
        return "interrupted" if self.until else "ended"  # without an end to reach, nothing tells

    @property
    def training_secs(self) -> float:
        """The time that its steps took; tracing, evaluations, saves and pauses are not in it."""
        return sum(secs for _, secs, _ in self._windows)

    @property
    def elapsed_secs(self) -> float | None:
        """The time by the clock, from the first step to the last row; pauses are in it. None: nothing tells."""
        times = self._times
        return times[-1] - times[0] + self._windows[0][1] if self._windows else None

    @property
    def steps_per_sec(self) -> float | None:
        """Steps per second of training; None: nothing tells."""
        return sum(steps for steps, _, _ in self._windows) / self.training_secs if self._windows else None

    @property
    def examples_per_sec(self) -> float | None:
        """Examples per second of training; None: nothing tells."""
        return sum(examples for _, _, examples in self._windows) / self.training_secs if self._windows else None

    @property
    def _times(self) -> list[float]:
        return [row.get("time", math.nan) for row in self.rows]

    @functools.cached_property
    def _windows(self) -> list[tuple[int, float, float]]:
        """Returns steps, seconds and examples between each two rows whose speed is known."""
        windows, before = [], 0
        for row in self.rows:
            steps, speed = int(row["step"]) - before, row.get("steps_per_sec", math.nan)
            before = int(row["step"])
            if speed > 0 and steps > 0:
                secs = steps / speed
                windows.append((steps, secs, secs * row.get("examples_per_sec", math.nan)))
        return windows


def load_all(paths: Sequence[str]) -> list[Run]:
    """Reads the runs in some directories, each once.

    Args:
        paths: workdirs, and directories of workdirs.

    Returns:
        The runs, in the order given; those of one directory by name.

    Raises:
        ValueError: if there is no run in one of them.
    """
    try:
        found = {os.path.realpath(path): os.path.normpath(path) for given in paths for path in _find(given)}
        root = os.path.commonpath([os.path.dirname(os.path.abspath(path)) for path in found.values()])
        return [_load(path, os.path.relpath(path, root)) for path in found.values()]
    except OSError as error:
        raise ValueError(f"{error.filename!r} cannot be read ({error.strerror}): give what you may read.") from error


def different_settings(runs: Sequence[Run]) -> dict[str, list[Any]]:
    """Returns the settings that are not alike in all runs: name -> a value a run, None where it has none."""
    names = dict.fromkeys(name for run in runs for name in run.settings)
    values = {name: [run.settings.get(name) for run in runs] for name in names}
    return {name: column for name, column in values.items() if len(set(map(str, column))) > 1}


def by_metric(found: Sequence[Run]) -> Iterator[tuple[str, list[tuple[Run, Series]]]]:
    """Yields each metric with the runs that have it, the best first if its name tells what is better.

    Args:
        found: the runs, which may have different metrics.
    """
    for name in dict.fromkeys(name for run in found for name in run.series):
        group = [(run, run.series[name]) for run in found if name in run.series]
        sign = -1 if better(name) == "larger" else 1
        yield name, sorted(group, key=lambda pair: sign * pair[1].best[0] if pair[1].best else math.inf)


def _find(given: str) -> list[str]:
    """Returns a directory if it is the workdir of a run, else those in it that are."""
    given = os.path.expanduser(given)
    if not os.path.isdir(given):
        raise ValueError(f"There is no directory {given!r}: give workdirs of runs, or a directory of them.")
    for candidates in ([given], [os.path.join(given, name) for name in sorted(os.listdir(given), key=_by_number)]):
        if found := [path for path in candidates if os.path.isfile(os.path.join(path, "metrics.jsonl"))]:
            return found
    raise ValueError(
        f"Neither {given!r} nor a directory in it holds a metrics.jsonl: give the workdirs of runs that have begun."
    )


def _by_number(name: str) -> list[Any]:
    """Sorts run2 before run10, and lr0.003 before lr0.01."""
    return [float(part) if i % 2 else part for i, part in enumerate(re.split(r"(\d+(?:\.\d+)?)", name))]


def _load(path: str, name: str) -> Run:
    rows = records.read_metrics(path)
    incidents_path = os.path.join(path, "incidents.jsonl")
    incidents = records.read_rows(incidents_path) if os.path.exists(incidents_path) else []
    settings, saved = _read_settings(path), _read_end(os.path.join(path, "checkpoints"))
    step, until, reason = rows[-1]["step"] if rows else 0, settings.get("steps") or None, None
    if saved.get("step", -1) >= step:  # else the run may have been given another end since
        until, reason = saved["until"], saved["stop_reason"]
    elif until is None and saved.get("until", 0) > step:  # as with `epochs`
        until = saved["until"]
    since = rows[-1].get("time", 0.0) if rows else os.path.getmtime(os.path.join(path, "metrics.jsonl"))
    return Run(name, path, rows, incidents, settings, until, reason, max(0.0, time.time() - since))


def _read_settings(path: str) -> dict[str, Any]:
    settings = _read_json(os.path.join(path, "config.json"))
    own: dict[str, str] = {}
    try:
        with open(os.path.join(path, "flags.txt"), encoding="utf-8") as file:
            lines = [line.rstrip("\n").partition("=") for line in file if line.startswith("--")]
    except (OSError, ValueError):
        lines = []
    for flag, _, value in lines:
        if (name := flag[2:]) not in settings:
            own[name] = f"{own[name]},{value}" if name in own else value  # one that may be given several times
    return {name: value for name, value in {**settings, **own}.items() if name != "workdir"}


def _read_end(directory: str) -> dict[str, Any]:
    """Returns `step`, `until` and `stop_reason` of the newest checkpoint; nothing if there is none."""
    steps = [int(name) for name in os.listdir(directory) if name.isdigit()] if os.path.isdir(directory) else []
    manifest = _read_json(os.path.join(directory, str(max(steps)), "manifest.json")) if steps else {}
    try:
        return {"step": manifest["step"], **{name: manifest["notes"][name] for name in ("until", "stop_reason")}}
    except (KeyError, TypeError):
        return {}


def _read_json(path: str) -> dict[str, Any]:
    """Returns a file's object; an empty one if there is none, or it is damaged."""
    try:
        with open(path, "rb") as file:
            value = json.loads(file.read())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}

"""Curves of runs: the history that `fit` returns, and charts as SVG, as lines of characters, or as a PNG file.

    result = trainer.fit(train, steps=500, evals={"test": test})
    result["test/accuracy"]                     # the last number
    result.history["loss"], result.steps["loss"]
    result.plot().save("curves.svg")            # in a notebook, result.plot() alone shows it
    lines = draw_lines([run.series["loss"] for run in runs], 32)       # one line per run, all on one scale
    draw_picture(runs, "runs.png")                                     # needs matplotlib

It needs no TensorFlow.
"""

import html
import itertools
import math
import os
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from distloop.log import printable
from distloop.monitoring import run_files
from distloop.monitoring.records import ABOUT_THE_RUN, show_number
from distloop.monitoring.run_files import Run, Series

_MAX_ROWS = 10_000  # of one metric; then every other one is dropped
_MAX_SHOWN = 8  # numbers in a representation
_LOG_RANGE = 100  # positive values get a logarithmic scale if the largest exceeds the least by this factor

_WIDTH, _HEIGHT = 420, 240  # of a chart, in pixels
_LEFT, _BOTTOM, _TOP = 56, 28, 26  # of its frame
_COLORS = ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2", "#7f7f7f")
_FEW_POINTS = 25  # up to which they are marked

_BARS, _ASCII_BARS = "▁▂▃▄▅▆▇█", "_.-~=+*#"
_NOT_FINITE = "!"

_Curve: TypeAlias = tuple[Sequence[int], Sequence[float]]  # steps and values


class Picture:
    """Charts as SVG, which notebooks show."""

    def __init__(self, svg: str):
        """Stores the SVG."""
        self.svg = svg

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the charts to a file.

        Args:
            path: of an SVG file.

        Raises:
            OSError: if it cannot be written.
        """
        with open(path, "w", encoding="utf-8") as file:
            file.write(self.svg)

    def _repr_svg_(self) -> str:
        return self.svg

    def __repr__(self) -> str:
        return f"Picture({len(self.svg):,} characters of SVG; save(path) writes it)"


class History(dict[str, float]):
    """The last numbers of a run by name, and all numbers of this call of `fit`.

    Attributes:
        history: name -> values, means since the last log or of an evaluation; of more than 10,000, older ones are
            thinned out.
        steps: name -> the steps of these values.
    """

    def __init__(self, numbers: Mapping[str, float]):
        """Stores the last numbers, without a history."""
        super().__init__(numbers)
        self.history: dict[str, list[float]] = {}
        self.steps: dict[str, list[int]] = {}

    def add(self, step: int, numbers: Mapping[str, float]) -> None:
        """Adds a row to the history; rows from its step on, of a run that went back, are dropped before."""
        for name, value in numbers.items():
            steps, values = self.steps.setdefault(name, []), self.history.setdefault(name, [])
            while steps and steps[-1] >= step:
                steps.pop(), values.pop()
            if len(steps) >= _MAX_ROWS:
                del steps[::2], values[::2]
            steps.append(step)
            values.append(float(value))

    def plot(self, *names: str) -> Picture:
        """Returns the curves, those of training and evaluations in one chart.

        Args:
            *names: metrics, such as "loss" or "test/loss"; none: all but those about the run, such as `steps_per_sec`.

        Raises:
            ValueError: if the history has no such metric.
        """
        if unknown := [name for name in names if name not in self.history]:
            raise ValueError(f"plot was given {unknown[0]!r}; there are {sorted(self.history)}: name one of them.")
        shown = names or [name for name in self.history if is_of_the_model(name)]
        return draw_charts({name: (self.steps[name], self.history[name]) for name in shown})

    def __repr__(self) -> str:
        named = {name: value for name, value in self.items() if is_of_the_model(name)}
        parts = [f"{name!r}: {show_number(value)}" for name, value in list(named.items())[:_MAX_SHOWN]]
        if more := len(self) - len(parts):
            parts.append(f"and {more} more")
        return f"{{{', '.join(parts)}}}"


class Recorder:
    """Records the rows of a run for `fit`'s result; a writer, as `Console` is."""

    def __init__(self) -> None:
        """Starts without rows."""
        self._rows = History({})

    def write(self, step: int, metrics: Mapping[str, float], when: float | None = None) -> None:
        """Adds a row.

        Args:
            step: the step of the metrics.
            metrics: name -> number.
            when: not recorded.
        """
        self._rows.add(step, metrics)

    def close(self) -> None:
        """Does nothing."""

    def result(self, numbers: Mapping[str, float]) -> History:
        """Returns the last numbers with the rows."""
        result = History(numbers)
        result.history, result.steps = self._rows.history, self._rows.steps
        return result


def is_of_the_model(name: str) -> bool:
    """Returns whether a number is about the model rather than the run."""
    return name.rpartition("/")[2] not in {*ABOUT_THE_RUN, "skipped_steps"}


def draw_charts(curves: Mapping[str, _Curve]) -> Picture:
    """Returns curves as charts side by side; those whose names have the same last part share one.

    Args:
        curves: name -> steps and values.
    """
    groups: dict[str, dict[str, _Curve]] = {}
    for name, curve in curves.items():
        groups.setdefault(name.rpartition("/")[2], {})[name] = curve
    charts = [
        f'<g transform="translate({i % 2 * _WIDTH},{i // 2 * _HEIGHT})">{_draw_chart(group)}</g>'
        for i, group in enumerate(groups.values())
    ]
    size = f'width="{_WIDTH * min(2, max(1, len(charts)))}" height="{_HEIGHT * max(1, math.ceil(len(charts) / 2))}"'
    style = 'font-family="sans-serif" font-size="11" style="background:#fff"'
    return Picture(f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>{"".join(charts)}</svg>')


def _draw_chart(group: Mapping[str, _Curve]) -> str:
    """Returns the elements of one chart: frame, ticks, a line and a name for each curve."""
    values = [value for _, curve in group.values() for value in curve if math.isfinite(value)] or [0.0]
    is_log = _is_wide(values)
    scale = math.log10 if is_log else float
    low, high = scale(min(values)), scale(max(values))
    low, high = (low, high) if high > low else (low - 0.5, high + 0.5)
    last = max((steps[-1] for steps, _ in group.values() if steps), default=1) or 1
    width, height = _WIDTH - _LEFT - 16, _HEIGHT - _BOTTOM - _TOP

    def position(step: float, scaled: float) -> tuple[float, float]:
        return _LEFT + width * step / last, _TOP + height * (high - scaled) / (high - low)

    parts = [f'<rect x="{_LEFT}" y="{_TOP}" width="{width}" height="{height}" fill="none" stroke="#ccc"/>']
    for step, number in ((last * i / 4, low + (high - low) * i / 4) for i in range(5)):
        x, y = position(step, number)
        parts.append(_word(_LEFT - 6, y + 4, show_number(10**number if is_log else number), "end"))
        parts.append(_word(x, _HEIGHT - 10, str(round(step)), "middle"))
    left = float(_LEFT)
    for (name, (steps, curve)), color in zip(group.items(), itertools.cycle(_COLORS), strict=False):
        finite = [(step, value) for step, value in zip(steps, curve, strict=True) if math.isfinite(value)]
        points = [position(step, scale(value)) for step, value in finite]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points[:: max(1, len(points) // width)])
        parts.append(f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="1.5"/>')
        if len(points) < _FEW_POINTS:
            parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2" fill="{color}"/>' for x, y in points]
        parts.append(_word(left, 16, name, "start", color))
        left += 7 * len(name) + 16
    return "".join(parts)


def _word(x: float, y: float, text: str, anchor: str, color: str = "#333") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{color}">{html.escape(printable(text))}</text>'


def _is_wide(values: Sequence[float]) -> bool:
    return bool(values) and min(values) > 0 and max(values) > _LOG_RANGE * min(values)


def draw_lines(group: Sequence[Series], length: int, *, is_ascii: bool = False) -> list[str]:
    """Returns one line of characters per run for the same metric, all on one scale and along the same steps.

    Each character shows the mean over its range of steps, or `!` if a value in the range is not finite. A value counts
    for all steps since the previous value, as the means of training do.

    Args:
        group: the metric's series, one per run.
        length: the most characters of a line.
        is_ascii: True: use no block characters.
    """
    bars = _ASCII_BARS if is_ascii else _BARS
    values = [value for series in group for value in series.finite]
    scale = math.log if _is_wide(values) else float
    low, high = scale(min(values, default=1.0)), scale(max(values, default=1.0))
    last_step = max(1, *(series.steps[-1] for series in group))
    length = min(length, max(len(series.steps) for series in group))

    def bar(cell: list[float]) -> str:
        mean = sum(cell) / len(cell)
        if not math.isfinite(mean):
            return _NOT_FINITE
        return bars[min(int((scale(mean) - low) / (high - low) * len(bars)), len(bars) - 1)] if high > low else bars[0]

    return ["".join(map(bar, _cells(series, last_step, length))) for series in group]


def _cells(series: Series, last_step: int, length: int) -> list[list[float]]:
    """Returns the values that count for each of `length` ranges of steps, up to the series' last step."""
    cells: list[list[float]] = []
    for step, value in zip(series.steps, series.values, strict=True):
        end = max(0, step * length - 1) // last_step
        new = [[value] for _ in range(len(cells), end + 1)]
        if not new:
            cells[-1].append(value)
        cells += new
    return cells


def draw_picture(runs: Sequence[Run], path: str) -> None:
    """Writes the curves as a PNG with one chart per metric.

    Args:
        runs: the runs.
        path: the file.

    Raises:
        ValueError: if matplotlib is missing, or the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError(
            f"The picture {path!r} needs matplotlib, which is not installed: pip install matplotlib, or do without."
        ) from None
    groups = list(run_files.by_metric(runs))
    num_rows = max(1, math.ceil(len(groups) / 2))
    figure = Figure(figsize=(12, 3.5 * num_rows + 0.2 * len(runs)), layout="constrained")
    styles = {run.name: (f"C{i % 10}", ("-", "--", ":")[i // 10 % 3]) for i, run in enumerate(runs)}
    lines = {}
    for i, (name, group) in enumerate(groups):
        axes = figure.add_subplot(num_rows, 2, i + 1, xlabel="step")
        axes.set_title(name, parse_math=False)
        for run, series in group:
            color, dashes = styles[run.name]
            marker = "." if len(series.steps) < _FEW_POINTS else None
            curve = axes.plot(series.steps, series.values, color=color, linestyle=dashes, marker=marker)
            lines[run.name.replace("$", r"\$")] = curve[0]
        if _is_wide([value for _, series in group for value in series.finite]):
            axes.set_yscale("log")
    figure.legend(list(lines.values()), list(lines), loc="outside lower center", ncols=2)
    try:
        figure.savefig(path, format="png", dpi=100)
    except OSError as error:
        raise ValueError(f"{path!r} cannot be written ({error.strerror}): give another path.") from error

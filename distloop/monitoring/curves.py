"""Curves: metrics drawn as lines of characters, or as a picture; without TensorFlow.

    lines = draw_lines([run.series["loss"] for run in runs], 32)       # one line per run
    draw_picture(runs, "runs.png")                                     # needs matplotlib

All runs of a metric share one scale. It does not know where the numbers come from.
"""

import math
from collections.abc import Sequence

from distloop.monitoring import run_files
from distloop.monitoring.run_files import Run, Series

_BARS, _ASCII_BARS = "▁▂▃▄▅▆▇█", "_.-~=+*#"
_NOT_FINITE = "!"
_LOG_RANGE = 100  # positive values get a logarithmic scale if the largest exceeds the least by this factor


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
        cells += [[] for _ in range(len(cells), end + 1)]
        for cell in cells:
            if not cell or cell is cells[-1]:
                cell.append(value)
    return cells


def _is_wide(values: Sequence[float]) -> bool:
    return bool(values) and min(values) > 0 and max(values) > _LOG_RANGE * min(values)


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
            marker = "." if len(series.steps) < 25 else None
            curve = axes.plot(series.steps, series.values, color=color, linestyle=dashes, marker=marker)
            lines[run.name.replace("$", r"\$")] = curve[0]
        if _is_wide([value for _, series in group for value in series.finite]):
            axes.set_yscale("log")
    figure.legend(list(lines.values()), list(lines), loc="outside lower center", ncols=2)
    try:
        figure.savefig(path, format="png", dpi=100)
    except OSError as error:
        raise ValueError(f"{path!r} cannot be written ({error.strerror}): give another path.") from error

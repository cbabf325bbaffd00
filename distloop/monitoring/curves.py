"""Curves of runs: the history that `fit` returns, and pictures by matplotlib.

    result = trainer.fit(train, steps=500, evals={"test": test})
    result["test/accuracy"]                     # the last number
    result.history["loss"], result.steps["loss"]
    result.plot().save("curves.svg")            # in a notebook, result.plot() alone shows it
    Picture({"loss": {"a": series, "b": other_series}}).save("runs.png")

It needs no TensorFlow, and imports matplotlib for a picture alone.
"""

import io
import math
import os
from collections.abc import Mapping
from typing import Any, TypeVar

from distloop.workdir.records import ABOUT_THE_RUN, closest, show_number
from distloop.workdir.run_files import Series

_T = TypeVar("_T")
_MAX_ROWS = 10_000  # of one metric; then every other one is dropped
_MAX_SHOWN = 8  # numbers in a representation
_LOG_RANGE = 100  # positive values get a logarithmic scale if the largest exceeds the least by this factor
_FEW_POINTS = 25  # up to which they are marked


class Picture:
    """Charts of curves, which notebooks show.

    Attributes:
        figure: of matplotlib.
    """

    def __init__(self, charts: Mapping[str, Mapping[str, Series]]):
        """Draws the charts.

        Args:
            charts: title -> name of a curve -> curve; a name has the same color in all charts.

        Raises:
            ValueError: if matplotlib is missing.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError:
            raise ValueError(
                "Pictures of curves need matplotlib, which is not installed: pip install matplotlib."
            ) from None
        names = dict.fromkeys(name for curves in charts.values() for name in curves)
        styles = {name: f"C{i % 10}{('-', '--', ':')[i // 10 % 3]}" for i, name in enumerate(names)}
        num_columns, num_rows = min(2, max(1, len(charts))), max(1, math.ceil(len(charts) / 2))
        self.figure = Figure(figsize=(6 * num_columns, 3.5 * num_rows + 0.2 * len(names)), layout="constrained")
        lines: dict[str, Any] = {}
        for i, (title, curves) in enumerate(charts.items()):
            axes = self.figure.add_subplot(num_rows, num_columns, i + 1, xlabel="step")
            axes.set_title(title, parse_math=False)
            for name, curve in curves.items():
                marker = "." if len(curve.steps) < _FEW_POINTS else None
                (lines[name],) = axes.plot(curve.steps, curve.values, styles[name], marker=marker)
            values = [value for curve in curves.values() for value in curve.finite]
            if values and min(values) > 0 and max(values) > _LOG_RANGE * min(values):
                axes.set_yscale("log")
        labels = [name.replace("$", r"\$") for name in lines]
        self.figure.legend(list(lines.values()), labels, loc="outside lower center", ncols=2)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the charts to a file.

        Args:
            path: of the file; it ends in `.svg`, `.pdf` or another format of matplotlib, else it is a PNG.

        Raises:
            ValueError: if matplotlib has no format of that name, or the path is of a directory.
            OSError: if it cannot be written.
        """
        kind, kinds = os.path.splitext(path)[1][1:].lower() or "png", self.figure.canvas.get_supported_filetypes()
        if kind not in kinds or os.path.isdir(path):
            raise ValueError(f"{os.fspath(path)!r} is no picture: let it end in .{', .'.join(sorted(kinds))}.")
        self.figure.savefig(path, format=kind)

    def _repr_svg_(self) -> str:
        file = io.StringIO()
        self.figure.savefig(file, format="svg")
        return file.getvalue()

    def __repr__(self) -> str:
        return f"Picture of {len(self.figure.axes)} charts; save(path) writes it"


class _ByName(dict[str, _T]):
    """What a run reported, by name."""

    def __missing__(self, name: str) -> _T:
        close = closest(str(name), self)
        hint = f"did you mean {close!r}?" if close else f"there are {sorted(self)}."
        raise KeyError(f"The run reported no {name!r}: {hint}")


class History(_ByName[float]):
    """The last numbers of a run by name, and all numbers of this call of `fit`.

    Attributes:
        history: name -> values, means since the row before or of an evaluation; of more than 10,000, older ones are
            thinned out.
        steps: name -> the steps of these values.
    """

    def __init__(self) -> None:
        """Starts without numbers."""
        super().__init__()
        self.history = _ByName[list[float]]()
        self.steps = _ByName[list[int]]()

    def write(self, step: int, metrics: Mapping[str, float], when: float | None = None) -> None:
        """Adds a row to the history, as a writer; rows from its step on, of a run that went back, are dropped before.

        Args:
            step: the step of the metrics.
            metrics: name -> number.
            when: not recorded.
        """
        for name, value in metrics.items():
            steps, values = self.steps.setdefault(name, []), self.history.setdefault(name, [])
            while steps and steps[-1] >= step:
                steps.pop(), values.pop()
            if len(steps) >= _MAX_ROWS:
                del steps[::2], values[::2]
            steps.append(step)
            values.append(float(value))

    def close(self) -> None:
        """Does nothing."""

    def plot(self, *names: str) -> Picture:
        """Returns the curves, those of training and evaluations in one chart.

        Args:
            *names: metrics, such as "loss" or "test/loss"; none: all but those about the run, such as `steps_per_sec`.

        Raises:
            ValueError: if the history has no such metric, or matplotlib is missing.
        """
        if unknown := [name for name in names if name not in self.history]:
            raise ValueError(f"plot was given {unknown[0]!r}; there are {sorted(self.history)}: name one of them.")
        charts: dict[str, dict[str, Series]] = {}
        for name in names or filter(is_of_the_model, self.history):
            source, _, metric = name.rpartition("/")
            charts.setdefault(metric, {})[source or "training"] = Series(name, self.steps[name], self.history[name])
        return Picture(charts)

    def __repr__(self) -> str:
        named = {name: value for name, value in self.items() if is_of_the_model(name)}
        shown = [f"{name!r}: {show_number(value)}" for name, value in list(named.items())[:_MAX_SHOWN]]
        if more := len(self) - len(shown):
            shown.append(f"and {more} more")
        return f"{{{', '.join(shown)}}}"


def is_of_the_model(name: str) -> bool:
    """Returns whether a number is about the model rather than the run."""
    return name.rpartition("/")[2] not in {*ABOUT_THE_RUN, "skipped_steps"}

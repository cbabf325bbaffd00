"""Notebook: draws the progress of a run in the cell that calls `fit`; not used without IPython.

console = make_console(2_000, 0, evals=["test"], may_draw=True)     # of the notebook or the terminal
"""

import html
import io
import sys
import time
from collections.abc import Mapping
from typing import Any

from distloop.monitoring import timing
from distloop.monitoring.console import Console
from distloop.monitoring.curves import History, draw_lines
from distloop.monitoring.records import show_number
from distloop.monitoring.run_files import Series

_DRAW_SECS = 0.5  # the least time between two drawings
_MAX_ROWS, _MAX_COLUMNS, _CURVE_LENGTH = 10, 8, 16


def is_active() -> bool:
    """Returns whether this process is the kernel of a notebook."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return getattr(shell, "kernel", None) is not None


def make_console(steps: float, start: int, *, may_draw: bool, **options: Any) -> Console:
    """Returns the console of a run: in a notebook one that is drawn in place. The arguments are those of `Console`."""
    kind = NotebookConsole if may_draw and is_active() else Console
    return kind(steps, start, may_draw=may_draw, **options)


class NotebookConsole(Console):
    """Shows a progress bar and a table of the last rows, with curves of characters, in one output of a cell."""

    def __init__(self, steps: float, start: int = 0, **options: Any):
        """Starts the clock; displays nothing. The arguments are those of `Console`."""
        self._summary = io.StringIO()
        super().__init__(steps, start, self._summary, **{**options, "may_draw": False})
        self._handle: Any = None
        self._text = ""
        self._rows: dict[int, dict[str, float]] = {}  # the last ones, by step
        self._history = History()
        self._updated_at = 0.0  # seconds of the monotonic clock

    def write(self, step: int, metrics: Mapping[str, float], when: float | None = None) -> None:
        """Shows metrics; the arguments are those of `Console`."""
        self._note(step, metrics)
        self._rows[step] = shown = {name: value for name, value in metrics.items() if self._is_shown(name, value)}
        self._rows = {step: self._rows[step] for step in list(self._rows)[-_MAX_ROWS:]}
        self._history.write(step, shown)
        self.show_progress(step)

    def show_progress(self, step: int, doing: str = "") -> None:
        """Shows how far the run is; the arguments are those of `Console`."""
        self._step = step
        speed, left = ([], []) if doing else self._speed(step)
        self._text = "  ".join([*self._progress(step), *speed, *left, *([doing] if doing else [])])
        if doing or time.monotonic() - self._updated_at >= _DRAW_SECS:
            self._update()

    def close(self) -> None:
        """Draws the last numbers."""
        self._update()

    def summarize(self, clock: timing.Clock, against_waiting: str = "") -> None:
        """Puts the closing summary in place of the progress; the arguments are those of `Console`."""
        super().summarize(clock, against_waiting)
        self._text = self._summary.getvalue()
        self._update()

    def _update(self) -> None:
        self._updated_at = time.monotonic()
        content = {"text/html": self._html(), "text/plain": self._text}
        if self._handle is None:
            from IPython.display import display

            self._handle = display(content, raw=True, display_id=True)
        else:
            self._handle.update(content, raw=True)

    def _html(self) -> str:
        done, whole = self._share(self._step)
        bar = f'<progress value="{done:.0f}" max="{whole or 1:.0f}" style="width:20em"></progress>'
        text = f'<span style="white-space:pre-line">{html.escape(self._text)}</span>'
        names = list(dict.fromkeys(name for row in self._rows.values() for name in row))[:_MAX_COLUMNS]
        rows = [
            [str(step), *(show_number(row[name]) if name in row else "" for name in names)]
            for step, row in self._rows.items()
        ]
        if names:
            curves = [Series(name, self._history.steps[name], self._history.history[name]) for name in names]
            rows = [["step", *names], *rows, ["", *(draw_lines([curve], _CURVE_LENGTH)[0] for curve in curves)]]
        tags = ["th", *["td"] * len(rows)]
        lines = [
            "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in row) for tag, row in zip(tags, rows, strict=False)
        ]
        return f"<div>{bar} {text}</div><table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"

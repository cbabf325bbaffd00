"""Notebook: draws the progress of a run in the cell that calls `fit`; not used without IPython.

console = make_console(2_000, 0, evals=["test"], may_draw=True)     # of the notebook or the terminal
"""

import html
import math
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from distloop.monitoring import timing
from distloop.monitoring.console import Console, say
from distloop.monitoring.curves import History, draw_charts, is_of_the_model
from distloop.monitoring.records import show_number

_DRAW_SECS = 0.5  # the least time between two drawings
_MAX_ROWS, _MAX_COLUMNS, _MAX_CHARTS = 10, 8, 2


def is_active() -> bool:
    """Returns whether this process is the kernel of a notebook."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return getattr(shell, "kernel", None) is not None


def announce(lines: Sequence[str], *, may_draw: bool) -> None:
    """Prints lines about a run; in a notebook they are folded under the first one, unless `may_draw` is False."""
    if not (may_draw and is_active()):
        for line in lines:
            say(line)
        return
    first, *others = map(html.escape, lines)
    _display(f"<details><summary>{first}</summary>{'<br>'.join(others)}</details>", "\n".join(lines))


def make_console(steps: float, start: int, *, may_draw: bool, **options: Any) -> Console:
    """Returns the console of a run: in a notebook one that is drawn in place. The arguments are those of `Console`."""
    kind = NotebookConsole if may_draw and is_active() else Console
    return kind(steps, start, may_draw=may_draw, **options)


class NotebookConsole(Console):
    """Shows a progress bar, the curves and the last rows of a run, in one output of a cell."""

    def __init__(self, steps: float, start: int = 0, **options: Any):
        """Starts the clock; displays nothing. The arguments are those of `Console`."""
        super().__init__(steps, start, **{**options, "may_draw": False})
        self._handle: Any = None
        self._words: list[str] = []
        self._rows: dict[int, dict[str, float]] = {}  # the last ones, by step
        self._history = History({})
        self._updated_at = 0.0  # seconds of the monotonic clock

    def write(self, step: int, metrics: Mapping[str, float], when: float | None = None) -> None:
        """Shows metrics; the arguments are those of `Console`."""
        self._note(step, metrics)
        shown = {name: value for name, value in metrics.items() if self._is_shown(name, value)}
        self._history.add(step, {name: value for name, value in shown.items() if is_of_the_model(name)})
        self._rows[step] = shown
        for old in list(self._rows)[:-_MAX_ROWS]:
            del self._rows[old]
        speed, left = self._speed(step)
        self._words = [*self._progress(step), *speed, *left]
        self._update()

    def show_progress(self, step: int, doing: str = "") -> None:
        """Shows how far the run is; the arguments are those of `Console`."""
        self._step = step
        speed, left = ([], []) if doing else self._speed(step)
        self._words = [*self._progress(step), *speed, *left, *([doing] if doing else [])]
        self._update(at_once=bool(doing))

    def close(self) -> None:
        """Draws the last numbers."""
        self._update(at_once=True)

    def summarize(self, clock: timing.Clock, against_waiting: str = "") -> None:
        """Puts how the run ended, and where its time went, in place of the progress.

        Args:
            clock: the run's clock.
            against_waiting: unused, as there is no hint in a cell.
        """
        seconds = clock.seconds()
        total = sum(seconds.values())
        is_cut = self._step < self._steps < math.inf
        end = f"Ended at step {self._step}" if is_cut else f"Finished {self._step - self._began} steps"
        best = [f"{name} best {value} at step {at}" for name, _, value, at in self._closing_rows() if value]
        self._words = [f"{end} in {total:.0f} s", *best, timing.show_shares(seconds)]
        self._update(at_once=True)

    def _update(self, at_once: bool = False) -> None:
        now = time.monotonic()
        if not at_once and now - self._updated_at < _DRAW_SECS:
            return
        self._updated_at = now
        content, text = self._html(), "  ".join(self._words)
        if self._handle is None:
            self._handle = _display(content, text, display_id=True)
        else:
            self._handle.update({"text/html": content, "text/plain": text}, raw=True)

    def _html(self) -> str:
        done, whole = self._share(self._step)
        bar = f'<progress value="{done:.0f}" max="{whole or 1:.0f}" style="width:20em"></progress>'
        parts = [f"<div>{bar} {html.escape('  '.join(self._words))}</div>"]
        names = list(dict.fromkeys(name for row in self._rows.values() for name in row))[:_MAX_COLUMNS]
        if names:
            groups = list(dict.fromkeys(name.rpartition("/")[2] for name in self._history.history))[:_MAX_CHARTS]
            curves = {name: (self._history.steps[name], values) for name, values in self._history.history.items()}
            shown = {name: curve for name, curve in curves.items() if name.rpartition("/")[2] in groups}
            parts.append(draw_charts(shown).svg)
            head = "".join(f"<th>{html.escape(name)}</th>" for name in ["step", *names])
            cells = [
                [str(step), *(show_number(row[name]) if name in row else "" for name in names)]
                for step, row in self._rows.items()
            ]
            rows = ["<tr>" + "".join(f"<td>{cell}</td>" for cell in line) + "</tr>" for line in cells]
            parts.append(f"<table><tr>{head}</tr>{''.join(rows)}</table>")
        return "".join(parts)


def _display(content: str, text: str, **arguments: Any) -> Any:
    from IPython.display import display

    return display({"text/html": content, "text/plain": text}, raw=True, **arguments)

"""Notebook: shows the progress of a run in the cell that calls `fit`; not used without IPython.

console = make_console(2_000, 0, evals=["test"], may_draw=True)     # of the notebook or the terminal
"""

import io
import sys
import time
from typing import Any

from distloop.monitoring import timing
from distloop.monitoring.console import Console

_DRAW_SECS = 0.5  # the least time between two drawings
_MAX_LINES = 25  # as many as the closing summary may have


def is_active() -> bool:
    """Returns whether this process is the kernel of a notebook."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return getattr(shell, "kernel", None) is not None


def make_console(steps: float, start: int, *, may_draw: bool, **options: Any) -> Console:
    """Returns the console of a run: in a notebook one that is drawn in place. The arguments are those of `Console`."""
    kind = NotebookConsole if may_draw and is_active() else Console
    return kind(steps, start, may_draw=may_draw, **options)


class NotebookConsole(Console):
    """Prints its lines to a cell of a notebook, which shows the last ones."""

    def __init__(self, steps: float, start: int = 0, **options: Any):
        """Starts the clock; displays nothing. The arguments are those of `Console`."""
        self._cell = _Cell()
        super().__init__(steps, start, self._cell, **{**options, "may_draw": False})

    def close(self) -> None:
        """Shows the last lines."""
        self._cell.draw()

    def summarize(self, clock: timing.Clock, against_waiting: str = "") -> None:
        """Adds the closing summary; the arguments are those of `Console`."""
        super().summarize(clock, against_waiting)
        self._cell.draw()


class _Cell(io.StringIO):
    """A file whose last lines are one output of a cell, drawn in place."""

    def __init__(self) -> None:
        super().__init__()
        self._text = ""
        self._handle: Any = None
        self._drawn_at = 0.0  # seconds of the monotonic clock

    def write(self, text: str) -> int:
        self._text = "".join((self._text + text).splitlines(keepends=True)[-_MAX_LINES:])
        return len(text)

    def flush(self) -> None:
        if self._text and time.monotonic() - self._drawn_at >= _DRAW_SECS:
            self.draw()

    def draw(self) -> None:
        self._drawn_at = time.monotonic()
        content = {"text/plain": self._text}
        if self._handle is None:
            from IPython.display import display

            self._handle = display(content, raw=True, display_id=True)
        else:
            self._handle.update(content, raw=True)

"""Console: prints a run's progress and its closing summary, on a terminal, in a pipe or in a notebook's cell.

On a terminal a live display stays at the bottom; elsewhere plain lines are printed, for grep.

    console = Console(steps=2_000, evals=["test"])
    console.write(500, {"loss": 0.12, "test/accuracy": 0.98})
    console.close()
    console.summarize(clock)        # after a successful run: last and best metrics, time by phase

It is a writer for `actions.write.Write`, and does not know where the metrics come from.
"""

import io
import itertools
import math
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TextIO

import rich.console
import rich.live
import rich.progress_bar
import rich.table
import rich.text

from distloop.log import print_line, printable
from distloop.monitoring import timing
from distloop.monitoring.text_tables import is_terminal
from distloop.workdir.records import ABOUT_THE_RUN, show_number
from distloop.workdir.run_files import Series

_SILENT_SECS = 30.0  # after which a line shows the progress where there is no display
_DRAW_SECS = 0.1  # the least time between two drawings, which take 1.7 ms each
_CELL_SECS = 0.5  # the least time between two drawings of a notebook's cell
_CELL_LINES = 25  # as many as the closing summary may have
_MAX_METRICS = 20  # in the closing summary
_BAR_WIDTHS = (8, 40)


class Console:
    """Shows the progress of a run: a live display on a terminal, otherwise one line per write.

    On a terminal two lines stay at the bottom, a progress bar and the training metrics; a write with evaluations leaves
    a line above them, and `show_progress` moves the bar between two writes. A line reads

        step 500/2000  loss 0.1234  accuracy 0.97  test/accuracy 0.98  812 steps/s  104k examples/s  eta 0:00:02

    Rates are the reported ones, of tokens rather than examples where there are both. The time left is extrapolated from
    the time since the first write, which includes evaluations. If the bottleneck is not the step itself, it follows the
    speed: `input-bound 63 %`.
    """

    def __init__(
        self,
        steps: float,
        start: int = 0,
        stream: TextIO | None = None,
        *,
        evals: Sequence[str] = (),
        may_draw: bool = True,
        secs_left: float = 0.0,
        began: int | None = None,
    ):
        """Starts the clock; prints nothing.

        Args:
            steps: the global step at which the run ends; inf: it ends by time.
            start: the global step at which it starts.
            stream: the file to print to; None: standard output.
            evals: names of the evaluations.
            may_draw: False: print lines on a terminal, too.
            secs_left: seconds until the end of a run that ends by time.
            began: the step where the clock of `summarize` began, which is earlier after a rollback; None: `start`.
        """
        self._steps = steps
        self._secs_left = secs_left
        self._step = start
        self._began = start if began is None else began
        self._evals = frozenset(evals)
        self._opened_at = self._printed_at = time.monotonic()  # the console; the last line
        self._since = (start, self._opened_at)
        self._has_written = False
        self._last: Mapping[str, float] = {}  # the last metrics
        self._series: dict[str, Series] = {}  # of evaluations
        self._console = rich.console.Console(file=stream, highlight=False, force_jupyter=False)
        self._live: rich.live.Live | None = None
        if may_draw and is_terminal(self._console):
            # Drawn by write() and show_progress(): needs no thread.
            self._live = rich.live.Live(
                console=self._console,
                auto_refresh=False,
                redirect_stdout=stream is None,
                redirect_stderr=stream is None,
            )
        self._shown: tuple[list[str], list[str]] = ([], [])  # words of the display's two lines
        self._bottleneck: list[str] = []  # as of the last write
        self._drawn_at = 0.0  # seconds of the monotonic clock
        self._doing = ""  # in place of steps, as of the last call of show_progress

    def remember(self, rows: Iterable[Mapping[str, float]]) -> None:
        """Adds the rows that earlier processes of the run wrote, for the best values."""
        for row in rows:
            self._store(int(row["step"]), row)

    def write(self, step: int, metrics: Mapping[str, float], when: float | None = None) -> None:
        """Shows metrics.

        Args:
            step: the step of the metrics.
            metrics: name -> number; numbers about the run (`learning_rate`, `input_wait`, ...) are not shown.
            when: not shown.
        """
        self._store(step, metrics)
        about = [_position(step, self._steps)]
        speed, left = self._speed(step)
        is_old = time.monotonic() - self._opened_at >= timing.VERDICT_SECS
        cause, fraction = timing.bottleneck(metrics)
        self._bottleneck = [f"{cause}-bound {timing.show_percent(fraction)}"] if is_old and cause != "step" else []
        items = [(name, value) for name, value in metrics.items() if self._is_shown(name, value)]
        shown = {name: f"{printable(name, '')} {show_number(value)}" for name, value in items}
        if self._live is None:
            self._print([*about, *shown.values(), *speed, *self._bottleneck, *left])
            return
        if any(self._is_eval(name) for name in shown):
            self._start_display()
            self._console.print("  ".join([*about, *shown.values()]), markup=False)
        names = sorted((name for name in shown if not self._is_eval(name)), key=lambda name: not name.endswith("loss"))
        training = [shown[name] for name in names]  # the terminal's width cuts it off
        self._shown = ([*self._progress(step), *speed, *left, *self._bottleneck], training)
        if time.monotonic() - self._drawn_at >= _DRAW_SECS or step >= self._steps:
            self._draw()

    def show_progress(self, step: int, doing: str = "") -> None:
        """Shows how far the run is, between two writes; without a display only after 30 s without a line.

        Args:
            step: number of steps done.
            doing: what the run does in place of steps, such as tracing; a new one is shown at once.
        """
        now = time.monotonic()
        is_new, self._doing = bool(doing) and doing != self._doing, doing
        if self._live is None and not is_new and (now - self._printed_at < _SILENT_SECS or step == self._step):
            return
        self._step = step
        speed, left = ([], []) if doing else self._speed(step)
        words = [*self._progress(step), *speed, *left, *([doing] if doing else self._bottleneck)]
        if self._live is None:
            self._print(words)
            return
        self._shown = (words, self._shown[1])
        if doing or now - self._drawn_at >= _DRAW_SECS:
            self._draw()

    def close(self) -> None:
        """Ends the live display; may be called twice."""
        if self._live is not None and self._live.is_started:
            self._draw()
            self._live.stop()

    def summarize(self, clock: timing.Clock, against_waiting: str = "", stages: Mapping[str, float] = {}) -> None:
        """Prints the closing summary: last and best metrics, time by phase, and a hint if there is one.

        Args:
            clock: the run's clock.
            against_waiting: as for `Clock.advice`.
            stages: likewise.
        """
        seconds = clock.seconds()
        total = sum(seconds.values())
        duration = f"{total:.0f} s" if total < 60 else timing.show_secs(total)
        if self._step < self._steps < math.inf:
            end = f"Ended at step {self._step} of {self._steps} after {duration}"
        else:
            resumed = f" from step {self._began}" if self._began else ""
            end = f"Finished {self._step - self._began} steps{resumed} in {duration}"
        metrics = self._closing_metrics()
        lines = [end, *metrics[:_MAX_METRICS]]
        lines += [f"and {len(metrics) - _MAX_METRICS} more"] if len(metrics) > _MAX_METRICS else []
        times, advice = timing.show_fractions(seconds, stages), clock.advice(against_waiting, stages)
        lines += filter(None, [times, self._busy(), advice])
        for text in lines:
            print_line(f"distloop: {text}", self._console.file)

    def _busy(self) -> str:
        """Returns how busy processors were at the last log; empty: it was not measured."""
        names = {"cpu_utilization": "CPU", "gpu_utilization": "GPUs"}
        busy = {name: value for name, value in self._last.items() if name.endswith("pu_utilization")}
        each = [f"{names.get(n) or n.rpartition('/')[0]} {timing.show_percent(v)}" for n, v in busy.items()]
        return f"busy at the last log: {', '.join(each)}" if each else ""

    def _closing_metrics(self) -> list[str]:
        """Returns a line for each metric: its last value, and the best with its step if the name says what is better.

        Evaluations come first: the end of a long list is cut off.
        """
        lines = []
        for name, series in self._series.items():
            best = f", best {show_number(series.best[0])} at step {series.best[1]}" if series.best else ""
            lines.append(f"{printable(name, '')} {show_number(series.last)}{best}")
        for name, value in self._last.items():
            if not self._is_eval(name) and self._is_shown(name, value):
                lines.append(f"{printable(name, '')} {show_number(value)}")
        return lines

    def _progress(self, step: int) -> list[str]:
        """Returns the words about how far the run is; the percentage of its steps is for the display alone."""
        done, total = self._done_and_total(step)
        shows_percent = total and self._live is not None
        return [_position(step, self._steps), *([f"{int(100 * done / total)} %"] if shows_percent else [])]

    def _done_and_total(self, step: int) -> tuple[float, float]:
        """Returns how much is done and how much in total: steps, or seconds of a run that ends by time."""
        secs = time.monotonic() - self._opened_at
        return (step, self._steps) if self._steps < math.inf else (min(secs, self._secs_left), self._secs_left)

    def _print(self, words: Iterable[str]) -> None:
        self._printed_at = time.monotonic()
        print_line("  ".join(words), self._console.file)

    def _store(self, step: int, metrics: Mapping[str, float]) -> None:
        """Stores metrics for the closing table."""
        self._step, self._last = step, metrics
        for name in metrics if self._evals else ():
            if self._is_eval(name):
                series = self._series.setdefault(name, Series(name, [], []))
                series.steps.append(step)
                series.values.append(float(metrics[name]))

    def _start_display(self) -> None:
        assert self._live is not None
        if not self._live.is_started:
            self._live.start()
            self._console.show_cursor(True)  # a killed process could not restore it

    def _draw(self) -> None:
        """Draws the live display."""
        assert self._live is not None
        self._start_display()
        self._drawn_at = time.monotonic()
        about, metrics = ("  ".join(words) for words in self._shown)
        least, most = _BAR_WIDTHS
        done, total = self._done_and_total(self._step)
        width = max(least, min(most, self._console.width - len(about) - 3))
        bar = rich.progress_bar.ProgressBar(total or 1, done, width)
        first = rich.table.Table.grid(padding=(0, 1))
        first.add_column(width=width)
        first.add_column(no_wrap=True, overflow="ellipsis")
        first.add_row(bar, rich.text.Text(about))
        lines: list[Any] = [first]
        if metrics:
            lines.append(rich.text.Text(metrics, no_wrap=True, overflow="ellipsis"))
        self._live.update(rich.console.Group(*lines), refresh=True)

    def _is_eval(self, name: str) -> bool:
        return name.partition("/")[0] in self._evals

    def _is_shown(self, name: str, value: float) -> bool:
        if name == "skipped_steps":
            return value > 0
        return self._is_eval(name) or name.rpartition("/")[2] not in ABOUT_THE_RUN

    def _speed(self, step: int) -> tuple[list[str], list[str]]:
        """Returns steps and examples or tokens per second, and the time left, as text; empty if they are unknown."""
        now, reported = time.monotonic(), self._last.get("steps_per_sec")
        start, start_secs = self._since
        by_clock = (step - start) / (now - start_secs) if step > start and now > start_secs else None
        if not self._has_written:  # the time until here includes tracing
            self._has_written = True
            self._since = (step, now)
            by_clock = reported or by_clock
        if by_clock is None:
            return [], []
        done, total = self._done_and_total(step)
        secs = total - done if math.isinf(self._steps) else (total - done) / by_clock
        left = [f"eta {timing.show_secs(secs)}"] if secs > 0 else []
        return [f"{show_number(reported or by_clock)} steps/s", *_rate(self._last)], left


def is_notebook() -> bool:
    """Returns whether this process is the kernel of a notebook."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return getattr(shell, "kernel", None) is not None


def make_console(steps: float, start: int, *, may_draw: bool, **options: Any) -> Console:
    """Returns the console of a run: in a notebook one that is drawn in place. The arguments are those of `Console`."""
    kind = NotebookConsole if may_draw and is_notebook() else Console
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

    def summarize(self, clock: timing.Clock, against_waiting: str = "", stages: Mapping[str, float] = {}) -> None:
        """Adds the closing summary; the arguments are those of `Console`."""
        super().summarize(clock, against_waiting, stages)
        self._cell.draw()


class _Cell(io.StringIO):
    """A file whose last lines are one output of a cell, drawn in place."""

    def __init__(self) -> None:
        super().__init__()
        self._text = ""
        self._handle: Any = None
        self._drawn_at = 0.0  # seconds of the monotonic clock

    def write(self, text: str) -> int:
        self._text = "".join((self._text + text).splitlines(keepends=True)[-_CELL_LINES:])
        return len(text)

    def flush(self) -> None:
        if self._text and time.monotonic() - self._drawn_at >= _CELL_SECS:
            self.draw()

    def draw(self) -> None:
        self._drawn_at = time.monotonic()
        content = {"text/plain": self._text}
        if self._handle is None:
            from IPython.display import display

            self._handle = display(content, raw=True, display_id=True)
        else:
            self._handle.update(content, raw=True)


def _rate(metrics: Mapping[str, float]) -> list[str]:
    """Returns trained tokens per second as text, such as `104k tokens/s`, else examples; empty if neither is there."""
    for unit in ("tokens", "examples"):
        for name, value in metrics.items():
            if name.rpartition("/")[2] == f"{unit}_per_sec":
                return [f"{_show_thousands(value)} {unit}/s"]
    return []


def _show_thousands(value: float) -> str:
    """Returns a number with three significant digits, thousands as `k` and millions as `M`."""
    for factor, letter in ((1e6, "M"), (1e3, "k")):
        if value >= factor * 0.9995:
            value /= factor
            return f"{value:.0f}{letter}" if value >= 999.5 else f"{value:.3g}{letter}"
    return f"{value:.3g}"


def _position(step: int, steps: float) -> str:
    return f"step {step}/{steps}" if steps < math.inf else f"step {step}"


def show_sum(terms: Mapping[str, int]) -> str:
    """Returns the terms of a sum by name, such as `conv2d 288 + dense 650`; of more than 8 the least are added up."""
    largest = set(sorted(terms, key=lambda name: -terms[name])[: 8 if len(terms) <= 8 else 7])
    named = [f"{name} {count:,}" for name, count in terms.items() if name in largest]
    rest = [count for name, count in terms.items() if name not in largest]
    return " + ".join([*named, *([f"{len(rest)} others {sum(rest):,}"] if rest else [])])


def show_split(sizes: Sequence[int]) -> str:
    """Returns the sizes of a batch's shards as text: `128 + 128`, or `6 x 42 + 2 x 43` for more than four."""
    if len(sizes) <= 4:
        return " + ".join(map(str, sizes))
    groups = [(size, len(list(same))) for size, same in itertools.groupby(sorted(sizes))]
    return " + ".join(f"{count} x {size}" for size, count in groups)

"""Owns *numbers to disk and screen*: TensorBoard, `metrics.jsonl`, the console.

Each writer has `write(step, metrics, when)` and `close()`; it does not know when it is called, nor where numbers come
from.

    writers = [Console(steps=2_000, evals=["test"]), SummaryWriter("run/summaries", evals=["test"])]
    for writer in writers:
        writer.write(500, {"loss": 0.12, "test/accuracy": 0.98}, time.time())
    for writer in writers:
        writer.close()

A name is `loss`, `<update>/loss` or `<eval>/loss`.
"""

import itertools
import math
import os
import time
from collections.abc import Mapping, Sequence
from typing import TextIO

import rich.console
import rich.progress
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from distloop.records import ABOUT_THE_RUN, format_row, parse_row, show_number


class SummaryWriter:
    """Writes TensorBoard scalars: evaluations to `<directory>/<eval>`, all others to `<directory>/train`.

    An evaluation's tag is its name without the prefix, so that its chart lies over the one of training; an evaluation
    that is called `train` keeps its prefix. Files are made at the first number for them.
    """

    def __init__(self, directory: str, evals: Sequence[str], start: int | None = None):
        """Remembers where; writes nothing.

        Args:
            directory: under which the directories are made.
            evals: names of the evaluations.
            start: the global step that the run starts from; TensorBoard is told to forget what comes after it. None:
                it is not.
        """
        self._directory = directory
        self._start = start
        self._evals = frozenset(evals) - {"train"}
        self._files: dict[str, EventFileWriter] = {}
        self._flushed = -math.inf  # when; seconds of the monotonic clock

    def write(self, step: int, metrics: Mapping[str, float], when: float | None = None) -> None:
        """Writes each number, all of a directory in one event; files are flushed once a second at most.

        Args:
            step: that the numbers belong to.
            metrics: name -> number.
            when: Unix, seconds; None: now.

        Raises:
            OSError: if a directory cannot be made.
        """
        events: dict[str, Event] = {}
        for name, value in metrics.items():
            prefix, _, rest = name.partition("/")
            run, tag = (prefix, rest) if prefix in self._evals and rest else ("train", name)
            event = events.setdefault(run, Event(wall_time=when or time.time(), step=step))
            event.summary.value.add(tag=tag, simple_value=float(value))
        for run, event in events.items():
            self._file(run).add_event(event)
        if time.monotonic() - self._flushed >= 1:  # a flush waits for another thread; nobody looks more often
            self._flushed = time.monotonic()
            for file in self._files.values():
                file.flush()

    def close(self) -> None:
        """Closes the files; a later write makes new ones."""
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _file(self, run: str) -> EventFileWriter:
        if run not in self._files:
            directory = os.path.join(self._directory, run)
            os.makedirs(directory, exist_ok=True)  # raises OSError; TensorFlow has errors of its own
            self._files[run] = EventFileWriter(directory)
            if self._start is not None:
                begin = SessionLog(status=SessionLog.START)
                self._files[run].add_event(Event(wall_time=time.time(), step=self._start + 1, session_log=begin))
        return self._files[run]


class JsonWriter:
    """Appends one JSON object a write: `step`, `time` (Unix, seconds), and each number under its name.

    JSON knows no NaN and no infinity: they become null, which keeps a column numeric in every reader (pandas gives
    NaN). TensorBoard's files tell which of them it was.
    """

    def __init__(self, path: str, start: int | None = None):
        """Opens the file, and makes its directory if it is missing.

        Args:
            path: of the file.
            start: the global step that the run starts from; rows after it, of a run that was cut off, are left out. 0:
                the file of an earlier run is renamed, with a number at its end. None: all rows stay.

        Raises:
            OSError: if it cannot be written.
        """
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        if start is not None and os.path.isfile(path):
            if start:
                _drop_rows(path, start)
            elif os.path.getsize(path):
                os.replace(path, next(p for i in itertools.count(1) if not os.path.exists(p := f"{path}.{i}")))
        self._file = open(path, "ab+")
        if self._file.tell():
            self._file.seek(-1, os.SEEK_END)
            if self._file.read(1) != b"\n":  # a run that was killed left half a row; keep it apart from the next one
                self._file.write(b"\n")

    def write(self, step: int, metrics: Mapping[str, float], when: float | None = None) -> None:
        """Appends a row and flushes.

        Args:
            step: that the numbers belong to.
            metrics: name -> number.
            when: Unix, seconds; None: now.
        """
        row = {name: float(value) if math.isfinite(value) else None for name, value in metrics.items()}
        self._file.write(format_row({"step": int(step), "time": when or time.time(), **row}))
        self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def _drop_rows(path: str, after: int) -> None:
    """Leaves out the rows after a step, and half a row; the file is whole at every moment."""
    with open(path, "rb") as file:
        lines = file.read().splitlines(keepends=True)
    kept = [line for line in lines if _is_kept(line, after)]
    if len(kept) < len(lines):
        with open(f"{path}.tmp", "wb") as file:
            file.writelines(kept)
        os.replace(f"{path}.tmp", path)


def _is_kept(line: bytes, after: int) -> bool:
    row = parse_row(line)
    return row is not None and line.endswith(b"\n") and row["step"] <= after


class Console:
    """Says how far a run is: a progress bar on a terminal, else a line a write.

    On a terminal the bar stays at the bottom, and writes with evaluations leave a line above it. A line reads

        step 500/2000  loss 0.1234  accuracy 0.97  test/accuracy 0.98  812 steps/s  eta 0:00:02

    Steps per second are those reported; the time left is by the clock since the first write, evaluations included.
    """

    def __init__(self, steps: int, start: int = 0, stream: TextIO | None = None, *, evals: Sequence[str] = ()):
        """Starts the clock; says nothing.

        Args:
            steps: the global step that the run ends with.
            start: the global step that it starts from.
            stream: where to; None: standard output.
            evals: names of the evaluations.
        """
        self._steps = steps
        self._evals = frozenset(evals)
        self._since = (start, time.monotonic())
        self._has_written = False
        self._console = rich.console.Console(file=stream, highlight=False)
        self._bar: rich.progress.Progress | None = None
        if self._console.is_interactive and self._console.file.isatty():  # FORCE_COLOR makes no terminal of a log
            # Drawn at each write: no thread, and no hidden cursor before the first number.
            self._bar = rich.progress.Progress(
                rich.progress.BarColumn(),
                rich.progress.TextColumn("{task.description}", markup=False),
                console=self._console,
                auto_refresh=False,
                redirect_stdout=stream is None,
                redirect_stderr=stream is None,
            )
            self._task = self._bar.add_task("", completed=start, total=steps)

    def write(self, step: int, metrics: Mapping[str, float], when: float | None = None) -> None:
        """Shows a row.

        Args:
            step: that the numbers belong to.
            metrics: name -> number; those about the run (`learning_rate`, `input_wait`, ...) are left to the files.
            when: not shown.
        """
        progress, speed = [f"step {step}/{self._steps}"], self._speed(step, metrics.get("steps_per_sec"))
        shown = {name: f"{name} {show_number(value)}" for name, value in metrics.items() if self._is_shown(name, value)}
        line = "  ".join([*progress, *shown.values(), *speed])
        if self._bar is None:
            print(line, file=self._console.file, flush=True)
            return
        self._bar.start()
        if any(self._is_eval(name) for name in shown):
            self._console.print(line, markup=False, soft_wrap=True)
        losses = [text for name, text in shown.items() if name.endswith("loss") and not self._is_eval(name)]
        text = "  ".join([*progress, *losses, *speed])
        self._bar.update(self._task, completed=step, description=text, refresh=True)

    def close(self) -> None:
        """Takes the bar's hands off the terminal; may be called twice."""
        if self._bar is not None:
            self._bar.stop()

    def _is_eval(self, name: str) -> bool:
        return name.partition("/")[0] in self._evals

    def _is_shown(self, name: str, value: float) -> bool:
        if name == "skipped_steps":
            return value > 0
        return self._is_eval(name) or name.rpartition("/")[2] not in ABOUT_THE_RUN

    def _speed(self, step: int, reported: float | None) -> list[str]:
        """Returns steps per second and the time left, in words, as far as they are known."""
        now = time.monotonic()
        start, start_secs = self._since
        by_clock = (step - start) / (now - start_secs) if step > start and now > start_secs else None
        if not self._has_written:  # until here tracing took its time, too
            self._has_written = True
            self._since = (step, now)
            by_clock = reported or by_clock
        if by_clock is None:
            return []
        left_secs = round((self._steps - step) / by_clock)
        eta = [f"eta {left_secs // 3600}:{left_secs // 60 % 60:02}:{left_secs % 60:02}"] if step < self._steps else []
        return [f"{show_number(reported or by_clock)} steps/s", *eta]

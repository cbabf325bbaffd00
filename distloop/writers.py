"""Owns *numbers to disk*: TensorBoard, `metrics.jsonl`.

Each writer has `write(step, metrics, when)` and `close()`; it does not know when it is called, nor where numbers come
from.

    writers = [JsonWriter("run/metrics.jsonl"), SummaryWriter("run/summaries", evals=["test"])]
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

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from distloop.records import format_row, parse_row


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

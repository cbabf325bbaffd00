"""`Write`: the action that hands metrics and media to writers, and `JsonWriter`, which appends to `metrics.jsonl`.

    writers = [JsonWriter("run/metrics.jsonl"), SummaryWriter("run", evals=["test"])]
    with Write(writers) as write:       # an action; rows for files are buffered for a second
        ...

Metric names are `loss`, `<update>/loss` or `<eval>/loss`.
"""

import collections
import itertools
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any

from distloop.atomic_files import make_directory, sync
from distloop.log import log
from distloop.monitoring.media import EncodedMedia
from distloop.monitoring.tensorboard import SummaryWriter
from distloop.training.action import Report, RowAction
from distloop.workdir.records import drop_rows, format_row
from distloop.workdir.run_lock import LockLost
from distloop.workers.preemption import Interrupted

_BUFFER_SECS = 1.0  # the longest time that a row for files is buffered
_MAX_ROWS = 10_000  # that are kept while a file cannot be written


class Write(RowAction):
    """Hands each boundary's metrics to writers: the console, `metrics.jsonl`, TensorBoard.

    The console gets its row at once. Rows for files are written together, at most a second later: writing each by
    itself would evict a small step's data from the caches every time. If a file cannot be written (disk full or gone),
    one log line says so, training continues, and each flush tries again to write all rows since. Use it as a context
    manager: on exit it closes the writers, and TensorBoard's HParams page gets the run's status.
    """

    def __init__(self, writers: Sequence[Any], verify: Callable[[], None] = lambda: None):
        """Stores the writers.

        Args:
            writers: objects with `write(step, metrics, time)` and `close()`; writers to files also have `path`,
                `flush()`, and `discard(step)`: the rows from `step` on, which could not be flushed, come again; those
                with `show(step, media, time)` get media before the row.
            verify: called before rows go to files; raises if this process may no longer write.
        """
        self.writers = list(writers)
        self._files = [_File(writer) for writer in self.writers if hasattr(writer, "path")]
        self._others = [writer for writer in self.writers if not hasattr(writer, "path")]
        self._verify = verify
        self._lock = threading.Lock()  # held while files are written
        self._rows: collections.deque[Report] = collections.deque()  # not handed to files yet; the timer takes some
        self._timer: threading.Timer | None = None  # writes the rows if nothing else does before
        self._timer_error: Exception | None = None

    def __call__(self, report: Report) -> None:
        """Shows the report on the console, and writes it to files within a second."""
        for writer in self._others:
            writer.write(report.step, report.metrics, report.time)
        if self._files:
            # Media are encoded now: their arrays may change until they are written.
            media = {name: EncodedMedia(value.encode()) for name, value in report.media.items()}
            self._rows.append(replace(report, media=media) if media else report)
        if self._timer_error is not None:
            self.flush()
        elif self._rows and self._timer is None:
            self._timer = threading.Timer(_BUFFER_SECS, self._flush_in_timer)
            self._timer.daemon = True
            self._timer.start()

    def flush(self) -> None:
        """Writes all rows to the files, which then survive even if this process is killed.

        Raises:
            Exception: the error of an earlier write in the background, if there was one.
        """
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            rows = [self._rows.popleft() for _ in range(len(self._rows))]
            for file in self._files:
                file.rows += rows
            for file in self._files:
                file.write(self._verify)
            error, self._timer_error = self._timer_error, None
            if error is not None:
                raise error

    def __enter__(self) -> "Write":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Closes the writers; an interrupted run is recorded as running, since the same command continues it."""
        has_succeeded = None if isinstance(error, Interrupted) else error is None
        is_lost = isinstance(error, LockLost)
        try:
            if not is_lost:
                self.flush()
                self._verify()
        except LockLost:
            is_lost = True
            raise
        finally:
            with self._lock:
                for file in self._files:
                    file.close(has_succeeded, is_lost)
            for writer in self._others:
                writer.close()

    def _flush_in_timer(self) -> None:
        try:
            self.flush()
        except Exception as error:
            self._timer_error = error  # raised in the main thread by the next call


class _File:
    """A writer to a file, and the rows that it has not written yet."""

    def __init__(self, writer: Any):
        self.rows: list[Report] = []
        self._writer = writer
        self._is_failing = False

    def write(self, verify: Callable[[], None]) -> None:
        """Writes the rows; keeps them for the next call if the disk fails, and logs that once."""
        if not self.rows:
            return
        done = 0
        try:
            verify()
            for report in self.rows:
                done += 1
                if report.media and hasattr(self._writer, "show"):
                    self._writer.show(report.step, report.media, report.time)
                self._writer.write(report.step, report.metrics, report.time)
            self._writer.flush()
        except OSError as error:
            self._writer.discard(self.rows[0].step)
            # Media may be large: those of a time when the disk fails are lost.
            self.rows = [replace(report, media={}) for report in self.rows[-_MAX_ROWS:]]
            if not self._is_failing:
                log.error(
                    "%s cannot be written (%s): the run goes on, and its rows are kept until they can be written.",
                    self._writer.path,
                    error.strerror or error,
                )
            self._is_failing = True
            return
        except BaseException:
            del self.rows[:done]  # the row that is at fault is not tried again
            raise
        self.rows = []
        if self._is_failing:
            log.warning("%s can be written again.", self._writer.path)
        self._is_failing = False

    def close(self, has_succeeded: bool | None, is_lost: bool) -> None:
        """Closes the file; logs the number of rows that are lost, unless the run is, which then has no status."""
        try:
            is_of_tensorboard = isinstance(self._writer, SummaryWriter)
            self._writer.close(*([None if is_lost else has_succeeded] if is_of_tensorboard else []))
        except OSError as error:
            log.error("%s cannot be closed (%s).", self._writer.path, error.strerror or error)
        if self.rows and not is_lost:
            log.error("%s lacks %d rows, which could not be written.", self._writer.path, len(self.rows))


class JsonWriter:
    """Appends one JSON object per write: `step`, `time` (Unix, seconds), and the metrics by name.

    JSON has no NaN and no infinity: both become null, which keeps a column numeric in every reader (pandas reads NaN).
    TensorBoard's files hold the original value.

    Attributes:
        renamed: where the rows of an earlier run are now; empty if there were none.
    """

    def __init__(self, path: str, start: int | None = None, *, is_written_again: bool = False, goes_on: bool = False):
        """Opens the file, and creates its directory if it is missing.

        Args:
            path: the file.
            start: the global step that the run starts from; later rows, of an interrupted run, are removed. 0: the file
                of an earlier run is renamed, with a number at its end. None: all rows stay.
            is_written_again: whether the row of `start` comes again, and is removed, too.
            goes_on: whether the rows are of this run, at step 0, too.

        Raises:
            OSError: if it cannot be written.
        """
        self.path = path
        self.renamed = ""
        self._rows = b""  # not flushed yet
        directory = os.path.dirname(path) or "."
        make_directory(directory)
        if os.path.isfile(path):
            if start != 0 or goes_on:  # half a row at the end, of a killed run, goes too
                drop_rows(path, sys.maxsize if start is None else start - is_written_again)
            elif os.path.getsize(path):
                self.renamed = next(p for i in itertools.count(1) if not os.path.exists(p := f"{path}.{i}"))
                os.replace(path, self.renamed)
        self._file = open(path, "r+b", buffering=0, opener=lambda name, flags: os.open(name, flags | os.O_CREAT, 0o666))
        sync(directory)  # the name of a new file, too
        self._size = self._file.seek(0, os.SEEK_END)  # the end of the last complete row

    def write(self, step: int, metrics: Mapping[str, float], when: float | None = None) -> None:
        """Adds a row to those of the next flush; `when` is Unix time in seconds, None: now."""
        row = {name: float(value) if math.isfinite(value) else None for name, value in metrics.items()}
        self._rows += format_row({"step": int(step), "time": when or time.time(), **row})

    def flush(self) -> None:
        """Hands all rows to the operating system, so that they survive this process.

        Raises:
            OSError: if they cannot be written; the next flush writes over what this one has written.
        """
        if not self._rows:
            return
        self._file.seek(self._size)
        left = self._rows
        while left:
            left = left[self._file.write(left) :]
        self._file.truncate()
        self._size += len(self._rows)
        self._rows = b""

    def discard(self, step: int) -> None:
        """Forgets the rows that are not flushed; they are written again, from a step on."""
        self._rows = b""

    def close(self) -> None:
        """Writes the last rows and closes the file.

        Raises:
            OSError: if they cannot be written.
        """
        try:
            self.flush()
        finally:
            self._file.close()

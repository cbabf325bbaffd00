"""`Write`: the action that hands metrics and media to writers; rows for files are buffered for a second."""

import collections
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any

from distloop.actions.action import Action, Report
from distloop.distributed.preemption import Interrupted
from distloop.log import log
from distloop.monitoring.media import EncodedMedia
from distloop.monitoring.tensorboard import SummaryWriter

_BUFFER_SECS = 1.0  # the longest time that a row for files is buffered
_MAX_ROWS = 10_000  # that are kept while a file cannot be written


class Write(Action):
    """Hands each boundary's metrics to writers: the console, `metrics.jsonl`, TensorBoard.

    The console gets its row at once. Rows for files are written together, at most a second later: writing each by
    itself would evict a small step's data from the caches every time. If a file cannot be written (disk full or gone),
    one log line says so, training continues, and each flush tries again to write all rows since. Use it as a context
    manager: on exit it closes the writers, and TensorBoard's HParams page gets the run's status.
    """

    every = None
    phase = "logging"
    only_writes = True

    def __init__(self, writers: Sequence[Any], verify: Callable[[], None] = lambda: None):
        """Stores the writers.

        Args:
            writers: objects with `write(step, metrics, time)` and `close()`; writers to files also have `path`,
                `flush()`, and `discard(step)`: the rows from `step` on, which could not be flushed, come again; those
                with `show(step, media, time)` get media before the row.
            verify: called before rows go to files; raises if this process may no longer write.
        """
        self.writers = list(writers)
        self._files = [_File(writer) for writer in self.writers if _is_file_writer(writer)]
        self._verify = verify
        self._lock = threading.Lock()  # held while files are written
        self._rows: collections.deque[Report] = collections.deque()  # not handed to files yet; the timer takes some
        self._timer: threading.Timer | None = None  # writes the rows if nothing else does before
        self._timer_error: Exception | None = None

    def __call__(self, report: Report) -> None:
        """Shows the report on the console, and writes it to files within a second."""
        for writer in self.writers:
            if not _is_file_writer(writer):
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
        try:
            self.flush()
        finally:
            with self._lock:
                for file in self._files:
                    file.close(has_succeeded)
            for writer in self.writers:
                if not _is_file_writer(writer):
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
                _write_row(report, self._writer)
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

    def close(self, has_succeeded: bool | None) -> None:
        """Closes the file; logs the number of rows that are lost."""
        try:
            _close(has_succeeded, self._writer)
        except OSError as error:
            log.error("%s cannot be closed (%s).", self._writer.path, error.strerror or error)
        if self.rows:
            log.error("%s lacks %d rows, which could not be written.", self._writer.path, len(self.rows))


def _is_file_writer(writer: Any) -> bool:
    return hasattr(writer, "path")


def _write_row(report: Report, writer: Any) -> None:
    if report.media and hasattr(writer, "show"):
        writer.show(report.step, report.media, report.time)
    writer.write(report.step, report.metrics, report.time)


def _close(has_succeeded: bool | None, writer: Any) -> None:
    if isinstance(writer, SummaryWriter):
        writer.close(has_succeeded)
    else:
        writer.close()

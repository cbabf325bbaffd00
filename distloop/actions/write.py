"""`Write`: the action that hands metrics and media to writers; rows for files are buffered for a second."""

import contextlib
import functools
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any

from absl import logging

from distloop.actions.action import Action, Report
from distloop.distributed.preemption import Interrupted
from distloop.monitoring.media import EncodedMedia
from distloop.monitoring.tensorboard import SummaryWriter

_BUFFER_SECS = 1.0  # the longest time that a row for files is buffered


class Write(Action):
    """Hands each boundary's metrics to writers: the console, `metrics.jsonl`, TensorBoard.

    The console gets its row at once. Rows for files are written together, at most a second later: writing each by
    itself would evict a small step's data from the caches every time. If a file cannot be written (disk full or gone),
    one log line says so, nothing more is written to any file, and training continues. Use it as a context manager: on
    exit it closes the writers, and TensorBoard's HParams page gets the run's status.
    """

    every = None
    phase = "logging"
    only_writes = True

    def __init__(self, writers: Sequence[Any], verify: Callable[[], None] = lambda: None):
        """Stores the writers.

        Args:
            writers: objects with `write(step, metrics, time)` and `close()`; writers to files also have `path` and
                `flush()`.
            verify: called before rows go to files; raises if this process may no longer write.
        """
        self.writers = list(writers)
        self._verify = verify
        self._lock = threading.Lock()  # held while files are written
        self._rows: list[Report] = []  # not written to files yet
        self._timer: threading.Timer | None = None  # writes the rows if nothing else does before
        self._timer_error: Exception | None = None

    def __call__(self, report: Report) -> None:
        """Shows the report on the console, and writes it to files within a second."""
        for writer in self.writers:
            if not _is_file_writer(writer):
                writer.write(report.step, report.metrics, report.time)
        if any(map(_is_file_writer, self.writers)):
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
            error, self._timer_error = self._timer_error, None
            if error is not None:
                raise error
            if self._rows:
                self._verify()
                while self._rows:
                    self._for_each_file(functools.partial(_write_row, self._rows.pop(0)))
                self._for_each_file(lambda writer: writer.flush())

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
                self._for_each_file(functools.partial(_close, has_succeeded))
            for writer in self.writers:
                if not _is_file_writer(writer):
                    writer.close()

    def _flush_in_timer(self) -> None:
        try:
            self.flush()
        except Exception as error:
            self._timer_error = error  # raised in the main thread by the next call

    def _for_each_file(self, act: Callable[[Any], None]) -> None:
        """Calls a function with each file writer; after an OSError closes and drops all of them."""
        file_writers = [writer for writer in self.writers if _is_file_writer(writer)]
        for writer in file_writers:
            try:
                act(writer)
            except OSError as error:
                logging.error(
                    "%s cannot be written (%s): the run goes on and writes no more numbers to files.",
                    writer.path,
                    error.strerror or error,
                )
                self.writers = [writer for writer in self.writers if not _is_file_writer(writer)]
                for dropped in file_writers:
                    with contextlib.suppress(OSError):
                        dropped.close()
                return


def _is_file_writer(writer: Any) -> bool:
    return hasattr(writer, "path")


def _write_row(report: Report, writer: Any) -> None:
    writer.write(report.step, report.metrics, report.time)
    if report.media and isinstance(writer, SummaryWriter):
        writer.show(report.step, report.media, report.time)


def _close(has_succeeded: bool | None, writer: Any) -> None:
    if isinstance(writer, SummaryWriter):
        writer.close(has_succeeded)
    else:
        writer.close()

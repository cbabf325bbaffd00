"""JSON writer: appends rows of metrics to `metrics.jsonl`.

Like every writer it has `write(step, metrics, when)` and `close()`. It does not know when it is called, or where the
metrics come from.

    writers = [JsonWriter("run/metrics.jsonl"), SummaryWriter("run", evals=["test"])]
    for writer in writers:
        writer.write(500, {"loss": 0.12, "test/accuracy": 0.98}, time.time())
    for writer in writers:
        writer.close()

Metric names are `loss`, `<update>/loss` or `<eval>/loss`.
"""

import contextlib
import itertools
import math
import os
import time
from collections.abc import Iterator, Mapping
from typing import Any

from distloop.atomic_files import make_directory, sync
from distloop.monitoring.records import format_row, parse_row

_BLOCK_BYTES = 65_536  # read at a time, from the end of a file


class JsonWriter:
    """Appends one JSON object per write: `step`, `time` (Unix, seconds), and the metrics by name.

    JSON has no NaN and no infinity: both become null, which keeps a column numeric in every reader (pandas reads NaN).
    TensorBoard's files hold the original value. A flush writes all rows or none.

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
        if start is not None and os.path.isfile(path):
            if start or goes_on:
                _drop_rows(path, start - is_written_again)
            elif os.path.getsize(path):
                self.renamed = next(p for i in itertools.count(1) if not os.path.exists(p := f"{path}.{i}"))
                os.replace(path, self.renamed)
        self._file = open(path, "ab+", buffering=0)
        sync(directory)  # the name of a new file, too
        self._size = self._file.seek(0, os.SEEK_END)  # the end of the last whole row
        if self._size:
            self._file.seek(-1, os.SEEK_END)
            if self._file.read(1) != b"\n":  # a killed run left half a row: the next one begins on a new line
                self._rows = b"\n"

    def write(self, step: int, metrics: Mapping[str, float], when: float | None = None) -> None:
        """Adds a row to those of the next flush.

        Args:
            step: the step of the metrics.
            metrics: name -> number.
            when: Unix, seconds; None: now.
        """
        row = {name: float(value) if math.isfinite(value) else None for name, value in metrics.items()}
        self._rows += format_row({"step": int(step), "time": when or time.time(), **row})

    def flush(self) -> None:
        """Hands all rows to the operating system, so that they survive this process.

        Raises:
            OSError: if they cannot be written; no part of them is in the file, and the next flush tries again.
        """
        if not self._rows:
            return
        if os.fstat(self._file.fileno()).st_size > self._size:
            os.ftruncate(self._file.fileno(), self._size)  # half a row, which could not be removed when it was written
        try:
            left = self._rows
            while left:
                left = left[self._file.write(left) :]
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file.fileno(), self._size)
            raise
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


def rows_between(path: str, after: int, until: int) -> list[dict[str, Any]]:
    """Returns the rows of a file whose step is larger than `after`, and `until` at most; reads no more than its end."""
    rows = []
    for line in lines_from_end(path) if os.path.isfile(path) else ():
        if (row := parse_row(line)) is not None:
            if row["step"] <= after:
                break
            rows.append(row)
    return [row for row in reversed(rows) if row["step"] <= until]


def last_row(path: str) -> dict[str, Any] | None:
    """Returns the last row of a file; None if there is none."""
    lines = lines_from_end(path) if os.path.isfile(path) else iter(())
    return next((row for row in map(parse_row, lines) if row is not None), None)


def _drop_rows(path: str, after: int) -> None:
    """Cuts off the rows after a step, and an incomplete one, at the end of a file; reads no more than its end."""
    size = end = os.path.getsize(path)
    for line in lines_from_end(path):
        row = parse_row(line)
        if row is not None and line.endswith(b"\n") and row["step"] <= after:
            break
        end -= len(line)
    if end < size:
        os.truncate(path, end)


def lines_from_end(path: str) -> Iterator[bytes]:
    """Yields the lines of a file, the last one first."""
    with open(path, "rb") as file:
        end, length = file.seek(0, os.SEEK_END), _BLOCK_BYTES
        while end:
            start = max(0, end - length)
            file.seek(start)
            lines = file.read(end - start).splitlines(keepends=True)
            if start and len(lines) == 1:  # a longer line, of which this is the end
                length *= 4
                continue
            for line in reversed(lines[1 if start else 0 :]):  # the first may begin before the block
                yield line
                end -= len(line)
            end = end if start else 0

"""JSON writer: appends metrics to `metrics.jsonl`.

Like every writer it has `write(step, metrics, when)` and `close()`. It does not know when it is called, or where the
metrics come from.

    writers = [JsonWriter("run/metrics.jsonl"), SummaryWriter("run/summaries", evals=["test"])]
    for writer in writers:
        writer.write(500, {"loss": 0.12, "test/accuracy": 0.98}, time.time())
    for writer in writers:
        writer.close()

Metric names are `loss`, `<update>/loss` or `<eval>/loss`.
"""

import itertools
import math
import os
import time
from collections.abc import Mapping

from distloop.atomic_files import replacing
from distloop.monitoring.records import format_row, parse_row


class JsonWriter:
    """Appends one JSON object per write: `step`, `time` (Unix, seconds), and the metrics by name.

    JSON has no NaN and no infinity: both become null, which keeps a column numeric in every reader (pandas reads NaN).
    TensorBoard's files hold the original value.
    """

    def __init__(self, path: str, start: int | None = None):
        """Opens the file, and creates its directory if it is missing.

        Args:
            path: the file.
            start: the global step that the run starts from; later rows, of an interrupted run, are removed. 0: the file
                of an earlier run is renamed, with a number at its end. None: all rows stay.

        Raises:
            OSError: if it cannot be written.
        """
        self.path = path
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        if start is not None and os.path.isfile(path):
            if start:
                _drop_rows(path, start)
            elif os.path.getsize(path):
                os.replace(path, next(p for i in itertools.count(1) if not os.path.exists(p := f"{path}.{i}")))
        self._file = open(path, "ab+")
        if self._file.tell():
            self._file.seek(-1, os.SEEK_END)
            if self._file.read(1) != b"\n":  # a killed run left half a row: the next one begins on a new line
                self._file.write(b"\n")

    def write(self, step: int, metrics: Mapping[str, float], when: float | None = None) -> None:
        """Appends a row.

        Args:
            step: the step of the metrics.
            metrics: name -> number.
            when: Unix, seconds; None: now.
        """
        row = {name: float(value) if math.isfinite(value) else None for name, value in metrics.items()}
        self._file.write(format_row({"step": int(step), "time": when or time.time(), **row}))

    def flush(self) -> None:
        """Hands all rows to the operating system, so that they survive this process."""
        self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def _drop_rows(path: str, after: int) -> None:
    """Removes the rows after a step, and an incomplete row, by replacing the file in one rename."""
    with open(path, "rb") as file:
        lines = file.read().splitlines(keepends=True)
    kept = [line for line in lines if _is_kept(line, after)]
    if len(kept) < len(lines):
        with replacing(path) as temporary, open(temporary, "wb") as file:
            file.writelines(kept)


def _is_kept(line: bytes, after: int) -> bool:
    row = parse_row(line)
    return row is not None and line.endswith(b"\n") and row["step"] <= after

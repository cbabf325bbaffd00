"""CSV writer: writes the rows of a run as a table for spreadsheets, with a column for each name.

    trainer.fit(train, writers=[distloop.CsvWriter("rows.csv")])

A name that was not there before becomes the last column, and the file is replaced as a whole. Rows of several runs in
one table come from `python -m distloop.report --csv`.
"""

import csv
import io
import itertools
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from distloop.atomic_files import make_directory, replacing
from distloop.monitoring.run_files import Run


class CsvWriter:
    """Writes the rows of a run to a CSV file: `step`, `time` (Unix, seconds), and each number under its name.

    A file of an earlier run is renamed, with a number at its end. Without a workdir, each `fit` begins a new one.

    Attributes:
        last_step: the step of the last row in the file; -1: there is none.
    """

    def __init__(self, path: str | os.PathLike[str]):
        """Touches no disk.

        Args:
            path: of the file; its directory is made if it is missing.
        """
        self.name = f"CsvWriter({os.fspath(path)})"
        self.last_step: int | None = -1
        self._path = os.path.abspath(os.path.expanduser(os.fspath(path)))
        self._columns: list[str] = []
        self._size = 0  # of the whole rows

    def open(self, settings: Mapping[str, Any], run_id: str | None) -> str:
        """Opens the file of this run, or begins a new one; returns its path."""
        make_directory(os.path.dirname(self._path))
        if run_id != self._path and os.path.exists(self._path):
            renamed = next(path for i in itertools.count(1) if not os.path.exists(path := f"{self._path}.{i}"))
            os.replace(self._path, renamed)
        columns, rows = self._read()
        self._columns, self.last_step = columns or ["step", "time"], int(rows[-1]["step"]) if rows else -1
        return self._path

    def write(self, step: int, numbers: Mapping[str, float], time: float) -> None:
        """Appends a row."""
        row = {"step": step, "time": time, **numbers}
        if self.last_step == -1 or not row.keys() <= set(self._columns):
            columns = list(dict.fromkeys([*self._columns, *row]))
            content = _format([*self._read()[1], row], columns)
            with replacing(self._path) as temporary, open(temporary, "wb") as file:
                file.write(content)
            self._columns, self._size = columns, len(content)
        else:
            line = _format([row], self._columns, has_header=False)
            with open(self._path, "r+b") as file:
                file.truncate(self._size)  # half a row is there after a kill, or of a full disk
                file.seek(self._size)
                file.write(line)
            self._size += len(line)
        self.last_step = step

    def close(self) -> None:
        """Does nothing: each row is in the file already."""

    def _read(self) -> tuple[list[str], list[dict[str, str]]]:
        """Returns the columns and the whole rows of the file."""
        if not os.path.exists(self._path):
            return [], []
        with open(self._path, "rb") as file:
            whole = file.read().rpartition(b"\n")
        content = b"".join(whole[:2])
        self._size = len(content)
        reader = csv.DictReader(io.StringIO(content.decode(), newline=""))
        rows = list(reader)
        return list(reader.fieldnames or []), rows


def write_csv(runs: Sequence[Run], path: str) -> None:
    """Writes all rows of the runs: a column for each name in any of them, empty where a row has no such number.

    Raises:
        ValueError: if the file cannot be written.
    """
    names = dict.fromkeys(["run", "step", "time", *(name for run in runs for row in run.rows for name in row)])
    rows = ({"run": run.name, **row} for run in runs for row in run.rows)
    try:
        with replacing(path) as temporary, open(temporary, "wb") as file:
            file.write(_format(rows, list(names)))
    except OSError as error:
        raise ValueError(
            f"{path!r} cannot be written ({error.strerror}): give a file in a directory that is there."
        ) from error


def _format(rows: Iterable[Mapping[str, Any]], columns: Sequence[str], *, has_header: bool = True) -> bytes:
    """Returns rows as lines of CSV; a row that lacks a column is empty there."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, columns)
    if has_header:
        writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()

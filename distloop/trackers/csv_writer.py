"""CSV writer: writes the rows of a run as a table for spreadsheets, with a column for each name.

    trainer.fit(train, writers=[distloop.CsvWriter("rows.csv")])

A row is appended in one piece; a name that was not there before becomes the last column, and the file is replaced as a
whole. Rows of several runs in one table come from `python -m distloop.report --csv`.
"""

import csv
import errno
import io
import itertools
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from distloop.atomic_files import make_directory, replacing
from distloop.monitoring.json_writer import lines_from_end
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
        self.last_step: int | None = None
        self._path = os.path.abspath(os.path.expanduser(os.fspath(path)))
        self._columns: list[str] = []

    def open(self, settings: Mapping[str, Any], run_id: str | None) -> str:
        """Opens the file of this run, or begins a new one; returns its path."""
        make_directory(os.path.dirname(self._path))
        if run_id != self._path and os.path.exists(self._path):
            renamed = next(path for i in itertools.count(1) if not os.path.exists(path := f"{self._path}.{i}"))
            os.replace(self._path, renamed)
        self._columns, self.last_step = self._ends()
        return self._path

    def write(self, step: int, numbers: Mapping[str, float], time: float) -> None:
        """Appends a row."""
        row = {"step": step, "time": time, **numbers}
        if self.last_step == -1 or not row.keys() <= set(self._columns):
            rows: list[Mapping[str, Any]] = [*self._read(), row]
            self._columns = list(dict.fromkeys(itertools.chain(self._columns, row)))
            with replacing(self._path) as temporary:
                write_table(temporary, self._columns, rows)
        else:
            _append(self._path, _format(row, self._columns))
        self.last_step = step

    def close(self) -> None:
        """Does nothing: each row is in the file already."""

    def _ends(self) -> tuple[list[str], int]:
        """Returns the columns of the file and the step of its last row; half a row, of a full disk, is cut off."""
        if not os.path.exists(self._path):
            return ["step", "time"], -1
        for last in lines_from_end(self._path):
            if last.endswith(b"\n"):
                break
            os.truncate(self._path, os.path.getsize(self._path) - len(last))
        else:
            return ["step", "time"], -1
        with open(self._path, newline="", encoding="utf-8") as file:
            columns = next(csv.reader(file))
        step = last.partition(b",")[0]
        return columns, int(step) if step.isdigit() else -1

    def _read(self) -> list[dict[str, str]]:
        """Returns the rows of the file."""
        if not os.path.exists(self._path):
            return []
        with open(self._path, newline="", encoding="utf-8") as file:
            return list(csv.DictReader(file))


def write_table(path: str, columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> None:
    """Writes a CSV file with a header; a row that lacks a column is empty there.

    Raises:
        OSError: if it cannot be written.
    """
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)


def write_csv(runs: Sequence[Run], path: str) -> None:
    """Writes all rows of the runs: a column for each name in any of them, empty where a row has no such number.

    Raises:
        ValueError: if the file cannot be written.
    """
    names = dict.fromkeys(["run", "step", "time", *(name for run in runs for row in run.rows for name in row)])
    try:
        with replacing(path) as temporary:
            write_table(temporary, list(names), ({"run": run.name, **row} for run in runs for row in run.rows))
    except OSError as error:
        raise ValueError(
            f"{path!r} cannot be written ({error.strerror}): give a file in a directory that is there."
        ) from error


def _format(row: Mapping[str, Any], columns: Sequence[str]) -> bytes:
    text = io.StringIO(newline="")
    csv.DictWriter(text, columns).writerow(row)
    return text.getvalue().encode()


def _append(path: str, line: bytes) -> None:
    """Appends a line, or nothing if the disk is full."""
    with open(path, "ab", buffering=0) as file:
        size = file.seek(0, os.SEEK_END)
        if file.write(line) < len(line):
            file.truncate(size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)

"""CSV writer: writes the rows of a run as a table for spreadsheets, with a column for each name.

    trainer.fit(train, writers=[distloop.CsvWriter("rows.csv")])

A name that was not there before becomes the last column, and the file is replaced as a whole. Rows of several runs in
one table come from `python -m distloop.report --csv`.
"""

import csv
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
        self._columns: list[str] = []  # none: the file is written anew with the next row

    def open(self, settings: Mapping[str, Any], run_id: str | None) -> str:
        """Opens the file of this run, or begins a new one; returns its path."""
        make_directory(os.path.dirname(self._path))
        if run_id != self._path and os.path.exists(self._path):
            renamed = next(path for i in itertools.count(1) if not os.path.exists(path := f"{self._path}.{i}"))
            os.replace(self._path, renamed)
        rows = self._read()
        self._columns, self.last_step = [], int(rows[-1]["step"]) if rows else -1
        return self._path

    def write(self, step: int, numbers: Mapping[str, float], time: float) -> None:
        """Appends a row."""
        row = {"step": step, "time": time, **numbers}
        columns, self._columns = self._columns, []
        if row.keys() <= set(columns):
            with open(self._path, "a", encoding="utf-8", newline="") as file:
                csv.DictWriter(file, columns).writerow(row)
        else:
            rows: list[Mapping[str, Any]] = [*self._read(), row]
            columns = list(dict.fromkeys(name for row in rows for name in row))
            _write(rows, columns, self._path)
        self._columns, self.last_step = columns, step

    def close(self) -> None:
        """Does nothing: each row is in the file already."""

    def _read(self) -> list[dict[str, str]]:
        """Returns the whole rows of the file: half a row is there after a kill, or of a full disk."""
        if not os.path.exists(self._path):
            return []
        with open(self._path, encoding="utf-8", newline="") as file:
            return list(csv.DictReader(line for line in file if line.endswith("\n")))


def write_csv(runs: Sequence[Run], path: str) -> None:
    """Writes all rows of the runs: a column for each name in any of them, empty where a row has no such number."""
    names = dict.fromkeys(["run", "step", "time", *(name for run in runs for row in run.rows for name in row)])
    _write(({"run": run.name, **row} for run in runs for row in run.rows), list(names), path)


def _write(rows: Iterable[Mapping[str, Any]], columns: Sequence[str], path: str) -> None:
    """Replaces a file by rows as lines of CSV; a row that lacks a column is empty there."""
    with replacing(path) as temporary, open(temporary, "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)

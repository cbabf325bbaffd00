"""Records: the rows that a run writes, one JSON object per line, and how numbers are formatted.

It imports neither TensorFlow nor TensorBoard, and does not know who writes the rows.

    append_row("run/incidents.jsonl", {"step": 250, "reason": "..."})
    rows = read_metrics("run")      # [{"step": 100, "time": 1.8e9, "loss": 0.12, "test/accuracy": 0.98}, ...]
"""

import json
import os
import time
from collections.abc import Mapping
from typing import Any

from distloop import urls
from distloop.monitoring.tags import GROUPS

# Measurements of time and memory: they differ between runs that compute the same.
OF_THE_MACHINE = frozenset({*GROUPS["speed"], *GROUPS["system"]})
# Numbers about the run rather than the model: written to files, not shown on the console and in reports.
ABOUT_THE_RUN = OF_THE_MACHINE | {*GROUPS["optimizer"], *GROUPS["data"], *GROUPS["per_layer"]} - {"skipped_steps"}

_ENCODER = json.JSONEncoder(allow_nan=False)


def read_metrics(workdir: str | os.PathLike[str]) -> list[dict[str, float]]:
    """Returns the metrics of a run; the run may still be training.

    Args:
        workdir: the run's workdir; `~` is expanded. Of a URL, the rows that are uploaded.

    Returns:
        One row per log, in order: `step` (an integer), `time` (Unix, seconds), and the metrics that were measured, by
        name. Values that were not finite are nan. An incomplete row, of a run that is writing or was killed, is left
        out; so are the rows of earlier runs (`metrics.jsonl.1`).

    Raises:
        ValueError: if the directory does not exist, or holds no metrics.
    """
    directory = os.path.expanduser(os.fspath(workdir))
    is_url = urls.is_url(directory)
    if not is_url and not os.path.isdir(directory):
        raise ValueError(f"There is no directory {directory!r}: give the workdir of a run.")
    try:
        if is_url:
            rows = _parse_rows(urls.file_system(directory, "remote").cat_file(f"{directory.rstrip('/')}/metrics.jsonl"))
        else:
            rows = read_rows(os.path.join(directory, "metrics.jsonl"))
    except FileNotFoundError:
        raise ValueError(
            f"The directory {directory!r} holds no metrics.jsonl: give the workdir of one run that has begun to train."
        ) from None
    except OSError as error:
        raise ValueError(
            f"metrics.jsonl in {directory!r} cannot be read ({error.strerror or error}): give a workdir that you may "
            "read."
        ) from error
    return [{name: value if name == "step" else as_number(value) for name, value in row.items()} for row in rows]


def read_rows(path: str) -> list[dict[str, Any]]:
    """Returns the rows of a file; lines that are not rows are left out.

    Raises:
        OSError: if it cannot be read.
    """
    with open(path, "rb") as file:
        return _parse_rows(file.read())


def _parse_rows(content: bytes) -> list[dict[str, Any]]:
    rows = map(parse_row, content.splitlines())
    return [row for row in rows if row is not None]


def read_steps(path: str) -> set[int]:
    """Returns the steps of a file's rows; an empty set if there is no file."""
    try:
        return {row["step"] for row in read_rows(path)}
    except FileNotFoundError:
        return set()


def append_row(path: str, row: Mapping[str, Any]) -> None:
    """Appends a row to a file, with the current `time` (Unix, seconds).

    Args:
        path: the file; created if it is missing.
        row: values that JSON can hold.

    Raises:
        OSError: if it cannot be written.
    """
    with open(path, "ab") as file:
        file.write(format_row({"time": time.time(), **row}))


def format_row(row: Mapping[str, Any]) -> bytes:
    """Returns a row as a line of JSON."""
    return _ENCODER.encode(row).encode() + b"\n"


def parse_row(line: bytes) -> dict[str, Any] | None:
    """Returns the row of a line; None if it is not an object with a `step`, such as half a row."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) and is_count(row.get("step")) else None


def is_count(value: Any) -> bool:
    """Returns whether a value is an integer that may be a step."""
    return type(value) is int and abs(value) < 2**63


def show_number(value: float) -> str:
    """Returns a number with four significant digits; from 10,000 as an integer rather than with an exponent."""
    return f"{value:.0f}" if 1e4 <= abs(value) < 1e9 else f"{value:.4g}"


def show_bytes(count: float) -> str:
    """Returns a number of bytes with its unit, such as `1.2 GB`."""
    units = ["B", "kB", "MB", "GB", "TB"]
    while count >= 999.5 and len(units) > 1:
        count, units = count / 1000, units[1:]
    return f"{count:.3g} {units[0]}"


def as_number(value: Any) -> float:
    """Returns a value of JSON as a number; nan if it is none."""
    try:
        return float(value) if isinstance(value, (int, float)) else float("nan")
    except OverflowError:  # an integer of more than 308 digits
        return float("nan")

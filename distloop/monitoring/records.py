"""Owns *the rows that a run leaves*: one JSON object a line, written and read, and how a number is shown.

It starts at once: neither TensorFlow nor TensorBoard is imported.

    append_row("run/incidents.jsonl", {"step": 250, "reason": "..."})
    rows = read_metrics("run")      # [{"step": 100, "time": 1.8e9, "loss": 0.12, "test/accuracy": 0.98}, ...]
"""

import json
import os
import time
from collections.abc import Mapping
from typing import Any

# What the clock and the machine say: runs that are equal differ in it.
OF_THE_MACHINE = frozenset(
    ["steps_per_sec", "examples_per_sec", "input_wait", "host_share", "step_secs_p50", "step_secs_p90", "step_secs_p99"]
    + ["replica_imbalance", "host_memory_gb", "device_memory_gb", "device_busy_share"]
    + ["model_flops_per_sec", "model_flops_utilization"]
)
# Numbers about the run, not the model: the files have them, in front of people they would hide the others.
ABOUT_THE_RUN = OF_THE_MACHINE | {
    *["clipped_share", "gradient_norm", "learning_rate", "loss_scale", "weight_norm", "update_norm", "update_ratio"]
}

_ENCODER = json.JSONEncoder(allow_nan=False)


def read_metrics(workdir: str | os.PathLike[str]) -> list[dict[str, float]]:
    """Reads the numbers of a run, of one that is still training too.

    Args:
        workdir: the run's; `~` is expanded.

    Returns:
        A row a boundary, in order: `step` (a whole number), `time` (Unix, seconds), and each number under its name,
        where it was measured. What was not finite is nan. Half a row, of a run that writes or was killed, is left out;
        so are the rows of earlier runs (`metrics.jsonl.1`).

    Raises:
        ValueError: if there is no such directory, or none that holds the numbers of a run.
    """
    directory = os.path.expanduser(os.fspath(workdir))
    if not os.path.isdir(directory):
        raise ValueError(f"There is no directory {directory!r}: give the workdir of a run.")
    try:
        rows = read_rows(os.path.join(directory, "metrics.jsonl"))
    except FileNotFoundError:
        raise ValueError(
            f"The directory {directory!r} holds no metrics.jsonl: give the workdir of one run that has begun to train."
        ) from None
    except OSError as error:
        raise ValueError(
            f"metrics.jsonl in {directory!r} cannot be read ({error.strerror}): give a workdir that you may read."
        ) from error
    return [{name: value if name == "step" else _number(value) for name, value in row.items()} for row in rows]


def read_rows(path: str) -> list[dict[str, Any]]:
    """Reads the rows of a file, without what is none.

    Raises:
        OSError: if it cannot be read.
    """
    with open(path, "rb") as file:
        rows = [parse_row(line) for line in file]
    return [row for row in rows if row is not None]


def read_steps(path: str) -> set[int]:
    """Finds the steps that a file has rows of; none where there is no file."""
    try:
        return {row["step"] for row in read_rows(path)}
    except FileNotFoundError:
        return set()


def append_row(path: str, row: Mapping[str, Any]) -> None:
    """Appends a row to a file, with the `time` (Unix, seconds).

    Args:
        path: of the file, which is made if it is missing.
        row: what JSON can hold.

    Raises:
        OSError: if it cannot be written.
    """
    with open(path, "ab") as file:
        file.write(format_row({"time": time.time(), **row}))


def format_row(row: Mapping[str, Any]) -> bytes:
    """Writes a row as a line."""
    return _ENCODER.encode(row).encode() + b"\n"


def parse_row(line: bytes) -> dict[str, Any] | None:
    """Reads a line; None if it is no row with a `step`, such as half of one."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None


def show_number(value: float) -> str:
    """Writes a number with four significant digits, and large ones as whole numbers rather than powers of ten."""
    return f"{value:.0f}" if 1e4 <= abs(value) < 1e9 else f"{value:.4g}"


def _number(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) else float("nan")

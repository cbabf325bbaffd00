"""Starts of a run: when each of its processes began and on how many devices, in `starts.jsonl`; without TensorFlow.

    note_start("run", step=500, devices=8, kind="GPU")     # before the rows after the checkpoint are cut off
    device_hours(read_starts("run"), last_time)            # of all starts together

A killed process cannot note its end, so the next start notes the time of the last row that was there. It does not know
what a run is.
"""

import os
from collections.abc import Mapping, Sequence
from typing import Any

from distloop.monitoring import records
from distloop.monitoring.json_writer import last_row

FILE = "starts.jsonl"


def note_start(workdir: str, *, step: int, devices: int, kind: str) -> None:
    """Adds a row: time, step, devices, and the time of the last row of `metrics.jsonl`, null if there is none.

    Args:
        workdir: of the run.
        step: the global step that the process starts from.
        devices: of all workers.
        kind: "GPU" or "CPU".

    Raises:
        OSError: if it cannot be written.
    """
    row = last_row(os.path.join(workdir, "metrics.jsonl"))
    facts = {"step": step, "devices": devices, "kind": kind, "last_row_time": row and row.get("time")}
    records.append_row(os.path.join(workdir, FILE), facts)


def read_starts(workdir: str) -> list[dict[str, Any]]:
    """Returns the rows of all starts; an empty list if there are none, as of a run of an earlier version."""
    try:
        return records.read_rows(os.path.join(workdir, FILE))
    except FileNotFoundError:
        return []


def device_hours(starts: Sequence[Mapping[str, Any]], last_time: float) -> float | None:
    """Returns the hours that devices were held: from each start to its last row, times its devices.

    Args:
        starts: the rows of `starts.jsonl`.
        last_time: of the last row of `metrics.jsonl`; Unix, seconds; nan: there is none.

    Returns:
        The hours of all starts together, with tracing, evaluations and saves; None without starts.
    """
    if not starts:
        return None
    ends = [*(records.as_number(start.get("last_row_time")) for start in starts[1:]), last_time]
    hours = 0.0
    for start, end in zip(starts, ends, strict=True):
        secs = end - records.as_number(start.get("time"))
        if secs > 0:  # false for nan, too
            hours += secs / 3600 * records.as_number(start.get("devices"))
    return hours

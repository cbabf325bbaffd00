"""Run starts: the time and the number of devices of each start of a run, in `starts.jsonl`; without TensorFlow.

    note_start("run", step=500, devices=8, kind="GPU")     # before the rows after the checkpoint are cut off
    device_hours(read_starts("run"), last_time)            # of all starts together

A killed process cannot note its end, so the next start notes the time of the last row that was there. It does not know
what a run is.
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from distloop.atomic_files import start_time
from distloop.distributed import notes
from distloop.log import log
from distloop.monitoring import ledger, records
from distloop.monitoring.json_writer import last_row

FILE = "starts.jsonl"

_noted: set[int] = set()  # processes: a fork is another one


def note_start(
    workdir: str,
    restore_secs: float | None = None,
    *,
    step: int,
    devices: int,
    kind: str,
    secs_before: Mapping[str, float] | None = None,
) -> None:
    """Adds a row: time, step, devices, the age of the process, and what the start before it has noted last.

    That is the time of the last row of `metrics.jsonl`, and `ledger.read_progress`; null if there is none. So is the
    age, if it is unknown or the process has noted a start before. A launcher adds `notes.change`.

    Args:
        workdir: of the run.
        restore_secs: how long restoring a checkpoint took; None: none was restored.
        step: the global step that the process starts from.
        devices: of all workers.
        kind: "GPU" or "CPU".
        secs_before: what `Clock.seconds` counted before a rollback, after which the same call of `fit` starts again.

    Raises:
        OSError: if it cannot be written.
    """
    row = last_row(os.path.join(workdir, "metrics.jsonl"))
    facts = {"step": step, "devices": devices, "kind": kind, "last_row_time": row and row.get("time")}
    facts |= {"restore_secs": restore_secs, "progress": ledger.read_progress(workdir)}
    facts |= {"secs_before": secs_before} if secs_before else {}
    facts["process_secs"] = age = _age_at_first_start()
    facts |= notes.change() if age is not None else {}
    records.append_row(os.path.join(workdir, FILE), facts)


def _age_at_first_start() -> float | None:
    """Returns the age of this process in seconds; None if it is unknown, or after the first call."""
    process = os.getpid()
    if process in _noted:
        return None
    _noted.add(process)
    try:
        started_at = start_time(process)
    except (OSError, ValueError, IndexError):
        return None
    return time.time() - started_at if started_at else None


def read_starts(workdir: str, warn: Callable[[str], None] = log.warning) -> list[dict[str, Any]]:
    """Returns the rows of all starts; none if there are none, as of a run of an earlier version, or with a warning."""
    path = os.path.join(workdir, FILE)
    return records.read_rows_if_any(path, instead="the device-hours of the run are unknown", warn=warn)


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

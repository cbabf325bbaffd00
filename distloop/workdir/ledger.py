"""Ledger: what a run has cost: where the time of all its starts went, its device-hours, and the memory on devices.

    record_start("run", step=500, devices=8, kind="GPU")          # before the rows after the checkpoint are cut off
    record_progress("run", time=now, step=520, secs={"step": 61.0, "saving": 0.8})     # the next start keeps it
    seconds = account(last_start("run"), read_progress("run"))              # {"steps": 60.1, "steps done twice": 0.9}
    goodput(seconds)                                                  # 0.81: the fraction that went to steps that count

A killed process cannot record its end: what it did after its last record counts as waiting for the next start, which
records the time of the last row that was there. TensorFlow is not imported.
"""

import contextlib
import math
import os
import time as clock
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from distloop.atomic_files import start_time
from distloop.log import log
from distloop.workdir import records
from distloop.workdir.records import last_row, unix_time

STARTS, PROGRESS = "starts.jsonl", "progress.json"
MEMORY = "memory.json"
TABLES = "embedding tables"
# What devices hold, in the order in which it is shown: from step to step; what a step needs besides, as estimated.
HELD = ("weights", TABLES, "optimizer slots", "averages of weights")
ESTIMATED = ("batch", "activations", "gradients")
KINDS = (*HELD, *ESTIMATED)
# Bytes of the first worker's devices: of variables as they are placed, and what `--memory` estimated.
Memory = dict[str, dict[str, int]]

ENERGY = "energy_kwh"  # of all GPUs, over all starts

STEPS, STEPS_TWICE = "steps", "steps done twice"

_recorded: set[int] = set()  # processes that have recorded a start: a fork is another one


def record_start(
    workdir: str,
    *,
    step: int,
    devices: int,
    kind: str,
    restore_secs: float | None = None,
    position: Mapping[str, Any] | None = None,
) -> None:
    """Adds a row: time, step, devices, the process's age, what the start before it recorded last, and `before`.

    `before` is where the time of all starts before went, so that nobody has to read their rows. Recorded last were the
    time of the last row of `metrics.jsonl`, and `read_progress`; null if there is none. So is the age, if it is
    unknown or the process has recorded a start before.

    Args:
        workdir: of the run.
        step: the global step that the process starts from.
        devices: of all workers.
        kind: "GPU" or "CPU".
        restore_secs: how long restoring a checkpoint took; None: none was restored.
        position: in the data, as `Source.position`; None: unknown.

    Raises:
        OSError: if it cannot be written.
    """
    last_time = (last_row(os.path.join(workdir, "metrics.jsonl")) or {}).get("time")
    facts: dict[str, Any] = {"step": step, "devices": devices, "kind": kind, "last_row_time": last_time}
    facts |= {"restore_secs": restore_secs, "progress": read_progress(workdir), "process_secs": None}
    facts |= {} if position is None else {"input": {name: position[name] for name in position if name != "state"}}
    if (process := os.getpid()) not in _recorded:
        _recorded.add(process)
        with contextlib.suppress(OSError, ValueError, IndexError):
            if began_at := start_time(process):
                facts["process_secs"] = clock.time() - began_at
    facts["time"] = unix_time()
    facts["before"] = account(last_start(workdir), facts["progress"], facts)
    records.append_row(os.path.join(workdir, STARTS), facts)


def read_starts(workdir: str, warn: Callable[[str], None] = log.warning) -> list[dict[str, Any]]:
    """Returns the rows of all starts; none if there are none, as of a run of an earlier version, or with a warning."""
    path = os.path.join(workdir, STARTS)
    return records.read_rows_if_any(path, instead="the device-hours of the run are unknown", warn=warn)


def last_start(workdir: str) -> dict[str, Any]:
    """Returns the row of the last start, which knows what those before have cost; empty if it cannot be read."""
    with contextlib.suppress(OSError):
        return last_row(os.path.join(workdir, STARTS)) or {}
    return {}


def record_progress(workdir: str, *, time: float, step: int, secs: Mapping[str, float], **energy: float) -> None:
    """Writes how far this start of a run has come, in place of what was written before.

    Args:
        workdir: of the run.
        time: Unix, seconds.
        step: the global step.
        secs: the seconds of this start until now by phase, as `Clock.seconds`.
        **energy: `energy_kwh`, over all starts; none if it is unknown.

    Raises:
        OSError: if it cannot be written.
    """
    records.replace_json(os.path.join(workdir, PROGRESS), {"time": time, "step": step, "secs": dict(secs), **energy})


def read_progress(workdir: str, warn: Callable[[str], None] = log.warning) -> dict[str, Any] | None:
    """Returns what was recorded last; None if there is nothing, or it cannot be read."""
    path = os.path.join(workdir, PROGRESS)
    return records.read_json(path, instead="how far the last start came is unknown", warn=warn)


def energy_before(start: Mapping[str, Any]) -> float:
    """Returns the energy in kWh that the GPUs of all starts before one took, as these recorded it; 0: none did."""
    return _number(_as_dict(start.get("progress")), ENERGY, 0.0)


def device_hours(starts: Sequence[Mapping[str, Any]], last_time: float) -> float | None:
    """Returns the hours that devices were held: from each start to its last row, times its devices; None: no starts.

    Args:
        starts: as `read_starts` returns them.
        last_time: of the last row of `metrics.jsonl`; Unix, seconds; nan: there is none.
    """
    ends = [*(_number(start, "last_row_time") for start in starts[1:]), last_time]
    secs = [end - _number(start, "time") for start, end in zip(starts, ends, strict=False)]
    hours = (s / 3600 * _number(start, "devices") for start, s in zip(starts, secs, strict=True) if s > 0)  # no nan
    return sum(hours, 0.0) if starts else None


def account(
    start: Mapping[str, Any], progress: Mapping[str, Any] | None, following: Mapping[str, Any] | None = None
) -> dict[str, float]:
    """Returns the seconds of a run by what they went to, from its first process until the end of a start.

    Args:
        start: as `last_start` returns it, with all starts before it.
        progress: what the start has recorded last; it counts until then.
        following: the start after it, until which it counts; None: there is none.

    Returns:
        `steps`; `steps done twice`, which a later start did again; `starting`, `restoring` and `tracing` of new
        processes; `waiting` from the last record of one until the next; the phases of `Clock`.
    """
    before, end, began_at = _as_dict(start.get("before")), _as_dict(progress), _number(start, "time")
    if not _number(end, "time") >= began_at:
        end = {}  # an earlier start recorded it, and this one nothing
    last_at, recorded = _number(end, "time", began_at), _as_dict(end.get("secs"))
    phases = {name: max(0.0, _number(recorded, name, 0.0)) for name in recorded if name != "start-up"}
    phases["tracing"] = max(0.0, last_at - began_at - sum(phases.values()))
    first, last = _number(start, "step"), _number(end, "step")
    kept = min(last, _number(following, "step")) if following is not None else last
    fraction = max(0.0, kept - first) / (last - first) if last > first else 0.0
    step_secs = phases.pop("step", 0.0)
    phases |= {STEPS: fraction * step_secs, STEPS_TWICE: (1 - fraction) * step_secs}
    phases["restoring"] = _number(start, "restore_secs", 0.0)
    phases["starting"] = max(0.0, _number(start, "process_secs", 0.0) - phases["restoring"])
    seconds = defaultdict(float, {name: _number(before, name, 0.0) for name in before})
    for name, secs in phases.items():
        seconds[name] += secs
    if following is not None:
        began_secs = _number(following, "process_secs", 0.0) or _number(following, "restore_secs", 0.0)
        seconds["waiting"] += max(0.0, _number(following, "time") - began_secs - last_at)
    return {name: secs for name, secs in seconds.items() if secs > 0}


def goodput(seconds: Mapping[str, float]) -> float:
    """Returns the fraction of the time that went to steps that count; nan if none has passed."""
    return seconds.get(STEPS, 0.0) / (sum(seconds.values()) or math.nan)


def _as_dict(value: Any) -> dict[str, Any]:
    """Returns what a file holds where a dict should be; an empty one in place of anything else."""
    return value if isinstance(value, dict) else {}


def _number(row: Mapping[str, Any], name: str, unknown: float = math.nan) -> float:
    """Returns a number of a row; `unknown` if it has none, or none that is finite."""
    number = records.as_number(row.get(name))
    return number if math.isfinite(number) else unknown


def write_memory(workdir: str, devices: Memory) -> None:
    """Writes `memory.json` into a directory that is there; an error is logged, and the report will lack it."""
    try:
        records.replace_json(os.path.join(workdir, MEMORY), {"devices": devices})
    except OSError as error:
        log.warning("The report will lack the memory of this run: %s.", error.strerror or error)


def read_memory(workdir: str, warn: Callable[[str], None] = log.warning) -> Memory | None:
    """Returns the content of `memory.json`; None if the file is missing or damaged."""
    path = os.path.join(workdir, MEMORY)
    return records.read_json(path, _as_memory, instead="the memory of the run is unknown", warn=warn)


def _as_memory(content: Any) -> Memory:
    devices = {device: {**held} for device, held in content["devices"].items()}
    if not all(records.is_count(count) for held in devices.values() for count in held.values()):
        raise ValueError("it holds something else than numbers of bytes")
    return devices

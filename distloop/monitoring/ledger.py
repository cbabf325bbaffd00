"""Ledger: accounts for the time of a run over all its starts, and computes its goodput; without TensorFlow.

    note_progress("run", time=now, step=500, secs={"step": 61.0, "saving": 0.8})     # the next start keeps it
    seconds = account(read_starts("run"), read_progress("run"))             # {"steps": 60.1, "steps done twice": 0.9}
    goodput(seconds)                                                        # 0.81: the share of steps that count

A killed process cannot note its end: what it did after its last log is known by the time at which its launcher saw it
fall, or not at all. It does not know who starts a run again.
"""

import json
import math
import os
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from distloop.log import log
from distloop.monitoring.records import as_number, read_json

FILE = "progress.json"

STEPS, STEPS_TWICE = "steps", "steps done twice"


def note_progress(workdir: str, *, time: float, step: int, secs: Mapping[str, float], is_end: bool = False) -> None:
    """Writes how far this start of a run has come, in place of what was written before.

    Args:
        workdir: of the run.
        time: Unix, seconds.
        step: the global step.
        secs: the seconds of this start until now by phase, as `Clock.seconds`.
        is_end: whether it trains no more.

    Raises:
        OSError: if it cannot be written.
    """
    with open(temporary := os.path.join(workdir, f".{FILE}"), "w", encoding="utf-8") as file:
        json.dump({"time": time, "step": step, "secs": dict(secs), "is_end": is_end}, file)
    os.replace(temporary, os.path.join(workdir, FILE))  # without waiting for the disk: it is no state of the run


def read_progress(workdir: str, warn: Callable[[str], None] = log.warning) -> dict[str, Any] | None:
    """Returns what was noted last; None if there is nothing, or it cannot be read."""
    return read_json(os.path.join(workdir, FILE), instead="how far the last start came is unknown", warn=warn)


def account(starts: Sequence[Mapping[str, Any]], progress: Mapping[str, Any] | None) -> dict[str, float]:
    """Returns the seconds of a run by what they went to, from its first process until now.

    Args:
        starts: the rows of `starts.jsonl`.
        progress: of the last start.

    Returns:
        `steps`; `steps done twice`, which a later start did again, or which were done after the last log before a fall;
        `starting`, `meeting`, `restoring` and `tracing` of new processes; `stopping` of those that save and leave;
        `noticing` that one fell, until all had ended; `waiting` for new ones; the phases of `Clock`.
    """
    seconds: defaultdict[str, float] = defaultdict(float)
    if not starts:
        return seconds
    ends = [_as_dict(end) for end in (*(start.get("progress") for start in starts[1:]), progress)]
    for start, end, following in zip(starts, ends, [*starts[1:], None], strict=True):
        restoring, meeting = (_secs(start, name) for name in ("restore_secs", "meet_secs"))
        seconds["restoring"] += restoring
        seconds["meeting"] += meeting
        seconds["starting"] += max(0.0, _secs(start, "process_secs") - restoring - meeting)
        last_time = as_number(start.get("time"))
        if as_number(end.get("time")) < last_time:
            end = {}  # an earlier start noted it, and this one nothing
        if end:
            last_time = as_number(end.get("time"))
            _add_work(seconds, start, end, following)
        if following is not None:
            unseen = "tracing" if not end else "stopping" if end.get("is_end") else STEPS_TWICE
            _add_gap(seconds, last_time, following, unseen)
    return {name: secs for name, secs in seconds.items() if secs > 0}


def goodput(seconds: Mapping[str, float]) -> float:
    """Returns the share of the time that went to steps that count; nan if none has passed."""
    return seconds.get(STEPS, 0.0) / (sum(seconds.values()) or math.nan)


def _add_work(
    seconds: defaultdict[str, float],
    start: Mapping[str, Any],
    end: Mapping[str, Any],
    following: Mapping[str, Any] | None,
) -> None:
    """Adds what a start did until it was noted last."""
    phases = {name: as_number(secs) for name, secs in _as_dict(end.get("secs")).items() if name != "start-up"}
    before = _as_dict(start.get("secs_before"))
    phases = {name: max(0.0, secs - as_number(before.get(name, 0.0))) for name, secs in phases.items()}
    all_secs = as_number(end.get("time")) - as_number(start.get("time"))
    seconds["tracing"] += max(0.0, all_secs - sum(phases.values()))
    first, last = as_number(start.get("step")), as_number(end.get("step"))
    kept = min(last, as_number(following.get("step"))) if following is not None else last
    share = max(0.0, kept - first) / (last - first) if last > first else 0.0
    step_secs = phases.pop("step", 0.0)
    seconds[STEPS] += share * step_secs
    seconds[STEPS_TWICE] += (1 - share) * step_secs
    for name, secs in phases.items():
        seconds[name] += secs


def _add_gap(seconds: defaultdict[str, float], last_time: float, following: Mapping[str, Any], unseen: str) -> None:
    """Adds the time between the last note of a start and the next process; `unseen` is what was done until a fall."""
    began_secs = _secs(following, "process_secs") or _secs(following, "restore_secs")  # none: in the same process
    began_at = as_number(following.get("time")) - began_secs
    fell_at, ended_at = (as_number(following.get(name)) for name in ("fell_at", "ended_at"))
    if math.isfinite(fell_at) and fell_at > last_time:
        seconds[unseen] += fell_at - last_time
        last_time = fell_at
    if math.isfinite(ended_at) and ended_at > last_time:
        seconds["noticing"] += ended_at - last_time
        last_time = ended_at
    seconds["waiting"] += max(0.0, began_at - last_time)


def _as_dict(value: Any) -> dict[str, Any]:
    """Returns what a file holds where a dict should be; an empty one in place of anything else."""
    return value if isinstance(value, dict) else {}


def _secs(row: Mapping[str, Any], name: str) -> float:
    """Returns a number of seconds; 0 if it is unknown."""
    secs = as_number(row.get(name))
    return secs if math.isfinite(secs) else 0.0

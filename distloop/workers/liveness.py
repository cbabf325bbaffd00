"""Liveness: decides which worker failed by the last heartbeats and the time; no sockets, threads or clocks.

    beats[1] = read_beat("worker 1 (b:4000)", message, now, beats.get(1))
    find_failure(beats, hang_timeout, start_timeout, now)   # None, or Verdict("worker 1 failed at step 7 ...")
    explain_difference(facts, facts_of_another, 1)          # "Workers were started differently: ..."

The chief hears every worker, decides, and reports it to all, so that all end for the same reason. The others hear only
the chief, and check it alone.
"""

import heapq
from collections.abc import Mapping
from typing import Any, NamedTuple

from distloop.log import printable

# The phases in which a worker needs all the others, and should not stand still.
_PHASES_TOGETHER = JOINING, TRAINING, GATHERING = "joining", "training", "waiting for all"

SILENT_SECS = 3.0  # six heartbeats are missing: worth a mention if something is wrong
LEFT_SECS = 10.0  # the last operations of a worker that left may end this much later elsewhere

_MOST_DESCRIBED = 8  # workers


class Beat(NamedTuple):
    """The last heartbeat of a worker, and since when it stands still."""

    worker: str  # its index and address, as in `worker 1 (b:4000)`
    state: str  # "alive"; "failed"; "left", at the end of its program; "gone": its connection is closed
    phase: str
    step: int
    error: str
    received_at: float  # seconds on this worker's monotonic clock
    progress_at: float  # since when it stands still; phases in which a worker needs no other one count as progress

    @property
    def still_secs(self) -> float:
        """The seconds for which the worker stood still at this heartbeat."""
        return self.received_at - self.progress_at

    def is_heard(self, now: float) -> bool:
        """Returns whether the worker is connected, and no heartbeats are missing."""
        return self.state != "gone" and now - self.received_at <= SILENT_SECS

    def describe(self, now: float) -> str:
        """Returns the last known position of the worker, as in `worker 1 (b:4000) is at step 7 (training)`."""
        verb, silent_secs = "left" if self.state == "left" else "is", now - self.received_at
        if verb == "is" and silent_secs > SILENT_SECS:
            verb = f"has been silent for {silent_secs:.0f} seconds, last heard"
        return f"{self.worker} {verb} at step {self.step} ({self.phase})"


def read_beat(worker: str, message: Mapping[str, Any], now: float, before: Beat | None = None) -> Beat:
    """Returns the heartbeat in a message; its texts are escaped and cut, before anything prints them.

    Args:
        worker: who sent it.
        message: as it came.
        now: the time on this worker's clock.
        before: the heartbeat before this one, if standing still counts.

    Raises:
        ValueError, LookupError, TypeError: if there is none.
    """
    state, step = message["state"], message["step"]
    if state not in ("alive", "failed", "left") or type(step) is not int or not 0 <= step < 2**63:
        raise ValueError(f"{state!r} and {step!r} are no state and step.")
    phase, error = shorten(message["phase"], 60), shorten(message["error"], 400)
    progress_at = now
    if before is not None and (before.step, before.phase) == (step, phase) and phase in _PHASES_TOGETHER:
        # Silence is not standing still: the worker was suspended, or out of reach.
        progress_at = before.progress_at if now - before.received_at < SILENT_SECS else now
    return Beat(worker, state, phase, step, error, now, progress_at)


class Verdict(NamedTuple):
    """Why the workers have to end."""

    reason: str
    is_hang: bool = False  # if so, the stacks of their threads are of interest


def find_failure(beats: Mapping[int, Beat], hang_timeout: float, start_timeout: float, now: float) -> Verdict | None:
    """Returns why the workers have to end; None if the run goes on.

    Args:
        beats: the last heartbeat of each worker, by its index.
        hang_timeout: seconds for which a worker may be silent or stand still; 0: without limit.
        start_timeout: seconds for which the phase JOINING may last; 0: without limit.
        now: the time on the clock of the beats.
    """
    in_order = sorted(beats.items())
    for i, beat in in_order:
        if beat.state == "failed":
            return Verdict(f"worker {i} failed at step {beat.step} ({beat.phase}): {beat.error}")
    for _, beat in in_order:
        if beat.state == "gone":
            return Verdict(
                f"the process of {beat.worker} is gone without a word, last heard at step {beat.step} ({beat.phase}): "
                "was it killed, or out of memory? Its own output may tell"
            )
    alive = [beat for _, beat in in_order if beat.state == "alive"]
    for beat in alive:
        if 0 < hang_timeout < now - beat.received_at:
            return Verdict(beat.describe(now), is_hang=True)
    still_secs = max((beat.still_secs for beat in alive if beat.phase != JOINING), default=0.0)
    joining_secs = max((beat.still_secs for beat in alive if beat.phase == JOINING), default=0.0)
    left = [beat for _, beat in in_order if beat.state == "left"]
    if left and max(still_secs, joining_secs) > LEFT_SECS:
        return Verdict(f"{left[0].describe(now)}, before the run was over")
    if 0 < start_timeout < joining_secs:
        return Verdict(
            f"TensorFlow has not joined the workers for start_timeout={start_timeout:g} seconds, though they hear "
            f"each other ({describe_all(beats, now)}): are the TCP ports of all open?",
            is_hang=True,
        )
    if 0 < hang_timeout < still_secs:
        return Verdict(
            f"no step has ended for hang_timeout={hang_timeout:g} seconds; {describe_all(beats, now)}", is_hang=True
        )
    return None


def describe_all(beats: Mapping[int, Beat], now: float) -> str:
    """Returns the last known position of up to 8 workers: those that do not run, then those that others wait for."""

    def progress(i: int) -> tuple[bool, bool, int, int]:
        return beats[i].state == "alive", beats[i].phase == GATHERING, beats[i].step, i

    slowest = sorted(heapq.nsmallest(_MOST_DESCRIBED, beats, key=progress))
    return "; ".join(beats[i].describe(now) for i in slowest)


def explain_difference(here: Mapping[str, str], there: Mapping[str, str], i: int) -> str:
    """Returns a sentence about a setting that worker `i` has otherwise than the chief, or alone; "" if there is none.

    Args:
        here: the chief's settings, by name.
        there: those of the other worker.
        i: its index.
    """
    name = next((name for name in sorted({*here, *there}) if here.get(name) != there.get(name)), None)
    if name is None:
        return ""
    one, other = (shorten(str(facts.get(name)), 200) for facts in (here, there))
    return (
        f"Workers were started differently: {shorten(name, 100)} is {one} on worker 0 and {other} on worker {i}; start "
        "all with the same command."
    )


def shorten(text: str, max_bytes: int) -> str:
    """Returns a text in one line without control characters, cut to a length in UTF-8."""
    text = printable(text[: max_bytes + 1], keep="")
    data = text.encode(errors="backslashreplace")
    return text if len(data) <= max_bytes else f"{data[: max_bytes - 3].decode(errors='ignore')}..."

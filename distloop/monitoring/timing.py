"""Timing: measures a run's time by phase, and names the bottleneck with a hint against it.

    clock = Clock()
    host_secs = clock.loop(start, end, waited_secs)     # each loop: its steps, and the time since the previous loop
    with clock.phase("evaluation"):
        ...
    clock.seconds()     # {"start-up": 3.1, "input": 0.1, "step": 5.4, "evaluation": 0.8, ..., "other": 0.2}
    bottleneck({"input_wait": 0.7, "host_share": 0.1})     # ("input", 0.63)

It does not know what happens in a phase.
"""

import contextlib
import math
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping

VERDICT_SECS = 10.0  # shorter runs get no verdict on their speed and no hint
_MIN_FRACTION = 0.2  # of the time, for a hint
_LEAST_FRACTION = 0.01  # of the time, for a phase to be shown

_TF_DATA = "cache() the dataset, prefetch(tf.data.AUTOTUNE), map(..., num_parallel_calls=tf.data.AUTOTUNE)"
_ADVICE = {
    "evaluation": "a larger eval_every, or larger batches to evaluate on",
    "saving": "a larger checkpoint_every, or a faster disk for the workdir",
    "logging": "a larger log_every",
    "waiting for other workers": "evaluations and actions that take as long on each worker",
    "other": "a larger steps_per_loop, log_every or batch_size, or a larger `every` of actions",
}


class Clock:
    """Accumulates the time of a run by phase. The first phase is the start-up, which ends at the first loop."""

    def __init__(self) -> None:
        """Starts the clock."""
        self._since = time.monotonic()  # as in the compiled loop
        self._loop_end: float | None = None
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._first: dict[str, float] = {}  # duration of each phase's first time

    def loop(self, start: float, end: float, waited_secs: float) -> float:
        """Adds a compiled loop to the phases `input` and `step`.

        Args:
            start: when it started, in seconds of the monotonic clock.
            end: when its last step ended, by the same clock.
            waited_secs: time in it spent waiting for data.

        Returns:
            The seconds between the previous loop and this one.
        """
        between = 0.0
        if self._loop_end is None:
            self._seconds["start-up"] = max(0.0, start - self._since - sum(self._seconds.values()))
        else:
            between = max(0.0, start - self._loop_end)
        self._loop_end = end
        secs = max(0.0, end - start)
        waited_secs = min(secs, waited_secs)
        self._seconds["input"] += waited_secs
        self._seconds["step"] += secs - waited_secs
        return between

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Adds the time of the block, which runs between two loops, to a phase."""
        start = time.monotonic()
        try:
            yield
        finally:
            secs = time.monotonic() - start
            self._seconds[name] += secs
            self._first.setdefault(name, secs)

    def seconds(self) -> dict[str, float]:
        """Returns the time until now by phase; `other` is the time outside all phases."""
        names = ("start-up", "input", "step", "evaluation", "saving", "logging")
        seconds = dict.fromkeys(names, 0.0) | self._seconds
        unseen = time.monotonic() - self._since - sum(self._seconds.values())
        seconds["other"] = seconds.pop("other", 0.0) + max(0.0, unseen)
        return seconds

    def advice(self, against_waiting: str = "", stages: Mapping[str, float] = {}) -> str | None:
        """Returns a hint if input or host work took over 20 % of the run, else None.

        The first time of each phase does not count: it includes tracing, which no setting avoids.

        Args:
            against_waiting: what makes data of this kind faster; empty: it is a `tf.data.Dataset`.
            stages: seconds that threads worked on each stage of the input; empty: unknown.
        """
        seconds = self.seconds()
        training = sum(seconds.values()) - seconds["start-up"]
        if training < VERDICT_SECS:
            return None
        input_secs, step_secs = seconds["input"], seconds["step"]
        between = {
            name: secs - (self._first.get(name, 0.0) if name != "other" else 0.0)
            for name, secs in seconds.items()
            if name not in ("start-up", "input", "step")
        }
        total = input_secs + step_secs + sum(between.values())
        waited, host = input_secs / total, sum(between.values()) / total
        if max(waited, host) <= _MIN_FRACTION:
            return None
        if waited >= host:
            name = max(stages, key=lambda stage: stages[stage], default="other")
            how, what = "waiting for data", against_waiting or _TF_DATA
        else:
            name = max(between, key=lambda phase: between[phase])
            how, what = "between two loops", _ADVICE.get(name, f"a larger `every` of {name}")
        most = "" if name == "other" else f", most of it in {name}"
        return f"{show_percent(max(waited, host))} of the time after start-up went by {how}{most}: try {what}."


class SaveTimes:
    """What the last save and restore of a run took, in seconds, until it is reported.

    `save_pause`: how long a save held training up. `write`: how long its checkpoint then took in the background until
    it was complete. `restore`: how long the run took to restore its newest checkpoint.
    """

    def __init__(self) -> None:
        """Begins without a time."""
        self._secs: dict[str, float] = {}

    def record(self, **secs: float) -> None:
        """Records times by name."""
        self._secs |= secs

    def take(self, *names: str) -> dict[str, float]:
        """Returns times by name, once all are known; empty until then, and after that."""
        return {name: self._secs.pop(name) for name in names} if self._secs.keys() >= set(names) else {}


def bottleneck(metrics: Mapping[str, float]) -> tuple[str, float]:
    """Returns where most of the time went, "input", "host" or "step", and its fraction of the time.

    Args:
        metrics: a report's; `input_wait` (fraction of the loops' time) and `host_share` (of all time) are read.
    """
    host = metrics.get("host_share", 0.0)
    waited = metrics.get("input_wait", 0.0) * (1.0 - host)
    fractions = {"step": 1.0 - host - waited, "input": waited, "host": host}
    which = max(fractions, key=lambda name: fractions[name])
    return which, fractions[which]


def show_percent(fraction: float) -> str:
    """Returns a fraction as a percentage."""
    return f"{100 * fraction:.0f} %"


def largest_fractions(seconds: Mapping[str, float]) -> dict[str, float]:
    """Returns the fraction of the time that each phase took, the largest first, without those below 1 %."""
    total = sum(seconds.values()) or 1.0
    fractions = {name: secs / total for name, secs in seconds.items() if secs / total >= _LEAST_FRACTION}
    return dict(sorted(fractions.items(), key=lambda item: -item[1]))


def show_fractions(seconds: Mapping[str, float], stages: Mapping[str, float] = {}) -> str:
    """Returns where the time went, as text; empty if none has passed.

    Args:
        seconds: by phase, as in `time: 63 % step, 20 % input, 17 % start-up`.
        stages: as for `Clock.advice`, as in `20 % input (9.1 s of map_fn, 0.6 s of reading)`.
    """
    of_input = ", ".join(f"{stages[one]:.1f} s of {one}" for one in largest_fractions(stages) if stages[one] >= 0.05)
    shown = {"input": f" ({of_input})" if of_input else ""}
    fractions = [f"{show_percent(f)} {name}{shown.get(name, '')}" for name, f in largest_fractions(seconds).items()]
    return f"time: {', '.join(fractions)}" if fractions else ""


def show_secs(secs: float) -> str:
    """Returns a duration as hours, minutes and seconds; "-" if it is not finite."""
    if not math.isfinite(secs):
        return "-"
    secs = round(secs)
    return f"{secs // 3600}:{secs // 60 % 60:02}:{secs % 60:02}"

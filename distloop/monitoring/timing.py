"""Owns where a run's time goes: by phase, what holds it up, and what to try against that.

    clock = Clock()
    host_secs = clock.loop(start, end, waited_secs)     # each loop: steps, and the time since the loop before it
    with clock.phase("evaluation"):
        ...
    clock.seconds()     # {"start-up": 3.1, "input": 0.1, "step": 5.4, "evaluation": 0.8, ..., "other": 0.2}
    verdict({"input_wait": 0.7, "host_share": 0.1})     # ("input", 0.63)

It only reads the clock; it does not know what a phase does.
"""

import contextlib
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping

_WORTH_A_WORD = 0.2  # of the time
_TOO_SHORT_SECS = 2.0  # a run that trains no longer than this needs no advice

_ADVICE = {
    "input": "cache() the dataset, prefetch(tf.data.AUTOTUNE), map(..., num_parallel_calls=tf.data.AUTOTUNE)",
    "evaluation": "a larger eval_every, or larger batches to evaluate on",
    "saving": "a larger checkpoint_every, or a faster disk for the workdir",
    "logging": "a larger log_every",
    "other": "a larger steps_per_loop, log_every or batch_size, or actions that come due less often",
}


class Clock:
    """Adds up the time of a run by phase; begins with the start-up, which the first loop ends."""

    def __init__(self) -> None:
        """Starts."""
        self._since = time.time()  # Unix, as the compiled loop tells it
        self._loop_end: float | None = None
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._first: dict[str, float] = {}  # how long the first time of a phase took

    def loop(self, start: float, end: float, waited_secs: float) -> float:
        """Notes a loop.

        Args:
            start: Unix, seconds.
            end: when its last step ended.
            waited_secs: how much of it was spent waiting for data.

        Returns:
            The seconds between the loop before it and this one.
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
        """Counts what happens meanwhile, between two loops, to a phase."""
        begun = time.time()
        try:
            yield
        finally:
            secs = max(0.0, time.time() - begun)
            self._seconds[name] += secs
            self._first.setdefault(name, secs)

    def seconds(self) -> dict[str, float]:
        """Returns the time until now by phase; `other` is what no phase has."""
        found = {name: self._seconds[name] for name in ("start-up", "input", "step", "evaluation", "saving", "logging")}
        found |= {name: secs for name, secs in self._seconds.items() if name not in found}
        found["other"] = found.pop("other", 0.0) + max(0.0, time.time() - self._since - sum(self._seconds.values()))
        return found

    def advice(self) -> str | None:
        """Says what to try where the loop waited for data, or the host between two loops, for long.

        The first time of each phase does not count: it traces, and no setting spares it.
        """
        seconds = self.seconds()
        training = sum(seconds.values()) - seconds["start-up"]
        if training < _TOO_SHORT_SECS:
            return None
        input_secs, step_secs = seconds["input"], seconds["step"]
        between = {
            name: secs - (self._first.get(name, 0.0) if name != "other" else 0.0)
            for name, secs in seconds.items()
            if name not in ("start-up", "input", "step")
        }
        total = input_secs + step_secs + sum(between.values())
        input_share, host_share = input_secs / total, sum(between.values()) / total
        if max(input_share, host_share) <= _WORTH_A_WORD:
            return None
        if input_share >= host_share:
            return f"{show_share(input_share)} of the time went by waiting for data: try {_ADVICE['input']}."
        name = max(between, key=lambda phase: between[phase])
        what = _ADVICE.get(name, _ADVICE["other"])
        most = "" if name == "other" else f", most of it in {name}"
        return f"{show_share(host_share)} of the time went by between two loops{most}: try {what}."


def verdict(metrics: Mapping[str, float]) -> tuple[str, float]:
    """Finds what most of a window's time went to: "input", "host" or "step", and its share of the time.

    Args:
        metrics: of a report: `input_wait` (the share of the loops' time) and `host_share` (of all) are read.
    """
    host = metrics.get("host_share", 0.0)
    waited = metrics.get("input_wait", 0.0) * (1.0 - host)
    shares = {"step": 1.0 - host - waited, "input": waited, "host": host}
    which = max(shares, key=lambda name: shares[name])
    return which, shares[which]


def show_share(share: float) -> str:
    """Writes a share in percent."""
    return f"{100 * share:.0f} %"


def show_secs(secs: float) -> str:
    """Writes a time as hours, minutes and seconds."""
    whole = round(secs)
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"

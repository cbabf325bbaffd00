"""Timing: systems take turns of about the same length, and ratios are taken within a round."""

import random
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any


class System:
    """A training system that takes turns with others.

    Attributes:
        call: trains for a number of steps; the next call continues.
        least: the system trains for multiples of this many steps.
        clock: returns seconds.
    """

    least = 1
    clock = staticmethod(time.perf_counter)

    def __init__(self, call: Callable[[int], object]):
        self.call = call

    def steps_secs(self, steps: int) -> float:
        """Trains, and returns the seconds that the steps took, without the start and end of the call."""
        start = self.clock()
        self.call(steps)
        return self.clock() - start

    def first_step(self, done: Callable[[], None]) -> None:
        """Trains for one step, then calls `done`."""
        self.call(1)
        done()


def timed(fn: Callable, *args: object) -> float:
    start = time.perf_counter()
    fn(*args)
    return time.perf_counter() - start


def take_turns(
    systems: Mapping[Any, System], rounds: int, turn_secs: float, agree: Callable[[float], float]
) -> dict[Any, list[float]]:
    """Times the steps of systems in turns.

    Args:
        systems: by name.
        rounds: turns per system.
        turn_secs: approximate seconds per turn.
        agree: returns the same number on all workers, from one number of each.

    Returns:
        Seconds per step in each round, by system.
    """
    steps = {name: _steps_in(system, turn_secs, agree) for name, system in systems.items()}
    times: dict[Any, list[float]] = {name: [] for name in systems}
    draw = random.Random(0)  # the same on all workers
    for _ in range(rounds):
        # In random order, because threads of one system may still be busy in the next one's turn.
        for name, system in draw.sample(list(systems.items()), len(systems)):
            times[name].append(system.steps_secs(steps[name]) / steps[name])
    return times


def _steps_in(system: System, secs: float, agree: Callable[[float], float]) -> int:
    """Returns how many steps take `secs`; warms up caches and threads meanwhile."""
    system.call(2)  # traces
    steps, taken = system.least, agree(system.steps_secs(system.least))
    while taken < secs / 4:
        steps *= 2 if taken > secs / 16 else 4
        taken = agree(system.steps_secs(steps))
    return max(1, round(steps * secs / taken / system.least)) * system.least


def median_ratio(times: Mapping[str, list[float]], name: str, base: str) -> float | None:
    """Returns the median over the rounds of one system's time over another's; None if either was not measured."""
    if name not in times or base not in times:
        return None
    return statistics.median(a / b for a, b in zip(times[name], times[base], strict=True))

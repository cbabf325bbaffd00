"""How times are taken: systems take turns, each turn lasts about as long, and ratios are taken within a round."""

import random
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any


class System:
    """A way to train: one of those that take turns.

    Attributes:
        call: trains for some steps, as one call of the system; the second call goes on where the first ended.
        least: it trains for a multiple of so many steps, however many are asked for.
    """

    least = 1

    def __init__(self, call: Callable[[int], object]):
        self.call = call

    def steps_secs(self, steps: int) -> float:
        """Trains, and returns how long that many steps took without the start and the end of the call."""
        return timed(self.call, steps)

    def first_step(self, done: Callable[[], None]) -> None:
        """Trains for one step, and tells when it has ended."""
        self.call(1)
        done()


def timed(fn: Callable, *args: object) -> float:
    start = time.perf_counter()
    fn(*args)
    return time.perf_counter() - start


def take_turns(
    systems: Mapping[Any, System], rounds: int, turn_secs: float, agree: Callable[[float], float]
) -> dict[Any, list[float]]:
    """Times the steps of systems by turns.

    Args:
        systems: by name.
        rounds: turns that each one gets.
        turn_secs: how long a turn lasts, about.
        agree: makes one number of those that the workers have.

    Returns:
        Seconds of a step in each round, by system.
    """
    steps = {name: _steps_in(system, turn_secs, agree) for name, system in systems.items()}
    times: dict[Any, list[float]] = {name: [] for name in systems}
    draw = random.Random(0)  # alike on all workers
    for _ in range(rounds):
        # In an order of its own: threads of one system may still be busy in the next one's turn.
        for name, system in draw.sample(list(systems.items()), len(systems)):
            times[name].append(system.steps_secs(steps[name]) / steps[name])
    return times


def _steps_in(system: System, secs: float, agree: Callable[[float], float]) -> int:
    """Finds how many steps last so long; lets caches and threads settle meanwhile."""
    system.call(2)  # traces
    steps, taken = system.least, agree(system.steps_secs(system.least))
    while taken < secs / 4:
        steps *= 2 if taken > secs / 16 else 4
        taken = agree(system.steps_secs(steps))
    return max(1, round(steps * secs / taken / system.least)) * system.least


def median_ratio(times: Mapping[str, list[float]], name: str, base: str) -> float | None:
    """Returns the median over the rounds of one system's time over another's; None if one of them has none."""
    if name not in times or base not in times:
        return None
    return statistics.median(a / b for a, b in zip(times[name], times[base], strict=True))

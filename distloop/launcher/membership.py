"""Membership: decides how many workers start next, and when; no processes, clocks or sockets.

    plan = MembershipPlan(least=1, most=3)
    plan.size(now)                              # 3
    plan = plan.lose([1], now)                  # the place of a worker that fell is empty for a second
    plan.size(now), plan.grows_at(2)            # 2, now + 1

A membership is a set of workers that start together, with one number. A place is where one of them runs. It does not
know how workers start or end (`processes`), nor what they tell (`notes`).
"""

import dataclasses
import math
from collections.abc import Sequence

_FIRST_PAUSE_SECS, _LAST_PAUSE_SECS = 1.0, 60.0  # what broke may need time; doubled at each fall of a place
_LASTING_SECS = 600.0  # that a worker ran, after which the next pause of its place is the first one again


@dataclasses.dataclass(frozen=True)
class MembershipPlan:
    """The places of a run and how often it was started again; immutable.

    Attributes:
        least: workers without which the run waits.
        most: the number of places, of which some may be empty for a time.
        sizes: numbers of workers that the run says it can have; empty: any.
        back_at: when each place was or is there again, in seconds on a monotonic clock.
        pauses: how long each place is empty after its next fall, in seconds.
        step: the latest from which a membership went on; -1: none has trained.
        restarts: crashes since the first one that went on from there.
        start_secs: how long workers took to start, the last time that they came to train.
    """

    least: int
    most: int
    sizes: tuple[int, ...] = ()
    back_at: tuple[float, ...] = ()
    pauses: tuple[float, ...] = ()
    step: int = -1
    restarts: int = 0
    start_secs: float = 0.0

    def __post_init__(self) -> None:
        if not self.back_at:
            object.__setattr__(self, "back_at", (-math.inf,) * self.most)
            object.__setattr__(self, "pauses", (_FIRST_PAUSE_SECS,) * self.most)

    @property
    def allowed(self) -> list[int]:
        """The numbers of workers that the run can have, in ascending order."""
        return [n for n in range(self.least, self.most + 1) if not self.sizes or n in self.sizes]

    @property
    def soon_secs(self) -> float:
        """How long a place may still be empty that counts as there: in an elastic run, as long as workers start.

        To take it in later would cost another start. After a second crash without a newer checkpoint it is 0, as what
        broke may stay broken.
        """
        return self.start_secs if self.least < self.most and self.restarts <= 1 else 0.0

    def there(self, now: float) -> list[int]:
        """Returns the places that are there, or soon."""
        return [place for place, back_at in enumerate(self.back_at) if back_at - self.soon_secs <= now]

    def size(self, now: float) -> int:
        """Returns the number of workers to start; 0 if there are too few places."""
        return max((n for n in self.allowed if n <= len(self.there(now))), default=0)

    def grows_at(self, size: int) -> float:
        """Returns when there are places for more workers than `size`; inf: never."""
        more = next((n for n in self.allowed if n > size), None)
        return math.inf if more is None else sorted(self.back_at)[more - 1]

    def starts_at(self) -> float:
        """Returns when the next membership can start; inf: never."""
        return self.grows_at(0) - self.soon_secs

    def lose(self, places: Sequence[int], now: float) -> "MembershipPlan":
        """Returns the plan after workers have fallen, whose places are empty for a time."""
        back_at, pauses = list(self.back_at), list(self.pauses)
        for place in places:
            if now - back_at[place] > _LASTING_SECS:
                pauses[place] = _FIRST_PAUSE_SECS
            back_at[place] = now + pauses[place]
            pauses[place] = min(2 * pauses[place], _LAST_PAUSE_SECS)
        return dataclasses.replace(self, back_at=tuple(back_at), pauses=tuple(pauses))

    def begin(self, step: int | None, start_secs: float = 0.0) -> "MembershipPlan":
        """Returns the plan once a membership went on from a step; None: it did not come so far."""
        if step is None:
            return self
        plan = dataclasses.replace(self, start_secs=start_secs or self.start_secs)
        return dataclasses.replace(plan, step=step, restarts=0) if step > self.step else plan

    def crash(self) -> "MembershipPlan":
        """Returns the plan after a crash."""
        return dataclasses.replace(self, restarts=self.restarts + 1)

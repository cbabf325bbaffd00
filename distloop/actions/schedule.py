"""Schedule: the steps at which an action, an evaluation or a save is due; without TensorFlow.

Every worker computes the same boundaries without communication:

    step = 0
    while step < until:
        step = next_boundary(step, until, [100, 500])      # 100, 200, ..., 500, ...

A `Plan` knows durations with other units, too. What is due by time is due at the end of the next step, on all workers,
as they agree on the time between two loops.
"""

import math
from collections.abc import Iterable, Sequence

from distloop.settings.durations import Period, Units


class Plan:
    """When the actions of a run are due, by steps or by the chief's clock.

    Attributes:
        units: of the run's durations.
        due_secs: the periods in seconds that are due at the end of the next step.
        last_step: the one that the run ends with; inf: not known yet, as it ends by time, with the step after that.
        is_chief: whether this worker calls what the chief alone calls.
    """

    def __init__(self, units: Units | None = None, *, is_chief: bool = True):
        """Stores the units.

        Args:
            units: None: durations are in steps or in time.
            is_chief: whether this worker is the chief.
        """
        self.units = units or Units()
        self.is_chief = is_chief
        self.due_secs: set[float] = set()
        self.last_step = math.inf
        self._periods: dict[int | str, Period] = {}

    def check(self, everys: Iterable[int | str | None]) -> None:
        """Checks the durations of a run before its first step.

        Raises:
            ValueError: if the size of a unit is not known.
        """
        for every in everys:
            if every is not None:
                self.period(every)

    def period(self, every: int | str) -> Period:
        """Returns a duration in steps or seconds.

        Raises:
            ValueError: as for `Units.period`.
        """
        if every not in self._periods:
            self._periods[every] = self.units.period(every)
        return self._periods[every]

    def is_due(self, every: int | str | None, step: int, until: float) -> bool:
        """Returns True if something is due at `step`, the end of a loop of a run that ends at `until`; None: always."""
        if every is None:
            return True
        period = self.period(every)
        return is_due(step, period.steps, until) or period.secs in self.due_secs

    def next_boundary(
        self, step: int, until: float, everys: Iterable[int | str | None], steps_per_loop: int = 0
    ) -> float:
        """Returns the next step at which a compiled loop has to end, as the function of the same name."""
        if self.due_secs:
            return step + 1
        periods = [self.period(every).steps for every in everys if every is not None]
        return next_boundary(step, until, periods, steps_per_loop)

    def look_at_clock(self, before: float, now: float, everys: Sequence[int | str | None], step: int) -> None:
        """Notes what is due by time.

        Args:
            before: the seconds that the run had trained when this was called before, by the chief's clock.
            now: the seconds that it has trained now.
            everys: the durations that may be due.
            step: the number of steps done.
        """
        periods = {self.period(every).secs for every in everys if every is not None} - {0.0}
        self.due_secs = {secs for secs in periods if before // secs < now // secs}
        if now >= (self.units.run.secs or math.inf):
            self.last_step = step + 1


def next_boundary(step: int, until: float, everys: Iterable[int | None], steps_per_loop: int = 0) -> float:
    """Returns the next step at which a compiled loop has to end: the smallest boundary after `step`, at most `until`.

    Args:
        step: number of steps done.
        until: the last step of the run, inf if it is not known; `until > step`.
        everys: periods in steps; 0 and None cause no boundary.
        steps_per_loop: the most steps up to the boundary; 0: no limit.
    """
    assert until > step, (step, until)
    boundary = min([until] + [step - step % every + every for every in everys if every])
    return min(boundary, step + steps_per_loop) if steps_per_loop else boundary


def is_due(step: int, every: int | None, until: float) -> bool:
    """Returns True if something with period `every` (steps) is due at `step`; at the end, `until`, everything is."""
    return step >= until or bool(every and step % every == 0)

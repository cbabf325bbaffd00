"""Durations such as `500`, `2 epochs`, `10 min`, and the steps at which something is due; without TensorFlow.

parse(500), parse("500 steps")                  # Duration(500.0, "steps")
units = Units(steps_per_epoch=lambda: 40, examples_per_step=lambda: 64, run=Period(steps=2_000))
units.period("2 epochs")                        # Period(steps=80)
units.period("10 min")                          # Period(secs=600.0)
units.period("1e9 tokens")                      # Period(tokens=1e9)
units.period("25 %")                            # Period(steps=500), of the run
Plan(units).next_boundary(0, 2_000, [100, "2 epochs"])      # 80

Every worker computes the same boundaries without communication. What is due by time is due at the end of the next step,
on all workers, as they agree on the time between two loops. Tokens are the weights of the loss, known after each step.
"""

import copy
import functools
import math
import numbers
import os
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from distloop.log import shown

ALLOWED = (
    "a number of steps, or a text with a unit, such as '500 steps', '2 epochs', '1e6 examples', '1e9 tokens', '90 s', "
    "'15 min', '2 h' or '25 %' of the run"
)

# What a setting takes, by its type, or by its name.
ALLOWED_OF: dict[Any, str] = {str: "a string", bool: "True or False", int | str: ALLOWED}
ALLOWED_OF[Sequence[int] | str] = "whole numbers of 1 or more, one for each replica, as in [3, 1] or '3,1'"
ALLOWED_OF["evaluate"] = "'newest', 'best' or the step of a checkpoint as a string, such as '500'"

MOST_STEPS = 2**63  # above what TensorFlow counts in an int64

_SECS = {"s": 1.0, "min": 60.0, "h": 3600.0}
_COUNTS = {"": "steps", "%": "%"} | {
    unit[: len(unit) - s]: unit for unit in ("steps", "epochs", "examples", "tokens") for s in (0, 1)
}
_RATIOS = re.compile(r"([1-9][0-9]{0,8}(,[1-9][0-9]{0,8})*)?")
_FORM = re.compile(r"\s*(\d+(?:\.\d*)?(?:e\d+)?)\s*([a-z%]*)\s*")


class Duration(NamedTuple):
    """An amount of a unit, which is "steps", "epochs", "examples", "tokens", "secs" or "%" (of the run)."""

    amount: float
    unit: str


class Period(NamedTuple):
    """Steps, seconds or tokens; all are 0 for what is due only at the end."""

    steps: int = 0
    secs: float = 0.0
    tokens: float = 0.0

    @property
    def last_step(self) -> float:
        """The step that a run of this length ends with; inf: it ends by time or tokens."""
        return self.steps or math.inf

    def is_over(self, step: int, secs: float, tokens: float = 0.0) -> bool:
        """Returns whether so many steps, seconds or tokens are the whole of it."""
        return step >= self.last_step or 0 < self.secs <= secs or 0 < self.tokens <= tokens


class Units:
    """What the units of durations are in steps, for one run on one dataset.

    Attributes:
        run: the length of the whole run, of which percents are taken.
        run_unit: the unit that it was given in.
    """

    def __init__(
        self,
        steps_per_epoch: Callable[[], int] | None = None,
        examples_per_step: Callable[[], int] | None = None,
        run: Period = Period(),  # noqa: B008 - immutable
        run_unit: str = "steps",
    ):
        """Stores functions that return sizes, each called when a duration has its unit; None: it is not known."""
        sizes = {"epochs": steps_per_epoch, "examples": examples_per_step}
        self._sizes = {unit: functools.cache(size) for unit, size in sizes.items() if size is not None}
        self.run, self.run_unit = run, run_unit

    def of(self, run: Period) -> "Units":
        """Returns the same units with percents of another length."""
        units = copy.copy(self)
        units.run = run
        return units

    def period(self, value: int | str) -> Period:
        """Returns a duration in whole steps, rounded up, in seconds or in tokens; "auto": an epoch in a run of those.

        Raises:
            ValueError: if it is no duration, or the size of its unit is not known.
        """
        if value == "auto":
            value = "1 epoch" if self.run_unit == "epochs" else 0
        amount, unit = parse(value)
        if unit == "%":
            if amount and not any(self.run):
                raise ValueError(f"The duration {value!r} was given where a run's length is not known: give steps.")
            fraction = amount / 100
            return Period(_round_up(fraction * self.run.steps), fraction * self.run.secs, fraction * self.run.tokens)
        if unit in ("secs", "tokens"):
            return Period(secs=amount) if unit == "secs" else Period(tokens=amount)
        return Period(steps=_round_up(amount * self._steps_per(unit, value)) if amount else 0)

    def _steps_per(self, unit: str, value: Any) -> float:
        if unit == "steps":
            return 1.0
        if unit not in self._sizes:
            raise ValueError(f"The duration {value!r} was given where no dataset is known: give steps.")
        size = self._sizes[unit]()
        return size if unit == "epochs" else 1 / size


class Plan:
    """When the actions of a run are due, by steps or by the chief's clock.

    Attributes:
        units: of the run's durations.
        due_secs: the periods in seconds that are due at the end of the next step.
        due_tokens: the periods in tokens that are due at the step that was counted last.
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
        self.due_tokens: set[float] = set()
        self._periods: dict[int | str, Period] = {}

    @property
    def counts_tokens(self) -> bool:
        """Whether anything is due by tokens, so that each step is a loop of its own."""
        return self.units.run.tokens > 0 or any(period.tokens for period in self._periods.values())

    def set_due(self, secs: Iterable[float] = (), tokens: Iterable[float] = ()) -> None:
        """Sets what is due by time and tokens, as it was at a boundary that was left open."""
        self.due_secs, self.due_tokens = set(secs), set(tokens)

    def count_tokens(self, before: float, now: float) -> bool:
        """Notes what is due at a step that raised the tokens of the run; returns whether the run ends with it."""
        periods = {period.tokens for period in self._periods.values()} - {0.0}
        self.due_tokens = {tokens for tokens in periods if before // tokens < now // tokens}
        return now >= (self.units.run.tokens or math.inf)

    def period(self, every: int | str) -> Period:
        """Returns a duration in steps, seconds or tokens.

        Raises:
            ValueError: as for `Units.period`.
        """
        if every not in self._periods:
            self._periods[every] = self.units.period(every)
        return self._periods[every]

    def is_due(self, every: int | str | None, step: int, until: float) -> bool:
        """Returns True if something is due at `step`, the end of a loop of a run that ends at `until`; None: always."""
        if every is None or step >= until:
            return True
        period = self.period(every)
        is_due = period.secs in self.due_secs or period.tokens in self.due_tokens
        return is_due or bool(period.steps and step % period.steps == 0)

    def next_boundary(
        self, step: int, until: float, everys: Iterable[int | str | None], steps_per_loop: int = 0
    ) -> float:
        """Returns the next step at which a compiled loop has to end: the first after `step`, at most `until`.

        Args:
            step: number of steps done.
            until: the last step of the run, inf if it is not known; `until > step`.
            everys: durations; 0 and None cause no boundary.
            steps_per_loop: the most steps up to the boundary; 0: no limit.
        """
        assert until > step, (step, until)
        if self.due_secs or self.counts_tokens:
            return step + 1
        periods = [self.period(every).steps for every in everys if every is not None]
        boundary = min([until] + [step - step % steps + steps for steps in periods if steps])
        return min(boundary, step + steps_per_loop) if steps_per_loop else boundary

    def check_clock(self, before: float, now: float, everys: Sequence[int | str | None]) -> bool:
        """Notes what is due by time; returns whether the run ends with the next step.

        Args:
            before: the seconds that the run had trained when this was called before, by the chief's clock.
            now: the seconds that it has trained now.
            everys: the durations that may be due.
        """
        periods = {self.period(every).secs for every in everys if every is not None} - {0.0}
        self.due_secs = {secs for secs in periods if before // secs < now // secs}
        return now >= (self.units.run.secs or math.inf)


def parse(value: int | str) -> Duration:
    """Returns a duration from a number of steps, or a text: `"500"`, `"500 steps"`, `"2 epochs"`, `"10 min"`, `"25 %"`.

    Raises:
        ValueError: for anything else.
    """
    steps = whole_number(value)
    if steps is not None and steps >= 0:
        return Duration(float(steps), "steps")
    match = _FORM.fullmatch(value) if isinstance(value, str) else None
    if match and (number := float(match[1])) < MOST_STEPS:
        unit = match[2]
        if unit in _SECS:
            return Duration(number * _SECS[unit], "secs")
        name = _COUNTS.get(unit)
        if name is not None and (name != "steps" or number.is_integer()):
            return Duration(number, name)
    raise ValueError(f"The duration {shown(value)} was given: give {ALLOWED}.")


def normalize(value: Any) -> int | str | None:
    """Returns a duration as settings hold it: a number of steps, or a text with another unit; None if it is none."""
    try:
        amount, unit = parse(value)
    except ValueError:
        return None
    return whole_number(value) or int(amount) if unit == "steps" or not amount else str(value)


def as_until(name: str, value: Any) -> str:
    """Returns the argument that a value of `steps` or `epochs` fits, as in `until='2 epochs'`; empty: there is none."""
    if name not in ("steps", "epochs"):
        return ""
    length = normalize(value if isinstance(value, str) else f"{shown(value)} {name}")
    return f"until={length!r}" if isinstance(length, str) and "%" not in length else ""


def whole_number(value: Any) -> int | None:
    """Returns a whole number, which may be a float or NumPy's, as an int; None if it is none, or counts no steps."""
    number = finite_number(value)
    return int(value) if number is not None and number.is_integer() and abs(number) < MOST_STEPS else None


def require_integer(owner: str, least: int, also: str = "", **arguments: Any) -> None:
    """Raises a ValueError for an argument that is no whole number of Python's or NumPy's, or less than `least`."""
    for name, value in arguments.items():
        if not isinstance(value, numbers.Integral) or whole_number(value) is None or value < least:
            raise ValueError(f"{owner} was given {name}={shown(value)}; give {also}a whole number, {least} or more.")


def finite_number(value: Any) -> float | None:
    """Returns a number as a float; None if it is none, or not finite as a float."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return None
    try:
        number = float(value)
    except (OverflowError, ValueError):  # 10**400; a NaN of `decimal`
        return None
    return number if math.isfinite(number) else None


def _round_up(steps: float) -> int:
    """Returns a number of steps rounded up, but for the last bits of the arithmetic."""
    if not steps < MOST_STEPS:
        raise ValueError(f"A duration of {steps:g} steps was given; a run has fewer than {MOST_STEPS:g}: give less.")
    return math.ceil(steps * (1 - 1e-12))


def profile_window(text: str) -> tuple[int, int]:
    """Returns the steps done when the profile of `Config.profile` begins and when it ends; 0 and 0: there is none.

    Raises:
        ValueError: if the text is not two numbers, the smaller one first.
    """
    if not text:
        return 0, 0
    match = re.fullmatch(r"(\d{1,18}):(\d{1,18})", text)
    if not match or int(match[1]) >= int(match[2]):
        raise ValueError(
            f"profile={shown(text)} is not allowed: give two whole numbers, the smaller one first, as in "
            "profile=100:110 for the steps after 100, up to 110."
        )
    return int(match[1]), int(match[2])


def converted(kind: Any, value: Any) -> Any:
    """Returns a setting's value as its type, or None if the conversion would be a guess."""
    if kind == int | str:
        return normalize(value)
    if kind == Sequence[int] | str:
        text = ",".join(map(str, value)) if isinstance(value, list | tuple) or getattr(value, "ndim", 0) == 1 else value
        return text if isinstance(text, str) and _RATIOS.fullmatch(text) else None
    if kind is bool or isinstance(value, bool):
        return value if kind is bool and isinstance(value, bool) else None
    if kind is str:
        return os.fspath(value) if isinstance(value, str | os.PathLike) else None
    return finite_number(value) if kind is float else whole_number(value)

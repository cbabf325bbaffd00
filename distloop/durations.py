"""Durations: how often something is due, as a number of steps or a text with a unit; without TensorFlow.

    parse(500), parse("500 steps")      # Duration(steps=500)
    parse("10 min")                     # Duration(secs=600.0)

It does not know what is due, nor the time.
"""

import numbers
import re
from typing import Any, NamedTuple

ALLOWED = "a number of steps, or a time such as '90 s', '10 min' or '2 h'"

_SECS = {"s": 1.0, "min": 60.0, "h": 3600.0}
_FORM = re.compile(r"\s*(\d+(?:\.\d*)?(?:e\d+)?)\s*([a-z]*)\s*")


class Duration(NamedTuple):
    """Steps or seconds; both are 0 for what is due only at the end."""

    steps: int = 0
    secs: float = 0.0


def parse(value: int | str) -> Duration:
    """Returns a duration from a number of steps, or a text: `"500"`, `"500 steps"`, `"90 s"`, `"10 min"`, `"2 h"`.

    Raises:
        ValueError: for anything else.
    """
    match = _FORM.fullmatch(str(value))
    number, unit = (float(match[1]), match[2]) if match else (-1.0, "")
    if number >= 0 and unit in ("", "step", "steps") and number == int(number):
        return Duration(steps=int(number))
    if number >= 0 and unit in _SECS:
        return Duration(secs=number * _SECS[unit])
    raise ValueError(f"The duration {value!r} was given: give {ALLOWED}.")


def normalize(value: Any) -> int | str | None:
    """Returns a duration as settings hold it: a number of steps, or a text with a time; None if it is none."""
    if isinstance(value, bool) or not isinstance(value, str | numbers.Real):
        return None
    try:
        duration = parse(str(value))
    except ValueError:
        return None
    return str(value) if duration.secs else duration.steps

"""The report of an audit: its findings, and the properties that it could not check."""

import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import tensorflow as tf

from distloop.errors import as_user_error, user_line

_NUM_NAMES = 3  # in a line


class Finding(NamedTuple):
    """A mistake in the user's code or data.

    Attributes:
        what: its kind, as in "identical random numbers".
        name: of the culprit: a value, a variable, a layer, or an operation with its line.
        hint: what to do.
    """

    what: str
    name: str
    hint: str

    def __str__(self) -> str:
        return _line([self])


def failure(error: Exception) -> Finding:
    """Returns the finding of an error that the user's code or data raised."""
    if isinstance(error, tf.errors.OpError):
        error = as_user_error(error) or error
    line = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
    where = user_line(traceback.extract_tb(error.__traceback__)) or type(error).__name__
    return Finding("stops with an error", where, line.strip().rstrip("."))


class Unchecked(NamedTuple):
    """A property that could not be checked.

    Attributes:
        what: the property, and why.
    """

    what: str


@dataclass(frozen=True)
class Audit:
    """The result of an audit; printed, a line for each kind of finding and hint, with the first few names.

    Attributes:
        findings: empty if nothing is wrong.
        unchecked: what could not be checked, and why.
    """

    findings: tuple[Finding, ...]
    unchecked: tuple[str, ...] = ()

    def __str__(self) -> str:
        alike: dict[tuple[str, str], list[Finding]] = {}
        for finding in self.findings:
            alike.setdefault((finding.what, finding.hint), []).append(finding)
        lines = [_line(findings) for findings in alike.values()] or ["nothing found."]
        return "\n".join([*lines, *(f"not checked: {text}." for text in self.unchecked)])


def _line(findings: Sequence[Finding]) -> str:
    """Returns the line about findings that differ in their names alone."""
    names = [finding.name for finding in findings[:_NUM_NAMES]]
    more = f" and {len(findings) - _NUM_NAMES} more" if len(findings) > _NUM_NAMES else ""
    return f"{findings[0].what}: {', '.join(names)}{more}: {findings[0].hint}."

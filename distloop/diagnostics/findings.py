"""The report of an audit: its findings, and the properties that it could not check."""

from dataclasses import dataclass
from typing import NamedTuple


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
        return f"{self.what}: {self.name}: {self.hint}."


class Unchecked(NamedTuple):
    """A property that could not be checked.

    Attributes:
        what: the property, and why.
    """

    what: str


@dataclass(frozen=True)
class Audit:
    """The result of an audit; printed, a line for each finding.

    Attributes:
        findings: empty if nothing is wrong.
        unchecked: what could not be checked, and why.
    """

    findings: tuple[Finding, ...]
    unchecked: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [*map(str, self.findings)] or ["nothing found."]
        return "\n".join([*lines, *(f"not checked: {text}." for text in self.unchecked)])

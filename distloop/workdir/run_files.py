"""Run files: the measurements of a metric in a run, which of two is better, and what its checkpoints record.

    series = Series("test/accuracy", [100, 200], [0.91, 0.97])
    series.best                         # (0.97, 200)
    manifests_of("runs/digits")         # {100: {"step": 100, "notes": {...}, ...}, ...}

TensorFlow is not imported.
"""

import contextlib
import functools
import math
import os
import re
from dataclasses import dataclass
from typing import Any

from distloop.workdir import records

# Words in a metric's name that say whether smaller or larger is better; the last one in a name counts.
_SMALLER = "loss|error|mae|mse|rmse|nll|perplexity|crossentropy|cross_entropy"
_LARGER = r"accuracy|acc|auc|precision|recall|f1(?!\d)|r2(?!\d)|iou|bleu"
_KNOWN = re.compile(rf"(?<![a-z])(?:(?P<smaller>{_SMALLER})|(?P<larger>{_LARGER}))(?![a-z])")


def better(name: str) -> str | None:
    """Returns whether "smaller" or "larger" is better, by the metric's name; None: unknown."""
    words = [match.lastgroup for match in _KNOWN.finditer(name.lower())]
    return words[-1] if words else None


@dataclass(frozen=True)
class Series:
    """The measurements of one metric in a run.

    Attributes:
        name: name of the metric.
        steps: the steps where it was measured, in order.
        values: one value per step; nan if it was not finite.
    """

    name: str
    steps: list[int]
    values: list[float]

    @property
    def last(self) -> float:
        """The last value."""
        return self.values[-1]

    @functools.cached_property
    def finite(self) -> list[float]:
        """The finite values."""
        return [value for value in self.values if math.isfinite(value)]

    @property
    def least(self) -> float:
        """The least finite value; nan if there is none."""
        return min(self.finite, default=math.nan)

    @property
    def largest(self) -> float:
        """The largest finite value; nan if there is none."""
        return max(self.finite, default=math.nan)

    @property
    def best(self) -> tuple[float, int] | None:
        """The best value and its first step; None if the name does not say what is better."""
        direction = better(self.name)
        if direction is None or not self.finite:
            return None
        value = self.least if direction == "smaller" else self.largest
        return value, self.steps[self.values.index(value)]


def manifests_of(path: str) -> dict[int, Any]:
    """Returns the manifest of each checkpoint by step; one that cannot be read is named in the log and left out."""
    folder, found = os.path.join(path, "checkpoints"), {}
    for name in os.listdir(folder) if os.path.isdir(folder) else ():
        file = os.path.join(folder, name, "manifest.json")
        if name.isdecimal() and (read := records.read_json(file, _as_manifest, instead="it is left out")):
            found[int(name)] = read
    return found


def _as_manifest(value: Any) -> dict[str, Any]:
    """Returns a manifest whose metadata may be read."""
    metadata = records.as_object(value["notes"])
    for name in ("versions", "input"):
        records.as_object(metadata.get(name, {}))
    return records.as_object(value)


def program_of(path: str) -> str:
    """Returns the command of a run without its flags, as `flags.txt` begins; empty: it does not say."""
    with contextlib.suppress(OSError, ValueError), open(os.path.join(path, "flags.txt"), encoding="utf-8") as file:
        line = file.readline().strip()
        return line.removeprefix("# ") if line.startswith("# python") else ""
    return ""

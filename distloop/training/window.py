"""Window of a row: sums over the steps since the last row of a run, which are divided once.

The compiled loop hands the host one row of sums for each log, and one for the steps after the last log. A `RowLayout`
names the segments of such a row, in the loop and on the host; a `Window` adds rows up and reports their means. Nothing
here knows TensorFlow.

    layout = RowLayout({"tallies": 2 * len(names), "examples": 1})
    row = tf.concat(layout.pack({"tallies": tallies, "examples": [examples]}), 0)      # in the compiled loop
    layout.unpack(rows.numpy())["examples"]                                            # on the host: [L, 1]
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from distloop.model import metrics

T = TypeVar("T")

PERCENTILES = (50, 90, 99)  # of the seconds of a step


@dataclass(frozen=True)
class RowLayout:
    """Names the segments of a row of numbers, in order.

    Attributes:
        sizes: name -> length of the segment.
    """

    sizes: Mapping[str, int]

    @property
    def width(self) -> int:
        """The length of a row."""
        return sum(self.sizes.values())

    def pack(self, segments: Mapping[str, T]) -> list[T]:
        """Returns the segments in the order of the layout, to be concatenated."""
        assert segments.keys() == self.sizes.keys(), (segments.keys(), self.sizes)
        return [segments[name] for name in self.sizes]

    def unpack(self, rows: Any) -> dict[str, Any]:
        """Returns the segments by name, `[..., size]`, of rows `[..., width]`: arrays or tensors."""
        segments, start = {}, 0
        for name, size in self.sizes.items():
            segments[name] = rows[..., start : start + size]
            start += size
        return segments


@dataclass(frozen=True)
class Row:
    """What some steps in a row did.

    Attributes:
        steps: how many there were.
        end: when the last one ended, in seconds of the monotonic clock.
        seconds: how long they took.
        tallies: `[2 * M]`: total and weight of each reported value.
        examples: how many they trained on.
        input_secs: seconds spent waiting for data; NaN: not measured, as the loop has no clock.
        numbers: name -> value at the end of the last step, such as the learning rate.
        step_secs: `[steps]`: from the beginning of each step to that of the next one; empty: not measured.
        replica_secs: `[R]`: forward and backward pass on each replica, summed over the steps; empty for one replica.
        host_secs: time between the loop before and this one; 0 but in the first row of a loop.
        diagnosis: what `TrainStep.explain` needs if the last step failed; None: it did not.
    """

    steps: int
    end: float
    seconds: float
    tallies: np.ndarray
    examples: float
    input_secs: float
    numbers: dict[str, float]
    step_secs: np.ndarray
    replica_secs: np.ndarray
    host_secs: float = 0.0
    diagnosis: np.ndarray | None = None


class Window:
    """Sums since the last row of the run.

    Attributes:
        steps: how many steps they cover.
        seconds: how long these took.
        examples_seen: how many examples the run has trained on since its step 0; None: unknown.
    """

    def __init__(self, saved: Mapping[str, Any] | None = None, examples_seen: float | None = 0.0) -> None:
        """Opens a window.

        Args:
            saved: what `save` returned, to go on with; None: an empty window.
            examples_seen: before an empty window.
        """
        saved = saved or {"sums": [], "steps": 0, "seconds": 0.0, "examples_seen": examples_seen}
        self.steps: int = saved["steps"]
        self.seconds: float = saved["seconds"]
        self.examples_seen: float | None = saved.get("examples_seen")  # older checkpoints have none
        self._sums = np.array(saved["sums"])  # [2 * M + 2]: tallies, examples, seconds waited for data
        self._numbers: dict[str, float] = {}
        self._host_secs = 0.0
        self._step_secs: list[np.ndarray] = []
        self._replica_secs: Any = 0.0

    def save(self) -> dict[str, Any]:
        """Returns the sums as JSON can hold them, for a checkpoint."""
        sums = {"sums": self._sums.tolist(), "steps": self.steps, "seconds": self.seconds}
        return {**sums, "examples_seen": self.examples_seen}

    def add(self, row: Row) -> None:
        """Adds what some steps did."""
        sums = np.concatenate([row.tallies, [row.examples, row.input_secs]])
        if self._sums.shape != sums.shape:  # empty, or saved when loss_fn returned other values
            self._sums, self.steps, self.seconds, self._host_secs = np.zeros_like(sums), 0, 0.0, 0.0
        self._sums = self._sums + sums
        self.steps += row.steps
        if self.examples_seen is not None:
            self.examples_seen += float(row.examples)
        self.seconds += row.seconds
        self._host_secs += row.host_secs
        self._numbers = row.numbers
        self._step_secs.append(row.step_secs)
        self._replica_secs = self._replica_secs + row.replica_secs

    def metrics(self, names: Sequence[str], per_token: Sequence[str] = ()) -> dict[str, float]:
        """Returns means, rates and percentiles by name.

        Args:
            names: M names of the values in the tallies.
            per_token: the names of losses whose weight counts tokens.
        """
        *tallies, examples, input_secs = self._sums
        numbers = metrics.means(names, np.array(tallies)) | self._numbers
        numbers["steps_per_sec"] = self.steps / self.seconds
        numbers["examples_per_sec"] = float(examples) / self.seconds
        for name in per_token:
            weight = tallies[2 * names.index(name) + 1]
            numbers[f"{name.removesuffix('loss')}tokens_per_sec"] = float(weight) / self.seconds
        if self.examples_seen is not None:
            numbers["examples_seen"] = self.examples_seen
        if not math.isnan(input_secs):
            numbers["input_wait"] = min(1.0, float(input_secs) / self.seconds)
        numbers["host_share"] = self._host_secs / (self._host_secs + self.seconds)
        step_secs = np.sort(np.concatenate(self._step_secs))
        # The smallest duration that so many percent of the steps do not exceed.
        for percent in PERCENTILES if len(step_secs) else ():
            numbers[f"step_secs_p{percent}"] = float(step_secs[-(-percent * len(step_secs) // 100) - 1])
        if np.size(self._replica_secs) > 1:
            numbers["replica_imbalance"] = float(np.max(self._replica_secs) / np.mean(self._replica_secs)) - 1.0
        return numbers

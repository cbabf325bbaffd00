"""Window of a row: how far a run has come, with sums over the steps since its last row, which are divided once.

The compiled loop hands the host one row of sums for each log, and one for the steps after the last log. A `RowLayout`
names the segments of such a row, in the loop and on the host; a `Window` adds rows up and reports their means. Nothing
here knows TensorFlow. All are values: the loop puts the next one in the place of the last.

    layout = RowLayout({"tallies": 2 * len(names), "examples": 1})
    row = tf.concat(layout.pack({"tallies": tallies, "examples": [examples]}), 0)      # in the compiled loop
    layout.unpack(rows.numpy())["examples"]                                            # on the host: [L, 1]
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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

    def pack(self, segments: Mapping[str, T]) -> list[T]:
        """Returns the segments in the order of the layout, to be concatenated."""
        assert segments.keys() == self.sizes.keys(), (segments.keys(), self.sizes)
        return [segments[name] for name in self.sizes]

    def unpack(self, rows: Any) -> dict[str, Any]:
        """Returns the segments by name, `[..., size]`, of rows `[..., width]`: arrays or tensors."""
        if len(self.sizes) == 1:  # a slice is an operation
            return dict.fromkeys(self.sizes, rows)
        ends = itertools.accumulate(self.sizes.values())
        return {name: rows[..., end - size : end] for (name, size), end in zip(self.sizes.items(), ends, strict=True)}


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
        step_secs: `[steps]`: from the end of the step before to its own, or, where steps run ahead, from its beginning
            to that of the next one; empty: not measured.
        replica_secs: `[R]`: forward and backward pass on each replica, summed over the steps; empty for one replica.
        host_secs: time between the loop before and this one; 0 but in the first row of a loop.
        diagnosis: what `TrainStep.explain` needs if the last step failed; None: it did not.
        news: a sentence for the console in the first row of a loop; empty: none.
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
    news: str = ""


@dataclass(frozen=True, kw_only=True)
class Window:
    """Sums since the last row of the run, which a checkpoint has; and what each of the loop's rows has besides.

    Attributes:
        sums: `[2 * M + 2]`: tallies, examples, seconds waited for data; empty: no step is in the window.
        steps: how many steps they cover.
        seconds: how long these took.
        examples_seen: how many examples the run has trained on since its step 0; None: unknown.
        rows: what the loop has reported in this process.
    """

    sums: Any = field(default_factory=lambda: np.zeros(0))
    steps: int = 0
    seconds: float = 0.0
    examples_seen: float | None = 0.0
    rows: tuple[Row, ...] = ()

    def save(self) -> dict[str, Any]:
        """Returns the sums as JSON can hold them, for a checkpoint."""
        sums, seen = self.sums.tolist(), self.examples_seen
        return {"sums": sums, "steps": self.steps, "seconds": self.seconds, "examples_seen": seen}

    @classmethod
    def load(cls, saved: Mapping[str, Any]) -> "Window":
        """Returns a window with the sums that `save` returned; older checkpoints have no `examples_seen`."""
        return cls(**{"examples_seen": None, **saved, "sums": np.array(saved["sums"])})

    def with_row(self, row: Row) -> "Window":
        """Returns the window with what some more steps did."""
        sums = np.concatenate([row.tallies, [row.examples, row.input_secs]])
        seen = None if self.examples_seen is None else self.examples_seen + float(row.examples)
        # Empty, or saved when loss_fn returned other values.
        before = self if self.sums.shape == sums.shape else Window(sums=np.zeros_like(sums))
        steps, seconds, rows = before.steps + row.steps, before.seconds + row.seconds, (*before.rows, row)
        return Window(sums=before.sums + sums, steps=steps, seconds=seconds, examples_seen=seen, rows=rows)

    def metrics(self, names: Sequence[str], per_token: Sequence[str] = ()) -> dict[str, float]:
        """Returns means, rates and percentiles by name.

        Args:
            names: M names of the values in the tallies.
            per_token: the names of losses whose weight counts tokens.
        """
        *tallies, examples, input_secs = self.sums
        numbers = metrics.means(names, np.array(tallies)) | self.rows[-1].numbers
        numbers["steps_per_sec"] = self.steps / self.seconds
        numbers["examples_per_sec"] = float(examples) / self.seconds
        for name in per_token:
            weight = tallies[2 * names.index(name) + 1]
            numbers[f"{name.removesuffix('loss')}tokens_per_sec"] = float(weight) / self.seconds
        if self.examples_seen is not None:
            numbers["examples_seen"] = self.examples_seen
        if not math.isnan(input_secs):
            numbers["input_wait"] = min(1.0, float(input_secs) / self.seconds)
        host_secs = sum(row.host_secs for row in self.rows)
        numbers["host_share"] = host_secs / (host_secs + self.seconds)
        step_secs = np.sort(np.concatenate([row.step_secs for row in self.rows]))
        # The smallest duration that so many percent of the steps do not exceed.
        for percent in PERCENTILES if len(step_secs) else ():
            numbers[f"step_secs_p{percent}"] = float(step_secs[-(-percent * len(step_secs) // 100) - 1])
        replica_secs = np.sum([row.replica_secs for row in self.rows], 0)
        if np.size(replica_secs) > 1:
            numbers["replica_imbalance"] = float(np.max(replica_secs) / np.mean(replica_secs)) - 1.0
        return numbers


@dataclass(frozen=True)
class OpenBoundary:
    """A boundary whose actions were interrupted, or an evaluation failed: the run calls all of them when it goes on.

    Attributes:
        metrics: of its report.
        time: of its report.
        due_secs: the periods in seconds that were due.
        due_tokens: the periods in tokens that were due; older checkpoints have none.
    """

    metrics: Mapping[str, float]
    time: float
    due_secs: Sequence[float]
    due_tokens: Sequence[float] = ()


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a run has come, besides its state and its position in the data.

    Attributes:
        step: the steps done.
        secs: how long the run has trained, by the chief's clock, with its earlier processes, at the last look at it.
        tokens: the sum of the loss's weights over all steps, with those of earlier processes; NaN: unknown.
        window: of the next row.
        reported: the numbers of the last report, by name; empty: there was none.
        open_boundary: of this step, to be called again; None: there is none.
    """

    step: int = 0
    secs: float = 0.0
    tokens: float = 0.0
    window: Window = field(default_factory=Window)
    reported: Mapping[str, float] = field(default_factory=dict)
    open_boundary: OpenBoundary | None = None

    def save(self) -> dict[str, Any]:
        """Returns what a checkpoint records besides its step, as JSON can hold it."""
        boundary = self.open_boundary and dict(vars(self.open_boundary))
        reported = {name: float(value) for name, value in self.reported.items()}
        known = {"secs": self.secs, "tokens": self.tokens, "open_boundary": boundary}
        return {"window": self.window.save(), "reported": reported, **known}

    @classmethod
    def load(cls, step: int, saved: Mapping[str, Any]) -> "Progress":
        """Returns the progress at a step from what `save` returned; older versions have saved less."""
        known = {"tokens": math.nan} | {name: saved[name] for name in ("secs", "tokens", "reported") if name in saved}
        boundary = OpenBoundary(**left) if (left := saved.get("open_boundary")) else None
        return cls(step=step, window=Window.load(saved["window"]), open_boundary=boundary, **known)

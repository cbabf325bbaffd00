"""`DataSeen`: the action that reports what a run has read of its data."""

import math

from distloop.actions.action import Action, Report
from distloop.data.source import Source


class DataSeen(Action):
    """Reports the epochs of the data and, of a mixture, the examples of each source that the run has trained on."""

    every = None
    phase = "logging"
    only_writes = True
    has_fixed_metrics = True

    def __init__(self, source: Source):
        """Stores the data to train on."""
        self._source = source

    def __call__(self, report: Report) -> dict[str, float]:
        """Returns the numbers, which follow from the position in the data; nothing is read."""
        source = self._source
        length = source.steps_per_epoch or source.info.num_batches
        numbers = {"epochs_seen": source.batches_taken / length} if length and length != math.inf else {}
        counts = {} if source.feed is None else source.feed.seen(source.batches_taken)
        return {**numbers, **{f"{name}/examples_seen": float(count) for name, count in counts.items()}}

"""`DataSeen`: the action that reports what a run has read of its data."""

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
        """Returns the numbers, which follow from the place in the data; nothing is read."""
        return self._source.seen()

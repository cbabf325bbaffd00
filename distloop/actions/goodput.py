"""`Goodput`: the action that reports what share of a run's time went to steps that count."""

import contextlib
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

from distloop.actions.action import Action, Report
from distloop.monitoring import ledger, run_starts
from distloop.monitoring.timing import unix_time

_NOTE_SECS = 1.0  # the least time between two notes


class Goodput(Action):
    """Writes `progress.json`, and reports the goodput over all starts of the run."""

    every = None
    phase = "logging"
    only_writes = True

    def __init__(
        self, workdir: str, seconds: Callable[[], Mapping[str, float]], is_chief: bool, verify: Callable[[], None]
    ):
        """Stores where to read and write.

        Args:
            workdir: of the run.
            seconds: returns the seconds of this start by phase, as `Clock.seconds`.
            is_chief: whether this worker writes.
            verify: called before a note; raises if this process may no longer write.
        """
        self._workdir, self._seconds, self._is_chief, self._verify = workdir, seconds, is_chief, verify
        self._starts: list[dict[str, Any]] = []
        self._noted_at = -math.inf

    def __call__(self, report: Report) -> dict[str, float]:
        """Returns the goodput."""
        self._starts = self._starts or run_starts.read_starts(self._workdir)
        if not self._starts:  # the disk is full
            return {}
        progress = self._progress(report.step)
        if time.monotonic() > self._noted_at + _NOTE_SECS:
            self._note(progress)
        return {"goodput": ledger.goodput(ledger.account(self._starts, progress))}

    def start_again(self, step: int) -> None:
        """Notes how far the run is before it goes back to a checkpoint, which counts as another start."""
        if self._starts:
            self._note(self._progress(step))
        self._starts = []

    def on_end(self, report: Report) -> None:
        """Notes the end."""
        self._starts = self._starts or run_starts.read_starts(self._workdir)
        if self._starts:
            self._note({**self._progress(report.step), "is_end": True})

    def _progress(self, step: int) -> dict[str, Any]:
        return {"time": unix_time(), "step": step, "secs": self._seconds()}

    def _note(self, progress: Mapping[str, Any]) -> None:
        if self._is_chief:
            self._verify()
            with contextlib.suppress(OSError):  # of a full disk, on which a run may train
                ledger.note_progress(self._workdir, **progress)
                self._noted_at = time.monotonic()

"""`StopEarly`: the action that ends a run when a metric no longer improves."""

import math
from collections.abc import Mapping
from typing import Any

from distloop.actions.action import Action, Report, StopTraining


class StopEarly(Action):
    """Ends the run when a metric has not improved for `patience` measurements."""

    every = None
    has_fixed_metrics = True

    def __init__(self, metric: str, patience: int = 3, *, mode: str = "min", min_delta: float = 0.0):
        """Stores the rule.

        Args:
            metric: name of a metric in the report, such as "test/loss"; checked whenever it was measured.
            patience: number of consecutive measurements without improvement that end the run.
            mode: "min" if smaller is better, "max" if larger is.
            min_delta: the least difference that counts as an improvement.

        Raises:
            ValueError: for another mode, or a patience below 1.
        """
        if mode not in ("min", "max"):
            raise ValueError(
                f"mode={mode!r} was given to StopEarly; say 'min' if smaller is better, 'max' if larger is."
            )
        if patience < 1:
            raise ValueError(f"patience={patience} was given to StopEarly; it waits for 1 measurement at least.")
        self.name = f"StopEarly({metric})"
        self.metric = metric
        self.patience = patience
        self.mode = mode
        self.min_delta = min_delta
        self.best = math.inf  # with mode "max" the negative of the best value
        self.waited = 0

    def get_state(self) -> dict[str, Any]:
        """Returns the best value and the number of measurements since."""
        return {"best": self.best, "waited": self.waited}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restores a state that `get_state` returned."""
        self.best, self.waited = state["best"], state["waited"]

    def __call__(self, report: Report) -> None:
        """Compares the metric with the best so far.

        Raises:
            StopTraining: when patience is over.
            ValueError: if no metric of that name is ever measured.
        """
        report.require(self.metric, "StopEarly", was_seen=self.best != math.inf or self.waited > 0)
        if self.metric not in report.metrics:
            return
        value = report.metrics[self.metric]
        cost = value if self.mode == "min" else -value
        if cost < self.best - self.min_delta:
            self.best, self.waited = cost, 0
            return
        self.waited += 1
        if self.waited >= self.patience:
            best = self.best if self.mode == "min" else -self.best
            times = "measurement" if self.waited == 1 else "measurements"
            raise StopTraining(f"{self.metric} was no better than {best:.6g} for {self.waited} {times}")

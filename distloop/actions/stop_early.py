"""`StopEarly`, which ends a run whose metric no longer improves, and `SyncStop`, which ends it on all workers."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from distloop.actions.save import SaveBest, choose_mode, refuse_positional
from distloop.distributed import collectives
from distloop.errors import require_bool
from distloop.log import shown
from distloop.settings.durations import Plan, finite_number, require_integer
from distloop.training.action import Action, Report, Saves, StopTraining
from distloop.training.boundary import StopPoint


class StopEarly(Action):
    """Ends the run when a metric has not improved for `patience` measurements."""

    every = None
    has_fixed_metrics = True

    def __init__(
        self,
        metric: str,
        *others: Any,
        mode: str = "auto",
        patience: int = 3,
        min_delta: float = 0.0,
        restore_best: bool = False,
    ):
        """Stores the rule.

        Args:
            metric: name of a metric in the report, such as "test/loss"; checked whenever it was measured.
            *others: none: what follows is given by name.
            mode: "min" if smaller is better, "max" if larger is; "auto": as the metric's name says.
            patience: number of consecutive measurements without improvement that end the run; if that goes on
                nevertheless, with more steps, they are counted anew.
            min_delta: the least difference that counts as an improvement.
            restore_best: whether to keep the best checkpoint and restore it when the run has ended, whatever ended it,
                as `SaveBest(metric, mode=mode, restore=True)` does.

        Raises:
            ValueError: for another mode, a name that does not say what is better, or a patience below 1.
        """
        refuse_positional("StopEarly", metric, others, "patience=5")
        require_integer("StopEarly", 1, patience=patience)
        if (delta := finite_number(min_delta)) is None or delta < 0:
            raise ValueError(f"min_delta={shown(min_delta)} was given to StopEarly; give a number, 0 or more.")
        require_bool("StopEarly", restore_best=restore_best)
        self.name = f"StopEarly({metric})"
        self.metric = self.required_metric = metric
        self.patience = patience
        self.mode = choose_mode("StopEarly", metric, mode)
        self.min_delta = min_delta
        self.best = math.inf  # with mode "max" the negative of the best value
        self.waited = 0
        self._save_best = SaveBest(metric, mode=self.mode, restore=True) if restore_best else None
        if self._save_best is not None:
            self._save_best.name = f"StopEarly({metric}, restore_best=True)"
            self.metric_to_restore = metric

    def set_saves(self, saves: Saves | None) -> None:
        """Stores the run's checkpoints for `restore_best`.

        Raises:
            ValueError: if there are none.
        """
        if self._save_best is not None:
            self._save_best.set_saves(saves)

    def get_state(self) -> dict[str, Any]:
        """Returns the best value and the number of measurements since."""
        state: dict[str, Any] = {"best": self.best, "waited": self.waited}
        return state if self._save_best is None else {**state, "saved": self._save_best.get_state()}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restores a state that `get_state` returned."""
        self.best, self.waited = state["best"], state["waited"]
        if self._save_best is not None and "saved" in state:
            self._save_best.set_state(state["saved"])

    def take_over(self, states: Mapping[str, Any]) -> None:
        """Counts what another action has kept, as `SaveBest.take_over`."""
        if self._save_best is not None:
            self._save_best.take_over(states)

    def __call__(self, report: Report) -> None:
        """Compares the metric with the best so far.

        Raises:
            StopTraining: when patience is over.
            ValueError: if no metric of that name is ever measured.
        """
        report.require(self.metric, "StopEarly", was_seen=self.best != math.inf or self.waited > 0)
        if self._save_best is not None:
            self._save_best(report)
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
            waited, self.waited = self.waited, 0
            times = "measurement" if waited == 1 else "measurements"
            raise StopTraining(f"{self.metric} was no better than {best:.6g} for {waited} {times}")

    def end_boundary(self, report: Report) -> None:
        """Saves the run if this step is the best and `restore_best` was given."""
        if self._save_best is not None:
            self._save_best.end_boundary(report)


class SyncStop(StopPoint):
    """Ends the run on every worker when one of the user's actions ends it on any; placed after those actions.

    Until then each worker calls the same actions, whether or not it is the one that ends the run.
    """

    only_writes = True  # does nothing unless a user's action is due, so no boundary is needed for it
    phase = "waiting for other workers"

    def __init__(self, strategy: tf.distribute.Strategy, actions: Sequence[Action], plan: Plan):
        """Stores the actions.

        Args:
            strategy: of the workers.
            actions: the user's actions, and evaluations, whose `rows_fn` may fail on one worker.
            plan: when they are due.
        """
        self._strategy = strategy
        self._actions = actions
        self._plan = plan

    def __call__(self, report: Report) -> None:
        """Exchanges between workers whether the run has been stopped, if any of the actions was due.

        Raises:
            StopTraining: if an action stopped the run on another worker.
            OtherFailed: if an action failed on another worker.
        """
        if not any(self._plan.is_due(action.every, report.step, report.until) for action in self._actions):
            return
        stops = report.stop_reason is not None
        votes = collectives.exchange(self._strategy, collectives.Vote(step=report.step, has_ended=stops))
        others = [index for index, vote in enumerate(votes) if vote.has_ended]
        if others and not stops:
            raise StopTraining(f"an action on worker {others[0]} ended the run")

"""`SyncStop`: the action that ends a run on all workers when an action ends it on one."""

from collections.abc import Callable, Sequence
from typing import Any

from distloop.actions.action import Action, Report, StopPoint, StopTraining
from distloop.actions.schedule import Plan


class SyncStop(StopPoint):
    """Ends the run on every worker when one of the user's actions ends it on any; placed after those actions.

    Until then each worker calls the same actions, whether or not it is the one that ends the run.
    """

    only_writes = True  # does nothing unless a user's action is due, so no boundary is needed for it

    def __init__(self, gather: Callable[[float], Any], actions: Sequence[Action], plan: Plan):
        """Stores the function and the actions.

        Args:
            gather: collects a number from every worker, on every worker.
            actions: the user's actions.
            plan: when they are due.
        """
        self._gather = gather
        self._actions = actions
        self._plan = plan

    def __call__(self, report: Report) -> None:
        """Exchanges between workers whether the run has been stopped, if any of the user's actions was due.

        Raises:
            StopTraining: if an action stopped the run on another worker.
        """
        if not any(self._plan.is_due(action.every, report.step, report.until) for action in self._actions):
            return
        stops = self._gather(report.stop_reason is not None)
        if report.stop_reason is None and any(stops):
            raise StopTraining(f"an action on worker {list(stops).index(1)} ended the run")

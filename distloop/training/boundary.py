"""Boundary: calls the actions in order, at each boundary and at the start and the end of a run.

metrics, stop_reason = run_actions([evaluate, write, save], Report(100, 500, {"loss": 0.5}, state))
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from distloop.log import log
from distloop.monitoring.media import Media
from distloop.monitoring.timing import Clock
from distloop.settings.durations import Plan
from distloop.training.action import Action, Report, RowAction, StopTraining, member, name_of, phase_of
from distloop.workdir.records import as_numbers
from distloop.workers.preemption import Interrupted, interrupted_together


class StopPoint(Action):
    """Where a run ends that an earlier action of the boundary has stopped."""

    every, only_writes = None, True

    def __call__(self, report: Report) -> None:
        """Does nothing."""


def run_actions(
    actions: Sequence[Action], report: Report, clock: Clock | None = None, plan: Plan | None = None
) -> tuple[dict[str, float], str | None]:
    """Calls the actions that are due at a boundary, each with the metrics of the ones before, then ends it for each.

    Args:
        actions: in order.
        report: the report of the first action.
        clock: adds the time of each action to its phase; None: time is not counted.
        plan: when actions are due; None: durations are in steps.

    Returns:
        All metrics, and the first reason to stop, if an action raised `StopTraining`. The run then ends at the next
        `StopPoint`, or behind the last action: what was not due is called there, and the actions that follow are at the
        end of the run.
    """
    boundary = _Boundary(replace(report, is_complete=True), clock or Clock(), plan or Plan())
    for action in actions:
        boundary.call_if_due(action)
    boundary.end_run_if_stopped()
    boundary.end()
    return dict(boundary.report.metrics), boundary.report.stop_reason


def run_between_loops(actions: Sequence[Action], report: Report, clock: Clock, before: float, now: float) -> None:
    """Calls the actions of which `between_loops_secs` have passed, in order.

    Args:
        actions: of the run.
        report: of the last boundary, at the present step.
        clock: adds the time of each action to its phase.
        before: the seconds that the run had trained when this was called before, by the chief's clock.
        now: the seconds that it has trained now.
    """
    for action in actions:
        secs = member(action, "between_loops_secs")
        if secs and before // secs < now // secs:
            with clock.phase(phase_of(action)):
                action(report)


class _Boundary:
    """A boundary: the report, to which each action adds, and the actions that were called.

    Attributes:
        report: of the next action.
    """

    def __init__(self, report: Report, clock: Clock, plan: Plan):
        self.report, self._clock, self._plan = report, clock, plan
        self._not_due: list[Action] = []
        self._called: list[Action] = []

    def call_if_due(self, action: Action) -> None:
        """Calls an action, or keeps it for the end of the run; at a `StopPoint` a run that was stopped ends."""
        is_due = self._plan.is_due(action.every, self.report.step, self.report.until)
        if not (is_due and member(action, "has_fixed_metrics")):
            self.report = replace(self.report, is_complete=False)
        if self._plan.is_chief or not member(action, "chief_only"):
            if is_due:
                self._call(action)
            else:
                self._not_due.append(action)
        if StopPoint in type(action).__mro__:  # a tenth of the time of `isinstance`, as `Action` is a protocol
            self.end_run_if_stopped()

    def _call(self, action: Action, *, is_again: bool = False) -> None:
        """Calls an action, maybe for the second time; adds what it returns, or its reason to stop."""
        report = self.report
        self._called.append(action)
        try:
            with self._clock.phase(phase_of(action)), interrupted_together(report.step):
                returned: Any = action(replace(report, metrics=dict(report.metrics)))
        except StopTraining as stop:
            if member(action, "only_writes") and report.state is not None and int(report.state.step) > report.step:
                raise ValueError(
                    f"The action {name_of(action)!r} has only_writes=True and raised StopTraining at step "
                    f"{report.step}, but later steps are done already: leave only_writes out, or give it a period."
                ) from stop
            self.report = replace(report, stop_reason=report.stop_reason or stop.reason)
            return
        if returned is None or returned is False:  # as of `report.step == 10 and f()`
            return
        values = as_numbers(returned, f"The action {name_of(action)!r}", others=Media)
        if values and member(action, "chief_only"):
            raise ValueError(
                f"The action {action!r} is chief_only and returned {sorted(values)}, which other workers would not "
                "have: return None, or let every worker call it."
            )
        media = {name: value for name, value in values.items() if isinstance(value, Media)}
        numbers = {name: value for name, value in values.items() if name not in media}
        known = report.metrics
        others = [n for n, value in numbers.items() if not np.array_equal(value, known.get(n, value), equal_nan=True)]
        if others and not (is_again or isinstance(action, RowAction)):
            raise ValueError(
                f"The action {name_of(action)!r} returned {others[0]!r}, which the row has already, with another "
                "value: return the number under another name."
            )
        self.report = replace(report, metrics={**report.metrics, **numbers}, media={**report.media, **media})

    def end_run_if_stopped(self) -> None:
        """Calls what was not due, as at the end of the run, if an action has ended it."""
        if self.report.stop_reason is not None:
            self.report = replace(self.report, until=self.report.step, is_complete=False)
            late, self._not_due, known = self._not_due, [], self.report.metrics
            for action in late:
                self._call(action)
            new = self.report.metrics.keys() - known.keys()
            for action in [a for a in self._called if a.every is None and member(a, "required_metric") in new]:
                self._called.remove(action)  # and called again, as what it waits for was measured after its call
                self._call(action, is_again=True)

    def end(self) -> None:
        """Ends the boundary for the actions that were called."""
        for action in self._called:
            with self._clock.phase(phase_of(action)):
                member(action, "end_boundary")(self.report)


@contextlib.contextmanager
def started(actions: Sequence[Action], report: Callable[[], Report], *, is_chief: bool = True) -> Iterator[None]:
    """Enters a scope in which actions have been started: on exit each is ended, the last one first.

    An error calls `on_error` before `on_end`; if these fail after it, that is logged.

    Args:
        actions: in order.
        report: returns a report of the run as it is.
        is_chief: whether this worker calls those that are `chief_only`.
    """

    def end(action: Action, kind: Any, error: BaseException | None, traceback: Any) -> None:
        try:
            try:
                if isinstance(error, Exception) and not isinstance(error, Interrupted):
                    member(action, "on_error")(error)
            finally:
                member(action, "on_end")(report())
        except Exception as another:
            if error is None:
                raise
            log.error("The action %r failed when the run had failed: %s: %s", action, type(another).__name__, another)

    with contextlib.ExitStack() as stack:
        for action in actions:
            if member(action, "chief_only") and not is_chief:
                continue
            stack.push(functools.partial(end, action))
            member(action, "on_start")(report())
        yield

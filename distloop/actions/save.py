"""`Save` and `SaveBest` save checkpoints, periodically and where a metric is best; `when_better` gates any action."""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from distloop.actions.evaluate import Evaluate
from distloop.errors import require_bool
from distloop.log import log
from distloop.monitoring.timing import SaveTimes
from distloop.settings.durations import Plan, require_integer
from distloop.training.action import Action, Report, RowAction, Saves, member, name_of, phase_of
from distloop.workdir import records
from distloop.workdir.records import closest, plain
from distloop.workdir.run_files import better


class Save(Action):
    """Saves the run every `every` steps; the last action of a run."""

    phase = "saving"

    def __init__(self, saves: Saves, every: int | str, plan: Plan):
        """Stores what saves, the duration between two saves (0: only at the end), and the plan of the run."""
        period, self._saves = plan.period(every), saves
        self.every, self.between_loops_secs = every if period.tokens else period.steps, period.secs

    def __call__(self, report: Report) -> None:
        """Saves."""
        self._saves.save(report)


class SaveToKeep(Action):
    """Saves checkpoints that the run never deletes; the action before `Save`."""

    phase = "saving"

    def __init__(self, saves: Saves, every: int | str, plan: Plan):
        """Stores what saves, the duration between two such checkpoints, and the plan of the run."""
        self._saves, self.every, self._plan = saves, every, plan

    def __call__(self, report: Report) -> None:
        """Saves, unless only the end of the run has come."""
        if self._plan.is_due(self.every, report.step, math.inf):
            self._saves.save(report, stays=True)


class SaveCosts(RowAction):
    """Reports how long each save held training up, and how long its checkpoint took until it was complete."""

    def __init__(self, times: SaveTimes):
        """Stores the times, of which `write` comes some time after `save_pause`."""
        self._times = times

    def __call__(self, report: Report) -> dict[str, float]:
        """Returns the numbers, in the first row after a checkpoint is complete."""
        secs = self._times.take("save_pause", "write")
        return {"save_pause_secs": secs["save_pause"], "save_secs": sum(secs.values())} if secs else {}


class SaveBest(Action):
    """Keeps the checkpoints where a metric was best, besides the newest; `checkpoints/best.json` lists their steps.

    The metric is compared at every boundary where it was measured. The checkpoint is saved at that boundary, whatever
    `checkpoint_every` is.
    """

    every = None
    phase = "saving"
    has_fixed_metrics = True

    def __init__(self, metric: str, *others: Any, mode: str = "auto", keep: int = 1, restore: bool = False):
        """Stores the rule.

        Args:
            metric: name of a metric in the report, such as "test/accuracy".
            *others: none: what follows is given by name.
            mode: "min" if smaller is better, "max" if larger is; "auto": as the metric's name says.
            keep: number of the best checkpoints to keep.
            restore: whether the best one is restored when the run has ended, for `evaluate`, `predict`, `export` and
                the user's model; a later `fit` goes on from the run's end.

        Raises:
            ValueError: for another mode, a name that does not say what is better, or if `keep` is below 1.
        """
        refuse_positional("SaveBest", metric, others, "mode='max'")
        require_integer("SaveBest", 1, keep=keep)
        require_bool("SaveBest", restore=restore)
        self.name = f"SaveBest({metric})"
        self.metric = self.required_metric = metric
        self.mode = choose_mode("SaveBest", metric, mode)
        self.keep = keep
        self.metric_to_restore = metric if restore else ""
        self.best: list[tuple[float, int]] = []  # value and step, the best first
        self._saves: Saves | None = None
        self._is_best = False  # whether the step of this boundary is among the best

    def set_saves(self, saves: Saves | None) -> None:
        """Stores the run's checkpoints, to save with.

        Raises:
            ValueError: if there are none, and the best one is to be restored; without `restore` that is a warning.
        """
        self._saves = saves
        if saves is None:
            needs = f"{self.name} needs a workdir for its checkpoints: give Config(workdir=...), or leave it out."
            if self.metric_to_restore:
                raise ValueError(needs)
            log.warning("%s Nothing is kept.", needs)

    def __call__(self, report: Report) -> None:
        """Compares the metric with the best so far.

        Raises:
            ValueError: if no metric of that name is ever measured.
        """
        report.require(self.metric, "SaveBest", was_seen=bool(self.best))
        value = report.metrics.get(self.metric)
        self._is_best = False
        if value is not None and not math.isnan(value) and all(step != report.step for _, step in self.best):
            self.best = self._ranked({step: known for known, step in [*self.best, (value, report.step)]})
            self._is_best = (value, report.step) in self.best
        if self._saves is not None:
            self._saves.keep(self.metric, [step for _, step in self.best], keeper=self)

    def end_boundary(self, report: Report) -> None:
        """Saves the run if this step is among the best: after all other actions, whose state the checkpoint holds."""
        if self._is_best and self._saves is not None:
            self._saves.save(report)

    def get_state(self) -> dict[str, Any]:
        """Returns the best values and their steps."""
        return {"best": [[value, step] for value, step in self.best]}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restores a state that `get_state` returned."""
        self.best = [(value, step) for value, step in state["best"]]

    def take_over(self, states: Mapping[str, Any]) -> None:
        """Counts the best that another action has kept of the same metric, which is none of this run any more.

        Args:
            states: of such actions, by name.
        """
        others = [states.get(f"SaveBest({self.metric})"), states.get(f"StopEarly({self.metric})", {}).get("saved")]
        pairs = [(value, step) for state in others if state for value, step in state["best"]]
        self.best = self._ranked({step: value for value, step in [*pairs, *self.best]})

    def _ranked(self, values: Mapping[int, float]) -> list[tuple[float, int]]:
        """Returns the best of some values, given by step; of equal ones the earlier."""
        pairs = [(values[step], step) for step in sorted(values)]
        return sorted(pairs, key=lambda pair: pair[0], reverse=self.mode == "max")[: self.keep]


class BestSoFar:
    """The best value of a metric so far.

    Attributes:
        metric: its name.
        mode: "min" if smaller is better, "max" if larger is.
        value: the best; None: there was none.
    """

    def __init__(self, action_name: str, metric: str, mode: str):
        """Chooses the mode, as `choose_mode` does for an action."""
        self.metric, self._action_name = metric, action_name
        self.mode = choose_mode(action_name, metric, mode)
        self.value: float | None = None

    def is_beaten(self, report: Report) -> bool:
        """Returns whether the metric was measured at a boundary and is better than ever; NaN is not.

        Raises:
            ValueError: if no metric of that name is ever measured.
        """
        report.require(self.metric, self._action_name, was_seen=self.value is not None)
        value = report.metrics.get(self.metric)
        if value is None or math.isnan(value):
            return False
        return self.value is None or (value < self.value if self.mode == "min" else value > self.value)


class WhenBetter:
    """Calls another action where a metric is better than ever; `when_better` makes it.

    All members of `Action` that are not defined here are those of the other action.
    """

    every, only_writes, has_fixed_metrics, between_loops_secs = None, False, False, 0.0

    def __init__(self, metric: str, action: Action, mode: str):
        """Stores the rule; the arguments are those of `when_better`."""
        self.name = f"when_better({metric}, {name_of(action)})"
        self.phase, self.required_metric = phase_of(action), metric
        self._best, self._action = BestSoFar("when_better", metric, mode), action
        self._was_called = False  # at this boundary

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return member(self._action, name)

    def __call__(self, report: Report) -> Any:
        """Calls the action if the metric is better than ever, and returns what the action does."""
        self._was_called = self._best.is_beaten(report)
        if not self._was_called:
            return None
        result = self._action(report)
        self._best.value = float(report.metrics[self._best.metric])
        return result

    def end_boundary(self, report: Report) -> None:
        """Ends a boundary at which the action was called."""
        if self._was_called:
            member(self._action, "end_boundary")(report)

    def get_state(self) -> dict[str, Any]:
        """Returns the best value, and the state of the action."""
        return {"best": self._best.value, "action": member(self._action, "get_state")()}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restores a state that `get_state` returned."""
        self._best.value = state["best"]
        if state["action"] is not None:
            member(self._action, "set_state")(state["action"])


def when_better(metric: str, action: Action, *, mode: str = "auto") -> WhenBetter:
    """Returns an action that calls another one at the boundaries where a metric is better than ever.

        distloop.when_better("test/accuracy", write_examples)      # whatever `write_examples.every` is

    Args:
        metric: a name in the report, such as "test/accuracy".
        action: a callable that takes a `Report`; what it returns joins the row.
        mode: "min" if smaller is better, "max" if larger is; "auto": as the metric's name says.

    Raises:
        ValueError: for another mode, a name that does not say what is better, or something that cannot be called.
    """
    if not isinstance(metric, str):
        raise ValueError(f"when_better was given {metric!r}; give the name of a metric, such as 'test/accuracy'.")
    if not callable(action):
        raise ValueError(f"when_better was given {action!r}; its second argument is an action: give a callable.")
    return WhenBetter(metric, action, mode)


def choose_mode(action_name: str, metric: str, mode: str) -> str:
    """Returns "min" or "max": the mode that was given, or for "auto" what the metric's name says, as in the report.

    Raises:
        ValueError: for another mode, or a name that does not say what is better.
    """
    if mode not in ("auto", "min", "max"):
        raise ValueError(
            f"mode={mode!r} was given to {action_name}; say 'min' if smaller is better, 'max' if larger is, or 'auto'."
        )
    if mode != "auto":
        return mode
    if not isinstance(metric, str) or not metric:
        raise ValueError(f"{action_name} was given {metric!r}; give the name of a metric, such as 'test/accuracy'.")
    if (known := better(metric)) is None:
        raise ValueError(
            f"{action_name} was given the metric {metric!r}, whose name does not say what is better: give mode='min' "
            "or mode='max'."
        )
    return "min" if known == "smaller" else "max"


def require_metrics(actions: Sequence[Action], evaluations: Sequence[Evaluate], names: Collection[str]) -> None:
    """Checks that a run will report the metrics that its actions wait for, and no name twice.

    Args:
        actions: the user's; what others than distloop's report is not known before they are called.
        evaluations: of the run.
        names: of the values of a training step, Keras metrics included.

    Raises:
        ValueError: if there will be no metric of a name, or two.
    """
    of_evaluations = {f"{it.name}/{name}" for it in evaluations if it.has_values_of_step for name in names}
    if twice := sorted(of_evaluations.intersection(names)):
        raise ValueError(
            f"{twice[0]!r} is reported by the training step and by an evaluation: rename the value of loss_fn, or give "
            "the evaluation another name."
        )
    likely = {*names, *of_evaluations}
    wanted = {metric: action for action in actions if (metric := member(action, "required_metric"))}
    unknown = [metric for metric, action in wanted.items() if not _is_among(metric, likely, action)]
    if not unknown:
        return
    if any(_may_report(action) for action in actions):
        for metric in unknown:
            if (meant := closest(metric, likely, cutoff=0.8)) is not None:
                log.warning("The metric %r is waited for: is %r meant?", metric, meant)
        return
    reported = set(names)
    for evaluation in evaluations:
        if (own := evaluation.names()) is None:  # as of `rows_fn`
            unknown = [metric for metric in unknown if not plain(metric).startswith(plain(f"{evaluation.name}/"))]
        reported |= {f"{evaluation.name}/{name}" for name in own or ()}
    for metric in unknown:
        if not _is_among(metric, reported, wanted[metric]):
            raise ValueError(
                f"{name_of(wanted[metric])} waits for the metric {metric!r}, which nothing reports: "
                f"{_instead_of(metric, reported)}"
            )


def _instead_of(metric: str, reported: Collection[str]) -> str:
    """Returns what to give in place of a metric that is not reported; it ends a sentence."""
    if (close := closest(metric, reported)) is not None:
        return f"did you mean {close!r}?"
    for name in reported:  # of the step; an evaluation reports it with its name before
        if plain(metric).endswith(f"_{plain(name)}"):
            evaluation = metric[: -len(name) - 1]
            return f"give fit evals={{{evaluation!r}: dataset}}, which reports {f'{evaluation}/{name}'!r}."
    return f"give one of {', '.join(sorted(reported))}."


def _is_among(metric: str, names: Collection[str], action: Action) -> bool:
    """Returns whether an action's metric is one of some names, an entry of one, or a number about the run itself."""
    if member(action, "takes_keras_names") and any(metric == name.replace("/", "_") for name in names):
        return True
    first, _, rest = metric.partition("/")
    about_the_run = {name for group, named in records.GROUPS.items() if group != records.METRICS for name in named}
    if metric in names or metric == "regularization" or about_the_run & {metric, first, metric.rpartition("/")[2]}:
        return True
    return bool(rest) and any(metric.startswith(f"{name}/") for name in names if name != "loss")  # as of F1Score


def _may_report(action: Action) -> bool:
    """Returns whether an action may return metrics: its annotation does not say that it returns None."""
    function = action if hasattr(action, "__code__") else type(action).__call__
    returned = getattr(function, "__annotations__", {}).get("return", action)
    return returned not in (None, "None") and not member(action, "chief_only")


def refuse_positional(action_name: str, metric: Any, others: tuple[Any, ...], example: str) -> None:
    """Checks that an action got its metric alone without a name.

    Raises:
        ValueError: if it got more, or the metric is no name.
    """
    if others or not isinstance(metric, str) or not metric:
        given = ", ".join(repr(value) for value in (metric, *others))
        raise ValueError(
            f"{action_name} was given {given}; it takes the metric's name, and the rest by name: "
            f"{action_name}('test/accuracy', {example})."
        )

"""`Save` and `SaveBest` save checkpoints, periodically and where a metric is best; `SaveCosts` reports the seconds."""

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from distloop.actions.action import Action, Report, Saves
from distloop.actions.schedule import Plan
from distloop.durations import shown, whole_number
from distloop.log import log
from distloop.monitoring.run_files import better


class Save(Action):
    """Saves the run every `every` steps; the last action of a run.

    Attributes:
        saves, every, secs: the arguments.
    """

    phase = "saving"

    def __init__(self, saves: Saves, every: int, secs: float = 0.0):
        """Stores what saves.

        Args:
            saves: where to.
            every: steps; 0: only at the end.
            secs: the loop calls it whenever so many seconds have passed, too; 0: it does not.
        """
        self.saves, self.every, self.secs = saves, every, secs

    def __call__(self, report: Report) -> None:
        """Saves."""
        self.saves.save(report)


def make_saves(
    save: Callable[..., None], kinds: Iterable[tuple[Callable[..., None], int | str]], plan: Plan
) -> list[Save]:
    """Returns an action for each kind of saves of a run.

    Args:
        save: called with the function of a kind, and with the arguments for it.
        kinds: functions that save, each with the duration between two calls.
        plan: of the run.
    """
    return [Save(Saves(functools.partial(save, kind)), *plan.period(every)) for kind, every in kinds]


class SaveCosts(Action):
    """Reports how long each save and copy held training up, and how long a checkpoint took until it was whole."""

    every = None
    phase = "logging"
    only_writes = True

    def __init__(self, costs: dict[str, float]):
        """Stores the dict that gets `save_pause_secs`, `copy_pause_secs` and, some time after a save, `write_secs`."""
        self._costs = costs

    def __call__(self, report: Report) -> dict[str, float]:
        """Returns the numbers, in the first row after a copy, or after a checkpoint is whole."""
        costs = self._costs
        numbers = {"copy_pause_secs": costs.pop("copy_pause_secs")} if "copy_pause_secs" in costs else {}
        if {"save_pause_secs", "write_secs"} <= costs.keys():
            numbers["save_pause_secs"] = costs.pop("save_pause_secs")
            numbers["save_secs"] = numbers["save_pause_secs"] + costs.pop("write_secs")
        return numbers


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
        check_keep("SaveBest", keep)
        self.name = f"SaveBest({metric})"
        self.metric = metric
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
            ranked = sorted([*self.best, (value, report.step)], key=lambda pair: pair[0], reverse=self.mode == "max")
            self._is_best = (value, report.step) in ranked[: self.keep]
            self.best = ranked[: self.keep]
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
    if (known := better(metric)) is not None:
        return "min" if known == "smaller" else "max"
    if len(metric.rpartition("/")[2]) > 1:
        raise ValueError(
            f"{action_name} was given the metric {metric!r}, whose name does not say what is better: give mode='min' "
            "or mode='max'."
        )
    log.warning("%s was given the metric %r: smaller counts as better; mode='max' is for larger.", action_name, metric)
    return "min"


def refuse_positional(action_name: str, metric: Any, others: tuple[Any, ...], example: str) -> None:
    """Checks that an action got its metric alone without a name.

    Raises:
        ValueError: if it got more, or the metric is no name.
    """
    if others or not isinstance(metric, str):
        given = ", ".join(repr(value) for value in (metric, *others))
        raise ValueError(
            f"{action_name} was given {given}; it takes the metric's name, and the rest by name: "
            f"{action_name}('test/accuracy', {example})."
        )


def check_keep(action_name: str, keep: int) -> None:
    """Checks how many an action is to keep.

    Raises:
        ValueError: if `keep` is below 1.
    """
    if (whole_number(keep) or 0) < 1:
        raise ValueError(f"keep={shown(keep)} was given to {action_name}; it keeps 1 at least.")

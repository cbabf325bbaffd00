"""The contract of an action: what the loop calls between its compiled loops, and what an action is given.

An action is any callable with an attribute `every`, a duration. It receives a `Report` and returns new metrics or None.
The metrics join the report of the next action, so the list is the data flow: `[Evaluate, StopEarly, Write]`. Media
(`distloop.Images`, ...) are returned in the same way.

    def print_loss(report):
        print(report.step, report.metrics["loss"])
    print_loss.every = 100
    trainer.fit(dataset, steps=1000, actions=[print_loss])
"""

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from distloop.errors import require_call
from distloop.log import log, shown
from distloop.monitoring.media import Media
from distloop.settings import durations
from distloop.settings.durations import Units

_HOOKS = {"on_start": ["report"], "on_end": ["report"], "on_error": ["error"], "get_state": [], "set_state": ["state"]}


@dataclass(frozen=True)
class Report:
    """The input of an action.

    Attributes:
        step: number of steps done.
        until: the last step of the run; inf: not known yet, as the run ends by time.
        metrics: name -> number: training values are means since the last row, evaluations are called `test/accuracy`.
        state: everything that training changes, a `TrainState`.
        stop_reason: why an earlier action of this boundary ended the run; None: no action did.
        time: when the last step ended; Unix, seconds.
        media: name -> media that earlier actions returned.
        is_complete: True if every action that reports metrics has run, so a missing metric will stay missing.
        units: what durations are in steps; known to `on_start`.
    """

    step: int
    until: float
    metrics: Mapping[str, float]
    state: Any
    stop_reason: str | None = None
    time: float = 0.0
    media: Mapping[str, Media] = field(default_factory=dict)
    is_complete: bool = False
    units: Units = field(default_factory=Units)

    def require(self, metric: str, action_name: str, *, was_seen: bool) -> None:
        """Raises if a metric is missing and will stay missing; at the end of the run logs an error instead.

        Args:
            metric: name of the metric.
            action_name: the action that needs it, for the message.
            was_seen: whether an earlier report had the metric.

        Raises:
            ValueError: if every action that reports metrics has run.
        """
        if metric in self.metrics or was_seen:
            return
        # If another action ends the run between two evaluations, the metric was never measured: not a mistake.
        is_over = self.step >= self.until and self.stop_reason is None
        if is_over or self.is_complete:
            message = (
                f"{action_name} was given the metric {metric!r}; there are {sorted(self.metrics)}: name one of them."
            )
            if not is_over:
                raise ValueError(message)
            log.error("%s", message)  # an error here would lose a finished run


class StopTraining(Exception):  # noqa: N818 - a request, not an error
    """Raised by an action to end the run; all others still run at this boundary, as at the end."""

    def __init__(self, reason: str):
        """Stores the reason, which the log shows."""
        super().__init__(reason)
        self.reason = reason


class Kept(NamedTuple):
    """What is kept with a save.

    Attributes:
        best_steps: by metric, the steps to keep as the best; those of other metrics stay, as of an earlier run.
        stays: whether the checkpoint itself is never deleted.
    """

    best_steps: Mapping[str, list[int]]
    stays: bool = False


KEPT = Kept({})


class Saves:
    """The checkpoints of a run, as actions see them: one save at a boundary, unless more is to be kept then."""

    def __init__(self, save: Callable[[Report, Kept], None]):
        """Stores a function that saves the run; it gets the report, and what is kept."""
        self._save = save
        self._best_steps: dict[str, dict[int, list[int]]] = {}  # by metric and keeper
        self._saved: dict[int, Kept] = {}  # by the step of the last save

    def keep(self, metric: str, steps: list[int], keeper: object = None) -> None:
        """Sets the steps whose checkpoints are kept as the best of a metric; in force from the next save.

        Args:
            metric: its name.
            steps: the best first.
            keeper: the action that wants them; what others want of the same metric is kept, too.
        """
        self._best_steps.setdefault(metric, {})[id(keeper)] = steps

    def save(self, report: Report, *, stays: bool = False) -> None:
        """Saves the run, unless this step is saved with all that is kept; a checkpoint that stays is never deleted."""
        best_steps = {name: list(dict.fromkeys(itertools.chain(*of.values()))) for name, of in self._best_steps.items()}
        kept = Kept(best_steps, stays or self._saved.get(report.step, KEPT).stays)
        if kept != self._saved.get(report.step):
            self._save(report, kept)
            self._saved = {report.step: kept}


class Action(Protocol):
    """An action of a run; only `every` and the call are required.

    All other members are optional, for plain functions too: a missing one has the value that it has here.

    Attributes:
        every: how often it is called: a number of steps, or a text such as "2 epochs", "10 min" or "25 %" (of the run);
            it is also called at the end of the run. 0: only at the end. None: at each boundary that the log or another
            action causes. What is due by time is called after the next step, on all workers at the same one.
        name: checkpoints keep the state under it; two actions with a state need different ones. Empty: the name of the
            class, or of the function.
        phase: the entry of the run's time summary that its time counts for. Empty: one of its own, under its name.
        only_writes: True if it reads only the metrics of a report, not the state; it may then be called late, with the
            reports of several boundaries in a row.
        has_fixed_metrics: True if it returns the same metric names at each call.
        metric_to_restore: a metric whose best checkpoint is restored when the run has ended. Empty: none.
        required_metric: a metric without which it is of no use; that the run will report it is checked before the first
            step. Empty: none.
        between_loops_secs: seconds after which it is called alone between two loops, too, by the chief's clock and with
            the numbers of the last report: it makes no row. 0: it is not.
        takes_keras_names: True if its metric may have Keras's form of a name, `val_loss` for `val/loss`.
        chief_only: True if the chief alone calls it, and its hooks: to write a file or send a message. It returns
            nothing, and calls nothing that all workers must call, such as `evaluate`; StopTraining ends all workers.
    """

    every: int | str | None
    name: str = ""
    phase: str = ""
    only_writes: bool = False
    has_fixed_metrics: bool = False
    metric_to_restore: str = ""
    required_metric: str = ""
    between_loops_secs: float = 0.0
    takes_keras_names: bool = False
    chief_only: bool = False

    def __call__(self, report: Report) -> Mapping[str, float | Media] | None:
        """Returns new metrics and media by name, or None.

        Raises:
            StopTraining: to end the run.
        """

    def on_start(self, report: Report) -> None:
        """Called by each `fit` that trains, before its first step; the state is as the checkpoint had it."""
        return None

    def on_end(self, report: Report) -> None:
        """Called when `fit` ends, after an error or an interruption, too, if `on_start` was called.

        After an error other workers may be gone: call nothing then that all workers must call.
        """
        return None

    def on_error(self, error: Exception) -> None:
        """Called with the error that ends `fit`, before `on_end`; not for StopTraining, nor for an interruption."""
        return None

    def set_saves(self, saves: Saves | None) -> None:
        """Receives the run's checkpoints before training starts; None: the run has no workdir."""
        return None

    def set_fit(self, call: Any, loop: Any, checkpoints: Any) -> None:
        """Receives a `FitCall`, its loop and its checkpoints before the step is traced, and after going back to one."""
        return None

    def explain_fault(self, error: Exception, step: int) -> str:
        """Returns what to put behind the sentence about a step that failed; all workers call it."""
        return ""

    def end_boundary(self, report: Report) -> None:
        """Ends a boundary for an action that was due, after all others were called; here `SaveBest` saves."""
        return None

    def run_files(self) -> Sequence[tuple[str, str, int]]:
        """Returns name, path and step of files that writers get when the run is over, such as exports."""
        return ()

    def get_state(self) -> Any:
        """Returns the action's state for a checkpoint; None: there is nothing to save.

        It consists of dicts with strings as keys, lists, numbers, strings, booleans and None; others are refused.
        """
        return None

    def set_state(self, state: Any) -> None:
        """Restores a state that `get_state` returned."""
        return None

    def take_over(self, states: Mapping[str, Any]) -> None:
        """Receives the states of actions that the run had before and has no more, by name, before training starts."""
        return None


class RowAction(Action):
    """An action whose numbers join each row that something else causes."""

    every: int | str | None = None
    phase, only_writes = "logging", True


def member(action: Action, name: str) -> Any:
    """Returns an optional attribute or method of an action; if it has none, the default that `Action` declares."""
    default = getattr(Action, name)
    return getattr(action, name, functools.partial(default, action) if callable(default) else default)


def name_of(action: Action) -> str:
    """Returns the name of an action: its own, or that of the function or class."""
    name = getattr(action, "name", None)
    return name if isinstance(name, str) and name else getattr(action, "__name__", type(action).__name__)


def phase_of(action: Action) -> str:
    """Returns the entry of the run's time summary that an action's time counts for."""
    return member(action, "phase") or name_of(action)


def check_actions(actions: Sequence[Action]) -> None:
    """Checks what `fit` was given as actions.

    Raises:
        ValueError: if they are something else.
    """
    if not isinstance(actions, Sequence):
        raise ValueError(f"actions={actions!r} was given; fit takes a list of actions: actions=[action].")
    if len({id(action) for action in actions}) < len(actions):
        raise ValueError(
            f"actions={actions!r} holds an action that was given twice, and would act twice: give it once."
        )
    for action in actions:
        if not callable(action) or not hasattr(action, "every"):
            raise ValueError(
                f"The action {action!r} was given; an action is a callable with an attribute `every`: set it, as in "
                "`action.every = '1 epoch'`, or give a Keras callback as distloop.from_callback(callback)."
            )
        require_call(action, f"The action {name_of(action)!r}", "report")
        for hook in (hook for hook in _HOOKS if hasattr(action, hook)):
            require_call(getattr(action, hook), f"{hook} of the action {name_of(action)!r}", *_HOOKS[hook])
        if action.every is not None and durations.normalize(action.every) is None:
            raise ValueError(f"Action {action!r} has every={shown(action.every)}: give {durations.ALLOWED}, or None.")
    if len(metrics := metrics_to_restore(actions)) > 1:
        raise ValueError(f"Actions restore the best checkpoints of {sorted(metrics)}: let only one of them restore.")


def metrics_to_restore(actions: Sequence[Action]) -> set[str]:
    """Returns the metrics of which actions want the best checkpoint restored when the run has ended."""
    return {metric for action in actions if (metric := member(action, "metric_to_restore"))}

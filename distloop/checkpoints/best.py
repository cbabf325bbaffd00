"""Best checkpoint: finds the step of the best metric in `best.json`, which `SaveBest` keeps.

    step = best_step(checkpoints, "test/accuracy")
    saved = load_best(checkpoints, "test/accuracy", gather)

It changes no variable.
"""

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from distloop.actions.action import Action, member
from distloop.checkpoints.checkpoint import Saved
from distloop.checkpoints.store import Checkpoints, in_workdir
from distloop.log import log
from distloop.monitoring.writers import RunFile

BEST = "best"  # stands for the best checkpoint where `restore` takes a path
_NAMES = "best/"  # of the files that writers get; the metric follows


class NoBestError(ValueError):
    """No checkpoint is the best one of a metric."""


@contextlib.contextmanager
def may_lack_best() -> Iterator[None]:
    """Enters a scope at the end of a run, in which a warning tells of a metric without a best checkpoint."""
    try:
        yield
    except NoBestError as error:
        log.warning("%s The weights stay those of the end of the run.", error)


def load_best(checkpoints: Checkpoints | None, metric: str, gather: Callable[[float], Any]) -> Saved:
    """Loads the checkpoint where a metric was best.

    Args:
        checkpoints: of the run; None: it has no workdir.
        metric: as for `best_step`.
        gather: returns one number of every worker, the chief's first, as `workers.gather`.

    Raises:
        NoBestError: as for `best_step`.
        ValueError: if there is no workdir, the checkpoint is damaged, or as for `best_step`.
    """
    if checkpoints is None:
        raise ValueError(
            'restore("best") was called without a workdir, where best checkpoints are kept: give Config(workdir=...), '
            "and SaveBest(metric) to fit."
        )
    step, failure = -1, None
    try:
        step = best_step(checkpoints, metric)
    except ValueError as error:  # raised when all workers have looked
        failure = error
    chosen = int(gather(step)[0])  # by the chief: others may have looked before its last checkpoint was whole
    if chosen < 0:
        raise failure or _no_best(checkpoints, metric)
    return checkpoints.load(chosen)


def best_step(checkpoints: Checkpoints, metric: str = "") -> int:
    """Returns the step at which a metric was best.

    Args:
        checkpoints: of the run.
        metric: its name; empty: the only one, or any of several that were best at the same step.

    Raises:
        NoBestError: if there is no such checkpoint.
        ValueError: if metrics were best at different steps and none is named.
    """
    steps = {file.name.removeprefix(_NAMES): file.step for file in _best_files(checkpoints)}
    steps = {name: step for name, step in steps.items() if metric in ("", name)}
    if not steps:
        raise _no_best(checkpoints, metric)
    if len(set(steps.values())) > 1:
        paths = (f"{os.path.join(checkpoints.directory, str(step))!r} for {name!r}" for name, step in steps.items())
        raise ValueError(f"Metrics were best at different steps: give restore the path, {', '.join(paths)}.")
    return next(iter(steps.values()))


def _no_best(checkpoints: Checkpoints, metric: str) -> NoBestError:
    return NoBestError(
        f"No best checkpoint{f' of {metric!r}' if metric else ''} is kept in {checkpoints.directory!r}: give fit "
        "SaveBest(metric), with a metric that is measured before the run ends, or its checkpoint could not be written: "
        "see the log."
    )


def left_files(workdir: str, actions: Sequence[Action]) -> list[RunFile]:
    """Returns the best checkpoints of a run, and what its actions have left, for writers.

    Raises:
        OSError: if the checkpoints cannot be read.
    """
    best = _best_files(in_workdir(workdir)) if workdir else []
    return best + [RunFile(*file) for action in actions for file in member(action, "run_files")()]


def _best_files(checkpoints: Checkpoints) -> list[RunFile]:
    """Returns the whole checkpoint where each metric was best."""
    whole = set(checkpoints.steps)
    best = {metric: [step for step in steps if step in whole][:1] for metric, steps in checkpoints.best_steps.items()}
    return [
        RunFile(f"{_NAMES}{metric}", os.path.join(checkpoints.directory, str(step)), step)
        for metric, steps in best.items()
        for step in steps
    ]

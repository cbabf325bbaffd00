"""The best checkpoint of a run: chooses a step by `best.json`, which `SaveBest` keeps.

    step = best_step(checkpoints, "test/accuracy")
    saved = load_best(checkpoints, "test/accuracy", gather)

It changes no variable.
"""

import os
from collections.abc import Callable
from typing import Any

from distloop.checkpoints.checkpoint import Saved
from distloop.checkpoints.store import Checkpoints

BEST = "best"  # stands for the best checkpoint where `restore` takes a path


def load_best(checkpoints: Checkpoints | None, metric: str, gather: Callable[[float], Any]) -> Saved:
    """Loads the checkpoint where a metric was best.

    Args:
        checkpoints: of the run; None: it has no workdir.
        metric: as for `best_step`.
        gather: returns one number of every worker, the chief's first, as `workers.gather`.

    Raises:
        ValueError: if there is no workdir, the checkpoint is damaged, or as for `best_step`.
    """
    if checkpoints is None:
        raise ValueError(
            'restore("best") was called without a workdir, where best checkpoints are kept: give Config(workdir=...), '
            "and SaveBest(metric) to fit."
        )
    return checkpoints.load(int(gather(best_step(checkpoints, metric))[0]))


def best_step(checkpoints: Checkpoints, metric: str = "") -> int:
    """Returns the step at which a metric was best.

    Args:
        checkpoints: of the run.
        metric: its name; empty: the only one, or any of several that were best at the same step.

    Raises:
        ValueError: if there is no such checkpoint, or metrics were best at different steps and none is named.
    """
    whole = set(checkpoints.steps)
    best = {name: [step for step in steps if step in whole][:1] for name, steps in checkpoints.best_steps.items()}
    steps = {name: kept[0] for name, kept in best.items() if kept and metric in ("", name)}
    if not steps:
        raise ValueError(
            f"No best checkpoint{f' of {metric!r}' if metric else ''} is kept in {checkpoints.directory!r}: give fit "
            "SaveBest(metric), with a metric that is measured before the run ends."
        )
    if len(set(steps.values())) > 1:
        paths = (f"{os.path.join(checkpoints.directory, str(step))!r} for {name!r}" for name, step in steps.items())
        raise ValueError(
            f'restore("best") was called, and metrics were best at different steps: give the path, {", ".join(paths)}.'
        )
    return next(iter(steps.values()))

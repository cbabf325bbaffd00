"""Loading: every worker loads the checkpoint that the chief chooses, or refuses to go on from it.

    saved = load_newest(strategy, checkpoints)                      # None: there is none
    saved = require_same_virtual_replicas(saved, state)

This module does not know what is restored from a checkpoint, or when.
"""

import os
from collections.abc import Callable, Sequence

import tensorflow as tf

from distloop.checkpoints.checkpoint import Saved, is_checkpoint, load
from distloop.checkpoints.store import Checkpoints, in_workdir, set_aside
from distloop.distributed import workers
from distloop.model.state import TrainState


def load_from(strategy: tf.distribute.Strategy, path: str) -> Saved | None:
    """Loads a checkpoint, or the newest one of a workdir; None: there is none."""
    if path and is_checkpoint(path):
        return load(path)
    return load_newest(strategy, in_workdir(path)) if path else None


def load_newest(
    strategy: tf.distribute.Strategy,
    checkpoints: Checkpoints,
    is_wanted: Callable[[Saved], bool] = lambda saved: True,
    *,
    share: Callable[[int], None] = lambda step: None,
) -> Saved | None:
    """Loads on every worker the checkpoint that the chief chooses; `share` brings it to the others."""
    saved = checkpoints.load_newest(is_wanted) if workers.is_chief(strategy) else None
    step = int(workers.gather(strategy, -1 if saved is None else saved.step)[0])
    share(step)
    return saved if workers.is_chief(strategy) or step < 0 else checkpoints.load(step)


def names(checkpoints: Checkpoints) -> list[str]:
    """Returns the names of all checkpoints, with those that were renamed as the run has gone back to an earlier one."""
    return [*map(str, checkpoints.steps), *map(os.path.basename, set_aside(checkpoints.directory))]


def has_later(strategy: tf.distribute.Strategy, checkpoints: Checkpoints, step: int) -> bool:
    """Returns whether there is a whole checkpoint after a step, as the chief sees it."""
    return bool(workers.gather(strategy, workers.is_chief(strategy) and checkpoints.newest_whole > step)[0])


def require_same_virtual_replicas(saved: Saved, state: TrainState) -> Saved:
    """Returns a checkpoint; refuses to train on from one of another number of virtual replicas. Old ones have none."""
    trained, given = saved.notes.get("virtual_replicas", 0), state.virtual_replicas
    if trained != given:
        raise ValueError(
            f"The checkpoint {saved.path!r} was trained with virtual_replicas={trained}, and {given} were given, with "
            f"which a run has other bits: give virtual_replicas={trained}, or begin a new run in another workdir, "
            "from these weights with init_from."
        )
    return saved


def would_be_replaced(workdir: str, newest: int) -> ValueError:
    """Returns the error of a workdir with checkpoints where none are to be restored."""
    return ValueError(
        f"resume=False was given, but workdir={workdir!r} holds checkpoints, the newest of step {newest}, which a new "
        "run would replace: give another workdir, or resume=True."
    )


def is_of_another_model(saved: Saved, different: Sequence[str]) -> ValueError:
    """Returns the error of a checkpoint whose variables are others."""
    more = f", and {len(different) - 3} more" if len(different) > 3 else ""
    return ValueError(
        f"The checkpoint {saved.path!r} is of another model or optimizer ({'; '.join(different[:3])}{more}); nothing "
        "was restored: make the model as it was, or give another workdir."
    )

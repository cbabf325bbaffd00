"""Loading: which checkpoint every worker loads: the newest, the best, or that before a divergence.

    saved = load_newest(strategy, checkpoints)                      # None: there is none
    saved = require_same_replicas(saved, state)
    saved = load_best(checkpoints, "test/accuracy", gather)         # of `SaveBest`

The chief chooses. This module does not know what is restored from a checkpoint, or when.
"""

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any

import tensorflow as tf

from distloop.checkpoints.checkpoint import Saved, is_checkpoint, load
from distloop.checkpoints.store import Checkpoints, in_workdir
from distloop.distributed import collectives
from distloop.log import log
from distloop.model.state import TrainState
from distloop.monitoring.writers import RunFile
from distloop.settings.config import Config
from distloop.training.action import Action, member
from distloop.training.loop import Diverged

BEST = "best"  # stands for the best checkpoint where `restore` takes a path
_NAMES = "best/"  # of the files that writers get; the metric follows


class NoBestError(ValueError):
    """No checkpoint is the best one of a metric."""


def load_from(strategy: tf.distribute.Strategy, path: str) -> Saved | None:
    """Loads a checkpoint, or the newest one of a workdir; None: there is none. All workers call it.

    Raises:
        ValueError: on every worker, if the checkpoint is on the disk of another one alone.
    """
    is_one = bool(path) and is_checkpoint(path)
    name = os.path.basename(path.rstrip("/")) if is_one else "none"
    collectives.require_same(strategy, "restore", {"the checkpoint on their disks": name})
    if is_one:
        return load(path)
    return load_newest(strategy, in_workdir(path)) if path else None


def load_newest(
    strategy: tf.distribute.Strategy,
    checkpoints: Checkpoints,
    is_wanted: Callable[[Saved], bool] = lambda saved: True,
    *,
    send: Callable[[int], None] = lambda step: None,
) -> Saved | None:
    """Loads on every worker the checkpoint that the chief chooses; `send` brings it to the others."""
    saved = checkpoints.load_newest(is_wanted) if collectives.is_chief(strategy) else None
    step = int(collectives.gather(strategy, -1 if saved is None else saved.step)[0])
    send(step)
    return saved if collectives.is_chief(strategy) or step < 0 else checkpoints.load(step)


def load_best(checkpoints: Checkpoints | None, metric: str, gather: Callable[[float], Any]) -> Saved:
    """Loads the checkpoint where a metric was best; `gather` returns a number of every worker, the chief's first.

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
    chosen = int(gather(step)[0])  # by the chief: others may have looked before its last checkpoint was complete
    if chosen < 0:
        raise failure or _no_best(checkpoints, metric)
    return checkpoints.load(chosen)


def best_step(checkpoints: Checkpoints, metric: str = "") -> int:
    """Returns the step at which a metric was best; without a name, the only one, or several best at the same step.

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


@contextlib.contextmanager
def may_lack_best() -> Iterator[None]:
    """Enters a scope at the end of a run, in which a warning names a metric without a best checkpoint."""
    try:
        yield
    except NoBestError as error:
        log.warning("%s The weights stay those of the end of the run.", error)


def left_files(workdir: str, actions: Sequence[Action]) -> list[RunFile]:
    """Returns the best checkpoints of a run, and what its actions have left, for writers.

    Raises:
        OSError: if the checkpoints cannot be read.
    """
    best = _best_files(in_workdir(workdir)) if workdir else []
    return best + [RunFile(*file) for action in actions for file in member(action, "run_files")()]


def _best_files(checkpoints: Checkpoints) -> list[RunFile]:
    """Returns the complete checkpoint where each metric was best."""
    there = set(checkpoints.steps)
    best = {metric: [step for step in steps if step in there][:1] for metric, steps in checkpoints.best_steps.items()}
    return [
        RunFile(f"{_NAMES}{metric}", os.path.join(checkpoints.directory, str(step)), step)
        for metric, steps in best.items()
        for step in steps
    ]


class Rollback:
    """The batches that were left out since a diverging run last made progress.

    Attributes:
        num_tries: how often the run went back before the last failure.
    """

    def __init__(self, max_tries: int):
        """Begins without any; the run may go back `max_tries` times before it comes further than ever."""
        self._max_tries = max_tries
        self._furthest_step = 0  # the last step that diverged
        self._blamed: list[int] = []
        self.num_tries = 0

    def choose(self, step: int, batch: int, skipped: Set[int], right: int | None = None) -> tuple[int, Set[int]] | None:
        """Chooses the batch to leave out after a failure, which is the one that failed.

        If one batch after another fails, the weights may be at fault: the last try leaves out the batch that they
        learned from last, and takes the others back.

        Args:
            step: that failed.
            batch: that it failed on, counted from 0.
            skipped: the batches that are left out already.
            right: `right_until` of the failure; where it is given, no other batch is left out.

        Returns:
            The batch before which to go back, and all batches to leave out; None after the last try.
        """
        if step > self._furthest_step:
            self._furthest_step, self._blamed = step, []
        self.num_tries = len(self._blamed)
        if self.num_tries >= self._max_tries:
            return None
        if right is None and 0 < self.num_tries == self._max_tries - 1:
            batch = next((earlier for earlier in reversed(range(batch)) if earlier not in skipped), 0)
            skipped = skipped - set(self._blamed)
        self._blamed.append(batch)
        return (batch, skipped | {batch}) if right is None else (right, skipped)


def gave_up(diverged: Diverged, tries: int, workdir: str) -> Diverged:
    """Returns the error of a run that goes back no more."""
    times = f"{tries} times" if tries else "not once"
    words = f"The run went back {times} and came no further: {workdir}/incidents.jsonl says what was tried."
    return Diverged(f"{diverged} {words}", diverged.step, diverged.batch)


def has_later(strategy: tf.distribute.Strategy, checkpoints: Checkpoints, step: int) -> bool:
    """Returns whether there is a complete checkpoint after a step, as the chief sees it."""
    return bool(collectives.gather(strategy, collectives.is_chief(strategy) and checkpoints.newest_complete > step)[0])


def metadata_of_replicas(state: TrainState) -> dict[str, int]:
    """Returns what a checkpoint notes of the replicas that trained."""
    return {"replicas": state.replicas.devices, "virtual_replicas": state.replicas.virtual}


def require_same_replicas(saved: Saved, state: TrainState) -> Saved:
    """Returns a checkpoint; refuses to train on from one of another number of virtual replicas. Old ones have none."""
    trained, given = saved.metadata.get("virtual_replicas", 0), state.replicas.virtual
    if trained != given:
        raise ValueError(
            f"The checkpoint {saved.path!r} was trained with virtual_replicas={trained}, and {given} were given, with "
            f"which a run has other bits: give virtual_replicas={trained}, or begin a new run in another workdir, "
            "from these weights with init_from."
        )
    return saved


def jit_compile_of(settings: Mapping[str, Any]) -> str:
    """Returns what XLA compiled in a run with recorded settings, as `Config.jit_compile`; older runs record a bool."""
    return Config(jit_compile=settings.get("jit_compile", "none")).jit_compile


def describe_change(saved: Saved, config: Config) -> str:
    """Returns a clause if XLA compiles something else than in the run of a checkpoint; empty: it does not."""
    before, now = jit_compile_of(saved.metadata.get("config", {})), config.jit_compile
    if before == now:
        return ""
    return (
        f"; jit_compile was {before} until here, and is {now}: from here on, last bits differ from those of a run that "
        "goes on as it began" + ", and so do random numbers, as of dropout" * ("loop" in (before, now))
    )


def would_be_replaced(workdir: str, newest: int) -> ValueError:
    """Returns the error of a workdir with checkpoints where none are to be restored."""
    return ValueError(
        f"resume=False was given, but workdir={workdir!r} holds checkpoints, the newest of step {newest}, which a new "
        "run would replace: give another workdir, or resume=True."
    )


def warn_of_replaced(weights_from: str, newest: Saved) -> None:
    """Warns that a run goes on from its newest checkpoint, and not from the weights of a file, if one is given."""
    if weights_from:
        log.warning(
            "The weights of %r are replaced by those of the run's checkpoint of step %d, from which fit goes on: to "
            "train from the file's weights, give another workdir, or call restore after fit has gone on from it.",
            *(weights_from, newest.step),
        )


def is_of_another_model(saved: Saved, different: Sequence[str]) -> ValueError:
    """Returns the error of a checkpoint whose variables are others, or of which others are trained."""
    more = f", and {len(different) - 3} more" if len(different) > 3 else ""
    return ValueError(
        f"The checkpoint {saved.path!r} is of another model or optimizer ({'; '.join(different[:3])}{more}); nothing "
        f"was restored: make the model as it was, or give a workdir of its own, with init_from={saved.path!r}."
    )

"""Owns how far a run has come: what a checkpoint holds of each part, going on from one, and going back to one.

    progress = Progress(state, config)
    progress.resume()                                          # the newest checkpoint of the workdir, if there is one
    window = progress.attach(source, loop, actions, until)     # the parts take over what it holds of them
    progress.save(report, best_steps)                          # between two loops

It does not know how a part makes or reads what is saved of it.
"""

import dataclasses
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from distloop.actions.action import Action, Report, member
from distloop.checkpoints.store import Checkpoints, Saved, load
from distloop.config import Config
from distloop.data.source import Source
from distloop.distributed import workers
from distloop.monitoring.console import say
from distloop.monitoring.records import append_row
from distloop.training.loop import Diverged, TrainLoop
from distloop.training.saved_state import SavedState
from distloop.training.state import TrainState


class Progress:
    """How far a run has come, in memory and in its workdir.

    Attributes:
        is_new: whether it neither trained nor took over a checkpoint.
    """

    def __init__(self, state: TrainState, config: Config):
        """Touches no disk.

        Args:
            state: what training changes.
            config: `workdir` and the settings about checkpoints are read.
        """
        self._state = state
        self._saved_state = SavedState(state)
        self._config = config
        self._checkpoints: Checkpoints | None = None
        if config.workdir:
            self._checkpoints = Checkpoints(os.path.join(config.workdir, "checkpoints"), config.keep_checkpoints)
        self._is_chief = workers.is_chief(state.strategy)
        self.is_new = True
        self._saved: Saved | None = None  # what parts that are not there yet have still to take over
        self._source: Source | None = None
        self._loop: TrainLoop | None = None
        self._until = 0
        self._actions: dict[str, Action] = {}  # by class and position
        self._furthest = 0  # the last step that diverged
        self._blamed: list[int] = []  # the batches that were left out since the run came so far

    def resume(self) -> None:
        """Goes on from the newest checkpoint of the workdir, if the run is new and there is one.

        Raises:
            ValueError: if there is one and `resume=False`, all are damaged, or it is of another model or optimizer.
        """
        if self._checkpoints is None or not self.is_new:
            return
        if not self._config.resume and self._checkpoints.steps:
            raise ValueError(
                f"resume=False was given, but workdir={self._config.workdir!r} holds checkpoints, the newest of step "
                f"{self._checkpoints.steps[-1]}, which a new run would replace: give another workdir, or resume=True."
            )
        if (saved := self._load_newest(self._checkpoints)) is not None:
            self._take(saved)

    def restore(self, path: str | None) -> None:
        """Goes on from a checkpoint.

        Args:
            path: as for `Trainer.restore`.

        Raises:
            ValueError: as for `Trainer.restore`.
        """
        path = os.fspath(path) if path is not None else self._config.workdir
        if os.path.exists(os.path.join(path, "manifest.json")):
            saved: Saved | None = load(path)
        else:
            saved = self._load_newest(Checkpoints(os.path.join(path, "checkpoints"))) if path else None
        if saved is None:
            raise ValueError(
                f"There is no checkpoint in {path!r}: give restore the directory of one, such as "
                "run/checkpoints/500, or a workdir that holds some."
            )
        self._take(saved)

    def follow(self, done: Collection[int], poll_secs: float, timeout_secs: float) -> Iterator[int]:
        """Takes over each checkpoint that another process writes, as for `Checkpoints.follow`; yields its step.

        Raises:
            ValueError: if there is no workdir, or a checkpoint is of another model or optimizer.
            TimeoutError: as for `Checkpoints.follow`.
        """
        if self._checkpoints is None:
            raise ValueError("There are no checkpoints to follow: give Config(workdir=...) the run's workdir.")
        for saved in self._checkpoints.follow(done, poll_secs, timeout_secs):
            self._take(saved)
            yield saved.step

    def take_over(self) -> None:
        """Gives the model, which has just been built, what a checkpoint that was restored before holds of it."""
        if self._saved is not None:
            self._take(self._saved)

    def attach(self, source: Source, loop: TrainLoop, actions: Sequence[Action], until: int) -> dict[str, Any] | None:
        """Takes note of the parts that are saved, and gives them what a restored checkpoint holds of them.

        Args:
            source: the data to train on.
            loop: what trains.
            actions: the user's; their `get_state` is saved.
            until: the step that the run is to end with.

        Returns:
            The log window to go on with, as `TrainLoop.save_window` gave it; None: a new one.
        """
        self._source, self._loop, self._until = source, loop, until
        self._actions = {f"{type(action).__name__}/{i}": action for i, action in enumerate(actions)}
        saved, self._saved, self.is_new = self._saved, None, False
        if saved is None:
            return None
        source.restore_position(saved.notes["input"])
        for name, action in self._actions.items():
            if name in saved.notes["actions"]:
                member(action, "set_state")(saved.notes["actions"][name])
        window: dict[str, Any] = saved.notes["window"]
        return window if window["steps"] else None

    def stop_reason(self, until: int) -> str | None:
        """Says why the checkpoint that is to be taken over was the last of a run until the same step, if it was."""
        notes = self._saved.notes if self._saved is not None else {}
        return notes["stop_reason"] if notes.get("until") == until else None

    def save(self, report: Report | None = None, best_steps: Mapping[str, list[int]] | None = None) -> None:
        """Saves a checkpoint in the background.

        Args:
            report: of the boundary, where there is one.
            best_steps: the steps to keep, by metric; None: as they are.

        Raises:
            ValueError: if there is no workdir, or nothing to save yet.
        """
        if self._checkpoints is None:
            raise ValueError("save needs a place: give Config(workdir=...).")
        if self._source is None or self._loop is None:
            raise ValueError("save has nothing to write before fit has run: call fit first.")
        workers.report_phase(self._state.strategy, "saving")
        kept = self._checkpoints.best_steps | dict(best_steps or {})  # those of an earlier run stay
        states = {name: member(action, "get_state")() for name, action in self._actions.items()}
        notes = {
            "input": self._source.save_position(),
            "window": self._loop.save_window(),
            "actions": {name: state for name, state in states.items() if state is not None},
            "stop_reason": report.stop_reason if report is not None else None,
            "until": self._until,
            "replicas": self._state.strategy.num_replicas_in_sync,
            "config": dataclasses.asdict(self._config),
            "versions": {"tensorflow": tf.__version__, "keras": keras.__version__},
        }
        values = self._saved_state.snapshot()
        if self._is_chief:
            self._checkpoints.save(int(self._state.step), values, notes, kept)

    def wait(self) -> None:
        """Waits until the last save is whole.

        Raises:
            OSError: if it could not be written.
        """
        if self._checkpoints is not None:
            workers.report_phase(self._state.strategy, "waiting for the last save")
            self._checkpoints.wait()

    def has_checkpoint(self) -> bool:
        """Says whether there is any checkpoint in the workdir, as the chief sees it."""
        has_one = self._checkpoints is not None and bool(self._checkpoints.steps)
        return bool(workers.gather(self._state.strategy, has_one)[0])

    def roll_back(self, diverged: Diverged) -> None:
        """Goes back to the last checkpoint before the batch that a step failed on, and leaves the batch out.

        Where the run comes no further, on one batch after the other, its weights may be what is bad: the last try takes
        those batches back and leaves out the one that the weights learned from last. What happened is written to
        `incidents.jsonl`. `attach` is to be called next.

        Args:
            diverged: the failure.

        Raises:
            Diverged: if the run came no further often enough, or there is no checkpoint to go back to.
        """
        assert self._source is not None and self._checkpoints is not None
        if diverged.step > self._furthest:
            self._furthest, self._blamed = diverged.step, []
        skipped, left_out = self._source.skipped_batches, diverged.batch
        if self._blamed and len(self._blamed) == self._config.max_rollbacks - 1:
            left_out = max((batch for batch in range(left_out) if batch not in skipped), default=0)
            skipped = skipped - set(self._blamed)
        may_try = len(self._blamed) < self._config.max_rollbacks
        self._blamed.append(left_out)
        incident = {"step": diverged.step, "batch": diverged.batch, "reason": str(diverged)}
        saved = None
        if may_try:
            saved = self._load_newest(self._checkpoints, lambda s: s.notes["input"]["batches"] <= left_out)
        if saved is None:
            self._note({**incident, "action": "raise"})
            tries = f"{len(self._blamed) - 1} times" if len(self._blamed) > 1 else "not once"
            raise Diverged(
                f"{diverged} The run went back {tries} and came no further: {self._config.workdir}/incidents.jsonl "
                "tells what was tried.",
                diverged.step,
                diverged.batch,
            ) from diverged
        self._note({**incident, "action": "rollback", "checkpoint": saved.step, "left_out": left_out})
        self._warn(f"{diverged} Going back to step {saved.step}, and on without batch {left_out} (counted from 0).")
        saved.notes["input"]["skipped"] = sorted({*skipped, left_out})
        self._take(saved)

    def _load_newest(
        self, checkpoints: Checkpoints, is_wanted: Callable[[Saved], bool] = lambda saved: True
    ) -> Saved | None:
        """Loads a checkpoint; the chief says which one."""
        saved = checkpoints.load_newest(is_wanted) if self._is_chief else None
        step = int(workers.gather(self._state.strategy, -1 if saved is None else saved.step)[0])
        return saved if self._is_chief or step < 0 else checkpoints.load(step)

    def _note(self, incident: Mapping[str, Any]) -> None:
        if not self._is_chief:
            return
        append_row(os.path.join(self._config.workdir, "incidents.jsonl"), incident)

    def _take(self, saved: Saved) -> None:
        """Takes over a checkpoint's values; of what is not built yet, when it is."""
        self._saved, self.is_new = saved, False
        if not self._state.is_built:
            return
        if different := self._saved_state.differences(saved.values):
            more = f", and {len(different) - 3} more" if len(different) > 3 else ""
            self._saved, self.is_new = None, True  # another try is refused again
            raise ValueError(
                f"The checkpoint {saved.path!r} is of another model or optimizer ({'; '.join(different[:3])}{more}); "
                "nothing was restored: make the model as it was, or give another workdir."
            )
        self._saved_state.restore(saved.values)
        self._say(f"step {saved.step} restored from {saved.path}")

    def _say(self, text: str) -> None:
        if self._config.console != "quiet":
            self._warn(text)

    def _warn(self, text: str) -> None:
        """Tells the user, even one who wants quiet."""
        if self._is_chief:
            say(text)

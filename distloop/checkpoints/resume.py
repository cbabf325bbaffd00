"""Resuming: saves the state of each part of a run into checkpoints, and restores each part.

    checkpoints = RunCheckpoints(state, config)
    checkpoints.resume(run)                                       # from the newest one in the workdir, if there is any
    window = checkpoints.attach(source, loop, actions, run)       # restores the parts
    checkpoints.save(report, best_steps)                          # between two loops

This module does not know how a part represents its state.
"""

import contextlib
import functools
import math
import os
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from distloop.actions.action import Action, Report
from distloop.actions.action_state import RunStates
from distloop.checkpoints.checkpoint import Saved
from distloop.checkpoints.loading import (
    BEST,
    Rollback,
    gave_up,
    has_later,
    is_of_another_model,
    load_best,
    load_from,
    load_newest,
    names,
    require_same_virtual_replicas,
    would_be_replaced,
)
from distloop.checkpoints.phases import Phases, number_at
from distloop.checkpoints.store import Checkpoints, follow, in_workdir
from distloop.checkpoints.warm_start import take_over, warm_start
from distloop.checkpoints.writing import DiskWatch
from distloop.data.source import Source
from distloop.distributed import workers
from distloop.errors import first_line
from distloop.log import log
from distloop.model.saved_state import SavedState
from distloop.model.state import TrainState
from distloop.monitoring.console import say, speaker
from distloop.monitoring.directory import Directory, claim_run, directory_of
from distloop.monitoring.records import append_row
from distloop.monitoring.timing import SaveTimes
from distloop.settings import flags
from distloop.settings.config import Config
from distloop.settings.durations import Period
from distloop.training.loop import Diverged, TrainLoop
from distloop.training.window import Window
from distloop.urls import expand
from distloop.variables import WEIGHT_FILES


class RunCheckpoints:
    """The checkpoints of one run.

    Attributes:
        is_new: whether the run has neither trained nor restored a checkpoint.
        times: of the last save and restore.
        disk_watch: ends the process when the disk no longer answers.
        run: the name of the run, from `claim_run`; known to the chief, once it was resumed.
        directory: the workdir, whose lock is held until the last save has ended.
        phases: which of the run's phases the present `fit` is.
    """

    def __init__(self, state: TrainState, config: Config):
        """Touches no disk."""
        self._state, self._saved_state, self._config = state, SavedState(state), config
        self._is_chief = workers.is_chief(state.strategy)
        self._say = speaker(self._is_chief, config.console)
        self._gather = functools.partial(workers.gather, state.strategy)
        self.directory = directory_of(config, workers.Workers(state.strategy))
        self._load_newest = functools.partial(load_newest, state.strategy, share=self.directory.share)
        self.disk_watch = _disk_watch(state.strategy, config)
        self.times = SaveTimes()
        checkpoints = _on_disk(config, self.directory, self.disk_watch, self.times)
        self._checkpoints = checkpoints if config.workdir else None
        self._rollback = Rollback(config.max_rollbacks)
        self.action_states, self.phases = RunStates(), Phases(state)
        self.is_new, self.run, self._shows_best = True, "", False  # the last: whether `resume` restores the newest
        self._saved: Saved | None = None  # the restored checkpoint, until every part has its state
        self._source: Source | None = None
        self._loop: TrainLoop | None = None
        self._run = Period()

    def resume(self, run: Period) -> None:
        """Restores the newest checkpoint of the workdir, if there is one, for a `fit` until the end of a run.

        Raises:
            ValueError: if there is one and `resume=False`, all are damaged, or it is of another kind of run.
        """
        was_past, began_at = self.phases.past is not None, time.monotonic()
        newest = self._newest(self._checkpoints) if self._checkpoints is not None else None
        done = (self._loop.secs, self._loop.tokens) if self._loop else (0.0, 0.0)
        self.phases.enter(run, newest or self._saved, int(self._state.step), *done)
        if (saved := newest or (self._saved if was_past else None)) is not None:  # what was set meanwhile is set back
            self._restore(saved, is_whole=not self.phases.is_of_others)
            self.times.restore = time.monotonic() - began_at

    def _newest(self, checkpoints: Checkpoints) -> Saved | None:
        """Loads the newest checkpoint, if the state is not the one to go on with."""
        if self._is_chief:
            self.run = claim_run(self._config, self.directory.verify)
        if not (self.is_new or self._shows_best):
            return None
        if self.is_new and not self._config.resume and checkpoints.steps:
            raise would_be_replaced(self._config.workdir, checkpoints.steps[-1])
        saved = self._load_newest(checkpoints)
        return saved and require_same_virtual_replicas(saved, self._state)

    def restore(self, path: str | None) -> None:
        """Restores a checkpoint; the path is that of `Trainer.restore`.

        Raises:
            ValueError: if there is none, it is damaged, or it belongs to another model or optimizer.
        """
        path = expand(path) if path is not None else self._config.workdir
        if path.endswith(WEIGHT_FILES):
            warm_start(self._state, path, given=f"restore({path!r})")
            return None
        self.phases.jump()  # the position is for the next `fit`, whatever its data
        if path == BEST:
            return self.restore_best()
        with self.directory.reading(path) as local:
            saved = load_from(self._state.strategy, local)
        if saved is None:
            raise ValueError(
                f"There is no checkpoint in {path!r}: give restore one, such as run/checkpoints/500, or a workdir."
            )
        self._restore(saved._replace(path=path + saved.path.removeprefix(local)))

    def restore_best(self, metric: str = "", *, run_goes_on_from_it: bool = True) -> None:
        """Restores the checkpoint where a metric was best; `resume` restores the newest, if the run goes on from that.

        Raises:
            ValueError: as for `load_best`, or if the checkpoint is damaged.
        """
        with self.directory.reading(self._config.workdir, best=True) as local:
            saved = load_best(in_workdir(local) if local else None, metric, self._gather)
            saved = saved._replace(path=self._config.workdir + saved.path.removeprefix(local))
            self._restore(saved, is_whole=run_goes_on_from_it)
        self._shows_best = not run_goes_on_from_it

    def follow(self, done: Collection[int], poll_secs: float, timeout_secs: float) -> Iterator[int]:
        """Restores each checkpoint that another process writes, as `store.follow`; yields its step.

        Raises:
            ValueError: if a checkpoint is of another model or optimizer.
            TimeoutError: as for `store.follow`.
        """
        assert self._checkpoints is not None
        for saved in follow(self._checkpoints, done, poll_secs, timeout_secs):
            self._restore(saved, is_whole=False)
            yield saved.step

    def restore_built_model(self) -> None:
        """Restores the model, which has just been built, from the checkpoint that was chosen before."""
        if self._saved is not None:
            self._restore(self._saved)

    def attach(self, source: Source, loop: TrainLoop, actions: Sequence[Action], run: Period) -> dict[str, Any] | None:
        """Sets the parts that are saved, and restores them if a checkpoint was restored.

        Returns:
            The window of the next row, to continue, from `TrainLoop.save_window`; None: no checkpoint was restored.

        Raises:
            ValueError: if two actions have one name, or JSON cannot hold an action's state, or as for `resume`.
        """
        is_other, has_data = self._source is not source, self._source is not None
        self._source, self._loop, self._run = source, loop, run
        window, is_over, states, phases = None, False, None, self.phases
        if (saved := self._saved) is not None:
            require_same_virtual_replicas(saved, self._state)
            is_over = phases.past is not None or _is_over(saved, run)  # the position may be in the next `fit`'s data
            begins = phases.begins and is_other
            if not (is_over or begins) and (source.is_astray or source.save_position() != saved.notes["input"]):
                source.restore_position(saved.notes["input"])
            if phases.past is None:
                states = None if begins and has_data else saved.notes["actions"]
                loop.open_boundary = saved.notes.get("open_boundary")
            on_disk = None if is_over or phases.stop_reason else self._checkpoints
            if on_disk is not None and has_later(self._state.strategy, on_disk, saved.step):
                self.save()  # so the run has left the later ones before its first row
                on_disk.join()
            window = _emptied(saved.notes["window"], self._state) if phases.begins else saved.notes["window"]
            loop.reported = (phases.past or saved.notes).get("reported", {})
            loop.secs, loop.tokens = max(loop.secs, saved.notes.get("secs", 0.0)), saved.notes.get("tokens", math.nan)
        self.action_states.attach(actions, states, is_written=self._checkpoints is not None)
        phases.begin(has_other_data=is_other)
        self._saved, self.is_new = saved if is_over or phases.stop_reason else None, False
        return window

    def save(self, report: Report | None = None, best_steps: Mapping[str, list[int]] | None = None) -> None:
        """Saves a checkpoint in the background.

        Args:
            report: of the boundary, if there is one.
            best_steps: by metric, the steps to keep; those of other metrics stay, as of an earlier run.

        Raises:
            ValueError: if there is no workdir, or nothing to save yet.
        """
        if self._checkpoints is None:
            raise ValueError("save needs a workdir: give Config(workdir=...).")
        if self._source is None or self._loop is None:
            raise ValueError("save has nothing to write before fit has run: call fit first.")
        if self._saved is not None and self.phases.is_of_others:
            return  # this optimizer is not the checkpoint's
        step, values, notes = self._content(report)
        if self._is_chief:
            with contextlib.suppress(OSError):  # of a disk that cannot be read: the save fails, and that is logged
                self.directory.verify()
            self._checkpoints.save(step, values, notes, best_steps)

    def _content(self, report: Report | None) -> tuple[int, dict[str, tf.Tensor], dict[str, Any]]:
        """Returns step, values and notes of a checkpoint of now; the values are the chief's alone."""
        assert self._source is not None and self._loop is not None
        workers.report_phase(self._state.strategy, "saving")
        saved = self._saved  # restored since: the parts get their state from it at the next fit
        notes = saved.notes if saved else _notes(self._source, self._loop, self.action_states, self._run, report)
        values = self._saved_state.snapshot(is_needed=self._is_chief)
        return int(self._state.step), values, self.phases.notes() | notes | _circumstances(self._state, self._config)

    def save_and_wait(self) -> None:
        """Saves the run as it is, and waits until that has ended."""
        self.save()
        self.wait()

    def wait(self) -> None:
        """Waits until the last save has ended.

        Raises:
            OSError: if it could not be written.
        """
        if self._checkpoints is not None:
            workers.report_phase(self._state.strategy, "waiting for the last save")
            self._checkpoints.wait()

    def can_go_back(self) -> bool:
        """Returns whether there is a checkpoint with a position in the data given to `attach`, as the chief sees it."""
        is_begun = self._source is not None and self._source.batches_taken  # else the position is in other data
        can = bool(is_begun and self._checkpoints and self._checkpoints.steps)
        return bool(workers.gather(self._state.strategy, can)[0])

    def roll_back(self, diverged: Diverged) -> None:
        """Restores the last checkpoint before the batch that a step failed on, and leaves the batch out.

        The incident is written to `incidents.jsonl`. Call `attach` next.

        Raises:
            Diverged: if the run has gone back often enough without progress, or there is no checkpoint to go back to.
        """
        assert self._source is not None and self._checkpoints is not None
        incident: dict[str, Any] = {"step": diverged.step, "batch": diverged.batch, "reason": str(diverged)}
        saved = None
        if (choice := self._rollback.choose(diverged.step, diverged.batch, self._source.skipped_batches)) is not None:
            left_out, skipped = choice
            number = number_at(self.phases.notes())  # not of an earlier phase, whose batches are others
            is_before = lambda it: it.notes["input"]["batches"] <= left_out and number_at(it.notes) == number  # noqa: E731
            saved = self._load_newest(self._checkpoints, is_before)
        if choice is None or saved is None:
            _write_incident(self._state, self._config, {**incident, "action": "raise"})
            raise gave_up(diverged, self._rollback.num_tries, self._config.workdir) from diverged
        incident |= {"action": "rollback", "checkpoint": saved.step, "left_out": left_out}
        _write_incident(self._state, self._config, incident)
        if self._is_chief:
            say(f"{diverged} Going back to step {saved.step}, and on without batch {left_out} (counted from 0).")
            self._checkpoints.drop_later(saved.step)
        self._source.restore_position(saved.notes["input"])  # in batches of the present size, as those to leave out
        self._source.skipped_batches = set(skipped)
        saved.notes["input"] = self._source.save_position()
        self._restore(saved)

    def _restore(self, saved: Saved, *, is_whole: bool = True) -> None:
        """Restores a checkpoint, at once or when the model is built; of a phase of others, all but the optimizer."""
        self.directory.note_saved()
        self._saved, self.is_new, self._shows_best = saved, False, False
        if not self._state.is_built:
            return
        different = self._saved_state.differences(saved.values)
        if different and (is_whole or any(name.startswith("model/") for name in different)):
            self._saved, self.is_new = None, True  # another try is refused again
            raise is_of_another_model(saved, different, self.phases.hint(saved))
        if different:
            take_over(self._state, self._saved_state, saved.values, with_averages=not self.phases.begins)
        else:
            self._saved_state.restore(saved.values)
        self._say(f"step {saved.step} restored from {saved.path}{', all but the optimizer' * bool(different)}")


def _disk_watch(strategy: tf.distribute.Strategy, config: Config) -> DiskWatch:
    """Returns the watch over a run's checkpoints; other workers than the chief write none."""
    heartbeat = workers.heartbeat_of(strategy)
    fail = heartbeat.fail if heartbeat is not None else lambda _: None
    hang_timeout = config.hang_timeout if workers.is_chief(strategy) else 0.0
    return DiskWatch(os.path.join(config.local_workdir, "checkpoints"), hang_timeout, fail)


def _on_disk(config: Config, directory: Directory, watch: DiskWatch, times: SaveTimes) -> Checkpoints:
    """Returns the checkpoints that are written to a directory under its lock and a watch; it then knows of them."""
    workdir, keep = config.local_workdir, config.keep_checkpoints
    checkpoints = in_workdir(workdir, keep, watch=watch.over, verify=directory.verify, times=times)
    directory.finish = checkpoints.wait
    if workdir == config.workdir:
        directory.saved = functools.partial(names, checkpoints)
    return checkpoints


def _write_incident(state: TrainState, config: Config, incident: Mapping[str, Any]) -> None:
    if workers.is_chief(state.strategy):
        path = os.path.join(config.local_workdir, "incidents.jsonl")
        try:
            append_row(path, incident)
        except OSError as error:  # of a disk that is full, on which a run may train
            log.warning("%s cannot be written (%s): the report will lack this incident.", path, first_line(error))


def _emptied(window: Mapping[str, Any], state: TrainState) -> dict[str, Any]:
    """Returns a window for a phase that begins, with the counts of the one before; Keras metrics begin, too."""
    state.keras_metrics.reset()
    return Window(examples_seen=window.get("examples_seen")).save()


def _is_over(saved: Saved, run: Period) -> bool:
    """Returns whether a run of this length has nothing left to do after a checkpoint."""
    done = saved.notes.get("secs", 0.0), saved.notes.get("tokens", 0.0)
    return run.is_over(saved.step, *done) and saved.notes.get("open_boundary") is None


def _notes(
    source: Source, loop: TrainLoop, action_states: RunStates, run: Period, report: Report | None
) -> dict[str, Any]:
    """Returns what a checkpoint notes of its run; the last step may not be known yet."""
    is_at_end = report is not None and report.step >= report.until and not report.stop_reason
    reported = loop.reported if report is None else report.metrics
    return {
        "input": source.save_position(),
        "window": loop.save_window(),
        "reported": {name: float(value) for name, value in reported.items()},
        "actions": action_states.read(),
        "stop_reason": report.stop_reason if report is not None else None,
        "until": run.steps or (report.step if report is not None and is_at_end else None),
        "until_secs": run.secs,
        "secs": loop.secs,
        "tokens": loop.tokens,
        "open_boundary": loop.open_boundary,
    }


def _circumstances(state: TrainState, config: Config) -> dict[str, Any]:
    """Returns what a checkpoint notes of the process that saved it."""
    return {
        "replicas": state.strategy.num_replicas_in_sync,
        "virtual_replicas": state.virtual_replicas,
        "config": flags.shown_settings(config),
        "versions": {"tensorflow": tf.__version__, "keras": keras.__version__},
    }

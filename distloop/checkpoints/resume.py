"""Resuming: saves the state of each component of a run into checkpoints, and restores each.

    checkpoints = RunCheckpoints(state, config)
    checkpoints.resume(run)                                       # from the newest one in the workdir, if there is any
    checkpoints.attach(source, actions, run, config)              # restores them
    loop.train(..., progress=checkpoints.begin(loop))
    checkpoints.save(report, best_steps)                          # between two loops, or after them

This module does not know how a component represents its state.
"""

import contextlib
import dataclasses
import functools
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from distloop.actions.action_state import RunStates
from distloop.checkpoints.checkpoint import Saved
from distloop.checkpoints.loading import (
    BEST,
    Rollback,
    describe_change,
    gave_up,
    has_later,
    is_of_another_model,
    load_best,
    load_from,
    load_newest,
    metadata_of_replicas,
    require_same_replicas,
    warn_of_replaced,
    would_be_replaced,
)
from distloop.checkpoints.store import Checkpoints, in_workdir
from distloop.data.source import Source
from distloop.distributed import collectives, devices
from distloop.errors import first_line
from distloop.installed import import_part
from distloop.log import log, say, speaker
from distloop.model.saved_state import SavedState
from distloop.model.state import TrainState
from distloop.monitoring.timing import SaveTimes
from distloop.settings import flags
from distloop.settings.config import Config
from distloop.settings.durations import Period
from distloop.training.action import KEPT, Action, Kept, Report
from distloop.training.loop import Diverged, TrainLoop
from distloop.training.window import Progress
from distloop.urls import expand
from distloop.variables import WEIGHT_FILES
from distloop.workdir.directory import DiskWatch, directory_of
from distloop.workdir.records import append_row

_STEP_FAILED = "The last step failed, or an error came within it or within an evaluation"


class RunCheckpoints:
    """The checkpoints of one run.

    Attributes:
        is_new: whether the run has neither trained nor restored a checkpoint.
        weights_from: the file whose weights `restore` has set last; empty: it has set none.
        times: of the last save and restore.
        disk_watch: ends the process when the disk no longer answers.
        directory: the workdir, whose lock is held while the checkpoints are entered as a context.
        stop_reason: why an action has ended the run that `fit` was given; None: no action has.
    """

    def __init__(self, state: TrainState, config: Config):
        """Touches no disk."""
        self._state, self._saved_state = state, SavedState(state)
        self._config = self._settings = config
        self._is_chief = collectives.is_chief(state.strategy)
        self.directory = directory_of(config, collectives.Workers(state.strategy))
        self._load_newest = functools.partial(load_newest, state.strategy, send=self.directory.send_to_hosts)
        self.disk_watch, self.times = _disk_watch(state.strategy, config), SaveTimes()
        options: dict[str, Any] = {"watch": self.disk_watch.over, "verify": self.directory.verify, "times": self.times}
        checkpoints = in_workdir(config.local_workdir, config.keep_checkpoints, **options)
        self._checkpoints = checkpoints if config.workdir else None
        self._rollback = Rollback(config.max_rollbacks)
        self.action_states, self.stop_reason, self.weights_from = RunStates(), None, ""
        self.is_new, self._shows_best = True, False  # the last: whether `resume` restores the newest
        self._saved: Saved | None = None  # the restored checkpoint, until every component has its state
        self._source: Source | None = None
        self._run, self._progress = Period(), Progress()
        self._loop: TrainLoop | None = None  # which goes on from this progress; None: none does yet
        self._ended: Period | None = None  # the length of the last `fit`, if that has come to its end
        self._data_from = 0  # the step at which the run began to read its present data

    def __enter__(self) -> None:
        """Takes the workdir's lock, as `Directory`; all workers call it."""
        self.directory.__enter__()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        """Waits until the last save has ended, well or not, and releases the lock; all workers call it."""
        try:
            if self._checkpoints is not None:
                self._checkpoints.join()
        finally:
            self.directory.__exit__(kind, error, trace)

    def resume(self) -> None:
        """Restores the newest checkpoint of the workdir, if there is one.

        Raises:
            ValueError: if there is one and `resume=False`, all are damaged, it is of another kind of run, or there is
                none after an error within a step.
        """
        began_at = time.monotonic()
        if self._checkpoints is not None and (newest := self._newest(self._checkpoints)) is not None:
            warn_of_replaced(self.weights_from if self.is_new else "", newest)
            self.restore_saved(newest)
            self.times.record(restore=time.monotonic() - began_at)

    def _newest(self, checkpoints: Checkpoints) -> Saved | None:
        """Loads the newest checkpoint, if the state is not the one to go on with."""
        if not (self.is_new or self._shows_best) and self._state.may_be_saved:
            return None
        if self.is_new and not self._config.resume and checkpoints.steps:
            raise would_be_replaced(self._config.workdir, checkpoints.steps[-1])
        if (saved := self._load_newest(checkpoints)) is None and not self._state.may_be_saved:
            raise ValueError(f"{_STEP_FAILED}, and there is no checkpoint: make a new Trainer.")
        return saved and require_same_replicas(saved, self._state)

    def restore(self, path: str | None, which: str = "newest") -> None:
        """Restores a checkpoint; the arguments are those of `Trainer.restore`.

        Raises:
            ValueError: if there is none, it is damaged, or it belongs to another model or optimizer.
        """
        devices.require_no_other_scope(self._state.strategy)
        if which not in ("newest", BEST):
            raise ValueError(f"restore was given which={which!r}; it takes 'newest' or 'best'.")
        path = expand(path) if path is not None else self._config.workdir
        if path.endswith(WEIGHT_FILES):
            given = f"restore({path!r})"
            import_part("warm_start.warm_start", given).warm_start(self._state, path, given=given)
            self.weights_from, self._shows_best = path, False
            return None
        self._ended = None  # the position is for the next `fit`, whatever its data
        if BEST in (path, which):
            return self.restore_best(path="" if path == BEST else path)
        with self.directory.reading(path) as local:
            saved = load_from(self._state.strategy, local)
        if saved is None:
            raise ValueError(
                f"There is no checkpoint in {path!r}: give restore one, such as run/checkpoints/500, or a workdir."
            )
        self.restore_saved(saved._replace(path=path + saved.path.removeprefix(local)))

    def restore_best(self, metric: str = "", *, path: str = "", run_goes_on_from_it: bool = True) -> None:
        """Restores the checkpoint where a metric was best; `resume` restores the newest, if the run goes on from that.

        The path is of a workdir; empty: this run's.

        Raises:
            ValueError: as for `load_best`, or if the checkpoint is damaged.
        """
        path = path or self._config.workdir
        with self.directory.reading(path, best=True) as local:
            gather = functools.partial(collectives.gather, self._state.strategy)
            saved = load_best(in_workdir(local) if local else None, metric, gather)
            self.restore_saved(saved._replace(path=path + saved.path.removeprefix(local)))
        self._shows_best = not run_goes_on_from_it

    def restore_built_model(self) -> None:
        """Restores the model, which has just been built, from the checkpoint that was chosen before."""
        if self._saved is not None:
            self.restore_saved(self._saved)

    @property
    def progress(self) -> Progress:
        """How far the run has come."""
        return self._progress if self._loop is None else self._loop.progress

    def begin(self, loop: TrainLoop) -> Progress:
        """Returns the progress that a loop goes on from; from now on the progress of the run is that of the loop."""
        self._progress, self._loop = self.progress, loop
        return self._progress

    def attach(self, source: Source, actions: Sequence[Action], run: Period, settings: Config) -> None:
        """Sets the components that are saved, and restores them if a checkpoint was restored, with the progress.

        Args:
            source: what is trained on.
            actions: of the run.
            run: its length.
            settings: of this `fit`, which a checkpoint records.

        Raises:
            ValueError: if two actions have one name, or JSON cannot hold an action's state, or as for `resume`.
        """
        saved, is_other_data = self._saved, self._source is not source
        self._source, self._run, self._settings = source, run, settings
        self._progress, self._loop = self.progress, None
        self.action_states.attach(actions, saved and saved.metadata["actions"], is_written=bool(self._checkpoints))
        self.stop_reason, is_done = None, False
        if saved is None:
            self._data_from = int(self._state.step) if is_other_data else self._data_from
        else:
            require_same_replicas(saved, self._state)
            if not (is_done := self._attach_progress(saved)):  # else the position may be in the data of the next `fit`
                self._attach_data(saved, is_other=is_other_data)
        self._saved, self.is_new, self._shows_best = saved if is_done else None, False, False

    def _attach_progress(self, saved: Saved) -> bool:
        """Restores how far the run has come; returns whether nothing is left to train for this `fit`."""
        loaded, run = Progress.load(saved.step, saved.metadata), self._run
        secs = max(self._progress.secs, loaded.secs)
        is_over = run.is_over(loaded.step, secs, loaded.tokens)
        is_its_own = _end_of(saved) == run and run != self._ended  # the checkpoint is not of an earlier or later `fit`
        boundary = loaded.open_boundary if is_its_own or not is_over or saved.step == run.steps else None
        self._progress = dataclasses.replace(loaded, secs=secs, open_boundary=boundary)
        self.stop_reason = saved.metadata["stop_reason"] if is_its_own else None
        return bool(self.stop_reason) or (is_over and boundary is None)

    def _attach_data(self, saved: Saved, *, is_other: bool) -> None:
        """Restores the position in the data; other data than that of a `fit` before starts at its beginning."""
        assert self._source is not None
        position = saved.metadata["input"]
        if is_other and _end_of(saved) == self._ended:
            self._data_from = saved.step
        else:
            self._data_from = saved.metadata.get("data_from", 0)
            if self._source.is_lost or self._source.position() != position:
                self._source.go_to(position)
        if self._checkpoints is not None and has_later(self._state.strategy, self._checkpoints, saved.step):
            self.save()  # so the run has left the later ones before its first row
            self._checkpoints.join()

    def end(self) -> None:
        """Notes that `fit` has come to its end: other data of the next one starts at its beginning."""
        self._ended = self._run

    def save(self, report: Report | None = None, kept: Kept = KEPT) -> None:
        """Saves a checkpoint in the background.

        Args:
            report: of the boundary, if there is one.
            kept: what is kept with it.

        Raises:
            ValueError: if there is no workdir, nothing to save yet, or an error came within a step.
        """
        devices.require_no_other_scope(self._state.strategy)
        if self._checkpoints is None:
            raise ValueError("save needs a workdir: give Config(workdir=...).")
        if self._source is None:
            raise ValueError("save has nothing to write before fit has run: call fit first.")
        if not self._state.may_be_saved:
            raise ValueError(f"{_STEP_FAILED}: call restore or fit first, which go back to a checkpoint.")
        step, values, metadata = self._content(report)
        if self._is_chief:
            with contextlib.suppress(OSError):  # of a disk that cannot be read: the save fails, and that is logged
                self.directory.verify()
            self._checkpoints.save(step, values, metadata | ({"stays": True} if kept.stays else {}), kept.best_steps)

    def _content(self, report: Report | None) -> tuple[int, dict[str, tf.Tensor], dict[str, Any]]:
        """Returns step, values and metadata of a checkpoint of now; the values are the chief's alone."""
        collectives.report_phase(self._state.strategy, "saving")
        facts = self._saved.metadata if self._saved else self._metadata(report)  # restored since, and not yet attached
        values = self._saved_state.snapshot(is_needed=self._is_chief)
        metadata = {"data_from": self._data_from} | facts | _circumstances(self._state, self._settings)
        return int(self._state.step), values, metadata

    def _metadata(self, report: Report | None) -> dict[str, Any]:
        """Returns what a checkpoint records of its run; the last step may not be known yet."""
        assert self._source is not None
        run, progress, until, stop_reason = self._run, self.progress, self._run.steps or None, None
        if report is not None:
            progress, stop_reason = dataclasses.replace(progress, reported=report.metrics), report.stop_reason
            until = until or (report.step if report.step >= report.until and not stop_reason else None)
        ends = {"until": until, "until_secs": run.secs, "until_tokens": run.tokens, "stop_reason": stop_reason}
        return {"input": self._source.position(), "actions": self.action_states.read(), **progress.save(), **ends}

    def last_step(self) -> int | None:
        """Returns the step of the last checkpoint, once it is written; None: there is none."""
        with contextlib.suppress(OSError):
            self.wait()
        return self._checkpoints.steps[-1] if self._checkpoints and self._checkpoints.steps else None

    def save_and_wait(self) -> None:
        """Saves the run as it is, and waits until that has ended; warns in its place where the best one is shown."""
        if not self._shows_best:
            self.save()
            self.wait()
        elif self._is_chief:
            shown = f"the model shows the best checkpoint, of step {int(self._state.step)}"
            log.warning("Nothing saved: %s; the run goes on from step %d, which is saved.", shown, self.progress.step)

    def wait(self) -> None:
        """Waits until the last save has ended.

        Raises:
            OSError: if it could not be written.
        """
        if self._checkpoints is not None:
            collectives.report_phase(self._state.strategy, "waiting for the last save")
            self._checkpoints.wait()

    def can_go_back(self) -> bool:
        """Returns whether there is a checkpoint with a position in the data given to `attach`, as the chief sees it."""
        # Where no batch was taken, the position is in other data.
        can = bool(self._source and self._source.batches_taken and self._checkpoints and self._checkpoints.steps)
        return bool(collectives.gather(self._state.strategy, can)[0])

    def roll_back(self, diverged: Diverged) -> None:
        """Restores the last checkpoint before the batch that a step failed on, and leaves the batch out.

        Where hardware is to blame, it restores the last one up to the state that was right, and leaves out no batch.
        The incident is written to `incidents.jsonl`. Call `attach` next.

        Raises:
            Diverged: if the run has gone back often enough without progress, or there is no checkpoint to go back to.
        """
        assert (source := self._source) is not None and self._checkpoints is not None
        incident: dict[str, Any] = {"step": diverged.step, "batch": diverged.batch, "reason": str(diverged)}
        saved, right, earlier = None, diverged.right_until, source.skipped_batches
        if (choice := self._rollback.choose(diverged.step, diverged.batch, earlier, right)) is not None:
            before, skipped = choice
            saved = self._load_newest(self._checkpoints, lambda it: self._is_before(before, source, it.metadata))
        if choice is None or saved is None:
            _write_incident(self._state, self._config, {**incident, "action": "raise"})
            raise gave_up(diverged, self._rollback.num_tries, self._config.workdir) from diverged
        incident |= {"action": "rollback", "checkpoint": saved.step} | ({"left_out": before} if right is None else {})
        _write_incident(self._state, self._config, incident)
        if self._is_chief:
            on = "with the same batches" if right is not None else f"without batch {before} (counted from 0)"
            say(f"{diverged} Going back to step {saved.step}, and on {on}.")
            self._checkpoints.drop_later(saved.step)
        # The position is converted into batches of now, as those to leave out are.
        saved.metadata["input"] = source.convert(saved.metadata["input"]) | {"skipped": sorted(skipped)}
        self.restore_saved(saved)

    def _is_before(self, batch: int, source: Source, facts: Mapping[str, Any]) -> bool:
        """Returns whether a checkpoint was saved before a batch of the present data, by its metadata."""
        return facts.get("data_from", 0) == self._data_from and source.convert(facts["input"])["batches"] <= batch

    def restore_saved(self, saved: Saved) -> None:
        """Restores a checkpoint, at once or when the model is built.

        Raises:
            ValueError: if it is of another model or optimizer.
        """
        self.directory.record_saved()
        self._saved, self.is_new, self._shows_best = saved, False, False
        if not self._state.is_built:
            return
        if different := self._saved_state.differences(saved.values):
            self._saved, self.is_new = None, True  # another try is refused again
            raise is_of_another_model(saved, different)
        self._saved_state.restore(saved.values)
        if self._state.average is not None:
            self._state.average.set_state(saved.metadata.get("average"))
        say = speaker(self._is_chief, self._config.console)
        say(f"step {saved.step} restored from {saved.path}{describe_change(saved, self._config)}")


def _disk_watch(strategy: tf.distribute.Strategy, config: Config) -> DiskWatch:
    """Returns the watch over a run's checkpoints; other workers than the chief write none."""
    heartbeat = collectives.heartbeat_of(strategy)
    fail = heartbeat.fail if heartbeat is not None else lambda _: None
    hang_timeout = config.hang_timeout if collectives.is_chief(strategy) else 0.0
    return DiskWatch(os.path.join(config.local_workdir, "checkpoints"), hang_timeout, fail)


def _write_incident(state: TrainState, config: Config, incident: Mapping[str, Any]) -> None:
    if collectives.is_chief(state.strategy):
        path = os.path.join(config.local_workdir, "incidents.jsonl")
        try:
            append_row(path, incident)
        except OSError as error:  # of a disk that is full, on which a run may train
            log.warning("%s cannot be written (%s): the report will lack this incident.", path, first_line(error))


def _end_of(saved: Saved) -> Period:
    """Returns the length of the run that saved a checkpoint, as far as the checkpoint records it."""
    secs, tokens = saved.metadata.get("until_secs", 0.0), saved.metadata.get("until_tokens", 0.0)
    return Period(0 if secs or tokens else saved.metadata.get("until") or 0, secs, tokens)


def _circumstances(state: TrainState, config: Config) -> dict[str, Any]:
    """Returns what a checkpoint records of the process that saved it."""
    return {
        "average": state.average.get_state() if state.average is not None else None,
        **metadata_of_replicas(state),
        "config": flags.shown_settings(config),
        "versions": {"tensorflow": tf.__version__, "keras": keras.__version__},
    }

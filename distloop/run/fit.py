"""One call of `Trainer.fit`: resume, train, go back to a checkpoint if a loss diverges, save and leave if interrupted.

    run = Fit(state=state, config=config, ...)
    run.resume()
    with run.delivering(), run.interruptible():     # when asked to stop: saves, and leaves with code 75
        run.train()

It puts the parts of a run together and knows their order, and not how any of them works.
"""

import contextlib
import dataclasses
import functools
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from distloop.actions import built_in
from distloop.actions.evaluate import Evaluate, earlier_rows
from distloop.actions.save import SaveCosts, make_save, require_metrics
from distloop.actions.stop_early import SyncStop
from distloop.actions.write import JsonWriter, Write
from distloop.checkpoints.loading import left_files, may_lack_best
from distloop.checkpoints.resume import RunCheckpoints
from distloop.checkpoints.warm_start import warm_start
from distloop.data.iterators import read_again
from distloop.data.source import Source
from distloop.distributed import collectives
from distloop.distributed.strategies import has_gpus
from distloop.errors import cannot_be_written, first_line
from distloop.graph_functions import TRAINING_PASSES, count_flops
from distloop.log import log, say, speaker
from distloop.model.state import TrainState
from distloop.monitoring.console import Console, is_notebook, make_console
from distloop.monitoring.curves import History
from distloop.monitoring.deliveries import Deliveries
from distloop.monitoring.profiler import Profile
from distloop.monitoring.tensorboard import SummaryWriter
from distloop.monitoring.timing import Clock
from distloop.monitoring.writers import RunFile, Writer
from distloop.optimizers import learning_rates
from distloop.run import agreement, overview, run_length
from distloop.run.agreement import require_same_run, require_same_trainable
from distloop.settings import flags
from distloop.settings.config import Config
from distloop.settings.durations import Plan, Units
from distloop.training.action import Action, Report, member, metrics_to_restore
from distloop.training.boundary import run_actions, started
from distloop.training.loop import Diverged, Host, TrainLoop
from distloop.workdir import ledger
from distloop.workdir.records import unix_time
from distloop.workdir.run_lock import LockLost
from distloop.workers.heartbeat import is_collective_error
from distloop.workers.preemption import Interrupted, OtherFailed, StopRequests

_PERIODS = "log_every checkpoint_every histograms_every check_replicas_every gradient_noise_every".split()


@dataclasses.dataclass(kw_only=True)
class Fit:
    """One call of `Trainer.fit`; its arguments have been checked.

    Attributes:
        state: what training changes.
        config: the settings of the run, as this call was given them.
        checkpoints: of the run.
        make_loop: returns the training loop; called once the weights are restored.
        source: the data to train on.
        units: of the durations; `units.run` is the length of the run.
        evaluations: an action for each dataset to evaluate on.
        actions: the user's.
        writers: the user's; the chief's are used.
        forward_pass: traced for TensorBoard's graph and to count floating-point operations.
        clock: measures where the time of the run goes.
    """

    state: TrainState
    config: Config
    checkpoints: RunCheckpoints
    make_loop: Callable[[], TrainLoop]
    source: Source
    units: Units
    evaluations: Sequence[Evaluate]
    actions: Sequence[Action]
    writers: Sequence[Writer]
    forward_pass: overview.ForwardPass
    clock: Clock

    def __post_init__(self) -> None:
        self._loop: TrainLoop
        self._window: Mapping[str, Any] | None = None  # the open window of the checkpoint
        self._has_gone_back = False
        self._stop_requests: StopRequests | None = None
        self._has_finished, self._is_training, self._history = False, False, History()
        self._say = speaker(self._is_chief, self.config.console)
        workdir, verify = self.config.local_workdir, self.checkpoints.directory.verify
        self._goodput = built_in.Goodput(workdir, self.clock.seconds, self._is_chief, verify)
        self._measurements: list[Action] = [built_in.MemoryUse(workdir), self._goodput] if workdir else []
        self._plan = Plan(self.units, is_chief=self._is_chief)
        every, updates = self.config.gradient_noise_every, [update.name for update in self.state.spec.updates]
        self._noise = [built_in.GradientNoise(every, updates)] if every else []
        periods = [getattr(self.config, name) for name in _PERIODS]
        self._plan.check([*periods, *(action.every for action in [*self.evaluations, *self.actions])])

    def resume(self) -> None:
        """Restores the newest checkpoint of the workdir; a new run starts from the weights of `init_from`."""
        require_same_trainable(self.state)
        require_same_run(self.state, self.units.run.last_step, self.evaluations, self.actions)
        self.checkpoints.resume()
        self._began = self._step
        if self.config.init_from and self.checkpoints.is_new:
            self._say(warm_start(self.state, self.config.init_from, self.config.init_rename))
        self._loop = self.make_loop()
        self._loop.log_every = run_length.log_every(self.config, self.units)
        state, again = self.state, self._loop.trace_again
        learning_rates.resolve(state.plain_optimizers.values(), self.units, again, state.count_tokens)
        self._attach()

    @property
    def is_over(self) -> bool:
        """Whether there is nothing left to train."""
        is_at_end = self.units.run.is_over(self._step, self._loop.secs, self._loop.tokens)
        return bool(self.checkpoints.stop_reason) or (is_at_end and self._loop.open_boundary is None)

    def delivering(self) -> contextlib.AbstractContextManager[Deliveries]:
        """Returns a context in which the user's writers are open."""
        writers = self.writers if self._is_chief and not self.config.fast_dev_run else ()
        local, left_files = self.config.local_workdir, lambda: _left_by(self)
        self._deliveries = Deliveries(writers, local, self.config.workdir, left_files)
        shown = self._step - (self._loop.open_boundary is not None)  # the row of an open boundary is yet to come
        return self._deliveries.open(shown, flags.run_settings(self.config), is_over=self.is_over)

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        """Saves the run when a signal or `max_secs` asks for it; ends the process, except a notebook's, with code 75.

        Raises:
            SystemExit: with code 75.
        """
        stays, has_workdir = is_notebook(), bool(self.config.workdir)
        stops = StopRequests(self.config.max_secs, catch_signals=has_workdir or stays, may_quit=not stays)
        with stops as self._stop_requests, agreement.announced(self.state, self.config, self.source):
            for evaluation in self.evaluations:
                evaluation.stop_requests = stops
            try:
                yield
            except Interrupted as interrupted:
                if saves := has_workdir and interrupted.has_trained:
                    self.checkpoints.save_and_wait()
                saved = ", checkpoint saved" if saves else ""
                if isinstance(interrupted, OtherFailed):
                    interrupted = OtherFailed(f"{interrupted} ({_tell(self, '')})")
                if self._is_chief:  # with console=quiet, too
                    say(f"{interrupted}{saved}. Run the same {'cell' if stays else 'command'} to resume.")
                if not stays:
                    raise SystemExit(interrupted.exit_code) from None
            except LockLost:
                raise  # nothing may be saved
            except Diverged:
                self._say(_nothing_saved(self))
                raise
            except (Exception, KeyboardInterrupt) as error:
                if has_workdir and self._is_training and self._step > self._began:
                    _save_after(self, error)
                raise

    def result(self) -> History:
        """Returns the last numbers, and all rows of this call."""
        self._history.update(self._loop.reported)
        return self._history

    def train(self) -> None:
        """Trains until the run is over and its last checkpoint is complete; does nothing if it is over already.

        Raises:
            Interrupted: if the run is to be saved and left.
            Diverged: at a step that fails, if there is no checkpoint to go back to.
        """
        if self.is_over:
            self._say(_why_over(self))
            return self._finish()
        if self.state.average is not None:
            self.state.average.begin_at(run_length.first_averaged(self.config, self.units), self._step)
        _announce(self)
        self._prepare()
        with started([*self._measurements, *self.actions], self._report, is_chief=self._is_chief):
            while True:
                try:
                    self._train()
                    break
                except Diverged as diverged:
                    self._go_back(diverged)
            self._finish()

    def _finish(self) -> None:
        """Restores the best checkpoint if an action asks for it."""
        self._has_finished = True
        self.checkpoints.end()
        for metric in metrics_to_restore(self.actions):
            with may_lack_best():
                self.checkpoints.restore_best(metric, run_goes_on_from_it=False)

    def _train(self) -> None:
        """Trains from the current step, with a profile and writers that are closed at the end."""
        profile = Profile(self.config.profile, os.path.join(self.config.local_workdir, "train"), writes=self._is_chief)
        with contextlib.closing(profile), Write(self._open_writers(), self.checkpoints.directory.verify) as write:
            if self.config.eval_first and self._step == 0:
                run_actions([*self.evaluations, write], replace(self._report(), until=0), self.clock, self._plan)
            actions = self._all_actions(write, profile)
            console = next((writer for writer in write.writers if isinstance(writer, Console)), None)
            host = Host(
                plan=self._plan,
                stop_requests=self._stop_requests,
                clock=self.clock,
                profile=profile,
                executor=self._executor,
                say=self._say,
                show_progress=Host.show_progress if console is None or self.config.eager else console.show_progress,
            )
            read_again(self.source.behind, self.state.strategy, host.stop_requests, host.say, host.show_progress)
            self._loop.require_metrics = functools.partial(require_metrics, self.actions, self.evaluations)
            self._is_training = True
            self._loop.train(self.source, self.units.run.last_step, actions, host, window=self._window)
            self._is_training = False
            with self.clock.phase("saving"):
                self.checkpoints.wait()
        if console is not None:
            console.summarize(self.clock, self.source.against_waiting)

    def _go_back(self, diverged: Diverged) -> None:
        """Restores a checkpoint from before the batch that failed; raises the failure again if there is none."""
        hint = f"; --replay={diverged.step} shows the step again." if self.config.workdir else "."
        diverged = Diverged(str(diverged).removesuffix(".") + hint, diverged.step, diverged.batch)
        if self.config.on_divergence != "rollback":
            raise diverged
        with self._goodput.between_starts(self._step):
            self.checkpoints.roll_back(diverged)
            self._deliveries.discard(self._step + 1)
            self._attach()
        self._has_gone_back = True

    def _attach(self) -> None:
        """Restores the position in the data, the state of the actions and the open window from the checkpoint."""
        actions = [*self.actions, *self.evaluations, *self._noise]
        self._window = self.checkpoints.attach(self.source, self._loop, actions, self.units.run)
        self.checkpoints.settings = self.config
        if (histograms := self._loop.histograms) is not None:
            histograms.every = self._plan.period(self.config.histograms_every).steps or self.config.histograms_every
            histograms.begin(self._step, is_restored=self._window is not None)

    def _prepare(self) -> None:
        """Makes sure of a checkpoint to go back to, and looks at the forward pass to choose how operations run."""
        if self.config.on_divergence == "rollback" and not self.checkpoints.can_go_back():
            self.checkpoints.save()
        batch_size = self.source.info.batch_size
        self._forward = self.forward_pass.trace(self.source.info.element_spec, batch_size)
        for evaluation in self.evaluations:
            evaluation.check(self._plan, self._report())
        forward_flops = count_flops(self._forward) if batch_size else None
        step_flops = forward_flops and TRAINING_PASSES * forward_flops
        self._flops_per_example = step_flops / batch_size if step_flops and batch_size else None
        self._executor = self.state.placement.choose_executor(self.state.strategy, self.config.executor, step_flops)

    def _all_actions(self, write: Write, profile: Profile) -> list[Action]:
        """Returns the actions in the order in which numbers flow: measure, decide, write, save."""
        operations = self._flops_per_example, overview.peak_flops(self.state, self.config)
        actions: list[Action] = [built_in.Utilization(*operations, self.state.strategy), built_in.DataSeen(self.source)]
        actions += [built_in.PipelineUsage(self.state.placement.devices, profile), *self._measurements, *self._noise]
        checks = [built_in.CheckReplicas(every)] if (every := self.config.check_replicas_every) else []
        actions += [*checks, *self.evaluations, *self.actions, *filter(None, [self._loop.histograms])]
        if calls := [*self.evaluations, *self.actions]:
            actions.append(SyncStop(self.state.strategy, calls, self._plan))
        save = make_save(functools.partial(self._save, write), self.config.checkpoint_every, self._plan)
        for action in actions:
            member(action, "set_saves")(save.saves if self.config.workdir else None)
        return [*actions, SaveCosts(self.checkpoints.times), write, *([save] if self.config.workdir else [])]

    def _save(self, write: Write, report: Report, best_steps: Mapping[str, list[int]]) -> None:
        began_at = time.monotonic()
        with self.checkpoints.disk_watch.over("saving"):
            write.flush()  # a run that resumes from here finds all rows up to it
            self.checkpoints.save(report, best_steps)
        self.checkpoints.times.save_pause = time.monotonic() - began_at

    def _open_writers(self) -> list[Any]:
        writers: list[Any] = [self._history]
        if not self._is_chief:
            return writers
        workdir, evals = self.config.local_workdir, [evaluation.name for evaluation in self.evaluations]
        writers += _open_files(self, workdir, evals) if workdir else []
        writers += [self._deliveries] if self.writers else []  # after `metrics.jsonl`, from which they read
        if self.config.console != "quiet":
            run, may_draw = self.units.run, self.config.console == "auto"
            options: dict[str, Any] = {"evals": evals, "secs_left": max(0.0, run.secs - self._loop.secs)}
            console = make_console(run.last_step, self._step, may_draw=may_draw, began=self._began, **options)
            if workdir and self._step and evals:
                console.remember(earlier_rows(workdir, self.evaluations))  # the best value may have been before
            writers.append(console)
        return writers

    def _report(self) -> Report:
        values: dict[str, Any] = {"time": unix_time(), "units": self.units}
        return Report(self._step, self.units.run.last_step, self._loop.reported, self.state, **values)

    @property
    def _step(self) -> int:
        return int(self.state.step)

    @functools.cached_property
    def _is_chief(self) -> bool:
        return collectives.is_chief(self.state.strategy)


def _save_after(fit: Fit, error: BaseException) -> None:
    """Saves the last step of a run that an error ends, or says why not."""
    name, strategy = type(error).__name__, fit.state.strategy
    if not fit.state.may_be_saved:
        fit._say(_nothing_saved(fit))
        return
    is_one_of_several = collectives.num_workers(strategy) > 1
    is_left_alone = is_one_of_several and is_collective_error(error)
    if is_left_alone and collectives.heartbeat_of(strategy) is not None:
        return  # the heartbeat names the worker that is gone, and ends this process
    if is_left_alone or (is_one_of_several and not collectives.agree_to_save(strategy, fit._step)):
        fit._say(f"{name}: not saved, as the other workers are not at this point; the last checkpoint stays.")
        return
    try:
        fit.checkpoints.save_and_wait()
        _tell(fit, f"{name}: {first_line(error)}")
        say(f"{name} at step {fit._step}, checkpoint saved: the same command goes on from there.")
    except Exception as failure:  # the first error is the one to be seen
        say(f"{name} at step {fit._step}, which could not be saved ({first_line(failure)}).")


def _nothing_saved(fit: Fit) -> str:
    """Returns a sentence about a step that failed, and the checkpoint before it."""
    last = fit.checkpoints.last_step()
    stays = "there is no checkpoint" if last is None else f"the checkpoint of step {last} stays"
    return f"Nothing is saved, as a step failed after step {fit._step}; {stays}."


def _tell(fit: Fit, error: str) -> str:
    """Waits until the chief has saved a run that an error ends; returns the error of the worker that failed."""
    return "; ".join(filter(None, collectives.Workers(fit.state.strategy).gather(error)))


def _left_by(fit: Fit) -> Sequence[RunFile]:
    """Returns the files that a run has left for writers; none of a run that was interrupted."""
    return left_files(fit.config.workdir, fit.actions) if fit._has_finished or fit.is_over else ()


def _why_over(fit: Fit) -> str:
    """Returns a sentence about a run in which nothing is left to train."""
    why = run_length.why_over(fit.units, fit._step, fit._loop.secs, fit.checkpoints.stop_reason, fit._loop.tokens)
    return f"{why} or use another workdir." if fit.config.workdir else f"{why} to go on."


def _announce(fit: Fit) -> None:
    """Writes `config.json` and `flags.txt`, and prints devices, parameters, batch and workdir."""
    if fit._is_chief:
        flags.write(fit.config, fit.config.local_workdir)
    lines = overview.console_lines(fit.state, fit.config, fit.source)
    for line in lines:
        fit._say(line)
    if collectives.num_workers(fit.state.strategy) > 1 and fit.config.console != "quiet":
        say(overview.describe_shard(fit.source, fit.state.strategy))  # each worker prints what it reads


def _open_files(fit: Fit, workdir: str, evals: Sequence[str]) -> list[Any]:
    """Returns the writers of the event files and of `metrics.jsonl`."""
    try:
        restore_secs, fit.checkpoints.times.restore = fit.checkpoints.times.restore, None
        _begin_in(workdir, fit, restore_secs)
        summaries = SummaryWriter(workdir, evals, fit._step)
        overview.introduce(summaries, fit.state, fit.config, fit._forward)
        again = fit._loop.open_boundary is not None or (fit.config.eval_first and fit._step == 0)
        path, goes_on = f"{workdir}/metrics.jsonl", restore_secs is not None or fit._has_gone_back
        rows = JsonWriter(path, fit._step, is_written_again=again, goes_on=goes_on)
        if rows.renamed:
            fit._say(f"No checkpoint to resume from: starting over at step 0. Earlier rows: {rows.renamed}.")
    except OSError as error:
        raise cannot_be_written(workdir, error) from error
    return [summaries, rows]


def _begin_in(workdir: str, fit: Fit, restore_secs: float | None) -> None:
    """Creates the workdir and records the start, unless the disk is full, on which a run may train."""
    os.makedirs(os.path.join(workdir, "train"), exist_ok=True)
    kind = "GPU" if has_gpus(fit.state.strategy) else "CPU"
    facts: dict[str, Any] = {"step": fit._step, "devices": overview.num_devices(fit.state), "kind": kind}
    facts["position"] = fit.source.save_position()
    try:
        ledger.record_start(workdir, **facts, restore_secs=restore_secs)
    except OSError as error:
        log.warning("The report will lack the device-hours of this start: %s.", error.strerror or error)

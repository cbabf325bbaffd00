"""One call of `Trainer.fit`: resume, train, go back to a checkpoint if a loss diverges, save and leave if interrupted.

    numbers = Fit(call, checkpoints, forward_pass, make_loop).run()

It knows the order of three things, and not how any of them works: the run, what it writes (`outputs`), and how it may
end early (`stops`).
"""

import contextlib
import dataclasses
import functools
import os
import time
from collections.abc import Callable, Iterator

from distloop.actions import built_in
from distloop.actions.save import Save, SaveCosts, SaveToKeep, require_metrics
from distloop.actions.stop_early import SyncStop
from distloop.actions.write import Write
from distloop.checkpoints.loading import may_lack_best
from distloop.checkpoints.resume import RunCheckpoints
from distloop.data.iterators import read_again
from distloop.installed import import_part
from distloop.keras_models.compiled_model import weights_returned
from distloop.monitoring.curves import History
from distloop.monitoring.profiler import Profile
from distloop.run import fit_call, overview
from distloop.run.assembly import begin_run
from distloop.run.fit_call import FitCall
from distloop.run.outputs import Outputs
from distloop.run.stops import Stops
from distloop.settings.durations import Plan
from distloop.training.action import Action, Kept, Report, Saves, member, metrics_to_restore
from distloop.training.boundary import run_actions, started
from distloop.training.loop import Diverged, Host, TrainLoop
from distloop.workdir.records import unix_time
from distloop.workers.preemption import StopRequests

_PERIODS = "log_every checkpoint_every keep_every histograms_every check_replicas_every gradient_noise_every".split()


@dataclasses.dataclass
class Fit:
    """One call of `Trainer.fit`; a duration that cannot be one of its run is refused at once.

    Attributes:
        call: what `fit` was given.
        checkpoints: of the run.
        forward_pass: traced for TensorBoard's graph and to count floating-point operations.
        make_loop: returns the training loop; called once the weights are restored.
    """

    call: FitCall
    checkpoints: RunCheckpoints
    forward_pass: overview.ForwardPass
    make_loop: Callable[[], TrainLoop]

    def __post_init__(self) -> None:
        call, checkpoints = self.call, self.checkpoints
        self._outputs, self._stops = Outputs(call, checkpoints), Stops(call, checkpoints)
        self._has_finished = False
        workdir, verify = call.config.local_workdir, checkpoints.directory.verify
        self._goodput = built_in.Goodput(workdir, call.clock.seconds, call.is_chief, verify)
        self._measurements: list[Action] = [built_in.MemoryUse(workdir), self._goodput] if workdir else []
        every, updates = call.config.gradient_noise_every, [update.name for update in call.state.spec.updates]
        self._noise = [built_in.GradientNoise(every, updates)] if every else []
        self._plan = Plan(call.units, is_chief=call.is_chief)
        everys = [action.every for action in [*call.evaluations, *call.actions] if action.every is not None]
        for every in [*everys, *(getattr(call.config, name) for name in _PERIODS)]:
            self._plan.period(every)

    def run(self) -> History:
        """Trains until the run is over and its last checkpoint is complete.

        Returns:
            The last numbers, and all rows of this call.

        Raises:
            SystemExit: with code 75, if the run was asked to stop.
            Diverged: at a step that fails, if there is no checkpoint to go back to.
        """
        call, outputs, until = self.call, self._outputs, self.call.units.run.last_step
        with call.source.gate, weights_returned(call.state, is_dry_run=call.config.fast_dev_run), self.checkpoints:
            self._resume()
            progress = self.checkpoints.progress
            shown = call.step - (progress.open_boundary is not None)  # the row of an open boundary is yet to come
            with outputs.delivering(shown, self._is_over), self._stops.interruptible() as stop_requests:
                if self._is_over():
                    call.say(fit_call.why_over(call, progress.secs, progress.tokens, self.checkpoints.stop_reason))
                    self._finish()
                else:
                    self._prepare()
                    with started([*self._measurements, *call.actions], self._report, is_chief=call.is_chief):
                        while not self._has_finished:
                            with self._training(stop_requests) as (actions, host):
                                if not (call.config.eager or self._is_at_end()):
                                    names = self._loop.trace(call.source, host)
                                    require_metrics(call.actions, call.evaluations, names)
                                self._loop.train(call.source, until, actions, host, self.checkpoints.begin(self._loop))
        outputs.history.update(self.checkpoints.progress.reported)
        return outputs.history

    def _resume(self) -> None:
        """Restores the newest checkpoint of the workdir; a new run starts from weights of `restore` or `init_from`."""
        call, state, config = self.call, self.call.state, self.call.config
        fit_call.require_same_trainable(state)
        fit_call.require_same_run(state, call.units.run.last_step, call.evaluations, call.actions)
        self.checkpoints.resume()
        if config.init_from and self.checkpoints.is_new and not self.checkpoints.weights_from:
            starts = import_part("warm_start.warm_start", f"init_from={config.init_from!r}")
            call.say(starts.warm_start(state, config.init_from, config.init_rename))
        self._loop = self.make_loop()
        begin_run(state, config, call.units, self._loop)
        self._attach()

    def _attach(self) -> None:
        """Restores the position in the data, the state of the actions and the progress from the checkpoint."""
        call, config, before = self.call, self.call.config, self.checkpoints.progress
        actions = [*call.actions, *call.evaluations, *self._noise]
        self.checkpoints.attach(call.source, actions, call.units.run, config)
        if (histograms := self._loop.histograms) is not None:
            every = self._plan.period(config.histograms_every).steps or config.histograms_every
            histograms.begin(call.step, every, is_restored=self.checkpoints.progress is not before)

    def _is_at_end(self) -> bool:
        """Returns whether no step is left to train."""
        progress = self.checkpoints.progress
        return self.call.units.run.is_over(self.call.step, progress.secs, progress.tokens)

    def _is_over(self) -> bool:
        """Returns whether there is nothing left to do."""
        is_over = self._is_at_end() and self.checkpoints.progress.open_boundary is None
        return self._has_finished or bool(self.checkpoints.stop_reason) or is_over

    def _prepare(self) -> None:
        """Makes sure of a checkpoint to go back to, and looks at the forward pass to choose how operations run."""
        config, info = self.call.config, self.call.source.info
        self._outputs.announce()
        if config.on_divergence == "rollback" and not self.checkpoints.can_go_back():
            self.checkpoints.save()
        self._forward = self.forward_pass.trace(info.element_spec, info.batch_size)
        for evaluation in self.call.evaluations:
            evaluation.check(self._plan, self._report(), config.eval_first and self.call.step == 0)
        step_flops = self.forward_pass.step_flops(self.call.source)
        self._flops_per_example = step_flops / info.batch_size if step_flops and info.batch_size else None
        self._executor = self.forward_pass.choose_executor(self.call.source)

    @contextlib.contextmanager
    def _training(self, stop_requests: StopRequests) -> Iterator[tuple[list[Action], Host]]:
        """Opens what a run writes while it trains; goes back to a checkpoint if a loss diverges.

        Yields:
            The actions of the loop, and what the host does beside the steps.
        """
        call = self.call
        directory = os.path.join(call.config.local_workdir, "train")
        profile = Profile(call.config.profile, directory, writes=call.is_chief)
        try:
            with contextlib.closing(profile), self._outputs.open(self.checkpoints.progress, self._forward) as write:
                actions, host = self._begin(write, profile, stop_requests)
                before = call.source.stage_secs()
                with self._stops.training():
                    yield actions, host
                with call.clock.phase("saving"):
                    self.checkpoints.wait()
            if (console := self._outputs.console) is not None:
                stages = {name: secs - before.get(name, 0.0) for name, secs in call.source.stage_secs().items()}
                console.summarize(call.clock, call.source.against_waiting, stages)
        except Diverged as diverged:
            self._go_back(diverged)
        else:
            self._finish()

    def _begin(self, write: Write, profile: Profile, stop_requests: StopRequests) -> tuple[list[Action], Host]:
        """Evaluates before the first step if asked to; returns the actions of the loop, and what the host does."""
        call, console = self.call, self._outputs.console
        if call.config.eval_first and call.step == 0:
            report = dataclasses.replace(self._report(), until=0)
            run_actions([*call.evaluations, write], report, call.clock, self._plan)
        actions = self._all_actions(write, profile)
        host = Host(
            plan=self._plan,
            log_every=fit_call.log_every(call.config, call.units),
            stop_requests=stop_requests,
            clock=call.clock,
            profile=profile,
            executor=self._executor,
            say=call.say,
            show_progress=Host.show_progress if console is None or call.config.eager else console.show_progress,
        )
        read_again(call.source.fast_forward, call.state.strategy, stop_requests, host.say, host.show_progress)
        return actions, host

    def _all_actions(self, write: Write, profile: Profile) -> list[Action]:
        """Returns the actions in the order in which numbers flow: measure, decide, write, save."""
        call, state, config = self.call, self.call.state, self.call.config
        operations = self._flops_per_example, overview.peak_flops(state, config)
        actions: list[Action] = [built_in.Utilization(*operations, state.strategy), built_in.DataSeen(call.source)]
        actions += [*state.make_stage_actions(profile), *self._measurements, *self._noise]
        checks = [built_in.CheckReplicas(every)] if (every := config.check_replicas_every) else []
        actions += [*checks, *call.evaluations, *call.actions, *filter(None, [self._loop.histograms])]
        if calls := [*call.evaluations, *call.actions]:
            actions.append(SyncStop(state.strategy, calls, self._plan))
        saves = Saves(functools.partial(self._save, write))
        for action in actions:
            member(action, "set_saves")(saves if config.workdir else None)
            member(action, "set_fit")(call, self._loop, self.checkpoints)
        to_keep = [SaveToKeep(saves, config.keep_every, self._plan)] if config.keep_every else []
        saving = [*to_keep, Save(saves, config.checkpoint_every, self._plan)] if config.workdir else []
        return [*actions, SaveCosts(self.checkpoints.times), write, *saving]

    def _save(self, write: Write, report: Report, kept: Kept) -> None:
        began_at = time.monotonic()
        with self.checkpoints.disk_watch.over("saving"):
            write.flush()  # a run that resumes from here finds all rows up to it
            self.checkpoints.save(report, kept)
        self.checkpoints.times.record(save_pause=time.monotonic() - began_at)

    def _go_back(self, diverged: Diverged) -> None:
        """Restores a checkpoint from before the batch that failed; raises the failure again if there is none."""
        hint = "".join(member(action, "explain_fault")(diverged, diverged.step) for action in self.call.actions)
        hint += f"; --replay={diverged.step} shows the step again." if self.call.config.workdir else "."
        diverged.add(hint)
        if self.call.config.on_divergence != "rollback":
            raise diverged
        with self._goodput.between_starts(self.call.step):
            self.checkpoints.roll_back(diverged)
            self._outputs.go_back()
            self._attach()

    def _finish(self) -> None:
        """Restores the best checkpoint if an action asks for it."""
        self._has_finished = True
        self.checkpoints.end()
        for metric in metrics_to_restore(self.call.actions):
            with may_lack_best():
                self.checkpoints.restore_best(metric, run_goes_on_from_it=False)

    def _report(self) -> Report:
        call, numbers, until = self.call, self.checkpoints.progress.reported, self.call.units.run.last_step
        return Report(call.step, until, numbers, call.state, time=unix_time(), units=call.units)

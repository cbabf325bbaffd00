"""Training loop: runs to the next boundary, then calls the actions, until the run ends.

Between two boundaries a `CompiledLoop` runs steps without the host, for about a second: then the host looks whether the
run is to stop, and shows how far it is. If only writers consume the logs, a compiled loop runs through several logs,
and the host fetches their numbers at once. This module does not know flags or files.
"""

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from distloop.data.source import Source
from distloop.distributed import collectives, strategies
from distloop.errors import as_user_error, raise_as_user_error
from distloop.graph_functions import NO_LIMIT_SECS, has_clock
from distloop.installed import import_part
from distloop.log import say
from distloop.model import memory
from distloop.model.saved_state import ReplicaComparison
from distloop.model.state import TrainState
from distloop.monitoring.profiler import Profile
from distloop.monitoring.timing import Clock
from distloop.settings.durations import Plan
from distloop.training.action import Action, Report, member
from distloop.training.boundary import run_actions, run_between_loops
from distloop.training.compiled_loop import CompiledLoop
from distloop.training.diagnosis import explain, explain_compile_error
from distloop.training.step import TrainStep, loss_weight
from distloop.training.window import OpenBoundary, Progress, Row, Window
from distloop.workdir.records import unix_time
from distloop.workers.preemption import StopRequests

_LOOP_SECS = 1.0  # after which a loop begins no other step
_MOST_STEPS = 10_000  # of a loop
_COMPARED_STEPS = 2  # the first ones, after which replicas are compared: a warmup may begin with a rate of 0


class Diverged(FloatingPointError):  # noqa: N818 - the run may go on from before
    """A step failed: its loss or gradients are not finite, or its loss jumped.

    Attributes:
        step: its number.
        batch: the number of its batch in the stream of data, from 0.
        right_until: if hardware is to blame, and no batch: how many batches the last right state has had.
    """

    right_until: int | None = None

    def __init__(self, explanation: str, step: int, batch: int):
        """Keeps the numbers beside the explanation."""
        super().__init__(explanation)
        self.step, self.batch = step, batch

    def add(self, words: str) -> None:
        """Puts words behind the explanation, in place of its full stop."""
        self.args = (str(self).removesuffix(".") + words,)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Host:
    """What the host does beside the steps of one `TrainLoop.train`; without arguments nothing.

    Attributes:
        plan: when actions are due; by itself it takes durations in steps.
        log_every: the duration between two logs, which are boundaries; 0: only the end of the run is one.
        stop_requests: asked after each loop whether to go on; None: nothing stops the run.
        clock: of the run.
        profile: of some of its steps.
        executor: what runs the operations, as `strategies.choose_executor` returns it.
        say: prints a line about the run.
        pause_at: a step after which `train` returns at once, as the end of a loop and no boundary.
        show_progress: called after each loop with the step, and before tracing with what is being done, too.
    """

    plan: Plan = dataclasses.field(default_factory=Plan)
    log_every: int | str = 0
    stop_requests: StopRequests | None = None
    clock: Clock = dataclasses.field(default_factory=Clock)
    profile: Profile = dataclasses.field(default_factory=lambda: Profile("", ""))
    executor: str = strategies.PARALLEL_EXECUTOR
    say: Callable[[str], None] = say
    pause_at: float = math.inf
    show_progress: Callable[[int, str], None] = lambda step, doing: None


class TrainLoop:
    """Trains until a step, and stops at boundaries for actions.

    Attributes:
        progress: how far the last `train` has come, however it ended, or at a boundary the present one.
        histograms: the action that shows the gradients which the step keeps; None: it keeps none.
    """

    def __init__(
        self,
        state: TrainState,
        step: TrainStep,
        *,
        steps_per_loop: int = 0,
        eager: bool = False,
        max_traces: int = 0,
        keeps_batch: bool = False,
        on_trace: Callable[[TrainStep, Source], None] = lambda step, source: None,
    ):
        """Prepares; nothing is traced yet.

        Args:
            state: what is trained.
            step: one step of it.
            steps_per_loop: an upper bound on the steps between two boundaries; 0: none.
            eager: whether the steps run as plain Python, for a debugger.
            max_traces: as `Config.max_traces`.
            keeps_batch: whether the last batch is kept, for `last_batch`.
            on_trace: called with the step and its data when it has been traced.
        """
        self._state, self._step = state, step
        self.histograms: Any = step.histograms
        self._steps_per_loop = steps_per_loop
        self._eager, self._max_traces, self._keeps_batch = eager, max_traces, keeps_batch
        self._on_trace = on_trace
        self.trace_again()
        self._host, self._until, self.progress = Host(), math.inf, Progress()
        # Each of several workers would end with another step.
        self._ends_by_time = collectives.num_workers(state.strategy) == 1 and has_clock()
        has_own = any(update.step_fn or update.gradient_fn for update in state.spec.updates)
        self._to_compare = _COMPARED_STEPS if has_own and state.strategy.num_replicas_in_sync > 1 else 0
        self._loss_weight: int | None = None  # its index in the tallies; None: there is no loss

    def train(
        self,
        source: Source,
        until: float,
        actions: Sequence[Action],
        host: Host | None = None,
        progress: Progress | None = None,
    ) -> Progress:
        """Trains until a step, and runs the actions that are due at each boundary.

        Args:
            source: repeated data.
            until: the global step to end with; inf: the run ends when the plan says so.
            actions: in order.
            host: what the host does beside the steps; None: nothing.
            progress: of the run so far; None: where this loop's last `train` has ended.

        Returns:
            The progress of the run; after an error the attribute has it.

        Raises:
            Interrupted: if the run is to be saved and left.
            Diverged: at the first step that fails.
            ValueError: if the data ends, or changes.
        """
        self._host, self._until = host or Host(), until
        self.progress = dataclasses.replace(progress or self.progress, step=int(self._state.step))
        self._most_steps = _MOST_STEPS if self._ends_by_time else 1  # of the next loop
        self._started_at = time.monotonic() - self.progress.secs
        self._begin_to_count()
        if self._state.for_evaluation is None:  # actions and users may have set the weights until now
            self._state.start_slots()
        is_over = self.progress.open_boundary is not None and self._act_again(self.progress.open_boundary, actions)
        while not is_over and self.progress.step < min(self._until, self._host.pause_at):
            is_over = self._train_to_boundary(source, actions)
        return self.progress

    def _train_to_boundary(self, source: Source, actions: Sequence[Action]) -> bool:
        """Trains to the next boundary, and calls what is due there; returns whether an action has ended the run."""
        rows = self._run_to_boundary(source, actions)
        uncounted = iter(rows)
        try:
            collectives.report_phase(self._state.strategy, "between two loops")
            if self._to_compare and rows[-1].diagnosis is None:
                self._compare_replicas(self.progress.step + sum(row.steps for row in rows))
            if rows[0].news:
                self._host.say(rows[0].news)
            for row in uncounted:
                self._count(source, row)
                if row.diagnosis is not None:
                    if self._step.runs_ahead:
                        source.count(0, is_lost=True)  # the iterator may be a batch further
                    self._open_window()  # without the numbers of the failed step
                    step, batch = self.progress.step, source.batches_taken - 1
                    why = explain(self._step, step, row.diagnosis, source, batch, self.last_batch())
                    raise Diverged(why, step, batch)
                if self._is_boundary(actions) and self._act(actions, self._report(row.end)):
                    return True
        finally:  # a check or an action failed: the steps of the rows after that are done all the same
            for row in uncounted:
                self._count(source, row)
        self._host.show_progress(self.progress.step, "")
        if self.progress.step < self._until:
            self._pause(actions)
        return False

    def _set(self, **changes: Any) -> None:
        self.progress = dataclasses.replace(self.progress, **changes)

    def _pause(self, actions: Sequence[Action]) -> None:
        """Agrees with the other workers on the next loop, and calls what is due by the clock between two loops.

        They exchange whether the run goes on, how many steps the chief lets the next loop run, and the chief's time.

        Raises:
            Interrupted: if any worker has a reason to leave the run.
        """
        host, step, before = self._host, self.progress.step, self.progress.secs
        vote = collectives.Vote(step=step, max_steps=self._most_steps, secs=time.monotonic() - self._started_at)
        chief, *_ = collectives.agree_to_go_on(self._state.strategy, host.stop_requests, vote)
        self._most_steps = int(chief.max_steps)
        self._set(secs=chief.secs)
        if host.plan.check_clock(before, chief.secs, [host.log_every, *(action.every for action in actions)]):
            self._until = step + 1
        report = Report(step, self._until, self.progress.reported, self._state, time=unix_time())
        run_between_loops(actions, report, host.clock, before, chief.secs)

    def last_batch(self) -> Any:
        """Returns the batch of the last step; None: it is not kept."""
        return self._compiled.last_batch()

    def trace_again(self) -> None:
        """Has the step traced anew, as a constant of it has changed."""
        settings = {"eager": self._eager, "max_traces": self._max_traces, "keeps_batch": self._keeps_batch}
        kind: Any = CompiledLoop
        if self._step.jit_compile == "loop":
            kind = import_part("xla.xla_loop", "jit_compile=loop").XlaLoop
        self._compiled = kind(self._state, self._step, **settings)
        self._traced_for: Source | None = None

    def trace(self, source: Source, host: Host) -> list[str]:
        """Traces the step for data, unless it was just traced for it; returns the names of what a step reports.

        Steps as plain Python are not traced, and have no names before the first one.
        """
        if self._traced_for is not source:
            step, self._host = int(self._state.step), host
            with self._explained(source, step):
                collectives.report_phase(self._state.strategy, "tracing the step", self._state.step)
                host.show_progress(step, "tracing the train step ...")
                self._compiled.trace(source, host.executor)
                self._on_trace(self._step, source)
                host.show_progress(step, "")
                self._traced_for = source
                if not self._eager and self._counts_tokens() and loss_weight(self._step) is None:
                    raise _no_tokens()
        return [] if self._eager else [*self._step.names, *self._state.keras_metrics]

    def _run_to_boundary(self, source: Source, actions: Sequence[Action]) -> list[Row]:
        """Runs the steps up to the next boundary or the first that fails; returns their rows."""
        step, host, most_steps = self.progress.step, self._host, source.start_loop()
        is_first = self._eager and self._traced_for is not source  # after it, what is due is known
        self.trace(source, host)
        with self._explained(source, step):
            collectives.report_phase(self._state.strategy, "training", self._state.step)
            most = min(1 if is_first else most_steps or np.inf, self._to_compare or np.inf)
            to_average = np.inf if self._state.average is None else self._state.average.begin(step)
            count = int(min(self._next_boundary(actions) - step, self._most_steps, most, to_average))
            with host.profile.loop(step):
                rows = self._compiled.run(
                    *(source, count, host.plan.period(host.log_every).steps),
                    executor=host.executor,
                    is_single=host.profile.is_single(step),
                    secs=_LOOP_SECS if self._ends_by_time else NO_LIMIT_SECS,
                )
            self._loss_weight = loss_weight(self._step)
            self._state.end_steps(are_complete=rows[-1].diagnosis is None)  # also where an action fails on a row before
            if is_first and self._loss_weight is None and self._counts_tokens():
                raise _no_tokens()
        start, end = rows[0].end - rows[0].seconds, rows[-1].end
        host_secs = host.clock.loop(start, end, np.nansum([row.input_secs for row in rows]))
        if not self._ends_by_time:
            in_time = int(sum(row.steps for row in rows) * _LOOP_SECS / max(end - start, 1e-6))
            self._most_steps = max(1, min(in_time, 2 * self._most_steps, _MOST_STEPS))
        return [dataclasses.replace(rows[0], host_secs=host_secs), *rows[1:]]

    @contextlib.contextmanager
    def _explained(self, source: Source, step: int) -> Iterator[None]:
        """Enters a scope of steps after a step, in which errors lose the position in the data, and are explained."""
        try:
            yield
        except BaseException as error:  # Ctrl-C, too, where it is not caught
            done, count = int(self._state.step) - step, self._state.token_count
            source.count(done, is_lost=True)
            if done:  # the rows of these steps are lost: what only those have counted is unknown
                tokens = math.nan if count is None else float(count.numpy())
                window = dataclasses.replace(self.progress.window, examples_seen=None)
                self._set(step=step + done, tokens=tokens, window=window)
            self._state.end_steps(are_complete=self._compiled.is_between_steps)
            if not isinstance(error, tf.errors.OpError):
                raise
            if isinstance(error, tf.errors.ResourceExhaustedError):
                raise memory.explain_step(error, self._state, step + 1, self._step.microbatches) from error
            if (explained := as_user_error(error) or explain_compile_error(self._step, error)) is not None:
                raise explained from error
            raise_as_user_error(error)

    def _compare_replicas(self, step: int) -> None:
        """Checks that the first steps with the user's own gradients have left every replica with the same weights."""
        self._to_compare = max(0, self._to_compare - (step - self.progress.step))
        ReplicaComparison(self._state, self._state.untrained_variables).require_equal(
            step,
            "a step_fn or gradient_fn returned other gradients on each replica: add up what a replica computes from "
            "its rows, as in step.sum(gradients), and draw random numbers by seeds that are the same on all",
        )

    def _next_boundary(self, actions: Sequence[Action]) -> float:
        """Returns the next step at which the host has to look, unless time is over before.

        Logs that only writers consume need no boundary: the compiled loop returns a row for each.
        """
        step, everys = self.progress.step, [action.every for action in actions]
        if self._state.keras_metrics or any(a.every is None and not member(a, "only_writes") for a in actions):
            everys.append(self._host.log_every)
        boundary = self._host.plan.next_boundary(step, self._until, everys, self._steps_per_loop)
        return min(boundary, self._host.profile.next_boundary(step), self._host.pause_at)

    def _is_boundary(self, actions: Sequence[Action]) -> bool:
        """Returns whether a log or an action with a period of its own is due."""
        everys = [self._host.log_every, *(a.every for a in actions if a.every is not None)]
        return any(self._host.plan.is_due(every, self.progress.step, self._until) for every in everys)

    def _act(self, actions: Sequence[Action], report: Report) -> bool:
        """Opens a new window and calls the actions of a boundary; returns whether one of them ended the run."""
        before, plan = self.progress.window, self._host.plan
        self._open_window()  # before the actions run: a checkpoint then begins with the new window
        try:
            metrics, stop_reason = run_actions(actions, report, self._host.clock, plan)
        except (Exception, KeyboardInterrupt):
            if int(self._state.step) == report.step:
                due = sorted(plan.due_secs), sorted(plan.due_tokens)
                self._set(open_boundary=OpenBoundary(report.metrics, report.time, *due))
            else:  # later steps are done, and this boundary may have no row: the next row has its steps, too
                self._set(window=before)
            raise
        self._set(reported=metrics)
        if stop_reason:
            self._host.say(f"Stopped at step {report.step}: {stop_reason}.")
        return bool(stop_reason)

    def _act_again(self, boundary: OpenBoundary, actions: Sequence[Action]) -> bool:
        """Calls the actions of a boundary that was left open; returns whether the run is over."""
        plan, at = self._host.plan, self.progress
        self._set(open_boundary=None)
        plan.set_due(boundary.due_secs, boundary.due_tokens)
        is_over = plan.units.run.is_over(at.step, at.secs, at.tokens)
        until = at.step if is_over else self._until
        is_stopped = self._act(actions, Report(at.step, until, boundary.metrics, self._state, time=boundary.time))
        plan.set_due()
        return is_stopped or is_over

    def _report(self, end: float) -> Report:
        """Reports the steps since the last row."""
        per_token = [update.full_name("loss") for update in self._step.updates if update.trace.has_tokens]
        numbers = self.progress.window.metrics(self._step.names, per_token)
        return Report(self.progress.step, self._until, numbers, self._state, time=unix_time(end))

    def _open_window(self) -> None:
        """Opens a window for the steps after this boundary."""
        self._set(window=Window(examples_seen=self.progress.window.examples_seen))
        self._state.keras_metrics.reset()

    def _begin_to_count(self) -> None:
        """Hands the tokens so far to the schedules that read them.

        Raises:
            ValueError: if the tokens are unknown and needed.
        """
        if math.isnan(self.progress.tokens) and self._counts_tokens():
            raise _no_tokens("the checkpoint does not know how many there were")
        if self._state.token_count is not None:
            self._state.token_count.assign(self.progress.tokens)

    def _counts_tokens(self) -> bool:
        """Returns whether a schedule reads the tokens, or anything is due by them."""
        return self._state.token_count is not None or self._host.plan.counts_tokens

    def _count(self, source: Source, row: Row) -> None:
        """Adds a row to the position in the data and to the progress."""
        source.count(row.steps)
        at, plan = self.progress, self._host.plan
        self._set(step=at.step + row.steps, window=at.window.with_row(row))
        if self._loss_weight is not None:
            self._set(tokens=at.tokens + float(row.tallies[self._loss_weight]))
            if plan.counts_tokens and plan.count_tokens(at.tokens, self.progress.tokens):
                self._until = self.progress.step


def _no_tokens(why: str = "no `loss` whose weights count them is returned") -> ValueError:
    return ValueError(f"A duration in tokens was given, and {why}: give steps.")

"""Training loop: runs to the next boundary, then calls the actions, until the run ends.

Between two boundaries a `CompiledLoop` runs steps without the host, for about a second: then the host looks whether the
run is to stop, and shows how far it is. If only writers consume the logs, a compiled loop runs through several logs,
and the host fetches their numbers at once. This module does not know flags or files.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from distloop.data.source import Source
from distloop.distributed import collectives, strategies
from distloop.errors import as_user_error, raise_as_user_error
from distloop.graph_functions import NO_LIMIT_SECS, has_clock
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
from distloop.training.window import Row, Window
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
    """

    def __init__(self, explanation: str, step: int, batch: int):
        """Keeps the numbers beside the explanation."""
        super().__init__(explanation)
        self.step = step
        self.batch = batch


@dataclasses.dataclass(frozen=True, kw_only=True)
class Host:
    """What the host does beside the steps of one `TrainLoop.train`; without arguments nothing.

    Attributes:
        plan: when actions are due; by itself it takes durations in steps.
        stop_requests: asked after each loop whether to go on; None: nothing stops the run.
        clock: of the run.
        profile: of some of its steps.
        executor: what runs the operations, as `strategies.choose_executor` returns it.
        say: prints a line about the run.
        show_progress: called after each loop with the step, and before tracing with what is being done, too.
    """

    plan: Plan = dataclasses.field(default_factory=Plan)
    stop_requests: StopRequests | None = None
    clock: Clock = dataclasses.field(default_factory=Clock)
    profile: Profile = dataclasses.field(default_factory=lambda: Profile("", ""))
    executor: str = strategies.PARALLEL_EXECUTOR
    say: Callable[[str], None] = say
    show_progress: Callable[[int, str], None] = lambda step, doing: None


class TrainLoop:
    """Trains until a step, and stops at boundaries for actions.

    Attributes:
        reported: the numbers of the last report, by name; empty: there was none.
        secs: how long the run has trained, by the chief's clock, at the last look at it; with its earlier processes, if
            set before `train`.
        stop_reason: why an action ended the last `train`; None: none did.
        tokens: the sum of the loss's weights over all steps of the run; NaN: unknown; with earlier processes, likewise.
        log_every: the duration between two logs, which are boundaries; 0: only the end of the run is one.
        require_metrics: called once by the next `train`, before its first step, with the names of what a step reports.
        open_boundary: of this step, whose actions were interrupted, or an evaluation failed: `train` calls all of them;
            None: there is none.
    """

    def __init__(
        self,
        state: TrainState,
        step: TrainStep,
        *,
        log_every: int | str = 0,
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
            log_every: the attribute.
            steps_per_loop: an upper bound on the steps between two boundaries; 0: none.
            eager: whether the steps run as plain Python, for a debugger.
            max_traces: as `Config.max_traces`.
            keeps_batch: whether the last batch is kept, for `last_batch`.
            on_trace: called with the step and its data when it has been traced.
        """
        self._state, self._step = state, step
        self.log_every = log_every
        self._steps_per_loop = steps_per_loop
        self.reported: dict[str, float] = {}
        self.secs = self.tokens = 0.0
        self.open_boundary: Any = None
        self.stop_reason: str | None = None
        self.require_metrics: Callable[[list[str]], None] | None = None
        self._eager, self._max_traces, self._keeps_batch = eager, max_traces, keeps_batch
        self._on_trace = on_trace
        self.trace_again()
        self._window, self._host = Window(), Host()
        # Each of several workers would end with another step.
        self._ends_by_time = collectives.num_workers(state.strategy) == 1 and has_clock()
        self._most_steps = 1  # of the next loop
        has_own = any(update.step_fn or update.gradient_fn for update in state.spec.updates)
        is_alone = state.strategy.num_replicas_in_sync == 1
        self._to_compare = _COMPARED_STEPS if has_own and not is_alone else 0
        self._loss_weight: int | None = None  # its index in the tallies; None: there is no loss

    def train(
        self,
        source: Source,
        until: float,
        actions: Sequence[Action],
        host: Host | None = None,
        *,
        window: Mapping[str, Any] | None = None,
    ) -> dict[str, float]:
        """Trains until a step, and runs the actions that are due at each boundary.

        Args:
            source: repeated data.
            until: the global step to end with; inf: the run ends when the plan says so.
            actions: in order.
            host: what the host does beside the steps; None: nothing.
            window: what `save_window` returned, to go on with; None: the steps since the last row of this loop.

        Returns:
            The numbers of the last report.

        Raises:
            Interrupted: if the run is to be saved and left.
            Diverged: at the first step that fails.
            ValueError: if the data ends, or changes.
        """
        self._host = host or Host()
        plan = self._host.plan
        plan.last_step = until
        self._most_steps = _MOST_STEPS if self._ends_by_time else 1
        self._started_at = time.monotonic() - self.secs
        if window is not None:
            self._window = Window(window)
        self._begin_to_count()
        step = int(self._state.step)
        if self.open_boundary is not None and self._act_again(step, actions):
            return self.reported
        while step < plan.last_step:
            rows = iter(self._run_to_boundary(source, step, actions))
            try:
                for row in rows:
                    step += self._count(source, row, step)
                    if row.diagnosis is not None:
                        if self._step.runs_ahead:
                            source.lose_position(0)  # the iterator may be a batch further
                        self._open_window()  # without the numbers of the failed step
                        batch = source.batches_taken - 1
                        why = explain(self._step, step, row.diagnosis, source, batch, self.last_batch())
                        raise Diverged(why, step, batch)
                    if self._is_boundary(step, actions) and self._act(actions, self._report(step, row.end)):
                        return self.reported
            finally:  # an action failed: the steps of the rows after that are done all the same
                for row in rows:
                    step += self._count(source, row, step)
            self._host.show_progress(step, "")
            if step < plan.last_step:
                self._pause(step, actions)
        return self.reported

    def _pause(self, step: int, actions: Sequence[Action]) -> None:
        """Agrees with the other workers on the next loop, and calls what is due by the clock between two loops."""
        plan, before = self._host.plan, self.secs
        self._agree_on_next_loop(self._host.stop_requests, step)
        plan.check_clock(before, self.secs, [self.log_every, *(action.every for action in actions)], step)
        report = Report(step, plan.last_step, self.reported, self._state, time=unix_time())
        run_between_loops(actions, report, self._host.clock, before, self.secs)

    @property
    def histograms(self) -> Any:
        """The action that shows the gradients which the step keeps; None: it keeps none."""
        return self._step.histograms

    def save_window(self) -> dict[str, Any]:
        """Returns the sums since the last row, as JSON can hold them."""
        return self._window.save()

    def last_batch(self) -> Any:
        """Returns the batch of the last step; None: it is not kept."""
        return self._compiled.last_batch()

    def trace_again(self) -> None:
        """Has the step traced anew, as a constant of it has changed."""
        self._compiled = CompiledLoop(
            *(self._state, self._step), eager=self._eager, max_traces=self._max_traces, keeps_batch=self._keeps_batch
        )
        self._traced_for: Source | None = None

    def _run_to_boundary(self, source: Source, step: int, actions: Sequence[Action]) -> list[Row]:
        """Runs the steps up to the next boundary or the first that fails; returns their rows."""
        most_steps = source.start_loop()
        try:
            if is_new := self._traced_for is not source:
                collectives.report_phase(self._state.strategy, "tracing the step")
                self._host.show_progress(step, "tracing the train step ...")
                self._compiled.trace(source, self._host.executor)
                self._check_trace(source, step)
            check, self.require_metrics = self.require_metrics, None
            if check is not None and not self._eager:
                check([*self._step.names, *self._state.keras_metrics])
            collectives.report_phase(self._state.strategy, "training")
            most = 1 if is_new and self._eager else most_steps or np.inf  # what is due is known after it
            most = min(most, self._to_compare or np.inf)
            with self._host.profile.loop(step):
                rows = self._compiled.run(
                    source,
                    int(min(self._next_boundary(step, actions) - step, self._most_steps, most)),
                    self._host.plan.period(self.log_every).steps,
                    executor=self._host.executor,
                    is_single=self._host.profile.is_single(step),
                    secs=_LOOP_SECS if self._ends_by_time else NO_LIMIT_SECS,
                )
            self._loss_weight = loss_weight(self._step)
        except BaseException as error:  # Ctrl-C, too, where it is not caught
            source.lose_position(int(self._state.step) - step)
            self._state.may_be_saved = self._state.may_be_saved and self._compiled.is_between_steps
            if not isinstance(error, tf.errors.OpError):
                raise
            if isinstance(error, tf.errors.ResourceExhaustedError):
                raise memory.explain_step(error, self._state, step + 1, self._step.microbatches) from error
            if (explained := as_user_error(error) or explain_compile_error(self._step, error)) is not None:
                raise explained from error
            raise_as_user_error(error)
        collectives.report_phase(self._state.strategy, "between two loops")
        if self._to_compare and rows[-1].diagnosis is None:
            self._compare_replicas(step, sum(row.steps for row in rows))
        input_secs = np.nansum([row.input_secs for row in rows])
        start, end = rows[0].end - rows[0].seconds, rows[-1].end
        host_secs = self._host.clock.loop(start, end, input_secs)
        if not self._ends_by_time:
            in_time = int(sum(row.steps for row in rows) * _LOOP_SECS / max(end - start, 1e-6))
            self._most_steps = max(1, min(in_time, 2 * self._most_steps, _MOST_STEPS))
        return [dataclasses.replace(rows[0], host_secs=host_secs), *rows[1:]]

    def _compare_replicas(self, step: int, steps: int) -> None:
        """Checks that the first steps with the user's own gradients have left every replica with the same weights."""
        self._to_compare = max(0, self._to_compare - steps)
        ReplicaComparison(self._state, self._state.untrained_variables).require_equal(
            step + steps,
            "a step_fn or gradient_fn returned other gradients on each replica: add up what a replica computes from "
            "its rows, as in step.sum(gradients), and draw random numbers by seeds that are the same on all",
        )

    def _next_boundary(self, step: int, actions: Sequence[Action]) -> float:
        """Returns the next step at which the host has to look, unless time is over before.

        Logs that only writers consume need no boundary: the compiled loop returns a row for each.
        """
        everys = [action.every for action in actions]
        if self._state.keras_metrics or any(a.every is None and not member(a, "only_writes") for a in actions):
            everys.append(self.log_every)
        plan = self._host.plan
        boundary = plan.next_boundary(step, plan.last_step, everys, self._steps_per_loop)
        return min(boundary, self._host.profile.next_boundary(step))

    def _is_boundary(self, step: int, actions: Sequence[Action]) -> bool:
        """Returns whether a log or an action with a period of its own is due."""
        plan, everys = self._host.plan, [self.log_every, *(a.every for a in actions if a.every is not None)]
        return any(plan.is_due(every, step, plan.last_step) for every in everys)

    def _act(self, actions: Sequence[Action], report: Report) -> bool:
        """Opens a new window and calls the actions of a boundary; returns whether one of them ended the run."""
        window = self._open_window()  # before the actions run: a checkpoint then begins with the new window
        try:
            self.reported, self.stop_reason = run_actions(actions, report, self._host.clock, self._host.plan)
        except (Exception, KeyboardInterrupt):
            is_last, plan = int(self._state.step) == report.step, self._host.plan  # else later steps are done
            due = {"due_secs": [*plan.due_secs], "due_tokens": [*plan.due_tokens]}
            self.open_boundary = {"metrics": report.metrics, "time": report.time, **due} if is_last else None
            if not is_last:
                self._window = window  # this boundary may have no row: the next row has its steps, too
            raise
        if self.stop_reason:
            self._host.say(f"Stopped at step {report.step}: {self.stop_reason}.")
        return bool(self.stop_reason)

    def _act_again(self, step: int, actions: Sequence[Action]) -> bool:
        """Calls the actions of a boundary that was left open; returns as `_act`."""
        boundary, self.open_boundary = self.open_boundary, None
        plan = self._host.plan
        plan.due_secs, plan.due_tokens = set(boundary["due_secs"]), set(boundary.get("due_tokens", ()))
        is_over = plan.units.run.is_over(step, self.secs, self.tokens)
        until = step if is_over else plan.last_step
        is_stopped = self._act(actions, Report(step, until, boundary["metrics"], self._state, time=boundary["time"]))
        plan.due_secs, plan.due_tokens = set(), set()
        return is_stopped or is_over

    def _report(self, step: int, end: float) -> Report:
        """Reports the steps since the last row."""
        per_token = [update.full_name("loss") for update in self._step.updates if update.trace.has_tokens]
        plan, numbers = self._host.plan, self._window.metrics(self._step.names, per_token)
        return Report(step, plan.last_step, numbers, self._state, time=unix_time(end))

    def _open_window(self) -> Window:
        """Opens a window for the steps after this boundary; returns the window before."""
        before, self._window = self._window, Window(examples_seen=self._window.examples_seen)
        self._state.keras_metrics.reset()
        return before

    def _agree_on_next_loop(self, stop_requests: StopRequests | None, step: int) -> None:
        """Exchanges whether the run goes on, how many steps the chief lets the next loop run, and the chief's time.

        Raises:
            Interrupted: if any worker has a reason to leave the run.
        """
        secs = time.monotonic() - self._started_at
        vote = collectives.Vote(step=step, max_steps=self._most_steps, secs=secs)
        chief, *_ = collectives.agree_to_go_on(self._state.strategy, stop_requests, vote)
        self._most_steps, self.secs = int(chief.max_steps), chief.secs

    def _check_trace(self, source: Source, step: int) -> None:
        """Checks what is known of a step once it was traced for a source."""
        self._on_trace(self._step, source)
        self._host.show_progress(step, "")
        self._traced_for = source
        if not self._eager and self._counts_tokens() and loss_weight(self._step) is None:
            raise _no_tokens("no `loss` whose weights count them is returned")

    def _begin_to_count(self) -> None:
        """Hands the tokens so far to the schedules that read them.

        Raises:
            ValueError: if the tokens are unknown and needed.
        """
        if math.isnan(self.tokens) and self._counts_tokens():
            raise _no_tokens("the checkpoint is of an older version, which counted none")
        if self._state.token_count is not None:
            self._state.token_count.assign(self.tokens)

    def _counts_tokens(self) -> bool:
        """Returns whether a schedule reads the tokens, or anything is due by them."""
        return self._state.token_count is not None or self._host.plan.counts_tokens

    def _count(self, source: Source, row: Row, step: int) -> int:
        """Adds a row to the position in the data, the tokens and the window; returns how many steps it has."""
        source.batches_taken += row.steps
        self._window.add(row)
        if self._loss_weight is not None:
            before, self.tokens = self.tokens, self.tokens + float(row.tallies[self._loss_weight])
            if self._host.plan.counts_tokens:
                self._host.plan.count_tokens(before, self.tokens, step + row.steps)
        return row.steps


def _no_tokens(why: str) -> ValueError:
    return ValueError(f"A duration in tokens was given, and {why}: give steps.")

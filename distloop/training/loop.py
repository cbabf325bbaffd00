"""Owns the order of training.

A loop runs exactly up to the next boundary, in one `tf.function` over a *tensor* count, so that one trace serves every
length and no setting has to divide another. The host reads once a boundary, the numbers of several logs where nobody
but the writers wants them. It does not know flags or files.
"""

import contextlib
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from absl import logging

from distloop.actions import schedule
from distloop.actions.action import Action, Report, member
from distloop.actions.action import run as run_actions
from distloop.data import shards
from distloop.data.shards import Layout
from distloop.data.source import Source
from distloop.distributed import strategies, workers
from distloop.distributed.devices import HOST
from distloop.distributed.preemption import Interrupted, Interrupts
from distloop.errors import explain_data_error
from distloop.monitoring.profiler import Profile
from distloop.monitoring.timing import Clock
from distloop.training import metrics
from distloop.training.state import TrainState
from distloop.training.step import TrainStep
from distloop.variables import tensorflow_variable

_SCALAR, _VECTOR = tf.TensorShape([]), tf.TensorShape([None])
_LOOP_SECS = 0.5  # a loop that runs through several logs takes about so long


class Diverged(FloatingPointError):  # noqa: N818 - the run may go on from before
    """A step whose loss or gradients are not finite, or whose loss jumped.

    Attributes:
        step: its number.
        batch: the number of its batch in the stream of data, from 0.
    """

    def __init__(self, explanation: str, step: int, batch: int):
        """Keeps them."""
        super().__init__(explanation)
        self.step = step
        self.batch = batch


class TrainLoop:
    """Trains; traced once for each kind of data."""

    def __init__(self, state: TrainState, step: TrainStep, *, eager: bool = False):
        """Prepares; nothing is traced yet.

        Args:
            state: what is trained.
            step: one step of it.
            eager: whether it runs as plain Python, so that a debugger can look at it.
        """
        self._state = state
        self._step = step
        self._eager = eager
        self._run = compiled(self._logs, eager)
        self._run_one = compiled(functools.partial(self._logs, while_loop=_once), eager)
        self._names: list[str] = []  # of the numbers in a row beside sums; known once it was traced
        self._prepared_for: Source | None = None
        self._last_batch: shards.LastBatch | None = None
        self._window = _Window()
        self._clock = Clock()
        self._profile: Profile | None = None
        self._executor = strategies.PARALLEL_EXECUTOR
        with tf.device(HOST):  # when each step of a call began; Unix, seconds
            self._begun = tf.Variable(tf.zeros([0], tf.float64), shape=[None], trainable=False)

    def train(
        self,
        source: Source,
        until: int,
        to_do: Sequence[Action],
        *,
        log_every: int = 0,
        steps_per_loop: int = 0,
        window: Mapping[str, Any] | None = None,
        interrupts: Interrupts | None = None,
        clock: Clock | None = None,
        profile: Profile | None = None,
        executor: str = strategies.PARALLEL_EXECUTOR,
    ) -> dict[str, float]:
        """Trains until a step, stopping at boundaries to act.

        Args:
            source: repeated data.
            until: the global step to end with.
            to_do: actions, in order.
            log_every: the window of the reported means, in steps; 0: the whole run.
            steps_per_loop: an upper bound on the steps of one loop; 0: none.
            window: what `save_window` gave, to go on with; None: a new window begins.
            interrupts: asked after each loop whether to go on.
            clock: of the run; None: a new one.
            profile: of some of its steps.
            executor: what runs the operations, as `strategies.choose_executor` gives it.

        Returns:
            The last report's numbers.

        Raises:
            Interrupted: if the run is to be saved and left.
            Diverged: at the first step that is an error.
            ValueError: if the data gives out, or changes.
        """
        step = int(self._state.step)
        self._clock = clock or Clock()
        self._profile = profile
        self._executor = executor
        reported: dict[str, float] = {}
        if window is None:
            self._open_window()
        else:
            self._window = _Window(window)
        while step < until:
            left = source.start_loop()
            boundary = self._next_boundary(step, until, to_do, log_every, steps_per_loop)
            count = boundary - step if left is None else min(boundary - step, left)
            for row in self._run_steps(source, step, count, log_every):
                self._window.add(row)
                step += row.steps
                source.batches_taken += row.steps
                if row.failed is not None:
                    last = None if self._last_batch is None else (self._last_batch.get(), source.layout)
                    raise Diverged(self._step.explain(step, row.failed, last), step, source.batches_taken - 1)
                is_log_due = schedule.is_due(step, log_every, until)
                if is_log_due or any(a.every is not None and schedule.is_due(step, a.every, until) for a in to_do):
                    numbers = self._window.metrics(self._step.names)
                    report = Report(step, until, numbers, self._state, time=row.end)
                    if is_log_due:
                        self._open_window()  # before the actions: what they save begins with a new one
                    reported, reason = run_actions(to_do, report, self._clock)
                    if reason:
                        logging.warning("Stopped at step %d: %s.", step, reason)  # seen without flags, too
                        return reported
            if interrupts is not None and step < until and (reason := self._interruption(interrupts)):
                raise Interrupted(f"{reason} at step {step}")
        return reported

    def _next_boundary(
        self, step: int, until: int, to_do: Sequence[Action], log_every: int, steps_per_loop: int
    ) -> int:
        """Finds the next step at which the host is to look.

        Where nobody but writers cares for a log, a loop runs through several of them and tells their numbers at its
        end, as many as take no longer than a person would wait.
        """
        everys, logs = [action.every for action in to_do], 1
        if (
            log_every
            and not self._state.train_metrics
            and all(a.every is not None or member(a, "only_writes") for a in to_do)
        ):
            if secs := self._window.secs_per_log:
                logs = max(1, int(min(_LOOP_SECS / secs, (steps_per_loop or np.inf) / log_every)))
            logs = int(workers.gather(self._state.strategy, logs)[0])  # the chief's clock counts
        last_log = (step // log_every + logs) * log_every if log_every else until
        boundary = min(schedule.next_boundary(step, until, everys, steps_per_loop), last_log)
        return boundary if self._profile is None else int(min(boundary, self._profile.next_boundary(step)))

    def _interruption(self, interrupts: Interrupts) -> str | None:
        """Says why the run is to be left, if any worker has a reason to."""
        reason = interrupts.reason
        which = np.flatnonzero(workers.gather(self._state.strategy, reason is not None))
        return reason or (f"worker {which[0]} was asked to stop" if len(which) else None)

    def save_window(self) -> dict[str, Any]:
        """Gives the sums since the last log, as JSON can hold them."""
        return self._window.save()

    def _run_steps(self, source: Source, step: int, count: int, log_every: int) -> list["_Row"]:
        """Runs `count` steps after `step`, or up to the first that is an error; a row for each log and for the rest."""
        every = tf.constant(log_every or count + 1, tf.int64)
        try:
            if self._prepared_for is not source:
                if self._step.locate_nonfinite:
                    self._last_batch = shards.LastBatch(source.iterator())
                if not self._eager:
                    # A run of no steps traces and optimizes: errors come before the first step, and speeds mean steps.
                    workers.report_phase(self._state.strategy, "tracing the step")
                    with tf.experimental.function_executor_type(self._executor):
                        self._run(source.iterator(), source.layout, tf.constant(0, tf.int64), every)
                    self._step.warn()
                self._prepared_for = source
            start = time.time()
            workers.report_phase(self._state.strategy, "training")
            run = self._run
            if self._profile is not None and self._profile.is_single(step):
                run = self._run_one
            profiled = contextlib.nullcontext() if self._profile is None else self._profile.loop(step)
            with tf.experimental.function_executor_type(self._executor), profiled:
                result = run(source.iterator(), source.layout, tf.constant(count, tf.int64), every)
                result = tf.nest.map_structure(lambda t: t.numpy(), result)
        except tf.errors.OpError as error:
            explained = explain_data_error(error) or self._step.explain_error(error)
            if explained is None:
                raise
            raise explained from error
        workers.report_phase(self._state.strategy, "between two loops")
        rows: list[_Row] = []
        done = 0
        of_replicas = _num_timed(self._state.strategy)
        sizes = [2, len(self._names), result["rows"].shape[1] - 2 - len(self._names) - of_replicas]
        heads, of_updates, sums, replica_secs = np.split(result["rows"], np.cumsum(sizes), axis=1)
        between = self._clock.loop(start, float(heads[-1, 1]), float(sums[:, -1].sum()))
        for i, (done_then, end) in enumerate(heads.tolist()):
            own = dict(zip(self._names, of_updates[i].tolist(), strict=True))
            # From the beginning of each step to that of the next one.
            step_secs = np.diff(result["begun"][done : int(done_then)], append=end)
            rows.append(_Row(int(done_then) - done, end, end - start, sums[i], own, step_secs, replica_secs[i]))
            done, start = int(done_then), end
        rows[0] = rows[0]._replace(between=between)
        rows[-1].own.update(metrics.flatten_results(result["keras_metrics"]))
        if result["failed"]:
            rows[-1] = rows[-1]._replace(failed=result["diagnosis"])
        return rows

    def _logs(
        self,
        iterator: Any,
        layout: Layout,
        count: tf.Tensor,
        log_every: tf.Tensor,
        while_loop: Callable[..., Any] = tf.while_loop,
    ) -> dict[str, Any]:
        """Runs `count` steps, or up to the first one that is an error; a row for each log and for the rest."""
        first = self._state.step.read_value()

        of_replicas = _num_timed(self._state.strategy)

        def to_next_log(done: tf.Tensor, failed: tf.Tensor, rows: tf.TensorArray, _: tf.Tensor) -> Any:
            target = tf.minimum(count, done + log_every - (first + done) % log_every)
            done, failed, sums, diagnosis = self._steps(iterator, layout, done, target, while_loop)
            with tf.device(HOST), tf.control_dependencies([sums]):
                sums, replica_secs = sums[: tf.size(sums) - of_replicas], sums[tf.size(sums) - of_replicas :]
                examples = tf.reduce_sum(sums[-2:-1])  # a loop of no steps has none
                if (layout.is_sharded or layout.is_split) and workers.num_workers(self._state.strategy) > 1:
                    examples = workers.sum_over_workers(self._state.strategy, examples)
                own = self._read_numbers()
                self._names = list(own)
                head = [tf.cast(done, tf.float64), tf.timestamp(), *(tf.cast(v, tf.float64) for v in own.values())]
                row = tf.concat([tf.stack(head), sums[:-2], [examples], sums[-1:], replica_secs], 0)
            return done, failed, rows.write(rows.size(), row), diagnosis

        with tf.device(HOST):
            rows = tf.TensorArray(tf.float64, 0, dynamic_size=True, infer_shape=False)
            self._begun.assign(tf.zeros([count], tf.float64))
            none = (tf.constant(0, tf.int64), tf.constant(False), rows, tf.zeros([0]))
            _, failed, rows, diagnosis = while_loop(
                lambda done, failed, rows, _: (rows.size() == 0) | ((done < count) & ~failed),
                to_next_log,
                none,
                shape_invariants=(_SCALAR, _SCALAR, tf.TensorShape(None), _VECTOR),
                parallel_iterations=1,
            )
            return {
                "rows": rows.stack(),
                "begun": self._begun.read_value(),
                "failed": failed,
                "diagnosis": diagnosis,
                "keras_metrics": {name: metric.result() for name, metric in self._state.train_metrics.items()},
            }

    def _read_numbers(self) -> dict[str, tf.Tensor]:
        """Reads what a log tells beside the sums, by name: scalars."""
        state = self._state
        rates = {name: optimizer.learning_rate for name, optimizer in state.optimizers.items()}
        scales = {name: scaler.loss_scale for name, scaler in state.loss_scalers.items()}
        norms = {name: _norm(variables) for name, variables in state.variables_of_update.items()}
        return {
            "skipped_steps": state.skipped_steps.read_value(),
            **_by_update("learning_rate", rates),
            **_by_update("loss_scale", scales),
            **_by_update("weight_norm", norms),
        }

    def _steps(
        self, iterator: Any, layout: Layout, done: tf.Tensor, target: tf.Tensor, while_loop: Callable[..., Any]
    ) -> Any:
        """Runs steps until `target` of them are done, or up to the first one that is an error."""

        def body(done: tf.Tensor, failed: tf.Tensor, sums: tf.Tensor, _: tf.Tensor) -> Any:
            start = tf.timestamp()
            with tf.control_dependencies([start]), tf.device(HOST):
                batch = shards.next_batch(iterator, layout)
            with tf.control_dependencies(tf.nest.flatten(batch.rows, expand_composites=True)[:1]):
                waited = tf.timestamp() - start
            if self._last_batch is not None:
                self._last_batch.keep(batch)
            outcome = self._step(batch, layout)
            with tf.device(HOST):
                examples = tf.cast(shards.count_examples(batch, self._state.strategy), tf.float64)
                parts = [tf.cast(outcome.tallies, tf.float64), [examples, waited]]
                if outcome.replica_secs is not None:
                    parts.append(tf.cast(outcome.replica_secs, tf.float64))
                sums += tf.concat(parts, 0)
                self._begun.scatter_update(tf.IndexedSlices(start, done))
                # Counted as it is done: a later step whose data fails takes the whole loop's results with it.
                with tf.control_dependencies([outcome.applied]):
                    self._state.step.assign_add(1)
                if self._step.may_skip:
                    self._state.skipped_steps.assign_add(tf.cast(~outcome.applied, tf.int64))
                if self._step.may_fail:  # else the next step may start before this one has ended
                    failed = outcome.failed
            return done + 1, failed, sums, outcome.diagnosis

        with tf.device(HOST):
            # How many values loss_fn returns is known only when the body has been traced: one zero spreads to all.
            none = tf.zeros([1], tf.float64)
            return while_loop(
                lambda done, failed, *_: (done < target) & ~failed,
                body,
                (done, tf.constant(False), none, tf.zeros([0])),
                shape_invariants=(_SCALAR, _SCALAR, _VECTOR, _VECTOR),
            )

    def _open_window(self) -> None:
        self._window = _Window(secs_per_log=self._window.seconds)
        for metric in self._state.train_metrics.values():
            metric.reset_state()


class _Row(NamedTuple):
    """What some steps in a row gave."""

    steps: int
    end: float  # when the last of them was done; Unix, seconds
    seconds: float
    sums: np.ndarray  # [2 * M + 2]: the tallies, examples, and seconds waited for data
    own: dict[str, float]  # what stood at the end
    step_secs: np.ndarray  # [steps]
    replica_secs: np.ndarray  # [R]: forward and backward on each, of all steps; [0] where there is only one
    between: float = 0.0  # seconds since the loop before
    failed: np.ndarray | None = None  # the diagnosis, where the last step is an error


class _Window:
    """What training did since the last log: sums, to be divided once."""

    def __init__(self, saved: Mapping[str, Any] | None = None, secs_per_log: float = 0.0) -> None:
        self.sums: Any = 0.0
        self.steps, self.seconds, self.between = 0, 0.0, 0.0
        self.own: dict[str, float] = {}
        self.step_secs: list[np.ndarray] = []
        self.replica_secs: Any = 0.0
        self.secs_per_log = secs_per_log  # how long the one before took; 0: unknown
        if saved is not None:
            self.sums, self.steps, self.seconds = np.array(saved["sums"]), saved["steps"], saved["seconds"]

    def save(self) -> dict[str, Any]:
        return {"sums": np.asarray(self.sums).tolist(), "steps": self.steps, "seconds": self.seconds}

    def add(self, row: _Row) -> None:
        if np.shape(self.sums) not in ((), np.shape(row.sums)):  # saved when loss_fn gave other values
            self.sums, self.steps, self.seconds, self.between = 0.0, 0, 0.0, 0.0
        self.sums = self.sums + row.sums
        self.steps += row.steps
        self.seconds += row.seconds
        self.between += row.between
        self.own = row.own
        self.step_secs.append(row.step_secs)
        self.replica_secs = self.replica_secs + row.replica_secs

    def metrics(self, names: Sequence[str]) -> dict[str, float]:
        *tallies, examples, waited = self.sums
        numbers = metrics.means(names, np.array(tallies)) | self.own
        numbers["steps_per_sec"] = self.steps / self.seconds
        numbers["examples_per_sec"] = float(examples) / self.seconds
        numbers["input_wait"] = min(1.0, float(waited) / self.seconds)
        numbers["host_share"] = self.between / (self.between + self.seconds)
        step_secs = np.sort(np.concatenate(self.step_secs))
        for percent in (50, 90, 99):  # the smallest that so many are no longer than
            numbers[f"step_secs_p{percent}"] = float(step_secs[-(-percent * len(step_secs) // 100) - 1])
        if np.size(self.replica_secs) > 1:
            numbers["replica_imbalance"] = float(np.max(self.replica_secs) / np.mean(self.replica_secs)) - 1.0
        return numbers


def _norm(variables: Sequence[Any]) -> tf.Tensor:
    """Computes the Euclidean norm over all numbers of some variables."""
    halves = [tf.nn.l2_loss(tf.cast(tensorflow_variable(variable), tf.float32)) for variable in variables]
    return tf.sqrt(2.0 * tf.add_n(halves))


def _num_timed(strategy: tf.distribute.Strategy) -> int:
    """Counts the replicas that are compared with each other."""
    replicas = strategy.num_replicas_in_sync
    return replicas if replicas > 1 else 0


def compiled(fn: Callable[..., Any], eager: bool) -> Any:
    """Compiles; a function object of its own keeps TensorFlow from counting several trainers' traces as one's."""
    return fn if eager else tf.function(lambda *arguments: fn(*arguments), autograph=False)


def _once(condition: Any, body: Callable[..., Any], start: tuple[Any, ...], **_: Any) -> Any:
    """Stands for `tf.while_loop` where one turn is wanted."""
    return body(*start)


def _by_update(name: str, values: Mapping[str, Any]) -> dict[str, tf.Tensor]:
    """Names a value of each update."""
    return {f"{update}/{name}" if update else name: tf.convert_to_tensor(value) for update, value in values.items()}

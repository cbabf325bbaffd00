"""Compiled loop: runs n train steps in one `tf.function`; n is a tensor, so one trace serves all n.

It returns a `Row` of numbers for each log and one for the steps after the last log, read by the host in one go.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from distloop.data import shards
from distloop.data.shards import Batch, BatchLayout
from distloop.data.source import Source
from distloop.distributed import collectives, strategies
from distloop.distributed.devices import HOST
from distloop.graph_functions import NO_LIMIT_SECS, TimeLimit, compiled, graph_clock, has_clock, read_clock
from distloop.model import metrics
from distloop.model.state import TrainState
from distloop.model.step_marks import StepMarks
from distloop.training import step_operations
from distloop.training.step import Outcome, TrainStep, loss_weight
from distloop.training.window import Row, RowLayout
from distloop.variables import tensorflow_variable


class _Carry(NamedTuple):
    """The loop's values that go from one step to the next, on the device of the first replica.

    A GPU keeps int32 in the host's memory, so the host reads those without a copy.
    """

    done: tf.Tensor  # [], int32: the steps of this call so far, up to the first one that failed
    is_over: tf.Tensor  # [], int32: 1 if a step failed, as far as the host has looked, or no rows are ahead for another
    failed: tf.Tensor  # []: whether a step failed
    sums: tf.Tensor  # [S]: what the steps of the row add up to; one zero before the first, as tracing it shows S
    diagnosis: tf.Tensor  # [D]: of the step that failed, or the last one; one zero before the first

    @classmethod
    def start(cls) -> "_Carry":
        """Returns what the first step of a call gets."""
        return cls(
            done=tf.constant(0),
            is_over=tf.constant(0),
            failed=tf.constant(False),
            sums=tf.zeros([1], tf.float64),
            diagnosis=tf.zeros([1]),
        )


_SHAPES = _Carry(*[tf.TensorShape(shape) for shape in ([], [], [], [None], [None])])


class _Taken(NamedTuple):
    """The batch of a step."""

    batch: Batch
    layout: BatchLayout
    is_fetched: list[tf.Tensor]  # there once its rows are on the host; with rows ahead, those of the next batch
    is_last: tf.Tensor | None  # []: int32, 1 if no other step begins; None: that does not depend on the batch


class _Call(NamedTuple):
    """One call of a compiled loop."""

    iterator: Any
    layout: BatchLayout  # of the batches
    first: tf.Tensor  # []: the steps of the run before it
    count: tf.Tensor  # []: the most steps
    log_every: tf.Tensor  # []: the steps between two logs
    time_limit: TimeLimit
    while_loop: Callable[..., Any]
    ahead: shards.RowsAhead | None  # what holds the rows of the next step; None: a step fetches its own

    def goes_on(self, carry: _Carry, *, until: tf.Tensor, begun: tf.Tensor | int = 0) -> tf.Tensor:
        """Computes whether another step begins: until so many are done, and in time unless only `begun` are done.

        Rows that are ahead were fetched in time.
        """
        with tf.device(HOST):
            if self.ahead is not None:
                return (carry.done < until) & (carry.is_over == 0)
            with tf.control_dependencies([carry.is_over]):  # the clock is read when the step before has ended
                in_time = self.time_limit.is_ahead()
            return (carry.done < until) & (carry.is_over == 0) & (in_time | (carry.done == begun))

    def take(self, carry: _Carry) -> _Taken:
        """Takes the batch of a step, on the host; where rows are ahead, fetches the next one instead."""
        if self.ahead is None:
            batch = shards.next_batch(self.iterator, self.layout)
            return _Taken(batch, self.layout, tf.nest.flatten(batch.rows, expand_composites=True)[:1], None)
        goes_on = (tf.cast(carry.done, tf.int64) + 1 < self.count) & self.time_limit.is_ahead()
        following, is_fetched = self.fetch_if(goes_on)
        # Where the next batch is an error, this step changes nothing.
        batch = self.ahead.swap(following, after=is_fetched)
        return _Taken(batch, self.ahead.layout, [is_fetched], 1 - is_fetched)

    def fetch_if(self, goes_on: tf.Tensor) -> tuple[Batch, tf.Tensor]:
        """Returns the next batch if another step begins, and whether one does, int32, once the batch is there.

        The rows are sent outside of the branch: within it, the host would wait for the GPUs that take them.
        """
        batch, is_fetched = tf.cond(
            goes_on,
            lambda: (shards.next_batch(self.iterator, self.layout), tf.constant(1)),
            lambda: (shards.no_rows(self.iterator, self.layout), tf.constant(0)),
        )
        with tf.control_dependencies(tf.nest.flatten(batch.rows)[:1]):
            return batch, tf.identity(is_fetched)


class CompiledLoop:
    """Runs train steps until a count is reached or one of them fails; traced once for each kind of data."""

    def __init__(
        self, state: TrainState, step: TrainStep, *, eager: bool = False, max_traces: int = 0, keeps_batch: bool = False
    ):
        """Prepares; nothing is traced yet.

        Args:
            state: what is trained.
            step: one step of it.
            eager: whether the steps run as plain Python, for a debugger.
            max_traces: as for `compiled`.
            keeps_batch: whether the last batch is kept, as it is with `locate_nonfinite`, and of data that cannot be
                read again unless the next batch travels while a step computes.
        """
        self._keeps_batch = keeps_batch
        self._state = state
        self._step = step
        self._marks = StepMarks(state.strategy)
        self._reads_previous = step.runs_ahead and step.may_fail
        self._eager = eager
        self._run = compiled(self._steps_by_log, eager, name="train step", max_traces=max_traces)
        self._run_one = compiled(functools.partial(self._steps_by_log, while_loop=_call_once), eager)
        self._lead = strategies.lead_device(state.strategy)
        is_timed = strategies.times_replicas(state.strategy)
        self._num_timed_replicas = state.strategy.num_replicas_in_sync if is_timed else 0
        self._number_names: list[str] = []  # set by tracing
        self._last_batch: shards.LastBatch | None = None
        self._kept: dict[str, shards.LastBatch] = {}  # by the kind of batches
        self._ahead: dict[str, shards.RowsAhead] = {}  # by the kind of batches
        with tf.device(HOST):  # when each step of a call began, by `read_clock`
            self._step_starts = tf.Variable(tf.zeros([0], tf.float64), shape=[None], trainable=False)

    def trace(self, source: Source, executor: str) -> None:
        """Traces and optimizes by a run of no steps: errors come before the first step, speeds are those of steps."""
        self._prepare(source)
        if not self._eager:
            arguments = source.iterator(), source.layout, *_limits(0, 1, NO_LIMIT_SECS)
            with tf.experimental.function_executor_type(executor):
                self._run(*arguments)
            step_operations.warn(self._step, self._run.get_concrete_function(*arguments).graph)
            collectives.require_same(self._state.strategy, "train", {"the values of loss_fn": self._step.names})

    def _prepare(self, source: Source) -> None:
        kind, is_needed = _kind(source.iterator(), source.layout), self._step.locate_nonfinite or self._keeps_batch
        if is_needed or not (source.can_be_read_again or self._step.runs_ahead):
            self._kept.setdefault(kind, shards.LastBatch(source.iterator()))
        elif self._step.runs_ahead and shards.RowsAhead.are_possible(source.iterator()) and kind not in self._ahead:
            self._ahead[kind] = shards.RowsAhead(source.iterator(), source.layout, self._state.strategy)
        self._last_batch = self._kept.get(kind)

    def run(
        self, source: Source, count: int, log_every: int, *, executor: str, is_single: bool, secs: float = NO_LIMIT_SECS
    ) -> list[Row]:
        """Runs `count` steps, or up to the first that fails or where an average begins; after `secs` it begins none.

        Args:
            source: the data.
            count: steps, 1 or more.
            log_every: steps between two logs, each of which ends a row; 0: no log.
            executor: what runs the operations, as `strategies.choose_executor` returns it.
            is_single: whether `count` is 1 and the step runs outside a TensorFlow loop, so that a profiler sees it.
            secs: how long to run steps, of which there is one at least.

        Returns:
            The rows in order; only the last one may hold a diagnosis.
        """
        if self._state.average is not None:
            count = int(min(count, self._state.average.begin(int(self._state.step))))
        clock, limits = graph_clock(), _limits(count, log_every or count + 1, secs)
        with tf.experimental.function_executor_type(executor):
            result = (self._run_one if is_single else self._run)(source.iterator(), source.layout, *limits)
            result = tf.nest.map_structure(lambda t: t.numpy(), result)
        return self._unpack(result, clock)

    @property
    def is_between_steps(self) -> bool:
        """Whether each step that has begun has ended, also where `run` has failed."""
        return self._marks.are_equal

    def last_batch(self) -> Any:
        """Returns a copy of the last batch, to be looked at again; None unless the steps keep it."""
        return None if self._last_batch is None else self._last_batch.get()

    def _sums_layout(self) -> RowLayout:
        """Returns the layout of what the steps add up; known once the step was traced."""
        sizes = {"tallies": 2 * len(self._step.names), "examples": 1, "input_secs": 1}
        return RowLayout(sizes | {"replica_secs": self._num_timed_replicas})

    def _row_layout(self) -> RowLayout:
        heads = {"steps_done": 1, "end": 1, "numbers": len(self._number_names)}
        return RowLayout(heads | dict(self._sums_layout().sizes))

    def _unpack(self, result: Mapping[str, Any], clock: Callable[[Any], np.ndarray]) -> list[Row]:
        columns = self._row_layout().unpack(result["rows"])
        rows: list[Row] = []
        start, *ends = clock([-np.inf, *columns["end"][:, 0]]).tolist()
        step_starts, done, is_timed = clock(result["step_starts"]), 0, has_clock()
        for i, (done_then, end) in enumerate(zip(columns["steps_done"][:, 0], ends, strict=True)):
            is_last, seconds = i + 1 == len(result["rows"]), max(end - start, 1e-6)
            numbers = dict(zip(self._number_names, columns["numbers"][i].tolist(), strict=True))
            step_secs = np.diff(step_starts[done : int(done_then)], append=end)
            rows.append(
                Row(
                    steps=int(done_then) - done,
                    end=end,
                    seconds=seconds,
                    tallies=columns["tallies"][i],
                    examples=float(columns["examples"][i, 0]),
                    input_secs=min(max(0.0, float(columns["input_secs"][i, 0])), seconds) if is_timed else math.nan,
                    numbers=numbers | metrics.flatten_results(result["keras_metrics"]) if is_last else numbers,
                    step_secs=np.maximum(step_secs, 0.0) if is_timed else np.zeros(0),
                    replica_secs=np.maximum(columns["replica_secs"][i], 0.0),
                    diagnosis=result["diagnosis"] if is_last and result["failed"] else None,
                )
            )
            done, start = int(done_then), end
        return rows

    def _steps_by_log(
        self,
        iterator: Any,
        layout: BatchLayout,
        count: tf.Tensor,
        log_every: tf.Tensor,
        secs: tf.Tensor,
        while_loop: Callable[..., Any] = tf.while_loop,
    ) -> dict[str, Any]:
        """Runs `count` steps, or up to the first that fails; a row for each log and for the steps after the last.

        After so many seconds no step begins, but for the first one of a row that has begun.
        """
        first = self._state.step.read_value()
        ahead = self._ahead.get(_kind(iterator, layout))
        with tf.device(HOST):
            call = _Call(iterator, layout, first, count, log_every, TimeLimit(secs), while_loop, ahead)
            until = tf.cast(count, tf.int32)
            self._step_starts.assign(tf.zeros([count], tf.float64))
            if ahead is not None:
                ahead.put(call.fetch_if(count > 0)[0])
        with tf.device(self._lead):  # TensorFlow moves all that a loop carries through the device that it was built for
            carry, rows = while_loop(
                # At a log, the host reads what the step before it did.
                lambda carry, rows: (rows.size() == 0) | (call.goes_on(carry, until=until) & ~carry.failed),
                functools.partial(self._run_to_log, call),
                (_Carry.start(), tf.TensorArray(tf.float64, 0, dynamic_size=True, infer_shape=False)),
                shape_invariants=(_SHAPES, tf.TensorShape(None)),
                parallel_iterations=1,
            )
        with tf.device(HOST):
            return {
                "rows": rows.stack(),
                "step_starts": self._step_starts.read_value(),
                "failed": carry.failed,
                "diagnosis": carry.diagnosis,
                "keras_metrics": self._state.keras_metrics.results(),
            }

    def _run_to_log(self, call: _Call, carry: _Carry, rows: tf.TensorArray) -> tuple[_Carry, tf.TensorArray]:
        """Runs the steps up to the next log, and writes their row."""
        with tf.device(HOST):
            begun = tf.cast(carry.done, tf.int64)
            log = tf.minimum(call.count, begun + call.log_every - (call.first + begun) % call.log_every)
            log, begun = tf.cast(log, tf.int32), tf.identity(carry.done)
        (carry,) = call.while_loop(
            lambda carry: call.goes_on(carry, until=log, begun=begun),
            functools.partial(self._run_step, call),
            (carry._replace(sums=tf.zeros([1], tf.float64)),),
            shape_invariants=(_SHAPES,),
        )
        with tf.device(HOST):
            sums = tf.identity(carry.sums)  # the host's; the steps have ended when it is there
            with tf.control_dependencies([sums]):
                row = self._pack(call.layout, carry, sums)
        return carry, rows.write(rows.size(), row)

    def _run_step(self, call: _Call, carry: _Carry) -> tuple[_Carry]:
        """Takes the next batch, runs a step on it, and adds up what it did."""
        with tf.device(HOST):
            start = read_clock()
            with tf.control_dependencies([start]):
                taken = call.take(carry)
            with tf.control_dependencies(taken.is_fetched):
                input_secs = read_clock() - start
            if self._last_batch is not None:
                self._last_batch.keep(taken.batch)
        with self._marks.around(taken.is_fetched):
            with step_operations.unsaved_draws_refused(self._state):
                outcome = self._step(taken.batch, taken.layout, carry.failed if self._reads_previous else None)
            return (self._add(outcome, taken, carry, start, input_secs),)

    def _add(self, outcome: Outcome, taken: _Taken, carry: _Carry, start: tf.Tensor, input_secs: tf.Tensor) -> _Carry:
        """Adds up what a step did, whose batch was waited for from `start`."""
        # Where no step can fail, the next one may start before this one has ended.
        failed = outcome.failed if self._step.may_fail else carry.failed
        with tf.device(HOST):
            examples = tf.cast(shards.count_examples(taken.batch), tf.float64)
            is_over = tf.cast(carry.failed if self._reads_previous else failed, tf.int32)
            count = 1 - is_over if self._reads_previous else tf.constant(1)
            if taken.is_last is not None:
                is_over = tf.maximum(is_over, taken.is_last)
            self._step_starts.scatter_update(tf.IndexedSlices(start, carry.done))
            # Counted when it is done: if the data of a later step fails, the results of the whole call are lost. A GPU
            # completes what has begun, and the host would wait for it.
            with tf.control_dependencies(taken.is_fetched if self._step.runs_ahead else [outcome.applied]):
                self._state.step.assign_add(tf.cast(count, tf.int64))
            done = carry.done + count
        with tf.device(self._lead):
            secs = tf.zeros([0]) if outcome.replica_secs is None else outcome.replica_secs
            segments = {
                "tallies": tf.cast(outcome.tallies, tf.float64),
                "examples": examples[tf.newaxis],
                "input_secs": input_secs[tf.newaxis],
                "replica_secs": tf.cast(secs, tf.float64),
            }
            sums = tf.concat(self._sums_layout().pack(segments), 0)
            diagnosis, skipped = outcome.diagnosis, ~outcome.applied
            if self._reads_previous:
                failed |= carry.failed
                sums, skipped = tf.where(carry.failed, tf.zeros_like(sums), sums), skipped & ~carry.failed
                diagnosis = tf.where(carry.failed, carry.diagnosis, diagnosis)
            if self._state.token_count is not None and (index := loss_weight(self._step)) is not None:
                self._state.token_count.assign_add(self._sums_layout().unpack(sums)["tallies"][index])
            if self._step.may_skip:
                self._state.skipped_steps.assign_add(tf.cast(skipped, tf.int64))
            return _Carry(done, is_over, failed, carry.sums + sums, diagnosis)

    def _pack(self, layout: BatchLayout, carry: _Carry, sums: tf.Tensor) -> tf.Tensor:
        """Lays out the row of a log: what the steps added up, and the numbers as they stand."""
        sums_layout = self._sums_layout()
        segments = sums_layout.unpack(tf.broadcast_to(sums, [sums_layout.width]))  # a loop of no steps has one zero
        segments["examples"] = layout.sum_over_batches(self._state.strategy, segments["examples"])
        numbers = self._read_numbers()
        self._number_names = list(numbers)
        segments["steps_done"] = tf.cast(carry.done, tf.float64)[tf.newaxis]
        segments["end"] = read_clock()[tf.newaxis] if has_clock() else segments["steps_done"]
        segments["numbers"] = tf.stack([tf.cast(number, tf.float64) for number in numbers.values()])
        return tf.concat(self._row_layout().pack(segments), 0)

    def _read_numbers(self) -> dict[str, tf.Tensor]:
        """Returns what a log reports beside sums, by name: scalars."""
        state = self._state
        rates = {name: optimizer.learning_rate for name, optimizer in state.optimizers.items()}
        scales = {name: scaler.loss_scale for name, scaler in state.loss_scalers.items()}
        norms = {}
        for update in self._step.updates:  # a table that the steps do not walk is not walked for its norm either
            variables = state.variables_of_update[update.name]
            norms[update.name] = _norm([v for v in variables if id(v) not in update.packing.by_rows])
        return {
            "skipped_steps": state.skipped_steps.read_value(),
            **_by_update("learning_rate", rates),
            **_by_update("loss_scale", scales),
            **_by_update("weight_norm", norms),
        }


def _kind(iterator: Any, layout: BatchLayout) -> str:
    return f"{iterator.element_spec} {layout}"


def _limits(count: int, log_every: int, secs: float) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    with tf.device(HOST):
        return tf.constant(count, tf.int64), tf.constant(log_every, tf.int64), tf.constant(secs, tf.float64)


def _call_once(condition: Any, body: Callable[..., Any], start: tuple[Any, ...], **_: Any) -> Any:
    """Stands in for `tf.while_loop` where the body runs exactly once."""
    return body(*start)


def _norm(variables: Sequence[Any]) -> tf.Tensor:
    """Computes the Euclidean norm over all elements of some variables."""
    halves = [tf.nn.l2_loss(tf.cast(tensorflow_variable(variable), tf.float32)) for variable in variables]
    return tf.sqrt(2.0 * tf.add_n(halves)) if halves else tf.constant(0.0)


def _by_update(name: str, values: Mapping[str, Any]) -> dict[str, tf.Tensor]:
    """Returns a value of each update under `<update>/<name>`, or under `<name>` for a single update."""
    return {f"{update}/{name}" if update else name: tf.convert_to_tensor(value) for update, value in values.items()}

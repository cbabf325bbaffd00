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

_OVER = tf.int32.max  # in place of a number of steps


class _Carry(NamedTuple):
    """The loop's values that go from one step to the next, on the device of the first replica.

    A GPU keeps int32 in the host's memory, so the host reads those without a copy.
    """

    done: tf.Tensor  # [], int32: the steps of this call so far; `_OVER` if the host saw one fail, or time or rows end
    failed: tf.Tensor  # []: whether a step failed
    sums: list[tf.Tensor]  # what the steps of the row add up to, [1] or [S]: those of `_sums_layout`, in order
    diagnosis: list[tf.Tensor]  # pieces of [D]: of the step that failed, or the last one

    def shapes(self) -> "_Carry":
        """Returns the shapes that the values may have."""
        return tf.nest.map_structure(lambda t: tf.TensorShape([None] * t.shape.rank), self)


class _Taken(NamedTuple):
    """The batch of a step."""

    batch: Batch
    layout: BatchLayout
    is_fetched: list[tf.Tensor]  # there once its rows are on the host; with rows ahead, those of the next batch
    is_last: tf.Tensor | None  # []: whether no other step begins; None: that does not depend on the batch


class _Call(NamedTuple):
    """One call of a compiled loop."""

    iterator: Any
    layout: BatchLayout  # of the batches
    batch_size: int | None  # of each of them; None: it is known once a batch is there
    first: tf.Tensor  # []: the steps of the run before it
    count: tf.Tensor  # []: the most steps
    log_every: tf.Tensor  # []: the steps between two logs
    time_limit: TimeLimit
    while_loop: Callable[..., Any]
    ahead: shards.RowsAhead | None  # what holds the rows of the next step; None: a step fetches its own

    def goes_on(self, carry: _Carry, *, until: tf.Tensor) -> tf.Tensor:
        """Computes whether another step begins: until so many are done, and the steps are not over."""
        with tf.device(HOST):
            return carry.done < until

    def end(self, taken: _Taken, carry: _Carry, failed: tf.Tensor, ended_at: tf.Tensor) -> _Carry:
        """Returns a step's carry, in which the steps are over if the host knows of a failure, or time or rows end."""
        with tf.device(HOST):
            is_last = ~self.time_limit.is_ahead(ended_at) if taken.is_last is None else taken.is_last
            return carry._replace(done=tf.where(failed | is_last, _OVER, carry.done))

    def take(self, carry: _Carry, now: tf.Tensor | None = None) -> _Taken:
        """Takes the batch of a step, on the host; where rows are ahead, fetches the next one instead."""
        if self.ahead is None:
            batch = shards.next_batch(self.iterator, self.layout)
            return _Taken(batch, self.layout, tf.nest.flatten(batch.rows, expand_composites=True)[:1], None)
        goes_on = (tf.cast(carry.done, tf.int64) + 1 < self.count) & self.time_limit.is_ahead(now)
        following, is_fetched = self.fetch_if(goes_on)
        # Where the next batch is an error, this step changes nothing.
        batch = self.ahead.swap(following, after=is_fetched)
        return _Taken(batch, self.ahead.layout, [is_fetched], tf.equal(is_fetched, 0))

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
        # Where the body runs exactly once, it is called without a `tf.while_loop`.
        once = functools.partial(self._steps_by_log, while_loop=lambda _, body, start, **__: body(*start))
        self._run_one = compiled(once, eager)
        self._lead = strategies.lead_device(state.strategy)
        self._num_timed_replicas = strategies.times_replicas(state.strategy) * state.strategy.num_replicas_in_sync
        self._number_names: list[str] = []  # set by tracing
        self._last_batch: shards.LastBatch | None = None
        self._kept: dict[str, shards.LastBatch] = {}  # by the kind of batches
        self._ahead: dict[str, shards.RowsAhead] = {}  # by the kind of batches

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
        """Runs `count` steps, or up to the first that fails; after `secs` it begins none.

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

    def _sums_layout(self, batch_size: int | None = None) -> RowLayout:
        """Returns the layout of what steps add up, given the size of all batches; known once the step was traced."""
        sizes = {"tallies": 2 * len(self._step.names)} | ({"examples": 1} if batch_size is None else {})
        return RowLayout(sizes | ({"replica_secs": timed} if (timed := self._num_timed_replicas) else {}))

    def _row_layout(self) -> RowLayout:
        return RowLayout({"steps_done": 1, "end": 1, "numbers": len(self._number_names), **self._sums_layout().sizes})

    def _unpack(self, result: Mapping[str, Any], clock: Callable[[Any], np.ndarray]) -> list[Row]:
        columns = self._row_layout().unpack(result["rows"])
        rows: list[Row] = []
        start, *ends = clock([-np.inf, *columns["end"][:, 0]]).tolist()
        # `clock` needs order: a step's batch comes before its end, or, where steps run ahead, after its beginning.
        order = -1 if self._step.runs_ahead else 1
        first, times = np.split(clock(np.append(result["began_at"], result["step_times"][:, ::order])), [1])
        times, done, is_timed = times.reshape(-1, 2)[:, ::order], 0, has_clock()
        for i, (done_then, end) in enumerate(zip(columns["steps_done"][:, 0], ends, strict=True)):
            is_last, seconds = i + 1 == len(result["rows"]), max(end - start, 1e-6)
            numbers = dict(zip(self._number_names, columns["numbers"][i].tolist(), strict=True))
            fetched_at, ended_at = times[done : int(done_then)].T
            starts = ended_at if self._step.runs_ahead else np.append(start if i else first, ended_at[:-1])
            rows.append(
                Row(
                    steps=int(done_then) - done,
                    end=end,
                    seconds=seconds,
                    tallies=columns["tallies"][i],
                    examples=float(columns["examples"][i, 0]),
                    input_secs=float(np.clip((fetched_at - starts).sum(), 0.0, seconds)) if is_timed else math.nan,
                    numbers=numbers | metrics.flatten_results(result["keras_metrics"]) if is_last else numbers,
                    step_secs=np.maximum(np.diff(starts, append=end), 0.0) if is_timed else np.zeros(0),
                    replica_secs=np.maximum(columns.get("replica_secs", np.zeros([i + 1, 0]))[i], 0.0),
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
            size = layout.known_size(iterator.element_spec)
            call = _Call(iterator, layout, size, first, count, log_every, TimeLimit(secs), while_loop, ahead)
            until = tf.cast(count, tf.int32)
            self._marks.start(count)
            if ahead is not None:
                ahead.put(call.fetch_if(count > 0)[0])
        with tf.device(self._lead):  # TensorFlow moves all that a loop carries through the device that it was built for
            # As many sums as `_sums_layout` has, which is known once the step was traced, as is the length of each: one
            # zero stands for any.
            num_sums = 1 + (size is None) + bool(self._num_timed_replicas)
            sums, diagnosis = [tf.zeros([1], tf.float64)] * num_sums, [tf.zeros([1])] * self._step.num_diagnosis_pieces
            start = _Carry(tf.constant(0), tf.constant(False), sums, diagnosis)
            carry, rows = while_loop(
                # At a log, the host reads what the step before it did.
                lambda carry, rows: (rows.size() == 0) | (call.goes_on(carry, until=until) & ~carry.failed),
                functools.partial(self._run_to_log, call),
                (start, tf.TensorArray(tf.float64, 0, dynamic_size=True, infer_shape=False)),
                shape_invariants=(start.shapes(), tf.TensorShape(None)),
                parallel_iterations=1,
            )
        with tf.device(HOST):
            return {
                "rows": rows.stack(),
                "began_at": call.time_limit.began_at,
                "step_times": tf.stack(self._marks.times, 1),
                "failed": carry.failed,
                "diagnosis": tf.concat(carry.diagnosis or [[0.0]], 0),
                "keras_metrics": self._state.keras_metrics.results(),
            }

    def _run_to_log(self, call: _Call, carry: _Carry, rows: tf.TensorArray) -> tuple[_Carry, tf.TensorArray]:
        """Runs the steps up to the next log, and writes their row."""
        with tf.device(HOST):
            begun = tf.cast(carry.done, tf.int64)
            next_log = begun + call.log_every - (call.first + begun) % call.log_every
            log = tf.cast(tf.minimum(call.count, next_log), tf.int32)
        start = carry._replace(sums=[tf.zeros([1], tf.float64) for _ in carry.sums])
        (carry,) = call.while_loop(
            functools.partial(call.goes_on, until=log),
            functools.partial(self._run_step, call),
            (start,),
            shape_invariants=(start.shapes(),),
        )
        with tf.device(HOST):
            sums = [tf.identity(each) for each in carry.sums]  # the host's; the steps have ended when they are there
            with tf.control_dependencies(sums):
                row = self._pack(call, begun, sums)
        return carry, rows.write(rows.size(), row)

    def _run_step(self, call: _Call, carry: _Carry) -> tuple[_Carry]:
        """Takes the next batch, runs a step on it, and adds up what it did."""
        with tf.device(HOST):
            # A clock after the step would wait for the GPUs.
            began_at = [read_clock()] if self._step.runs_ahead else []
            with tf.control_dependencies(began_at):
                taken = call.take(carry, *began_at)
            if self._last_batch is not None:
                self._last_batch.keep(taken.batch)
        begun = self._marks.begin(carry.done, taken.is_fetched)
        with step_operations.unsaved_draws_refused(self._state):
            outcome = self._step(taken.batch, taken.layout, carry.failed if self._reads_previous else None)
        after = self._add(call, outcome, taken, carry)
        with tf.device(HOST):
            failed = tf.identity((carry if self._reads_previous else after).failed)
        return (call.end(taken, after, failed, self._marks.end(carry.done, begun, failed, *began_at)),)

    def _add(self, call: _Call, outcome: Outcome, taken: _Taken, carry: _Carry) -> _Carry:
        """Adds up what a step did."""
        # Where no step can fail, the next one may start before this one has ended.
        failed = outcome.failed if self._step.may_fail else carry.failed
        with tf.device(HOST):
            is_known = call.batch_size is not None
            examples = None if is_known else tf.cast(shards.count_examples(taken.batch), tf.float64)
            count = 1 - tf.cast(carry.failed, tf.int32) if self._reads_previous else tf.constant(1)
            # Counted when it is done: if the data of a later step fails, the results of the whole call are lost. A GPU
            # completes what has begun, and the host would wait for it.
            with tf.control_dependencies(taken.is_fetched if self._step.runs_ahead else [outcome.applied]):
                self._state.step.assign_add(tf.cast(count, tf.int64))
            done = carry.done + count
        with tf.device(self._lead):
            new = {"tallies": outcome.tallies, "examples": examples, "replica_secs": outcome.replica_secs}
            segments = {name: tf.cast(tensor, tf.float64) for name, tensor in new.items() if tensor is not None}
            diagnosis, skipped = outcome.diagnosis, ~outcome.applied
            if self._reads_previous:
                failed |= carry.failed
                segments = {name: tf.where(carry.failed, tf.zeros_like(t), t) for name, t in segments.items()}
                skipped &= ~carry.failed
                diagnosis = [tf.where(carry.failed, *pair) for pair in zip(carry.diagnosis, diagnosis, strict=True)]
            more = zip(carry.sums, self._sums_layout(call.batch_size).pack(segments), strict=True)
            if self._state.token_count is not None and (index := loss_weight(self._step)) is not None:
                self._state.token_count.assign_add(segments["tallies"][index])
            if self._step.may_skip:
                self._state.skipped_steps.assign_add(tf.cast(skipped, tf.int64))
            return _Carry(done, failed, [before + new for before, new in more], diagnosis)

    def _pack(self, call: _Call, begun: tf.Tensor, sums: Sequence[tf.Tensor]) -> tf.Tensor:
        """Lays out the row of a log: what the steps after the first ones added up, and the numbers as they stand."""
        pairs = zip(self._sums_layout(call.batch_size).sizes.items(), sums, strict=True)
        segments = {name: tf.broadcast_to(each, [size]) for (name, size), each in pairs}  # of no steps, there is a zero
        done = self._state.step.read_value() - call.first
        if call.batch_size is not None:
            segments["examples"] = tf.cast(call.batch_size * (done - begun), tf.float64)[tf.newaxis]
        segments["examples"] = call.layout.sum_over_batches(self._state.strategy, segments["examples"])
        numbers = read_numbers(self._state, self._step)
        self._number_names = list(numbers)
        segments["steps_done"] = tf.cast(done, tf.float64)[tf.newaxis]
        segments["end"] = read_clock()[tf.newaxis] if has_clock() else segments["steps_done"]
        segments["numbers"] = tf.stack([tf.cast(number, tf.float64) for number in numbers.values()])
        return tf.concat(self._row_layout().pack(segments), 0)


def read_numbers(state: TrainState, step: TrainStep) -> dict[str, tf.Tensor]:
    """Returns what a log reports beside sums, by name: scalars."""
    norms = {}
    for update in step.updates:  # a table that the steps do not walk is not walked for its norm either
        variables = state.variables_of_update[update.name]
        norms[update.name] = _norm([v for v in variables if id(v) not in update.packing.by_rows])
    return {
        "skipped_steps": state.skipped_steps.read_value(),
        **_by_update("learning_rate", {name: optimizer.learning_rate for name, optimizer in state.optimizers.items()}),
        **_by_update("loss_scale", {name: scaler.loss_scale for name, scaler in state.loss_scalers.items()}),
        **_by_update("weight_norm", norms),
    }


def _kind(iterator: Any, layout: BatchLayout) -> str:
    return f"{iterator.element_spec} {layout}"


def _limits(count: int, log_every: int, secs: float) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    with tf.device(HOST):
        return tf.constant(count, tf.int64), tf.constant(log_every, tf.int64), tf.constant(secs, tf.float64)


def _norm(variables: Sequence[Any]) -> tf.Tensor:
    """Computes the Euclidean norm over all elements of some variables."""
    halves = [tf.nn.l2_loss(tf.cast(tensorflow_variable(variable), tf.float32)) for variable in variables]
    return tf.sqrt(2.0 * tf.add_n(halves)) if halves else tf.constant(0.0)


def _by_update(name: str, values: Mapping[str, Any]) -> dict[str, tf.Tensor]:
    """Returns a value of each update under `<update>/<name>`, or under `<name>` for a single update."""
    return {f"{update}/{name}" if update else name: tf.convert_to_tensor(value) for update, value in values.items()}

"""The loop that XLA compiles: n train steps in one XLA program; n is a tensor, so one program serves all n.

    stacks = Stacks(element_spec, batch_size)
    iterator = iter(stacks.dataset(batches))
    stacks.at(iterator, 7).take(7, most=20)     # the batches from number 7 on that have one size

The loop answers the calls of `CompiledLoop`, for one device. XLA has no iterators, so batches come from stacks
(`Source.stack`): the batches of a stack may differ in their number of rows alone; the smaller ones are padded, and
`Stack.take` cuts them to their size again. XLA has no clock either, so the host takes the time of a call and does not
know that of each step. Whatever the number of steps in a call, a step computes the same bits; they differ from those of
`CompiledLoop` in the last place.
"""

import dataclasses
import functools
import math
import re
import time
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from distloop.data import shards
from distloop.data.feeds import Feed
from distloop.data.shards import Batch, BatchLayout
from distloop.data.source import Source
from distloop.distributed import strategies
from distloop.graph_functions import NO_LIMIT_SECS, Traces, graph_function, with_called
from distloop.log import log
from distloop.model.state import TrainState
from distloop.training import step_operations
from distloop.training.compiled_loop import read_numbers
from distloop.training.step import TrainStep, loss_weight
from distloop.training.window import Row

_CALL_SECS = 1.0  # that a call of the program takes at most, unless one step takes longer
_GROWTH = 8  # of the steps of a call, from one to the next
_MOST_BATCHES = 100  # of a stack; a call of a compiled program costs as much as 20 small steps
_MOST_BYTES = 8 * 2**20  # likewise, unless one batch is larger
_NUM_AHEAD = 2  # stacks that are read while steps compute


# Types of operations.
_IN_PYTHON = re.compile("(Eager)?PyFunc(Stateless)?")
_CONVOLUTION = re.compile(r"(DepthwiseC|C)onv[23]D\w*")


class _StepSums(NamedTuple):
    """The values that go from one step to the next."""

    done: tf.Tensor  # []: int32, the steps of this call so far, up to the first one that failed
    failed: tf.Tensor  # []: whether the last one failed
    sums: tf.Tensor  # [2 * M + 1], float64: tallies and examples, summed over the steps
    diagnosis: list[tf.Tensor]  # pieces of [D]: of the last step


class StackedBatches(NamedTuple):
    """Some batches in a row of one shape."""

    batches: Any  # the user's structure, tensors [K, B, ...]: the whole stack, cut to the rows of these batches
    start: int  # the index in the stack of the first of them
    num_batches: int
    batch_size: int  # B


class XlaLoop:
    """Runs train steps in one XLA program until a count is reached or one of them fails.

    The program is compiled once for each shape of batch.
    """

    def __init__(
        self, state: TrainState, step: TrainStep, *, eager: bool = False, max_traces: int = 0, keeps_batch: bool = False
    ):
        """Prepares; nothing is compiled yet.

        Args:
            state: what is trained.
            step: one step of it.
            eager: not used.
            max_traces: as for `compiled`.
            keeps_batch: whether `last_batch` returns the last batch.
        """
        self._state, self._step, self._keeps_batch = state, step, keeps_batch
        self._traces = Traces("train step", max_traces)
        self._programs: dict[Any, Any] = {}  # by kind of batches; of a stack, a start and a count
        self._structure = ""  # of the batches
        self._news: list[str] = []  # what was compiled since the last loop
        self._number_names: list[str] = []  # set by tracing
        self._most_steps = 1  # of the next call
        self._is_running = False
        self._last_batch: Batch | None = None

    def trace(self, source: Source, executor: str) -> None:
        """Compiles by a run of no steps: errors come before the first step, speeds are those of steps.

        Raises:
            ValueError: if XLA cannot run the step, or would run it slowly.
        """
        _refuse(self._state, source)
        self._structure = repr(source.info.element_spec)
        self._program(source.stack(source.batches_taken).take(source.batches_taken, 1), source.layout)

    def run(
        self, source: Source, count: int, log_every: int, *, executor: str, is_single: bool, secs: float = NO_LIMIT_SECS
    ) -> list[Row]:
        """Runs `count` steps, or fewer; the arguments and rows are those of `CompiledLoop.run`.

        Neither `executor` nor `is_single` changes anything here.
        """
        first, began_at = int(self._state.step), time.monotonic()
        rows: list[Row] = []
        done = 0
        while not rows or (done < count and rows[-1].diagnosis is None and rows[-1].end < began_at + secs):
            until = min(count, done + log_every - (first + done) % log_every) if log_every else count
            rows.append(self._run_to_log(source, source.batches_taken + done, until - done, began_at + secs))
            done += rows[-1].steps
        news, self._news = ", ".join(self._news), []
        return [dataclasses.replace(rows[0], news=news), *rows[1:]]

    @property
    def is_between_steps(self) -> bool:
        """Whether each step that has begun has ended, also where `run` has failed."""
        return not self._is_running

    def last_batch(self) -> Batch | None:
        """Returns the last batch, to be looked at again; None unless it is kept."""
        return self._last_batch

    def _run_to_log(self, source: Source, number: int, count: int, ends_at: float) -> Row:
        """Runs up to `count` steps from a batch on, and returns their row; compiling does not count as their time."""
        sums, input_secs, compile_secs, done, start = np.zeros(1), 0.0, 0.0, 0, time.monotonic()
        while True:
            began_at = time.monotonic()
            taken = source.stack(number + done).take(number + done, min(count - done, self._most_steps))
            taken_at = time.monotonic()
            program = self._program(taken, source.layout)
            compiled_at = time.monotonic()
            input_secs, compile_secs = input_secs + taken_at - began_at, compile_secs + compiled_at - taken_at
            (num_steps, failed, *more), diagnosis = self._call(program, taken, source.layout)
            tallies, numbers = np.split(more, [-len(self._number_names)])
            done, sums, end = done + int(num_steps), sums + tallies, time.monotonic()
            if failed or done >= count or end > ends_at:
                return Row(
                    steps=done,
                    end=end,
                    seconds=max(end - start - compile_secs, 1e-6),
                    tallies=sums[:-1],
                    examples=float(sums[-1]),
                    input_secs=input_secs,
                    numbers=dict(zip(self._number_names, numbers.tolist(), strict=True)),
                    step_secs=np.zeros(0),
                    replica_secs=np.zeros(0),
                    diagnosis=diagnosis.numpy() if failed else None,
                )

    def _program(self, taken: StackedBatches, layout: BatchLayout) -> Any:
        """Returns the program for batches of a shape; if it is new, it is compiled by a run of no steps."""
        kind = (self._structure, layout, *((t.dtype, t.shape) for t in tf.nest.flatten(taken.batches)))
        if kind not in self._programs:
            began_at, number = time.monotonic(), tf.TensorSpec([], tf.int32)
            specs = tf.nest.map_structure(tf.TensorSpec.from_tensor, taken.batches), number, number
            # Its call takes a third of the time of one of the function that it is made from.
            traced = graph_function(functools.partial(self._run_steps, layout), jit_compile=True)
            program = traced.get_concrete_function(*specs)
            program(taken.batches, tf.constant(0), tf.constant(0))
            self._programs[kind] = program
            secs = time.monotonic() - began_at
            self._news += [f"train step compiled by XLA for batches of {taken.batch_size} in {secs:.1f} s"]
        return self._programs[kind]

    def _call(self, program: Any, taken: StackedBatches, layout: BatchLayout) -> tuple[np.ndarray, tf.Tensor]:
        """Runs the steps of stacked batches; returns what the program returned, the numbers as an array."""
        began_at, self._is_running = time.monotonic(), True
        numbers, diagnosis = program(taken.batches, tf.constant(taken.start), tf.constant(taken.num_batches))
        numbers = numbers.numpy()
        self._is_running = False
        if self._keeps_batch:
            last = taken.start + int(numbers[0]) - 1
            self._last_batch = shards.as_batch(tf.nest.map_structure(lambda t: t[last], taken.batches), layout)
        in_time = int(_CALL_SECS * taken.num_batches / max(time.monotonic() - began_at, 1e-6))
        self._most_steps = max(1, min(in_time, _GROWTH * self._most_steps, _MOST_BATCHES))
        return numbers, diagnosis

    def _run_steps(
        self, layout: BatchLayout, batches: Any, start: tf.Tensor, count: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Runs `count` steps from an index in a stack on, or up to the first that fails.

        Returns:
            In one vector, float64: `done`, `failed` and `sums` of the carry, and the numbers after the last step; and
            the diagnosis.
        """
        spec = tf.nest.map_structure(lambda t: tf.TensorSpec(t.shape[1:], t.dtype), batches)
        self._traces.add(tf.nest.flatten(spec))
        # Traced before the loop around it, whose values have known shapes.
        step = graph_function(functools.partial(self._run_step, layout)).get_concrete_function(spec)
        _refuse_operations(step.graph, self._state)
        step_operations.warn(self._step, step.graph)
        zeros = tf.nest.map_structure(lambda t: tf.zeros(t.shape, t.dtype), step.structured_outputs)

        def body(carry: _StepSums) -> tuple[_StepSums]:
            # With `t[index]`, TensorFlow would compile another program for each start.
            index = start + carry.done
            outcome: _StepSums = step(tf.nest.map_structure(lambda t: tf.gather(t, index), batches))
            return (outcome._replace(done=carry.done + 1, sums=carry.sums + outcome.sums),)

        (carry,) = tf.while_loop(
            lambda carry: (carry.done < count) & ~carry.failed, body, (zeros,), parallel_iterations=1
        )
        numbers = read_numbers(self._state, self._step)
        self._number_names = list(numbers)
        heads = tf.cast(tf.stack([carry.done, tf.cast(carry.failed, tf.int32)]), tf.float64)
        ends = tf.stack([tf.cast(number, tf.float64) for number in numbers.values()])
        return tf.concat([heads, carry.sums, ends], 0), tf.concat(carry.diagnosis or [[0.0]], 0)

    def _run_step(self, layout: BatchLayout, element: Any) -> _StepSums:
        """Runs a step on an element of a stack; returns what it adds to the carry."""
        state, batch = self._state, shards.as_batch(element, layout)
        with step_operations.unsaved_draws_refused(state):
            outcome = self._step(batch, layout)
        state.step.assign_add(1)
        tallies = tf.cast(outcome.tallies, tf.float64)
        if state.token_count is not None and (index := loss_weight(self._step)) is not None:
            state.token_count.assign_add(tallies[index])
        if self._step.may_skip:
            state.skipped_steps.assign_add(tf.cast(~outcome.applied, tf.int64))
        sums = tf.concat([tallies, tf.cast(shards.count_examples(batch), tf.float64)[tf.newaxis]], 0)
        return _StepSums(tf.constant(1), outcome.failed, sums, outcome.diagnosis)


def _refuse(state: TrainState, source: Source) -> None:
    """Raises a ValueError if XLA cannot train a state on some data."""
    if state.strategy.num_replicas_in_sync > 1 or state.stage_devices:
        raise _refusal(f"{strategies.describe(state.strategy)}, and one program runs on one device", "num_devices=1")
    if isinstance(source.feed, Feed):
        raise _refusal("batches that Python makes, which take longer than the steps", "distloop.make_dataset")
    if names := list(state.keras_metrics):
        raise _refusal(f"the Keras metric {names[0]!r}, whose state is not in the step", "values of each example")


def _refuse_operations(graph: tf.Graph, state: TrainState) -> None:
    """Raises a ValueError if a step has an operation that XLA does not have, or runs slowly."""
    for op in with_called(graph.get_operations()):
        if _IN_PYTHON.fullmatch(op.type):
            raise _refusal("a py_function, which XLA does not have", "TensorFlow's operations")
        if not strategies.has_gpus(state.strategy) and _CONVOLUTION.fullmatch(op.type):
            raise _refusal(f"a {op.type}, which XLA computes 80 times slower on CPUs")


def _refusal(what: str, instead: str = "") -> ValueError:
    return ValueError(f"jit_compile=loop was given with {what}: use {instead and f'{instead}, or '}jit_compile=none.")


class Stacks:
    """The stacks of a stream of batches, of which the present one is at hand."""

    def __init__(self, element_spec: Any, size: int | None):
        """Begins with the first batch.

        Args:
            element_spec: of a batch.
            size: the rows of a batch; None: unknown.

        Raises:
            ValueError: if XLA takes no such batches.
        """
        self.size = _stack_size(element_spec, size)
        self.begin(0)

    def begin(self, first: int) -> None:
        """Has the next stack begin with a batch, by its number."""
        self._stack = Stack((), np.zeros(0, int), first)  # empty, it ends before that batch

    def at(self, iterator: Any, number: int) -> "Stack":
        """Returns the stack that holds a batch, by its number: the next batch, or one that was not yet taken."""
        while self._stack.end <= number:
            self._stack = Stack.of(iterator.get_next(), self._stack.end)
        return self._stack

    def dataset(self, dataset: tf.data.Dataset, num_to_skip: int = 0) -> tf.data.Dataset:
        """Returns a dataset of stacks, for `at`.

        Args:
            dataset: of batches, dense tensors whose shapes are known but for the number of rows.
            num_to_skip: the batches to skip; of them, those that fill no stack are left out here.
        """
        dataset, spec = dataset.skip(num_to_skip % self.size), dataset.element_spec
        if tf.nest.flatten(spec)[0].shape[0] is not None:
            return dataset.batch(self.size).prefetch(_NUM_AHEAD)

        def with_size(*entries: Any) -> _OfSizes:
            batch = shards.pack_element(entries, spec)
            return _OfSizes(batch, tf.convert_to_tensor(shards.batch_size(batch)))

        pairs = dataset.map(tf.autograph.experimental.do_not_convert(with_size))
        return pairs.padded_batch(self.size).prefetch(_NUM_AHEAD)


@dataclasses.dataclass(frozen=True)
class Stack:
    """Some batches in a row.

    Attributes:
        batches: the structure of a batch, tensors `[K, B, ...]`.
        sizes: `[K]`: the rows of each batch.
        first: the number of the first batch in the stream of data.
    """

    batches: Any
    sizes: np.ndarray
    first: int

    @classmethod
    def of(cls, element: Any, first: int) -> "Stack":
        """Returns the stack in an element of `Stacks.dataset`."""
        if isinstance(element, _OfSizes):
            return cls(element.batches, element.sizes.numpy(), first)
        shape = tf.nest.flatten(element)[0].shape
        return cls(element, np.full(shape[0], shape[1]), first)

    @property
    def end(self) -> int:
        """The number of the batch after the last one."""
        return self.first + len(self.sizes)

    def take(self, number: int, most: int) -> StackedBatches:
        """Returns the batches from a number on that have one size: one at least, some at most."""
        start = number - self.first
        wanted = self.sizes[start : start + most]
        size, others = int(wanted[0]), np.flatnonzero(wanted != wanted[0])
        count = int(others[0]) if len(others) else len(wanted)
        batches = self.batches
        if size < self.sizes.max():
            batches = tf.nest.map_structure(lambda t: t[:, :size] if t.shape.rank > 1 else t, batches)
        return StackedBatches(batches, start, count, size)


class _OfSizes(NamedTuple):
    """A stack of batches of different sizes."""

    batches: Any
    sizes: tf.Tensor


def _stack_size(element_spec: Any, size: int | None) -> int:
    """Returns how many batches a stack holds, which depends on their bytes alone; one if those are unknown.

    Args:
        element_spec: of a batch.
        size: the rows of a batch; None: unknown.

    Raises:
        ValueError: if XLA takes no such batches.
    """
    for path, spec in keras.tree.flatten_with_path(element_spec):
        if why := _why_not(spec):
            raise ValueError(
                f"jit_compile=loop was given, and the entry {'/'.join(map(str, path)) or 'of a batch'} {why}: prepare "
                "it in the dataset, or use jit_compile=none."
            )
    if size is None:
        log.warning(
            "jit_compile=loop was given data whose batch size TensorFlow does not know, so each batch is a call of the "
            "program: call batch() last, or set the shape of its entries by tf.ensure_shape, to stack small batches."
        )
        return 1
    of_row = [spec.dtype.size * math.prod(n or 1 for n in spec.shape[1:]) for spec in tf.nest.flatten(element_spec)]
    return int(max(1, min(_MOST_BATCHES, _MOST_BYTES // max(1, size * sum(of_row)))))


def _why_not(spec: Any) -> str:
    """Returns why XLA takes no entry of this kind; empty: it does."""
    if not isinstance(spec, tf.TensorSpec):
        return f"is a {spec.value_type.__name__}, while XLA takes dense tensors alone"
    if spec.dtype == tf.string:
        return "holds texts, while XLA takes numbers alone"
    if not spec.shape[1:].is_fully_defined():
        return f"has the shape {list(spec.shape)}, while XLA needs a known length of each axis behind the first"
    return ""

"""Owns trials: a few steps that answer a question about a run, and leave no trace in what they trained.

    found = find_learning_rate(trainer, dataset)        # which step size?
    print(found.suggestion)
    found = autotune_batch(trainer, dataset)            # how many rows a step?
    print(found.suggestion)

A trial trains the trainer's own model, with its settings, and puts every bit back. It reads a dataset of its own.
"""

import contextlib
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import keras
import numpy as np
import tensorflow as tf

from distloop.actions.action import Action, Report
from distloop.config import Config
from distloop.data import shards
from distloop.data.arrays import as_dataset
from distloop.data.source import Data, Source
from distloop.distributed import strategies, workers
from distloop.distributed.devices import HOST
from distloop.monitoring import memory
from distloop.monitoring.console import say
from distloop.monitoring.tensorboard import SummaryWriter
from distloop.optimizers import learning_rates
from distloop.training.loop import Diverged, TrainLoop
from distloop.training.state import TrainState
from distloop.training.step import TrainStep

_SMOOTHING = 0.9  # of the losses: the weight of those before
_TOO_LARGE = 4.0  # times the least loss, and the learning rate is too high for good
_WARM_UP_STEPS, _MOST_STEPS = 2, 1000  # of a measurement
_MEASURED_SECS = 1.0  # about so long is a size measured
_WORTH_IT = 1.05  # a larger batch is to be so much faster
_PATIENCE = 2  # doublings that may not be


class Trainable(Protocol):
    """A `Trainer`, as far as trials need it."""

    config: Config
    state: TrainState

    def build(self, dataset: Data) -> None:
        """Makes the variables that depend on what a batch looks like."""


class RateTest(NamedTuple):
    """What a learning-rate range test found.

    Attributes:
        rates: learning rates, ascending, `[N]`.
        losses: the loss of the step with each, `[N]`; before the step changed the weights.
        smoothed: `losses`, as an exponential moving average without its bias towards 0, `[N]`.
        suggestion: the rate from which on the smoothed loss fell most, over a tenth of the steps; None where it never
            fell.
    """

    rates: np.ndarray
    losses: np.ndarray
    smoothed: np.ndarray
    suggestion: float | None


def find_learning_rate(
    trainer: Trainable,
    dataset: Data,
    *,
    lowest: float = 1e-7,
    highest: float = 10.0,
    steps: int = 100,
    update: str = "",
) -> RateTest:
    """Looks for a learning rate by raising it from step to step until the loss explodes (Smith 2015, arXiv:1506.01186).

    It grows by the same factor each step, and the test ends where the smoothed loss exceeds 4 times its least. The
    suggestion is where the smoothed loss falls fastest, as fastai's `steep` (Howard and Gugger 2020, arXiv:2002.04688),
    with the slope taken over a tenth of the steps, so that it does not follow the noise of single batches. With a
    workdir, TensorBoard shows `loss` and `smoothed_loss` as the run `learning_rate`, over 100 times the decimal
    logarithm of the rate: -300 is 1e-3.

    Weights, optimizer, averages, random streams, counts and the place in the data are afterwards what they were, bit
    for bit. On several workers all call it.

    Args:
        trainer: whose model, optimizer and settings are tried, from the weights that it has now.
        dataset: as for `Trainer.fit`; read from its beginning.
        lowest: the rate to begin with.
        highest: the rate to end with.
        steps: how many to take at most.
        update: whose optimizer it is about, where there are several updates.

    Returns:
        The rates, losses and suggestion, the same on any number of replicas.

    Raises:
        ValueError: if the numbers contradict each other, there is no such update, or the data breaks a rule.
    """
    if not 0 < lowest < highest < math.inf or steps < 2:
        raise ValueError(
            f"find_learning_rate was given lowest={lowest}, highest={highest} and steps={steps}; it needs "
            "0 < lowest < highest and 2 steps at least."
        )
    state, settings = trainer.state, trainer.config
    if update not in state.plain_optimizers:
        raise ValueError(
            f"find_learning_rate was given update={update!r}; the model's updates are {list(state.plain_optimizers)}: "
            "name one of them."
        )
    trainer.build(dataset)
    factor = (highest / lowest) ** (1 / (steps - 1))
    first, watch = int(state.step), _WatchLoss(f"{update}/loss" if update else "loss")
    dataset = as_dataset(dataset, settings.batch_size, settings.seed)
    source = Source(dataset, state.strategy, microbatches=settings.microbatches, may_go_back=True)
    with unchanged(state), _rate_of(state, update, _Sweep(state.step, first, lowest, factor)):
        with contextlib.suppress(_Exploded, Diverged):
            make_loop(state, settings, log_every=1).train(source, first + steps, [watch])
    taken = np.isfinite(watch.losses)  # float16 skips steps while it looks for a loss scale
    rates = (lowest * factor ** np.arange(len(watch.losses)))[taken]
    losses, smoothed = np.array(watch.losses)[taken], smooth(np.array(watch.losses)[taken])
    window = max(1, steps // 10)
    falls = smoothed[:-window] - smoothed[window:]
    fell = len(falls) > 0 and falls.max() > 0
    found = RateTest(rates, losses, smoothed, float(rates[falls.argmax()]) if fell else None)
    if workers.is_chief(state.strategy):
        _show(found, settings)
    return found


class BatchTrial(NamedTuple):
    """What one batch size does.

    Attributes:
        batch_size: rows of a step, over all replicas.
        examples_per_sec: of the step alone: the data is there.
        memory_gb: the highest level so far, of the fullest GPU where there are GPUs, else of this process.
    """

    batch_size: int
    examples_per_sec: float
    memory_gb: float


class BatchTest(NamedTuple):
    """What `autotune_batch` found.

    Attributes:
        trials: one a size, the smallest first; each fits.
        suggestion: the smallest size that is not 5 % slower than the fastest.
        reason: why no larger one was tried.
    """

    trials: tuple[BatchTrial, ...]
    suggestion: int
    reason: str


def autotune_batch(trainer: Trainable, dataset: Data, *, memory_share: float = 0.5) -> BatchTest:
    """Looks for the batch size that processes most examples a second, and for how large a batch fits.

    It trains for about a second on the dataset's first batch, then on its rows repeated to twice, four times, ... as
    many, with a learning rate of 0: it is the step that is measured, not the input. It ends where a batch does not fit
    on a GPU (untested), where the next one might take more than `memory_share` of the memory that was available, or
    where two doublings in a row were no 5 % faster. `Config.batch_size` stays as it is: give the suggestion to the
    program, with the learning rate that goes with it.

    All that training changes is afterwards what it was, bit for bit.

    Args:
        trainer: whose model and settings are tried, on one worker.
        dataset: as for `Trainer.fit`.
        memory_share: of the host's memory; a number above 0, up to 1.

    Raises:
        ValueError: if there are several workers, the data breaks a rule, or its own batch does not fit.
    """
    state, settings = trainer.state, trainer.config
    if not 0 < memory_share <= 1:
        raise ValueError(f"memory_share={memory_share} was given to autotune_batch; give a number above 0, up to 1.")
    if workers.num_workers(state.strategy) > 1:
        raise ValueError(
            "autotune_batch was called on several workers, where one may run out of memory while the others wait: call "
            "it on one of them, and take its rows for each replica."
        )
    trainer.build(dataset)
    first = Source(dataset, state.strategy, repeat=False, batch_size=settings.batch_size)
    rows, is_split = first.first_rows(), first.layout.is_split
    size = int(shards.batch_size(rows)) * (state.strategy.num_replicas_in_sync if is_split else 1)
    measure = _Meter(state, settings, rows)
    before, most = memory.peaks()["host_memory_gb"], memory_share * memory.available_gb()
    found: list[BatchTrial] = []
    reason = ""
    with unchanged(state), _rates_of_zero(state):
        while not reason:
            try:
                found.append(measure(size))
            except tf.errors.ResourceExhaustedError:
                reason = f"a batch of {size} does not fit"
                break
            _tell(settings, _describe(found[-1], state.strategy.num_replicas_in_sync))
            size *= 2
            taken = memory.peaks()["host_memory_gb"] - before
            if 2 * taken > most:
                reason = f"a batch of {size} may take more than {most:.2g} GB of memory"
            elif len(found) > _PATIENCE and not _is_faster(found[-_PATIENCE:], found[:-_PATIENCE]):
                reason = "larger ones are no faster"
    if not found:
        raise ValueError(
            f"The dataset's own batch, of {size} rows, does not fit into memory: give a smaller batch_size, or more "
            "microbatches."
        )
    fastest = max(trial.examples_per_sec for trial in found)
    best = next(trial.batch_size for trial in found if trial.examples_per_sec * _WORTH_IT >= fastest)
    _tell(settings, _advise(best, found[0].batch_size, reason))
    return BatchTest(tuple(found), best, reason)


@contextlib.contextmanager
def unchanged(state: TrainState) -> Iterator[None]:
    """Puts all that training changes back to where it was, in the end."""
    before = state.snapshot()
    try:
        yield
    finally:
        state.restore(before)


def make_loop(state: TrainState, settings: Config, log_every: int = 0) -> TrainLoop:
    """Makes a loop of a trial's own, so that it may trace other things than the run's."""
    step = TrainStep(
        state,
        microbatches=settings.microbatches,
        clip_norm=settings.clip_norm,
        jit_compile=settings.jit_compile,
    )
    return TrainLoop(state, step, log_every=log_every, eager=settings.eager)


def smooth(values: np.ndarray) -> np.ndarray:
    """Averages each value, `[N]`, with those before it, which count less the older they are: by 0.9 a step.

    Divided by the sum of the weights, the average has no bias towards 0 (Kingma and Ba 2014, arXiv:1412.6980, section
    3).
    """
    total, weight, found = 0.0, 0.0, []
    for value in values:
        total = _SMOOTHING * total + (1 - _SMOOTHING) * float(value)
        weight = _SMOOTHING * weight + (1 - _SMOOTHING)
        found.append(total / weight)
    return np.array(found)


class _Exploded(Exception):  # noqa: N818 - what the test waits for
    """The loss is so large that no higher rate is of interest."""


class _WatchLoss(Action):
    """Notes the loss of each step, and ends the test when it has exploded."""

    every: int | None = 1

    def __init__(self, name: str):
        self.losses: list[float] = []
        self._name = name

    def __call__(self, report: Report) -> None:
        self.losses.append(report.metrics[self._name])
        smoothed = smooth(np.array([loss for loss in self.losses if math.isfinite(loss)]))
        if len(smoothed) and smoothed[-1] > smoothed.min() + (_TOO_LARGE - 1) * abs(smoothed.min()):
            raise _Exploded


class _Sweep(keras.optimizers.schedules.LearningRateSchedule):
    """Multiplies the learning rate by a factor each step, skipped ones too, which an optimizer does not count."""

    def __init__(self, step: tf.Variable, first: int, lowest: float, factor: float):
        self._step, self._first, self._lowest, self._factor = step, first, lowest, factor

    def __call__(self, iterations: Any) -> tf.Tensor:
        return self._lowest * self._factor ** tf.cast(self._step - self._first, tf.float32)


@contextlib.contextmanager
def _rate_of(state: TrainState, update: str, schedule: _Sweep) -> Iterator[None]:
    """Gives an optimizer another learning rate meanwhile; Keras would drop the variable that holds the old one."""
    optimizer = state.plain_optimizers[update]
    before, optimizer._learning_rate = optimizer._learning_rate, schedule
    try:
        yield
    finally:
        optimizer._learning_rate = before


class _Meter:
    """Measures how fast a model trains, by batch size."""

    def __init__(self, state: TrainState, settings: Config, rows: Any):
        self._state, self._rows, self._settings = state, rows, settings

    def __call__(self, batch_size: int) -> BatchTrial:
        """Measures one; raises ResourceExhaustedError where a device runs out of memory."""
        numbers = tf.range(batch_size) % shards.batch_size(self._rows)
        with tf.device(HOST):
            batch = tf.nest.map_structure(lambda t: tf.gather(t, numbers), self._rows)
        dataset = tf.data.Dataset.from_tensors(batch)
        source = Source(dataset, self._state.strategy, microbatches=self._settings.microbatches)
        loop = make_loop(self._state, self._settings)

        def train(steps: int) -> dict[str, float]:
            executor = strategies.choose_executor(self._state.strategy, self._settings.executor, None)
            return loop.train(source, int(self._state.step) + steps, [], executor=executor)

        steps = int(_MEASURED_SECS * train(_WARM_UP_STEPS)["steps_per_sec"])
        speed = train(min(max(_WARM_UP_STEPS, steps), _MOST_STEPS))["examples_per_sec"]
        levels = memory.peaks()
        return BatchTrial(batch_size, speed, levels.get("device_memory_gb", levels["host_memory_gb"]))


@contextlib.contextmanager
def _rates_of_zero(state: TrainState) -> Iterator[None]:
    """Keeps the weights where they are, whatever the gradients of one batch again and again are."""
    with contextlib.ExitStack() as stack:
        for update in state.plain_optimizers:
            stack.enter_context(_rate_of(state, update, _Sweep(state.step, 0, 0.0, 1.0)))
        yield


def _is_faster(later: Sequence[BatchTrial], earlier: Sequence[BatchTrial]) -> bool:
    fastest = max(trial.examples_per_sec for trial in earlier)
    return any(trial.examples_per_sec > _WORTH_IT * fastest for trial in later)


def _describe(trial: BatchTrial, replicas: int) -> str:
    share = f" = {trial.batch_size / replicas:g} on each of {replicas} replicas" if replicas > 1 else ""
    return f"batch {trial.batch_size}{share}: {trial.examples_per_sec:,.0f} examples/s, {trial.memory_gb:.2f} GB"


def _advise(best: int, own: int, reason: str) -> str:
    """Says what to do, and what it means for the learning rate."""
    if best == own:
        return f"the batch of {own} is the one to take; {reason}."
    linear, root = (learning_rates.scale_learning_rate(1.0, best, own, rule) for rule in ("linear", "sqrt"))
    return (
        f"take --batch_size={best}, and a learning rate {linear:g} times as high with SGD, {root:.3g} times with Adam; "
        f"{reason}."
    )


def _tell(settings: Config, text: str) -> None:
    if settings.console != "quiet":
        say(text)


def _show(found: RateTest, settings: Config) -> None:
    """Tells the suggestion, and draws the curve for TensorBoard."""
    if found.suggestion is None:
        _tell(settings, "learning rate: the loss never fell, so there is no suggestion.")
    else:
        _tell(settings, f"learning rate: the loss falls fastest from {found.suggestion:.2g} on; try that.")
    if not settings.workdir:
        return
    writer = SummaryWriter(os.path.join(settings.workdir, "summaries"), ["learning_rate"])
    for rate, loss, smoothed in zip(found.rates, found.losses, found.smoothed, strict=True):
        numbers: Mapping[str, float] = {"learning_rate/loss": loss, "learning_rate/smoothed_loss": smoothed}
        writer.write(round(100 * math.log10(rate)), numbers)
    writer.close()

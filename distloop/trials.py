"""Owns trials: a few steps that answer a question about a run, and leave no trace in what they trained.

    found = find_learning_rate(trainer, dataset)        # which step size?
    print(found.suggestion)

A trial trains the trainer's own model, with its settings, and puts every bit back. It reads a dataset of its own.
"""

import contextlib
import math
import os
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import keras
import numpy as np
import tensorflow as tf

from distloop import cluster
from distloop.actions import Action, Report
from distloop.config import Config
from distloop.console import say
from distloop.inputs import Data, Source
from distloop.loop import Diverged, TrainLoop
from distloop.state import TrainState
from distloop.step import TrainStep
from distloop.summaries import SummaryWriter

_SMOOTHING = 0.9  # of the losses: the weight of those before
_TOO_LARGE = 4.0  # times the least loss, and the learning rate is too high for good


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
    source = Source(dataset, state.strategy, microbatches=settings.microbatches, may_go_back=True)
    with unchanged(state), _rate_of(state, update, _Sweep(state.step, first, lowest, factor)):
        with contextlib.suppress(_Exploded, Diverged):
            make_loop(state, settings).train(source, first + steps, [watch], log_every=1)
    taken = np.isfinite(watch.losses)  # float16 skips steps while it looks for a loss scale
    rates = (lowest * factor ** np.arange(len(watch.losses)))[taken]
    losses, smoothed = np.array(watch.losses)[taken], smooth(np.array(watch.losses)[taken])
    window = max(1, steps // 10)
    falls = smoothed[:-window] - smoothed[window:]
    fell = len(falls) > 0 and falls.max() > 0
    found = RateTest(rates, losses, smoothed, float(rates[falls.argmax()]) if fell else None)
    if cluster.is_chief(state.strategy):
        _show(found, settings)
    return found


@contextlib.contextmanager
def unchanged(state: TrainState) -> Iterator[None]:
    """Puts all that training changes back to where it was, in the end."""
    before = state.snapshot()
    try:
        yield
    finally:
        state.restore(before)


def make_loop(state: TrainState, settings: Config) -> TrainLoop:
    """Makes a loop of a trial's own, so that it may trace other things than the run's."""
    step = TrainStep(
        state,
        microbatches=settings.microbatches,
        clip_norm=settings.clip_norm,
        jit_compile=settings.jit_compile,
    )
    return TrainLoop(state, step, eager=settings.eager)


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


def _show(found: RateTest, settings: Config) -> None:
    """Tells the suggestion, and draws the curve for TensorBoard."""
    if settings.console != "quiet":
        if found.suggestion is None:
            say("learning rate: the loss never fell, so there is no suggestion.")
        else:
            say(f"learning rate: the loss falls fastest from {found.suggestion:.2g} on; try that.")
    if not settings.workdir:
        return
    writer = SummaryWriter(os.path.join(settings.workdir, "summaries"), ["learning_rate"])
    for rate, loss, smoothed in zip(found.rates, found.losses, found.smoothed, strict=True):
        numbers: Mapping[str, float] = {"learning_rate/loss": loss, "learning_rate/smoothed_loss": smoothed}
        writer.write(round(100 * math.log10(rate)), numbers)
    writer.close()

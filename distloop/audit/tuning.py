"""Tuning: suggests a learning rate or a batch size after a few steps, and restores the state.

    rate = find_learning_rate(trainer, dataset).suggestion
    batch_size = autotune_batch(trainer, dataset).suggestion

The trainer's own model trains, with its settings, on a pass of its own over the dataset; then every bit is restored.
"""

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from distloop.actions.built_in import Utilization
from distloop.audit.memory_estimate import available_gb
from distloop.data import shards
from distloop.data.arrays import as_dataset
from distloop.data.info import DataInfo
from distloop.data.source import Data, Source
from distloop.distributed import collectives, strategies
from distloop.distributed.devices import HOST, Replicas
from distloop.log import shown, speaker
from distloop.model import memory
from distloop.model.saved_state import SavedState
from distloop.model.state import TrainState
from distloop.monitoring.tensorboard import SummaryWriter
from distloop.monitoring.timing import show_percent
from distloop.optimizers import learning_rates
from distloop.optimizers.gradients import Clipping
from distloop.run.assembly import reading
from distloop.settings.config import Config
from distloop.settings.durations import finite_number, require_integer
from distloop.trainer import Trainer
from distloop.training.action import Action, Report, StopTraining
from distloop.training.loop import Diverged, Host, TrainLoop
from distloop.training.step import TrainStep

_SMOOTHING = 0.9  # the weight of earlier losses in the moving average
_MAX_LOSS_RATIO = 4.0  # of the smoothed loss to its least value, where the learning-rate test ends
_WARM_UP_STEPS, _MAX_STEPS = 2, 1000  # of a measurement
_MEASURED_SECS = 1.0  # of a measurement, about
_LEAST_SPEEDUP = 1.05  # that makes a larger batch worth it
_PATIENCE = 2  # doublings without this speedup before the search ends


class RateTest(NamedTuple):
    """The result of a learning-rate range test.

    Attributes:
        rates: learning rates, ascending, `[N]`.
        losses: the loss of each rate's step, `[N]`, computed before the step changed the weights.
        smoothed: the exponential moving average of `losses` without its bias towards 0, `[N]`.
        suggestion: where the smoothed loss began to fall most; None if it never fell by more than its noise.
    """

    rates: np.ndarray
    losses: np.ndarray
    smoothed: np.ndarray
    suggestion: float | None

    def __repr__(self) -> str:
        return f"RateTest(suggestion={self.suggestion and float(f'{self.suggestion:.2g}')}, {len(self.rates)} rates)"


def find_learning_rate(
    trainer: Trainer, dataset: Data, *, lowest: float = 1e-7, highest: float = 10.0, steps: int = 100, update: str = ""
) -> RateTest:
    """Raises the learning rate from step to step until the loss explodes (Smith 2015, arXiv:1506.01186).

    The rate grows by the same factor each step, and the test ends when the smoothed loss exceeds 4 times its least
    value. The suggestion is the rate at which the smoothed loss falls fastest, as fastai's `steep` (Howard and Gugger
    2020, arXiv:2002.04688); its slope is taken over a tenth of the steps, so it does not follow the noise of single
    batches. With a workdir, TensorBoard shows `loss` and `smoothed_loss` as the run `learning_rate`, over 100 times the
    decimal logarithm of the rate: -300 is 1e-3.

    Weights, optimizer, averages, random streams, counts and the position in the data are restored bit for bit. On
    several workers, all must call it.

    Args:
        trainer: its model, optimizer and settings are used, from its current weights.
        dataset: as for `Trainer.fit`; read from its beginning.
        lowest: the first rate.
        highest: the last rate.
        steps: the largest number of steps.
        update: if there are several updates, the name of the one whose optimizer gets the rates.

    Returns:
        The rates, losses and suggestion, the same on any number of replicas.

    Raises:
        ValueError: if the numbers contradict each other, there is no such update, or the data breaks a rule.
    """
    require_integer("find_learning_rate", 2, steps=steps)
    if not 0 < (finite_number(lowest) or 0) < (finite_number(highest) or 0):
        given = f"find_learning_rate was given lowest={shown(lowest)} and highest={shown(highest)}"
        raise ValueError(f"{given}; give numbers with 0 < lowest < highest.")
    state, settings = trainer.state, trainer.config
    if update not in state.plain_optimizers:
        raise ValueError(
            f"find_learning_rate was given update={update!r}; the model's updates are {list(state.plain_optimizers)}: "
            "name one of them."
        )
    if hasattr(state.plain_optimizers[update], "optimizers"):
        raise ValueError(
            "find_learning_rate was given a model with a MultiOptimizer, which has no one learning rate: compile the "
            "model with one of the optimizers inside it for the search."
        )
    trainer.build(dataset)
    factor = (highest / lowest) ** (1 / (steps - 1))
    first, watch = int(state.step), _WatchLoss(f"{update}/loss" if update else "loss")
    dataset = as_dataset(dataset, settings.global_batch_size(state.strategy), settings.seed)
    train = _make_training(state, settings, dataset, log_every=1, may_go_back=True)
    with _restored(state, {update: _Sweep(state.step, first, lowest, factor)}):
        try:
            train(steps, [watch])
        except Diverged:
            if not np.isfinite(watch.losses).any():  # at the lowest rate, which has no part in it
                raise
    finite = np.isfinite(watch.losses)  # float16 skips steps while it looks for a loss scale
    rates = (lowest * factor ** np.arange(len(watch.losses)))[finite]
    losses = np.array(watch.losses)[finite]
    smoothed = smooth(losses)
    steepest = steepest_fall(losses, window=max(1, steps // 10))
    result = RateTest(rates, losses, smoothed, None if steepest is None else float(rates[steepest]))
    if collectives.is_chief(state.strategy):
        _report(result, settings)
    return result


class BatchTrial(NamedTuple):
    """The measurements of one batch size.

    Attributes:
        batch_size: examples in a step, over all replicas.
        examples_per_sec: of the step alone, without input.
        memory_gb: the peak so far, of the fullest GPU if there are GPUs, else of this process.
        gpu_utilization: as in the rows of a run: the mean over the GPUs, by NVIDIA's driver; None: it reports none.
        cpu_utilization: in its place, the fraction of the cores that this process has used.
    """

    batch_size: int
    examples_per_sec: float
    memory_gb: float
    gpu_utilization: float | None = None
    cpu_utilization: float | None = None


class BatchTest(NamedTuple):
    """The result of `autotune_batch`.

    Attributes:
        trials: one for each batch size that fits, in ascending order.
        suggestion: the smallest size that is at most 5 % slower than the fastest.
        reason: why no larger size was tried.
    """

    trials: tuple[BatchTrial, ...]
    suggestion: int
    reason: str


def autotune_batch(trainer: Trainer, dataset: Data, *, memory_share: float = 0.5) -> BatchTest:
    """Measures batch sizes for the one that processes most examples a second and fits into memory.

    It trains for about a second on the dataset's first batch, then on its examples repeated to twice as many and so on,
    with a learning rate of 0: it measures the step and not the input. It ends when a batch does not fit on a GPU, when
    the next one has more rows than the dataset or might take more than `memory_share` of the memory that was available,
    or when two doublings in a row were less than 5 % faster. `Config.batch_size` stays as it is: give the suggestion to
    the program, with the learning rate that goes with it. Everything that training changes is restored bit for bit.

    Args:
        trainer: its model and settings are used, on one worker.
        dataset: as for `Trainer.fit`.
        memory_share: of the host's memory; a number above 0, up to 1.

    Raises:
        ValueError: if there are several workers, the data breaks a rule, or its own batch does not fit.
    """
    state, settings = trainer.state, trainer.config
    if not 0 < (finite_number(memory_share) or 0) <= 1:
        raise ValueError(f"memory_share={shown(memory_share)} was given to autotune_batch; give one above 0, up to 1.")
    if collectives.num_workers(state.strategy) > 1:
        raise ValueError(
            "autotune_batch was called on several workers, where one may run out of memory while the others wait: call "
            "it on one of them, and take its rows for each replica."
        )
    trainer.build(dataset)
    source = Source(dataset, state.strategy, repeat=False, **reading(state, settings))
    rows = source.first_rows()
    batch_size = int(shards.batch_size(rows))
    max_rows = _num_certain_rows(source.info)
    memory_before, max_memory = memory.peaks()["host_memory_gb"], memory_share * available_gb()
    say, reason = speaker(is_chief=True, console=settings.console), ""
    trials: list[BatchTrial] = []
    # Rates of 0: steps on the same batch again and again change no weight.
    standing = {update: _Sweep(state.step, 0, 0.0, 1.0) for update in state.plain_optimizers}
    with _restored(state, standing):
        while not reason:
            try:
                trials.append(_measure(state, settings, rows, batch_size))
            except tf.errors.ResourceExhaustedError:
                reason = f"a batch of {batch_size} does not fit"
                break
            say(_describe(trials[-1], state.replicas))
            batch_size *= 2
            if max_rows is not None and batch_size > max_rows:
                reason = f"a batch of {batch_size} is more than the dataset has"
            elif 2 * (memory.peaks()["host_memory_gb"] - memory_before) > max_memory:
                reason = f"a batch of {batch_size} may take more than {max_memory:.2g} GB of memory"
            elif not _is_getting_faster(trials):
                reason = "larger ones are no faster"
    if not trials:
        raise ValueError(
            f"The dataset's own batch, of {batch_size} rows, does not fit into memory: give a smaller batch_size, or "
            "more microbatches."
        )
    suggestion = _suggest(trials)
    say(_advise(suggestion, trials[0].batch_size, reason))
    return BatchTest(tuple(trials), suggestion, reason)


@contextlib.contextmanager
def _restored(state: TrainState, rates: Mapping[str, "_Sweep"]) -> Iterator[None]:
    """Sets learning rates, by the names of updates, until exit, which also restores everything that training changes.

    Keras's setter would drop the variable that holds the old rate.
    """
    before, may_be_saved = SavedState(state).snapshot(), state.may_be_saved
    rates_before = {update: state.plain_optimizers[update]._learning_rate for update in rates}
    try:
        for update, rate in rates.items():
            state.plain_optimizers[update]._learning_rate = rate
        yield
    finally:
        for update, rate in rates_before.items():
            state.plain_optimizers[update]._learning_rate = rate
        SavedState(state).restore(before)
        state.may_be_saved = may_be_saved


def _make_training(
    state: TrainState, settings: Config, dataset: Any, log_every: int = 0, may_go_back: bool = False
) -> Callable[..., Mapping[str, float]]:
    """Returns a function that trains some steps on a dataset, in a loop of its own: the run's loop keeps its traces."""
    clipping = Clipping.from_settings(settings)
    step = TrainStep(state, microbatches=settings.microbatches, clipping=clipping, jit_compile=settings.jit_compile)
    loop = TrainLoop(state, step, eager=settings.eager)
    source = Source(
        *(dataset, state.strategy),
        microbatches=settings.microbatches,
        may_go_back=may_go_back,
        is_stacked=settings.jit_compile == "loop",
        **reading(state, settings),
    )
    host = Host(log_every=log_every, executor=strategies.choose_executor(state.strategy, settings.executor, None))
    return source.gate(lambda steps, actions=(): loop.train(source, int(state.step) + steps, actions, host).reported)


def smooth(values: np.ndarray) -> np.ndarray:
    """Returns the exponential moving average of values, `[N]`, with a decay of 0.9 a step.

    It is divided by the sum of the weights and so has no bias towards 0 (Kingma and Ba 2014, arXiv:1412.6980, section
    3).
    """
    sums = itertools.accumulate(values, lambda total, v: _SMOOTHING * total + (1 - _SMOOTHING) * v, initial=0.0)
    return np.array([*sums])[1:] / (1 - _SMOOTHING ** np.arange(1, len(values) + 1))


def steepest_fall(losses: np.ndarray, window: int) -> int | None:
    """Returns where the smoothed loss, `[N]`, falls most over a window of steps; None if by no more than by chance.

    By chance: 3 standard deviations of a difference of two means. Differences of neighbouring losses estimate them.
    """
    smoothed = smooth(losses)
    falls = smoothed[:-window] - smoothed[window:]
    noise = np.median(np.abs(np.diff(losses))) / 0.954 if len(losses) > 2 else 0.0  # of a normal distribution
    decay = _SMOOTHING ** np.arange(1, len(falls) + 1)
    squared_weights = (1 - _SMOOTHING) / (1 + _SMOOTHING) * (1 + decay) / (1 - decay)
    falls = np.where(falls > 3 * noise * np.sqrt(2 * squared_weights), falls, 0.0)
    return int(falls.argmax()) if falls.any() else None


class _WatchLoss(Action):
    """Records the loss of each step; ends the test when it is so large that higher rates are of no interest."""

    every: int | None = 1

    def __init__(self, name: str):
        self.losses: list[float] = []
        self._name = name

    def __call__(self, report: Report) -> None:
        self.losses.append(report.metrics[self._name])
        smoothed = smooth(np.array([loss for loss in self.losses if math.isfinite(loss)]))
        if len(smoothed) and smoothed[-1] > smoothed.min() + (_MAX_LOSS_RATIO - 1) * abs(smoothed.min()):
            raise StopTraining("the loss has exploded")


class _Sweep(keras.optimizers.schedules.LearningRateSchedule):
    """Multiplies the learning rate by a factor each step, skipped ones too, which an optimizer does not count."""

    def __init__(self, step: tf.Variable, first: int, lowest: float, factor: float):
        self._step, self._first, self._lowest, self._factor = step, first, lowest, factor

    def __call__(self, iterations: Any) -> tf.Tensor:
        return self._lowest * self._factor ** tf.cast(self._step - self._first, tf.float32)


def _measure(state: TrainState, settings: Config, rows: Any, batch_size: int) -> BatchTrial:
    """Measures how fast a model trains on rows; raises ResourceExhaustedError if a device runs out of memory."""
    with tf.device(HOST):
        batch = tf.nest.map_structure(lambda t: tf.gather(t, tf.range(batch_size) % shards.batch_size(rows)), rows)
    train = _make_training(state, settings, tf.data.Dataset.from_tensors(batch))
    steps = int(_MEASURED_SECS * train(_WARM_UP_STEPS)["steps_per_sec"])
    utilization = Utilization()
    speed = train(min(max(_WARM_UP_STEPS, steps), _MAX_STEPS))["examples_per_sec"]
    use = utilization(Report(step=0, until=0, metrics={}, state=state))
    memory_gb = use.get("device_memory_gb", use["host_memory_gb"])
    return BatchTrial(batch_size, speed, memory_gb, use.get("gpu_utilization"), use.get("cpu_utilization"))


def _is_getting_faster(trials: Sequence[BatchTrial]) -> bool:
    """Returns whether one of the last doublings was worth it, or there were too few to tell."""
    speeds = [trial.examples_per_sec for trial in trials]
    return len(speeds) <= _PATIENCE or max(speeds[-_PATIENCE:]) > _LEAST_SPEEDUP * max(speeds[:-_PATIENCE])


def _suggest(trials: Sequence[BatchTrial]) -> int:
    """Returns the smallest batch size that is nearly as fast as the fastest."""
    fastest = max(trial.examples_per_sec for trial in trials)
    return next(trial.batch_size for trial in trials if trial.examples_per_sec * _LEAST_SPEEDUP >= fastest)


def _describe(trial: BatchTrial, replicas: Replicas) -> str:
    each = f"{trial.batch_size / replicas.devices:g} on each of {replicas.devices} replicas"
    split = f" by {replicas.setting}" if replicas.ratios else f" = {each}" if replicas.devices > 1 else ""
    used = {"GPUs": trial.gpu_utilization, "cores": trial.cpu_utilization}
    busy = "".join(f"{name} {show_percent(fraction)} busy, " for name, fraction in used.items() if fraction is not None)
    return f"batch {trial.batch_size}{split}: {trial.examples_per_sec:,.0f} examples/s, {busy}{trial.memory_gb:.2f} GB"


def _advise(suggestion: int, current: int, reason: str) -> str:
    """Returns a sentence with the batch size to take and the learning rate that goes with it."""
    if suggestion == current:
        return f"the batch of {current} is the one to take; {reason}."
    linear, root = (learning_rates.scale_learning_rate(1.0, suggestion, current, rule) for rule in ("linear", "sqrt"))
    return (
        f"take --batch_size={suggestion}, and a learning rate {linear:g} times as high with SGD, {root:.3g} times with "
        f"Adam; {reason}."
    )


def _report(result: RateTest, settings: Config) -> None:
    """Prints the suggestion and writes the curve for TensorBoard."""
    text = "No learning rate is suggested: the loss never fell by more than its noise."
    if result.suggestion is not None:
        text = f"Suggested learning rate: {result.suggestion:.2g}, from where on the loss falls fastest."
    speaker(is_chief=True, console=settings.console)(text)
    if settings.workdir and settings.workdir == settings.local_workdir:
        with contextlib.closing(SummaryWriter(settings.workdir, ["learning_rate"])) as writer:
            for rate, loss, smoothed in zip(result.rates, result.losses, result.smoothed, strict=True):
                numbers = {"learning_rate/loss": float(loss), "learning_rate/smoothed_loss": float(smoothed)}
                writer.write(round(100 * math.log10(rate)), numbers)


def _num_certain_rows(info: DataInfo) -> int | None:
    """Returns the least number of rows of a pass, whose last batch may be smaller; None: endless or unknown."""
    if info.batch_size is None or info.num_batches is None or info.is_endless:
        return None
    last_batch = info.batch_size if shards.static_batch_size(info.element_spec) is not None else 1
    return (int(info.num_batches) - 1) * info.batch_size + last_batch

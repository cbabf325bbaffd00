"""Learning rates: schedules over steps, and scaling with the batch size.

    peak = scale_learning_rate(0.1, batch_size=1024)                                    # 0.4
    optimizer = keras.optimizers.SGD(make_schedule(peak, steps=10_000, warmup=500))

An optimizer calls a schedule with the number of updates applied so far, so the first update of a run uses step 0 and
the last one `steps - 1`.
"""

import contextlib
import copy
import itertools
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import keras
from keras.optimizers import schedules

from distloop.log import shown
from distloop.settings.durations import Units, finite_number, parse, require_integer, whole_number


def scale_learning_rate(
    base_learning_rate: float, batch_size: int, base_batch_size: int = 256, rule: str = "linear"
) -> float:
    """Returns the learning rate for another batch size.

    Args:
        base_learning_rate: the learning rate for `base_batch_size`.
        batch_size: examples per step, over all replicas.
        base_batch_size: examples per step that `base_learning_rate` was tuned for.
        rule: "linear" (Goyal et al. 2017, arXiv:1706.02677, section 2.1: for SGD) or "sqrt" (Krizhevsky 2014,
            arXiv:1404.5997, section 5: keeps the variance of the update; common for Adam).

    Returns:
        `base_learning_rate * batch_size / base_batch_size`, or times the square root of that ratio.

    Raises:
        ValueError: for another rule, or a number that is not positive.
    """
    numbers = {"base_learning_rate": base_learning_rate, "batch_size": batch_size, "base_batch_size": base_batch_size}
    for name, value in numbers.items():
        if (finite_number(value) or 0) <= 0:
            raise ValueError(f"{name}={shown(value)} was given to scale_learning_rate; give a number above 0.")
    if rule not in ("linear", "sqrt"):
        raise ValueError(f"rule={rule!r} was given to scale_learning_rate; give 'linear' or 'sqrt'.")
    ratio = batch_size / base_batch_size
    return float(base_learning_rate * (ratio if rule == "linear" else math.sqrt(ratio)))


@keras.saving.register_keras_serializable(package="distloop")
class WarmUp(schedules.LearningRateSchedule):
    """Rises linearly to the start of another schedule, then follows that schedule from its step 0.

    With `w = warmup_steps`: `start` at step 0, `start + (schedule(0) - start) * step / w` before step w, and
    `schedule(step - w)` from step w on (Goyal et al. 2017, arXiv:1706.02677, section 2.2).
    """

    def __init__(self, schedule: schedules.LearningRateSchedule, warmup_steps: int, start: float = 0.0):
        """Creates the schedule.

        Args:
            schedule: the schedule after the warm-up.
            warmup_steps: steps until `schedule` takes over.
            start: the learning rate at step 0.

        Raises:
            ValueError: if `schedule` is not a schedule, `warmup_steps` is below 1 or `start` is negative.
        """
        super().__init__()
        if not isinstance(schedule, schedules.LearningRateSchedule):
            raise ValueError(f"schedule={schedule!r} was given to WarmUp; give a Keras LearningRateSchedule.")
        require_integer("WarmUp", 1, warmup_steps=warmup_steps)
        if (first := finite_number(start)) is None or first < 0:
            raise ValueError(f"start={shown(start)} was given to WarmUp; give a learning rate, 0 or more.")
        self.schedule = schedule
        self.warmup_steps = int(warmup_steps)
        self.start = float(start)

    def __call__(self, step: Any) -> Any:
        """Returns the learning rate at `step`, a scalar tensor."""
        step = keras.ops.convert_to_tensor(step)
        # The schedule gets an integer step: float32 counts to 2^24 only. Both branches are cheap, so a select replaces
        # a cond.
        follow = self.schedule(keras.ops.maximum(step - self.warmup_steps, 0))
        if not hasattr(follow, "dtype"):  # a schedule of one's own may return a number
            follow = keras.ops.convert_to_tensor(follow, "float32")
        fraction = keras.ops.cast(step, follow.dtype) / self.warmup_steps
        rise = self.start + (self.schedule(0) - self.start) * fraction
        return keras.ops.where(step < self.warmup_steps, rise, follow)

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments from which `from_config` creates an equal schedule."""
        schedule = schedules.serialize(self.schedule)
        return {"schedule": schedule, "warmup_steps": self.warmup_steps, "start": self.start}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "WarmUp":
        """Returns a schedule from a result of `get_config`."""
        return cls(**{**config, "schedule": schedules.deserialize(config["schedule"])})


@keras.saving.register_keras_serializable(package="distloop")
class InverseSqrt(schedules.LearningRateSchedule):
    """Falls with the inverse square root of the step: `peak * sqrt(offset / (offset + step))`."""

    def __init__(self, peak: float, offset: int):
        """Stores the learning rate at step 0, and the steps before it."""
        super().__init__()
        self.peak, self.offset = peak, offset

    def __call__(self, step: Any) -> Any:
        """Returns the learning rate at `step`, a scalar tensor."""
        return self.peak * keras.ops.sqrt(self.offset / (self.offset + keras.ops.cast(step, "float32")))

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments from which `from_config` creates an equal schedule."""
        return {"peak": self.peak, "offset": self.offset}


@keras.saving.register_keras_serializable(package="distloop")
class RunSchedule(schedules.LearningRateSchedule):
    """A schedule of `make_schedule` whose lengths depend on the run: `fit` puts steps in their place.

    Before the first `fit` it is constant, at its peak. Each optimizer gets a copy of its own, as its run does.
    """

    _calls_at_peak = 0  # of all that were called before their lengths were known

    def __init__(self, **arguments: Any):
        """Stores the arguments of `make_schedule`."""
        super().__init__()
        self._arguments = arguments
        self._known: dict[str, Any] = {}  # the arguments in steps
        self._schedule: schedules.LearningRateSchedule | None = None
        self._tokens: Any = None  # the variable that counts them, if the lengths are in tokens
        self._given: RunSchedule | None = None  # of which it is an optimizer's copy
        self._optimizer = 0  # the identity of that optimizer

    def copy_for(self, optimizer: keras.optimizers.Optimizer) -> "RunSchedule":
        """Returns a copy for one optimizer: this one, if it is that already."""
        if self._optimizer == id(optimizer):
            return self
        copied = RunSchedule(**self._arguments)
        copied._given, copied._optimizer = self._given or self, id(optimizer)
        return copied

    def resolve(self, units: Units, count_tokens: Callable[[], Any]) -> bool:
        """Puts steps in the place of durations; returns whether the schedule is another one than before.

        Raises:
            ValueError: if the size of a unit is not known, or the lengths contradict each other.
        """
        before, self._known = self._known, _in_steps(self._arguments, units)
        self._tokens = count_tokens() if units.period(self._arguments["steps"]).tokens else None
        if self._known != before:
            self._schedule = make_schedule(**self._known)
            if self._given is not None:  # as a user may look at it
                self._given._schedule = self._schedule
        return self._known != before

    def __call__(self, step: Any) -> Any:
        """Returns the learning rate at `step`, a scalar tensor."""
        if self._schedule is None:
            RunSchedule._calls_at_peak += 1
            return keras.ops.convert_to_tensor(self._arguments["peak"], "float32")
        return self._schedule(step if self._tokens is None else keras.ops.convert_to_tensor(self._tokens))

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments from which `from_config` creates an equal schedule."""
        return dict(self._arguments)


def resolve(
    optimizers: Iterable[keras.optimizers.Optimizer],
    units: Units,
    on_change: Callable[[], None],
    count_tokens: Callable[[], Any] = lambda: None,
) -> None:
    """Puts steps in the place of durations in the schedules of optimizers, which may be in other optimizers, too.

    Calls `on_change`, which traces the step anew, if what a step reads once, when it is traced, is another than at the
    call before. `count_tokens` returns the variable that counts tokens, for schedules in those.

    Raises:
        ValueError: as for `RunSchedule.resolve`.
    """
    changes = []
    for optimizer in itertools.chain.from_iterable((each, *getattr(each, "optimizers", ())) for each in optimizers):
        found: list[RunSchedule] = []
        if isinstance(optimizer._learning_rate, schedules.LearningRateSchedule):
            optimizer._learning_rate = _with_copies(optimizer._learning_rate, optimizer, found)
        changes += [schedule.resolve(units, count_tokens) for schedule in found]
        calls, _ = RunSchedule._calls_at_peak, optimizer.learning_rate  # calls the schedule, as a step does
        if RunSchedule._calls_at_peak > calls:
            raise ValueError(
                f"The learning rate of {optimizer.name!r} calls a schedule whose lengths depend on the run, and fit "
                "does not find it: store it in an attribute of your own schedule, or in a list, tuple or dict there."
            )
        traced = [optimizer._learning_rate, _settings(optimizer)]
        before = vars(optimizer).setdefault("_traced_by_distloop", traced)
        changes.append(before[0] is not traced[0] or before[1] != traced[1])
        vars(optimizer)["_traced_by_distloop"] = traced
    if any(changes):
        on_change()


def config_of(optimizer: keras.optimizers.Optimizer) -> dict[str, Any]:
    """Returns an optimizer's config, with a schedule as the object that it is: a schedule may have no config."""
    if not callable(learning_rate := optimizer._learning_rate):
        return dict(optimizer.get_config())
    twin: Any = object.__new__(type(optimizer))
    vars(twin).update(vars(optimizer), _learning_rate=0.0)
    return {**twin.get_config(), "learning_rate": learning_rate}


def _settings(optimizer: keras.optimizers.Optimizer) -> str:
    """Returns what an optimizer's config says, but its learning rate."""
    with contextlib.suppress(NotImplementedError):
        return repr({**config_of(optimizer), "learning_rate": None})
    return ""


def _with_copies(value: Any, optimizer: keras.optimizers.Optimizer, found: list[RunSchedule]) -> Any:
    """Returns a schedule in which each `RunSchedule`, added to `found`, is the optimizer's own; itself if it is so.

    They are looked for in the attributes of schedules, and in lists, tuples and dicts there.
    """
    if isinstance(value, RunSchedule):
        found.append(value.copy_for(optimizer))
        return found[-1]
    if not isinstance(value, schedules.LearningRateSchedule):
        return value
    copies = keras.tree.map_structure(lambda each: _with_copies(each, optimizer, found), vars(value))
    if all(map(operator.is_, keras.tree.flatten(copies), keras.tree.flatten(vars(value)))):
        return value
    changed = copy.copy(value)
    vars(changed).update(copies)
    return changed


def make_schedule(
    peak: float,
    steps: int | str,
    *,
    warmup: int | str = 0,
    decay: str = "cosine",
    final: float = 0.0,
    drop_at: Sequence[int | str] = (),
    drop_factor: float = 0.1,
    start: float = 0.0,
    hold_until: int | str = 0,
) -> schedules.LearningRateSchedule:
    """Returns a schedule that rises linearly from `start` to `peak`, may stay there, and then falls.

    With `w = warmup`: `start` at step 0, `start + (peak - start) * (w - 1) / w` at step `w - 1`, `peak` from step w
    (step 0 without a warm-up) to `hold_until`. At `steps` and beyond: `final` for cosine and linear,
    `peak * drop_factor ** len(drop_at)` for step, `peak` for constant; inverse_sqrt falls on.

        make_schedule(1e-3, "100 %", warmup="1 epoch")      # over the whole run, however long `fit` makes it
        make_schedule(1e-3, "100 %", warmup="2 %", hold_until="80 %", decay="linear")   # warm-up, stable, decay
        make_schedule(0.1, "100 %", warmup="30 %", start=0.004, final=1e-5)             # one cycle
        make_schedule(1e-3, "100 %", warmup=4_000, decay="inverse_sqrt")                # of the first Transformer

    Args:
        peak: the highest learning rate.
        steps: the length of the whole schedule, including the warm-up: steps, or "20 epochs", "1e6 examples" or a part
            of the run, "100 %"; no time, since steps only decide about weights. In tokens, "1e9 tokens" or "100 %" of a
            run in tokens, the rate follows the sum of the loss's weights; then all lengths are in tokens or percents.
        warmup: the length of the warm-up, as `steps`, but a percentage is a fraction of `steps`; 0: no warm-up.
        decay: "cosine" (half a period: Loshchilov and Hutter 2017, arXiv:1608.03983, without restarts), "linear",
            "step", "constant" or "inverse_sqrt": `peak * sqrt(e / step)`, where e is the end of the warm-up, or
            `hold_until` (Vaswani et al. 2017, arXiv:1706.03762, equation 3).
        final: the learning rate at `steps`, for cosine and linear.
        drop_at: for "step": when the learning rate is multiplied by `drop_factor`; lengths, as `warmup`.
        drop_factor: for "step": the factor.
        start: the learning rate at step 0, if there is a warm-up. A warm-up from far below the peak over a third of the
            run, and a decay to far below `start`, are one cycle (Smith and Topin 2018, arXiv:1708.07120).
        hold_until: when the peak ends and the decay begins; a length, as `warmup`; 0: with the warm-up. A long one
            makes warm-up-stable-decay (Hu et al. 2024, arXiv:2404.06395, section 4).

    Returns:
        A Keras schedule, to be given to an optimizer.

    Raises:
        ValueError: if a value is out of range, or an argument is given that this decay ignores; of lengths that depend
            on the run, when `fit` knows them.
    """
    arguments: dict[str, Any] = {"peak": peak, "steps": steps, "warmup": warmup, "decay": decay, "final": final}
    arguments |= {"drop_at": drop_at, "drop_factor": drop_factor, "start": start, "hold_until": hold_until}
    if texts := [value for value in (steps, warmup, hold_until, *drop_at) if isinstance(value, str)]:
        units = {parse(text).unit for text in texts}
        if "secs" in units:
            raise ValueError(
                f"A time is among {texts}, given to make_schedule; give steps, epochs, examples, tokens or percents."
            )
        if units & {"epochs", "examples", "tokens"} or isinstance(steps, str) and parse(steps).unit == "%":
            return RunSchedule(**{**arguments, "drop_at": list(drop_at)})
        return make_schedule(**_in_steps(arguments, Units()))
    _check(arguments)
    rise, begin = int(warmup), max(int(warmup), int(hold_until))  # of the decay
    decay_steps = int(steps) - begin
    schedule: schedules.LearningRateSchedule
    if decay == "cosine":
        schedule = schedules.CosineDecay(float(peak), decay_steps, alpha=final / peak)
    elif decay == "step":
        # Keras changes the value one step after a boundary.
        boundaries = [int(step) - begin - 1 for step in drop_at]
        values = [float(peak * drop_factor**drops) for drops in range(len(drop_at) + 1)]
        schedule = schedules.PiecewiseConstantDecay(boundaries, values)
    elif decay == "inverse_sqrt":
        schedule = InverseSqrt(float(peak), begin)
    else:
        end = float(final if decay == "linear" else peak)
        schedule = schedules.PolynomialDecay(float(peak), decay_steps, end, power=1.0)
    if begin > rise:
        schedule = WarmUp(schedule, begin - rise, float(peak))  # "rises" from the peak to the peak
    return WarmUp(schedule, rise, start) if rise else schedule


def _in_steps(arguments: Mapping[str, Any], units: Units) -> dict[str, Any]:
    """Returns the arguments of `make_schedule` with steps in the place of durations.

    Raises:
        ValueError: if the size of a unit is not known, or the run of which they are a fraction ends by time.
    """
    total = units.period(arguments["steps"])
    if total.secs:
        raise ValueError(
            f"make_schedule was given steps={arguments['steps']!r} of a run that ends by time, so that its steps are "
            "not known: give steps, epochs or examples."
        )
    within, measure = units.of(total), "tokens" if total.tokens else "steps"

    def length_of(value: int | str) -> int:
        period = within.period(value)
        if any(period) and not getattr(period, measure):
            raise ValueError(
                f"make_schedule was given steps={arguments['steps']!r} and {value!r}, one of which counts tokens: give "
                "all lengths in tokens or percents of a run in tokens, or none."
            )
        return int(getattr(period, measure))

    total_length, warmup = length_of(arguments["steps"]), length_of(arguments["warmup"])
    amount, unit = parse(arguments["warmup"])
    if unit == "%" and amount < 100:
        warmup = min(warmup, total_length - 1)  # rounded up, 10 % of one step would be all of it
    lengths = {"steps": total_length, "warmup": warmup, "hold_until": length_of(arguments["hold_until"])}
    return {**arguments, **lengths, "drop_at": [length_of(length) for length in arguments["drop_at"]]}


def _check(arguments: Mapping[str, Any]) -> None:
    """Raises ValueError for the first wrong argument of `make_schedule`."""
    peak, steps, warmup, decay, final, drop_at, drop_factor, start, hold_until = arguments.values()
    given = "was given to make_schedule;"
    if decay not in ("cosine", "linear", "step", "constant", "inverse_sqrt"):
        raise ValueError(f"decay={decay!r} {given} give 'cosine', 'linear', 'step', 'constant' or 'inverse_sqrt'.")
    for name in ("peak", "warmup", "final", "drop_factor", "start", "hold_until"):
        if finite_number(arguments[name]) is None:
            raise ValueError(f"{name}={shown(arguments[name])} {given} give a finite number.")
    if not 0 < peak:
        raise ValueError(f"peak={peak!r} {given} give a learning rate above 0.")
    if (whole_number(steps) or 0) < 1:
        raise ValueError(f"steps={shown(steps)} {given} give the steps of the whole run, a whole number of 1 or more.")
    if not 0 <= warmup < steps or warmup != int(warmup):
        raise ValueError(f"warmup={warmup!r} {given} give a whole number from 0 to below steps={steps}.")
    for name, is_read in (("start", warmup), ("final", decay in ("cosine", "linear"))):
        if not 0 <= arguments[name] <= peak:
            raise ValueError(f"{name}={arguments[name]!r} {given} give a learning rate from 0 to peak={peak}.")
        if arguments[name] and not is_read:
            reader, hint = ("warmup=0", "a warmup") if name == "start" else (f"decay={decay!r}", "'linear'")
            raise ValueError(
                f"{name}={arguments[name]!r} {given} {reader} does not read it: leave it out, or take {hint}."
            )
    if hold_until and (not warmup <= hold_until < steps or hold_until != int(hold_until)):
        raise ValueError(
            f"hold_until={hold_until!r} {given} give a whole number from warmup={warmup} to below steps={steps}."
        )
    if decay == "inverse_sqrt" and not max(warmup, hold_until):
        raise ValueError(f"decay='inverse_sqrt' {given} give a warmup too, from whose end on the rate falls.")
    if bool(drop_at) != (decay == "step"):
        raise ValueError(
            f"decay={decay!r} and drop_at={drop_at!r} were given to make_schedule; give both decay='step' and the "
            "steps at which to drop, or neither."
        )
    begin = max(warmup, hold_until)
    if any(whole_number(step) is None for step in drop_at) or any(
        low >= high for low, high in zip([begin, *drop_at], [*drop_at, steps], strict=True)
    ):
        raise ValueError(
            f"drop_at={shown(drop_at)} {given} give rising whole numbers above warmup={begin} and below steps={steps}."
        )
    if not 0 < drop_factor < 1:
        raise ValueError(f"drop_factor={drop_factor!r} {given} give a factor above 0 and below 1.")

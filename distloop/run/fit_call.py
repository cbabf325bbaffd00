"""What a call of `fit` was given, when its run ends, and whether all workers got the same.

    length = run_end(config, 0, steps=None, epochs=3, until=None)     # "3 epochs"
    units = make_units(source, length)                                   # units.run: Period(steps=120)
    call = FitCall(state=state, config=as_given(config, source, length), source=source, units=units, ...)

All steps count from the run's beginning, not from this call of `fit`.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

from distloop.actions.evaluate import Evaluate
from distloop.data.source import Source
from distloop.distributed import collectives
from distloop.errors import EMPTY_DATASET
from distloop.log import log, shown, speaker
from distloop.model.state import TrainState
from distloop.monitoring.timing import Clock, show_secs
from distloop.monitoring.writers import Writer
from distloop.settings import durations
from distloop.settings.config import Config, fields
from distloop.settings.durations import Units, parse
from distloop.training.action import Action
from distloop.variables import named_variables

_LOG_STEPS = 100  # between two logs of a run that is not as long as epochs
_NEEDS = dict.fromkeys(("checkpoint_every", "keep_checkpoints"), "a workdir")
_NEEDS |= dict.fromkeys(("eval_every", "eval_first"), "evals")


@dataclasses.dataclass(frozen=True, kw_only=True)
class FitCall:
    """What one call of `Trainer.fit` was given, checked.

    Attributes:
        state: what training changes.
        config: the settings of the run, as this call was given them.
        source: the data to train on.
        units: of the durations; `units.run` is the length of the run.
        evaluations: an action for each dataset to evaluate on.
        actions: the user's.
        writers: the user's; the chief's are used.
        clock: measures where the time of the run goes.
    """

    state: TrainState
    config: Config
    source: Source
    units: Units
    evaluations: Sequence[Evaluate]
    actions: Sequence[Action]
    writers: Sequence[Writer]
    clock: Clock

    @property
    def step(self) -> int:
        """The number of steps done."""
        return int(self.state.step)

    @functools.cached_property
    def is_chief(self) -> bool:
        """Whether this worker writes and prints for all."""
        return collectives.is_chief(self.state.strategy)

    @property
    def say(self) -> Callable[[str], None]:
        """Prints a line about the run, on the chief, unless the console is quiet."""
        return speaker(self.is_chief, self.config.console)


def idle_settings(call: FitCall) -> list[str]:
    """Returns a line for each setting that was given and does nothing in this call."""
    has, known = {"a workdir": call.config.workdir, "evals": call.evaluations}, fields()
    idle = {name: getattr(call.config, name) for name, needed in _NEEDS.items() if not has[needed]}
    given = {name: value for name, value in idle.items() if value != known[name].metadata["default"]}
    lines = [f"{name}={value} has no effect without {_NEEDS[name]}" for name, value in given.items()]
    start, stop = durations.profile_window(call.config.profile)
    if call.config.profile and (stop <= call.step or start >= call.units.run.last_step):
        lines.append(f"profile={call.config.profile} has no effect: this call of fit trains none of these steps")
    return lines


def run_end(config: Config, step: int, *, steps: int | None, epochs: int | None, until: int | str | None) -> int | str:
    """Returns the length of a run as a duration; a dry run ends with the next of `step` steps done.

    The `steps`, `epochs` and `until` of the config count if `fit` was given none of them.

    Raises:
        ValueError: if not exactly one of them is given, or it is no length.
    """
    if config.fast_dev_run:
        return step + 1
    if steps is None and epochs is None and until is None:
        steps, epochs, until = config.steps, config.epochs, config.until
    for name, value in (("steps", steps), ("epochs", epochs)):
        number = 0 if value is None else durations.whole_number(value)
        if number is None or number < 0:
            meant = durations.as_until(name, value)
            rest = f": give {meant}" if meant else ""
            raise ValueError(f"fit was given {name}={shown(value)}; it takes a whole number, 1 or more{rest}.")
    length = durations.normalize(until) if until else 0
    if length is None or str(length).strip().endswith("%"):
        raise ValueError(
            f"fit was given until={shown(until)}; it takes a duration, such as '2 h', '3 epochs' or '1e6 examples'."
        )
    if sum(map(bool, (steps, epochs, length))) != 1:
        also = f" and until={until!r}" if until else ""
        raise ValueError(
            f"steps={steps} and epochs={epochs}{also} were given; a run needs exactly one of them: give fit "
            "or replay steps=..., epochs=... or until=..., or set one in the config."
        )
    return f"{int(epochs)} epochs" if epochs else int(steps) if steps else length


def make_units(source: Source, length: int | str) -> Units:
    """Returns the units of the durations of a run, whose length is one that `run_end` returns.

    Raises:
        ValueError: if the length is in epochs that have no end, or in examples and the batch size is not known.
    """
    sizes = functools.partial(batches_per_epoch, source), functools.partial(examples_per_step, source)
    return Units(*sizes, Units(*sizes).period(length), parse(length).unit)


def batches_per_epoch(source: Source) -> int:
    """Returns the number of batches of an epoch; reads a `tf.data` dataset of unknown length once.

    Raises:
        ValueError: if the data is endless or empty.
    """
    if source.steps_per_epoch is not None:
        return source.steps_per_epoch
    num_batches = source.count_batches()
    if num_batches == 0:
        raise ValueError(EMPTY_DATASET)
    if num_batches is None or source.info.is_endless:
        raise ValueError(
            "epochs were given, but the dataset is endless or of unknown length, so an epoch has no end: "
            "give steps instead, or steps_per_epoch."
        )
    return int(num_batches)


def examples_per_step(source: Source) -> int:
    """Returns the number of examples in a whole batch, over all workers; all of them call it.

    Raises:
        ValueError: if it is not known before the data is read.
    """
    if not (size := _batch_size(source)):
        raise ValueError(
            "A duration in examples was given, but the dataset's batch size is not known before it is read: call "
            ".batch(batch_size) on the dataset last, or give steps."
        )
    return size


def _batch_size(source: Source) -> int:
    """Returns the number of examples in a whole batch, over all workers, which all call it; 0: it is not known."""
    size = source.info.batch_size or 0
    sizes = source.layout.gather_sizes(source.strategy, size)
    return int(sum(sizes)) if all(sizes) else 0


def as_given(config: Config, source: Source, length: int | str) -> Config:
    """Returns the settings with the length and the batch size that `fit` was given; all workers call it."""
    amount, unit = parse(length)
    is_count = unit in ("steps", "epochs") and amount.is_integer()
    settings: dict[str, Any] = {"steps": 0, "epochs": 0, "until": ""}
    settings |= {unit: int(amount)} if is_count else {"until": length}
    if (size := _batch_size(source)) and size != config.global_batch_size(source.strategy):
        settings |= {"batch_size": size, "replica_batch_size": 0}
        if config.replica_batch_size:
            log.warning("replica_batch_size=%d has no effect: the data comes in batches.", config.replica_batch_size)
    return dataclasses.replace(config, **settings)


def log_every(config: Config, units: Units) -> int | str:
    """Returns the duration between two logs: in a run of epochs an epoch, where the settings leave it open."""
    if config.log_every != "auto":
        return config.log_every
    return "1 epoch" if units.run_unit == "epochs" else _LOG_STEPS


def first_averaged(config: Config, units: Units) -> int:
    """Returns the step whose weights are the first of an average: of one with a decay, the first step.

    Raises:
        ValueError: if it is a fraction of a run that ends by time.
    """
    period = units.period(config.average_from)
    if period.secs or period.tokens:
        raise ValueError(
            f"average_from={config.average_from!r} was given, which is by time or tokens, so that its steps are not "
            "known: give steps, epochs or examples."
        )
    return max(1, period.steps)


def why_over(call: FitCall, secs: float, tokens: float, stop_reason: str | None) -> str:
    """Returns a sentence about a run that an action has ended for a reason, or that has no step left.

    Args:
        call: what `fit` was given.
        secs: how long the run has trained.
        tokens: that it has trained on.
        stop_reason: why an action has ended it; None: none has.
    """
    run, step, unit = call.units.run, call.step, call.units.run_unit
    if stop_reason:
        why = f"Stopped at step {step} before ({stop_reason})"
    elif run.secs:
        why = f"Already at step {step}, after {show_secs(secs)} of {show_secs(run.secs)}"
    elif run.tokens:
        why = f"Already at step {step}, after {tokens:,.0f} of {run.tokens:,.0f} tokens"
    elif step > run.steps:
        why = (
            f"Nothing to train: already at step {step}, and the run ends at step {run.steps}, counted from its start "
            "and not from this call"
        )
    else:
        why = f"Already at step {step} of {run.steps}"
    instead = "or use another workdir" if call.config.workdir else "to go on"
    return f"{why}: raise {unit if unit in ('steps', 'epochs') else 'until'} {instead}."


def require_same_run(
    state: TrainState, last_step: float, evaluations: Sequence[Action], actions: Sequence[Action]
) -> None:
    """Compares a call of `fit` between the workers; all of them call it. The last step is inf if the run ends by time.

    Raises:
        ValueError: on every worker, if one differs.
    """
    facts = {
        "the last step": last_step,
        "evals": [(evaluation.name, evaluation.every) for evaluation in evaluations],
        "actions": [(getattr(action, "__name__", type(action).__name__), action.every) for action in actions],
        "the Keras metrics": sorted(state.keras_metrics),
    }
    trained_by = {name: set(map(id, variables)) for name, variables in state.variables_of_update.items()}
    for variable in [*state.trained_variables, *state.untrained_variables]:
        updates = [name for name, trained in trained_by.items() if id(variable) in trained]
        text = "".join(f", trained by {name}" if name else ", trained" for name in updates)
        facts[f"the variable {state.paths[id(variable)]!r}"] = f"{tuple(variable.shape)} {variable.dtype}{text}"
    collectives.require_same(state.strategy, "train", facts)


def require_same_trainable(state: TrainState) -> None:
    """Checks that the update still trains what it was built to train.

    Raises:
        ValueError: if `trainable` of a layer or variable has been set since.
    """
    named, changed = named_variables(state.model), set(state.spec.changed_layers())
    for update in state.spec.updates:
        try:
            chosen = {id(variable) for variable in update.select_variables(named)}
        except ValueError:  # there is none
            chosen = set()
        built = {id(variable) for variable in state.variables_of_update[update.name]}
        changed |= {path for path, variable in named.items() if id(variable) in chosen ^ built}
    if changed:
        some = ", ".join(map(repr, sorted(changed)[:3])) + (", ..." if len(changed) > 3 else "")
        raise ValueError(
            f"`trainable` of {some} was changed since the Trainer was made, which fixes what a run trains: set it "
            "back, or make another Trainer, whose model_fn sets it, in a workdir of its own, with init_from= this one."
        )

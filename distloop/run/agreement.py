"""Agreement: checks that all workers train the same run, and that it can go on with another number of workers.

    require_same_run(state, last_step=500, evaluations=[...], actions=[...])
    with announced(state, config, source):      # around training; without a launcher, it does nothing
        report_traced(state, config)            # once the step is traced

What is known later is compared there: in `data.info`, `compiled_loop`, `evaluation` and `prediction`. A change of
workers is recorded in `incidents.jsonl`.
"""

import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from distloop.data.source import Source
from distloop.distributed import collectives
from distloop.distributed.strategies import Indivisible
from distloop.model.state import TrainState
from distloop.settings.config import Config
from distloop.training.action import Action
from distloop.variables import named_variables
from distloop.workdir.records import append_row, last_row
from distloop.workers import messages
from distloop.workers.messages import Membership


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


@contextlib.contextmanager
def announced(state: TrainState, config: Config, source: Source) -> Iterator[None]:
    """Tells the launcher that the run can be asked to save and leave, and with how many workers it can go on.

    Raises:
        ValueError: if the launcher may change the number of workers, and the run would not be the same.
    """
    membership = messages.find_membership()
    if membership is None:
        yield
        return
    if membership.is_elastic:
        _check(membership, config, source)
    if messages.mark("restored") and membership.cause and collectives.is_chief(state.strategy):
        _changes.append(_describe(membership, state, config))
    membership.send(begins=int(state.step), sizes=_worker_counts(membership, state.strategy, config))
    try:
        yield
    finally:
        membership.send(ends=True)


@contextlib.contextmanager
def divisible(strategy: tf.distribute.Strategy, config: Config) -> Iterator[None]:
    """Tells the launcher which numbers of workers can share out the virtual replicas, if these workers cannot."""
    try:
        yield
    except Indivisible:
        if membership := messages.find_membership():
            membership.send(sizes=_worker_counts(membership, strategy, config))
        raise


def _check(membership: Membership, config: Config, source: Source) -> None:
    """Checks that each checkpoint can go on with another number of workers."""
    given = f"workers={membership.least}:{membership.most} was given to the launcher"
    if not config.workdir or not config.resume:
        setting = "no workdir" if not config.workdir else "resume=False"
        raise ValueError(
            f"{given} with {setting}, but after a change of workers the run goes on from its newest checkpoint: give a "
            "workdir and leave resume out, or give one number of workers."
        )
    if source.depends_on_workers:
        raise ValueError(
            f"{given} with data that is one worker's part (a function of InputContext), which "
            "cannot be cut anew for fewer: give a dataset of global batches, or one number of workers."
        )
    if config.replica_batch_size and not config.virtual_replicas:
        raise ValueError(
            f"{given} with replica_batch_size={config.replica_batch_size}, so that the batch would change with the "
            "workers: give batch_size, or one number of workers."
        )


def _worker_counts(membership: Membership, strategy: tf.distribute.Strategy, config: Config) -> list[int]:
    """Returns the numbers of workers with which the run can go on."""
    devices, virtual = collectives.num_local_replicas(strategy), config.virtual_replicas
    counts = range(1 if config.strategy == "auto" else 2, membership.most + 1)
    return [count for count in counts if not virtual or virtual % (count * devices) == 0]


def report_traced(state: TrainState, config: Config) -> None:
    """Writes what a change of workers cost, once the first step is traced after it."""
    membership = messages.find_membership()
    if membership is None or not messages.mark("traced") or not _changes:
        return
    row, secs_of = _changes.pop(), messages.start_times(membership)
    if config.workdir:
        row |= {f"{name}_secs": round(secs, 3) for name, secs in secs_of.items()}
        with contextlib.suppress(OSError):  # of a disk that is full, on which a run may train
            append_row(os.path.join(config.local_workdir, "incidents.jsonl"), row)


def _describe(membership: Membership, state: TrainState, config: Config) -> dict[str, Any]:
    """Returns the row about a change of workers, before rows of steps that are trained again are cut off."""
    last = last_row(os.path.join(config.local_workdir, "metrics.jsonl")) if config.workdir else None
    return {
        "step": int(state.step),
        "action": "membership",
        "membership": membership.number,
        "workers": collectives.num_workers(state.strategy),
        "steps_again": max(0, last["step"] - int(state.step)) if last else 0,
        "reason": membership.cause,
    }


_changes: list[dict[str, Any]] = []  # of this process, at most one, until it is written

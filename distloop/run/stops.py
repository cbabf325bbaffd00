"""Stops: a run that ends early, by a signal, `max_secs`, its launcher or an error; who saves then, and what is said.

    stops = Stops(call, checkpoints)
    with stops.interruptible() as requests:     # saves, and leaves with code 75, when asked to stop
        with stops.training():                  # after an error in here, too, the run is saved
            loop.train(...)                     # looks at the requests between two loops

An elastic launcher stops a run to go on with other workers: `announced` sends it with how many the run can go on, and
the change is recorded in `incidents.jsonl`.
"""

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from distloop.checkpoints.resume import RunCheckpoints
from distloop.data.source import Source
from distloop.distributed import collectives, strategies
from distloop.distributed.devices import Replicas
from distloop.errors import first_line
from distloop.log import say
from distloop.model.state import TrainState
from distloop.monitoring.console import is_notebook
from distloop.run.fit_call import FitCall
from distloop.settings.config import Config
from distloop.workdir.records import append_row, last_row
from distloop.workdir.run_lock import LockLost
from distloop.workers import messages
from distloop.workers.heartbeat import is_collective_error
from distloop.workers.messages import Membership
from distloop.workers.preemption import Interrupted, OtherFailed, StopRequests


class Stops:
    """The ways in which one call of `fit` may end early."""

    def __init__(self, call: FitCall, checkpoints: RunCheckpoints):
        """Stores what is saved, and where."""
        self._call, self._checkpoints = call, checkpoints
        self._is_training = False

    @contextlib.contextmanager
    def training(self) -> Iterator[None]:
        """Enters the scope of the training loop, after an error in which the run is saved."""
        self._is_training = True
        yield
        self._is_training = False

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[StopRequests]:
        """Saves the run when a signal or `max_secs` asks for it; ends the process, except a notebook's, with code 75.

        Yields:
            The requests to stop.

        Raises:
            SystemExit: with code 75.
        """
        call, began = self._call, self._call.step
        stays, has_workdir = is_notebook(), bool(call.config.workdir)
        stops = StopRequests(call.config.max_secs, catch_signals=has_workdir or stays, may_quit=not stays)
        with stops, announced(call.state, call.config, call.source):
            for evaluation in call.evaluations:
                evaluation.stop_requests = stops
            try:
                yield stops
            except Interrupted as interrupted:
                if saves := has_workdir and interrupted.has_trained:
                    self._checkpoints.save_and_wait()
                saved = ", checkpoint saved" if saves else ""
                if isinstance(interrupted, OtherFailed):
                    interrupted = OtherFailed(f"{interrupted} ({self._gather_errors('')})")
                if call.is_chief:  # with console=quiet, too
                    say(f"{interrupted}{saved}. Run the same {'cell' if stays else 'command'} to resume.")
                if not stays:
                    raise SystemExit(interrupted.exit_code) from None
            except LockLost:
                raise  # nothing may be saved
            except (Exception, KeyboardInterrupt) as error:
                if has_workdir and self._is_training and call.step > began:
                    self._save_after(error)
                raise

    def _save_after(self, error: BaseException) -> None:
        """Saves the last step of a run that an error ends, or says why not."""
        call, name, strategy = self._call, type(error).__name__, self._call.state.strategy
        if not call.state.may_be_saved:
            last = self._checkpoints.last_step()
            stays = "there is no checkpoint" if last is None else f"the checkpoint of step {last} stays"
            call.say(f"Nothing is saved, as a step failed after step {call.step}; {stays}.")
            return
        is_one_of_several = collectives.num_workers(strategy) > 1
        is_left_alone = is_one_of_several and is_collective_error(error)
        if is_left_alone and collectives.heartbeat_of(strategy) is not None:
            return  # the heartbeat names the worker that is gone, and ends this process
        if is_left_alone or (is_one_of_several and not collectives.agree_to_save(strategy, call.step)):
            call.say(f"{name}: not saved, as the other workers are not at this point; the last checkpoint stays.")
            return
        try:
            self._checkpoints.save_and_wait()
            self._gather_errors(f"{name}: {first_line(error)}")
            say(f"{name} at step {call.step}, checkpoint saved: the same command goes on from there.")
        except Exception as failure:  # the first error is the one to be seen
            say(f"{name} at step {call.step}, which could not be saved ({first_line(failure)}).")

    def _gather_errors(self, error: str) -> str:
        """Waits until the chief has saved a run that an error ends; returns the error of the worker that failed."""
        return "; ".join(filter(None, collectives.Workers(self._call.state.strategy).gather(error)))


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
        _check(membership, state.replicas, config, source)
    if messages.mark("restored") and membership.cause and collectives.is_chief(state.strategy):
        _changes.append(_describe(membership, state, config))
    counts = _worker_counts(membership, collectives.num_local_replicas(state.strategy), state.replicas, config)
    membership.send(begins=int(state.step), sizes=counts)
    try:
        yield
    finally:
        membership.send(ends=True)


def make_replicas(strategy: tf.distribute.Strategy, config: Config) -> Replicas:
    """Returns the replicas on which the step of a run is defined.

    Raises:
        ValueError: if the workers cannot share them out evenly, or ratios do not fit; the launcher hears which numbers
            of workers can.
    """
    replicas = strategies.replicas_of(strategy, config)
    if not replicas.fit_on(replicas.devices):
        if membership := messages.find_membership():
            of_worker = collectives.num_local_replicas(strategy)
            membership.send(sizes=_worker_counts(membership, of_worker, replicas, config))
        each = f"as many virtual ones as the others: give a number of devices and workers that divides {replicas.count}"
        each = "one share: give as many numbers, or leave device_shares out" if replicas.ratios else each
        raise ValueError(f"{replicas.setting} was given for {strategies.describe(strategy)}, and each has {each}.")
    return replicas


def _check(membership: Membership, replicas: Replicas, config: Config, source: Source) -> None:
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
    if config.replica_batch_size and not replicas.same_bits:
        raise ValueError(
            f"{given} with replica_batch_size={config.replica_batch_size}, so that the batch would change with the "
            "workers: give batch_size, or one number of workers."
        )


def _worker_counts(membership: Membership, of_worker: int, replicas: Replicas, config: Config) -> list[int]:
    """Returns the numbers of workers, each with so many devices, with which the run can go on."""
    counts = range(1 if config.strategy == "auto" else 2, membership.most + 1)
    return [count for count in counts if replicas.fit_on(count * of_worker)]


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

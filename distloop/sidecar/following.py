"""Following: evaluates each checkpoint of a run that another process trains.

It writes `evaluations/<name>.jsonl` and `<name>/` for TensorBoard beside the run's own files, and nothing else.
"""

import contextlib
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping

import tensorflow as tf

from distloop.actions.write import JsonWriter
from distloop.checkpoints.checkpoint import DamagedError, Saved, read_manifest
from distloop.checkpoints.resume import RunCheckpoints
from distloop.checkpoints.store import Checkpoints, in_workdir
from distloop.distributed import collectives
from distloop.log import log, shown
from distloop.monitoring.tensorboard import SummaryWriter
from distloop.settings.config import Config
from distloop.settings.durations import finite_number
from distloop.workdir.records import read_rows, unix_time
from distloop.workdir.run_lock import RunLock


def check(config: Config, strategy: tf.distribute.Strategy, name: str) -> None:
    """Raises ValueError if this process cannot follow another one's run, or the evaluation's name is no file's."""
    if not name or name.startswith(".") or "/" in name or "\0" in name:
        raise ValueError(
            f"name={name!r} was given to evaluate_checkpoints, which writes evaluations/<name>.jsonl: give a name that "
            "is not empty, begins with no dot and has no slash, such as 'test'."
        )
    if collectives.num_workers(strategy) > 1:
        raise ValueError(
            "evaluate_checkpoints was called on several workers, which do not see a new checkpoint at the same moment: "
            "call it in one process beside them, without TF_CONFIG."
        )
    if not config.workdir:
        raise ValueError("There are no checkpoints to follow: give Config(workdir=...) the run's workdir.")
    if config.workdir != config.local_workdir:
        raise ValueError(
            f"evaluate_checkpoints was called with workdir={config.workdir!r}, and it follows a run on a disk: give "
            f"{config.local_workdir!r} on the machine that trains, or call restore and evaluate in turn."
        )
    if config.fast_dev_run:
        raise ValueError(
            "evaluate_checkpoints was called with fast_dev_run=True, whose temporary directory no other run writes to: "
            "leave fast_dev_run out."
        )


def evaluate_checkpoints(
    checkpoints: RunCheckpoints,
    evaluate: Callable[[], Mapping[str, float]],
    workdir: str,
    name: str,
    poll_secs: float,
    timeout_secs: float,
) -> dict[int, dict[str, float]]:
    """Evaluates each checkpoint that is newer than its row in the evaluation's file, until the run is complete.

    Returns:
        Step -> name -> number.

    Raises:
        ValueError: if another process evaluates under this name, a time is no number of seconds, or a checkpoint is of
            another model or optimizer.
        TimeoutError: as for `_follow`.
    """
    for setting, secs in {"poll_secs": poll_secs, "timeout_secs": timeout_secs}.items():
        number = finite_number(secs)
        if number is None or not 0 <= number <= threading.TIMEOUT_MAX:
            raise ValueError(f"evaluate_checkpoints was given {setting}={shown(secs)}: give seconds, 0 or more.")
    path = os.path.join(workdir, "evaluations", f"{name}.jsonl")
    measured: dict[int, dict[str, float]] = {}
    lock = RunLock(os.path.dirname(path), f"run.lock.{os.path.basename(name)}")
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(lock)
        except ValueError as error:
            raise ValueError(
                f"name={name!r} was given to evaluate_checkpoints, and another process writes its rows ({error}): give "
                "another name, or end that process."
            ) from error
        done = {row["step"]: row.get("time", 0.0) for row in read_rows(path)} if os.path.exists(path) else {}
        for saved in _follow(in_workdir(workdir), done, poll_secs, timeout_secs):
            checkpoints.restore_saved(saved)
            step = saved.step
            measured[step] = dict(evaluate())
            if len(measured) == 1:  # no file is made before there is a row for it
                summaries = stack.enter_context(contextlib.closing(SummaryWriter(workdir, [name])))
                rows = stack.enter_context(contextlib.closing(JsonWriter(path)))
            for writer in (summaries, rows):
                writer.write(step, {f"{name}/{key}": value for key, value in measured[step].items()}, unix_time())
                lock.verify()
                writer.flush()
    return measured


def _follow(
    checkpoints: Checkpoints, done: Mapping[int, float], poll_secs: float, timeout_secs: float
) -> Iterator[Saved]:
    """Yields each checkpoint that another process writes, until the last one of its run.

    Checkpoints that are deleted before they are read are skipped: the run keeps its newest only. So are those that were
    there when their step was done, at the Unix time that `done` has; one that replaced it since is read. With
    `timeout_secs=0` there is no limit to the time between two checkpoints.

    Raises:
        TimeoutError: if no checkpoint came in that time.
        OSError: if one cannot be read.
    """
    seen, last_time = dict(done), time.monotonic()
    while True:
        steps = checkpoints.steps
        new = [step for step in steps if _written_at(checkpoints, step) > seen.get(step, 0.0)]
        for step in new:
            seen[step] = _written_at(checkpoints, step)
            try:
                yield checkpoints.load(step)
            except (DamagedError, OSError) as error:
                if step not in checkpoints.steps:
                    continue
                if not isinstance(error, DamagedError):
                    raise
                log.error("%s It is skipped.", error)
            finally:
                last_time = time.monotonic()  # what is done with a checkpoint is no waiting
        if not new:
            if steps and _is_last(os.path.join(checkpoints.directory, str(steps[-1])), steps[-1]):
                return
            if timeout_secs and time.monotonic() - last_time > timeout_secs:
                raise TimeoutError(
                    f"No checkpoint came to {checkpoints.directory!r} for {timeout_secs:g} seconds, and the newest is "
                    "not the last of its run: has that ended? Wait longer with timeout_secs."
                )
            time.sleep(poll_secs)


def _written_at(checkpoints: Checkpoints, step: int) -> float:
    """Returns the Unix time at which a checkpoint was written; 0: it is deleted."""
    with contextlib.suppress(FileNotFoundError):
        return os.path.getmtime(os.path.join(checkpoints.directory, str(step)))
    return 0.0


def _is_last(path: str, step: int) -> bool:
    """Returns whether a checkpoint is the last one of its run."""
    try:
        metadata = read_manifest(path)["notes"]
    except (OSError, ValueError, KeyError):
        return False
    return bool(metadata["stop_reason"]) or step >= (metadata["until"] or math.inf)

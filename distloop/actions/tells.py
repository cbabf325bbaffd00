"""Commands to a run that trains, from `python -m distloop.report --tell RUN save`; without TensorFlow.

    tell("run", "learning_rate=1e-4")           # in another process: a line in `tell.jsonl`
    tells = Tells("run", state, evaluations, plan, workers)         # an action of the run, which looks at the file
    tells.on_start(report)                      # what earlier processes have acted on is acted on at its step again
    if tells.are_new():                         # between two loops
        tells.take(step + 1)                    # all workers: to act at the end of that step

`told.jsonl` notes each command with its step before that step begins. A run that resumes acts on it at that step again,
so it ends bit for bit like a run that was not stopped.
"""

import functools
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from distloop.atomic_files import sync
from distloop.log import log
from distloop.monitoring import ledger, records
from distloop.monitoring.console import say
from distloop.monitoring.run_files import has_ended
from distloop.settings.durations import finite_number
from distloop.urls import require_disk

_INBOX, TOLD = "tell.jsonl", "told.jsonl"
_RATE = "learning_rate"


def tell(workdir: str, command: str) -> str:
    """Writes a command for a run into its workdir; returns a sentence about it.

    Args:
        workdir: of the run, on a disk.
        command: "save", "evaluate", "stop" or "learning_rate=1e-4"; "discriminator/learning_rate=1e-4" for one of
            several updates.

    Raises:
        ValueError: if there is no such command or run, the run has ended, or the workdir cannot be written to.
    """
    require_disk(workdir, "--tell was given with {}: give trainer.config.local_workdir, where the first worker runs")
    start = ledger.last_start(workdir)
    if "takes" not in start:
        raise ValueError(f"--tell was given with {workdir!r}, where no run of this version has begun: give a workdir.")
    if has_ended(workdir):
        raise ValueError(f"--tell was given with {workdir!r}, whose run has ended: start it with more steps first.")
    _check(command, start["takes"])
    path = os.path.join(workdir, _INBOX)
    try:
        records.append_row(path, {"step": start["step"], "id": secrets.token_hex(8), "command": command})
    except OSError as error:
        raise ValueError(f"--tell cannot write {path!r} ({error.strerror}): only who may write it tells it.") from error
    return f"{command} is in {path}: the run acts on it after its next step, or once it is started again"


def _check(command: str, takes: Mapping[str, Sequence[str]]) -> None:
    """Raises a ValueError if a run takes no such command."""
    name, _, value = command.partition("=")
    given = f"--tell was given {command!r}"
    if command == "evaluate" and not takes["evals"]:
        raise ValueError(f"{given}, and the run has no evals: give fit evals.")
    if command in ("save", "evaluate", "stop"):
        return
    if name.rpartition("/")[2] != _RATE:
        raise ValueError(f"{given}: give save, evaluate, stop or {_RATE}=NUMBER; others are changed by a new start.")
    try:
        number = finite_number(float(value))
    except ValueError:
        number = None
    if number is None or number < 0:
        raise ValueError(f"{given}: give a number, 0 or more, as in {name}=1e-4.")
    if name not in takes["rates"]:
        rates = f"it has {', '.join(takes['rates'])}" if takes["rates"] else "each of its rates is a schedule"
        raise ValueError(f"{given}, and the run has no constant {name} ({rates}): stop it, and start it with another.")


class Tells:
    """Acts on the commands of a run's workdir; an action, called behind the evaluations.

    Attributes:
        every, phase, only_writes, has_fixed_metrics: as of `Action`.
        takes: what the run can be told: the names of evaluations and of constant learning rates.
    """

    every, phase, only_writes, has_fixed_metrics = None, "logging", True, True

    def __init__(self, workdir: str, state: Any, evaluations: Sequence[Any], plan: Any):
        """Touches no disk.

        Args:
            workdir: of the run; empty: it is told nothing.
            state: a `TrainState`.
            evaluations: of the run.
            plan: gets the steps at which the run acts.
        """
        from distloop.distributed.workers import Workers  # imports TensorFlow

        self._has_workdir, self._workers = bool(workdir), Workers(state.strategy)
        self._is_looked_at = self._has_workdir and self._workers.is_chief
        self._paths = [os.path.join(workdir, name) for name in (_INBOX, TOLD)]
        self._state, self._evaluations, self._plan = state, evaluations, plan
        self._commands: dict[int, list[str]] = {}
        self._seen, self._size = set[str](), 0
        self._saves: Any = None
        rates = [f"{update}/{_RATE}".lstrip("/") for update in state.initial_learning_rates]
        self.takes = {"evals": [evaluation.name for evaluation in evaluations], "rates": rates}
        stop = functools.partial(self._stop)  # which has attributes of its own
        vars(stop).update(every=None, phase="logging", only_writes=True, has_fixed_metrics=True)
        self._actions = self, stop

    def __iter__(self) -> Iterator[Any]:
        """Yields this action, and one behind it that ends the run."""
        return iter(self._actions)

    def set_saves(self, saves: Any) -> None:
        """Stores the run's checkpoints."""
        self._saves = saves

    def on_start(self, report: Any) -> None:
        """Schedules what earlier processes have acted on at the present step or after it. All workers call it."""
        if not self._has_workdir:
            return
        rows = _read(self._paths[1]) if self._is_looked_at else []
        self._seen.update(row["id"] for row in rows)
        self._schedule([(row["step"], row["command"]) for row in rows if row["step"] >= report.step])
        if again := ", ".join(f"{row['command']} at step {row['step']}" for row in rows if row["step"] > report.step):
            say(f"The run was told before, and acts on it again: {again}.")

    def are_new(self) -> bool:
        """Returns whether there is something new to read, as the chief sees it."""
        if not self._is_looked_at:
            return False
        try:
            size = os.stat(self._paths[0]).st_size
        except OSError:
            return False
        is_new, self._size = size != self._size, size
        return is_new

    def take(self, step: int) -> None:
        """Reads new commands, notes them, and schedules them for the end of a step. All workers call it."""
        new: list[tuple[int, str]] = []
        rows = _read(self._paths[0]) if self._is_looked_at else []
        try:
            for row in (row for row in rows if row["id"] not in self._seen):
                try:
                    _check(row["command"], self.takes)
                except ValueError as error:  # it has come into the file in another way
                    log.warning("%s The run does not act on it.", error)
                    continue
                records.append_row(self._paths[1], {**row, "step": step})
                sync(self._paths[1])
                self._seen.add(row["id"])
                new.append((step, row["command"]))
        except OSError as error:
            log.error("%s cannot be written (%s): what it should note is not acted on.", self._paths[1], error.strerror)
        self._schedule(new)

    def _schedule(self, commands: Sequence[tuple[int, str]]) -> None:
        for step, command in self._workers.broadcast(list(commands)):
            self._commands.setdefault(int(step), []).append(command)
        self._plan.told = set(self._commands)

    def __call__(self, report: Any) -> dict[str, float] | None:
        """Acts on the commands of a step; returns how many there were, and the numbers of evaluations."""
        commands = self._commands.get(report.step, [])
        for command in commands:
            set_rate(self._state, command)
        numbers: dict[str, float] = {"told": float(len(commands))} if commands else {}
        for evaluation in self._evaluations if "evaluate" in commands and "stop" not in commands else ():
            if not any(name.startswith(f"{evaluation.name}/") for name in report.metrics):
                numbers |= evaluation(report)
        return numbers

    def _stop(self, report: Any) -> None:
        if "stop" in self._commands.get(report.step, ()):  # all that is due at the end of the run is called then
            from distloop.actions.action import StopTraining  # imports TensorFlow

            raise StopTraining("it was told to stop")

    def end_boundary(self, report: Any) -> None:
        """Saves the run if it was told to."""
        if "save" in self._commands.get(report.step, ()) and self._saves is not None:
            self._saves.save(report)


def set_rate(state: Any, command: str) -> None:
    """Sets a constant learning rate of a `TrainState`, if that is the command."""
    name, _, value = command.partition("=")
    if value and (update := name.rpartition("/")[0]) in state.initial_learning_rates:
        with state.strategy.scope():
            state.optimizers[update].learning_rate = float(value)


def read_told(workdir: str) -> dict[int, list[str]]:
    """Returns the commands that a run has acted on, by step."""
    told: dict[int, list[str]] = {}
    for row in _read(os.path.join(workdir, TOLD)):
        told.setdefault(row["step"], []).append(row["command"])
    return told


def _read(path: str) -> list[dict[str, Any]]:
    """Returns the commands in a file: rows of `step`, `id` and `command`."""
    rows = records.read_rows_if_any(path, instead="the run acts on none of its commands")
    return [row for row in rows if isinstance(row.get("id"), str) and isinstance(row.get("command"), str)]

"""Scenarios of distloop: what is in a directory, what a process does, and what a later process goes on from."""

import dataclasses
import os
import pathlib
import shutil
from unittest import mock

import tensorflow as tf

from distloop.atomic_files import leftovers
from distloop.checkpoints import checkpoint
from distloop.checkpoints.checkpoint import Saved
from distloop.checkpoints.store import Checkpoints
from distloop.exports.export import prepare_path, writing
from tests.campaigns.crash_matrix.faults import EIO, ENOSPC, KILL, Faults, Killed
from tests.campaigns.crash_matrix.power_loss import states, write_state

# Colours, from the best to the worst.
NEW, BEFORE = "goes on from the new one", "from the one before"
LOST, HAND, WRONG = "loses a save", "needs a hand", "wrong"
FAULTS = (KILL, EIO, ENOSPC)
POWER = "power"
COLUMNS = [(fault, is_same) for fault in FAULTS for is_same in (True, False)]
PROCESSES = (999_999_991, 999_999_992)  # larger than the number of any process


@dataclasses.dataclass(frozen=True)
class Cell:
    """A fault and what came of it."""

    number: int  # of the operation
    operation: str  # its kind and the name of its file
    fault: str  # kill, EIO or ENOSPC
    is_same: bool  # whether the next process has the same number, or after an error the same process goes on
    colour: str  # what the run goes on from


def values(step: int, version: int = 0) -> dict[str, tf.Tensor]:
    return {"kernel": tf.fill([2], float(10 * step + version)), "step": tf.constant(step, tf.int64)}


@dataclasses.dataclass(frozen=True)
class Save:
    """A save into the directory of a run that has saved steps 10, 20 and 30; 10 is one of the best."""

    name: str
    new: tuple[int, int]  # step and version that are saved
    befores: set[tuple[int, int]]  # what a run may go on from if they were not

    def prepare(self, directory: str, keep: int) -> None:
        store = Checkpoints(directory, 3 if self.new[0] == 15 else keep)
        for step in (10, 20, 30):
            store.save(step, values(step), {}, {"score": [10]})
        store.wait()

    def act(self, directory: str, keep: int) -> Checkpoints:
        store = Checkpoints(directory, keep)
        if self.name == "rollback":
            store.drop_later(10)
        step, version = self.new
        store.save(step, values(step, version), {}, {"last": [step]})
        store.join()
        return store

    def judge(
        self, directory: str, keep: int, store: Checkpoints | None, was_told: bool, is_flushed: bool = True
    ) -> str:
        """Returns the colour of a directory.

        `store` is that of the process, if it goes on; None: another one starts. `was_told`: the save was reported as
        done. `is_flushed`: what the process did is in the directory, and not lost with the power.
        """
        fresh = Checkpoints(directory, keep)
        was_told = was_told or (is_flushed and self._is_there(directory))
        try:
            saved = fresh.load_newest()
            best = fresh.best_steps
            are_there = [fresh.load(step).step == step for steps in best.values() for step in steps]
            is_best_there = 10 in best.get("score", []) and all(are_there)
        except (OSError, ValueError):
            return HAND
        if saved is None:
            return LOST
        colour = self._colour(saved)
        if not is_best_there or (was_told and colour == BEFORE):
            colour = LOST
        store = store or fresh
        try:
            store.save(50, values(50), {})
            store.wait()
            newest = Checkpoints(directory, keep).load_newest()
        except (OSError, ValueError):
            return HAND
        names = {name for name in os.listdir(directory) if not name.endswith((".abandoned", ".json"))}
        allowed = {"10", "50", *(str(step) for step in sorted(store.steps)[-keep:])} | {str(self.new[0])}
        if newest is None or newest.step != 50 or names - allowed:
            return HAND
        return colour

    def _is_there(self, directory: str) -> bool:
        """Returns whether the new checkpoint had its name when the process ended."""
        try:
            return self._colour(checkpoint.load(os.path.join(directory, str(self.new[0])))) == NEW
        except (OSError, ValueError):
            return False

    def _colour(self, saved: Saved) -> str:
        kernel = int(saved.values["kernel"][0])
        if int(saved.values["step"]) != saved.step or kernel // 10 != saved.step:
            return WRONG
        if (saved.step, kernel % 10) == self.new:
            return NEW
        return BEFORE if (saved.step, kernel % 10) in self.befores else LOST


@dataclasses.dataclass(frozen=True)
class Export:
    """An export of two files, where there is one or none."""

    name: str
    has_old: bool

    def prepare(self, directory: str, keep: int) -> None:
        os.makedirs(directory)
        if self.has_old:
            self._export(directory, "old")

    def act(self, directory: str, keep: int) -> None:
        self._export(directory, "new")

    def judge(self, directory: str, keep: int, store: None, was_told: bool, is_flushed: bool = True) -> str:
        """Returns the colour: what stands under the name is the new one, or the one before."""
        try:
            path = pathlib.Path(prepare_path(os.path.join(directory, "model"), tf.distribute.get_strategy()))
            contents = {(path / name).read_text() for name in ("graph", "weights")} if path.exists() else {"old"}
            self._export(directory, "next")
        except OSError:
            return HAND
        if os.listdir(directory) != ["model"] or leftovers(directory):
            return HAND
        if contents == {"new"}:
            return NEW
        return (LOST if was_told else BEFORE) if contents == {"old"} else WRONG

    def _export(self, directory: str, text: str) -> None:
        strategy = tf.distribute.get_strategy()
        path = prepare_path(os.path.join(directory, "model"), strategy)
        with writing(path, strategy) as temporary:
            os.mkdir(temporary)
            for name in ("graph", "weights"):
                with open(os.path.join(temporary, name), "w") as file:
                    file.write(text)


SCENARIOS = {
    scenario.name: scenario
    for scenario in (
        Save("new step", (40, 0), {(30, 0)}),
        Save("replaced step", (30, 1), {(30, 0)}),
        Save("after going back", (15, 1), {(30, 0), (10, 0)}),
        Save("rollback", (15, 1), {(30, 0), (10, 0)}),
        Export("new export", False),
        Export("replaced export", True),
    )
}


def as_process(index: int):
    return mock.patch.object(os, "getpid", lambda: PROCESSES[index])


def act(scenario: Save | Export, template: str, directory: str, keep: int, faults: Faults) -> tuple[object, bool]:
    """Copies a template and acts on it under faults; returns the store, and whether it reported success."""
    shutil.rmtree(directory, ignore_errors=True)
    shutil.copytree(template, directory)
    store = None
    try:
        with faults:
            store = scenario.act(directory, keep)
            if store is not None:
                store.wait()
    except (OSError, Killed):
        return store, False
    except ValueError as error:  # the sentence about an error of the disk
        if not isinstance(error.__cause__, OSError):
            raise
        return store, False
    return store, not faults.is_dead


def _record(scenario: Save | Export, keep: int, place: pathlib.Path) -> tuple[str, str, Faults]:
    """Acts without a fault; returns the directory before, the one of the run, and the operations."""
    template, directory = str(place / "template"), str(place / "run")
    shutil.rmtree(template, ignore_errors=True)
    with as_process(0):
        scenario.prepare(template, keep)
        clean = Faults(directory)
        act(scenario, template, directory, keep, clean)
    return template, directory, clean


def cells(scenario: Save | Export, keep: int, place: pathlib.Path, columns: list[tuple[str, bool]]) -> list[Cell]:
    """Runs a scenario in a directory, of memory if there is one, with each fault of the columns at each operation."""
    template, directory, clean = _record(scenario, keep, place)
    result = []
    for number, operation in enumerate(clean.operations):
        for fault, is_same in columns:
            if not clean.can_fail(number, fault):
                continue
            with as_process(0):
                store, was_told = act(scenario, template, directory, keep, Faults(directory, fault, number))
            with as_process(0 if is_same else 1):
                goes_on = store if is_same and fault != KILL else None
                colour = scenario.judge(directory, keep, goes_on, was_told)
            name = os.path.relpath(operation.path, directory)
            result.append(Cell(number, f"{operation.kind} {name}", fault, is_same, colour))
    return result


def power_cells(scenario: Save | Export, keep: int, place: pathlib.Path) -> list[Cell]:
    """Loses the power after each operation of a scenario, in each way in which the disk may be behind; as `cells`."""
    template, directory, clean = _record(scenario, keep, place)
    result = []
    for number, state in states(template, directory, clean.operations):
        write_state(state, directory)
        was_told = number == len(clean.operations)
        with as_process(1):
            colour = scenario.judge(directory, keep, None, was_told, is_flushed=False)
        operation = clean.operations[min(number, len(clean.operations) - 1)]
        name = os.path.relpath(operation.path, directory)
        result.append(Cell(number, f"{operation.kind} {name}", POWER, False, colour))
    return result

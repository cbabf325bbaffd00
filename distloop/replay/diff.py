"""Compares the settings and rows of two runs, and the checkpoints that both have; without TensorFlow at first.

    difference = compare("runs/a", "runs/b")
    print(difference)
    difference.are_equal        # to the bit, as far as both have come

Every byte of the checkpoints that both have is compared; of runs at URLs they are fetched. TensorFlow is imported where
two checkpoints differ, to name the first variable that does, or the checkpoint that is damaged.
"""

import contextlib
import dataclasses
import filecmp
import os
import shlex
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

from distloop.urls import is_url
from distloop.workdir import records
from distloop.workdir.directory import fetch_reports, local_copy
from distloop.workdir.records import OF_THE_MACHINE, show_number
from distloop.workdir.run_files import manifests_of, program_of

_PLACES = ("workdir", "config", "resume", "replay")  # settings that say nothing about numbers
_POSITION = ("batches", "examples", "skipped", "state")  # how far a run is in its data; the rest says which data it is
_TIMES = frozenset({*OF_THE_MACHINE, "time"})
_OF_THE_STEP = frozenset({"weight_norm", "learning_rate", "loss_scale", "skipped_steps"})  # no means since the last row


@dataclasses.dataclass
class Difference:
    """What two runs do not have in common.

    Attributes:
        settings: name -> the values of both, of settings, flags, program, versions and data.
        num_rows: rows that both have.
        step: the first step whose row differs; None: no row does.
        numbers: name -> the values of both in that row, of those that differ.
        num_checkpoints: steps of which both have a checkpoint.
        checkpoint: the first of these steps whose checkpoints differ; None: none does.
        variable: the first variable there that differs, in the order of the model, and by how much at most.
        damage: which of these two checkpoints is damaged, in place of a variable; empty: neither is.
        commands: replay the step that differs first, in each run.
    """

    settings: dict[str, tuple[Any, Any]]
    num_rows: int = 0
    step: int | None = None
    numbers: dict[str, tuple[Any, Any]] = dataclasses.field(default_factory=dict)
    num_checkpoints: int = 0
    checkpoint: int | None = None
    variable: tuple[str, float] | None = None
    damage: str = ""
    commands: Sequence[str] = ()

    @property
    def are_equal(self) -> bool:
        """Whether no row and no checkpoint differs."""
        return self.step is None and self.checkpoint is None

    def __str__(self) -> str:
        settings = {name: ["-" if v is None else repr(v) for v in pair] for name, pair in self.settings.items()}
        lines = [f"{name}: {' and '.join(pair)}" for name, pair in settings.items()]
        lines = ["What differs besides numbers:", *(f"  {line}" for line in lines), ""] if lines else []
        counts = f"{self.num_rows} rows and {self.num_checkpoints} checkpoints that both have"
        if self.are_equal:
            return "\n".join([*lines, f"The runs are equal, to the bit, in {counts}."])
        lines.append(f"The runs differ, among {counts}:")
        if self.step is not None:
            lines.append(f"  the first row that differs is of step {self.step}:")
            lines += [f"    {name}: {_shown(a)} and {_shown(b)}{_apart(a, b)}" for name, (a, b) in self.numbers.items()]
        if self.checkpoint is not None:
            what = f"{self.variable[0]}, by {show_number(self.variable[1])} at most" if self.variable else self.damage
            lines += [f"  the first checkpoint that differs is of step {self.checkpoint}:", f"    {what}"]
        return "\n".join([*lines, "", "To inspect that step in either run:", *(f"  {c}" for c in self.commands)])


def compare(first: str, second: str) -> Difference:
    """Compares two runs as far as both have come.

    Args:
        first: the workdir of a run, or a URL.
        second: that of another.

    Raises:
        ValueError: if one holds no run or cannot be read, or they have no row and no checkpoint of the same step.
    """
    with tempfile.TemporaryDirectory(prefix="distloop_") as root:
        paths = [fetch_reports(path, os.path.join(root, str(i))) for i, path in enumerate((first, second))]
        for path, given in zip(paths, (first, second), strict=True):
            if not os.path.isfile(os.path.join(path, "metrics.jsonl")):
                raise ValueError(
                    f"{given!r} holds no metrics.jsonl: give the workdir of one run that has begun to train."
                )
        manifests = [manifests_of(path) for path in paths]
        found = Difference(_settings(paths, manifests))
        try:
            _compare_rows(paths, found)
            _compare_checkpoints((first, second), sorted({*manifests[0]} & {*manifests[1]}), found)
        except OSError as error:
            raise ValueError(f"The runs cannot be compared ({error}): give runs that you may read.") from error
    if not found.num_rows and not found.num_checkpoints:
        raise ValueError(f"{first!r} and {second!r} have no row and no checkpoint of the same step to compare.")
    steps = [step for step in (found.step, found.checkpoint) if step is not None]
    found.commands = [_command(path, min(steps)) for path in (first, second)] if steps else ()
    return found


def _settings(paths: Sequence[str], manifests: Sequence[Mapping[int, Any]]) -> dict[str, tuple[Any, Any]]:
    """Returns what differs of settings, flags, the program, and of versions and data as the newest checkpoints say."""
    facts: list[dict[str, Any]] = []
    for path, of_run in zip(paths, manifests, strict=True):
        read = records.read_json(os.path.join(path, "config.json"), records.as_object, instead="it counts as empty")
        known = {name: value for name, value in (read or {}).items() if name not in _PLACES}
        known |= {"program": program} if (program := program_of(path)) else {}
        metadata = of_run[max(of_run)]["notes"] if of_run else {}
        known |= {f"version of {name}": value for name, value in metadata.get("versions", {}).items()}
        known |= {"replicas": metadata["replicas"]} if "replicas" in metadata else {}
        data = {name: value for name, value in metadata.get("input", {}).items() if name not in _POSITION}
        facts.append(known | {f"data's {name}": value for name, value in data.items()})
    names = dict.fromkeys([*facts[0], *facts[1]])
    pairs = {name: (facts[0].get(name), facts[1].get(name)) for name in names}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _compare_rows(paths: Sequence[str], found: Difference) -> None:
    """Finds the first row that differs, times, what belongs to the machine and means over other steps apart."""
    first, second = ({r["step"]: r for r in records.read_rows(os.path.join(path, "metrics.jsonl"))} for path in paths)
    begins = [dict(zip(rows, (0, *rows), strict=False)) for rows in map(sorted, (first, second))]
    for step in sorted(first.keys() & second.keys()):
        found.num_rows += 1
        a, b = first[step], second[step]
        kinds = {name: name.rpartition("/")[2] for name in a if name in b and a[name] != b[name]}
        is_same = begins[0][step] == begins[1][step]
        if names := [name for name, kind in kinds.items() if kind in _OF_THE_STEP or is_same and kind not in _TIMES]:
            found.step, found.numbers = step, {name: (a[name], b[name]) for name in names}
            return


def _compare_checkpoints(paths: Sequence[str], steps: Sequence[int], found: Difference) -> None:
    """Finds the first checkpoint of which the runs have others, and the first variable in it, or which is damaged."""
    for step in steps:
        found.num_checkpoints += 1
        with contextlib.ExitStack() as stack:
            both = [f"{path.rstrip('/')}/checkpoints/{step}" for path in paths]
            local = [stack.enter_context(local_copy(path)) for path in both]
            if _have_equal_values(*local):
                continue
            from distloop.checkpoints.checkpoint import DamagedError  # imports TensorFlow

            try:
                found.variable = _first_variable(local)
            except DamagedError as error:
                found.damage = str(error).replace(local[0], both[0]).replace(local[1], both[1])
        if found.variable or found.damage:
            found.checkpoint = step
            return


def _have_equal_values(first: str, second: str) -> bool:
    """Returns whether the files with the values of two checkpoints are equal, byte for byte."""
    names, others = ({n for n in os.listdir(path) if n.startswith("variables")} for path in (first, second))
    return names == others and not any(filecmp.cmpfiles(first, second, names, shallow=False)[1:])


def _first_variable(paths: Sequence[str]) -> tuple[str, float] | None:
    """Returns the first variable of two checkpoints that differs, and by how much; None: no value does."""
    import numpy as np

    from distloop.checkpoints.checkpoint import load

    values = [load(path).values for path in paths]
    names = [name for of in values for name in of if not name.startswith("metrics/")]  # which depend on the replicas
    for name in sorted(dict.fromkeys(names), key=lambda name: not name.startswith("model/")):
        a, b = (np.asarray(v[name].numpy() if name in v else b"") for v in values)
        if a.tobytes() != b.tobytes():
            is_number = a.dtype.kind in "fiu" and a.shape == b.shape
            apart = np.abs(a.astype(np.float64) - b.astype(np.float64)) if is_number else np.zeros(1)
            return name, float(np.max(apart, initial=0.0))
    return None


def _command(workdir: str, step: int) -> str:
    """Returns the command that replays a step of a run, as a shell reads it."""
    words, flags = [], [f"--workdir={workdir}", f"--replay={step}"]
    with contextlib.suppress(ValueError):  # of a quote that is not closed
        words = shlex.split("" if is_url(workdir) else program_of(workdir))
    if not words:
        return f"the command of the run, with {shlex.join(flags)}"
    end = words.index("--") if "--" in words else len(words)  # flags do not follow it
    return shlex.join([*words[:end], f"--flagfile={workdir.rstrip('/')}/flags.txt", *flags, *words[end:]])


def _shown(value: Any) -> str:
    return "nan" if value is None else repr(value)


def _apart(a: Any, b: Any) -> str:
    is_number = isinstance(a, float | int) and isinstance(b, float | int)
    return f" ({show_number(records.as_number(b) - records.as_number(a))} apart)" if is_number else ""

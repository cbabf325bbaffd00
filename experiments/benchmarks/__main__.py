"""Measures distloop next to loops written by hand, Keras, Orbit, JAX and PyTorch, and writes RESULTS.md.

    make bench                                      # what this commit and machine lack; 40 minutes on 2 cores in all
    make bench FLAGS="--workloads=tiny --replicas=1,2 --only=training"             # a part, once more
    make bench FLAGS="--only=scaling --devices=1,2,4"     # `scaling`, a page of its own: more devices, larger models

Every workload and place is measured in a fresh process of 10 minutes at most, in which the systems take turns, and kept
at once: a run that was stopped goes on. The page is written when it is whole. This process does not import TensorFlow.
Orbit, which needs Keras 2, JAX and PyTorch get environments of their own, `.venv-orbit`, `.venv-jax`, `.venv-torch`.
"""

import functools
import pathlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

from absl import app, flags

from experiments.benchmarks import goals, kept, page, peers, pictures, processes, scaling, with_orbit

WORKLOADS = list(dict.fromkeys(name for name, _ in goals.STEPS))
SYSTEMS = list(page.TITLES)
STARTED = [("tiny", 1), ("lm", 2)]  # workloads and replicas whose start-up is measured
START_ROUNDS = 4
LONGER_TURNS = {"lm": 2, "mlp41m": 5}  # their steps are long
MORE_ROUNDS = {"conv": 3, "lm": 2}  # systems differ by a few percent only
KERAS_FAILS = "fit fails under MultiWorkerMirroredStrategy"
KERAS50_FAILS = "steps_per_execution above 1 crashes under MirroredStrategy"
KERAS50_TAKES_LONG = "50 steps of mlp41m are longer than all turns together"
LOOP_FAILS = "XLA compiles the loop of one device, without convolutions"
SCAN_TAKES_LONG = "a step of conv in a scan takes a quarter of a second on a CPU"
PAGE = pathlib.Path(__file__).with_name("RESULTS.md")

_WORKLOADS = flags.DEFINE_list("workloads", WORKLOADS, "Workloads to measure.")
_REPLICAS = flags.DEFINE_list("replicas", ["1", "2", "4"], "Numbers of replicas to measure.")
_SYSTEMS = flags.DEFINE_list("systems", SYSTEMS, "Systems to measure.")
_ONLY = flags.DEFINE_list("only", list(page.PARTS), "Parts to measure; or `scaling` or `around` alone.")
_ROUNDS = flags.DEFINE_integer("rounds", 5, "Turns per system.", lower_bound=1)
_TURN_SECS = flags.DEFINE_float("turn_secs", 0.4, "Approximate seconds per turn.", lower_bound=0)

Cell = Mapping[str, Any]  # what is measured in one process; then with its results


def measure(cell: Cell) -> dict[str, Any]:
    """Measures a cell in fresh processes, and keeps it."""
    begun = time.monotonic()
    results = measure_start(cell) if cell["part"] == "start" else processes.run_cell(cell, cell["workers"])
    whole = kept.keep({**cell, **results})
    how = f", failed: {whole['failed']}" if "failed" in whole else f", noise {whole['noise']}"
    place = f"{cell['part']}, {cell['workload']}, {cell['place']}"
    print(f"{place}: {time.monotonic() - begun:.0f} s{how}", flush=True)
    return whole


def a_cell(part: str, workload: str, *, replicas: int = 1, workers: int = 0, **others: Any) -> Cell:
    """Returns a cell on so many replicas of a process, or on so many workers with a replica each."""
    count, unit = (workers, "worker") if workers else (replicas, "replica")
    where = {"place": f"{count} {unit}{'s' * (count > 1)}", "replicas": replicas, "workers": workers}
    turns = {"rounds": _ROUNDS.value, "turn_secs": _TURN_SECS.value}
    return {"part": part, "workload": workload, **where, **turns, **others}


def systems(names: Sequence[str], missing: Mapping[str, str]) -> dict[str, Any]:
    """Returns those of some systems that are asked for, and the ones that are left out, with the reason."""
    asked = [name for name in names if name in _SYSTEMS.value]
    reasons = {name: missing.get(name) or why_not(name) for name in asked}
    return {
        "systems": [name for name in asked if not reasons[name]],
        "missing": {name: reason for name, reason in reasons.items() if reason},
    }


@functools.cache
def why_not(name: str) -> str:
    """Returns why a system that needs an environment of its own cannot be measured; empty: it can."""
    try:
        if name == "orbit":
            with_orbit.make_environment()
        elif name in peers.SYSTEMS:
            peers.make_environment(name)
    except RuntimeError as error:
        return str(error)
    return ""


def chosen_turns(workload: str) -> dict[str, float]:
    return {
        "turn_secs": LONGER_TURNS.get(workload, 1) * _TURN_SECS.value,
        "rounds": MORE_ROUNDS.get(workload, 1) * _ROUNDS.value,
    }


def training(workload: str) -> list[Cell]:
    cells = []
    for replicas in map(int, _REPLICAS.value):
        missing = {"keras50": KERAS50_TAKES_LONG} if workload == "mlp41m" else {}
        missing |= {"keras50": KERAS50_FAILS} if replicas > 1 else {}
        missing |= {"distloop_loop": LOOP_FAILS} if replicas > 1 or workload == "conv" else {}
        which = systems(page.TENSORFLOW, missing)
        cells.append(a_cell("training", workload, replicas=replicas, **which, **chosen_turns(workload)))
    return cells


def others(workload: str) -> list[Cell]:
    counts, cells = [n for n in (1, 2) if str(n) in _REPLICAS.value and workload != "mlp41m"], []
    for count in counts:
        missing = {"scan": SCAN_TAKES_LONG} if workload == "conv" else {}
        missing |= {"distloop_loop": LOOP_FAILS} if count > 1 or workload == "conv" else {}
        which = systems(page.PEERS, missing)
        cells.append(a_cell("peers", workload, replicas=count, **which, **chosen_turns(workload)))
    return cells


def workers(workload: str) -> list[Cell]:
    if workload == "mlp41m":
        return []
    missing = {"keras": KERAS_FAILS, "keras50": KERAS_FAILS, "distloop_loop": LOOP_FAILS}
    which = systems(page.TENSORFLOW, missing)
    return [a_cell("workers", workload, workers=2, **which)]


def two_workers(workload: str) -> list[Cell]:
    """Returns one worker, and two workers with the same batch each."""
    which = {"systems": [name for name in ("handloop", "distloop") if name in _SYSTEMS.value]}
    which["turn_secs"] = 2 * _TURN_SECS.value
    counts = (1, 2) if workload in goals.TWO_WORKERS else ()
    return [a_cell("two_workers", workload, workers=count, batches=count, **which) for count in counts]


def monitoring(workload: str) -> list[Cell]:
    # Differences are a few percent, so there are more turns; they are longer because files are written once a second.
    many = {"rounds": 2 * _ROUNDS.value, "turn_secs": max(2.5, _TURN_SECS.value), "alike": 3}
    return [a_cell("monitoring", workload, **many)] if workload == "tiny" else []


def calls(workload: str) -> list[Cell]:
    counts = {"tiny": (1, 2, 4), "conv": (1, 2)}.get(workload, ())
    cells = []
    for replicas in [n for n in counts if str(n) in _REPLICAS.value]:
        which = systems(["keras_jax"] if replicas < 4 else [], {})
        cells.append(a_cell("calls", workload, replicas=replicas, **which))
    return cells


def saves(workload: str) -> list[Cell]:
    return [a_cell("saves", workload)] if workload == "mlp41m" else []


def starts(workload: str) -> list[Cell]:
    counts = [n for name, n in STARTED if name == workload and str(n) in _REPLICAS.value]
    started = [name for name in page.TENSORFLOW if name not in ("bare", "keras50", "distloop_loop")]
    which = systems(started, {}) if counts else {}
    return [a_cell("start", workload, replicas=n, **which) for n in counts]


def measure_start(cell: Cell) -> dict[str, Any]:
    """Measures the seconds from the start of a process to its first step, and its peak memory."""
    # The first start, after which modules are compiled, does not count.
    results = {name: [processes.start(cell, name) for _ in range(1 + START_ROUNDS)][1:] for name in cell["systems"]}
    if failed := [name for name, numbers in results.items() if None in numbers]:
        return {"failed": ", ".join(failed)}
    return {
        "first step": {name: [secs for secs, _ in numbers] for name, numbers in results.items()},
        "peak memory": {name: [megabytes for _, megabytes in numbers] for name, numbers in results.items()},
    }


CELLS = {
    "training": training,
    "peers": others,
    "workers": workers,
    "two_workers": two_workers,
    "monitoring": monitoring,
    "calls": calls,
    "saves": saves,
    "start": starts,
}


def main(_):
    if _ONLY.value == ["scaling"]:
        scaling.main(_ROUNDS.value, _TURN_SECS.value)
        return
    if _ONLY.value == ["around"]:
        for name in _WORKLOADS.value:
            print(page.around_step(name, processes.run_cell(a_cell("around", name))), flush=True)
        return
    for flag, allowed in ((_WORKLOADS, WORKLOADS), (_ONLY, CELLS), (_SYSTEMS, SYSTEMS)):
        if not set(flag.value) <= set(allowed):
            raise app.UsageError(f"--{flag.name} is {','.join(flag.value)}; choose from {','.join(allowed)}.")
    is_part = any(flag.present for flag in (_WORKLOADS, _REPLICAS, _ONLY, _SYSTEMS, _ROUNDS, _TURN_SECS))
    asked = [cell for part in _ONLY.value for name in _WORKLOADS.value for cell in CELLS[part](name)]
    known = [None] * len(asked) if is_part else kept.find(asked)
    measured = [cell or measure(spec) for spec, cell in zip(asked, known, strict=True)]
    text = page.render(measured, kept.NOISY)
    print("\n" + text)
    if not is_part:
        PAGE.write_text(text, encoding="utf-8")
        pictures.write(PAGE)


if __name__ == "__main__":
    app.run(main)

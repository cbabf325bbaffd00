"""Measures distloop next to loops written by hand, Keras and Orbit, and writes RESULTS.md.

    make bench                                                                # everything; half an hour on 2 cores
    make bench FLAGS="--workloads=tiny --replicas=1,2 --only=training"        # a part, printed

Every workload and place is measured in a fresh process, in which the systems take turns. This process does not import
TensorFlow. Orbit, which needs Keras 2, gets its own environment, `.venv-orbit`.
"""

import datetime
import functools
import importlib.metadata
import os
import pathlib
import platform
import time

from absl import app, flags

from experiments.benchmarks import goals, page, pictures, processes, with_orbit

WORKLOADS = list(dict.fromkeys(name for name, _ in goals.STEPS))
SYSTEMS = list(page.TITLES)
STARTED = [("tiny", 1), ("lm", 2)]  # workloads and replicas whose start-up is measured
START_ROUNDS = 4
LONGER_TURNS = {"lm": 2, "mlp41m": 5}  # their steps are long
MORE_ROUNDS = {"conv": 3, "lm": 2}  # systems differ by a few percent only
KERAS_FAILS = "fit fails under MultiWorkerMirroredStrategy"
KERAS50_FAILS = "steps_per_execution above 1 crashes under MirroredStrategy"
KERAS50_TAKES_LONG = "50 steps of mlp41m are longer than all turns together"
PAGE = pathlib.Path(__file__).with_name("RESULTS.md")

_WORKLOADS = flags.DEFINE_list("workloads", WORKLOADS, "Workloads to measure.")
_REPLICAS = flags.DEFINE_list("replicas", ["1", "2", "4"], "Numbers of replicas to measure.")
_SYSTEMS = flags.DEFINE_list("systems", SYSTEMS, "Systems to measure.")
_ONLY = flags.DEFINE_list("only", list(page.PARTS), "Parts to measure.")
_ROUNDS = flags.DEFINE_integer("rounds", 5, "Turns per system.", lower_bound=1)
_TURN_SECS = flags.DEFINE_float("turn_secs", 0.4, "Approximate seconds per turn.", lower_bound=0)
_WRITE = flags.DEFINE_bool("write", False, f"Write {PAGE.name} even if only a part is measured.")


def describe() -> str:
    """Returns a line with the date, versions and machine of the measurements."""
    versions = [f"{name} {importlib.metadata.version(name)}" for name in ("tensorflow", "keras", "numpy")]
    return (
        f"{datetime.date.today()}, Python {platform.python_version()}, {', '.join(versions)}, {os.cpu_count()} CPU "
        f"cores, no GPU; {_ROUNDS.value} rounds or more, a turn about {_TURN_SECS.value:g} s, longer for long steps."
    )


def measure(workers: int = 0, **spec: object) -> dict:
    """Measures a cell in a fresh process and returns it with its results."""
    begun = time.monotonic()
    spec = {"rounds": _ROUNDS.value, "turn_secs": _TURN_SECS.value, **spec}
    return say({**spec, **processes.run_cell(spec, workers)}, begun)


def say(cell: dict, begun: float) -> dict:
    """Prints that a cell is done, and returns it."""
    how = f", failed: {cell['failed']}" if "failed" in cell else ""
    print(f"{cell['part']}, {cell['workload']}, {cell['place']}: {time.monotonic() - begun:.0f} s{how}", flush=True)
    return cell


def place(replicas: int) -> dict:
    return {"place": f"{replicas} replica{'s' * (replicas > 1)}", "replicas": replicas}


def systems(missing: dict[str, str]) -> dict:
    """Returns the systems to measure, and the requested ones that are left out, with the reason."""
    if reason := why_no_orbit():
        missing = {**missing, "orbit": reason}
    return {
        "systems": [name for name in SYSTEMS if name in _SYSTEMS.value and name not in missing],
        "missing": {name: reason for name, reason in missing.items() if name in _SYSTEMS.value},
    }


@functools.cache
def why_no_orbit() -> str:
    if "orbit" not in _SYSTEMS.value:
        return ""
    try:
        with_orbit.make_environment()
    except RuntimeError as error:
        return str(error)
    return ""


def measure_training(workload: str) -> list[dict]:
    cells = []
    for replicas in map(int, _REPLICAS.value):
        missing = {"keras50": KERAS50_TAKES_LONG} if workload == "mlp41m" else {}
        missing |= {"keras50": KERAS50_FAILS} if replicas > 1 else {}
        turns = {
            "turn_secs": LONGER_TURNS.get(workload, 1) * _TURN_SECS.value,
            "rounds": MORE_ROUNDS.get(workload, 1) * _ROUNDS.value,
        }
        cells.append(measure(part="training", workload=workload, **place(replicas), **systems(missing), **turns))
    return cells


def measure_workers(workload: str) -> list[dict]:
    if workload == "mlp41m":
        return []
    chosen = systems({"keras": KERAS_FAILS, "keras50": KERAS_FAILS})
    return [measure(2, part="workers", workload=workload, replicas=1, place="2 workers", **chosen)]


def measure_scaling(workload: str) -> list[dict]:
    """Measures one worker, and two workers with the same batch each."""
    chosen = {"systems": [name for name in ("handloop", "distloop") if name in _SYSTEMS.value]}
    cell = {"part": "scaling", "workload": workload, "replicas": 1, "turn_secs": 2 * _TURN_SECS.value, **chosen}
    places = {1: "1 worker", 2: "2 workers"} if workload in goals.SCALING else {}
    return [measure(count, **cell, place=place, batches=count) for count, place in places.items()]


def measure_monitoring(workload: str) -> list[dict]:
    # Differences are a few percent, so there are more turns; they are longer because files are written once a second.
    many = {"rounds": 2 * _ROUNDS.value, "turn_secs": max(2.5, _TURN_SECS.value), "alike": 3}
    return [measure(part="monitoring", workload=workload, **place(1), **many)] if workload == "tiny" else []


def measure_calls(workload: str) -> list[dict]:
    counts = {"tiny": (1, 2, 4), "conv": (1, 2)}.get(workload, ())
    return [measure(part="calls", workload=workload, **place(n)) for n in counts if str(n) in _REPLICAS.value]


def measure_saves(workload: str) -> list[dict]:
    return [measure(part="saves", workload=workload, **place(1))] if workload == "mlp41m" else []


def measure_start(workload: str) -> list[dict]:
    """Measures the seconds from the start of a process to its first step, and its peak memory."""
    cells = []
    for replicas in [n for name, n in STARTED if name == workload and str(n) in _REPLICAS.value]:
        begun = time.monotonic()
        cell = {"part": "start", "workload": workload, **place(replicas), **systems({})}
        names = [name for name in cell["systems"] if name not in ("bare", "keras50")]
        results = {name: [processes.start(cell, name) for _ in range(START_ROUNDS)] for name in names}
        if failed := [name for name, numbers in results.items() if None in numbers]:
            cell["failed"] = ", ".join(failed)
        else:
            cell["first step"] = {name: [secs for secs, _ in numbers] for name, numbers in results.items()}
            cell["peak memory"] = {name: [megabytes for _, megabytes in numbers] for name, numbers in results.items()}
        cells.append(say(cell, begun))
    return cells


MEASURE = {
    "training": measure_training,
    "workers": measure_workers,
    "scaling": measure_scaling,
    "monitoring": measure_monitoring,
    "calls": measure_calls,
    "saves": measure_saves,
    "start": measure_start,
}


def main(_):
    for flag, allowed in ((_WORKLOADS, WORKLOADS), (_ONLY, MEASURE), (_SYSTEMS, SYSTEMS)):
        if not set(flag.value) <= set(allowed):
            raise app.UsageError(f"--{flag.name} is {','.join(flag.value)}; choose from {','.join(allowed)}.")
    cells = {part: [cell for name in _WORKLOADS.value for cell in MEASURE[part](name)] for part in _ONLY.value}
    text = page.render({"about": describe(), **cells})
    print("\n" + text)
    if _WRITE.value or not any(flag.present for flag in (_WORKLOADS, _REPLICAS, _ONLY, _SYSTEMS, _ROUNDS, _TURN_SECS)):
        PAGE.write_text(text, encoding="utf-8")
        pictures.write(PAGE)


if __name__ == "__main__":
    app.run(main)

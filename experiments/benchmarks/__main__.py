"""Measures distloop next to loops written by hand, Keras and Orbit, and writes RESULTS.md.

    make bench                                                                # everything; under 15 minutes on 2 cores
    make bench FLAGS="--workloads=tiny --replicas=1,2 --only=training"        # a part, printed

Every workload and place is measured in a fresh process, in which the systems take turns. This one knows no TensorFlow.
"""

import datetime
import functools
import importlib.metadata
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

from absl import app, flags

from experiments.benchmarks import goals, page, with_orbit

WORKLOADS = list(dict.fromkeys(name for name, _ in goals.STEPS))
SYSTEMS = ["bare", "handloop", "hand", "orbit", "keras", "keras50", "distloop"]
PAGE = pathlib.Path(__file__).with_name("RESULTS.md")
ROOT = pathlib.Path(__file__).resolve().parents[2]
WITHOUT_GPU = {"CUDA_VISIBLE_DEVICES": "-1"}
ONE_THREAD = {"TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "1"}
START_ROUNDS = 2

_WORKLOADS = flags.DEFINE_list("workloads", WORKLOADS, "Which models.")
_REPLICAS = flags.DEFINE_list("replicas", ["1", "2", "4"], "Numbers of replicas.")
_SYSTEMS = flags.DEFINE_list("systems", SYSTEMS, "Which systems.")
_ROUNDS = flags.DEFINE_integer("rounds", 5, "Turns each system gets.", lower_bound=1)
_TURN_SECS = flags.DEFINE_float("turn_secs", 0.4, "How long a turn lasts, about.", lower_bound=0)
_WRITE = flags.DEFINE_bool("write", False, f"Write {PAGE.name} though only a part is measured.")


def describe() -> str:
    versions = [f"{name} {importlib.metadata.version(name)}" for name in ("tensorflow", "keras", "numpy")]
    python = ".".join(map(str, sys.version_info[:3]))
    return (
        f"{datetime.date.today()}, Python {python}, {', '.join(versions)}, {os.cpu_count()} CPU cores, no GPU; "
        f"{_ROUNDS.value} rounds, a turn about {_TURN_SECS.value:g} s."
    )


def run_cell(*, workers: int = 0, **spec: object) -> dict:
    """Measures a cell in a fresh process, or in one for each worker; returns the cell with what was found."""
    start = time.monotonic()
    spec |= {"rounds": _ROUNDS.value, "turn_secs": _TURN_SECS.value}
    launcher = ["-m", "distloop.launch", f"--workers={workers}"] if workers else []
    environment = {**os.environ, **WITHOUT_GPU, **(ONE_THREAD if workers else {})}
    with tempfile.TemporaryDirectory() as directory:
        path = os.path.join(directory, "result.json")
        command = [sys.executable, *launcher, "-m", "experiments.benchmarks.cell", json.dumps(spec), path]
        process = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
        if process.returncode:
            raise RuntimeError(f"{spec} ended with code {process.returncode}:\n{process.stderr[-3000:]}")
        with open(path, encoding="utf-8") as file:
            spec |= json.load(file)
    say(spec, start)
    return spec


def say(cell: dict, start: float) -> None:
    """Says that a cell is measured, and how long it took."""
    print(f"{cell['part']}, {cell['workload']}, {cell['place']}: {time.monotonic() - start:.0f} s", flush=True)


def measure_training() -> list[dict]:
    return [
        run_cell(part="training", workload=name, **place(replicas), **systems(replicas))
        for name in _WORKLOADS.value
        for replicas in map(int, _REPLICAS.value)
    ]


def measure_workers() -> list[dict]:
    """Measures two workers, and where scaling is asked for one with the batch that each of the two has."""
    found = []
    chosen = [name for name in _SYSTEMS.value if name in ("bare", "handloop", "hand", "distloop")]
    for name in _WORKLOADS.value:
        if name == "mlp41m":
            continue
        for workers in (1, 2) if name in goals.SCALING else (2,):
            cell = {"place": f"{workers} worker{'s' * (workers > 1)}", "replicas": 1, "batch_parts": 2 // workers}
            found.append(run_cell(workers=workers, part="workers", workload=name, systems=chosen, **cell))
    return found


def measure_calls() -> list[dict]:
    return [
        run_cell(part="calls", workload=name, **place(replicas))
        for name in _WORKLOADS.value
        for replicas in map(int, _REPLICAS.value)
        if name == "tiny" or (name == "conv" and replicas < 4)
    ]


def measure_saves() -> list[dict]:
    return [run_cell(part="saves", workload="mlp41m", **place(1))] if "mlp41m" in _WORKLOADS.value else []


def measure_start() -> list[dict]:
    """Measures processes from their start to the first step, and their peak memory."""
    cells = []
    for name, replicas in (("tiny", 1), ("lm", 2)):
        if name not in _WORKLOADS.value or str(replicas) not in _REPLICAS.value:
            continue
        start = time.monotonic()
        cell = {"part": "start", "workload": name, **place(replicas), **systems(replicas)}
        chosen = [system for system in cell["systems"] if system not in ("bare", "keras50")]
        for kind in ("first step", "peak memory"):
            cell[kind] = {system: [] for system in chosen}
        for _ in range(START_ROUNDS):
            for system in chosen:
                secs, megabytes = start_process(cell, system)
                cell["first step"][system].append(secs)
                cell["peak memory"][system].append(megabytes)
        say(cell, start)
        cells.append(cell)
    return cells


def start_process(cell: dict, system: str) -> tuple[float, float]:
    """Starts a process that does one step; returns seconds until it has, and the peak of its memory in MB."""
    with tempfile.TemporaryDirectory() as directory:
        spec = json.dumps({**cell, "systems": [system]})
        command = [sys.executable, "-m", "experiments.benchmarks.cell", spec, os.path.join(directory, "result.json")]
        environment = {**os.environ, **WITHOUT_GPU}
        if system == "orbit":
            command = with_orbit.command(cell["workload"], cell["replicas"], directory)
            environment |= with_orbit.VARIABLES
        pipe = subprocess.PIPE
        start = time.perf_counter()
        process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True, cwd=ROOT, env=environment
        )
        process.stdin.write("1\n")  # Orbit asks how many steps
        process.stdin.close()
        answer = process.stdout.readline()
        secs = time.perf_counter() - start
        _, process.returncode, usage = os.wait4(process.pid, 0)
        if not answer or process.returncode:
            raise RuntimeError(f"{system} ended at its start, with {cell['workload']}")
    return secs, usage.ru_maxrss / 1024


def place(replicas: int) -> dict:
    return {"place": f"{replicas} replica{'s' * (replicas > 1)}", "replicas": replicas}


def systems(replicas: int) -> dict:
    """Tells which systems can run in a place, and why others cannot."""
    missing = {"keras50": "steps_per_execution above 1 crashes under MirroredStrategy"} if replicas > 1 else {}
    if reason := why_no_orbit():
        missing["orbit"] = reason
    return {
        "systems": [name for name in _SYSTEMS.value if name not in missing],
        "missing": {name: reason for name, reason in missing.items() if name in _SYSTEMS.value},
    }


@functools.cache
def why_no_orbit() -> str:
    try:
        with_orbit.make_environment()
    except RuntimeError as error:
        return str(error)
    return ""


MEASURE = {
    "training": measure_training,
    "workers": measure_workers,
    "calls": measure_calls,
    "saves": measure_saves,
    "start": measure_start,
}
_ONLY = flags.DEFINE_list("only", list(MEASURE), "Which parts.")


def main(_):
    for flag, allowed in ((_WORKLOADS, WORKLOADS), (_ONLY, MEASURE), (_SYSTEMS, SYSTEMS)):
        if not set(flag.value) <= set(allowed):
            raise app.UsageError(f"--{flag.name} is {','.join(flag.value)}; choose from {','.join(allowed)}.")
    text = page.render({"about": describe(), **{part: MEASURE[part]() for part in _ONLY.value}})
    print("\n" + text)
    if _WRITE.value or not any(flag.present for flag in (_WORKLOADS, _REPLICAS, _ONLY, _SYSTEMS)):
        PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    app.run(main)

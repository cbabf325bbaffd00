"""Measures distloop next to loops written by hand, Keras and Orbit, and writes RESULTS.md.

    make bench                                                                # everything; under 15 minutes on 2 cores
    make bench FLAGS="--workloads=tiny --replicas=1,2 --only=training"        # a part, printed

Every workload and place is measured in a fresh process, in which the systems take turns.
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

from experiments.benchmarks import page, with_orbit

PARTS = ["training"]
WORKLOADS = ["tiny", "deep", "conv", "lm", "mlp41m"]
SYSTEMS = ["bare", "handloop", "hand", "orbit", "keras", "keras50", "distloop"]
PAGE = pathlib.Path(__file__).with_name("RESULTS.md")

_WORKLOADS = flags.DEFINE_list("workloads", WORKLOADS, "Which models.")
_REPLICAS = flags.DEFINE_list("replicas", ["1", "2", "4"], "Numbers of replicas.")
_ONLY = flags.DEFINE_list("only", PARTS, "Which parts.")
_SYSTEMS = flags.DEFINE_list("systems", SYSTEMS, "Which systems.")
_ROUNDS = flags.DEFINE_integer("rounds", 5, "Turns each system gets.", lower_bound=1)
_TURN_SECS = flags.DEFINE_float("turn_secs", 0.7, "How long a turn lasts, about.", lower_bound=0)
_WRITE = flags.DEFINE_bool("write", False, f"Write {PAGE.name} though only a part is measured.")


def describe() -> str:
    versions = [f"{name} {importlib.metadata.version(name)}" for name in ("tensorflow", "keras", "numpy")]
    python = ".".join(map(str, sys.version_info[:3]))
    return (
        f"{datetime.date.today()}, Python {python}, {', '.join(versions)}, {os.cpu_count()} CPU cores, no GPU; "
        f"{_ROUNDS.value} rounds, a turn about {_TURN_SECS.value:g} s."
    )


def run_cell(**spec: object) -> dict:
    """Measures a cell in a fresh process; returns the cell with what was found."""
    start = time.monotonic()
    spec |= {"rounds": _ROUNDS.value, "turn_secs": _TURN_SECS.value}
    with tempfile.TemporaryDirectory() as directory:
        path = os.path.join(directory, "result.json")
        command = [sys.executable, "-m", "experiments.benchmarks.cell", json.dumps(spec), path]
        process = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        if process.returncode:
            raise RuntimeError(f"{spec} ended with code {process.returncode}:\n{process.stderr[-3000:]}")
        with open(path, encoding="utf-8") as file:
            spec |= json.load(file)
    print(f"{spec['part']}, {spec['workload']}, {spec['place']}: {time.monotonic() - start:.0f} s", flush=True)
    return spec


def measure_training() -> list[dict]:
    return [
        run_cell(part="training", workload=workload, place=name_place(replicas), replicas=replicas, **systems(replicas))
        for workload in _WORKLOADS.value
        for replicas in map(int, _REPLICAS.value)
    ]


def name_place(replicas: int) -> str:
    return f"{replicas} replica{'s' * (replicas > 1)}"


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


def main(_):
    for flag, allowed in ((_WORKLOADS, WORKLOADS), (_ONLY, PARTS), (_SYSTEMS, SYSTEMS)):
        if not set(flag.value) <= set(allowed):
            raise app.UsageError(f"--{flag.name} is {','.join(flag.value)}; choose from {','.join(allowed)}.")
    measure = {"training": measure_training}
    results = {"about": describe(), **{part: measure[part]() for part in _ONLY.value}}
    text = page.render(results)
    print("\n" + text)
    if _WRITE.value or not any(flag.present for flag in (_WORKLOADS, _REPLICAS, _ONLY, _SYSTEMS)):
        PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    app.run(main)

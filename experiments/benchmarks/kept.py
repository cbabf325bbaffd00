"""Measured cells: one a line of `runs/benchmarks.jsonl`, with its date, commit and machine, so that parts add up.

Cells of one origin, which is a commit of what is measured and a machine with its packages, make a page together.
"""

import datetime
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.benchmarks.other_process import ROOT

PATH = ROOT / "runs" / "benchmarks.jsonl"
NOISY = 0.1  # spread of the base system's times, above which the page calls a cell noisy
BASES = {
    "evaluate": "hand",
    "save": "manager",
    "first step": "hand",
}  # kinds of times -> the system; else the first one


def origin() -> dict[str, str]:
    """Returns the commit that last changed what is measured, and the machine with its packages."""
    git = ["git", "-C", str(ROOT)]
    modules = ("curves", "goals", "growth", "kept", "page", "pictures")
    shown_by = [f":!experiments/benchmarks/{name}.py" for name in modules]
    measured = ["--", "distloop", "experiments/benchmarks/*.py", *shown_by]
    commit = subprocess.check_output([*git, "log", "-1", "--format=%h", *measured], text=True).strip()
    changed = subprocess.run([*git, "diff", "--quiet", "HEAD", *measured]).returncode
    versions = [f"{name} {importlib.metadata.version(name)}" for name in ("tensorflow", "keras", "numpy")]
    machine = f"Python {platform.python_version()}, {', '.join(versions)}, {os.cpu_count()} CPU cores, no GPU"
    return {"commit": commit + (" with changes" if changed else ""), "machine": machine}


def keep(cell: Mapping[str, Any]) -> dict[str, Any]:
    """Appends a cell to the file with its date, origin and noise, and returns it."""
    whole = {**cell, **origin(), "date": str(datetime.date.today()), "noise": noise(cell)}
    PATH.parent.mkdir(exist_ok=True)
    with PATH.open("a", encoding="utf-8") as file:
        file.write(json.dumps(whole) + "\n")
    return whole


def find(cells: Sequence[Mapping[str, Any]]) -> list[dict[str, Any] | None]:
    """Returns the newest measurement of each cell that has the present origin and did not fail; else None."""
    lines = PATH.read_text(encoding="utf-8").splitlines() if PATH.exists() else []
    rows, here = [json.loads(line) for line in reversed(lines)], origin()
    rows = [row for row in rows if "failed" not in row and _has(row, here)]
    return [next((row for row in rows if _has(row, cell)), None) for cell in cells]


def noise(cell: Mapping[str, Any]) -> float | None:
    """Returns how far the times of the system that others are compared with lie apart, as a fraction of their median.

    Half of the times lie within this range (the distance between their quartiles); None: there are fewer than three.
    """
    kind = next((kind for kind in ("times", *BASES) if kind in cell), None)
    times = cell[kind] if kind else {}
    secs = times[BASES.get(kind, next(iter(times)))] if times else []
    if len(secs) < 3:
        return None
    low, median, high = statistics.quantiles(secs, n=4, method="inclusive")
    return round((high - low) / median, 3)


def _has(row: Mapping[str, Any], values: Mapping[str, Any]) -> bool:
    return all(row.get(name) == value for name, value in values.items())

"""Seeds: runs that differ in nothing but `seed`, as one line for each metric; two such groups compared by seed.

    for line in summarize(runs):
        line["metric"], line["group"], line["mean"], line["deviation"], line["number"]

Of a metric whose name says what is better the best value of each run counts, of others the last one.
"""

import math
from collections.abc import Sequence
from typing import Any

from distloop.reports.runs import Run, by_metric, different_settings


def summarize(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Returns a line for each metric and group, and for the differences of two groups; none if no group has two runs.

    `deviation` is of the sample, divided by n - 1; None of one value. A difference is that of two runs with the
    same seed, the second group's minus the first's; of runs of a group with the same seed the last one counts.
    """
    groups: dict[tuple[str, ...], list[Run]] = {}
    names = [name for name in different_settings(runs) if name != "seed"]
    for run in runs:
        groups.setdefault(tuple(f"{name}={run.settings.get(name)}" for name in names), []).append(run)
    if len(groups) == len(runs):
        return []
    lines = []
    for metric, measured in by_metric(runs):
        values = {run.name: curve.best[0] if curve.best else curve.last for run, curve in measured}
        kind = "best" if measured[0][1].best else "last"
        for settings, group in groups.items():
            numbers = [values[run.name] for run in group if run.name in values]
            lines.append(_line(metric, ", ".join(settings) or "all runs", kind, numbers))
        if len(groups) == 2:
            first, second = ({run.settings.get("seed"): values.get(run.name) for run in of} for of in groups.values())
            pairs = [(a, second.get(seed)) for seed, a in first.items()]
            numbers = [b - a for a, b in pairs if a is not None and b is not None]
            lines.append(_line(metric, "second minus first, by seed", kind, numbers))
    return [line for line in lines if line["number"]]


def _line(metric: str, group: str, kind: str, numbers: Sequence[float]) -> dict[str, Any]:
    number, mean = len(numbers), sum(numbers) / len(numbers) if numbers else math.nan
    deviation = math.dist(numbers, [mean] * number) / math.sqrt(number - 1) if number > 1 else None
    return {"metric": metric, "group": group, "value": kind, "mean": mean, "deviation": deviation, "number": number}

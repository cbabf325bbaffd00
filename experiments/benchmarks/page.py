"""The page that a run writes: a table for each question, Markdown."""

import statistics
from collections.abc import Mapping, Sequence

from experiments.benchmarks import goals, turns

# What a table calls a system.
TITLES = {
    "bare": "bare",
    "handloop": "handloop",
    "hand": "a call a step",
    "orbit": "Orbit",
    "keras": "Keras",
    "keras50": "Keras, 50 steps an execution",
    "distloop": "**distloop**",
}
BASES = ("bare", "handloop")  # what steps are compared with
NONE = "-"

Times = Mapping[str, Sequence[float]]  # seconds of each round, by system


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def ratio(number: float | None) -> str:
    return NONE if number is None else f"{number:.2f}"


def verdict(number: float | None, goal: goals.Goal | None) -> str:
    """Says how far a ratio came, as it is shown: rounded."""
    if number is None or goal is None:
        return NONE
    number = round(number, 2)
    return "stretch" if number <= goal.stretch else "goal" if number <= goal.goal else "missed"


def pair(texts: Sequence[str]) -> str:
    """Joins what there is to say of bare and of handloop."""
    return NONE if set(texts) == {NONE} else " / ".join(texts)


def steps_row(cell: Mapping, systems: Sequence[str]) -> list[str]:
    """Writes a cell's row: ratios to bare / to handloop, and the goals beside them."""
    times: Times = cell["times"]
    own = [goals.STEPS.get((cell["workload"], cell["place"]), {}).get(base) for base in BASES]
    ratios = {name: [turns.median_ratio(times, name, base) for base in BASES] for name in [*systems, "distloop"]}
    return [
        cell["workload"],
        cell["place"],
        f"{statistics.median(times['bare']) * 1e6:,.0f}" if "bare" in times else NONE,
        *[pair([ratio(number) for number in ratios[name]]) for name in systems],
        pair([ratio(goal and goal.goal) for goal in own]),
        pair([ratio(goal and goal.stretch) for goal in own]),
        pair([verdict(number, goal) for number, goal in zip(ratios["distloop"], own, strict=True)]),
    ]


def steps_table(cells: Sequence[Mapping]) -> str:
    systems = [name for name in TITLES if name != "bare" and any(name in cell["times"] for cell in cells)]
    header = ["workload", "place", "bare, us", *[TITLES[name] for name in systems], "goal", "stretch", "reached"]
    return table(header, [steps_row(cell, systems) for cell in cells])


def notes(cells: Sequence[Mapping]) -> str:
    """Lists, once each, why a system has no figure."""
    found = {f"{TITLES[name]}: {why}" for cell in cells for name, why in cell.get("missing", {}).items()}
    return "".join(f"- {note}\n" for note in sorted(found))


def render(results: Mapping) -> str:
    """Writes the page of a run's results."""
    parts = [
        "# How fast distloop is\n",
        f"Written by `make bench`; do not edit. {results['about']}\n",
    ]
    if cells := results.get("training"):
        parts += ["## Training step\n", STEPS_TEXT, steps_table(cells), notes(cells)]
    return "\n".join(part for part in parts if part)


STEPS_TEXT = """\
Steady state, everything on: loss, accuracy, TensorBoard, metrics.jsonl and console each 100 steps, and the check that
numbers are finite. Each figure is the median over the rounds of the time of a step over that of *bare* / of *handloop*
in the same round; below 1 is faster. *bare* is a compiled loop over constant data, *handloop* the usual compiled loop
over `experimental_distribute_dataset`; both by hand, with loss and accuracy.
"""

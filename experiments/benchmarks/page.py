"""RESULTS.md: renders the page, one table for each question."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.benchmarks import goals, turns

# System -> its name in the tables.
TITLES = {
    "bare": "bare",
    "handloop": "handloop",
    "hand": "a call a step",
    "orbit": "Orbit",
    "keras": "Keras",
    "keras50": "Keras, 50 steps an execution",
    "keras_jax": "Keras on JAX",
    "keras_jax50": "Keras on JAX, 50 steps an execution",
    "jax": "JAX, a call a step",
    "scan": "JAX, a scan of 50 steps",
    "torch": "PyTorch",
    "torch_compiled": "PyTorch, compiled",
    "lightning": "Lightning",
    "distloop_loop": "distloop, loop compiled by XLA",
    "distloop": "**distloop**",
}
PAIR = ("distloop", "keras")
TENSORFLOW = ("bare", "handloop", "hand", "orbit", "keras", "keras50", "distloop_loop", "distloop")
PEERS = tuple(name for name in TITLES if name not in ("handloop", "hand", "keras50"))
PARTS = ("training", "peers", "workers", "two_workers", "monitoring", "calls", "saves", "start")
BASES = ("bare", "handloop")  # systems that steps are compared with
NONE = "-"

Times = Mapping[str, Sequence[float]]  # seconds of each round, by system


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def around_step(workload: str, cell: Mapping[str, Any]) -> str:
    """Returns the least CPU time of each system of `around_step`, and what is more than in the one before."""
    if "failed" in cell:
        return f"{workload}: {cell['failed']}"
    least = {system: 1e6 * min(times) for system, times in cell["times"].items()}
    rows, systems = [], sorted(least, key=lambda system: system.startswith("fit"))
    for before, system in zip([systems[0], *systems], systems, strict=False):
        numbers = [f"{least[system]:.1f}", f"{least[system] - least[before]:+.1f}"]
        rows.append([system, *numbers, cell["buys"].get(system.removeprefix("by hand, "), "")])
    return f"\n{workload}\n\n" + table(["", "CPU us a step", "more", "what it buys"], rows)


def ratio(number: float | None) -> str:
    return NONE if number is None else f"{number:.2f}"


def verdict(number: float | None, goal: goals.Goal | None) -> str:
    """Returns whether a ratio, rounded as in the table, reaches its goal, its stretch goal or neither."""
    if number is None or goal is None:
        return NONE
    number = round(number, 2)
    return "stretch" if number <= goal.stretch < goal.goal else _met(number <= goal.goal)


def pair(texts: Sequence[str]) -> str:
    """Joins the texts about bare and handloop."""
    return NONE if set(texts) == {NONE} else " / ".join(texts)


def steps_row(cell: Mapping, systems: Sequence[str]) -> list[str]:
    """Returns a cell's row: ratios to bare / to handloop, and their goals."""
    times: Times = cell["times"]
    targets = [goals.STEPS.get((cell["workload"], cell["place"]), {}).get(base) for base in BASES]
    ratios = {name: [turns.median_ratio(times, name, base) for base in BASES] for name in [*systems, "distloop"]}
    return [
        cell["workload"],
        cell["place"],
        f"{statistics.median(times['bare']) * 1e6:,.0f}" if "bare" in times else NONE,
        *[pair([ratio(number) for number in ratios[name]]) for name in systems],
        pair([ratio(goal and goal.goal) for goal in targets]),
        pair([ratio(goal and goal.stretch) for goal in targets]),
        pair([verdict(number, goal) for number, goal in zip(ratios["distloop"], targets, strict=True)]),
    ]


def steps_table(cells: Sequence[Mapping]) -> str:
    systems = [name for name in TITLES if name != "bare" and any(name in cell["times"] for cell in cells)]
    header = ["workload", "place", "bare, us", *[TITLES[name] for name in systems], "goal", "stretch", "reached"]
    return table(header, [steps_row(cell, systems) for cell in cells])


def peers_table(cells: Sequence[Mapping]) -> str:
    """Returns the table of the time of a step of other frameworks over that of distloop."""
    systems = [name for name in PEERS if name != "distloop" and any(name in cell["times"] for cell in cells)]
    rows = []
    for cell in cells:
        times: Times = cell["times"]
        ratios = [ratio(turns.median_ratio(times, name, "distloop")) for name in systems]
        rows.append([cell["workload"], cell["place"], f"{statistics.median(times['distloop']) * 1e6:,.0f}", *ratios])
    return table(["workload", "place", "**distloop**, us", *[TITLES[name] for name in systems]], rows)


def monitoring_table(cells: Sequence[Mapping]) -> str:
    """Returns the table of monitoring costs: a step over one with less monitoring."""
    rows = []
    for cell in cells:
        for name, (base, target) in goals.MONITORING.items():
            median = turns.median_ratio(cell["times"], name, base)
            reached = NONE if median is None else _met(round(median, 2) <= target)
            rows.append([cell["workload"], cell["place"], name, base, ratio(median), ratio(target), reached])
    return table(["workload", "place", "monitoring", "against", "ratio", "goal", "reached"], rows)


def notes(cells: Sequence[Mapping]) -> str:
    """Returns the reasons why systems have no figure, once each."""
    reasons = {f"{TITLES[name]}: {why}" for cell in cells for name, why in cell.get("missing", {}).items()}
    return "".join(f"- {note}\n" for note in sorted(reasons))


def noise(cells: Sequence[Mapping], least: float) -> str:
    """Returns which cells of a table were noisy."""
    noisy = [cell for cell in cells if (cell.get("noise") or 0) >= least]
    named = ", ".join(f"{cell['workload']} on {cell['place']} {cell['noise']:.0%}" for cell in noisy)
    what = "Noisy (the range of half of the times of the system that others are compared with)"
    return f"{what}: {named}.\n" if noisy else ""


def about(cells: Sequence[Mapping]) -> str:
    """Returns a sentence about when, at which commit, on what and how the cells were measured."""
    dates = sorted({cell["date"] for cell in cells})
    days = " to ".join(dict.fromkeys((dates[0], dates[-1])))
    (commit,), (machine,) = ({cell[name] for cell in cells} for name in ("commit", "machine"))
    rounds, secs = (min(cell[name] for cell in cells) for name in ("rounds", "turn_secs"))
    return (
        f"{days}, commit {commit}, {machine}; {rounds} rounds or more, a turn about {secs:g} s, longer for long steps."
    )


def speeds_table(cells: Sequence[Mapping], kind: str, targets: Mapping[tuple[str, str], float]) -> str:
    """Returns the table of evaluations or predictions: examples per second, and distloop's ratios."""
    systems = [name for name in TITLES if any(name in cell[kind] for cell in cells)]
    others = [name for name in systems if name != "distloop"]
    rows = []
    for cell in cells:
        times: Times = cell[kind]
        target = targets.get((cell["workload"], cell["place"]))
        speed = {name: goals.EXAMPLES / statistics.median(secs) for name, secs in times.items()}
        rows.append(
            [cell["workload"], cell["place"]]
            + [f"{speed[name]:,.0f}" if name in speed else NONE for name in systems]
            + [ratio(turns.median_ratio(times, name, "distloop")) for name in others]
            + [NONE if target is None else f"{target:,}"]
            + [NONE if target is None else _met(speed["distloop"] >= target)]
        )
    faster = [f"times {TITLES[name]}" for name in others]
    return table(["workload", "place", *[TITLES[name] for name in systems], *faster, "goal", "reached"], rows)


def beyond_table(cells: Sequence[Mapping]) -> str:
    """Returns the table of a call's overhead, in milliseconds."""
    rows = []
    for cell in cells:
        target = goals.BEYOND_SECS[cell["place"]]
        secs = [statistics.median(cell[f"beyond {kind}"][name]) for kind in ("fit", "evaluate") for name in PAIR]
        overheads = secs[::2]
        rows.append(
            [cell["workload"], cell["place"], *[f"{sec * 1e3:,.0f}" for sec in secs], f"{target * 1e3:.0f}"]
            + [" / ".join(_met(sec <= target) for sec in overheads)]
        )
    names = [f"{kind}, {TITLES[name]}" for kind in ("fit", "evaluate") for name in PAIR]
    return table(["workload", "place", *names, "goal", "reached"], rows)


def against_table(cells: Sequence[Mapping], base: str, kinds: Mapping[str, goals.Goal | None]) -> str:
    """Returns a table with a row per cell and kind: numbers, and distloop's over those of `base`."""
    kinds_of = [(cell, kind) for cell in cells for kind in kinds if kind in cell]
    systems = [name for name in ["manager", *TITLES] if any(name in cell[kind] for cell, kind in kinds_of)]
    rows = []
    for cell, kind in kinds_of:
        numbers: Times = cell[kind]
        median, goal = turns.median_ratio(numbers, "distloop", base), kinds[kind]
        unit, digits = ("MB", 0) if kind == "peak memory" else ("s", 2)
        medians = {name: f"{statistics.median(values):,.{digits}f}" for name, values in numbers.items()}
        rows.append(
            [cell["workload"], cell["place"], f"{kind}, {unit}"]
            + [medians.get(name, NONE) for name in systems]
            + [ratio(median), ratio(goal and goal.goal), verdict(median, goal)]
        )
    titles = {"manager": "`CheckpointManager`", **TITLES}
    header = ["workload", "place", "what", *[titles[name] for name in systems], f"distloop / {titles[base]}"]
    return table([*header, "goal", "reached"], rows)


def two_workers_table(cells: Sequence[Mapping]) -> str:
    """Returns the table of the speed of each of two workers over that of one alone."""
    secs = {(cell["workload"], cell["place"]): cell["times"] for cell in cells}
    rows = []
    for workload, target in goals.TWO_WORKERS.items():
        one, two = secs.get((workload, "1 worker")), secs.get((workload, "2 workers"))
        if one and two:
            kept = {name: statistics.median(one[name]) / statistics.median(two[name]) for name in one if name in two}
            reached = _met(round(kept["distloop"], 2) >= target) if "distloop" in kept else NONE
            shares = [ratio(kept.get(name)) for name in ("handloop", "distloop")]
            rows.append([workload, *shares, ratio(target), reached])
    return table(["workload", "handloop", "**distloop**", "goal", "reached"], rows)


def _met(is_met: bool) -> str:
    return "goal" if is_met else "missed"


def render(measured: Sequence[Mapping], noisy: float) -> str:
    """Returns the page of cells of one commit and machine, those with a noise of `noisy` or more named."""
    cells = {part: [cell for cell in measured if cell["part"] == part and "failed" not in cell] for part in PARTS}
    failed = [cell for cell in measured if "failed" in cell]
    calls, steps = cells["calls"], [*cells["training"], *cells["workers"]]
    sections = [
        ("Training step", STEPS, steps, steps_table),
        ("Other frameworks", OTHERS, cells["peers"], peers_table),
        ("Two workers, the same batch for each", TWO_WORKERS, cells["two_workers"], two_workers_table),
        ("Monitoring", MONITORING, cells["monitoring"], monitoring_table),
        ("`evaluate`", EVALUATE, calls, lambda cells: speeds_table(cells, "evaluate", goals.EVALUATE)),
        ("`predict`", PREDICT, calls, lambda cells: speeds_table(cells, "predict", goals.PREDICT)),
        ("A call beyond its steps", BEYOND, calls, beyond_table),
        ("Saving and loading", SAVES, cells["saves"], lambda cells: against_table(cells, "manager", KEPT)),
        ("Start and memory", START, cells["start"], lambda cells: against_table(cells, "hand", STARTED)),
    ]
    page = f"# How fast distloop is\n\nWritten by `make bench`; do not edit. {about(measured)}\n{WHY}"
    for title, text, shown, write in sections:
        if shown:
            parts = f"## {title}\n", text, write(shown), notes(shown), noise(shown, noisy)
            page += "".join(f"\n{part}" for part in parts if part)
    for cell in failed:
        page += f"\nNot measured: {cell['part']}, {cell['workload']}, {cell['place']} ({cell['failed']}).\n"
    return page


STEPS = """\
Steady state with everything on: loss, accuracy, the check that numbers are finite, and every 100 steps TensorBoard,
metrics.jsonl and console. Each figure is the time of a step over that of *bare* / of *handloop* in the same round,
median over the rounds; below 1 is faster. *bare* is a compiled loop over constant data, *handloop* the usual compiled
loop over `experimental_distribute_dataset`; both are written by hand, with loss and accuracy. Two workers have one
core each. A global batch has 64 examples, 16 in lm; mlp41m has 64 for each replica, scaled down from 2,048.

![The time of a step of each system over that of a handloop](training_step.svg)
"""
OTHERS = """\
The time of a step of what one would take in place of TensorFlow, over that of distloop in the same round, median over
the rounds; above 1 distloop is faster. The same models, batches, optimizer and threads, the input included, each in a
process of its own. *bare* is a compiled loop of TensorFlow over constant data, written by hand; it, Orbit and Keras run
on TensorFlow. JAX calls Keras's model and Adam without state. Two replicas are two virtual CPUs of TensorFlow and of
JAX, and two processes of PyTorch.
"""
TWO_WORKERS = """\
The speed of each of two workers over that of one alone, with one core and a whole batch (64; lm: 16) each: 1.0 is
ideal.
"""
WHY = """
Which goals are missed, and why: [PROFILES.md](PROFILES.md). Single measurements: [MEASUREMENTS.md](MEASUREMENTS.md).
"""
MONITORING = """\
Steps of distloop that return to the host every 100 steps. *off*: no workdir, no console; *on*: all defaults, with logs
every 100 steps; *histograms*: that, and histograms of weights and gradients every 500 steps.
"""
EVALUATE = """\
Examples per second of a whole call: 2,000 examples in batches of 32. `times` is how many times faster distloop is.

![Examples per second of evaluate](evaluate.svg)
"""
PREDICT = """\
The same for predictions, all in order.

![Examples per second of predict](predict.svg)
"""
BEYOND = """\
Overhead in milliseconds, from the third call on. distloop's `fit` writes all files, including a checkpoint at the end;
Keras writes nothing.
"""
SAVES = """\
41 million parameters and Adam, 494 MB. A save takes until training continues; `save and after` adds the slow-down of
the next steps, while distloop writes the file.
"""
START = """\
Seconds from the start of the process to the end of its first step, and peak memory until the end of the call, which in
distloop includes a checkpoint.
"""
KEPT = {"save": goals.SAVE, "save and after": None, "load": None}
STARTED = {"first step": goals.START, "peak memory": goals.MEMORY}

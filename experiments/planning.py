"""Planning: how often to save, and what share of the time goes to steps that count, for 4 to 10,000 workers.

    python -m experiments.planning --run=runs/digits --failures_per_worker_hour=0.001
    python -m experiments.planning --step_secs=1 --save_secs=60 --save_pause_secs=5 --for_workers=8,512

Simulates runs whose workers fail independently of each other, at a rate that does not change: the time from one failure
of a run to the next is exponential. Whenever one fails, all start again and restore the newest state, and may fail
meanwhile. A save holds training up while the state is copied (`save_pause_secs`) and protects it once the checkpoint is
whole (`save_secs`). Goodput is the time of the steps that count, divided by all time. Costs come from flags, else from
the rows of `--run`, else they are assumed; the assumed failures are those of Llama 3's training, 419 in 54 days on
2,048 hosts of 8 GPUs ("The Llama 3 Herd of Models", 2024, section 3.3.4).

J. W. Young, "A first order approximation to the optimum checkpoint interval", 1974; J. T. Daly, "A higher order
estimate of the optimum checkpoint interval for restart dumps", 2006.

Measured: docs/planning.md. It takes about two seconds.
"""

import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from absl import app, flags

import distloop

RUN = flags.DEFINE_string("run", "", "Workdir of a run, whose costs are used.")
WORKERS = flags.DEFINE_list("for_workers", "4,16,64,256,1000,4000,10000", "Numbers of workers.")
SEED = flags.DEFINE_integer("failure_seed", 0, "Seed of the simulated failures.")

# name -> assumed value, help
COSTS: dict[str, tuple[float, str]] = {
    "step_secs": (1.0, "Seconds of a step."),
    "save_pause_secs": (5.0, "Seconds that a save holds training up."),
    "save_secs": (60.0, "Seconds from the begin of a save until its checkpoint is whole."),
    "restore_secs": (30.0, "Seconds to restore a checkpoint."),
    "start_secs": (120.0, "Seconds from a new process to its first step, without restoring."),
    "notice_secs": (4.0, "Seconds from a failure until new processes are started."),
    "failures_per_worker_hour": (1.6e-4, "Failures of one worker in an hour."),
}
for name, (_, text) in COSTS.items():
    flags.DEFINE_float(name, None, text, lower_bound=0.0)

FAILURES = 5_000  # simulated for each interval
FACTORS = [2 ** (i / 6) for i in range(-10, 11)]  # of a formula's interval, that are tried

Failures = Sequence[float]


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What saving, failing and starting again cost; in seconds, but for the last."""

    step_secs: float = 1.0
    save_pause_secs: float = 0.0  # that a save holds training up
    save_secs: float = 0.0  # from the begin of a save until its checkpoint is whole
    restore_secs: float = 0.0
    start_secs: float = 0.0  # from a new process to its first step, without restoring
    notice_secs: float = 0.0  # from a failure until new processes are started


class Plan(NamedTuple):
    """How often to save, and the goodput then."""

    save_every_secs: float
    goodput: float


def draw_failures(seed: int) -> Failures:
    """Returns, for each failure, the time since the one before in units of its mean.

    The times are stratified, one from each of equal parts of the distribution, so that means vary less.
    """
    generator = random.Random(seed)
    gaps = [(i + generator.random()) / FAILURES for i in range(FAILURES)]
    generator.shuffle(gaps)
    return [-math.log1p(-gap) for gap in gaps]


def mean_secs(workers: int, failures_per_worker_hour: float) -> float:
    """Returns the mean time from one failure of a run to the next; inf without failures."""
    rate = workers * failures_per_worker_hour / 3600
    return 1 / rate if rate else math.inf


def young_secs(pause_secs: float, mean_secs: float) -> float:
    """Returns Young's interval between saves, sqrt(2 C M): C the pause of a save, M the mean time to a failure."""
    return math.sqrt(2 * pause_secs * mean_secs) if pause_secs else 0.0


def daly_secs(pause_secs: float, mean_secs: float) -> float:
    """Returns Daly's interval between saves, of a higher order than Young's."""
    if pause_secs >= 2 * mean_secs:
        return mean_secs
    root = math.sqrt(pause_secs / (2 * mean_secs))
    return young_secs(pause_secs, mean_secs) * (1 + root / 3 + root**2 / 9) - pause_secs


def plan_saves(costs: Costs, mean_secs: float, failures: Failures) -> Plan:
    """Returns the best interval between checkpoints.

    Args:
        costs: of saving and starting again.
        mean_secs: mean time to a failure, of the whole run.
        failures: as `draw_failures` returns them.
    """
    if mean_secs == math.inf:
        return Plan(math.inf, 1.0)
    least = max(costs.step_secs, costs.save_secs - costs.save_pause_secs)  # below, a save waits for the one before

    def try_one(secs: float) -> Plan:
        return Plan(secs, simulate(costs, mean_secs, failures, secs))

    return best_of(try_one, young_secs(costs.save_pause_secs, mean_secs), least, costs.step_secs)


def simulate(costs: Costs, mean_secs: float, failures: Failures, save_every_secs: float) -> float:
    """Returns the goodput of a run: the time of the steps that count, divided by all time.

    Args:
        costs: of saving and starting again.
        mean_secs: mean time to a failure, of the whole run.
        failures: as `draw_failures` returns them.
        save_every_secs: time of the steps between two saves.
    """
    save_wall = max(save_every_secs + costs.save_pause_secs, costs.save_secs)
    if mean_secs == math.inf:
        return save_every_secs / save_wall
    writing_secs = costs.save_secs - costs.save_pause_secs
    down_secs = costs.notice_secs + costs.start_secs + costs.restore_secs
    saved, total_secs = 0, 0.0  # saved: how many intervals
    for gap in failures:
        total_secs += gap * mean_secs
        up_secs = gap * mean_secs - down_secs
        saved += max(0, int((up_secs - writing_secs) // save_wall))
    return saved * save_every_secs / total_secs


def best_of(try_one: Callable[[float], Plan], formula_secs: float, least_secs: float, step_secs: float) -> Plan:
    """Returns the plan of the highest goodput among intervals of whole steps around that of a formula."""
    center = max(formula_secs, least_secs)
    steps = {math.ceil(max(least_secs, center * factor) / step_secs - 1e-9) for factor in FACTORS}
    return max((try_one(n * step_secs) for n in sorted(steps)), key=lambda plan: plan.goodput)


def measured_costs(workdir: str) -> dict[str, float]:
    """Returns the medians of what the rows of a run say of its costs."""
    rows = distloop.read_metrics(workdir)
    values = {name: [row[name] for row in rows if name in row] for name in ("save_pause_secs", "save_secs")}
    values["step_secs"] = [1 / row["steps_per_sec"] for row in rows if row.get("steps_per_sec", 0) > 0]
    known = {name: [secs for secs in each if math.isfinite(secs)] for name, each in values.items()}
    return {name: statistics.median(each) for name, each in known.items() if each}


def find_costs(workdir: str, given: dict[str, float | None]) -> dict[str, tuple[float, str]]:
    """Returns each cost and where it comes from: given, measured or assumed."""
    costs = {name: (value, "assumed") for name, (value, _) in COSTS.items()}
    costs |= {name: (value, "measured") for name, value in (measured_costs(workdir) if workdir else {}).items()}
    costs |= {name: (value, "given") for name, value in given.items() if value is not None}
    if costs["save_secs"][0] < costs["save_pause_secs"][0]:
        costs["save_secs"] = (costs["save_pause_secs"][0], "the pause, which is longer")
    return costs


def show_secs(secs: float) -> str:
    """Returns a duration as `--checkpoint_every` takes it; "never" for one without end."""
    if secs == math.inf:
        return "never"
    size, unit = next((size, unit) for size, unit in ((3600, "h"), (60, "min"), (0, "s")) if secs >= 2 * size)
    return f"{secs / (size or 1):.3g} {unit}"


def main(_):
    found = find_costs(RUN.value, {name: flags.FLAGS[name].value for name in COSTS})
    for name, (value, source) in found.items():
        print(f"{name:26}{value:<12.4g}{source}")
    costs = Costs(**{name: value for name, (value, _) in found.items() if name != "failures_per_worker_hour"})
    failures = draw_failures(SEED.value)
    columns = ["workers", "failure every", "Young", "Daly", "best", "goodput"]
    print("\n" + "".join(f"{column:<15}" for column in columns).rstrip())
    for workers in sorted(int(text) for text in WORKERS.value):
        mean = mean_secs(workers, found["failures_per_worker_hour"][0])
        best = plan_saves(costs, mean, failures)
        pause = costs.save_pause_secs
        secs = [mean, young_secs(pause, mean), daly_secs(pause, mean), best.save_every_secs]
        cells = [str(workers), *map(show_secs, secs), f"{best.goodput:.2%}"]
        print("".join(f"{cell:<15}" for cell in cells).rstrip())


if __name__ == "__main__":
    app.run(main)

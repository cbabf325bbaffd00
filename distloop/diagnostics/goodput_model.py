"""Goodput model: the share of a run's time that goes to steps that count, simulated failure by failure.

    costs = Costs(save_pause_secs=5, save_secs=60, restore_secs=30, start_secs=120)
    failures = draw_failures(seed=0)
    plan_saves(costs, mean_secs(workers=1000, failures_per_worker_hour=1.6e-4), failures)      # Plan(1800.0, 0.0, 0.97)

Workers fail independently of each other, at a rate that does not change, so the time from one failure of a run to the
next is exponential. Whenever one fails, all start again and restore the newest state, and may fail meanwhile. A save
holds training up while the state is copied (`save_pause_secs`) and protects it once the checkpoint is whole
(`save_secs`). It does not know where costs come from, nor how they are shown.

J. W. Young, "A first order approximation to the optimum checkpoint interval", 1974; J. T. Daly, "A higher order
estimate of the optimum checkpoint interval for restart dumps", 2006.
"""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

_FAILURES = 5_000  # simulated for each interval
_FACTORS = [2 ** (i / 6) for i in range(-10, 11)]  # of a formula's interval, that are tried
_MOST_SAVE_SECS = 86_400.0  # from one checkpoint on the disk to the next, however safe copies in memory are

Failures = Sequence[tuple[float, float]]


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What saving, failing and starting again cost; in seconds, but for the last."""

    step_secs: float = 1.0
    save_pause_secs: float = 0.0  # that a save holds training up
    save_secs: float = 0.0  # from the begin of a save until its checkpoint is whole
    restore_secs: float = 0.0
    start_secs: float = 0.0  # from a new process to its first step, without restoring
    notice_secs: float = 0.0  # from a failure until new processes are started
    copy_secs: float = 0.0  # that copies of the state in the memory of all hosts hold training up
    copy_restore_secs: float = 0.0
    copies_lost: float = 0.0  # the fraction of failures that take all copies in memory along


class Plan(NamedTuple):
    """How often to keep the state, and the goodput then."""

    save_every_secs: float
    copy_every_secs: float  # 0: no copies in memory
    goodput: float


def draw_failures(seed: int) -> Failures:
    """Returns, for each failure, the time since the one before in units of its mean, and a number in [0, 1).

    Both are stratified, one number from each of equal parts of the distribution, so that means vary less.
    """
    generator = random.Random(seed)
    gaps, luck = ([(i + generator.random()) / _FAILURES for i in range(_FAILURES)] for _ in range(2))
    generator.shuffle(gaps)
    generator.shuffle(luck)
    return [(-math.log1p(-gap), lot) for gap, lot in zip(gaps, luck, strict=True)]


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
    """Returns the best interval between checkpoints on the disk, without copies in memory.

    Args:
        costs: of saving and starting again.
        mean_secs: mean time to a failure, of the whole run.
        failures: as `draw_failures` returns them.
    """
    if mean_secs == math.inf:
        return Plan(math.inf, 0.0, 1.0)
    least = max(costs.step_secs, costs.save_secs - costs.save_pause_secs)  # below, a save waits for the one before

    def try_one(secs: float) -> Plan:
        return Plan(secs, 0.0, simulate(costs, mean_secs, failures, secs))

    return _best(try_one, young_secs(costs.save_pause_secs, mean_secs), least, costs.step_secs)


def plan_copies(costs: Costs, mean_secs: float, failures: Failures) -> Plan:
    """Returns the best interval between copies in memory, beside checkpoints that protect from their loss.

    Checkpoints are saved at Young's interval for the failures that take all copies along.

    Args:
        costs: of saving and starting again.
        mean_secs: mean time to a failure, of the whole run.
        failures: as `draw_failures` returns them.
    """
    if mean_secs == math.inf:
        return Plan(math.inf, math.inf, 1.0)
    loss_secs = mean_secs / costs.copies_lost if costs.copies_lost else math.inf
    save_secs = min(_MOST_SAVE_SECS, young_secs(costs.save_pause_secs, loss_secs))

    def try_one(secs: float) -> Plan:
        save_every = secs * max(1, round(max(save_secs, costs.save_secs) / secs))
        return Plan(save_every, secs, simulate(costs, mean_secs, failures, save_every, secs))

    return _best(try_one, young_secs(costs.copy_secs, mean_secs), costs.step_secs, costs.step_secs)


def simulate(
    costs: Costs, mean_secs: float, failures: Failures, save_every_secs: float, copy_every_secs: float = 0.0
) -> float:
    """Returns the goodput of a run: the time of the steps that count, divided by all time.

    Args:
        costs: of saving and starting again.
        mean_secs: mean time to a failure, of the whole run.
        failures: as `draw_failures` returns them.
        save_every_secs: time of the steps between two saves.
        copy_every_secs: time of the steps between two copies in memory, a whole part of that; 0: no copies.
    """
    every = copy_every_secs or save_every_secs  # positions are counted in these
    copies = round(save_every_secs / every)  # the last of which is a save
    copy_wall = every + costs.copy_secs
    save_wall = max(copies * every + (copies - 1) * costs.copy_secs + costs.save_pause_secs, costs.save_secs)
    if mean_secs == math.inf:
        return copies * every / save_wall
    writing_secs = costs.save_secs - costs.save_pause_secs
    down_secs = costs.notice_secs + costs.start_secs
    kept = saved = 0  # positions in memory and on the disk
    total_secs, has_copy = 0.0, False
    for gap, luck in failures:
        secs = gap * mean_secs
        total_secs += secs
        up_secs = secs - down_secs - (costs.copy_restore_secs if has_copy else costs.restore_secs)
        if up_secs >= 0:
            first = kept - kept % copies
            wall = up_secs + (kept - first) * copy_wall  # since the save before
            before, kept = kept, first + int(wall // save_wall) * copies
            kept += min(copies - 1, int(wall % save_wall / copy_wall))
            saved = max(saved, first + int((wall - writing_secs) // save_wall) * copies)
            has_copy = has_copy or kept > before
        if not copy_every_secs or luck < costs.copies_lost:
            kept, has_copy = saved, False
    return kept * every / total_secs


def _best(try_one: Callable[[float], Plan], formula_secs: float, least_secs: float, step_secs: float) -> Plan:
    """Returns the plan of the highest goodput among intervals of whole steps around that of a formula."""
    center = max(formula_secs, least_secs)
    steps = {math.ceil(max(least_secs, center * factor) / step_secs - 1e-9) for factor in _FACTORS}
    return max((try_one(n * step_secs) for n in sorted(steps)), key=lambda plan: plan.goodput)

"""Simulated runs that fail: next to closed forms, and what must hold for any cost."""

import math
import os

import pytest

from experiments import planning
from experiments.planning import Costs, simulate
from tests import forked
from tests.problems import write_run

FAILURES = planning.draw_failures(seed=1)
BLOCKING = Costs(save_pause_secs=5, save_secs=5, restore_secs=30, start_secs=100, notice_secs=4)
WRITTEN_IN_BACKGROUND = Costs(save_pause_secs=5, save_secs=60, restore_secs=30, start_secs=100, notice_secs=4)


def daly(costs, mean, every):
    """Returns the goodput after Daly's complete model, T = M exp(R / M) (exp((t + C) / M) - 1) T_s / t, for saves that
    block; exact for exponential failures, also during recovery."""
    down = costs.restore_secs + costs.start_secs + costs.notice_secs
    return every / (mean * math.exp(down / mean) * math.expm1((every + costs.save_pause_secs) / mean))


def renewal(costs, mean, every):
    """Returns the goodput where a checkpoint is whole `late` after its save's pause: the same argument, from the moment
    that one checkpoint is whole to the next; after a failure in between, `late` has to pass twice."""
    down, late = costs.restore_secs + costs.start_secs + costs.notice_secs, costs.save_secs - costs.save_pause_secs
    period = max(every + costs.save_pause_secs, costs.save_secs)
    recovered = mean * math.exp(down / mean) * math.expm1((period + late) / mean)
    fails = -math.expm1(-period / mean)
    return every / (mean * fails + fails * (mean * math.expm1(down / mean) + recovered))


@pytest.mark.parametrize("mean", [400.0, 2000.0, 100_000.0])
@pytest.mark.parametrize("every", [60.0, 300.0])
def test_the_goodput_is_that_of_the_closed_forms(mean, every):
    for costs, expected in ((BLOCKING, daly), (WRITTEN_IN_BACKGROUND, renewal)):
        # Over 100 seeds, 0.16 % at most.
        assert simulate(costs, mean, FAILURES, every) == pytest.approx(expected(costs, mean, every), rel=0.005)
    assert renewal(BLOCKING, mean, every) == pytest.approx(daly(BLOCKING, mean, every))


def test_without_failures_all_time_but_that_of_the_saves_counts():
    assert simulate(BLOCKING, math.inf, FAILURES, 95.0) == 0.95
    assert planning.plan_saves(BLOCKING, math.inf, FAILURES) == (math.inf, 1.0)


def test_a_save_waits_for_the_one_before():
    assert simulate(WRITTEN_IN_BACKGROUND, math.inf, FAILURES, 30.0) == 0.5
    assert planning.plan_saves(WRITTEN_IN_BACKGROUND, 10.0, FAILURES).save_every_secs >= 55


def test_the_best_interval_grows_as_the_root_of_the_time_between_failures():
    best = [planning.plan_saves(BLOCKING, mean, FAILURES) for mean in (1e4, 1e6)]
    assert best[1].save_every_secs / best[0].save_every_secs == pytest.approx(10, rel=0.13)  # a step of the grid
    assert best[0].save_every_secs == pytest.approx(planning.daly_secs(5, 1e4), rel=0.13)
    assert best[0].goodput < best[1].goodput


def test_young_and_daly():
    assert planning.young_secs(5, 1000) == 100
    root = math.sqrt(5 / 2000)
    assert planning.daly_secs(5, 1000) == pytest.approx(100 * (1 + root / 3 + root**2 / 9) - 5)
    assert planning.daly_secs(30, 10) == 10 and planning.young_secs(0, math.inf) == 0
    assert planning.daly_secs(5, math.inf) == math.inf
    assert planning.mean_secs(10, 0.1) == 3600 and planning.mean_secs(10, 0) == math.inf


def test_the_same_seed_is_the_same_run():
    assert planning.draw_failures(1) == FAILURES != planning.draw_failures(2)


def test_costs_are_given_or_measured_or_assumed(tmp_path):
    rows = [{"step": 100, "steps_per_sec": 10.0}, {"step": 200, "steps_per_sec": 10.0, "save_pause_secs": 70.0}]
    write_run(tmp_path / "run", rows)
    costs = planning.find_costs(str(tmp_path / "run"), {"restore_secs": 50.0, "step_secs": None})
    assert costs["step_secs"] == (0.1, "measured") and costs["save_pause_secs"] == (70.0, "measured")
    assert costs["save_secs"] == (70.0, "the pause, which is longer") and costs["start_secs"] == (120.0, "assumed")
    assert costs["restore_secs"] == (50.0, "given")
    assert list(costs) == list(planning.COSTS)


@pytest.mark.slow
def test_the_program_prints_the_costs_and_a_row_for_each_number_of_workers():
    arguments = ["-m", "experiments.planning", "--start_secs=60", "--for_workers=1000,256"]
    done = forked.run(arguments, env=os.environ)
    assert done.returncode == 0, done.stderr
    costs, plans = (part.splitlines() for part in done.stdout.strip().split("\n\n"))
    assert len(costs) == len(planning.COSTS) and costs[4].split() == ["start_secs", "60", "given"]
    assert plans[1].split() == "256 24.4 h 15.6 min 15.6 min 15.6 min 98.77%".split()
    assert plans[2].split() == "1000 6.25 h 7.91 min 7.85 min 7.92 min 97.26%".split()

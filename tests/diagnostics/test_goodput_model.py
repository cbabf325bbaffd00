"""Simulated runs that fail: next to closed forms, and what must hold for any cost."""

import math

import pytest

from distloop.diagnostics import goodput_model
from distloop.diagnostics.goodput_model import Costs, simulate

FAILURES = goodput_model.draw_failures(seed=1)
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
    assert simulate(Costs(copy_secs=1, save_pause_secs=2, save_secs=2), math.inf, FAILURES, 30.0, 10.0) == 30 / 34
    assert goodput_model.plan_saves(BLOCKING, math.inf, FAILURES) == (math.inf, 0.0, 1.0)
    assert goodput_model.plan_copies(BLOCKING, math.inf, FAILURES).goodput == 1.0


def test_a_save_waits_for_the_one_before():
    assert simulate(WRITTEN_IN_BACKGROUND, math.inf, FAILURES, 30.0) == 0.5
    assert goodput_model.plan_saves(WRITTEN_IN_BACKGROUND, 10.0, FAILURES).save_every_secs >= 55


def test_the_best_interval_grows_as_the_square_root_of_the_time_between_failures():
    best = [goodput_model.plan_saves(BLOCKING, mean, FAILURES) for mean in (1e4, 1e6)]
    assert best[1].save_every_secs / best[0].save_every_secs == pytest.approx(10, rel=0.13)  # a step of the grid
    assert best[0].save_every_secs == pytest.approx(goodput_model.daly_secs(5, 1e4), rel=0.13)
    assert best[0].goodput < best[1].goodput


def test_young_and_daly():
    assert goodput_model.young_secs(5, 1000) == 100
    root = math.sqrt(5 / 2000)
    assert goodput_model.daly_secs(5, 1000) == pytest.approx(100 * (1 + root / 3 + root**2 / 9) - 5)
    assert goodput_model.daly_secs(30, 10) == 10 and goodput_model.young_secs(0, math.inf) == 0
    assert goodput_model.daly_secs(5, math.inf) == math.inf
    assert goodput_model.mean_secs(10, 0.1) == 3600 and goodput_model.mean_secs(10, 0) == math.inf


@pytest.mark.parametrize("mean", [500.0, 5000.0])
def test_copies_that_cost_nothing_never_hurt(mean):
    costs = Costs(save_pause_secs=5, save_secs=60, restore_secs=30, start_secs=100, copy_restore_secs=30)
    without = simulate(costs, mean, FAILURES, 300.0)
    goodputs = [simulate(costs, mean, FAILURES, 300.0, every) for every in (300.0, 100.0, 20.0)]
    assert sorted([without, *goodputs]) == [without, *goodputs]
    best = goodput_model.plan_saves(costs, mean, FAILURES)
    assert goodput_model.plan_copies(costs, mean, FAILURES).goodput > best.goodput


def test_copies_that_are_always_lost_are_of_no_use():
    costs = Costs(save_pause_secs=5, save_secs=5, copies_lost=1.0)
    assert simulate(costs, 2000.0, FAILURES, 300.0, 100.0) == simulate(costs, 2000.0, FAILURES, 300.0)


def test_the_same_seed_is_the_same_run():
    assert goodput_model.draw_failures(1) == FAILURES != goodput_model.draw_failures(2)

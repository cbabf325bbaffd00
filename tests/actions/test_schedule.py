"""When the loop stops and looks: the next boundary, and what is due there."""

import pytest

from distloop.actions import schedule
from distloop.settings.durations import Period, Units


def boundaries(until, everys, steps_per_loop=0, start=0):
    """Lists every boundary of a run."""
    step, found = start, []
    while step < until:
        step = schedule.next_boundary(step, until, everys, steps_per_loop)
        found.append(step)
    return found


def test_the_next_boundary_is_the_nearest_multiple_of_any_period():
    assert boundaries(10, [4, 3]) == [3, 4, 6, 8, 9, 10]


def test_a_boundary_shared_by_two_periods_occurs_once():
    assert boundaries(12, [2, 6]) == [2, 4, 6, 8, 10, 12]


def test_a_period_of_0_or_none_has_no_boundary_but_the_end():
    assert boundaries(10, [0, None]) == [10]
    assert boundaries(10, []) == [10]


def test_a_period_longer_than_the_run_ends_with_the_run():
    assert boundaries(5, [100]) == [5]


def test_boundaries_are_multiples_of_the_period_wherever_the_run_starts():
    assert boundaries(12, [5], start=3) == [5, 10, 12]
    assert boundaries(12, [5], start=5) == [10, 12]


def test_steps_per_loop_bounds_the_distance_and_moves_no_boundary():
    assert boundaries(10, [4], steps_per_loop=3) == [3, 4, 7, 8, 10]


def test_steps_per_loop_need_not_divide_anything():
    found = boundaries(100, [25, 40], steps_per_loop=7)
    assert {25, 40, 50, 75, 80, 100} <= set(found)
    assert max(b - a for a, b in zip([0, *found], found, strict=False)) <= 7


def test_the_next_boundary_lies_after_the_step_and_not_beyond_the_end():
    for step in range(20):
        for every in range(5):
            for steps_per_loop in range(4):
                assert step < schedule.next_boundary(step, 20, [every], steps_per_loop) <= 20


def test_there_is_no_boundary_after_the_end():
    with pytest.raises(AssertionError):
        schedule.next_boundary(10, 10, [1])


def test_a_period_is_due_at_its_multiples():
    assert [step for step in range(1, 12) if schedule.is_due(step, 4, 100)] == [4, 8]


@pytest.mark.parametrize("every", [0, None, 3, 7])
def test_everything_is_due_at_the_end(every):
    assert schedule.is_due(10, every, 10)


@pytest.mark.parametrize("every", [0, None])
def test_without_a_period_nothing_is_due_before_the_end(every):
    assert not any(schedule.is_due(step, every, 10) for step in range(10))


def test_every_due_step_is_a_boundary():
    everys, until = [3, 5, 0, None], 31
    due = {step for step in range(1, until + 1) if any(schedule.is_due(step, every, until) for every in everys)}
    assert due == set(boundaries(until, everys))


# Durations with units.


def plan(run=Period(steps=100)):  # noqa: B008 - immutable
    return schedule.Plan(Units(lambda: 8, lambda: 4, run))


def test_epochs_examples_and_shares_of_the_run_are_due_by_steps():
    due = {
        every: [step for step in range(1, 40) if plan().is_due(every, step, 100)] for every in ("1 epoch", "20 %", 16)
    }
    assert due == {"1 epoch": [8, 16, 24, 32], "20 %": [20], 16: [16, 32]}
    assert plan().next_boundary(17, 100, ["2 epochs", "80 examples", None, 0]) == 20


def test_what_is_due_by_time_is_due_after_the_next_step_once_in_each_period():
    run_plan, due = plan(), []
    for before, now in [(0, 9), (9, 11), (11, 19), (19, 21), (21, 45)]:  # a loop of 24 s makes one call, not two
        run_plan.look_at_clock(before, now, ["10 s", 50, None, "1 h"], 7)
        due.append(run_plan.is_due("10 s", 7, 100))
        assert run_plan.next_boundary(7, 100, [50]) == (8 if due[-1] else 50)
    assert due == [False, True, False, True, True]
    assert not run_plan.is_due("1 h", 7, 100) and run_plan.is_due("1 h", 100, 100)


def test_a_run_that_ends_by_time_ends_with_the_step_after():
    run_plan = plan(Period(secs=60.0))
    run_plan.look_at_clock(0, 59, [0], 5)
    assert run_plan.last_step == run_plan.next_boundary(5, run_plan.last_step, [0]) == float("inf")
    run_plan.look_at_clock(59, 61, [0], 7)
    assert run_plan.last_step == run_plan.next_boundary(7, run_plan.last_step, [0]) == 8


def test_a_plan_without_a_dataset_knows_steps_and_times_alone():
    assert schedule.Plan().period("5 s") == Period(secs=5.0)
    with pytest.raises(ValueError, match="'2 epochs' was given where no dataset is known"):
        schedule.Plan().period("2 epochs")

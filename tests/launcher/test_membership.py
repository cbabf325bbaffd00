"""How many workers run next, and when."""

import dataclasses
import math

import pytest

from distloop.launcher.membership import MembershipPlan


def test_all_places_are_there_at_first():
    plan = MembershipPlan(1, 3)
    assert plan.there(0.0) == [0, 1, 2] and plan.size(0.0) == 3 and plan.grows_at(3) == math.inf


def test_those_left_go_on_until_the_place_is_there_again():
    plan = MembershipPlan(1, 3).lose([1], 10.0)
    assert plan.there(10.0) == [0, 2] and plan.size(10.0) == 2
    assert plan.grows_at(2) == 11.0 and plan.size(11.0) == 3


def test_a_place_that_is_there_again_sooner_than_workers_start_counts_as_there():
    trained = MembershipPlan(1, 3).begin(20, start_secs=5.0).crash()
    assert trained.lose([1], 10.0).there(10.0) == [0, 1, 2] and trained.lose([0, 1, 2], 10.0).starts_at() < 10.0
    slow = dataclasses.replace(trained, back_at=(0.0,) * 3, pauses=(1.0, 8.0, 4.0))
    assert slow.lose([1], 10.0).there(10.0) == [0, 2]  # those left go on
    assert slow.lose([1, 2], 10.0).there(10.0) == [0, 2]
    assert dataclasses.replace(slow, least=2).lose([0, 1, 2], 10.0).starts_at() == 9.0
    fixed = dataclasses.replace(slow, least=3).lose([1, 2], 10.0)
    assert fixed.starts_at() == 18.0 and fixed.there(10.0) == [0]  # the number is fixed: each pause is kept
    assert MembershipPlan(1, 3).lose([1], 10.0).there(10.0) == [0, 2]  # nothing has started yet


def test_what_broke_twice_without_a_newer_checkpoint_is_left_out():
    twice = MembershipPlan(1, 3).begin(20, start_secs=5.0).crash().begin(20, start_secs=5.0).crash()
    assert twice.lose([1], 10.0).there(10.0) == [0, 2]
    assert twice.begin(30, start_secs=5.0).crash().lose([1], 10.0).there(10.0) == [0, 1, 2]


def test_below_the_least_number_nobody_runs():
    plan = MembershipPlan(2, 3).lose([0, 2], 10.0)
    assert plan.size(10.0) == 0 and plan.grows_at(0) == 11.0 and plan.size(11.0) == 3


def test_only_numbers_of_workers_that_the_run_can_have_are_started():
    plan = MembershipPlan(1, 4, sizes=(1, 2, 4)).lose([3], 0.0).lose([3], 1.0)
    assert plan.size(1.0) == 2 and plan.there(1.0) == [0, 1, 2]
    assert plan.grows_at(2) == 3.0 and plan.size(3.0) == 4
    assert MembershipPlan(3, 4, sizes=(1, 2, 4)).lose([0], 0.0).size(0.0) == 0


def test_the_pause_of_a_place_doubles_up_to_a_minute_and_begins_anew_after_a_lasting_worker():
    plan, now, pauses = MembershipPlan(1, 2), 0.0, []
    for fall in range(10):
        now += 700 if fall == 8 else 10
        plan = plan.lose([1], now)
        pauses.append(plan.back_at[1] - now)
        now = plan.back_at[1]
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60, 1, 2] and plan.back_at[0] == -math.inf


def test_crashes_count_from_the_newest_checkpoint():
    plan = MembershipPlan(1, 3).begin(0).crash()
    assert plan.restarts == 1
    plan = plan.begin(0).crash().begin(None).crash()
    assert plan.restarts == 3
    assert plan.begin(20).crash().restarts == 1


@pytest.mark.parametrize("most", [1, 3])
def test_a_fixed_number_waits_for_all(most):
    plan = MembershipPlan(most, most).lose([0], 0.0)
    assert plan.size(0.5) == 0 and plan.size(1.0) == most

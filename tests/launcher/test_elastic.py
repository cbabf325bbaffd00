"""How many workers run next, and which memberships follow each other, with workers that a script plays."""

import dataclasses
import functools
import math
import signal

import pytest

from distloop.launcher import elastic
from distloop.launcher.elastic import MembershipPlan
from distloop.launcher.processes import GroupEnd


class Signals:
    """Nobody sends a signal, unless `ends_in` a pause; waiting takes no time."""

    def __init__(self, clock):
        self.clock, self.pauses, self.ends_in = clock, [], -1

    def wait(self, secs):
        self.pauses.append(secs)
        self.clock.now += secs
        return signal.SIGTERM if len(self.pauses) - 1 == self.ends_in else None


class Clock:
    now = 1000.0

    def monotonic(self):
        return self.now

    time = monotonic


class World:
    """Plays memberships: of each, its seconds, what the workers tell, and how they end."""

    def __init__(self, monkeypatch):
        self.clock = Clock()
        self.signals = Signals(self.clock)
        self.started, self.lines, self.leaves_at = [], [], []
        self.slots, self.there = [], None  # of each membership; which are there, by a function
        self.start_secs = 0.5  # shorter than each slot is empty
        monkeypatch.setattr(elastic, "time", self.clock)
        monkeypatch.setattr(elastic.processes, "log", self.lines.append)
        monkeypatch.setattr(elastic.processes, "Group", functools.partial(Group, self))

    @property
    def counts(self):
        """The number of workers of each membership."""
        return [len(slots) for slots in self.slots]

    def run(self, script, least=1, most=3, max_restarts=3, wait_secs=600):
        self.script = list(script)
        plan = MembershipPlan(least, most, max_restarts, wait_secs)
        code = elastic.run(plan, self.start, self.signals, self.there)
        assert not self.script
        return code

    def start(self, membership, slots, messages):
        self.started.append((membership.number, len(slots), membership.cause))
        self.slots.append(list(slots))
        return [None] * len(slots)


class Group:
    """Plays the next membership of a world's script."""

    def __init__(self, world, workers, signals, grace_secs, messages, leaves_at):
        self.world, self.messages, self.leaves_at = world, messages, leaves_at

    def wait(self):
        world, (secs, told, outcome) = self.world, self.world.script.pop(0)
        for name, value in told.items():
            setattr(self.messages, name, value)
        if self.messages.step is not None:
            self.messages.began_at = world.clock.now + world.start_secs
            self.messages.start_secs = world.start_secs
        world.leaves_at.append(self.leaves_at() - world.clock.now)
        world.clock.now += secs
        return outcome


@pytest.fixture
def world(monkeypatch):
    return World(monkeypatch)


def crash(*failed, code=137, cause="worker 1 failed first"):
    return GroupEnd(code, is_crash=True, failed=failed, cause=cause)


SAVED = GroupEnd(75, is_crash=False)
MORE = SAVED._replace(has_left_for_more=True)
DONE = GroupEnd(0, is_crash=False)


def test_those_left_go_on_at_once_and_one_that_comes_back_is_taken_in(world):
    script = [(9, {"step": 0}, crash(1)), (20, {"step": 20}, MORE), (9, {"step": 40}, DONE)]
    assert world.run(script) == 0
    assert world.started == [(1, 3, ""), (2, 2, "worker 1 failed first"), (3, 3, "there are slots for more")]
    assert world.signals.pauses == []
    assert world.leaves_at == [math.inf, 1.0, math.inf]  # the second, once it has trained for as long as it started
    assert world.lines[0] == "membership 2 has 2 of 3 workers: worker 1 failed first."


def test_a_place_that_is_back_sooner_than_workers_start_saves_a_stop(world):
    world.start_secs = 5
    script = [(9, {"step": 0}, crash(1)), (20, {"step": 20}, SAVED._replace(leaving=[2])), (9, {"step": 40}, DONE)]
    assert world.run(script) == 0
    assert world.started == [(1, 3, ""), (2, 3, "worker 1 failed first"), (3, 3, "worker 2 was asked to leave")]
    assert world.signals.pauses == [] and world.leaves_at == [math.inf] * 3
    assert world.lines[0] == "membership 2 has 3 of 3 workers: worker 1 failed first."


def test_a_worker_that_crashes_at_once_again_is_left_out(world):
    world.start_secs = 5
    script = [(9, {"step": 0}, crash(1)), (9, {"step": 0}, crash(1)), (9, {"step": 0}, DONE)]
    assert world.run(script) == 0
    assert world.counts == [3, 3, 2] and world.signals.pauses == []


def test_a_worker_that_was_asked_to_leave_leaves_its_place(world):
    assert world.run([(9, {"step": 0}, SAVED._replace(leaving=[2])), (0.5, {"step": 9}, DONE)]) == 0
    assert world.started[1:] == [(2, 2, "worker 2 was asked to leave")]


def test_a_run_that_leaves_by_itself_ends_and_so_does_one_that_is_asked(world):
    assert world.run([(9, {"step": 0}, SAVED)]) == 75
    assert world.run([(9, {"step": 0}, SAVED._replace(is_last=True, leaving=[0, 1]))]) == 75
    assert world.run([(9, {}, SAVED._replace(leaving=[0]))], least=3) == 75  # the number is fixed


def test_below_the_least_number_the_run_waits(world):
    assert world.run([(9, {"step": 0}, crash(0, 1)), (9, {"step": 0}, DONE)], least=2) == 0
    assert world.started[1:] == [(2, 3, "worker 1 failed first")] and world.signals.pauses == [0.5]
    assert world.lines[0] == "there are slots for 3 workers in 0.5 s (restart 1 of 3)."


def test_the_wait_has_a_limit(world):
    script = [(1, {"step": step}, crash(0, 1)) for step in (0, 10, 20)]
    assert world.run(script, least=2, wait_secs=3) == 75
    assert world.signals.pauses == [0.5, 1.5, 3]
    assert world.lines[-1] == (
        "for 3 s there were slots for 1 worker, and 2 are needed: the run ends, and the same command goes on from "
        "its newest checkpoint."
    )


def test_a_signal_ends_the_wait(world):
    world.signals.ends_in = 0
    assert world.run([(9, {"step": 0}, crash(0, 1, 2))]) == 75


def test_crashes_without_a_newer_checkpoint_are_bounded(world):
    script = [(20, {"step": step}, crash(0, code=1)) for step in (0, 0, 20, 20, 20)]
    assert world.run(script, max_restarts=2) == 1
    assert world.lines[-1] == (
        "the run ends, as 3 crashes since step 20 left no newer checkpoint: look at what the workers printed, or set a "
        "smaller checkpoint_every or a larger --max_restarts."
    )


def test_what_fails_before_the_first_step_is_not_tried_again_but_a_kill_is(world):
    assert world.run([(5, {}, crash(0, code=1))]) == 1
    assert world.lines == ["the run ends, as it failed before it trained."]
    assert world.run([(5, {}, crash(0)), (5, {"step": 0}, crash(0)), (9, {}, DONE)]) == 0
    assert world.leaves_at[-1] == math.inf  # what does not train is not asked to leave


def test_workers_whose_number_does_not_fit_start_again_with_one_that_fits(world):
    error = crash(0, 1, 2, code=1, cause="worker 0 failed first")
    assert world.run([(5, {"sizes": (1, 2)}, error), (5, {"step": 0}, DONE)]) == 0
    assert world.counts == [3, 2]
    assert world.run([(5, {"sizes": (1, 2)}, error)], least=3, most=5) == 1  # none fits
    assert world.run([(5, {"sizes": (1, 2)}, crash(0))], least=3, most=5) == 137


def test_the_cause_of_a_change_that_nobody_noted_is_told_again(world):
    script = [(5, {"step": 0}, crash(0)), (5, {}, crash(1, cause="worker 0 failed first")), (5, {"step": 0}, DONE)]
    world.run(script)
    assert world.started[2] == (3, 2, "worker 1 failed first; then worker 0 failed first")


def test_only_numbers_that_the_run_can_have_are_started(world):
    sizes = {"sizes": (1, 2, 4)}
    script = [(9, {"step": 0, **sizes}, crash(3)), (9, {"step": 20, **sizes}, DONE)]
    assert world.run(script, most=4) == 0
    assert world.counts == [4, 2]
    assert world.lines == ["membership 2 has 2 of 4 workers (it can have 1, 2, 4): worker 1 failed first."]


@pytest.mark.parametrize("most", [1, 3])
def test_with_a_fixed_number_the_pause_doubles_until_a_run_lasts(most, world):
    script = [(700 if i == 9 else 10, {}, crash(0, code=3)) for i in range(12)]
    assert world.run(script, least=most, most=most, max_restarts=11) == 3
    assert world.signals.pauses == [1, 2, 4, 8, 16, 32, 60, 60, 60, 1, 2] and world.counts == [most] * 12
    assert world.lines[0] == "all workers start again in 1 s (restart 1 of 11)."


def test_a_missing_slot_is_not_used_and_the_run_grows_when_it_comes(world):
    world.there = lambda: [0, 2] if world.clock.now < 1005 else [0, 1, 2]
    assert world.run([(9, {"step": 0}, MORE), (9, {"step": 20}, DONE)]) == 0
    assert world.slots == [[0, 2], [0, 1, 2]] and world.leaves_at == [math.inf, math.inf]


def test_a_place_that_comes_while_workers_train_is_seen(world):
    looks = []
    world.there = lambda: looks.append(1) or ([0, 1] if len(looks) <= 2 else [0, 1, 2])
    assert world.run([(9, {"step": 0}, MORE), (9, {"step": 20}, DONE)]) == 0
    assert world.leaves_at[0] == 2 * world.start_secs  # once it has trained for as long as it started
    assert world.slots == [[0, 1], [0, 1, 2]]


@pytest.mark.parametrize(("most", "wait_secs"), [(3, 600), (2, 10)])
def test_the_run_checks_each_second_for_a_slot_and_says_once_that_it_waits(most, wait_secs, world):
    world.there = lambda: [0] if world.clock.now < 1060 else [0, 1]
    script = [(9, {"step": 0}, DONE)]
    assert world.run(script, least=2, most=most, wait_secs=wait_secs) == 0  # of a fixed number, as long as it takes
    assert world.slots == [[0, 1]] and world.signals.pauses == [1.0] * 60
    assert world.lines == ["there were slots for 1 worker, and 2 are needed: waiting for more."]


def test_a_slot_that_is_back_before_workers_start_counts_as_there():
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


def test_only_numbers_of_workers_that_the_run_can_have_are_started():
    plan = MembershipPlan(1, 4, sizes=(1, 2, 4)).lose([3], 0.0).lose([3], 1.0)
    assert plan.size(1.0) == 2 and plan.there(1.0) == [0, 1, 2]
    assert plan.grows_at(2) == 3.0 and plan.size(3.0) == 4
    assert MembershipPlan(3, 4, sizes=(1, 2, 4)).lose([0], 0.0).size(0.0) == 0

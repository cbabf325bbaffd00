"""Plans of rounds: the same for a seed, every fault in turn, and no deadly one in the last life."""

from tests.campaigns.nemesis import faults, kernel
from tests.campaigns.nemesis.__main__ import describe
from tests.campaigns.nemesis.schedule import draw_plan


def test_a_plan_belongs_to_its_seed_and_number():
    assert draw_plan(1, 3) == draw_plan(1, 3)
    assert len({describe(draw_plan(seed, number)) for seed in (1, 2) for number in range(20)}) == 40


def test_every_fault_that_the_machine_allows_comes_within_sixteen_rounds():
    kinds = {
        type(strike.fault) for number in range(16) for life in draw_plan(5, number).lives for strike in life.strikes
    }
    missing = {*faults.DEADLY, *faults.HARMLESS} - kinds
    if not kernel.can_make_networks():
        missing -= {kind for kind in faults.HARMLESS if issubclass(kind, faults.LosePackets | faults.StaleName)}
    if not kernel.can_mount():
        missing -= {faults.FillDisk}
    assert not missing


def test_all_lives_but_the_last_have_one_deadly_fault():
    for number in range(50):
        *lives, last = draw_plan(2, number).lives
        assert last.deadly is None
        assert [sum(strike.fault.is_deadly for strike in life.strikes) for life in lives] == [1] * len(lives)

"""Durations from numbers and texts, what they are in steps or seconds, and when something is due."""

import itertools

import pytest

import distloop
from distloop.settings.durations import Duration, Period, Plan, Units, normalize, parse

UNITS = Units(lambda: 40, lambda: 64, Period(steps=1_000))


@pytest.mark.parametrize(
    "values, amounts, unit",
    [
        ([500, "500", "500 steps", " 500steps ", "5e2 steps", 500.0], [500] * 6, "steps"),
        (["90 s", "10 min", "1.5 h", "2min", "0 s"], [90, 600, 5400, 120, 0], "secs"),
        (["2 epochs", "1 epoch", "0.5 epochs"], [2, 1, 0.5], "epochs"),
        (["1e6 examples"], [1e6], "examples"),
        (["25 %", "5%"], [25, 5], "%"),
    ],
)
def test_a_duration_is_a_number_of_steps_or_has_a_unit(values, amounts, unit):
    assert [parse(value) for value in values] == [Duration(amount, unit) for amount in amounts]


WRONG = ["", "ten", "-5", "10 m", "1.5 steps", "1.5", "10 min 5 s", "inf", "nan s", None, "2 epoch s", "3 hs", "%"]


@pytest.mark.parametrize("value", [*WRONG, "2 %s"])
def test_anything_else_is_refused(value):
    sentence = "was given: give a number of steps, or a text with a unit, such as '500 steps'"
    with pytest.raises(ValueError, match=sentence):
        parse(value)


def test_a_period_is_a_whole_number_of_steps_rounded_up_or_stays_in_time():
    # 0.3 * 40 is 12, although the nearest float is not
    steps = {7: 7, "2 epochs": 80, "0.5 epochs": 20, "0.3 epochs": 12, "640 examples": 10, "641 examples": 11}
    steps |= {"25 %": 250, "0.01 %": 1, "0 epochs": 0}
    assert {value: UNITS.period(value) for value in steps} == {v: Period(steps=n) for v, n in steps.items()}
    assert UNITS.period("2 min") == Period(secs=120.0)
    assert Units(run=Period(secs=60.0)).period("25 %") == Period(secs=15.0)


def test_sizes_are_asked_for_once_and_only_if_a_duration_has_their_unit():
    asked = []
    units = Units(lambda: asked.append("epochs") or 5, lambda: asked.append("examples") or 5)
    units.period(3), units.period("1 min")
    assert asked == []
    assert units.period("1 epoch") == units.period("1 epoch") == Period(steps=5) and asked == ["epochs"]


@pytest.mark.parametrize("value", ["2 epochs", "9 examples", "5 %"])
def test_a_unit_of_unknown_size_is_refused(value):
    with pytest.raises(ValueError, match=f"The duration '{value}' was given where .* is .*known: give steps"):
        Units().period(value)


@pytest.mark.parametrize("name", ["checkpoint_every", "eval_every", "log_every", "histograms_every", "until"])
def test_settings_take_steps_and_texts_with_a_unit(name):
    def setting(value):
        return getattr(distloop.Config(workdir="not written", **{name: value}), name)

    assert setting(500) == setting("500") == setting("500 steps") == 500
    assert [setting(text) for text in ("2 h", "2 epochs", "1e6 examples")] == ["2 h", "2 epochs", "1e6 examples"]
    sentence = f"^{name}=.* is not allowed: give a number of steps, or a text with a unit"
    for wrong in ("10 m", -1, 1.5, True, None, float("nan")):
        with pytest.raises(ValueError, match=sentence):
            setting(wrong)


def test_durations_that_are_not_given_have_defaults_of_their_own():
    config = distloop.Config()
    found = [config.checkpoint_every, config.eval_every, config.log_every, config.until]
    assert found == ["10 min", "auto", "auto", ""]
    assert distloop.Config(eval_every="auto") == config


def test_a_period_is_over_after_its_steps_or_its_seconds():
    assert [Period(steps=9).is_over(step, 99.0) for step in (8, 9, 10)] == [False, True, True]
    assert [Period(secs=9.0).is_over(99, secs) for secs in (8.0, 9.0, 10.0)] == [False, True, True]


HUGE = ["1e400", "1e999 steps", "1e19 epochs", 10**400, 10**5_000, "9" * 5_000, 2**63, 1e19]


@pytest.mark.parametrize("value", HUGE, ids=range(len(HUGE)))
def test_more_than_a_run_can_count_is_refused_in_a_sentence(value):
    with pytest.raises(ValueError, match=r"^The duration .{1,100} was given: give a number of steps") as caught:
        parse(value)
    assert len(str(caught.value)) < 400
    assert normalize(value) is None and normalize(2**53 + 1) == 2**53 + 1  # above the whole numbers of a float


def test_a_product_that_no_run_can_count_is_refused():
    with pytest.raises(ValueError, match=r"^A duration of 2e\+19 steps was given; a run has fewer than 9.22337e\+18"):
        Units(steps_per_epoch=lambda: 20).period("1e18 epochs")


def boundaries(until, everys, steps_per_loop=0, start=0):
    """Lists every boundary of a run."""
    found = [start]
    while found[-1] < until:
        found.append(Plan().next_boundary(found[-1], until, everys, steps_per_loop))
    return found[1:]


@pytest.mark.parametrize(
    ("until", "everys", "settings", "expected"),
    [
        (10, [4, 3], {}, [3, 4, 6, 8, 9, 10]),
        (12, [2, 6], {}, [2, 4, 6, 8, 10, 12]),  # one that two periods share occurs once
        (10, [0, None], {}, [10]),
        (5, [100], {}, [5]),
        (12, [5], {"start": 3}, [5, 10, 12]),
        (12, [5], {"start": 5}, [10, 12]),
        (10, [4], {"steps_per_loop": 3}, [3, 4, 7, 8, 10]),
    ],
)
def test_boundaries_are_the_multiples_of_all_periods_and_the_end(until, everys, settings, expected):
    assert boundaries(until, everys, **settings) == expected


def test_the_next_boundary_lies_after_the_step_and_not_beyond_the_end():
    for step, every, steps_per_loop in itertools.product(range(20), range(5), range(4)):
        assert step < Plan().next_boundary(step, 20, [every], steps_per_loop) <= 20
    found = boundaries(100, [25, 40], steps_per_loop=7)  # which divides nothing
    assert {25, 40, 50, 75, 80, 100} <= set(found)
    assert max(b - a for a, b in zip([0, *found], found, strict=False)) <= 7


@pytest.mark.parametrize(("every", "steps"), [(4, [4, 8, 10]), (0, [10]), (7, [7, 10])])
def test_a_period_is_due_at_its_multiples_and_at_the_end(every, steps):
    assert [step for step in range(1, 11) if Plan().is_due(every, step, 10)] == steps == boundaries(10, [every])


def plan(run=Period(steps=100)):  # noqa: B008 - immutable
    return Plan(Units(lambda: 8, lambda: 4, run))


def test_epochs_examples_and_shares_of_the_run_are_due_by_steps():
    for every, steps in {"1 epoch": [8, 16, 24, 32], "20 %": [20], 16: [16, 32]}.items():
        assert [step for step in range(1, 40) if plan().is_due(every, step, 100)] == steps
    assert plan().next_boundary(17, 100, ["2 epochs", "80 examples", None, 0]) == 20


def test_what_is_due_by_time_comes_with_the_next_step_once_a_period():
    run_plan, due = plan(), []
    for before, now in [(0, 9), (9, 11), (11, 19), (19, 21), (21, 45)]:  # a loop of 24 s makes one call, not two
        run_plan.check_clock(before, now, ["10 s", 50, None, "1 h"])
        due.append(run_plan.is_due("10 s", 7, 100))
        assert run_plan.next_boundary(7, 100, [50]) == (8 if due[-1] else 50)
    assert due == [False, True, False, True, True]
    assert not run_plan.is_due("1 h", 7, 100) and run_plan.is_due("1 h", 100, 100)


def test_a_run_that_ends_by_time_ends_with_the_step_after():
    run_plan = plan(Period(secs=60.0))
    assert not run_plan.check_clock(0, 59, [0])
    assert run_plan.next_boundary(5, float("inf"), [0]) == float("inf")
    assert run_plan.check_clock(59, 61, [0])


def test_a_run_that_ends_by_tokens_ends_with_the_step_that_has_them():
    run_plan = plan(Period(tokens=60.0))
    assert run_plan.counts_tokens and not run_plan.count_tokens(0, 59) and run_plan.count_tokens(59, 61)


def test_a_plan_without_a_dataset_knows_steps_and_times_alone():
    assert Plan().period("5 s") == Period(secs=5.0)
    with pytest.raises(ValueError, match="'2 epochs' was given where no dataset is known"):
        Plan().period("2 epochs")

"""Durations from numbers and texts, and what they are in steps or seconds."""

import pytest

import distloop
from distloop.settings.durations import Duration, Period, Units, normalize, parse

UNITS = Units(lambda: 40, lambda: 64, Period(steps=1_000))


@pytest.mark.parametrize("value", [500, "500", "500 steps", " 500steps ", "5e2 steps", 500.0])
def test_a_plain_number_is_a_number_of_steps(value):
    assert parse(value) == Duration(500, "steps")


def test_other_durations_have_a_unit():
    texts = (
        "90 s",
        "10 min",
        "1.5 h",
        "2min",
        "0 s",
        "2 epochs",
        "1 epoch",
        "0.5 epochs",
        "1e6 examples",
        "25 %",
        "5%",
    )
    durations = [parse(text) for text in texts]
    assert [amount for amount, _ in durations] == [90, 600, 5400, 120, 0, 2, 1, 0.5, 1e6, 25, 5]
    assert [unit for _, unit in durations] == ["secs"] * 5 + ["epochs"] * 3 + ["examples", "%", "%"]


WRONG = [
    "",
    "ten",
    "-5",
    "10 m",
    "1.5 steps",
    "1.5",
    "10 min 5 s",
    "inf",
    "nan s",
    None,
    "2 epoch s",
    "3 hs",
    "%",
    "2 %s",
]


@pytest.mark.parametrize("value", WRONG)
def test_anything_else_is_refused(value):
    with pytest.raises(
        ValueError, match="was given: give a number of steps, or a text with a unit, such as '500 steps'"
    ):
        parse(value)


@pytest.mark.parametrize(
    ("value", "steps"),
    [
        (7, 7),
        ("2 epochs", 80),
        ("0.5 epochs", 20),
        ("0.3 epochs", 12),  # 0.3 * 40 is 12, although the nearest float is not
        ("640 examples", 10),
        ("641 examples", 11),
        ("25 %", 250),
        ("0.01 %", 1),
        ("0 epochs", 0),
    ],
)
def test_a_period_is_a_whole_number_of_steps_rounded_up(value, steps):
    assert UNITS.period(value) == Period(steps=steps)


def test_a_period_in_time_stays_in_time_and_so_does_a_share_of_a_run_that_ends_by_time():
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
        return getattr(distloop.Config(**{name: value}), name)

    assert setting(500) == setting("500") == setting("500 steps") == 500
    assert [setting(text) for text in ("2 h", "2 epochs", "1e6 examples")] == ["2 h", "2 epochs", "1e6 examples"]
    for wrong in ("10 m", -1, 1.5, True, None, float("nan")):
        with pytest.raises(
            ValueError, match=f"^{name}=.* is not allowed: give a number of steps, or a text with a unit"
        ):
            setting(wrong)


def test_durations_that_are_not_given_have_defaults_of_their_own():
    config = distloop.Config()
    assert (config.checkpoint_every, config.eval_every, config.log_every, config.until) == (
        "10 min",
        "auto",
        "auto",
        "",
    )
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
    assert normalize(value) is None


def test_a_product_that_no_run_can_count_is_refused():
    with pytest.raises(ValueError, match=r"^A duration of 2e\+19 steps was given; a run has fewer than 9.22337e\+18"):
        Units(steps_per_epoch=lambda: 20).period("1e18 epochs")


def test_steps_above_the_whole_numbers_of_a_float_stay_exact():
    assert normalize(2**53 + 1) == 2**53 + 1

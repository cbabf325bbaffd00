"""Durations from numbers and texts."""

import pytest

import distloop
from distloop.durations import Duration, parse


@pytest.mark.parametrize("value", [500, "500", "500 steps", " 500steps ", "5e2 steps"])
def test_a_plain_number_is_a_number_of_steps(value):
    assert parse(value) == Duration(steps=500)


def test_a_time_has_a_unit():
    assert [parse(text).secs for text in ("90 s", "10 min", "1.5 h", "2min", "0 s")] == [
        90.0,
        600.0,
        5400.0,
        120.0,
        0.0,
    ]
    assert parse("10 min").steps == 0


@pytest.mark.parametrize("value", ["", "ten", "-5", "10 m", "1.5 steps", "1.5", "10 min 5 s", "inf", "nan s", None])
def test_anything_else_is_refused(value):
    with pytest.raises(ValueError, match="give a number of steps, or a time such as '90 s', '10 min' or '2 h'"):
        parse(value)


def test_checkpoint_every_takes_steps_and_times():
    assert distloop.Config().checkpoint_every == "10 min"
    assert distloop.Config(checkpoint_every=500).checkpoint_every == 500
    assert distloop.Config(checkpoint_every="500").checkpoint_every == 500
    assert distloop.Config(checkpoint_every="500 steps").checkpoint_every == 500
    assert distloop.Config(checkpoint_every="2 h").checkpoint_every == "2 h"
    for wrong in ("10 m", -1, 1.5, True, None, float("nan")):
        with pytest.raises(ValueError, match="^checkpoint_every=.* is not allowed: give a number of steps, or a time"):
            distloop.Config(checkpoint_every=wrong)

"""What a call of `fit` decides before it trains; how it trains is tested with the Trainer and in the laws."""

import types

import numpy as np
import pytest

import distloop
from distloop.fit import check_arguments, last_step

SOURCE = types.SimpleNamespace(batches_per_epoch=lambda: 7)


def end(steps=None, epochs=None):
    return last_step(distloop.Config(), SOURCE, steps, epochs)


def test_a_run_ends_with_the_steps_that_fit_was_given():
    assert end(steps=5) == end(steps=np.int64(5)) == 5


def test_epochs_are_passes_over_the_data():
    assert end(epochs=3) == 21


def test_without_arguments_the_config_says_when():
    assert last_step(distloop.Config(steps=4), SOURCE, None, None) == 4
    assert last_step(distloop.Config(epochs=2), SOURCE, None, None) == 14


def test_what_fit_was_given_goes_before_the_config():
    assert last_step(distloop.Config(epochs=2), SOURCE, 5, None) == 5


@pytest.mark.parametrize("steps, epochs", [(None, None), (5, 2), (0, 0)])
def test_exactly_one_of_steps_and_epochs_is_needed(steps, epochs):
    with pytest.raises(ValueError, match=r"exactly one of them: give fit\(steps=...\)"):
        end(steps, epochs)


@pytest.mark.parametrize("steps", [1.5, -1, True, "10"])
def test_steps_are_whole_numbers(steps):
    with pytest.raises(ValueError, match=r"it takes a whole number, 1 or more"):
        end(steps)


def test_an_action_without_a_period_is_refused():
    with pytest.raises(ValueError, match="an action is a callable with an attribute `every`"):
        check_arguments({}, [lambda report: None], [])


def test_evaluations_are_a_dict_by_name():
    with pytest.raises(ValueError, match="fit takes a dict of datasets by name"):
        check_arguments([object()], [], [])
    check_arguments(None, [], [])

"""What a call of `fit` decides before it trains; how it trains is tested with the Trainer and in the laws."""

import pytest

from distloop.fit import check_arguments


def test_an_action_without_a_period_is_refused():
    with pytest.raises(ValueError, match="an action is a callable with an attribute `every`.*or give a Keras callback"):
        check_arguments([lambda report: None], [])


@pytest.mark.parametrize("every", ["5 m", -1, True, 2.5])
def test_an_action_whose_period_is_no_duration_is_refused(every):
    def act(report):
        """Does nothing."""

    act.every = every
    with pytest.raises(ValueError, match=f"The action .*act.* has every={every!r}: give a number of steps, or a text"):
        check_arguments([act], [])

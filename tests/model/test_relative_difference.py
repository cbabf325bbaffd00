import numpy as np
import pytest

from distloop.model.saved_state import relative_difference


def test_the_difference_is_relative_to_the_norm_unless_that_is_near_zero():
    assert relative_difference([3.0, 0.0], [0.0, 4.0]) == 5 / 4
    assert relative_difference(np.full((2, 2), 1.001), np.ones((2, 2))) == pytest.approx(1e-3)
    assert relative_difference(2, 2) == relative_difference(np.zeros(2), np.zeros(2)) == 0.0
    assert relative_difference([1e-8], [0.0], least_norm=1e-6) == pytest.approx(1e-2)
    assert relative_difference(np.zeros(3), np.zeros((3, 1))) == float("inf")


def test_nan_and_infinity_match_themselves_alone_and_other_entries_count():
    for values, reference in (([np.nan], [1.0]), ([1.0], [np.nan]), ([np.inf], [1.0]), ([np.inf], [-np.inf])):
        assert relative_difference(values, reference) == float("inf")
    odd = [np.nan, np.inf, -np.inf]
    assert relative_difference(odd, odd) == 0.0
    assert relative_difference([*odd, 3.0], [*odd, 4.0]) == 0.25

import numpy as np
import pytest

from distloop.comparison import relative_difference


def test_the_difference_is_relative_to_the_norm_of_the_reference():
    assert relative_difference([3.0, 0.0], [0.0, 4.0]) == 5 / 4
    assert relative_difference(np.full((2, 2), 1.001), np.ones((2, 2))) == pytest.approx(1e-3)
    assert relative_difference(2, 2) == 0.0


def test_other_shapes_differ_infinitely():
    assert relative_difference(np.zeros(3), np.zeros((3, 1))) == float("inf")


def test_a_reference_near_zero_has_a_least_norm():
    assert relative_difference(np.zeros(2), np.zeros(2)) == 0.0
    assert relative_difference([1e-8], [0.0], least_norm=1e-6) == pytest.approx(1e-2)


def test_nan_is_no_match():
    assert not relative_difference([np.nan], [1.0]) <= 1.0

"""Sums in a fixed binary tree."""

import operator

import numpy as np
import pytest

from distloop.distributed.tree_sums import TreeSum, tree_sum


@pytest.mark.parametrize("count", [1, 2, 4, 8, 32])
def test_a_sum_of_sums_has_the_same_bits_whatever_the_cut(count):
    values = np.random.default_rng(0).normal(size=(count, 1000)).astype(np.float32)
    whole = tree_sum(values)
    for parts in (2**i for i in range(count.bit_length())):
        assert tree_sum([tree_sum(part) for part in np.split(values, parts)]).tobytes() == whole.tobytes()
    if count == 32:  # the law would hold for any sum if rounding did not show
        assert np.sum(values, 0).tobytes() != whole.tobytes()


def test_values_are_added_in_pairs_as_soon_as_they_are_there():
    tree = TreeSum[str](lambda a, b: f"({a}+{b})")
    assert [tree.append(name) for name in "abcd"] == ["a", "(a+b)", "c", "((a+b)+(c+d))"]
    assert tree.total() == "((a+b)+(c+d))"


def test_few_values_are_held():
    tree = TreeSum[int](operator.add)
    most = 0
    for _ in range(64):
        tree.append(1)
        most = max(most, len(tree._partial))
    assert (tree.total(), most) == (64, 6)

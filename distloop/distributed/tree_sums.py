"""Sums in a fixed binary tree, whose bits do not depend on where its parts are added.

    tree_sum([a, b, c, d])                   # (a + b) + (c + d): the same bits as the sum of a + b and c + d

Floating-point addition is not associative, so a sum over replicas has the same bits on any number of devices only if
the same numbers are added in the same pairs. It does not know what is added.
"""

import operator
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class TreeSum(Generic[T]):
    """A sum of N values, a power of two, that come one after the other; it holds log2(N) + 1 of them at most."""

    def __init__(self, add: Callable[[T, T], T]):
        """Starts without a value."""
        self._add = add
        self._partial: list[tuple[int, T]] = []  # how many values a sum has, and the sum; ever fewer

    def append(self, value: T) -> T:
        """Adds the next value; returns the largest sum that it completes."""
        size = 1
        while self._partial and self._partial[-1][0] == size:
            value = self._add(self._partial.pop()[1], value)
            size *= 2
        self._partial.append((size, value))
        return value

    def total(self) -> T:
        """Returns the sum of all values."""
        ((_, value),) = self._partial
        return value


def tree_sum(values: Iterable[Any]) -> Any:
    """Returns the sum of N tensors, a power of two, in their order."""
    tree = TreeSum[Any](operator.add)
    for value in values:
        tree.append(value)
    return tree.total()

"""Neighbors: which workers hear each other, so that heartbeats do not grow with the square of the workers.

    neighbors(0, 1000)      # (1, 2, 4, ..., 256, 744, ..., 996, 998, 999)
    max_hops(1000)          # 10: news passes to all workers over at most so many neighbors

Up to 8 workers all hear each other. Of more, each hears those that are 1, 2, 4, 8, ... places before and after it in a
circle: twice the logarithm of their number, and no worker more than another. The rest is told by neighbors.
"""

import functools

_FEW = 8


@functools.cache
def neighbors(index: int, count: int) -> tuple[int, ...]:
    """Returns the workers that worker `index` of `count` sends heartbeats to, and hears; whoever hears is heard."""
    if count <= _FEW:
        return tuple(i for i in range(count) if i != index)
    distances = [2**i for i in range(count.bit_length()) if 2**i <= count // 2]
    return tuple(sorted({(index + sign * distance) % count for distance in distances for sign in (-1, 1)}))


def max_hops(count: int) -> int:
    """Returns a number of steps from neighbor to neighbor that leads from any worker of `count` to any other one."""
    return 1 if count <= _FEW else count.bit_length()  # a distance is the sum of the powers of two of its digits

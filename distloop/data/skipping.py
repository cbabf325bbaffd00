"""Skipping: reads batches and throws them away, in pieces between which the host may look at other things.

    behind = Behind(iterator, 300)
    while behind.skip(secs=0.5):
        ...

`Dataset.skip` is one operation that nothing can end. It does not know which batches to skip, nor why.
"""

import math
from typing import Any

import tensorflow as tf

from distloop.distributed.devices import HOST
from distloop.graph_functions import TimeLimit, graph_function


class Behind:
    """An iterator that is some batches behind its place.

    Attributes:
        num_batches: by which it is behind.
    """

    def __init__(self, iterator: Any, num_batches: int):
        """Reads nothing yet.

        Args:
            iterator: over a dataset, or a distributed one.
            num_batches: to skip.
        """
        self._iterator = iterator
        self.num_batches = num_batches

    def skip(self, most: int | None = None, secs: float = math.inf) -> int:
        """Reads batches and throws them away; returns how many are then left.

        Args:
            most: how many to read; None: all.
            secs: after which it begins no other batch; it reads one at least.
        """
        count = self.num_batches if most is None else min(most, self.num_batches)
        if count:
            with tf.device(HOST):
                limits = tf.constant(count, tf.int64), tf.constant(secs, tf.float64)
                self.num_batches -= int(_discard(self._iterator, *limits))
        return self.num_batches


@graph_function
def _discard(iterator: Any, count: tf.Tensor, secs: tf.Tensor) -> tf.Tensor:
    """Returns how many batches were read when so many were, or so many seconds had passed."""
    time_limit = TimeLimit(secs)

    def read(done: tf.Tensor) -> tuple[tf.Tensor]:
        batch = next(iterator)
        with tf.control_dependencies(tf.nest.flatten(batch, expand_composites=True)):
            return (done + 1,)

    def goes_on(done: tf.Tensor) -> tf.Tensor:
        return (done < count) & (time_limit.is_ahead() | (done == 0))

    return tf.while_loop(goes_on, read, (tf.constant(0, tf.int64),), parallel_iterations=1)[0]

"""Graph functions: makes `tf.function`s without AutoGraph or warnings about many traces; clocks in graphs.

    read = graph_function(lambda: strategy.run(read_on_replica))

TensorFlow counts the traces of all functions made of one line of code together, and warns at the fifth: of five
trainers in a process, each of which traces such a function once.
"""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf


def graph_function(fn: Callable[..., Any], *, autograph: bool = False, **options: Any) -> Any:
    """Returns a `tf.function`, with AutoGraph if it is of a user's function; the options are those of `tf.function`."""
    traced = tf.function(fn, autograph=autograph, **options)
    traced._omit_frequent_tracing_warning = True  # private: users could not avoid it
    return traced


class TimeLimit:
    """A time limit in a graph, whose only clock can be set; a clock set back by more than the limit ends it, too."""

    def __init__(self, secs: tf.Tensor):
        """Starts the time; `secs` is a float64."""
        self._began_at, self._limit = tf.timestamp(), tf.square(tf.maximum(secs, 0.0))

    def is_ahead(self) -> tf.Tensor:
        """Computes whether the time is not over yet."""
        return tf.math.squared_difference(tf.timestamp(), self._began_at) < self._limit


def graph_clock() -> Callable[[Any], np.ndarray]:
    """Returns a function from times of `tf.timestamp`, in order, to those of the monotonic clock.

    The times lie between this call and that of the function. Where the clock was set in between, the results are
    inexact, but in order, and between the two calls.
    """
    began_at = time.monotonic()

    def convert(times: Any) -> np.ndarray:
        ended_at = time.monotonic()
        return np.maximum.accumulate(np.clip(np.asarray(times) + (ended_at - time.time()), began_at, ended_at))

    return convert

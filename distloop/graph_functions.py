"""TensorFlow functions: without AutoGraph if they are distloop's own, and without a warning about many traces.

    read = graph_function(lambda: strategy.run(read_on_replica))

TensorFlow counts the traces of all functions made of one line of code together, and warns at the fifth: of five
trainers in a process, each of which traces such a function once.
"""

from collections.abc import Callable
from typing import Any

import tensorflow as tf


def graph_function(fn: Callable[..., Any], *, autograph: bool = False, **options: Any) -> Any:
    """Returns a `tf.function`, with AutoGraph if it is of a user's function; the options are those of `tf.function`."""
    traced = tf.function(fn, autograph=autograph, **options)
    traced._omit_frequent_tracing_warning = True  # private: users could not avoid it
    return traced

"""Replica check: compares the bits of each variable over all replicas of all workers during a run.

    CheckReplicas(every=1_000)      # Config(check_replicas_every=1_000): ValueError at the first difference

A checksum of each variable is computed where the variable is, and only checksums travel. Random streams, which each
replica has of its own, and what is on one device alone are left out. It does not know what made replicas differ.
"""

from typing import Any

import numpy as np
import tensorflow as tf

from distloop.actions.action import Action, Report
from distloop.distributed import workers
from distloop.graph_functions import graph_function
from distloop.variables import tensorflow_variable

_INTEGERS = {1: tf.uint8, 2: tf.int16, 4: tf.int32, 8: tf.int64}  # by the bytes of an element


class CheckReplicas(Action):
    """Compares the variables of all replicas and workers."""

    phase = "checking replicas"

    def __init__(self, every: int | str):
        """Stores when; `every` is as for `Action`."""
        self.every: int | str | None = every
        self._checksums: Any = None

    def __call__(self, report: Report) -> None:
        """Compares them, on all workers.

        Raises:
            ValueError: on every worker, if a variable differs.
        """
        state, strategy = report.state, report.state.strategy
        own = {id(v) for v in (*state.seeds, *state.recurrent_states)}
        variables = state.all_variables()
        shared = {n: v for n, v in variables.items() if id(v) not in own and getattr(v, "is_mirrored", True)}
        if self._checksums is None:  # traced once
            parts = [strategy.experimental_local_results(tensorflow_variable(v)) for v in shared.values()]
            self._checksums = graph_function(lambda: [[checksum(p) for p in of] for of in parts])
        local = [np.array([int(number) for number in of]) for of in self._checksums()]  # [L] each, L local replicas
        of_workers = workers.Workers(strategy).gather(dict(zip(shared, local, strict=True)))
        different = [name for name in shared if len({int(s) for of in of_workers for s in of[name]}) > 1]
        if not different:
            return
        name = different[0]
        by_place = [(w, r, int(s)) for w, of in enumerate(of_workers) for r, s in enumerate(of[name])]
        worker, replica, _ = next(place for place in by_place if place[2] != by_place[0][2])
        more = f" and {len(different) - 1} more" if len(different) > 1 else ""
        raise ValueError(
            f"At step {report.step} {name}{more} of replica {replica} of worker {worker} differs from that of the "
            "first replica: the forward pass writes an integer variable, a gradient_fn or step_fn draws random "
            "numbers, code outside the step changes variables on one replica or worker alone, or a device computes "
            "wrong: run without each, and go on from an older checkpoint."
        )


def checksum(variable: tf.Variable) -> tf.Tensor:
    """Returns the sum of a variable's bits, read as integers, modulo 2^64: a scalar int64."""
    value = tf.cast(variable, tf.uint8) if variable.dtype == tf.bool else tf.convert_to_tensor(variable)
    return tf.reduce_sum(tf.cast(tf.bitcast(value, _INTEGERS[value.dtype.size]), tf.int64))

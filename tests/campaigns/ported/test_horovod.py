"""The Horovod script of docs/ported_scripts.md: its port has the mean of the processes' losses at every step.

Horovod is not installed: threads take the place of its processes. One runs at a time, up to the next exchange. There,
gradients become their mean, or variables get the values of the first process.
"""

import concurrent.futures
import threading
import types

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.campaigns.ported.scripts import assert_equal_losses, run, run_port, section
from tests.problems import mostly_wide

pytestmark = pytest.mark.slow

ORIGINAL, PORT = section("A Horovod script")
STEPS = 4
SMALLER = ("batch(128", "batch(16")


class Processes:
    """As many threads as there would be processes."""

    def __init__(self, count):
        self.count, self.turn, self.values = count, threading.Lock(), [None] * count
        self.all_arrived = threading.Barrier(count)

    def exchange(self, rank, value):
        """Returns the values of all, once each has given its own."""
        self.values[rank] = value
        self.turn.release()
        self.all_arrived.wait(300)
        values = list(self.values)
        self.all_arrived.wait(300)
        self.turn.acquire()
        return values

    def run(self, rank):
        """Runs the script in one; returns what it printed."""
        with self.turn:
            changes = [SMALLER, ("10_000 // ", f"{STEPS} * ")]
            return run(ORIGINAL, replacements=changes, hvd=self.horovod(rank))["printed"]

    def horovod(self, rank):
        """Returns what `horovod.tensorflow` is in a process."""

        class DistributedGradientTape:
            def __init__(self, tape):
                self.tape = tape

            def gradient(tape, loss, variables):
                gradients = self.exchange(rank, tape.tape.gradient(loss, variables))
                return [tf.add_n(parts) / self.count for parts in zip(*gradients, strict=True)]

        def broadcast_variables(variables, root_rank):
            values = self.exchange(rank, [tf.identity(v) for v in variables])[root_rank]
            for variable, value in zip(variables, values, strict=True):
                variable.assign(value)

        return types.SimpleNamespace(
            init=lambda: keras.utils.set_random_seed(0),
            size=lambda: self.count,
            rank=lambda: rank,
            DistributedGradientTape=DistributedGradientTape,
            broadcast_variables=broadcast_variables,
        )


@pytest.fixture
def eager_functions():
    tf.config.run_functions_eagerly(True)  # an exchange is Python
    yield
    tf.config.run_functions_eagerly(False)


@pytest.mark.parametrize("processes", mostly_wide([1, 2]))
def test_each_step_has_the_mean_loss_of_the_processes(processes, eager_functions):
    with concurrent.futures.ThreadPoolExecutor(processes) as pool:
        printed = list(pool.map(Processes(processes).run, range(processes)))
    tf.config.run_functions_eagerly(False)
    changes = [SMALLER, ("base_batch_size=128", "base_batch_size=16"), ("0.001, 128 *", "0.001, 16 *")]
    changes.append(("replicas = 2", f"replicas = {processes}"))
    _, rows = run_port(PORT, replicas=processes, steps=STEPS, replacements=changes)
    expected = np.mean([[loss for _, loss in losses] for losses in printed], axis=0)
    assert_equal_losses([row["loss"] for row in rows], expected[:STEPS])

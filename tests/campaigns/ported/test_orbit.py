"""The Orbit trainer of docs/ported_scripts.md: its port has the same loss and accuracy at every step.

The tests do not require Orbit. Where it is missing, a class does what its `StandardTrainer.train` does: steps in one
`tf.function`, between `train_loop_begin` and `train_loop_end`.
"""

import importlib.util
import types

import numpy as np
import pytest
import tensorflow as tf

from tests.campaigns.ported.scripts import MIRRORED, assert_equal_losses, run, run_port, section

pytestmark = pytest.mark.slow

ORIGINAL, PORT = section("An Orbit StandardTrainer")
STEPS = 5


class StandardTrainer:
    def __init__(self, train_dataset):
        self.iterator = iter(train_dataset)
        self.steps = tf.function(self.train_steps)

    def train_steps(self, count):
        for _ in tf.range(count):
            self.train_step(self.iterator)

    def train(self, count):
        self.train_loop_begin()
        self.steps(count)
        return self.train_loop_end()


class StepByStep:
    """In place of Orbit's controller, with a loop of one step, whose numbers it keeps."""

    def __init__(self, trainer, global_step, steps_per_loop):
        self.trainer, self.numbers = trainer, []

    def train(self, steps):
        for _ in range(STEPS):
            numbers = self.trainer.train(tf.constant(1))
            self.numbers.append([float(numbers["loss"]), float(numbers["accuracy"])])


def orbit():
    trainer = StandardTrainer
    if importlib.util.find_spec("orbit"):
        import orbit

        trainer = orbit.StandardTrainer
    return types.SimpleNamespace(StandardTrainer=trainer, Controller=StepByStep)


@pytest.mark.wide
def test_each_step_has_the_numbers_of_the_orbit_trainer():
    on_cpus = ("tf.distribute.MirroredStrategy()", MIRRORED[2])
    expected = np.asarray(run(ORIGINAL, replacements=[on_cpus], orbit=orbit())["controller"].numbers)
    _, rows = run_port(PORT, replicas=2, steps=STEPS)
    assert_equal_losses([row["loss"] for row in rows], expected[:, 0])
    np.testing.assert_allclose([row["accuracy"] for row in rows], expected[:, 1], rtol=1e-6)

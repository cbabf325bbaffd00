"""What Accelerate asserts about synchronization and data loops, asserted of a Trainer.

The scenarios are those of Hugging Face Accelerate (Apache-2.0): test_sync.py and test_distributed_data_loop.py in
src/accelerate/test_utils/scripts. Its processes are replicas here, and in one test workers. Asserted elsewhere: an
evaluation leaves the training data where it is, and a pass sees each row once, tests/test_laws.py; a resumed run goes
on with the rows that were left, tests/checkpoints/test_resume.py; a pickled config, tests/settings/test_config.py.
Without a counterpart:

- `no_sync`, and gradients that differ until they are synchronized: every step synchronizes, and there is no other state
- several forward passes before several backward passes: a step has one of each for every microbatch
- `even_batches`, `join_uneven_inputs` and its warnings: uneven batches need no setting, and no row is repeated
- samplers: a dataset comes in batches
"""

import keras
import numpy as np
import pytest
import tensorflow as tf

import distloop
from tests import forked
from tests.problems import local_values, on

pytestmark = [pytest.mark.slow, pytest.mark.wide]

RNG = np.random.default_rng(42)
X = RNG.normal(size=80).astype(np.float32)
REGRESSION = {"x": X, "y": (2 * X + 3 + 0.1 * RNG.normal(size=80)).astype(np.float32)}
RATE = 0.01


class RateOfPower(keras.optimizers.schedules.LearningRateSchedule):
    def __call__(self, step):
        return RATE * tf.cast(step, tf.float32) ** 0.65


def regression():
    a, b = (keras.Variable(0.0, name=name) for name in "ab")

    def loss_fn(batch, training):
        return {"loss": tf.square(a.value * batch["x"] + b.value - batch["y"])}

    return distloop.ModelSpec({"a": a, "b": b}, keras.optimizers.AdamW(RateOfPower(), weight_decay=0.01), loss_fn)


def by_hand(batch_size, steps):
    """Returns the weights and the learning rate after each step, computed with NumPy."""
    weights, mean, square, rows = np.zeros(2), np.zeros(2), np.zeros(2), []
    batches = [slice(start, min(start + batch_size, 80)) for start in range(0, 80, batch_size)]
    for t in range(steps):
        x, y = (REGRESSION[name][batches[t % len(batches)]].astype(np.float64) for name in "xy")
        error = 2 * (weights[0] * x + weights[1] - y)
        gradient = np.array([(error * x).mean(), error.mean()])
        rate = RATE * t**0.65
        weights = weights * (1 - 0.01 * rate)
        mean, square = 0.9 * mean + 0.1 * gradient, 0.999 * square + 0.001 * gradient**2
        corrected = rate * np.sqrt(1 - 0.999 ** (t + 1)) / (1 - 0.9 ** (t + 1))
        weights = weights - corrected * mean / (np.sqrt(square) + 1e-7)
        rows.append([*weights, RATE * (t + 1) ** 0.65])
    return rows


# test_sync.py -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("replicas,microbatches,batch_size", [(2, 1, 16), (2, 2, 32), (1, 2, 32), (3, 2, 32)])
def test_every_step_is_in_sync_with_the_formula_and_the_schedule(replicas, microbatches, batch_size):
    """Two accumulated batches of 16 are a batch of 32 in two microbatches; the last of 80 rows are half as many."""
    rows = []

    def record(report):
        values = [local_values(trainer, trainer.model[name]) for name in "ab"]
        assert all(len({value.tobytes() for value in of_replicas}) == 1 for of_replicas in values)
        rows.append([*(float(of_replicas[0]) for of_replicas in values), report.metrics["learning_rate"]])

    record.every = 1
    trainer = distloop.Trainer(regression, on(replicas, microbatches=microbatches, log_every=1))
    trainer.fit(distloop.make_dataset(REGRESSION, batch_size), steps=7, actions=[record])
    np.testing.assert_allclose(rows, by_hand(batch_size, 7), rtol=1e-5, atol=1e-7)
    assert int(trainer.optimizer.iterations.numpy()) == 7


# test_distributed_data_loop.py ------------------------------------------------------------------------------------


def look_at_elements():
    """Returns what one of the workers sees of three elements in batches of one, and of 22 in batches of 8."""

    def model_fn():
        weight = keras.Variable(1.0, name="weight")

        def loss_fn(batch, training):
            element = tf.cast(batch, tf.float32)
            return {"loss": element * weight.value, "square": element**2}

        spec = {"weight": weight}, keras.optimizers.SGD(0.0), loss_fn
        return distloop.ModelSpec(*spec, predict_fn=lambda batch: batch)

    def sums(numbers, count):
        return [round(count * numbers[name], 3) for name in ("loss", "square")]

    trainer = distloop.Trainer(model_fn, distloop.Config(device="cpu"))
    few = trainer.fit(tf.data.Dataset.range(3).batch(1), epochs=1)
    data = tf.data.Dataset.range(22).shuffle(22, seed=3).batch(8)
    numbers = trainer.fit(data, steps=trainer.step + 3)
    return sums(few, 3), sums(numbers, 22), trainer.predict(data).tolist(), trainer.step


def test_workers_see_every_element_once_and_wait_for_none_that_has_fewer():
    results = forked.run_in_workers(look_at_elements, 2)
    assert results[0] == results[1]
    few, numbers, predictions, step = results[0]
    assert few == [3, 5] and numbers == [sum(range(22)), sum(i * i for i in range(22))]
    assert sorted(predictions) == list(range(22)) and step == 6

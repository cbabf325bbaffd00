"""The moving average of the weights: its formula, and the swap that leaves no trace."""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf

from distloop.optimizers.slot_placement import MovingAverage
from tests.problems import mirrored

DECAY = 0.9


def expected(weights):
    """Averages a list of weights, the first ones first, as the formula says."""
    average = np.asarray(weights[0], np.float64)
    for t, weight in enumerate(weights[1:], start=1):
        average = average + (1 - min(DECAY, (1 + t) / (10 + t))) * (weight - average)
    return average


def local(strategy, variable):
    return [value.numpy() for value in strategy.experimental_local_results(variable)]


@pytest.fixture(params=range(3), ids=["none", "mirrored-1", "mirrored-2"])
def strategy(request):
    return mirrored(request.param) if request.param else tf.distribute.get_strategy()


def make(strategy, values):
    with strategy.scope():
        variables = [tf.Variable(value) for value in values]
        return variables, MovingAverage(variables, DECAY)


def train(strategy, variables, average, steps):
    """Adds the step to each variable and updates the average, in a replica's context."""

    def replica_fn(t):
        for variable in variables:
            variable.assign_add(tf.ones_like(variable) * tf.cast(t, variable.dtype))
        average.update(variables, t)

    run = tf.function(lambda t: strategy.run(replica_fn, args=(t,)), autograph=False)
    for t in range(1, 1 + steps):
        run(tf.constant(t, tf.int64))


def test_the_average_follows_the_formula_on_every_replica(strategy):
    variables, average = make(strategy, [[1.0, 2.0], [[5.0]]])
    assert not any(averaged.trainable for averaged in average.variables)
    train(strategy, variables, average, 100)  # past the warm-up, which ends at t = 80
    for variable, averaged, first in zip(variables, average.variables, ([1.0, 2.0], [[5.0]]), strict=True):
        weights = np.asarray(first) + np.cumsum(range(101)).reshape([-1] + [1] * np.ndim(first))
        np.testing.assert_array_equal(variable.numpy(), weights[-1])
        for value in local(strategy, averaged):
            np.testing.assert_allclose(value, expected(weights), rtol=1e-5)


def test_the_decay_warms_up_and_only_the_variables_given_are_moved():
    variables, average = make(tf.distribute.get_strategy(), [0.0, 0.0])
    for variable in variables:
        variable.assign(1.0)
    average.update(variables[:1], tf.constant(1))
    np.testing.assert_allclose(average.variables[0], 9 / 11, rtol=1e-6)  # 1 - 2 / 11 of the way to 1
    assert float(average.variables[1]) == 0.0


@pytest.mark.parametrize("make_variable", [keras.Variable, lambda value: tf.Variable(value, dtype=tf.float64)])
def test_variables_of_keras_and_of_any_dtype_are_averaged(make_variable):
    variable = make_variable([1.0, 2.0])
    average = MovingAverage([variable], DECAY)
    variable.assign([2.0, 2.0])
    average.update([variable], tf.constant(1))
    assert average.variables[0].dtype == variable.dtype
    np.testing.assert_allclose(average.variables[0], [1 + 9 / 11, 2.0], rtol=1e-6)
    with average.applied():
        np.testing.assert_allclose(variable.numpy(), [1 + 9 / 11, 2.0], rtol=1e-6)
    np.testing.assert_array_equal(variable.numpy(), [2.0, 2.0])


@pytest.fixture
def trained(strategy):
    """A variable and its average after 5 steps, and a function that returns what each replica holds of both."""
    variables, average = make(strategy, [np.random.default_rng(0).normal(size=[50]).astype(np.float32)])
    train(strategy, variables, average, 5)
    return variables[0], average, lambda: [local(strategy, v) for v in (variables[0], average.variables[0])]


@pytest.mark.parametrize("error", [None, KeyError], ids=["", "after an exception"])
def test_applied_shows_the_averages_and_puts_every_bit_back(strategy, trained, error):
    variable, average, both = trained
    weights, averages = both()
    assert not np.array_equal(weights[0], averages[0])
    with pytest.raises(error) if error else contextlib.nullcontext(), average.applied():
        np.testing.assert_array_equal(local(strategy, variable), averages)
        if error:
            raise error
    np.testing.assert_array_equal(both(), [weights, averages])

"""Random streams: each replica has its own, and they can be restored."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

from distloop.config import Config
from distloop.distributed import strategies
from distloop.training.random_streams import SEED_STRIDE
from distloop.training.spec import ModelSpec
from distloop.training.state import TrainState

ONE = tf.distribute.get_strategy()


@functools.cache
def replicas(count):
    return strategies.make_strategy(Config(device="cpu", strategy="mirrored", num_devices=count))


def dropout_state(strategy):
    def model_fn():
        model = keras.Sequential([keras.Input((100,)), keras.layers.Dropout(0.5), keras.layers.Dense(1)])
        return ModelSpec(model, keras.optimizers.SGD(0.1), lambda batch, training: {"loss": model(batch)})

    keras.utils.set_random_seed(0)
    return TrainState.make(model_fn, strategy)


def test_every_replica_starts_its_random_streams_elsewhere():
    made = dropout_state(replicas(3))
    (seed,) = made.seeds
    starts = [value.numpy().astype(np.int64) for value in replicas(3).experimental_local_results(seed.value)]
    assert [int(start[0] - starts[0][0]) % 2**32 for start in starts] == [r * SEED_STRIDE for r in range(3)]
    assert len({int(start[1]) for start in starts}) == 1


def test_one_replica_draws_what_keras_draws():
    keras.utils.set_random_seed(0)
    expected = keras.layers.Dropout(0.5).seed_generator.state.numpy()
    (seed,) = dropout_state(ONE).seeds
    np.testing.assert_array_equal(seed.numpy(), expected)


def test_every_replica_draws_masks_of_its_own_each_time():
    strategy = replicas(2)
    made = dropout_state(strategy)
    dropout = made.model.layers[0]
    draw = tf.function(lambda: strategy.run(lambda: dropout(tf.ones([1, 100]), training=True)), autograph=False)
    masks = [part.numpy().tobytes() for _ in range(3) for part in strategy.experimental_local_results(draw())]
    assert len(set(masks)) == 6


@pytest.mark.parametrize("strategy", [ONE, replicas(2)], ids=["none", "mirrored"])
def test_random_streams_can_be_restored_on_every_replica(strategy):
    made = dropout_state(strategy)
    dropout = made.model.layers[0]
    draw = tf.function(lambda: strategy.run(lambda: dropout(tf.ones([1, 100]), training=True)), autograph=False)

    def masks():
        return [part.numpy().tobytes() for part in strategy.experimental_local_results(draw())]

    with made.random_streams.preserved():
        first = masks()
        assert masks() != first
    assert masks() == first
    before = made.random_streams.read()
    second = masks()
    made.random_streams.write(before)
    assert masks() == second

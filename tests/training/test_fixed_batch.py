"""Models made for a fixed number of rows, on replicas that get others."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import distloop
from distloop.training.user_functions import explaining_fixed_sizes, fixed_sizes
from tests.compiled_models import X, Y, batches, compiled
from tests.problems import on


class Centered(keras.layers.Layer):
    """Works with the number of rows that it was built for only."""

    def build(self, shape):
        self.rows = shape[0]

    def call(self, x):
        return x - tf.reduce_mean(tf.reshape(x, [self.rows, -1]), 1, keepdims=True)


def model_for(rows, layer):
    return compiled(keras.Sequential([keras.Input(batch_shape=(rows, 6)), layer, keras.layers.Dense(2)], name="net"))


def test_sizes_are_those_of_the_models_at_the_top():
    fixed = keras.Sequential([keras.Input(batch_shape=(8, 6)), keras.layers.Dense(2)], name="net")
    free = keras.Sequential([keras.Input((6,)), keras.layers.Dense(2)])
    assert fixed_sizes([fixed, free]) == {8: "net"}


def test_other_errors_stay_as_they_are():
    def fail(batch):
        raise ValueError("no targets")

    with pytest.raises(ValueError, match="^no targets$"):
        explaining_fixed_sizes(fail, sizes={8: "net"}, replicas=2)({"x": tf.ones([4])})


@pytest.mark.slow
@pytest.mark.parametrize(("batch_size", "is_whole", "rows"), [(8, True, "4"), (16, False, "a number that is known")])
def test_a_model_that_takes_other_rows_than_a_replica_gets_is_refused(batch_size, is_whole, rows):
    trainer = distloop.Trainer(distloop.from_keras(model_for(8, Centered())), on(2))
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(batch_size, drop_remainder=is_whole)
    with pytest.raises(ValueError, match=f"'net' is made for 8 rows by .* gets {rows}.*, or batches of 16 rows, with"):
        trainer.fit(data, steps=1)


@pytest.mark.slow
def test_a_model_trains_where_its_rows_fit_or_do_not_matter():
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(16, drop_remainder=True)
    trainer = distloop.Trainer(distloop.from_keras(model_for(8, Centered())), on(2))
    assert np.isfinite(trainer.fit(data, steps=1)["loss"])
    trainer = distloop.Trainer(distloop.from_keras(model_for(8, keras.layers.Dense(3))), on(2))
    assert np.isfinite(trainer.fit(batches(X, Y, batch_size=12), steps=2)["loss"])

"""Evaluation: one pass over a dataset."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import distloop
from tests.problems import assert_equal, on, weights


def make_trainer(*, has_metric=False, **settings):
    def model_fn():
        model = keras.Sequential([keras.Input((1,)), keras.layers.BatchNormalization(), keras.layers.Dense(1)])

        def loss_fn(batch, training):
            model(batch["x"], training=True)  # writes statistics
            outputs = {"loss": tf.square(batch["x"][:, 0]), "scaled": 2.0 * batch["x"][:, 0]}
            return outputs | ({"mean": (batch["x"],)} if has_metric else {})

        metrics = {"mean": keras.metrics.Mean()} if has_metric else None
        return distloop.ModelSpec(model, keras.optimizers.SGD(0.1), loss_fn, metrics=metrics)

    return distloop.Trainer(model_fn, on(1, **settings))


def dataset(rows=5):
    x = np.arange(1, rows + 1, dtype=np.float32)[:, None]
    return tf.data.Dataset.from_tensor_slices({"x": x}).batch(2)


@pytest.mark.parametrize("eager", [False, True])
def test_a_pass_divides_sums_over_all_examples_once(eager):
    trainer = make_trainer(has_metric=True, eager=eager)
    for _ in range(2):
        assert trainer.evaluate(dataset()) == {"loss": 11.0, "scaled": 6.0, "mean": 3.0}


def test_a_limit_counts_batches():
    assert make_trainer(limit_eval_batches=1).evaluate(dataset()) == {"loss": 2.5, "scaled": 3.0}


def test_statistics_that_the_forward_pass_writes_are_restored():
    trainer = make_trainer()
    before = weights(trainer)
    trainer.evaluate(dataset())
    assert_equal(weights(trainer), before)

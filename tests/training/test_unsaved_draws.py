"""Random numbers that no checkpoint can continue are refused before the first step, wherever they are drawn."""

from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf

import distloop
from distloop.training.step_operations import unsaved_draws
from tests.problems import on, refused

DATA = {"x": np.ones((8, 2), np.float32)}
GENERATOR = tf.random.Generator.from_seed(1)


@tf.function
def noisy(x):
    return x + tf.random.normal(tf.shape(x))


DRAWS = {
    "RandomStandardNormal": lambda x: x + tf.random.normal([2]),
    "RandomUniform": lambda x: tf.nn.dropout(x, 0.5),
    "RandomUniformInt": lambda x: tf.cond(x[0] > 0, lambda: x, lambda: tf.image.random_crop(x, [2])),
    "RandomShuffle": lambda x: tf.while_loop(lambda x: x[0] > 0, lambda x: [tf.random.shuffle(x)], [x])[0],
    "TruncatedNormal": lambda x: x + tf.random.truncated_normal([2]),
    "Multinomial": lambda x: tf.random.categorical([x], 1),
    "RandomGamma": lambda x: tf.random.gamma([], x),
    "RandomPoissonV2": lambda x: tf.random.poisson([], x),
    "LogUniformCandidateSampler": lambda x: tf.random.log_uniform_candidate_sampler([[1]], 1, 1, True, 9),
    "RngReadAndSkip": lambda x: x + GENERATOR.normal([2]),
    "StatefulRandomBinomial": lambda x: GENERATOR.binomial([2], 3.0, [0.5, 0.5]),
}
KEEPS_ITS_STATE = {
    "nothing": lambda x: x,
    "stateless": lambda x: x + tf.random.stateless_normal([2], [1, 2]),
    "a function without a graph": lambda x: tf.nn.ctc_loss(
        [[1]], x[tf.newaxis, tf.newaxis, :], [1], [1], False, blank_index=0
    ),
    "a tf.function": lambda x: tf.function(lambda x: x + tf.random.stateless_uniform([2], [1, 2]))(x),
}


def drawing(fn, saved=()):
    """The types of the operations that draw from no saved state, when `fn` is traced."""
    state = SimpleNamespace(all_variables=lambda: dict(enumerate(saved)), replica_variables=lambda v: (v,))
    graph = tf.function(fn, autograph=False).get_concrete_function(tf.TensorSpec([2])).graph
    return [op.type for op in unsaved_draws(graph.get_operations(), state)]


@pytest.mark.parametrize("kind", DRAWS)
def test_an_operation_that_keeps_its_own_state_is_named(kind):
    assert drawing(DRAWS[kind]) == [kind]


def test_a_draw_in_a_called_function_is_named_also_if_differentiated():
    assert drawing(lambda x: noisy(noisy(x))) == ["RandomStandardNormal"]
    assert "RandomStandardNormal" in drawing(lambda x: tf.gradients(noisy(x) ** 2, x))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*KEEPS_ITS_STATE, "RngReadAndSkip"])
def test_other_operations_and_a_generator_whose_state_is_saved_are_not(kind):
    assert drawing((KEEPS_ITS_STATE | DRAWS)[kind], saved=[GENERATOR.state]) == []


class Noise(keras.layers.Layer):
    def call(self, x, training=False):
        return x + tf.random.normal(tf.shape(x)) if training else x


def trainer(draw_in, replicas=1):
    def model_fn():
        layers = [keras.Input((2,)), keras.layers.Dense(2), keras.layers.Dropout(0.5)]
        model = keras.Sequential([*layers, *([Noise(name="noise")] if draw_in == "layer" else [])], name="net")

        def loss_fn(batch, training):
            y = model(batch["x"], training=training)
            return {"loss": tf.reduce_mean(noisy(y) if draw_in == "loss_fn" else y, -1)}

        def add_noise(gradients):
            return {path: noisy(gradient) for path, gradient in gradients.items()}

        gradient_fn = add_noise if draw_in == "gradient_fn" else None
        return distloop.ModelSpec(model, keras.optimizers.SGD(0.1), loss_fn, gradient_fn=gradient_fn)

    return distloop.Trainer(model_fn, on(replicas))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("draw_in", "replicas", "name"),
    [("layer", 2, "in layer net/noise (test_unsaved_draws"), ("gradient_fn", 1, "(test_unsaved_draws.py:")],
)
def test_a_step_that_draws_them_is_refused_before_the_first_one(draw_in, replicas, name):
    refused(lambda: trainer(draw_in, replicas).fit(distloop.make_dataset(DATA, 4), steps=1), name, "SeedGenerator")


def test_an_evaluation_that_draws_them_is_refused():
    refused(lambda: trainer("loss_fn").evaluate(distloop.make_dataset(DATA, 4)), "RandomStandardNormal", "checkpoint")

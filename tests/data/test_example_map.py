"""A function over single examples, applied to the rows of a batch."""

import random

import numpy as np
import pytest
import tensorflow as tf

from distloop.data import example_map
from tests.problems import refused

SPEC = {"x": tf.TensorSpec([2], tf.float32)}


def test_the_function_gets_each_row_with_its_seed():
    apply = example_map.trace(
        lambda example, seed: (example["x"][0] + tf.random.stateless_uniform([], seed), seed[1]), SPEC
    )
    assert apply.spec == (tf.TensorSpec([], tf.float32), tf.TensorSpec([], tf.int64))
    seeds = tf.constant([[1, 2], [3, 4]], tf.int64)
    values, numbers = apply({"x": tf.constant([[1.0, 0.0], [2.0, 0.0]])}, seeds)
    expected = [
        1 + float(tf.random.stateless_uniform([], seeds[0])),
        2 + float(tf.random.stateless_uniform([], seeds[1])),
    ]
    np.testing.assert_allclose(values, expected, rtol=1e-6)
    assert numbers.numpy().tolist() == [2, 4]


@pytest.mark.parametrize("draw", [lambda: np.random.rand(), lambda: random.random(), lambda: tf.random.uniform([])])
def test_a_function_that_draws_without_its_seed_is_refused(draw):
    with pytest.raises(ValueError, match="map_fn draws from .* a resumed run cannot repeat: draw from the seed"):
        example_map.trace(lambda example, seed: example["x"] + draw(), SPEC)


def test_a_function_of_python_is_not_traceable():
    with pytest.raises(example_map.NotTraceable):
        example_map.trace(lambda example, seed: np.asarray(example["x"]).astype(int), SPEC)


@pytest.mark.parametrize("returned", [None, {"x": None}], ids=["nothing", "an entry of nothing"])
def test_a_function_that_returns_none_is_refused(returned):
    refused(
        lambda: example_map.trace(lambda example, seed: returned, SPEC), "map_fn returned", "let it return the exam"
    )

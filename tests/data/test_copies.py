"""Copies of datasets that shuffle as the original did when it was new."""

import numpy as np
import pytest
import tensorflow as tf

from distloop.data.copies import fresh_copy


def order(dataset):
    return np.concatenate(list(dataset.as_numpy_iterator())).tolist()


@pytest.mark.parametrize("epochs", [1, 2])
def test_a_copy_shuffles_as_the_dataset_did_when_it_was_new(epochs):
    dataset = tf.data.Dataset.range(50).shuffle(50, seed=3).batch(7).repeat(epochs)
    first = order(dataset)
    assert order(dataset) != first  # a second iterator draws other seeds
    assert order(fresh_copy(dataset)) == order(fresh_copy(dataset)) == first


def test_a_dataset_that_is_not_shuffled_is_its_own_copy():
    dataset = tf.data.Dataset.range(50).batch(7)
    assert fresh_copy(dataset) is dataset

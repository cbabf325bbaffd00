"""Entries that a function asks of a batch that has none of that name."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import distloop
from tests.problems import on, refused


def train(batch, read):
    def model_fn():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        return distloop.ModelSpec(model, keras.optimizers.SGD(), lambda batch, training: {"loss": model(read(batch))})

    distloop.Trainer(model_fn, on(1)).fit(tf.data.Dataset.from_tensors(batch), steps=1)


ROWS = np.zeros((4, 2), np.float32)


def test_a_name_that_the_batch_lacks_is_said_with_those_that_it_has():
    refused(
        lambda: train({"image": ROWS, "label": ROWS}, lambda batch: batch["images"]),
        "The key 'images' was looked up",
        "the entries 'image', 'label': use their names",
    )


def test_a_name_in_a_tuple_is_said():
    refused(lambda: train((ROWS, ROWS), lambda batch: batch["image"]), "a tuple of 2 entries", "features, labels")


@pytest.mark.slow
def test_errors_about_something_else_stay():
    with pytest.raises(KeyError, match="image"):
        train({"image": ROWS}, lambda batch: {}["image"])
    with pytest.raises(TypeError):
        train((ROWS, ROWS), lambda batch: batch[0] + object())

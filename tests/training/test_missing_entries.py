"""Mistakes of a user's function about its batch and its tensors: each a sentence, before the first step."""

import math
import traceback

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


def if_positive(values):
    return values if tf.reduce_mean(values) > 0 else -values


def halved(values):
    while tf.reduce_mean(values) > 1:
        values /= 2
    return values


OF_TENSORS = {
    "if": (if_positive, "decided an `if`", "tf.where"),
    "while": (halved, "decided an `if`", "tf.where"),
    "and": (lambda values: values * (values[0] > 0 and 1.0), "decided an `if`", "tf.where"),
    "float": (lambda values: values * float(values[0]), "asked for its value", "keras.ops"),
    "int": (lambda values: values * int(values[0]), "asked for its value", "eager=True"),
    "math": (lambda values: values * math.log(values[0]), "asked for its value", "keras.ops"),
    "range": (lambda values: values * len(range(tf.shape(values)[0])), "asked for its value", "keras.ops"),
    "numpy": (lambda values: values * values.numpy(), "asked for its value", "keras.ops"),
    "np.mean": (lambda values: values * np.mean(values), "asked for its value", "keras.ops"),
    "for": (lambda values: tf.stack(list(values)), "a Python loop went over it", "keras.ops"),
    "len": (lambda values: values / len(values), "len() of a tensor", "tf.shape(x)[0]"),
}


@pytest.mark.parametrize("case", OF_TENSORS)
def test_a_tensor_that_is_asked_for_its_value_is_said_with_the_users_line(case):
    change, *parts = OF_TENSORS[case]
    with pytest.raises(ValueError) as found:  # noqa: PT011 - the parts are looked for
        train({"x": ROWS}, lambda batch: keras.ops.reshape(change(batch["x"][:, 0]), [-1, 1]) * [1.0, 1.0])
    assert all(part in str(found.value) for part in [*parts, "test_missing_entries.py:"])
    assert "AutoGraph" not in "".join(traceback.format_exception(found.value))
    innermost = traceback.extract_tb(found.value.__traceback__)[-1]
    assert innermost.filename == __file__


OF_BATCHES = {
    "key of an array": (
        ROWS,
        lambda batch: batch["image"],
        "'image' was looked up in a batch that is one array, float32",
    ),
    "unpacked array": (ROWS, lambda batch: [*batch][0], "one array, float32 [B, 2], was unpacked", "give (x, y)"),
    "attribute of a dict": ({"x": ROWS}, lambda batch: batch.x, "write batch['x']"),
    "key of an entry": ({"x": ROWS}, lambda batch: batch["x"]["y"], "'y' was looked up in a tensor"),
    "third of two": ((ROWS, ROWS), lambda batch: batch[2], "index out of range", "a tuple of 2 entries"),
    "two of three": ((ROWS,) * 3, lambda batch: (lambda x, y: x)(*two(batch)), "values to unpack", "a tuple of 3"),
    "unpacked dict": ({"x": ROWS, "y": ROWS}, lambda batch: keras.layers.Flatten()([*batch][0]), "gives its names"),
}


def two(batch):
    x, y = batch
    return x, y


@pytest.mark.parametrize("case", OF_BATCHES)
def test_a_batch_that_is_read_in_another_way_is_described(case):
    batch, read, *parts = OF_BATCHES[case]
    refused(lambda: train(batch, read), *parts)


def supervise(labels, loss):
    def model_fn():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(4)])
        return distloop.supervised(model, loss, keras.optimizers.SGD())

    distloop.Trainer(model_fn, on(1, batch_size=4)).fit(ROWS, labels, steps=1)


@pytest.mark.parametrize(
    ("labels", "loss", "parts"),
    [
        (np.eye(4), keras.losses.SparseCategoricalCrossentropy, ["labels of shape [B, 4]", "tf.argmax(labels, -1)"]),
        (
            np.arange(4),
            keras.losses.CategoricalCrossentropy,
            ["labels of shape [B]", "sparse_categorical_crossentropy"],
        ),
    ],
)
def test_labels_of_the_other_cross_entropy_are_said(labels, loss, parts):
    refused(lambda: supervise(labels, loss(from_logits=True)), *parts)


def test_a_text_in_place_of_a_number_is_said():
    text = np.array(["a"] * 4)
    refused(lambda: supervise(text, keras.losses.SparseCategoricalCrossentropy(from_logits=True)), "A text reached")


@pytest.mark.slow
def test_errors_about_something_else_stay():
    with pytest.raises(KeyError, match="image"):
        train({"image": ROWS}, lambda batch: {}["image"])
    with pytest.raises(TypeError):
        train((ROWS, ROWS), lambda batch: batch[0] + object())


def test_a_shape_that_a_layer_cannot_take_is_one_sentence_in_fit_and_predict():
    words = ("A layer cannot take what it is called with", "expected axis -1 of input shape to have value 2", "[B, 3]")
    wide = np.zeros((4, 3), np.float32)
    refused(lambda: train(wide, lambda batch: batch), *words)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    trainer = distloop.Trainer(distloop.from_keras(model), on(1))
    for fails in (lambda: trainer.predict(wide), lambda: trainer.fit(wide, wide[:, 0], steps=1, batch_size=4)):
        refused(fails, *words[:2])
    refused(lambda: trainer.predict({"image": ROWS}), "The structure of `inputs` doesn't match", "'image'")


def test_labels_of_another_form_are_said_for_tensorflows_cross_entropy_too():
    def loss(batch):
        return tf.nn.sparse_softmax_cross_entropy_with_logits(tf.one_hot([0, 1, 0, 1], 2), batch)[:, None]

    refused(lambda: train(ROWS, loss), "got labels of shape [4, 2]", "takes the number of each class, [B]")


def test_features_without_labels_are_said():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    trainer = distloop.Trainer(distloop.from_keras(model), on(1))
    refused(lambda: trainer.evaluate(ROWS), "features without labels were given", "give labels, too, as in fit(x, y)")

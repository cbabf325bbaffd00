"""Small trainers to export, and what an export computes."""

import subprocess
import sys

import keras
import numpy as np
import tensorflow as tf

import distloop
from tests.problems import on

RNG = np.random.default_rng(0)
ROWS = {
    "x": RNG.normal(size=(11, 3)).astype(np.float32),
    "more": {"z": RNG.normal(size=(11, 2)).astype(np.float32)},
    "label": RNG.integers(0, 4, size=11).astype(np.int32),
}


def dataset(rows=ROWS, batch_size=4):
    return distloop.make_dataset(rows, batch_size)


def make_trainer(predict_of=None, replicas=1, **settings):
    """Returns a trainer of a small model of x with dropout; `predict_of(model, batch)` is its predict_fn."""

    def model_fn():
        layers = [keras.layers.Dense(5, "tanh"), keras.layers.Dropout(0.5), keras.layers.Dense(4)]
        model = keras.Sequential([keras.Input((3,)), *layers])

        def loss_fn(batch, training):
            return {"loss": tf.reduce_sum(tf.square(model(batch["x"], training=training)), -1)}

        def predict_fn(batch):
            return predict_of(model, batch) if predict_of else model(batch["x"], training=False)

        return distloop.ModelSpec(model, keras.optimizers.SGD(0.1), loss_fn, predict_fn=predict_fn)

    return distloop.Trainer(model_fn, on(replicas, **settings))


def make_image_trainer():
    """Returns a trainer of a net for images of any size that a filter fits in."""

    def model_fn():
        layers = [keras.layers.Conv2D(2, 5, strides=2), keras.layers.Conv2D(2, 5), keras.layers.GlobalMaxPooling2D()]
        model = keras.Sequential([keras.Input((None, None, 1)), *layers])
        return distloop.ModelSpec(
            model,
            keras.optimizers.SGD(0.1),
            lambda batch, training: {"loss": tf.reduce_sum(model(batch["image"], training=training), -1)},
            predict_fn=lambda batch: model(batch["image"], training=False),
        )

    return distloop.Trainer(model_fn, on(1))


def images(size):
    return RNG.normal(size=(3, size, size, 1)).astype(np.float32)


def averages(trainer):
    return [average.numpy() for average in trainer.state.average.variables]


def signatures_of(path):
    """Reads a SavedModel's signatures."""
    return tf.saved_model.load(str(path)).signatures


def serve(path, **entries):
    """Returns the outputs of a SavedModel's default signature, by name; by default of x."""
    entries = {name: tf.constant(value) for name, value in (entries or {"x": ROWS["x"]}).items()}
    return {name: value.numpy() for name, value in signatures_of(path)["serving_default"](**entries).items()}


def export_keras_file(trainer, path):
    """Exports a Keras file and reads it back."""
    trainer.export(path)
    return keras.models.load_model(path)


def assert_weights(weights, expected):
    """Compares lists of weights bit for bit."""
    assert len(weights) == len(expected) > 0
    for a, b in zip(weights, expected, strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def dead_process():
    """Returns the id of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid

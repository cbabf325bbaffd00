"""In what numbers: the dtype policy where models are made, weights in float32, results that nobody has to cast."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import distloop
from distloop import precision

DATA = {
    "x": np.random.default_rng(0).normal(size=(24, 3)).astype(np.float32),
    "y": np.random.default_rng(1).normal(size=(24, 2)).astype(np.float32),
}


class Lazy(keras.Model):
    """Knows no input shape until it is called."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(2)

    def call(self, x, training=False):
        return self.dense(x)


def make_trainer(name, num_devices=1, model_class=None):
    """Makes a trainer, and lists the dtypes of what the model gave while training."""
    dtypes = []

    def model_fn():
        layers = [keras.Input((3,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(2)]
        model = model_class() if model_class else keras.Sequential(layers)

        def loss_fn(batch, training):
            output = model(batch["x"], training=training)
            dtypes.append(output.dtype)
            return {"loss": tf.reduce_mean(tf.square(output - tf.cast(batch["y"], output.dtype)), -1)}

        return distloop.ModelSpec(
            model, keras.optimizers.SGD(0.1), loss_fn, predict_fn=lambda batch: model(batch["x"], training=False)
        )

    config = distloop.Config(device="cpu", num_devices=num_devices, precision=name)
    return distloop.Trainer(model_fn, config), dtypes


@pytest.mark.parametrize("name", ["float32", "mixed_bfloat16"])
def test_the_policy_is_in_force_inside_and_put_back_after(name):
    before = keras.config.dtype_policy()
    with precision.policy(name):
        assert keras.config.dtype_policy().name == name
        layer = keras.layers.Dense(1)
    assert keras.config.dtype_policy() is before
    assert layer.dtype_policy.name == name


def test_the_policy_is_put_back_after_an_exception():
    before = keras.config.dtype_policy()
    with pytest.raises(KeyError), precision.policy("mixed_bfloat16"):
        raise KeyError
    assert keras.config.dtype_policy() is before


def test_a_policy_that_the_user_set_is_put_back():
    keras.config.set_dtype_policy("float64")
    try:
        with precision.policy("mixed_bfloat16"):
            pass
        assert keras.config.dtype_policy().name == "float64"
    finally:
        keras.config.set_dtype_policy("float32")


def test_a_trainer_leaves_no_policy_behind():
    trainer, _ = make_trainer("mixed_bfloat16")
    trainer.fit(distloop.make_dataset(DATA, 8), steps=1)
    assert keras.config.dtype_policy().name == "float32"


@pytest.mark.parametrize("num_devices", [1, 2])
@pytest.mark.parametrize("model_class", [None, Lazy], ids=["built", "lazy"])
def test_layers_compute_in_bfloat16_and_weights_stay_float32(num_devices, model_class):
    trainer, dtypes = make_trainer("mixed_bfloat16", num_devices, model_class)
    trainer.fit(distloop.make_dataset(DATA, 8), steps=1)
    assert set(dtypes) == {tf.bfloat16}
    assert {tf.as_dtype(v.dtype) for v in trainer.model.variables} == {tf.float32}
    slots = [v for v in trainer.optimizer.variables if v.path != trainer.optimizer.iterations.path]
    assert {tf.as_dtype(v.dtype) for v in slots} == {tf.float32}


def test_float32_is_float32():
    trainer, dtypes = make_trainer("float32")
    trainer.fit(distloop.make_dataset(DATA, 8), steps=1)
    assert set(dtypes) == {tf.float32}


@pytest.mark.parametrize("num_devices", [1, 2])
def test_bfloat16_trains_about_as_float32_does(num_devices):
    losses = []
    for name in ("float32", "mixed_bfloat16"):
        trainer, _ = make_trainer(name, num_devices)
        first = trainer.evaluate(distloop.make_dataset(DATA, 8))["loss"]
        trainer.fit(distloop.make_dataset(DATA, 8), steps=20)
        losses.append(trainer.evaluate(distloop.make_dataset(DATA, 8))["loss"])
        assert losses[-1] < 0.8 * first
    assert losses[1] == pytest.approx(losses[0], rel=0.05)
    assert losses[1] != losses[0]


@pytest.mark.parametrize("num_devices", [1, 2])
def test_predictions_are_float32(num_devices):
    trainer, dtypes = make_trainer("mixed_bfloat16", num_devices)
    outputs = trainer.predict(distloop.make_dataset(DATA, 8))
    assert outputs.dtype == np.float32 and outputs.shape == (24, 2)


def test_losses_that_bfloat16_cannot_count_are_averaged_in_float32():
    def model_fn():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])

        def loss_fn(batch, training):
            output = model(batch["x"], training=training)[:, 0]
            return {"loss": output, "ones": tf.ones_like(output)}  # bfloat16; 1000 of them would add up to 256

        return distloop.ModelSpec(model, keras.optimizers.SGD(0.0), loss_fn)

    trainer = distloop.Trainer(model_fn, distloop.Config(device="cpu", num_devices=1, precision="mixed_bfloat16"))
    rows = distloop.make_dataset({"x": np.ones([1000, 3], np.float32)}, 1000)
    assert trainer.evaluate(rows)["ones"] == 1.0
    assert trainer.fit(rows, steps=1)["ones"] == 1.0

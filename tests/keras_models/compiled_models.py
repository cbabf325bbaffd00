"""Small compiled Keras models with data, and the same training by Keras."""

import keras
import numpy as np
import tensorflow as tf

import distloop
from distloop.model.metrics import weigh
from tests.problems import on

RNG = np.random.default_rng(0)
X = RNG.normal(size=(32, 6)).astype(np.float32)
Y = RNG.normal(size=(32, 2)).astype(np.float32)
BINARY = (X[:, 0] > 0).astype(np.int32)
LABEL = np.abs(X[:, :3]).argmax(1).astype(np.int32)
ONE_HOT = np.eye(3, dtype=np.float32)[LABEL]
SAMPLE_WEIGHT = RNG.choice([0.0, 0.5, 1.0, 3.0], size=32).astype(np.float32)


def batches(*arrays, batch_size=8):
    return tf.data.Dataset.from_tensor_slices(arrays).batch(batch_size)


def net(outputs=2, activation=None, **settings):
    layers = [keras.Input((6,)), keras.layers.Dense(8, "tanh", **settings), keras.layers.Dense(outputs, activation)]
    return keras.Sequential(layers)


def compiled(model, loss="mse", optimizer=None, **settings):
    # Keras runs eagerly, as a few batches take less time than tracing.
    model.compile(optimizer or keras.optimizers.Adam(0.01), loss, run_eagerly=True, **settings)
    return model


def copy_of(model):
    """Rebuilds a compiled model as it is now, for Keras to train."""
    twin = type(model).from_config(model.get_config())
    twin.set_weights(model.get_weights())
    settings = model._compile_config.config
    twin.compile(
        type(model.optimizer).from_config(model.optimizer.get_config()),
        settings["loss"],
        loss_weights=settings["loss_weights"],
        metrics=settings["metrics"],
        weighted_metrics=settings["weighted_metrics"],
        run_eagerly=True,
    )
    return twin


def assert_same_weights(found, expected):
    for a, b in zip(found.get_weights(), expected.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def assert_trains_as_keras_does(model, data, replicas, epochs=2):
    twin = copy_of(model)
    trainer = distloop.Trainer(distloop.from_keras(model), on(replicas))
    before = [w.copy() for w in trainer.model.get_weights()]
    trainer.fit(data, epochs=epochs)
    twin.fit(data, epochs=epochs, verbose=0)
    assert_same_weights(trainer.model, twin)
    assert any(not np.allclose(a, b, atol=1e-3) for a, b in zip(before, twin.get_weights(), strict=True))
    return trainer, twin


def assert_trains_on_as_keras_does(trainer, model, data):
    """Trains a compiled model with Keras, its copy with distloop; the model gets the copy's weights at the end."""
    model.fit(data, epochs=1, verbose=0)
    expected = model.get_weights()
    trainer.fit(data, epochs=1)
    for trained, weights in zip(trainer.model.get_weights(), expected, strict=True):
        np.testing.assert_allclose(trained, weights, rtol=1e-5, atol=1e-5)


def evaluated_by_keras(model, data):
    """Evaluates a compiled model with Keras; older versions of it return arrays."""
    return {name: float(value) for name, value in model.evaluate(data, verbose=0, return_dict=True).items()}


def evaluated(model, data, replicas=1):
    """Evaluates a compiled model with distloop and with Keras."""
    trainer = distloop.Trainer(distloop.from_keras(model), on(replicas))
    return trainer.evaluate(data), evaluated_by_keras(copy_of(model), data)


def values_of(spec, *batch):
    """Computes what a spec reports of one batch, outside any step."""
    outputs = spec.updates[0].loss_fn(tf.nest.map_structure(tf.convert_to_tensor, batch), False)
    values = {}
    for name, value in outputs.items():
        if name in spec.metrics:
            spec.metrics[name].update_state(*value)
            values[name] = float(spec.metrics[name].result())
        else:
            tally = weigh(name, value, len(batch[0]), None)
            values[name] = float(tally.total / tally.weight)
    return values


def measured(model, *batch):
    """Evaluates a compiled model on one batch, outside any step: with distloop and with Keras."""
    values = values_of(distloop.from_keras(model)(), *batch)
    return values, {name: float(value) for name, value in model.test_on_batch(*batch, return_dict=True).items()}

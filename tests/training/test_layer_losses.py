"""Losses that layers carry: of this thread, and of this call of the loss alone."""

import copy
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf

import distloop
from distloop import testing
from distloop.training.layers import keep_losses_apart
from tests.problems import classification, on


def regularized(*, batch_norm=False, gathers=False):
    """A `model_fn` whose layers add losses before and after what replicas exchange."""

    def model_fn():
        square = keras.regularizers.L2(0.1)
        layers = [
            keras.layers.Dense(16, use_bias=not batch_norm, activity_regularizer=square, name="first"),
            *([keras.layers.BatchNormalization(synchronized=True, name="norm")] if batch_norm else []),
            keras.layers.Dense(8, activation="tanh", activity_regularizer=square, name="second"),
        ]
        model = keras.Sequential([keras.Input((8,)), *layers, keras.layers.Dense(4, name="logits")], name="net")

        def loss_fn(batch, training):
            logits = model(batch["x"], training=training)
            loss = keras.losses.sparse_categorical_crossentropy(batch["label"], logits, from_logits=True)
            if gathers:
                everyone, _ = distloop.gather_rows(logits)
                loss += tf.reduce_mean(tf.square(logits[:, tf.newaxis] - everyone), [1, 2])
            return {"loss": loss}

        return distloop.ModelSpec(model, keras.optimizers.SGD(0.1), loss_fn)

    return model_fn


@pytest.mark.slow
@pytest.mark.parametrize("exchanges", [{"batch_norm": True}, {"gathers": True}])
def test_replicas_that_exchange_values_within_the_loss_keep_their_losses_apart(exchanges):
    data = distloop.make_dataset(classification(24), 12)
    testing.assert_replica_law(regularized(**exchanges), data, (1, 2, 3), steps=3, tolerance=1e-6)


def test_a_layer_that_this_update_does_not_call_adds_no_loss():
    def model_fn():
        models = {
            "a": keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)]),
            "b": keras.Sequential([keras.Input((8,)), keras.layers.Dense(4, activity_regularizer="l2")]),
        }

        def loss_fn_of(name):
            return lambda batch, training: {"loss": tf.reduce_sum(tf.square(models[name](batch["x"])), 1)}

        updates = [distloop.Update(name, loss_fn_of(name), keras.optimizers.SGD(0.1)) for name in ("b", "a")]
        return distloop.ModelSpec(models, updates=updates)

    data = distloop.make_dataset(classification(8), 4)
    trainer = distloop.Trainer(model_fn, on(1))
    numbers = trainer.fit(data, steps=2)
    assert "b/regularization" in numbers and "a/regularization" not in numbers


def test_each_thread_has_its_own_losses():
    layer = keras.layers.ActivityRegularization(l2=1.0)
    model = keras.Sequential([keras.Input((2,)), layer])
    keep_losses_apart([model])
    model(np.ones([1, 2], np.float32))
    seen = []

    def other():
        seen.append(len(model.losses))
        model(np.full([1, 2], 3.0, np.float32))
        seen.extend(float(loss) for loss in model.losses)

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert seen == [0, 18.0]
    assert [float(loss) for loss in model.losses] == [2.0]


def test_a_copied_layer_begins_without_losses():
    layer = keras.layers.ActivityRegularization(l2=1.0)
    keep_losses_apart([layer])
    layer(np.ones([1, 2], np.float32))
    again = copy.deepcopy(layer)
    assert len(layer.losses) == 1 and again.losses == []
    again(np.ones([1, 2], np.float32))
    assert len(again.losses) == 1

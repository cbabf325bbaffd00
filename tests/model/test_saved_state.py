"""Saved state: a snapshot has every value by name, and restoring it sets them all, on any number of replicas."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import distloop
from distloop.model.layers import SEED_STRIDE
from distloop.model.saved_state import SavedState
from tests.problems import assert_equal, batches, classifier, everything, on


def trained(replicas=1, steps=3, optimizer=lambda: keras.optimizers.Adam(0.01), **settings):
    model_fn = classifier(optimizer=optimizer, dropout=0.5, batch_norm="plain", metrics=True)
    trainer = distloop.Trainer(model_fn, on(replicas, **settings))
    trainer.fit(batches(), steps=steps)
    return trainer


def arrays(values):
    return {name: np.array(value) for name, value in values.items() if value.dtype != tf.string}


@pytest.mark.slow
def test_a_snapshot_has_every_value_by_a_name_that_lasts():
    trainer = trained(average_decay=0.9, precision="mixed_float16")
    names = set(SavedState(trainer.state).snapshot())
    paths = ("hidden/kernel", "norm/gamma", "norm/beta", "logits/kernel", "logits/bias")
    weights = {f"net/{path}" for path in paths}
    assert {name.removeprefix("average/") for name in names if name.startswith("average/")} == weights
    assert {f"model/{name}" for name in (*weights, "net/norm/moving_mean", "seeds/0")} <= names
    assert {f"optimizer/{slot}/{name}" for slot in ("momentum", "velocity") for name in weights} <= names
    facts = {f"optimizer/{name}" for name in ("class", "initial_learning_rate", "learning_rate", "iteration")}
    assert facts | {"optimizer/loss_scale", "optimizer/streak"} <= names
    assert {"metrics/auc/0", "step", "skipped_steps", "loss_statistics"} <= names


def test_values_of_variables_on_other_devices_are_in_the_hosts_memory():
    state = distloop.Trainer(classifier(), on(1)).state
    variable = state.model.trainable_variables[0]
    with tf.device("CPU:1"):
        variable._value = tf.Variable(variable._value.numpy())
    assert variable._value.device.endswith("CPU:1")
    values = SavedState(state).snapshot()
    assert {value.device.rpartition("/")[2] for value in values.values()} == {"device:CPU:0"}
    np.testing.assert_array_equal(values[f"model/{variable.path}"], variable._value.numpy())


def test_another_trainer_restores_weights_that_were_made_without_a_name():
    class Gain(keras.layers.Layer):
        def build(self, shape):
            self.gains = [self.add_weight(shape=shape[1:], initializer="normal") for _ in range(2)]

        def call(self, x):
            return x * self.gains[0] + self.gains[1]

    def model_fn():
        model = keras.Sequential([keras.Input((3,)), Gain()], name="net")
        return distloop.ModelSpec(model, keras.optimizers.Adam(), lambda batch, training: {"loss": model(batch)})

    first, second = (distloop.Trainer(model_fn, on(1)).state for _ in range(2))
    values = SavedState(first).snapshot()
    assert not SavedState(second).differences(values)
    SavedState(second).restore(values)
    np.testing.assert_equal(first.model.get_weights(), second.model.get_weights())


@pytest.mark.slow
def test_no_later_step_changes_a_snapshot_which_restores_all_replicas():
    trainer = trained(2, average_decay=0.9)
    saved_state = SavedState(trainer.state)
    values, before = saved_state.snapshot(), everything(trainer)
    then = arrays(values)
    trainer.fit(batches(), steps=5)
    assert_equal(arrays(values), then)
    saved_state.restore(values)
    assert_equal(everything(trainer), before)
    assert_equal(arrays(saved_state.snapshot()), arrays(values))


@pytest.mark.wide
@pytest.mark.slow
def test_a_snapshot_of_two_replicas_fits_three():
    first, second = trained(2), trained(3, steps=1)
    values = SavedState(first.state).snapshot()
    sums = values["metrics/auc/0"]  # of each replica, 0 after a fit
    values["metrics/auc/0"] = sums + tf.random.stateless_uniform(sums.shape, [1, 2], 1.0, 2.0)
    saved_state = SavedState(second.state)
    assert saved_state.differences(values) == []
    saved_state.restore(values)
    found = saved_state.snapshot()
    assert_equal(*({n: v for n, v in arrays(part).items() if "metrics/" not in n} for part in (found, values)))
    parts = found["metrics/auc/0"]  # the first replica has the sum of all
    np.testing.assert_array_equal(parts[0], tf.reduce_sum(values["metrics/auc/0"], 0))
    assert np.all(parts[0] > 0) and not np.any(parts[1:])
    (seed,) = second.state.seeds
    starts = [int(part.numpy()[0]) for part in second.state.replica_variables(seed)]
    assert [(start - starts[0]) % 2**32 for start in starts] == [0, SEED_STRIDE, 2 * SEED_STRIDE]


@pytest.mark.slow
def test_differences_are_named():
    saved_state = SavedState(trained(optimizer=lambda: keras.optimizers.SGD(0.1)).state)
    values = saved_state.snapshot()
    assert saved_state.differences(values) == []
    del values["step"]
    values["model/other"] = tf.zeros([])
    values["metrics/other/0"] = tf.zeros([1])  # metrics may change
    values["model/net/logits/bias"] = tf.zeros([5], tf.float64)
    values["optimizer/class"] = tf.constant("Adam")
    assert saved_state.differences(values) == [
        "optimizer/class is Adam there and SGD here",
        "step is missing",
        "model/other is unknown",
        "model/net/logits/bias is float64[5] there and float32[4] here",
    ]


@pytest.mark.wide
@pytest.mark.slow
def test_a_learning_rate_continues_unless_model_fn_gives_another_one():
    first = trained(optimizer=lambda: keras.optimizers.SGD(0.1))
    first.optimizer.learning_rate = 0.05
    values = SavedState(first.state).snapshot()
    for rate, expected in ((0.1, 0.05), (0.3, 0.3)):
        second = trained(optimizer=lambda rate=rate: keras.optimizers.SGD(rate), steps=1)
        SavedState(second.state).restore(values)
        assert float(second.optimizer.learning_rate.numpy()) == pytest.approx(expected)

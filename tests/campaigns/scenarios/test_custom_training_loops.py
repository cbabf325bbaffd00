"""What TensorFlow asserts about custom training loops on tf.distribute, asserted of a Trainer.

The scenarios are those of tensorflow/python/distribute (Apache-2.0), custom_training_loop_gradient_test.py and
custom_training_loop_input_test.py, and of tf_keras/distribute (Apache-2.0), custom_training_loop_metrics_test.py,
custom_training_loop_models_test.py and custom_training_loop_optimizer_test.py. Asserted elsewhere: batches of any size
and metrics count each row once, tests/test_laws.py; a function of an input context, tests/data/test_source.py; what is
refused of losses and metrics, tests/model. Without a counterpart:

- inputs that are no dataset (`testConstantNumpyInput`), variables as arguments: there is no `strategy.run` to call
- where a batch is prefetched, options of `run`: Trainer chooses, and TPUs are not supported
- a `tf.function` or AutoGraph around, inside, beside `strategy.run`: Trainer traces the step; one test stands for all
- outputs that are no rows (`testDatasetPartialBatchWithMixedOutputs`), gradients that are not aggregated: refused
"""

import keras
import numpy as np
import pytest
import tensorflow as tf

import distloop
from tests.monitoring.event_files import steps_in_tensorboard
from tests.problems import local_values, on

pytestmark = [pytest.mark.slow, pytest.mark.wide]

FOUR = [5.0, 6.0, 7.0, 8.0]


def batches(values, size):
    return tf.data.Dataset.from_tensor_slices(np.float32(values)).batch(size)


def identity_trainer(predict_fn=None, **settings):
    """Returns a trainer whose loss is the batch itself, times a weight of 1, which has a learning rate of 0."""

    def model_fn():
        weight = keras.Variable(1.0, name="weight")
        loss_fn = lambda batch, training: {"loss": batch * weight.value}  # noqa: E731
        return distloop.ModelSpec({"weight": weight}, keras.optimizers.SGD(0.0), loss_fn, predict_fn=predict_fn)

    return distloop.Trainer(model_fn, on(2, **settings))


# gradient ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, {"eager": True}], ids=["compiled", "eager"])
def test_each_row_of_every_replica_has_its_value_and_its_gradient_in_order(settings):
    def square_and_slope(batch):
        with tf.GradientTape() as tape:
            tape.watch(batch)
            squares = batch**2
        return [{"square": squares, "slope": tape.gradient(squares, batch)}]

    trainer = identity_trainer(predict_fn=square_and_slope, **settings)
    (outputs,) = trainer.predict(batches(FOUR, 2))
    assert outputs["square"].tolist() == [25, 36, 49, 64] and outputs["slope"].tolist() == [10, 12, 14, 16]


# input ------------------------------------------------------------------------------------------------------------


def test_a_write_in_the_forward_pass_happens_once_a_step_needed_or_not():
    def model_fn():
        weight = keras.Variable(1.0, name="weight")
        calls = tf.Variable(0.0, trainable=False, aggregation=tf.VariableAggregation.MEAN, name="calls")

        def loss_fn(batch, training):
            calls.assign_add(1.0)
            return {"loss": batch * weight.value}

        return distloop.ModelSpec({"weight": weight, "calls": calls}, keras.optimizers.SGD(0.1), loss_fn)

    trainer = distloop.Trainer(model_fn, on(2))
    trainer.fit(batches(FOUR, 2), steps=6)  # more steps than the data has batches: it is repeated
    assert [float(v) for v in local_values(trainer, trainer.model["calls"])] == [6.0, 6.0]


def test_batches_of_several_widths_are_trained_one_after_the_other():
    widths = [[[1.0, 2.0]] * 2, [[1.0, 2.0, 3.0]] * 2]
    data = tf.data.Dataset.from_generator(
        lambda: iter(map(np.float32, widths)), output_signature=tf.TensorSpec([None, None], tf.float32)
    )
    rows = []

    def record(report):
        rows.append(report.metrics["loss"])

    record.every = 1
    identity_trainer(log_every=1).fit(data, steps=4, actions=[record])
    assert rows == pytest.approx([1.5, 2.0] * 2, rel=1e-6)


# models -----------------------------------------------------------------------------------------------------------


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.head = keras.layers.Dense(4)

    def call(self, x):
        return self.head(x)


class Module(tf.Module):
    def __init__(self):
        super().__init__()
        self.layers = [keras.layers.Dense(4)]

    def __call__(self, x, training=False):
        for layer in self.layers:
            x = layer(x)
        return x


class Compiled(keras.layers.Layer):
    """Calls XLA for itself."""

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], 4), initializer="ones")

    @tf.function(jit_compile=True)
    def call(self, x):
        return tf.matmul(x, self.kernel)


def functional(*layers):
    inputs = keras.Input((3,))
    x = inputs
    for layer in layers:
        x = layer(x)
    return keras.Model(inputs, x)


MODELS = {
    "a subclassed model": Subclassed,
    "a module": Module,
    "batch statistics": lambda: functional(keras.layers.BatchNormalization(synchronized=True), keras.layers.Dense(4)),
    "an LSTM": lambda: functional(keras.layers.Reshape((3, 1)), keras.layers.LSTM(4)),
    "a layer that XLA compiles": lambda: functional(Compiled()),
}
ROWS = np.random.default_rng(0).normal(size=(31, 3)).astype(np.float32)


def trained(make_model, replicas, is_nested=False):
    """Trains on 31 rows, whose last batch has one; `loss_fn` may be a `tf.function`."""

    def model_fn():
        model = make_model()

        def losses(x, y):
            return keras.losses.mean_squared_error(y, model(x, training=True))

        compute = tf.function(losses) if is_nested else losses
        loss_fn = lambda batch, training: {"loss": compute(*batch)}  # noqa: E731
        return distloop.ModelSpec(model, keras.optimizers.RMSprop(0.01), loss_fn)

    trainer = distloop.Trainer(model_fn, on(replicas))
    data = tf.data.Dataset.from_tensor_slices((ROWS, np.ones((31, 4), np.float32))).batch(10)
    loss = trainer.fit(data, epochs=1)["loss"]
    return loss, [v.numpy() for v in trainer.state.model_variables()]


def assert_trained_alike(make_model, is_nested=False):
    """Compares two replicas with one."""
    (loss, weights), (expected_loss, expected) = trained(make_model, 2, is_nested), trained(make_model, 1)
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    for found, weight in zip(weights, expected, strict=True):
        np.testing.assert_allclose(found, weight, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", MODELS)
def test_any_kind_of_model_trains_alike_on_two_replicas(name):
    assert_trained_alike(MODELS[name])


def test_a_loss_in_a_function_of_its_own_changes_nothing():
    assert_trained_alike(lambda: keras.layers.Dense(4), is_nested=True)


# optimizer and summaries ------------------------------------------------------------------------------------------


def test_gradients_of_replicas_are_added_before_the_optimizer_sees_them(tmp_path):
    def model_fn():
        pair = keras.Variable([0.0, 0.0], name="pair")
        loss_fn = lambda batch, training: {"loss": tf.reduce_sum(pair.value) * batch}  # noqa: E731
        return distloop.ModelSpec({"pair": pair}, keras.optimizers.SGD(0.1), loss_fn)

    trainer = distloop.Trainer(model_fn, on(2, workdir=str(tmp_path), log_every=1))
    trainer.fit(batches([1.0, 2.0], 2), steps=3)  # 1 on one replica and 2 on the other
    for value in local_values(trainer, trainer.model["pair"]):
        np.testing.assert_allclose(value, [-0.45, -0.45], rtol=1e-6)
    # Each replica computes the loss, and it is written once.
    assert steps_in_tensorboard(tmp_path / "train", "Metrics/loss") == [1, 2, 3]

"""What Keras asserts about tf.distribute, asserted of a Trainer.

The scenarios are those of Keras 3 (Apache-2.0): keras/src/backend/tensorflow/distribute_test.py and
optimizer_distribute_test.py. Keras sums the replicas' gradients, distloop takes their mean. How replicas share a batch
and what a forward pass writes is asserted in tests/data/test_shards.py and tests/test_laws.py. Without a counterpart:

- the aggregation and synchronization of a variable: distloop averages whatever a forward pass writes
- random streams that start alike on all replicas: here they start apart
- `stateless_apply`: Keras itself refuses it on TensorFlow
- `ema_overwrite_frequency`, `clipvalue`: refused, tests/model/test_spec.py
"""

import keras
import numpy as np
import pytest
import tensorflow as tf

import distloop
from tests.problems import local_values, on

pytestmark = [pytest.mark.slow, pytest.mark.wide]

X = np.arange(100, dtype=np.float32)[:, None]


def trainer_of_vector(optimizer, start, no_decay=None, **settings):
    """Returns a trainer of one variable, whose gradient is the mean of a batch's rows."""

    def model_fn():
        vector = keras.Variable(np.asarray(start, np.float32), name="vector")
        return distloop.ModelSpec(
            {"vector": vector},
            optimizer(),
            lambda batch, training: {"loss": tf.reduce_sum(vector.value * batch, 1)},
            no_decay=no_decay,
        )

    return distloop.Trainer(model_fn, on(2, **settings))


def after(steps, trainer, rows):
    trainer.fit(tf.data.Dataset.from_tensors(np.asarray(rows, np.float32)), steps=steps)
    return trainer.model["vector"].numpy()


def test_variables_are_mirrored_and_predictions_are_each_rows_own():
    def model_fn():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dropout(0.5, seed=42), keras.layers.Dense(2)])
        return distloop.ModelSpec(model, keras.optimizers.SGD(), zero_loss, predict_fn=model)

    def zero_loss(batch, training):
        return {"loss": tf.reduce_sum(batch, 1)}

    trainer = distloop.Trainer(model_fn, on(2))
    dropout, dense = trainer.model.layers
    kernels = local_values(trainer, dense.kernel)
    assert len(kernels) == 2 and np.array_equal(*kernels) and isinstance(dense.kernel, keras.Variable)
    first, second = local_values(trainer, dropout.seed_generator.state)
    assert first.tolist() == [42, 0] and first[0] != second[0]
    rows = np.concatenate([np.zeros((8, 4)), np.ones((8, 4))]).astype(np.float32)
    outputs = trainer.predict(tf.data.Dataset.from_tensors(rows))
    assert outputs.shape == (16, 2) and not outputs[:8].any()
    np.testing.assert_allclose(outputs[8:], np.tile(kernels[0].sum(0), (8, 1)), rtol=1e-6)


def test_a_fit_with_a_regularizer_is_that_of_keras():
    def compiled():
        inputs = keras.Input((1,))
        kernel = {"kernel_initializer": "ones", "kernel_regularizer": keras.regularizers.L1L2(l1=0.01, l2=0.01)}
        model = keras.Model(inputs, keras.layers.Dense(1, use_bias=False, **kernel)(inputs))
        model.compile(keras.optimizers.SGD(0.01, momentum=0.06, nesterov=True, weight_decay=0.004), "mse")
        return model

    x, y = np.ones((12, 1), np.float32), np.zeros((12, 1), np.float32)
    expected = compiled()
    (loss,) = expected.fit(x, y, batch_size=12, epochs=1, verbose=0).history["loss"]
    trainer = distloop.Trainer(distloop.from_keras(compiled()), on(2, batch_size=12))
    numbers = trainer.fit((x, y), epochs=1)
    assert numbers["loss"] + numbers["regularization"] == pytest.approx(loss, rel=1e-6)  # Keras reports the sum
    (kernel,) = expected.get_weights()
    for found in local_values(trainer, trainer.model.layers[-1].kernel):
        np.testing.assert_allclose(found, kernel, rtol=1e-6)
    mine, theirs = trainer.optimizer.get_config(), expected.optimizer.get_config()
    assert {k: v for k, v in mine.items() if k != "name"} == pytest.approx({k: theirs[k] for k in mine if k != "name"})


def sgd(rate=1.0, **settings):
    return lambda: keras.optimizers.SGD(rate, **settings)


MOMENTUM, DECAY = sgd(0.5, momentum=0.06), sgd(weight_decay=0.004)
START, END, ALIKE = [1.0, 2.0, 3.0, 4.0], [0.5, -1.0, -0.5, 3.0], [[1.0, 6.0, 7.0, 2.0]] * 2
STEPS = {
    "gradients alike": (MOMENTUM, START, {}, ALIKE, END),
    "gradients apart": (MOMENTUM, START, {}, [[0.0, 0.0, 0.0, 0.0], [2.0, 12.0, 14.0, 4.0]], END),
    "weight decay": (DECAY, [2.0], {}, [[0.0], [0.0]], [2.0 * (1 - 0.004)]),
    "no weight decay": (DECAY, [2.0], {"no_decay": "vector"}, [[0.0], [0.0]], [2.0]),
    "the norm is clipped": (sgd(), [0.0, 0.0], {"clip_norm": 1.0}, [[300.0, 0.0], [-100.0, 200.0]], [-(0.5**0.5)] * 2),
    "microbatches": (sgd(), [1.5, 2.0], {"microbatches": 3}, [[k, 1.0] for k in range(6)], [-1.0, 1.0]),
}


@pytest.mark.parametrize("name", STEPS)
def test_a_step_takes_the_mean_of_the_replicas_gradients_once(name):
    optimizer, start, settings, rows, expected = STEPS[name]
    trainer = trainer_of_vector(optimizer, start, **settings)
    np.testing.assert_allclose(after(1, trainer, rows), expected, rtol=1e-6)
    assert trainer.optimizer.iterations.numpy() == 1


def test_steps_with_nesterov_momentum_have_the_values_of_the_formula():
    trainer = trainer_of_vector(sgd(0.01, momentum=0.9, nesterov=True), np.ones(3), average_decay=0.9)
    weights, average, momentum, gradient = np.ones(3), np.ones(3), np.zeros(3), np.array([0.1, 0.5, 1.0])
    for t in (1, 2, 3, 4):
        momentum = 0.9 * momentum - 0.01 * gradient
        weights = weights + 0.9 * momentum - 0.01 * gradient
        average += (1 - min(0.9, (1 + t) / (10 + t))) * (weights - average)
    np.testing.assert_allclose(after(4, trainer, [gradient] * 3), weights, rtol=1e-6)
    np.testing.assert_allclose(trainer.state.average.variables[0].numpy(), average, rtol=1e-6)

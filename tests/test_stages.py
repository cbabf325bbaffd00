"""One network over several devices: the laws of stages, where they are cut, and what is refused."""

import dataclasses
import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import distloop
from distloop.inputs import Batch
from distloop.paths import tensorflow_variable
from tests.problems import assert_close, assert_equal, classification


def settings(num_stages=1, **others):
    """One device, or stages on several."""
    one = {"device": "cpu", "strategy": "none", "console": "quiet", "log_every": 0}
    return distloop.Config(**{**one, "num_stages": num_stages, **others})


def sequential(*, dropout=0.0, batch_norm=False):
    layers = [keras.Input((8,))]
    for i in range(4):
        layers.append(keras.layers.Dense(12, activation="tanh", kernel_regularizer=keras.regularizers.L2(0.01)))
        if batch_norm and i == 1:
            layers.append(keras.layers.BatchNormalization())
        if dropout:
            layers.append(keras.layers.Dropout(dropout))
    return keras.Sequential([*layers, keras.layers.Dense(4)], name="net")


def functional():
    """Two residual blocks, each of which has to stay in one stage."""
    inputs = x = keras.Input((8,), name="inputs")
    for i in range(2):
        inner = keras.layers.Dense(8, activation="tanh", name=f"inner_{i}")(x)
        outer = keras.layers.Dense(8, name=f"outer_{i}")(inner)
        x = keras.layers.Add(name=f"add_{i}")([x, outer])
    return keras.Model(inputs, keras.layers.Dense(4, name="logits")(x), name="net")


class Affine(tf.Module):
    """A module that is no Keras layer."""

    def __init__(self, inputs, outputs, seed):
        super().__init__()
        self.weight = tf.Variable(tf.random.stateless_normal([inputs, outputs], [seed, 0]) / inputs**0.5, name="w")

    def __call__(self, x):
        return tf.tanh(x @ self.weight)


def modules():
    return [Affine(8, 12, 0), Affine(12, 12, 1), keras.layers.Dense(12), Affine(12, 4, 2)]


def classifier(make=sequential, num_stages=1, optimizer=lambda: keras.optimizers.Adam(0.01), **arguments):
    """A `model_fn` for `classification`, its network over so many stages."""

    def model_fn():
        model = distloop.split(make(), num_stages, **arguments)

        def loss_fn(batch, training):
            logits = model(batch["x"], training=training)
            loss = keras.losses.sparse_categorical_crossentropy(batch["label"], logits, from_logits=True)
            return {"loss": distloop.weighted(loss, batch["weight"])}

        return distloop.ModelSpec(
            model, optimizer(), loss_fn, predict_fn=lambda batch: model(batch["x"], training=False)
        )

    return model_fn


def batches(size=16, rows=67):
    return distloop.make_dataset(classification(rows), size)


def train(model_fn, config, steps=6):
    trainer = distloop.Trainer(model_fn, config)
    trainer.fit(batches(), steps=steps)
    return trainer


def device_of(variable):
    return ":".join(tensorflow_variable(variable).device.split(":")[-2:])


# the laws ---------------------------------------------------------------------------------------------------------


def trained(trainer):
    """What training has changed, as NumPy arrays by the names that checkpoints use."""
    values = {name: value for name, value in trainer.state.snapshot().items() if value.dtype != tf.string}
    return {name: np.array(value) for name, value in values.items()}


@pytest.fixture(scope="module")
def on_one_device():
    trainer = train(classifier(), settings(clip_norm=0.5, average_decay=0.9))
    return trained(trainer)


@pytest.mark.parametrize("num_stages, microbatches", [(1, 3), (2, 1), (2, 4), (4, 3)])
def test_any_number_of_stages_and_microbatches_train_to_the_same_weights(on_one_device, num_stages, microbatches):
    config = settings(num_stages, microbatches=microbatches, clip_norm=0.5, average_decay=0.9)
    trainer = train(classifier(num_stages=num_stages), config)
    found = trained(trainer)
    assert_close(found, on_one_device)


def operations(trainer):
    """The operations of one train step, traced anew."""
    loop = trainer._train_loop
    element = next(iter(batches()))
    layout = trainer._train_source.layout

    @tf.function(autograph=False)
    def step(rows):
        return loop._step(Batch(rows, None), layout)

    return step.get_concrete_function(element).graph.get_operations()


@pytest.mark.parametrize("recompute", [False, True])
def test_each_stage_keeps_its_variables_and_runs_forward_and_backward_on_its_device(recompute):
    make_model = classifier(modules, num_stages=2, recompute=recompute)
    trainer = train(make_model, settings(2, microbatches=2, average_decay=0.9), steps=1)
    places = ["CPU:0"] * 2 + ["CPU:1"] * 3  # two modules on each; the Keras layer has a bias
    assert [device_of(v) for v in trainer.state.variables_of_update[""]] == places
    assert [device_of(v) for v in trainer.state.average.variables] == places
    assert [device_of(v) for v in trainer.optimizer.variables if len(v.shape)] == [d for d in places for _ in range(2)]
    step = operations(trainer)

    def count(kind):
        return [sum(op.type == kind and place(op) == device for op in step) for device in ("CPU:0", "CPU:1", "")]

    products = 2 * 2 * (3 + recompute)  # of two microbatches in two layers, one forward and two backward
    assert count("MatMul") == [products, products, 0]
    assert count("BiasAddGrad") == [0, 2, 0]
    assert count("TanhGrad") == [4, 2, 0]
    assert count("L2Loss") == [1, 1, 0]  # the norm of the gradients
    assert count("SparseSoftmaxCrossEntropyWithLogits") == [0, 2, 0]


def place(operation):
    return operation.device.rpartition("device:")[2]


def test_a_run_on_stages_goes_on_bit_for_bit(tmp_path):
    make_model = classifier(functools.partial(sequential, dropout=0.3, batch_norm=True), num_stages=2)
    config = settings(2, microbatches=2, average_decay=0.9, precision="mixed_bfloat16")
    expected = trained(train(make_model, config))
    stopped = dataclasses.replace(config, workdir=tmp_path)
    train(make_model, stopped, steps=2)
    assert_equal(trained(train(make_model, stopped)), expected)


@pytest.mark.parametrize("config", [settings(), settings(2), settings(strategy="mirrored", num_devices=2)])
def test_a_checkpoint_of_four_stages_goes_on_with_any_other_number(config, tmp_path, on_one_device):
    shared = dict(workdir=tmp_path, clip_norm=0.5, average_decay=0.9)
    train(classifier(num_stages=4), settings(4, **shared), steps=3)
    trainer = train(classifier(num_stages=config.num_stages), dataclasses.replace(config, **shared))
    assert_close(trained(trainer), on_one_device)


def test_a_checkpoint_of_a_plain_keras_model_goes_on_in_stages(tmp_path, on_one_device):
    def plain():
        spec = classifier()()
        return dataclasses.replace(spec, model=spec.model.whole, updates=())

    shared = dict(workdir=tmp_path, clip_norm=0.5, average_decay=0.9)
    train(plain, settings(**shared), steps=3)
    trainer = train(classifier(num_stages=3), settings(3, **shared))
    assert_close(trained(trainer), on_one_device)

"""Virtual replicas: what they refuse, each before the first step; tests/test_bits.py has what they promise."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import distloop
from tests.problems import assert_equal, batches, classifier, mirrored, on, refused, weights

pytestmark = pytest.mark.usefixtures("graphs_of_other_tests_are_optimized")


def trainer_of(*layers, virtual_replicas=4, devices=2, strategy=None, gather=lambda logits: None, rows=None, **config):
    def model_fn():
        made = [layer() for layer in layers]
        model = keras.Sequential([keras.Input((8,), rows), *made, keras.layers.Dense(4, name="logits")], name="net")

        def loss_fn(batch, training):
            logits = model(batch["x"], training=training)
            gather(logits)
            return {"loss": keras.losses.sparse_categorical_crossentropy(batch["label"], logits, from_logits=True)}

        return distloop.ModelSpec(model, keras.optimizers.SGD(0.1), loss_fn)

    return distloop.Trainer(model_fn, on(devices, virtual_replicas=virtual_replicas, **config), strategy=strategy)


def by_collectives(devices=2):
    ops = tf.distribute.HierarchicalCopyAllReduce()  # adds in an order of its own
    return tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(devices)], cross_device_ops=ops)


class Counter(keras.layers.Layer):
    def __init__(self):
        super().__init__(name="counter")
        self.count = tf.Variable(0.0, trainable=False, name="count")

    def call(self, inputs):
        self.count.assign_add(1.0)
        return inputs


@pytest.mark.parametrize(
    "settings, parts",
    [
        (dict(virtual_replicas=3), ["virtual_replicas=3 was given", "power of two", "give 2, 4, 8"]),
        (dict(num_devices=3), ["virtual_replicas=4 and num_devices=3", "give a number of devices that divides 4"]),
        (dict(num_devices=8), ["virtual_replicas=4 and num_devices=8", "give a number of devices that divides 4"]),
        (dict(intra_op_threads=2), ["virtual_replicas=4 and intra_op_threads=2", "leave either out"]),
        (dict(jit_compile=True), ["virtual_replicas=4 and jit_compile=pass", "leave either out"]),
    ],
)
def test_settings_that_change_bits_are_refused(settings, parts):
    refused(lambda: distloop.Config(device="cpu", **{"virtual_replicas": 4, **settings}), *parts)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layer, parts",
    {
        "synchronized": (
            lambda: keras.layers.BatchNormalization(synchronized=True),
            ["virtual_replicas=4 was given", "synchronized=True", "use plain BatchNormalization"],
        ),
        "a variable of TensorFlow": (Counter, ["writes variables", "lacks, count (", "add_weight"]),
        "a weight that trains": (
            lambda: keras.layers.SpectralNormalization(keras.layers.Dense(8, name="dense")),
            ["virtual_replicas=4", "kernel"],
        ),
    }.values(),
)
@pytest.mark.parametrize("devices", [1, 2])
def test_layers_that_share_values_are_refused(layer, parts, devices):
    refused(lambda: trainer_of(layer, devices=devices).fit(batches(8, 40), steps=2), *parts)


@pytest.mark.slow
def test_gathered_rows_of_gathered_rows_are_refused():
    def gather(logits):
        rows, place = distloop.gather_rows(logits)
        distloop.gather_rows(tf.gather(rows, place) * 2.0)

    parts = ["gather_rows", "from other gathered rows", "train without virtual replicas"]
    refused(lambda: trainer_of(gather=gather).fit(batches(8, 40), steps=2), *parts)
    refused(lambda: trainer_of(gather=gather).evaluate(batches(8, 40)), *parts)


@pytest.mark.slow
def test_rows_are_not_gathered_with_microbatches_or_by_collectives():
    trainer = trainer_of(gather=distloop.gather_rows, microbatches=2)
    refused(lambda: trainer.fit(batches(8, 40), steps=2), "gather_rows", "use microbatches=1")
    trainer = trainer_of(gather=distloop.gather_rows, strategy=by_collectives())
    parts = ["gather_rows", "virtual_replicas=4", "collectives", "use one worker"]
    refused(lambda: trainer.fit(batches(8, 40), steps=2), *parts)


def test_replicas_that_cannot_divide_a_global_batchs_states_are_refused():
    layers = [lambda: keras.layers.Reshape((2, 4)), lambda: keras.layers.LSTM(3, stateful=True, name="lstm")]
    refused(lambda: trainer_of(*layers, devices=1, rows=2), "lstm", "stateful", "no virtual replicas")
    refused(lambda: trainer_of(strategy=mirrored(3)), "virtual_replicas=4", "3 replicas", "divides 4")


def test_compilation_by_xla_is_refused():
    tf.config.optimizer.set_jit("autoclustering")
    try:
        refused(lambda: trainer_of(), "virtual_replicas was given", "set_jit", "leave either out")
    finally:
        tf.config.optimizer.set_jit(False)


@pytest.mark.wide
@pytest.mark.slow
def test_a_strategy_object_has_the_same_bits():
    found = []
    for devices in (0, 2, 4):
        strategy = by_collectives(devices) if devices else None
        trainer = trainer_of(lambda: keras.layers.Dropout(0.2), devices=devices or 1, strategy=strategy)
        trainer.fit(batches(8, 40), steps=20)
        found.append(weights(trainer))
    assert_equal(found[1], found[0])
    assert_equal(found[2], found[0])


@pytest.mark.wide
@pytest.mark.slow
def test_a_run_goes_on_with_as_many_virtual_replicas(tmp_path):
    def make(count, **settings):
        return distloop.Trainer(classifier(), on(1, workdir=str(tmp_path), virtual_replicas=count, **settings))

    def refuse(trainer, count):
        parts = ["checkpoints/2' was trained with virtual_replicas=4", f"{count} were given", "virtual_replicas=4, or"]
        refused(lambda: trainer.fit(batches(8, 40), steps=4), *parts)

    make(4).fit(batches(8, 40), steps=2)
    for count in (2, 0):
        trainer = make(count)
        refuse(trainer, count)
        refuse(trainer, count)  # again
        trainer.restore(str(tmp_path / "checkpoints" / "2"))
        assert np.isfinite(trainer.evaluate(batches(8, 40))["loss"])
        refuse(trainer, count)
    trainer = make(4)
    trainer.fit(batches(8, 40), steps=4)
    assert trainer.step == 4
    settings = dict(workdir=str(tmp_path / "b"), virtual_replicas=2, init_from=str(tmp_path))
    other = distloop.Trainer(classifier(), on(2, **settings))
    other.fit(batches(8, 40), steps=1)
    assert other.step == 1

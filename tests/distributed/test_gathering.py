"""Rows of all replicas on each replica: order, indices, and the same comparisons on any number of replicas."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import distloop
from distloop import testing
from distloop.distributed import collectives, gathering
from distloop.errors import as_user_error
from tests import forked
from tests.problems import assert_close, classification, mirrored, on, refused, weights


def contrast():
    """A `model_fn` for `classification` whose loss compares each example with all others of the batch."""
    layers = [keras.layers.Dense(4, activation="tanh", name="hidden"), keras.layers.Dense(3, name="embedding")]
    model = keras.Sequential([keras.Input((8,)), *layers], name="net")

    def loss_fn(batch, training):
        embeddings = model(batch["x"], training=training)  # [b, 3]
        everyone, place = distloop.gather_rows(embeddings)  # [B, 3], [b]
        labels, _ = distloop.gather_rows(batch["label"])  # [B]
        logits = tf.matmul(embeddings, everyone, transpose_b=True)  # [b, B]
        loss = keras.losses.sparse_categorical_crossentropy(place, logits, from_logits=True)
        same_label = tf.reduce_mean(tf.cast(labels[tf.newaxis] == batch["label"][:, tf.newaxis], tf.float32), 1)
        return {"loss": loss, "same_label": same_label}

    return distloop.ModelSpec(model, keras.optimizers.SGD(0.1), loss_fn)


def data(seed=0):
    return distloop.make_dataset(classification(23, seed=seed), 10)  # of 10, 10 and 3 rows


@pytest.mark.wide
def test_a_loss_over_gathered_rows_is_the_same_on_any_number_of_replicas():
    testing.assert_replica_law(contrast, data(), (1, 4), steps=7, tolerance=1e-6)
    (_, one), (_, several) = (train_and_evaluate(num_devices=count) for count in (1, 4))
    assert several == pytest.approx(one, rel=1e-5)


def train_and_evaluate(**settings):
    """Returns the weights and evaluated metrics; checks the need of a known batch size, and where a NaN comes from."""
    trainer = distloop.Trainer(contrast, distloop.Config(device="cpu", console="quiet", **settings))
    trainer.fit(data(), steps=7)
    trainer.fit(distloop.make_dataset(classification(11), 8), steps=9)  # of 8 rows and of 3, less than replicas
    results = weights(trainer), trainer.evaluate(data(seed=1))
    if collectives.num_workers(trainer.strategy) > 1:
        unknown_size = data().concatenate(data())
        refused(lambda: trainer.evaluate(unknown_size), "gather_rows", "let batch(size) be its last step")
    bad = classification(23)
    bad["x"][12] = np.nan  # in the second batch
    config = distloop.Config(device="cpu", console="quiet", locate_nonfinite=True, **settings)
    with pytest.raises(FloatingPointError) as error:
        distloop.Trainer(contrast, config).fit(distloop.make_dataset(bad, 10), steps=2)
    found = ["x, first in row 2, row 12 of the data", "worker 0 says where they came from"]
    assert found[collectives.worker_index(trainer.strategy)] in str(error.value)
    return results


@pytest.mark.wide
def test_rows_are_gathered_from_the_replicas_of_several_workers():
    expected, measured = train_and_evaluate(num_devices=1)
    for trained, evaluated in forked.run_in_workers(train_and_evaluate, 2, devices_per_worker=2):
        assert_close(trained, expected)
        assert evaluated == pytest.approx(measured, rel=1e-5)


@pytest.mark.slow
def test_rows_have_the_order_of_the_batch_and_an_index():
    traced = {}

    def model_fn():
        weight = tf.Variable(1.0)

        def loss_fn(batch, training):
            everyone, place = distloop.gather_rows(batch["number"])
            traced["everyone"] = everyone
            return {"loss": weight * tf.cast(everyone[0] + 0 * batch["number"], tf.float32), "place": place}

        return distloop.ModelSpec([weight], keras.optimizers.SGD(0.0), loss_fn)

    trainer = distloop.Trainer(model_fn, on(3))
    numbers = np.arange(5, 12, dtype=np.int32)  # shards of 2, 2 and 3 rows
    result = trainer.evaluate(distloop.make_dataset({"number": numbers}, 7))
    assert traced["everyone"].dtype == tf.int32
    assert result == pytest.approx({"loss": 5.0, "place": 3.0})  # the mean of 0 to 6


@pytest.mark.slow
def test_microbatches_and_a_batch_larger_than_the_first_are_refused():
    @tf.function(input_signature=[tf.TensorSpec([], tf.int32)], autograph=False)
    def gather(size):
        def on_replica():
            with gathering.largest_shard(2):
                return distloop.gather_rows(tf.zeros([size]))[0]

        return mirrored(2).run(on_replica)

    assert mirrored(2).experimental_local_results(gather(2))[0].shape == [4]
    with pytest.raises(tf.errors.InvalidArgumentError) as error:
        gather(3)
    assert "A replica takes more rows of a batch than the first batches had; " in str(as_user_error(error.value))
    trainer = distloop.Trainer(contrast, on(1, microbatches=2))
    refused(lambda: trainer.fit(data(), steps=1), "gather_rows", "microbatches=2 was given", "use microbatches=1")


def network(name):
    layers = [keras.Input((2,)), keras.layers.Dense(2), keras.layers.BatchNormalization(name="norm")]
    return keras.Sequential(layers, name=name)


class Pair(tf.Module):
    def __init__(self):
        super().__init__()
        self.nets = {"a": network("a"), "b": [network("b")]}


@pytest.mark.parametrize(
    "make", [lambda: network("net"), lambda: keras.Sequential([keras.Input((2,)), network("inner")]), Pair]
)
def test_each_batch_normalization_at_any_depth_is_synchronized(make):
    model = make()
    assert distloop.synchronize(model) is model
    tops = [model.nets["a"], *model.nets["b"]] if isinstance(model, Pair) else [model]
    layers = [layer for top in tops for layer in top._flatten_layers()]
    norms = [layer for layer in layers if isinstance(layer, keras.layers.BatchNormalization)]
    assert len(norms) == len(tops) and all(norm.synchronized for norm in norms)


def test_a_model_without_batch_normalization_stays_and_no_layer_is_refused():
    dense = keras.layers.Dense(2)
    assert distloop.synchronize(dense) is dense
    refused(lambda: distloop.synchronize(lambda: None), "<lambda>", "give a Keras model")

"""Layers of Keras: losses of this thread and this call alone, and layers that `trainable=` leaves out."""

import copy
import functools
import itertools
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf

import distloop
from distloop import testing
from distloop.model.layers import SEED_STRIDE, keep_losses_apart
from distloop.model.spec import ModelSpec
from distloop.model.state import TrainState
from tests.keras_models.compiled_models import X, Y, batches
from tests.problems import classification, mirrored, mostly_wide, on


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
@pytest.mark.parametrize(
    ("exchanges", "replicas"),
    mostly_wide(itertools.product([{"batch_norm": True}, {"gathers": True}], [(1, 3), (1, 2)])),
)
def test_replicas_that_exchange_values_in_the_loss_keep_losses_apart(exchanges, replicas):
    data = distloop.make_dataset(classification(24), 12)
    testing.assert_replica_law(regularized(**exchanges), data, replicas, steps=3, tolerance=1e-6)


def test_a_layer_that_this_update_does_not_call_adds_no_loss():
    def model_fn():
        dense = {"a": keras.layers.Dense(4), "b": keras.layers.Dense(4, activity_regularizer="l2")}
        models = {name: keras.Sequential([keras.Input((8,)), layer]) for name, layer in dense.items()}

        def loss_fn_of(name):
            return lambda batch, training: {"loss": tf.reduce_sum(tf.square(models[name](batch["x"])), 1)}

        updates = [distloop.Update(name, loss_fn_of(name), keras.optimizers.SGD(0.1), f"^{name}/") for name in "ba"]
        return distloop.ModelSpec(models, updates=updates)

    numbers = distloop.Trainer(model_fn, on(1)).fit(distloop.make_dataset(classification(8), 4), steps=2)
    assert "b/regularization" in numbers and "a/regularization" not in numbers


def test_each_thread_and_each_copy_of_a_layer_has_its_own_losses():
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
    again = copy.deepcopy(layer)
    assert len(layer.losses) == 1 and again.losses == []
    again(np.ones([1, 2], np.float32))
    assert len(again.losses) == 1


MEANS = np.linspace(-1, 1, 8).astype("float32")


def network(is_frozen=False, **norm):
    keras.utils.set_random_seed(3)
    layers = [keras.layers.Dense(8, "relu"), keras.layers.BatchNormalization(momentum=0.5, **norm)]
    body = keras.Sequential([keras.Input((6,)), *layers, keras.layers.Dropout(0.5)], name="body")
    body.layers[1].moving_mean.assign(MEANS)
    body.trainable = not is_frozen
    return keras.Sequential([keras.Input((6,)), body, keras.layers.Dense(2, name="head")])


def have_statistics_moved(model):
    return bool((model.layers[0].layers[1].moving_mean.numpy() != MEANS).any())


def spec_of(model, optimizer, trainable):
    def loss_fn(batch, training):
        return {"loss": keras.losses.mean_squared_error(batch[1], model(batch[0], training=training))}

    return distloop.ModelSpec(model, optimizer, loss_fn, trainable=trainable)


def trained(trainable, is_frozen=False, norm=None, **settings):
    def model_fn():
        return spec_of(network(is_frozen, **norm or {}), keras.optimizers.Adam(0.05), trainable)

    trainer = distloop.Trainer(model_fn, on(2, **settings))
    trainer.fit(batches(X, Y), steps=6)
    return trainer


@functools.cache
def trained_head():
    return trained("head")


@pytest.mark.parametrize(
    "settings", mostly_wide([{}, {"recompute": "body$", "microbatches": 2}, {"virtual_replicas": 4}])
)
def test_a_layer_that_a_pattern_leaves_out_trains_as_a_frozen_one(settings):
    found = trained("head", **settings) if settings else trained_head()
    expected = trained(None, is_frozen=True, **settings)
    tf.nest.map_structure(np.testing.assert_array_equal, found.model.get_weights(), expected.model.get_weights())
    assert not have_statistics_moved(found.model)


def test_the_layers_attributes_and_files_are_as_the_user_left_them(tmp_path):
    trainer = trained_head()
    assert all(layer.trainable for layer in trainer.model._flatten_layers())
    trainer.export(str(tmp_path / "model.keras"))
    assert all(layer.trainable for layer in keras.models.load_model(tmp_path / "model.keras")._flatten_layers())
    trainer.export(str(tmp_path / "head.npz"))
    assert [name.split("/")[1] for name in np.load(tmp_path / "head.npz").files] == ["head", "head"]


@pytest.mark.wide
def test_statistics_move_where_a_part_of_the_layer_trains():
    assert have_statistics_moved(trained("gamma|head").model)
    for trainable, moves in (("batch_norm|head", True), ("head", False)):
        assert have_statistics_moved(trained(trainable, norm={"center": False, "scale": False}).model) == moves


@pytest.mark.wide
def test_networks_of_several_updates_keep_each_others_statistics_moving():
    def model_fn():
        nets = {"one": network(), "two": network()}

        def loss_fn(batch, training):
            return {"loss": sum(net(batch[0], training=training)[:, 0] for net in nets.values())}

        trained = {"one": "^one/", "two": "^two/.*head"}
        updates = [distloop.Update(name, loss_fn, keras.optimizers.SGD(0.1), paths) for name, paths in trained.items()]
        return distloop.ModelSpec(nets, updates=updates)

    trainer = distloop.Trainer(model_fn, on(2))
    trainer.fit(batches(X, Y), steps=3)
    moved = {name: have_statistics_moved(net) for name, net in trainer.model.items()}
    assert moved == {"one": True, "two": False}


def test_regularizers_of_what_a_pattern_leaves_out_are_not_counted():
    def reported(trainable, is_frozen):
        def model_fn():
            keras.utils.set_random_seed(3)
            layers = [keras.layers.Dense(n, name=p, kernel_regularizer="l2") for n, p in ((8, "body"), (2, "head"))]
            model = keras.Sequential([keras.Input((6,)), *layers])
            model.layers[0].trainable = not is_frozen
            return spec_of(model, keras.optimizers.SGD(0.05), trainable)

        return distloop.Trainer(model_fn, on(1)).fit(batches(X, Y), steps=2)["regularization"]

    assert reported("head", False) == reported(None, True)


ONE = tf.distribute.get_strategy()


def dropout_state(strategy):
    def model_fn():
        model = keras.Sequential([keras.Input((100,)), keras.layers.Dropout(0.5), keras.layers.Dense(1)])
        return ModelSpec(model, keras.optimizers.SGD(0.1), lambda batch, training: {"loss": model(batch)})

    keras.utils.set_random_seed(0)
    return TrainState(model_fn, strategy)


def test_every_replica_starts_elsewhere_and_one_draws_what_keras_draws():
    made = dropout_state(mirrored(3))
    (seed,) = made.seeds
    starts = [value.numpy().astype(np.int64) for value in mirrored(3).experimental_local_results(seed.value)]
    assert [int(start[0] - starts[0][0]) % 2**32 for start in starts] == [r * SEED_STRIDE for r in range(3)]
    assert len({int(start[1]) for start in starts}) == 1
    keras.utils.set_random_seed(0)
    expected = keras.layers.Dropout(0.5).seed_generator.state.numpy()
    (seed,) = dropout_state(ONE).seeds
    np.testing.assert_array_equal(seed.numpy(), expected)


@pytest.mark.parametrize("strategy", [ONE, mirrored(2)], ids=["none", "mirrored"])
def test_every_replica_draws_its_own_masks_and_its_streams_are_restored(strategy):
    made = dropout_state(strategy)
    dropout = made.model.layers[0]
    draw = tf.function(lambda: strategy.run(lambda: dropout(tf.ones([1, 100]), training=True)), autograph=False)

    def masks():
        return [part.numpy().tobytes() for part in strategy.experimental_local_results(draw())]

    assert len({mask for _ in range(3) for mask in masks()}) == 3 * strategy.num_replicas_in_sync
    with made.random_streams.preserved():
        first = masks()
        assert masks() != first
    assert masks() == first
    before = made.random_streams.read()
    second = masks()
    made.random_streams.write(before)
    assert masks() == second

"""Layers of Keras: losses of this thread and this call alone, and layers that `trainable=` leaves out."""

import copy
import functools
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf

import distloop
from distloop import testing
from distloop.distributed import strategies
from distloop.model.layers import SEED_STRIDE, keep_losses_apart
from distloop.model.spec import ModelSpec
from distloop.model.state import TrainState
from distloop.settings.config import Config
from tests.compiled_models import X, Y, batches
from tests.problems import classification, mostly_wide, on


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
@pytest.mark.parametrize("exchanges", mostly_wide([{"batch_norm": True}, {"gathers": True}]))
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


def network(is_frozen=False, **norm):
    keras.utils.set_random_seed(3)
    layers = [keras.layers.Dense(8, "relu"), keras.layers.BatchNormalization(momentum=0.5, **norm)]
    body = keras.Sequential([keras.Input((6,)), *layers, keras.layers.Dropout(0.5)], name="body")
    body.layers[1].moving_mean.assign(np.linspace(-1, 1, 8))
    body.trainable = not is_frozen
    return keras.Sequential([keras.Input((6,)), body, keras.layers.Dense(2, name="head")])


def trained(trainable, is_frozen=False, norm=None, **settings):
    def model_fn():
        model = network(is_frozen, **norm or {})

        def loss_fn(batch, training):
            return {"loss": keras.losses.mean_squared_error(batch[1], model(batch[0], training=training))}

        return distloop.ModelSpec(model, keras.optimizers.Adam(0.05), loss_fn, trainable=trainable)

    trainer = distloop.Trainer(model_fn, on(2, **settings))
    trainer.fit(batches(X, Y), steps=6)
    return trainer


@pytest.mark.parametrize(
    "settings", mostly_wide([{}, {"recompute": "body$", "microbatches": 2}, {"virtual_replicas": 4}])
)
def test_a_layer_that_a_regular_expression_leaves_out_trains_as_one_that_is_not_trainable(settings):
    found, expected = trained("head", **settings), trained(None, is_frozen=True, **settings)
    for a, b in zip(found.model.get_weights(), expected.model.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)
    statistics = found.model.layers[0].layers[1].moving_mean.numpy()
    np.testing.assert_array_equal(statistics, np.linspace(-1, 1, 8).astype("float32"))


def test_the_layers_attributes_and_files_are_as_the_user_left_them(tmp_path):
    trainer = trained("head")
    assert all(layer.trainable for layer in trainer.model._flatten_layers())
    trainer.export(str(tmp_path / "model.keras"))
    assert all(layer.trainable for layer in keras.models.load_model(tmp_path / "model.keras")._flatten_layers())
    trainer.export(str(tmp_path / "head.npz"))
    assert [name.split("/")[1] for name in np.load(tmp_path / "head.npz").files] == ["head", "head"]


@pytest.mark.wide
def test_statistics_move_where_a_part_of_the_layer_trains_or_its_path_is_found():
    assert (trained("gamma|head").model.layers[0].layers[1].moving_mean.numpy() != np.linspace(-1, 1, 8)).any()
    for trainable, moves in (("batch_norm|head", True), ("head", False)):
        statistics = trained(trainable, norm={"center": False, "scale": False}).model.layers[0].layers[1].moving_mean
        assert (statistics.numpy() != np.linspace(-1, 1, 8).astype("float32")).any() == moves


@pytest.mark.wide
def test_networks_of_several_updates_keep_each_others_statistics_moving():
    def model_fn():
        nets = {"one": network(), "two": network()}

        def loss_of(name):
            return lambda batch, training: {
                "loss": sum(net(batch[0], training=training)[:, 0] for net in nets.values())
            }

        updates = [distloop.Update(name, loss_of(name), keras.optimizers.SGD(0.1), f"^{name}/.*head") for name in nets]
        updates[0] = distloop.Update("one", loss_of("one"), keras.optimizers.SGD(0.1), "^one/")
        return distloop.ModelSpec(nets, updates=updates)

    trainer = distloop.Trainer(model_fn, on(2))
    trainer.fit(batches(X, Y), steps=3)
    moved = {
        name: (net.layers[0].layers[1].moving_mean.numpy() != np.linspace(-1, 1, 8).astype("float32")).any()
        for name, net in trainer.model.items()
    }
    assert moved == {"one": True, "two": False}


def test_regularizers_of_what_a_regular_expression_leaves_out_are_not_counted():
    reported = {}
    for trainable, is_frozen in ((None, True), ("head", False)):

        def model_fn(trainable=trainable, is_frozen=is_frozen):
            keras.utils.set_random_seed(3)
            layers = [
                keras.layers.Dense(n, name=name, kernel_regularizer="l2") for n, name in ((8, "body"), (2, "head"))
            ]
            model = keras.Sequential([keras.Input((6,)), *layers])
            model.layers[0].trainable = not is_frozen

            def loss_fn(batch, training):
                return {"loss": keras.losses.mean_squared_error(batch[1], model(batch[0], training=training))}

            return distloop.ModelSpec(model, keras.optimizers.SGD(0.05), loss_fn, trainable=trainable)

        result = distloop.Trainer(model_fn, on(1)).fit(batches(X, Y), steps=2)
        reported[trainable] = result["regularization"]
    assert reported["head"] == reported[None]


ONE = tf.distribute.get_strategy()


@functools.cache
def replicas(count):
    return strategies.make_strategy(Config(device="cpu", strategy="mirrored", num_devices=count))


def dropout_state(strategy):
    def model_fn():
        model = keras.Sequential([keras.Input((100,)), keras.layers.Dropout(0.5), keras.layers.Dense(1)])
        return ModelSpec(model, keras.optimizers.SGD(0.1), lambda batch, training: {"loss": model(batch)})

    keras.utils.set_random_seed(0)
    return TrainState(model_fn, strategy)


def test_every_replica_starts_its_random_streams_elsewhere():
    made = dropout_state(replicas(3))
    (seed,) = made.seeds
    starts = [value.numpy().astype(np.int64) for value in replicas(3).experimental_local_results(seed.value)]
    assert [int(start[0] - starts[0][0]) % 2**32 for start in starts] == [r * SEED_STRIDE for r in range(3)]
    assert len({int(start[1]) for start in starts}) == 1


def test_one_replica_draws_what_keras_draws():
    keras.utils.set_random_seed(0)
    expected = keras.layers.Dropout(0.5).seed_generator.state.numpy()
    (seed,) = dropout_state(ONE).seeds
    np.testing.assert_array_equal(seed.numpy(), expected)


def test_every_replica_draws_masks_of_its_own_each_time():
    strategy = replicas(2)
    made = dropout_state(strategy)
    dropout = made.model.layers[0]
    draw = tf.function(lambda: strategy.run(lambda: dropout(tf.ones([1, 100]), training=True)), autograph=False)
    masks = [part.numpy().tobytes() for _ in range(3) for part in strategy.experimental_local_results(draw())]
    assert len(set(masks)) == 6


@pytest.mark.parametrize("strategy", [ONE, replicas(2)], ids=["none", "mirrored"])
def test_random_streams_can_be_restored_on_every_replica(strategy):
    made = dropout_state(strategy)
    dropout = made.model.layers[0]
    draw = tf.function(lambda: strategy.run(lambda: dropout(tf.ones([1, 100]), training=True)), autograph=False)

    def masks():
        return [part.numpy().tobytes() for part in strategy.experimental_local_results(draw())]

    with made.random_streams.preserved():
        first = masks()
        assert masks() != first
    assert masks() == first
    before = made.random_streams.read()
    second = masks()
    made.random_streams.write(before)
    assert masks() == second

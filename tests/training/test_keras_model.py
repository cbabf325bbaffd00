"""Losses and metrics of Keras: the weights and numbers of fit and evaluate, and what is refused."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import distloop
from tests.compiled_models import (
    BINARY,
    LABEL,
    ONE_HOT,
    SAMPLE_WEIGHT,
    X,
    Y,
    assert_same_weights,
    assert_trains_as_keras_does,
    batches,
    compiled,
    copy_of,
    evaluated,
    net,
)
from tests.problems import on

pytestmark = pytest.mark.slow  # half a minute or so in all; left to `make test`

RNG = np.random.default_rng(1)
REPLICAS = pytest.mark.parametrize("replicas", [1, 2])


# As Keras trains.


@REPLICAS
@pytest.mark.parametrize(
    ("loss", "outputs", "activation", "target"),
    [
        ("mse", 2, None, Y),
        ("binary_crossentropy", 1, "sigmoid", BINARY),
        (keras.losses.SparseCategoricalCrossentropy(from_logits=True), 3, None, LABEL),
    ],
    ids=["name", "binary", "object"],
)
def test_from_keras_trains_as_fit_does(replicas, loss, outputs, activation, target):
    model = compiled(net(outputs, activation), loss)
    assert_trains_as_keras_does(model, batches(X, target), replicas)


@pytest.mark.parametrize(
    ("loss", "target"),
    [(keras.losses.CategoricalCrossentropy(label_smoothing=0.1), ONE_HOT), (keras.losses.huber, ONE_HOT)],
    ids=["settings", "function"],
)
def test_other_ways_to_give_a_loss_train_as_fit_does(loss, target):
    assert_trains_as_keras_does(compiled(net(3, "softmax"), loss), batches(X, target), replicas=2)


@REPLICAS
def test_l2_terms_train_as_fit_does(replicas):
    model = compiled(net(kernel_regularizer=keras.regularizers.L2(0.1)))
    assert_trains_as_keras_does(model, batches(X, Y), replicas)


@REPLICAS
def test_a_functional_model_and_a_schedule_train_as_fit_does(replicas):
    inputs = keras.Input((6,))
    hidden = keras.layers.Dense(6, "tanh")(inputs)
    outputs = keras.layers.Dense(2)(keras.layers.Add()([hidden, inputs]))
    rate = keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)
    model = compiled(keras.Model(inputs, outputs), optimizer=keras.optimizers.SGD(rate, momentum=0.9))
    assert_trains_as_keras_does(model, batches(X, Y), replicas)


@REPLICAS
def test_supervised_trains_as_fit_does(replicas):
    weights = net().get_weights()

    def model_fn():
        model = net()
        model.set_weights(weights)
        return distloop.supervised(model, "mse", keras.optimizers.Adam(0.01), metrics=["mae"])

    trainer = distloop.Trainer(model_fn, on(replicas))
    trainer.fit(batches(X, Y), epochs=2)
    twin = compiled(net())
    twin.set_weights(weights)
    twin.fit(batches(X, Y), epochs=2, verbose=0)
    assert_same_weights(trainer.model, twin)


def test_an_odd_last_batch_trains_as_fit_does_on_one_replica():
    assert_trains_as_keras_does(compiled(net()), batches(X[:29], Y[:29]), replicas=1)


def test_predict_is_the_models_output():
    model = compiled(net())
    trainer = distloop.Trainer(distloop.from_keras(model), on(2))
    np.testing.assert_allclose(trainer.predict(batches(X, Y)), model.predict(X, verbose=0), rtol=1e-5, atol=1e-6)


def test_predict_takes_batches_of_inputs_alone():
    model = compiled(net())
    trainer = distloop.Trainer(distloop.from_keras(model), on(1))
    inputs_alone = tf.data.Dataset.from_tensor_slices(X).batch(8)
    np.testing.assert_allclose(trainer.predict(inputs_alone), model.predict(X, verbose=0), rtol=1e-5, atol=1e-6)


# As Keras measures.


@REPLICAS
@pytest.mark.parametrize(
    ("outputs", "activation", "target", "loss"),
    [
        (1, "sigmoid", BINARY, "binary_crossentropy"),
        (1, "sigmoid", BINARY[:, None], "binary_crossentropy"),
        (3, "softmax", LABEL, "sparse_categorical_crossentropy"),
        (3, "softmax", LABEL[:, None], "sparse_categorical_crossentropy"),
        (3, "softmax", ONE_HOT, "categorical_crossentropy"),
    ],
    ids=["binary", "binary-column", "sparse", "sparse-column", "categorical"],
)
def test_accuracy_means_what_it_means_in_keras(replicas, outputs, activation, target, loss):
    model = compiled(net(outputs, activation), loss, metrics=["accuracy"])
    found, expected = evaluated(model, batches(X, target, batch_size=7), replicas)
    assert set(found) == {"loss", "accuracy"}
    assert 0.0 < expected["accuracy"] < 1.0
    assert found == pytest.approx(expected, rel=1e-5)


def test_acc_is_accuracy():
    model = compiled(net(3, "softmax"), "sparse_categorical_crossentropy", metrics=["acc"])
    found, expected = evaluated(model, batches(X, LABEL))
    assert found == pytest.approx(expected, rel=1e-5)
    assert set(found) == {"loss", "acc"}


@pytest.mark.parametrize(
    ("outputs", "activation", "target"),
    [(1, "sigmoid", BINARY[:, None]), (3, "softmax", LABEL), (3, "softmax", ONE_HOT)],
    ids=["binary", "sparse", "categorical"],
)
@pytest.mark.parametrize("name", ["crossentropy", "ce"])
def test_crossentropy_means_what_it_means_in_keras(outputs, activation, target, name):
    found, expected = evaluated(compiled(net(outputs, activation), name), batches(X, target, batch_size=7))
    assert found == pytest.approx(expected, rel=1e-5)


@REPLICAS
def test_metrics_that_are_no_means_are_measured_as_keras_does(replicas):
    model = compiled(net(1, "sigmoid"), "binary_crossentropy", metrics=[keras.metrics.AUC(name="auc"), "precision"])
    trainer = distloop.Trainer(distloop.from_keras(model), on(replicas))
    data = batches(X, BINARY[:, None], batch_size=7)
    expected = copy_of(model).evaluate(data, verbose=0, return_dict=True)
    for _ in range(2):  # the first evaluation leaves nothing behind
        found = trainer.evaluate(data)
        assert found["auc"] == pytest.approx(expected["auc"], abs=1e-6)
        assert found["precision"] == pytest.approx(expected["precision"], abs=1e-6)
    assert "auc" in trainer.fit(data, steps=1)


@REPLICAS
def test_functions_names_and_objects_are_metrics(replicas):
    def twice(y_true, y_pred):
        return 2.0 * tf.reduce_mean(tf.abs(y_true - y_pred), -1)

    metrics = [twice, "mae", keras.metrics.MeanSquaredError(name="square"), keras.metrics.RootMeanSquaredError()]
    found, expected = evaluated(compiled(net(), metrics=metrics), batches(X, Y, batch_size=7), replicas)
    assert set(found) == {"loss", "twice", "mae", "square", "root_mean_squared_error"}
    assert found["twice"] == pytest.approx(2 * expected["mae"], rel=1e-5)
    for name in ("mae", "square", "root_mean_squared_error"):
        assert found[name] == pytest.approx(expected[name], rel=1e-5)


@REPLICAS
def test_sample_weights_divide_by_their_sum(replicas):
    model = compiled(net(), metrics=["mse"], weighted_metrics=["mae"])
    data = batches(X, Y, SAMPLE_WEIGHT, batch_size=7)
    found, expected = evaluated(model, data, replicas)
    error = model.predict(X, verbose=0) - Y
    mean_of = np.average
    np.testing.assert_allclose(found["loss"], mean_of(np.mean(error**2, -1), weights=SAMPLE_WEIGHT), rtol=1e-5)
    np.testing.assert_allclose(found["mae"], mean_of(np.mean(abs(error), -1), weights=SAMPLE_WEIGHT), rtol=1e-5)
    np.testing.assert_allclose(found["mse"], np.mean(error**2), rtol=1e-5)  # `metrics` are not weighted, as in Keras
    assert found["mae"] == pytest.approx(expected["mae"], rel=1e-5)
    assert found["mse"] == pytest.approx(expected["mse"], rel=1e-5)
    assert found["loss"] != pytest.approx(expected["loss"], rel=1e-2)  # Keras divides by the number of examples


@REPLICAS
def test_the_scale_of_sample_weights_changes_no_weight_of_the_model(replicas):
    models = []
    for scale in (1.0, 10.0):
        keras.utils.set_random_seed(0)
        trainer = distloop.Trainer(
            distloop.from_keras(compiled(net(), optimizer=keras.optimizers.SGD(0.1))), on(replicas)
        )
        trainer.fit(batches(X, Y, scale * SAMPLE_WEIGHT), steps=6)
        models.append(trainer.model)
    assert_same_weights(*models)


def test_sample_weights_may_be_a_column():
    trainer = distloop.Trainer(distloop.from_keras(compiled(net(), weighted_metrics=["mae"])), on(1))
    expected = trainer.evaluate(batches(X, Y, SAMPLE_WEIGHT))
    assert trainer.evaluate(batches(X, Y, SAMPLE_WEIGHT[:, None])) == pytest.approx(expected, rel=1e-6)


def test_steps_within_examples_take_weights_of_their_own():
    inputs = keras.Input((None, 2))
    model = compiled(keras.Model(inputs, keras.layers.Dense(1)(inputs)))
    x, y = X.reshape(32, 3, 2), Y[:, :1, None] * np.ones([1, 3, 1], np.float32)
    weight = RNG.choice([0.0, 1.0], size=(32, 3)).astype(np.float32)
    found = distloop.Trainer(distloop.from_keras(model), on(2)).evaluate(batches(x, y, weight, batch_size=7))
    error = np.mean((model.predict(x, verbose=0) - y) ** 2, -1)
    assert found["loss"] == pytest.approx(np.average(error, weights=weight), rel=1e-5)


@REPLICAS
def test_a_mask_weighs_the_steps_within_examples(replicas):
    tokens = RNG.integers(1, 9, size=(32, 5)) * (np.arange(5) < RNG.integers(1, 6, size=(32, 1)))
    inputs = keras.Input((5,), dtype="int32")
    hidden = keras.layers.Embedding(9, 4, mask_zero=True)(inputs)
    model = compiled(keras.Model(inputs, keras.layers.Dense(2)(hidden)))
    y = RNG.normal(size=(32, 5, 2)).astype(np.float32)
    found = distloop.Trainer(distloop.from_keras(model), on(replicas)).evaluate(batches(tokens, y, batch_size=7))
    error = np.mean((model.predict(tokens, verbose=0) - y) ** 2, -1)
    assert found["loss"] == pytest.approx(np.average(error, weights=tokens > 0), rel=1e-5)


# Several outputs.


def two_outputs(kind=dict):
    inputs = keras.Input((6,))
    hidden = keras.layers.Dense(8, "tanh")(inputs)
    a, b = keras.layers.Dense(2, name="a")(hidden), keras.layers.Dense(3, "softmax", name="b")(hidden)
    return keras.Model(inputs, {"a": a, "b": b} if kind is dict else [a, b])


LOSSES = {"a": "mse", "b": "sparse_categorical_crossentropy"}


@pytest.mark.parametrize(("kind", "replicas"), [(dict, 1), (dict, 2), (list, 2)])
def test_several_outputs_train_as_fit_does(kind, replicas):
    given = {"loss": LOSSES, "loss_weights": {"a": 0.5, "b": 2.0}, "metrics": {"a": ["mae"], "b": ["accuracy"]}}
    target = {"a": Y, "b": LABEL}
    if kind is list:
        given = {name: list(value.values()) for name, value in given.items()}
        target = tuple(target.values())
    data = tf.data.Dataset.from_tensor_slices((X, target)).batch(8)
    trainer, twin = assert_trains_as_keras_does(compiled(two_outputs(kind), **given), data, replicas)
    found, expected = trainer.evaluate(data), twin.evaluate(data, verbose=0, return_dict=True)
    assert set(found) == {"loss", "a_loss", "b_loss", "a_mae", "b_accuracy"}
    for name, value in found.items():
        assert value == pytest.approx(expected[name], rel=1e-4)
    assert found["loss"] == pytest.approx(0.5 * found["a_loss"] + 2.0 * found["b_loss"], rel=1e-5)


def test_an_output_without_a_loss_takes_no_part():
    model = compiled(two_outputs(), {"a": "mse"})
    data = tf.data.Dataset.from_tensor_slices((X, {"a": Y, "b": LABEL})).batch(8)
    found = distloop.Trainer(distloop.from_keras(model), on(1)).evaluate(data)
    assert found["loss"] == found["a_loss"] and "b_loss" not in found


def test_a_loss_weight_of_a_single_output_is_a_factor():
    weights = net().get_weights()

    def model_fn(factor):
        model = net()
        model.set_weights(weights)
        return distloop.supervised(model, "mse", keras.optimizers.SGD(), loss_weights=factor)

    plain, double = (
        distloop.Trainer(lambda f=f: model_fn(f), on(1)).evaluate(batches(X, Y))["loss"] for f in (None, 2.0)
    )
    assert double == pytest.approx(2 * plain, rel=1e-6)


# What scripts do.


def error_of(y_true, y_pred):
    """Returns values per example, `[B]`; `y_true` must have the shape of `y_pred`."""
    return tf.reduce_mean(tf.square(y_true - y_pred), -1)


@pytest.mark.parametrize("loss", ["binary_crossentropy", error_of], ids=["name", "function"])
def test_labels_without_a_last_axis_fit_outputs_with_one(loss, replicas=2):
    model = compiled(net(1, "sigmoid"), loss)
    column = distloop.Trainer(distloop.from_keras(model), on(replicas)).evaluate(batches(X, BINARY[:, None]))
    found, expected = evaluated(model, batches(X, BINARY), replicas)
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    assert found["loss"] == pytest.approx(column["loss"], rel=1e-5)


def test_a_loss_and_a_metric_that_keras_cannot_name_are_taken_over():
    model = compiled(net(), lambda y_true, y_pred: 2.0 * error_of(y_true, y_pred), metrics=[error_of])
    found, expected = evaluated(model, batches(X, Y))
    assert found == pytest.approx(expected, rel=1e-5)


# Refusals.


def fit(loss="mse", data=None, make_model=net, **settings):
    """Fits what `supervised` makes, and checks that it fails before the first step."""

    def model_fn():
        return distloop.supervised(make_model(), loss, keras.optimizers.SGD(), **settings)

    trainer = distloop.Trainer(model_fn, on(1))
    try:
        trainer.fit(data if data is not None else batches(X, Y), steps=1)
    finally:
        assert trainer.step == 0


def test_a_loss_that_sums_is_refused():
    with pytest.raises(ValueError, match="'total' has reduction='sum', .*: leave reduction out"):
        fit(keras.losses.MeanSquaredError(reduction="sum", name="total"))


@pytest.mark.parametrize("reduction", ["none", "mean", "sum_over_batch_size"])
def test_other_reductions_all_mean_the_mean(reduction):
    model = compiled(net(), keras.losses.MeanSquaredError(reduction=reduction))
    found = distloop.Trainer(distloop.from_keras(model), on(2)).evaluate(batches(X, Y, batch_size=7))
    assert found["loss"] == pytest.approx(np.mean((model.predict(X, verbose=0) - Y) ** 2), rel=1e-5)


def test_batches_that_are_no_pairs_are_refused():
    with pytest.raises(ValueError, match=r"type dict and length 2 was given; .*takes \(x, y\) or .*: map the dataset"):
        fit(data=tf.data.Dataset.from_tensor_slices({"x": X, "y": Y}).batch(8))
    with pytest.raises(ValueError, match=r"type tuple and length 1 was given; .*takes \(x, y\)"):
        fit(data=tf.data.Dataset.from_tensor_slices((X,)).batch(8))


def test_a_model_without_a_loss_is_refused():
    model = net()
    model.compile(keras.optimizers.SGD())
    trainer = distloop.Trainer(distloop.from_keras(model), on(1))
    with pytest.raises(ValueError, match="no loss for any of its outputs: compile it with one"):
        trainer.fit(batches(X, Y), steps=1)


TWO = tf.data.Dataset.from_tensor_slices((X, {"a": Y, "b": LABEL})).batch(8)


def test_losses_under_unknown_names_are_refused():
    with pytest.raises(
        ValueError, match=r"\['a', 'c'\] were given by name; the outputs are \['a', 'b'\]: use those names"
    ):
        fit({"a": "mse", "c": "mse"}, TWO, two_outputs)


def test_a_list_of_another_length_than_the_outputs_is_refused():
    with pytest.raises(ValueError, match=r"A list of 1 was given for the 2 outputs \['a', 'b'\]: give one for each"):
        fit(["mse"], TWO, two_outputs)


def test_targets_that_miss_an_output_are_refused():
    data = tf.data.Dataset.from_tensor_slices((X, {"a": Y})).batch(8)
    with pytest.raises(ValueError, match="'b'"):
        fit(LOSSES, data, two_outputs)


def test_a_list_of_targets_that_misses_an_output_is_refused():
    data = tf.data.Dataset.from_tensor_slices((X, (Y,))).batch(8)
    with pytest.raises(ValueError, match="1 targets were given for 2 outputs"):
        fit(list(LOSSES.values()), data, lambda: two_outputs(list))


@pytest.mark.parametrize("names", ["a", "ab"])
def test_weights_of_their_own_for_several_outputs_are_refused(names):
    weight = {name: np.roll(SAMPLE_WEIGHT, place) for place, name in enumerate(names)}
    data = tf.data.Dataset.from_tensor_slices((X, {"a": Y, "b": LABEL}, weight)).batch(8)
    with pytest.raises(ValueError, match="several outputs .* weights .*: write a ModelSpec"):
        fit(LOSSES, data, two_outputs)


@REPLICAS
def test_weights_that_several_outputs_share_divide_by_their_sum(replicas):
    model = compiled(two_outputs(), LOSSES)
    data = tf.data.Dataset.from_tensor_slices((X, {"a": Y, "b": LABEL}, SAMPLE_WEIGHT)).batch(7)
    found = distloop.Trainer(distloop.from_keras(model), on(replicas)).evaluate(data)
    output = model.predict(X, verbose=0)
    a, b = np.mean((output["a"] - Y) ** 2, -1), -np.log(output["b"][np.arange(32), LABEL])
    assert found["a_loss"] == pytest.approx(np.average(a, weights=SAMPLE_WEIGHT), rel=1e-5)
    assert found["b_loss"] == pytest.approx(np.average(b, weights=SAMPLE_WEIGHT), rel=1e-5)
    assert found["loss"] == pytest.approx(np.average(a + b, weights=SAMPLE_WEIGHT), rel=1e-5)


def test_masks_in_a_model_with_several_outputs_are_refused():
    def model():
        inputs = keras.Input((6,), dtype="int32")
        hidden = keras.layers.Embedding(9, 4, mask_zero=True)(inputs)
        return keras.Model(inputs, [keras.layers.Dense(1, name=name)(hidden) for name in "ab"])

    data = tf.data.Dataset.from_tensor_slices((np.ones([32, 6], np.int32), (np.ones([32, 6, 1]), np.ones([32, 6, 1]))))
    with pytest.raises(
        ValueError, match="several outputs was given masks or weights within examples; .*: write a ModelSpec"
    ):
        fit(["mse", "mse"], data.batch(8), model)

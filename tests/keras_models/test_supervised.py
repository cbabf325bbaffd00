"""Losses and metrics of Keras: the weights and numbers of fit and evaluate, and what is refused."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import distloop
from tests.keras_models.compiled_models import (
    BINARY,
    LABEL,
    ONE_HOT,
    SAMPLE_WEIGHT,
    X,
    Y,
    assert_same_weights,
    assert_trains_as_keras_does,
    assert_trains_on_as_keras_does,
    batches,
    compiled,
    copy_of,
    evaluated,
    evaluated_by_keras,
    measured,
    net,
    values_of,
)
from tests.problems import mostly_wide, on

pytestmark = pytest.mark.slow  # half a minute or so in all; left to `make test`

RNG = np.random.default_rng(1)
SPARSE = "sparse_categorical_crossentropy"


def slices(rows):
    return tf.data.Dataset.from_tensor_slices(rows).batch(8)


def with_a_shortcut():
    inputs = keras.Input((6,))
    hidden = keras.layers.Dense(6, "tanh")(inputs)
    outputs = keras.layers.Dense(2)(keras.layers.Add()([hidden, inputs]))
    rate = keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)
    return compiled(keras.Model(inputs, outputs), optimizer=keras.optimizers.SGD(rate, momentum=0.9))


ON_LOGITS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
SMOOTHED = keras.losses.CategoricalCrossentropy(label_smoothing=0.1)
AS_FIT = {  # a compiled model, its data, and the number of replicas
    "name": (lambda: compiled(net()), (X, Y), 2),
    "binary": (lambda: compiled(net(1, "sigmoid"), "binary_crossentropy"), (X, BINARY), 2),
    "object": (lambda: compiled(net(3), ON_LOGITS), (X, LABEL), 2),
    "settings": (lambda: compiled(net(3, "softmax"), SMOOTHED), (X, ONE_HOT), 1),
    "function": (lambda: compiled(net(3, "softmax"), keras.losses.huber), (X, ONE_HOT), 1),
    "L2 terms": (lambda: compiled(net(kernel_regularizer=keras.regularizers.L2(0.1))), (X, Y), 2),
    "a functional model and a schedule": (with_a_shortcut, (X, Y), 1),
    "an odd last batch": (lambda: compiled(net()), (X[:29], Y[:29]), 1),
}


@pytest.mark.parametrize("case", mostly_wide(AS_FIT, *list(AS_FIT)[-3:-1]))
def test_from_keras_trains_as_fit_does(case):
    make_model, arrays, replicas = AS_FIT[case]
    assert_trains_as_keras_does(make_model(), batches(*arrays), replicas)


@pytest.mark.parametrize(("arrays", "replicas"), [((X, Y), 2), (X, 1)], ids=["pairs", "inputs alone"])
def test_predict_is_the_models_output(arrays, replicas):
    model = compiled(net())
    found = distloop.Trainer(distloop.from_keras(model), on(replicas)).predict(slices(arrays))
    np.testing.assert_allclose(found, model.predict(X, verbose=0), rtol=1e-5, atol=1e-6)


KINDS = {"binary": (1, "sigmoid", BINARY[:, None]), "sparse": (3, "softmax", LABEL), "one hot": (3, "softmax", ONE_HOT)}
ACCURACIES = {  # what the outputs are, their labels, and the loss
    "binary": ("binary", BINARY, "binary_crossentropy"),
    "binary column": ("binary", BINARY[:, None], "binary_crossentropy"),
    "sparse": ("sparse", LABEL, SPARSE),
    "sparse column": ("sparse", LABEL[:, None], SPARSE),
    "categorical": ("one hot", ONE_HOT, "categorical_crossentropy"),
}


@pytest.mark.parametrize("case", mostly_wide(ACCURACIES))
def test_accuracy_means_what_it_means_in_keras(case):
    kind, target, loss = ACCURACIES[case]
    model = compiled(net(*KINDS[kind][:2]), loss, metrics=["accuracy"])
    found, expected = evaluated(model, batches(X, target, batch_size=7))
    assert 0.0 < expected["accuracy"] < 1.0
    assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("kind", mostly_wide(KINDS))
@pytest.mark.parametrize("name", mostly_wide(["crossentropy", "ce"]))
def test_crossentropy_means_what_it_means_in_keras(kind, name):
    *outputs, target = KINDS[kind]
    found, expected = evaluated(compiled(net(*outputs), name), batches(X, target, batch_size=7))
    assert found == pytest.approx(expected, rel=1e-5)


def test_metrics_that_are_no_means_are_measured_as_keras_does():
    model = compiled(net(1, "sigmoid"), "binary_crossentropy", metrics=[keras.metrics.AUC(name="auc"), "precision"])
    trainer = distloop.Trainer(distloop.from_keras(model), on(2))
    data = batches(X, BINARY[:, None], batch_size=7)
    expected = evaluated_by_keras(copy_of(model), data)
    for _ in range(2):  # the first evaluation leaves nothing behind
        found = trainer.evaluate(data)
        for name in ("auc", "precision"):
            assert found[name] == pytest.approx(expected[name], abs=1e-6)
    assert "auc" in trainer.fit(data, steps=1)


def test_sample_weights_divide_by_their_sum_and_may_be_a_column():
    model = compiled(net(), metrics=["mse"], weighted_metrics=["mae"])
    found, expected = evaluated(model, batches(X, Y, SAMPLE_WEIGHT, batch_size=7), replicas=2)
    error = model.predict(X, verbose=0) - Y
    np.testing.assert_allclose(found["loss"], np.average(np.mean(error**2, -1), weights=SAMPLE_WEIGHT), rtol=1e-5)
    np.testing.assert_allclose(found["mae"], np.average(np.mean(abs(error), -1), weights=SAMPLE_WEIGHT), rtol=1e-5)
    np.testing.assert_allclose(found["mse"], np.mean(error**2), rtol=1e-5)  # `metrics` are not weighted, as in Keras
    assert found["mae"] == pytest.approx(expected["mae"], rel=1e-5)
    assert found["mse"] == pytest.approx(expected["mse"], rel=1e-5)
    assert found["loss"] != pytest.approx(expected["loss"], rel=1e-2)  # Keras divides by the number of examples
    of_columns, _ = evaluated(model, batches(X, Y, SAMPLE_WEIGHT[:, None], batch_size=7), replicas=2)
    assert of_columns == pytest.approx(found, rel=1e-6)


def test_the_scale_of_sample_weights_changes_no_weight_of_the_model():
    models = []
    for scale in (1.0, 10.0):
        keras.utils.set_random_seed(0)
        trainer = distloop.Trainer(distloop.from_keras(compiled(net(), optimizer=keras.optimizers.SGD(0.1))), on(2))
        trainer.fit(batches(X, Y, scale * SAMPLE_WEIGHT), steps=6)
        models.append(trainer.model)
    assert_same_weights(*models)


def assert_weighs_steps(model, weights, *batch):
    """Checks the loss of sequences; `weights` are those of the steps, however they are given."""
    x, y, *_ = batch
    found = distloop.Trainer(distloop.from_keras(model), on(2)).evaluate(batches(*batch, batch_size=7))
    error = np.mean((model.predict(x, verbose=0) - y) ** 2, -1)
    assert found["loss"] == pytest.approx(np.average(error, weights=weights), rel=1e-5)


def test_steps_within_examples_are_weighed_by_their_weights_and_a_mask():
    inputs = keras.Input((None, 2))
    model = compiled(keras.Model(inputs, keras.layers.Dense(1)(inputs)))
    x, y = X.reshape(32, 3, 2), Y[:, :1, None] * np.ones([1, 3, 1], np.float32)
    weight = RNG.choice([0.0, 1.0], size=(32, 3)).astype(np.float32)
    assert_weighs_steps(model, weight, x, y, weight)
    tokens = RNG.integers(1, 9, size=(32, 5)) * (np.arange(5) < RNG.integers(1, 6, size=(32, 1)))
    inputs = keras.Input((5,), dtype="int32")
    hidden = keras.layers.Embedding(9, 4, mask_zero=True)(inputs)
    model = compiled(keras.Model(inputs, keras.layers.Dense(2)(hidden)))
    assert_weighs_steps(model, tokens > 0, tokens, RNG.normal(size=(32, 5, 2)).astype(np.float32))


def test_a_loss_weight_of_a_single_output_is_a_factor():
    model = net()
    plain, double = (
        values_of(distloop.supervised(model, "mse", keras.optimizers.SGD(), loss_weights=factor), X, Y)["loss"]
        for factor in (None, 2.0)
    )
    assert double == pytest.approx(2 * plain, rel=1e-6)


class OwnLoss(keras.Model):
    """Computes its loss itself, per example or as a mean."""

    reduce = False

    def __init__(self, **settings):
        super().__init__()
        self.dense = keras.layers.Dense(2, **settings)
        self(np.zeros([1, 6], np.float32))

    def call(self, x):
        return self.dense(x)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        values = tf.reduce_mean(tf.abs(y - y_pred), -1) + 0.1 * tf.reduce_mean(tf.square(x), -1)
        if sample_weight is not None:
            values *= sample_weight
        return tf.reduce_mean(values) if self.reduce else values


class Reduces(OwnLoss):
    reduce = True


class AsksKeras(OwnLoss):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None):
        return 2.0 * keras.Model.compute_loss(self, x, y, y_pred, sample_weight)


def test_values_of_compute_loss_are_the_loss_and_others_are_refused():
    model = compiled(Reduces(), None, metrics=["mae"])
    per_example = OwnLoss()
    per_example.set_weights(model.get_weights())
    spec = distloop.supervised(per_example, None, keras.optimizers.SGD(), metrics=["mae"])
    expected = model.test_on_batch(X, Y, SAMPLE_WEIGHT, return_dict=True)
    assert values_of(spec, X, Y, SAMPLE_WEIGHT) == pytest.approx(expected, rel=1e-5)
    for model, sentence in (
        (AsksKeras(), "asks Keras for the loss of compile, .* one value per example"),
        (OwnLoss(kernel_regularizer="l2"), "compute_loss of its own and regularizers .*: write a ModelSpec"),
        (Reduces(), r"compute_loss of the model .* values of shape \(\); .* one value per example, \[32\]"),
    ):
        with pytest.raises(ValueError, match=sentence):
            values_of(distloop.supervised(model, None, keras.optimizers.SGD()), X, Y)


@keras.saving.register_keras_serializable("losses")
class Adds(keras.layers.Layer):
    def call(self, x):
        self.add_loss(tf.reduce_mean(tf.square(x)))
        return x


@pytest.mark.parametrize("has_targets", mostly_wide([False, True]))
def test_a_model_trains_by_add_loss_alone(has_targets):
    model = compiled(keras.Sequential([keras.Input((6,)), keras.layers.Dense(2), Adds()]), None)
    twin, data = copy_of(model), slices((X, Y) if has_targets else X)
    trainer = distloop.Trainer(distloop.from_keras(model), on(1))
    loss = trainer.evaluate(data)["loss"]
    assert loss == pytest.approx(twin.evaluate(X, Y, batch_size=8, verbose=0), rel=1e-5)
    assert trainer.fit(data, epochs=1)["loss"] < loss
    twin.fit(X, Y, batch_size=8, shuffle=False, verbose=0)
    assert_same_weights(trainer.model, twin)


@keras.saving.register_keras_serializable("tests")
class WithoutTraining(keras.Model):
    def __init__(self, **settings):
        super().__init__(**settings)
        self.parts = [keras.layers.Dense(4), keras.layers.BatchNormalization(name="norm"), keras.layers.Dense(2)]

    def call(self, inputs):
        for part in self.parts:
            inputs = part(inputs)
        return inputs


def test_a_call_without_a_training_argument_trains_as_in_keras_and_is_told(caplog):
    model, twin = (compiled(WithoutTraining(), "mse") for _ in range(2))
    for built in (model, twin):
        built(X)
    twin.set_weights(model.get_weights())
    assert_trains_on_as_keras_does(distloop.Trainer(distloop.from_keras(model), on(1)), twin, batches(X, Y))
    assert "run in inference mode while it is trained, as in Keras's fit: norm." in caplog.text


def error_of(y_true, y_pred):
    """Returns values per example, `[B]`; `y_true` must have the shape of `y_pred`."""
    return tf.reduce_mean(tf.square(y_true - y_pred), -1)


@pytest.mark.parametrize("loss", mostly_wide(["binary_crossentropy", error_of]), ids=["name", "function"])
def test_labels_without_a_last_axis_fit_outputs_with_one(loss):
    model = compiled(net(1, "sigmoid"), loss)
    column = distloop.Trainer(distloop.from_keras(model), on(2)).evaluate(batches(X, BINARY[:, None]))
    found, expected = evaluated(model, batches(X, BINARY), replicas=2)
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    assert found["loss"] == pytest.approx(column["loss"], rel=1e-5)


def test_a_loss_and_a_metric_that_keras_cannot_name_are_taken_over():
    model = compiled(net(), lambda y_true, y_pred: 2.0 * error_of(y_true, y_pred), metrics=[error_of])
    found, expected = evaluated(model, batches(X, Y))
    assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("reduction", mostly_wide(["none", "mean", "sum_over_batch_size"]))
def test_other_reductions_all_mean_the_mean(reduction):
    model = compiled(net(), keras.losses.MeanSquaredError(reduction=reduction))
    found = distloop.Trainer(distloop.from_keras(model), on(2)).evaluate(batches(X, Y, batch_size=7))
    assert found["loss"] == pytest.approx(np.mean((model.predict(X, verbose=0) - Y) ** 2), rel=1e-5)


def call_of(kind, a, b):
    return {"dict": {"cls": b, "box": a}, "list": [b, a], "one": {"cls": b}}[kind]


class Subclassed(keras.Model):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.b, self.a = keras.layers.Dense(3, "softmax"), keras.layers.Dense(2)
        self(np.zeros([1, 6], np.float32))

    def call(self, x):
        return call_of(self.kind, self.a(x), self.b(x))

    def get_config(self):
        return {"kind": self.kind}


def functional(kind):
    inputs = keras.Input((6,))
    a, b = keras.layers.Dense(2, name="ha")(inputs), keras.layers.Dense(3, "softmax", name="hb")(inputs)
    return keras.Model(inputs, call_of(kind, a, b))


TopK = keras.metrics.SparseTopKCategoricalAccuracy
BY_NAME = {"cls": LABEL, "box": Y}
BY_EACH_NAME = {"loss": {"cls": SPARSE, "box": "mse"}, "metrics": {"cls": [TopK, "accuracy"], "box": "mae"}}
MATCHED = {  # the structure of the outputs, what compile is given, and the targets
    "by name": ("dict", BY_EACH_NAME, BY_NAME),
    "lists": ("dict", {"loss": ["mse", SPARSE], "loss_weights": [2.0, 0.5]}, (Y, LABEL)),  # they match the sorted keys
    "partial": ("dict", {"loss": {"cls": SPARSE}}, BY_NAME),
    "one loss": ("dict", {"loss": "mse"}, {"cls": ONE_HOT, "box": Y}),
    "no loss": ("list", {"loss": [SPARSE, None]}, (LABEL, Y)),
    "one by name": ("one", {"loss": {"cls": SPARSE}, "metrics": {"cls": ["accuracy", TopK]}}, {"cls": LABEL}),
    "one": ("one", {"loss": SPARSE, "metrics": ["accuracy"]}, LABEL),
}


@pytest.mark.parametrize("make_model", mostly_wide([functional, Subclassed]))
@pytest.mark.parametrize("case", mostly_wide(MATCHED))
def test_outputs_losses_and_metrics_match_as_in_keras(make_model, case):
    kind, settings, target = MATCHED[case]
    found, expected = measured(compiled(make_model(kind), **settings), X, target)
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-5)


def called_twice():
    """Returns a model whose two outputs have one name, that of the layer that makes both."""
    inputs, head = keras.Input((6,)), keras.layers.Dense(2, name="head")
    return keras.Model(inputs, [head(inputs), head(1 - inputs)])


MAE = {"head": ["mae", "mse"]}
OF_ONE_NAME = {
    "a list of targets": ({}, (Y, Y)),
    "other targets": ({"metrics": [["mae"], ["mae"]]}, (Y, Y + 1)),
    "a target by name": ({"metrics": MAE, "weighted_metrics": {"head": ["mae"]}}, {"head": Y}),
    "all by name": ({"loss": {"head": "mse"}, "loss_weights": {"head": 2.0}}, {"head": Y}),
    "loss weights": ({"loss": ["mse", "mae"], "loss_weights": [2.0, 0.5]}, (Y, Y)),
}


@pytest.mark.parametrize("case", mostly_wide(OF_ONE_NAME))
def test_outputs_of_one_name_count_each_as_in_keras(case):
    settings, target = OF_ONE_NAME[case]
    found, expected = measured(compiled(called_twice(), **settings), X, target)
    assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("target", mostly_wide([(Y, Y), {"head": Y}]))
def test_outputs_of_one_name_train_as_in_keras(target):
    assert_trains_as_keras_does(compiled(called_twice()), slices((X, target)), replicas=2)


def test_a_list_of_metrics_matches_the_outputs_of_a_subclassed_model():
    metrics = {"metrics": [["accuracy", TopK], ["mae"]], "weighted_metrics": [None, ["mse"]]}
    found, expected = measured(compiled(Subclassed("list"), [SPARSE, "mse"], **metrics), X, (LABEL, Y))
    del expected["mse_loss"], expected["sparse_categorical_crossentropy_loss"]  # the outputs have no names
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-5)
    with pytest.raises(ValueError, match="'mae' was given in a list of another length; the outputs are .*output_1"):
        measured(compiled(Subclassed("list"), [SPARSE, "mse"], metrics=["mae"]), X, (LABEL, Y))


def two_outputs(kind=dict):
    inputs = keras.Input((6,))
    hidden = keras.layers.Dense(8, "tanh")(inputs)
    a, b = keras.layers.Dense(2, name="a")(hidden), keras.layers.Dense(3, "softmax", name="b")(hidden)
    return keras.Model(inputs, {"a": a, "b": b} if kind is dict else [a, b])


LOSSES = {"a": "mse", "b": SPARSE}
BOTH = {"a": Y, "b": LABEL}


@pytest.mark.parametrize(("kind", "replicas"), mostly_wide([(dict, 1), (dict, 2), (list, 2)]))
def test_several_outputs_train_as_fit_does(kind, replicas):
    given = {"loss": LOSSES, "loss_weights": {"a": 0.5, "b": 2.0}, "metrics": {"a": ["mae"], "b": ["accuracy"]}}
    if kind is list:
        given = {name: list(value.values()) for name, value in given.items()}
    data = slices((X, BOTH if kind is dict else tuple(BOTH.values())))
    trainer, twin = assert_trains_as_keras_does(compiled(two_outputs(kind), **given), data, replicas)
    found, expected = trainer.evaluate(data), evaluated_by_keras(twin, data)
    assert set(found) == {"loss", "a_loss", "b_loss", "a_mae", "b_accuracy"}
    for name, value in found.items():
        assert value == pytest.approx(expected[name], rel=1e-4)
    assert found["loss"] == pytest.approx(0.5 * found["a_loss"] + 2.0 * found["b_loss"], rel=1e-5)


def test_an_output_without_a_loss_takes_no_part():
    model = compiled(two_outputs(), {"a": "mse"})
    found = distloop.Trainer(distloop.from_keras(model), on(1)).evaluate(slices((X, BOTH)))
    assert found["loss"] == found["a_loss"] and "b_loss" not in found


def test_weights_that_several_outputs_share_divide_by_their_sum():
    model = compiled(two_outputs(), LOSSES)
    data = tf.data.Dataset.from_tensor_slices((X, BOTH, SAMPLE_WEIGHT)).batch(7)
    found = distloop.Trainer(distloop.from_keras(model), on(2)).evaluate(data)
    output = model.predict(X, verbose=0)
    a, b = np.mean((output["a"] - Y) ** 2, -1), -np.log(output["b"][np.arange(32), LABEL])
    for name, values in {"a_loss": a, "b_loss": b, "loss": a + b}.items():
        assert found[name] == pytest.approx(np.average(values, weights=SAMPLE_WEIGHT), rel=1e-5)


def values(loss, *batch, make_model=two_outputs, **settings):
    return values_of(distloop.supervised(make_model(), loss, keras.optimizers.SGD(), **settings), X, *batch)


def test_what_does_not_match_several_outputs_is_refused():
    names = r"\['a', 'c'\] were given by name; the outputs are \['a', 'b'\]: use those names"
    with pytest.raises(ValueError, match=names):
        values({"a": "mse", "c": "mse"}, BOTH)
    with pytest.raises(ValueError, match=r"A list of 1 was given for the 2 outputs \['a', 'b'\]: give one for each"):
        values(["mse"], BOTH)
    with pytest.raises(ValueError, match=r"none for the outputs \['b'\], which have a loss"):
        values(LOSSES, {"a": Y})
    with pytest.raises(ValueError, match="'b_accuracy' measures the output 'b', which has no target"):
        values({"a": "mse"}, {"a": Y}, metrics={"b": ["accuracy"]})
    with pytest.raises(ValueError, match="1 targets were given for 2 outputs"):
        values(list(LOSSES.values()), (Y,), make_model=lambda: two_outputs(list))
    for names in ("a", "ab"):
        with pytest.raises(ValueError, match="several outputs .* weights .*: write a ModelSpec"):
            values(LOSSES, BOTH, dict.fromkeys(names, SAMPLE_WEIGHT))
    masked = {"a": "mse", "b": keras.losses.SparseCategoricalCrossentropy(ignore_class=1)}
    of_a_mask = "several outputs was given masks or weights within examples; 'b' has a mask"
    with pytest.raises(ValueError, match=of_a_mask):
        values(masked, BOTH)

    def nested():
        inputs = keras.Input((6,))
        return keras.Model(inputs, {"a": {"b": keras.layers.Dense(2)(inputs)}})

    with pytest.raises(ValueError, match=r"outputs \['a'\] are dicts or lists themselves; .*: return such, or write"):
        values("mse", {"a": {"b": Y}}, make_model=nested)

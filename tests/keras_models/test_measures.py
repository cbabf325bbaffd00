"""Metrics of compiled models: the numbers and names of evaluate, and metrics that cannot be made again."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import distloop
from distloop.keras_models.measures import make_measures
from tests.keras_models.compiled_models import (
    BINARY,
    LABEL,
    ONE_HOT,
    SAMPLE_WEIGHT,
    X,
    Y,
    compiled,
    measured,
    net,
    values_of,
)
from tests.problems import mirrored, mostly_wide, on

M = keras.metrics
TOKENS = np.random.default_rng(3).integers(0, 4, size=(32, 5))


class Perplexity(M.SparseCategoricalCrossentropy):
    """A mean whose result is no mean."""

    def result(self):
        return tf.exp(super().result())


class Above(M.Sum):
    """Has an argument, and no get_config."""

    def __init__(self, threshold=0.5, name="above"):
        super().__init__(name=name)
        self.threshold = threshold


class NeedsArgument(Above):
    def __init__(self, threshold):
        super().__init__(threshold)


class NoConfig(Above):
    def get_config(self):
        raise NotImplementedError


def assert_measures_as_keras_does(model, *batch):
    found, expected = measured(model, *batch)
    assert found == pytest.approx(expected, rel=1e-5)


def test_metrics_have_the_values_and_names_of_keras():
    def myError(y_true, y_pred):  # noqa: N802
        return tf.abs(tf.cast(y_true, tf.float32) - y_pred[:, 0])

    metrics = ["accuracy", "acc", M.SparseCategoricalAccuracy, "accuracy", Perplexity()]
    metrics += [M.SparseTopKCategoricalAccuracy(2), myError, lambda y_true, y_pred: y_pred[:, 0]]
    metrics += [M.MeanMetricWrapper(myError, name="wrapped")]
    model = compiled(net(3, "softmax"), "sparse_categorical_crossentropy", metrics=metrics)
    assert_measures_as_keras_does(model, X, LABEL)
    losses = [keras.losses.Huber(), "kl_divergence"]
    model = compiled(net(3, "softmax"), "categorical_crossentropy", metrics=losses)
    assert_measures_as_keras_does(model, X, ONE_HOT)


def test_weighted_metrics_have_the_values_and_names_of_keras():
    metrics = {"metrics": ["mae", "mae", M.RootMeanSquaredError()], "weighted_metrics": ["mae", "mse", "mse", "mae"]}
    found, expected = measured(compiled(net(), **metrics), X, Y, SAMPLE_WEIGHT)
    del found["loss"], expected["loss"]  # Keras divides by the number of examples
    assert found == pytest.approx(expected, rel=1e-5)


COLUMN, STEPS = np.arange(4, dtype=np.float32)[:, None], np.tile([[[0.0], [1.0], [1.0]]], [8, 1, 1])


@pytest.mark.parametrize(
    ("x", "y", "fn"),
    [
        (STEPS, np.zeros([8, 3]), lambda y_true, y_pred: tf.cast(y_pred[..., 0] > 0.5, tf.float32)),
        (COLUMN, COLUMN[:, 0], lambda y_true, y_pred: tf.abs(y_true - y_pred[:, 0])),
        (COLUMN, COLUMN[:, 0], lambda y_true, y_pred: tf.abs(y_true[:, None] - y_pred)),
    ],
    ids=["steps", "rows", "columns"],
)
def test_functions_get_labels_and_outputs_of_the_ranks_that_they_have(x, y, fn):
    def named(y_true, y_pred):
        return fn(y_true, y_pred)

    metrics = {"metrics": [named, M.MeanMetricWrapper(named, name="wrapped"), "mae"], "weighted_metrics": [named]}
    inputs = keras.Input(x.shape[1:])
    outputs = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")(inputs)
    y = y.astype(np.float32)
    assert_measures_as_keras_does(compiled(keras.Model(inputs, outputs), **metrics), x, y)
    two = compiled(keras.Model(inputs, [outputs, outputs + 1]), metrics=[[named], [named, "mae"]])
    assert_measures_as_keras_does(two, x, (y, y))


def test_metrics_of_keras_compare_each_label_with_its_own_output():
    metrics = [M.Poisson(), "hinge", M.SquaredHinge(), M.CategoricalHinge(), keras.losses.kl_divergence]
    model = compiled(net(1, "sigmoid"), metrics=metrics)
    assert measured(model, X, BINARY)[0] == pytest.approx(measured(model, X, BINARY[:, None])[1], rel=1e-5)


def test_metrics_in_lists_of_lists_measure_the_only_output():
    model = net()
    in_lists = values_of(distloop.from_keras(compiled(model, metrics=[["mae"], ["mse"]]))(), X, Y)
    assert in_lists == values_of(distloop.from_keras(compiled(model, metrics=["mae", "mse"]))(), X, Y)


@pytest.mark.parametrize("has_weights", [False, True])
def test_the_mask_of_an_output_counts_as_in_keras(has_weights):
    inputs = keras.Input((5,), dtype="int32")
    hidden = keras.layers.Embedding(9, 4, mask_zero=True)(inputs)
    weighted = [M.SparseCategoricalAccuracy("weighted")]
    model = keras.Model(inputs, keras.layers.Dense(4, "softmax")(hidden))
    settings = {"metrics": ["accuracy", Perplexity()], "weighted_metrics": weighted}
    model = compiled(model, "sparse_categorical_crossentropy", **settings)
    if not has_weights:
        assert_measures_as_keras_does(model, TOKENS, TOKENS)
        return
    found, expected = measured(model, TOKENS, TOKENS, np.tile(SAMPLE_WEIGHT[:, None], 5))
    for name in ("weighted", "accuracy"):
        assert found[name] == pytest.approx(expected[name], rel=1e-5)


@pytest.mark.parametrize(
    "make_metric", [lambda: Above(0.7), lambda: NeedsArgument(0.7), NoConfig], ids=["lost", "needed", "raises"]
)
def test_a_metric_without_a_whole_config_is_made_where_it_is_used(make_metric):
    metric = make_metric()
    assert make_measures([metric], None, [])[0].metric is metric
    with mirrored(2).scope():
        with pytest.raises(ValueError, match="metric 'above', .* cannot be made again .* inside model_fn"):
            make_measures([metric], None, [])
        metric = make_metric()
        assert make_measures([metric], None, [])[0].metric is metric


def test_metrics_without_values_per_example_or_a_free_name_are_refused():
    with pytest.raises(ValueError, match=r"The metric 'lambda' has values of shape \(\); .* one value per example"):
        measured(compiled(net(), metrics=[lambda y_true, y_pred: tf.reduce_mean(y_pred)]), X, Y)
    with pytest.raises(ValueError, match="name 'skipped_steps', which distloop reports: give it another"):
        measured(compiled(net(), metrics=[M.MeanSquaredError(name="skipped_steps")]), X, Y)


class Watched(keras.layers.Layer):
    """Passes its inputs on, and measures them."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.shares = keras.metrics.Mean(name="share_of_zeros")
        self.largest = keras.metrics.MeanSquaredError(name="square")
        self.size = keras.metrics.Mean(name="size")
        self.unused = keras.metrics.Mean(name="unused")

    def call(self, x):
        self.shares.update_state(tf.cast(x <= 0, tf.float32))
        self.largest.update_state(x, tf.zeros_like(x), sample_weight=tf.fill(tf.shape(x)[:1], 2.0))
        self.size(tf.constant(3.0))
        return x


def watched():
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(4), Watched(), keras.layers.Dense(2)])
    model.compile(keras.optimizers.SGD(0.0), "mse", metrics=["mae"], run_eagerly=True)
    return model


@pytest.mark.parametrize("settings", mostly_wide([{}, {"microbatches": 2}, {"virtual_replicas": 2}]))
def test_metrics_that_layers_update_in_a_call_are_reported_as_in_keras(settings):
    x, y = np.random.default_rng(0).normal(size=(2, 21, 6)).astype("float32")
    y = y[:, :2]
    model = watched()
    expected = model.fit(x, y, batch_size=8, shuffle=False, verbose=0).history
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(8)
    trainer = distloop.Trainer(distloop.from_keras(model), on(2, **settings))
    found, evaluated = trainer.fit(data, epochs=1), trainer.evaluate(data)
    for name, (value,) in expected.items():
        assert [found[name], evaluated[name]] == pytest.approx([value] * 2, rel=1e-5), name
    assert {"share_of_zeros", "square", "size", "unused"} <= set(found)
    assert trainer.predict(data).shape == (21, 2)


def test_a_metric_of_a_layer_that_is_updated_twice_is_refused():
    def make():
        layer, inputs = Watched(), keras.Input((6,))
        model = keras.Model(inputs, keras.layers.Dense(2)(layer(layer(inputs))))
        model.compile("sgd", "mse")
        return model

    with pytest.raises(ValueError, match="'share_of_zeros' of a layer was updated twice"):
        distloop.Trainer(distloop.from_keras(make), on(1)).fit(X, Y, batch_size=8, steps=1)


class Beyond(M.Mean):
    def __init__(self, limit=0.0, **settings):
        super().__init__(**settings)
        self.limit = limit

    def update_state(self, values, sample_weight=None):
        return super().update_state(tf.cast(values > self.limit, tf.float32), sample_weight)


class Hidden(Beyond):
    """Keeps its argument in another form."""

    def __init__(self, largest=0.0, **settings):
        super().__init__(**settings)
        self._half = largest / 2


class Told(Beyond):
    def get_config(self):
        return super().get_config() | {"limit": self.limit}


class Mapped(M.Mean):
    """Keeps a function, or what is no number; its config is that of a mean."""

    def __init__(self, fn=tf.abs, kept=frozenset(), **settings):
        super().__init__(**settings)
        self.fn, self.kept = fn, kept

    def update_state(self, y_true, y_pred, sample_weight=None):
        return super().update_state(self.fn(y_true - y_pred), sample_weight)


class MappedTold(Mapped):
    """Its own config leaves both out."""

    def __init__(self, fn=None, kept=frozenset(), **settings):
        super().__init__(fn or (lambda x: x), kept, **settings)

    def get_config(self):
        return super().get_config()


LOST = {
    "function": {"fn": tf.square},
    "lambda": {"fn": lambda x: x},
    "partial": {"fn": functools.partial(tf.pow, y=2.0)},
    "ufunc": {"fn": np.square},
    "set": {"kept": {1, 2}},
    "frozenset": {"kept": frozenset({1})},
    "bytes": {"kept": b"a"},
    "tensor": {"kept": tf.constant([1.0])},
    "enum": {"kept": tf.VariableSynchronization.AUTO},
    "an object": {"kept": keras.regularizers.L2()},
}


@pytest.mark.parametrize("kind", [Mapped, MappedTold])
@pytest.mark.parametrize("case", LOST)
def test_a_metric_whose_config_lacks_an_argument_of_any_kind_is_refused(kind, case):
    lost = next(iter(LOST[case]))
    with pytest.raises(ValueError, match=rf"a {kind.__name__}, cannot be .*it lacks {lost}\): let get_config"):
        distloop.Trainer(distloop.from_keras(compiled(net(), metrics=[kind(**LOST[case])])), on(2))


@pytest.mark.parametrize(("kind", "expected"), [(Mapped, 1.0), (MappedTold, -1.0)])
def test_a_metric_with_the_defaults_of_its_arguments_is_copied(kind, expected):
    net_of_zeros = net()
    net_of_zeros.set_weights([0 * weight for weight in net_of_zeros.get_weights()])
    values = values_of(distloop.from_keras(compiled(net_of_zeros, metrics=[kind(name="m")]))(), X, 0 * Y - 1)
    assert values["m"] == pytest.approx(expected)


@pytest.mark.parametrize("kind", [Beyond, Hidden])
def test_a_metric_of_an_evaluation_is_copied_whole_or_refused(kind):
    trainer = distloop.Trainer(distloop.from_keras(compiled(net())), on(2))
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(8)

    def fit(metric, steps):
        settings = {"loss_fn": lambda batch, training: {"m": (batch[0],)}, "metrics": {"m": metric}}
        return trainer.fit(data, steps=steps, evals={"val": distloop.Evaluation(data, **settings)})

    with pytest.raises(ValueError, match=r'^The metric "m" of an Evaluation, a .*\(it lacks .*\): let get_config'):
        fit(kind(7.5), steps=1)
    assert int(trainer.state.step) == 0
    fit(Beyond(), steps=1)
    assert fit(Told(0.5), steps=2)["val/m"] == pytest.approx(np.mean(X > 0.5))

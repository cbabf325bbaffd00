"""Models with several outputs, or outputs by name: which loss, metric, target and weight belongs to which output."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import distloop
from tests.compiled_models import (
    LABEL,
    ONE_HOT,
    SAMPLE_WEIGHT,
    X,
    Y,
    assert_trains_as_keras_does,
    compiled,
    evaluated_by_keras,
    measured,
    values_of,
)
from tests.problems import mostly_wide, on

# Outputs by name.


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


SPARSE = "sparse_categorical_crossentropy"
TopK = keras.metrics.SparseTopKCategoricalAccuracy
BY_NAME = {"cls": LABEL, "box": Y}


@pytest.mark.slow
@pytest.mark.parametrize("make_model", mostly_wide([functional, Subclassed]))
@pytest.mark.parametrize(
    ("kind", "settings", "target"),
    mostly_wide(
        [
            (
                "dict",
                {"loss": {"cls": SPARSE, "box": "mse"}, "metrics": {"cls": [TopK, "accuracy"], "box": "mae"}},
                BY_NAME,
            ),
            # Lists match the sorted keys.
            ("dict", {"loss": ["mse", SPARSE], "loss_weights": [2.0, 0.5]}, (Y, LABEL)),
            ("dict", {"loss": {"cls": SPARSE}}, BY_NAME),
            ("dict", {"loss": "mse"}, {"cls": ONE_HOT, "box": Y}),
            ("list", {"loss": [SPARSE, None]}, (LABEL, Y)),
            ("one", {"loss": {"cls": SPARSE}, "metrics": {"cls": ["accuracy", TopK]}}, {"cls": LABEL}),
            ("one", {"loss": SPARSE, "metrics": ["accuracy"]}, LABEL),
        ]
    ),
    ids=["by name", "lists", "partial", "one loss", "no loss", "one by name", "one"],
)
def test_outputs_losses_and_metrics_match_as_in_keras(make_model, kind, settings, target):
    found, expected = measured(compiled(make_model(kind), **settings), X, target)
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-5)


def test_a_list_of_metrics_matches_the_outputs_of_a_subclassed_model():
    metrics = {"metrics": [["accuracy", TopK], ["mae"]], "weighted_metrics": [None, ["mse"]]}
    found, expected = measured(compiled(Subclassed("list"), [SPARSE, "mse"], **metrics), X, (LABEL, Y))
    del expected["mse_loss"], expected["sparse_categorical_crossentropy_loss"]  # the outputs have no names
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-5)
    with pytest.raises(ValueError, match="'mae' was given in a list of another length; the outputs are .*output_1"):
        measured(compiled(Subclassed("list"), [SPARSE, "mse"], metrics=["mae"]), X, (LABEL, Y))


# Several outputs.


def two_outputs(kind=dict):
    inputs = keras.Input((6,))
    hidden = keras.layers.Dense(8, "tanh")(inputs)
    a, b = keras.layers.Dense(2, name="a")(hidden), keras.layers.Dense(3, "softmax", name="b")(hidden)
    return keras.Model(inputs, {"a": a, "b": b} if kind is dict else [a, b])


LOSSES = {"a": "mse", "b": "sparse_categorical_crossentropy"}


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "replicas"), mostly_wide([(dict, 1), (dict, 2), (list, 2)]))
def test_several_outputs_train_as_fit_does(kind, replicas):
    given = {"loss": LOSSES, "loss_weights": {"a": 0.5, "b": 2.0}, "metrics": {"a": ["mae"], "b": ["accuracy"]}}
    target = {"a": Y, "b": LABEL}
    if kind is list:
        given = {name: list(value.values()) for name, value in given.items()}
        target = tuple(target.values())
    data = tf.data.Dataset.from_tensor_slices((X, target)).batch(8)
    trainer, twin = assert_trains_as_keras_does(compiled(two_outputs(kind), **given), data, replicas)
    found, expected = trainer.evaluate(data), evaluated_by_keras(twin, data)
    assert set(found) == {"loss", "a_loss", "b_loss", "a_mae", "b_accuracy"}
    for name, value in found.items():
        assert value == pytest.approx(expected[name], rel=1e-4)
    assert found["loss"] == pytest.approx(0.5 * found["a_loss"] + 2.0 * found["b_loss"], rel=1e-5)


@pytest.mark.slow
def test_an_output_without_a_loss_takes_no_part():
    model = compiled(two_outputs(), {"a": "mse"})
    data = tf.data.Dataset.from_tensor_slices((X, {"a": Y, "b": LABEL})).batch(8)
    found = distloop.Trainer(distloop.from_keras(model), on(1)).evaluate(data)
    assert found["loss"] == found["a_loss"] and "b_loss" not in found


@pytest.mark.slow
def test_weights_that_several_outputs_share_divide_by_their_sum(replicas=2):
    model = compiled(two_outputs(), LOSSES)
    data = tf.data.Dataset.from_tensor_slices((X, {"a": Y, "b": LABEL}, SAMPLE_WEIGHT)).batch(7)
    found = distloop.Trainer(distloop.from_keras(model), on(replicas)).evaluate(data)
    output = model.predict(X, verbose=0)
    a, b = np.mean((output["a"] - Y) ** 2, -1), -np.log(output["b"][np.arange(32), LABEL])
    assert found["a_loss"] == pytest.approx(np.average(a, weights=SAMPLE_WEIGHT), rel=1e-5)
    assert found["b_loss"] == pytest.approx(np.average(b, weights=SAMPLE_WEIGHT), rel=1e-5)
    assert found["loss"] == pytest.approx(np.average(a + b, weights=SAMPLE_WEIGHT), rel=1e-5)


# Refusals.


def values(loss, target, *weight, make_model=two_outputs, **settings):
    spec = distloop.supervised(make_model(), loss, keras.optimizers.SGD(), **settings)
    return values_of(spec, X, target, *weight)


BOTH = {"a": Y, "b": LABEL}


def test_losses_under_unknown_names_are_refused():
    with pytest.raises(
        ValueError, match=r"\['a', 'c'\] were given by name; the outputs are \['a', 'b'\]: use those names"
    ):
        values({"a": "mse", "c": "mse"}, BOTH)


def test_a_list_of_another_length_than_the_outputs_is_refused():
    with pytest.raises(ValueError, match=r"A list of 1 was given for the 2 outputs \['a', 'b'\]: give one for each"):
        values(["mse"], BOTH)


def test_targets_that_miss_an_output_are_refused():
    with pytest.raises(ValueError, match=r"none for the outputs \['b'\], which have a loss"):
        values(LOSSES, {"a": Y})
    with pytest.raises(ValueError, match="'b_accuracy' measures the output 'b', which has no target"):
        values({"a": "mse"}, {"a": Y}, metrics={"b": ["accuracy"]})


def test_a_list_of_targets_that_misses_an_output_is_refused():
    with pytest.raises(ValueError, match="1 targets were given for 2 outputs"):
        values(list(LOSSES.values()), (Y,), make_model=lambda: two_outputs(list))


@pytest.mark.parametrize("names", ["a", "ab"])
def test_weights_of_their_own_for_several_outputs_are_refused(names):
    with pytest.raises(ValueError, match="several outputs .* weights .*: write a ModelSpec"):
        values(LOSSES, BOTH, dict.fromkeys(names, SAMPLE_WEIGHT))


def test_masks_in_a_model_with_several_outputs_are_refused():
    loss = {"a": "mse", "b": keras.losses.SparseCategoricalCrossentropy(ignore_class=1)}
    with pytest.raises(ValueError, match="several outputs was given masks or weights within examples; 'b' has a mask"):
        values(loss, BOTH)


def test_outputs_within_outputs_are_refused():
    def nested():
        inputs = keras.Input((6,))
        return keras.Model(inputs, {"a": {"b": keras.layers.Dense(2)(inputs)}})

    with pytest.raises(ValueError, match=r"outputs \['a'\] are dicts or lists themselves; .*: return such, or write"):
        values("mse", {"a": {"b": Y}}, make_model=nested)

"""The precision of models that exist already, and of those made under a policy that the user has set in Keras."""

import keras
import numpy as np
import pytest

import distloop
from tests.compiled_models import X, Y, batches, compiled
from tests.problems import mostly_wide, on


@pytest.fixture(autouse=True)
def float32_afterwards():
    yield
    keras.config.set_dtype_policy("float32")
    keras.config.set_floatx("float32")


def make():
    base = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4, "tanh"), keras.layers.BatchNormalization()])
    inputs = keras.Input((6,))
    hidden = keras.layers.Dense(8, "tanh")(inputs)
    return compiled(keras.Model(inputs, keras.layers.Dense(2, dtype=keras.DTypePolicy("float32"))(base(hidden))))


def computed_in(model):
    return [layer.compute_dtype for layer in model._flatten_layers() if layer._trainable_variables]


@pytest.mark.parametrize("precision", mostly_wide(["mixed_bfloat16", "mixed_float16"]))
def test_a_model_that_exists_is_rebuilt_in_the_precision_but_for_layers_with_a_dtype_of_their_own(precision):
    model = make()
    trainer = distloop.Trainer(distloop.from_keras(model), on(2, precision=precision))
    trainer.fit(batches(X, Y), steps=2)
    half = precision.removeprefix("mixed_")
    assert sorted(computed_in(trainer.model)) == sorted([half, half, half, "float32"])
    assert {v.dtype for v in trainer.model.trainable_weights} == {"float32"}
    assert set(computed_in(model)) == {"float32"}  # the given object stays as it is, and has the weights
    np.testing.assert_array_equal(model.get_weights()[0], trainer.model.get_weights()[0])


@pytest.mark.parametrize("is_given", mostly_wide([True, False]))
def test_a_model_read_from_a_file_is_rebuilt_in_the_precision(is_given, tmp_path):
    make().save(path := tmp_path / "model.keras")

    def model_fn():
        return distloop.supervised(keras.models.load_model(path), "mse", keras.optimizers.SGD(0.1))

    given = distloop.from_keras(keras.models.load_model(path)) if is_given else model_fn
    trainer = distloop.Trainer(given, on(1, precision="mixed_bfloat16"))
    trainer.fit(batches(X, Y), steps=1)
    assert set(computed_in(trainer.model)) == {"bfloat16"}

    def with_a_head():
        model = keras.Sequential([keras.models.load_model(path), keras.layers.Dense(2, dtype="float32")])
        return distloop.supervised(model, "mse", keras.optimizers.SGD(0.1))

    trainer = distloop.Trainer(with_a_head, on(1, precision="mixed_bfloat16"))
    assert sorted(computed_in(trainer.model)) == ["bfloat16"] * 4 + ["float32"]


def test_the_global_policy_of_keras_is_taken_and_said(capsys):
    keras.mixed_precision.set_global_policy("mixed_float16")
    trainer = distloop.Trainer(distloop.from_keras(make), on(1, console="lines"))
    trainer.fit(batches(X, Y), steps=1)
    assert trainer.config.precision == "mixed_float16"
    assert sorted(computed_in(trainer.model)) == ["float16"] * 3 + ["float32"]
    assert type(trainer.optimizer) is distloop.LossScaleOptimizer
    assert "precision mixed_float16" in capsys.readouterr().out


def test_the_console_says_what_layers_that_keep_their_precision_compute_in(capsys):
    keras.config.set_dtype_policy("mixed_bfloat16")
    model = compiled(keras.Sequential([keras.Input((6,)), keras.layers.Dense(2)]))
    keras.config.set_dtype_policy("float32")
    distloop.Trainer(distloop.from_keras(model), on(1, console="lines")).fit(batches(X, Y), steps=1)
    assert "precision mixed_bfloat16" in capsys.readouterr().out


def test_another_floatx_or_policy_of_keras_is_refused():
    for set_dtype, dtype in ((keras.config.set_floatx, "float64"), (keras.config.set_dtype_policy, "bfloat16")):
        set_dtype(dtype)
        with pytest.raises(ValueError, match=f"floatx is {dtype}, but layers are made under Config.precision"):
            distloop.Trainer(distloop.from_keras(make), on(1))
        set_dtype("float32")


def test_a_precision_that_no_layer_has_is_named(caplog):
    def model_fn():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(2, dtype="float32")])
        return distloop.supervised(model, "mse", keras.optimizers.SGD(0.1))

    distloop.Trainer(model_fn, on(1, precision="mixed_bfloat16"))
    assert "no layer of the model computes in bfloat16" in caplog.text

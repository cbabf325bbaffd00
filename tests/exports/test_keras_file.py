"""Keras files: layers and weights of one model, read back and compared before the file has its name."""

import os
import random

import keras
import numpy as np
import pytest
import tensorflow as tf

import distloop
from distloop.model.dtype_policy import policy
from tests.exports.export_trainers import (
    ROWS,
    assert_weights,
    averages,
    dataset,
    export_keras_file,
    images,
    make_image_trainer,
    make_trainer,
)
from tests.problems import assert_equal, classification, classifier, everything, local_values, mostly_wide, on, weights

pytestmark = pytest.mark.slow


def test_a_keras_file_predicts_as_predict_does_with_the_averaged_weights(tmp_path, replicas=2):
    trainer = make_trainer(replicas=replicas, average_decay=0.9)
    trainer.fit(dataset(), steps=5)
    before, predictions = everything(trainer), trainer.predict(dataset())
    loaded = export_keras_file(trainer, tmp_path / "model.keras")
    np.testing.assert_allclose(loaded.predict(ROWS["x"], verbose=0), predictions, rtol=1e-6, atol=1e-7)
    assert not np.allclose(trainer.model(ROWS["x"], training=False), predictions, rtol=1e-3)
    assert_weights([weight.numpy() for weight in loaded.weights], averages(trainer))
    assert_equal(everything(trainer), before)
    assert os.listdir(tmp_path) == ["model.keras"]
    for weight in loaded.weights:
        assert isinstance(weight.value, tf.Variable) and not isinstance(weight.value, tf.distribute.DistributedValues)
    if replicas > 1:  # so the line above says something
        assert isinstance(trainer.model.weights[0].value, tf.distribute.DistributedValues)


def test_a_keras_file_needs_no_data_and_leaves_random_numbers_alone(tmp_path):
    def model_fn():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
        return distloop.ModelSpec(model, keras.optimizers.SGD(0.1), lambda b, training: {"loss": model(b)[:, 0]})

    before = random.getstate()
    trainer = distloop.Trainer(model_fn, on(1))
    assert random.getstate() != before  # making layers draws from them, as reading a file back does
    before = random.getstate()
    trainer.export(tmp_path / "deep" / "model.keras")
    assert random.getstate() == before
    loaded = keras.models.load_model(tmp_path / "deep" / "model.keras")
    assert_weights([w.numpy() for w in loaded.weights], list(weights(trainer).values()))


def change_what_is_read(monkeypatch, change):
    load = keras.models.load_model
    monkeypatch.setattr(keras.models, "load_model", lambda path: change(load(path)))


@pytest.mark.parametrize("wrong", ["one bit", "a weight less"])
def test_a_keras_file_with_other_weights_never_takes_its_name(wrong, tmp_path, monkeypatch):
    def change(model):
        if wrong == "a weight less":
            return keras.Model(model.inputs, model.layers[0](model.inputs[0]))
        bias = model.weights[-1].numpy()
        bias[-1] = -0.0  # equal to the 0.0 that it was, in all but one bit
        model.weights[-1].assign(bias)
        return model

    trainer = make_trainer()
    change_what_is_read(monkeypatch, change)
    with pytest.raises(ValueError, match="read back, has other weights"):
        trainer.export(tmp_path / "model.keras")
    assert os.listdir(tmp_path) == []


@keras.saving.register_keras_serializable("tests")
class Forgetful(keras.layers.Layer):
    """Multiplies by a factor that its config does not hold."""

    def __init__(self, factor=1.0, **settings):
        super().__init__(**settings)
        self.factor = factor

    def get_config(self):
        return super().get_config()

    def call(self, inputs):
        return inputs * self.factor


@keras.saving.register_keras_serializable("tests")
class Registered(keras.Model):
    def __init__(self, **settings):
        super().__init__(**settings)
        self.dense = keras.layers.Dense(4)
        self.dropout = keras.layers.Dropout(0.5)

    def call(self, inputs, training=None):
        return self.dropout(self.dense(inputs), training=training)


class Unregistered(Registered):
    pass


class UnregisteredLayer(keras.layers.Layer):
    def call(self, inputs):
        return inputs * 2.0


def make_net_trainer(make_model, replicas=1, **settings):
    """Makes a trainer for the models that `make_model` makes, which take x; the first one predicts."""

    def model_fn():
        model = make_model()
        first, *_ = models = tf.nest.flatten(model)

        def loss_fn(batch, training):
            return {"loss": tf.reduce_sum(tf.square(sum(m(batch["x"], training=training) for m in models)), -1)}

        def predict_fn(batch):
            return first(batch["x"], training=False)

        return distloop.ModelSpec(model, keras.optimizers.SGD(0.1), loss_fn, predict_fn=predict_fn)

    return distloop.Trainer(model_fn, on(replicas, **settings))


def sequential(*layers):
    return lambda: keras.Sequential([keras.Input((3,)), keras.layers.Dense(4), *(layer() for layer in layers)])


def test_a_keras_file_that_answers_otherwise_never_takes_its_name(tmp_path):
    trainer = make_net_trainer(sequential(lambda: Forgetful(2.0)))
    with pytest.raises(ValueError, match="read back, gives other outputs, by up to .*get_config"):
        trainer.export(tmp_path / "model.keras")
    assert os.listdir(tmp_path) == []
    good = make_net_trainer(sequential(lambda: Forgetful(1.0)))
    good.export(tmp_path / "model.keras")
    assert os.listdir(tmp_path) == ["model.keras"]


@pytest.mark.parametrize("replicas", mostly_wide([1, 2]))
@pytest.mark.parametrize(
    "make_model",
    mostly_wide([Registered, lambda: keras.Sequential([keras.layers.Dense(4), keras.layers.Dropout(0.5)])]),
    ids=["class", "no input shape"],
)
def test_a_keras_file_of_a_model_that_the_data_built(make_model, replicas, tmp_path):
    trainer = make_net_trainer(make_model, replicas, average_decay=0.9)
    with pytest.raises(ValueError, match="not built.*call fit, evaluate or predict"):
        trainer.export(tmp_path / "model.keras")
    assert os.listdir(tmp_path) == []
    trainer.fit(dataset(), steps=3)
    loaded = export_keras_file(trainer, tmp_path / "model.keras")
    predictions = trainer.predict(dataset())
    for size in (11, 3):  # any number of rows, whatever the batches were
        np.testing.assert_allclose(loaded.predict(ROWS["x"][:size], verbose=0), predictions[:size], rtol=1e-5)


def test_a_keras_file_of_a_model_with_several_inputs_by_name(tmp_path):
    def model_fn():
        x, z = keras.Input((3,), name="x"), keras.Input((2,), name="z")
        joined = keras.layers.Concatenate()([x, keras.layers.Dense(2)(z)])
        model = keras.Model({"x": x, "more": [z]}, {"logits": keras.layers.Dense(4)(joined), "z": z * 2.0})
        outputs_of = lambda b: model({"x": b["x"], "more": [b["more"]["z"]]}, training=False)  # noqa: E731
        loss_fn = lambda b, training: {"loss": tf.reduce_sum(outputs_of(b)["logits"], -1)}  # noqa: E731
        return distloop.ModelSpec(model, keras.optimizers.SGD(0.1), loss_fn, predict_fn=outputs_of)

    trainer = distloop.Trainer(model_fn, on(1))
    outputs = export_keras_file(trainer, tmp_path / "model.keras")({"x": ROWS["x"], "more": [ROWS["more"]["z"]]})
    predictions = trainer.predict(dataset())
    assert set(outputs) == set(predictions) == {"logits", "z"}
    np.testing.assert_allclose(outputs["logits"], predictions["logits"], rtol=1e-5, atol=1e-6)


def test_a_keras_file_of_a_net_that_takes_no_image_of_one_pixel(tmp_path, monkeypatch):
    trainer = make_image_trainer()
    image = images(30)
    outputs = export_keras_file(trainer, tmp_path / "model.keras")(image)
    np.testing.assert_allclose(outputs, trainer.model(image), rtol=1e-5, atol=1e-6)
    change_what_is_read(monkeypatch, lambda model: keras.Model(model.inputs, model.outputs[0] + 1.0))  # same weights
    with pytest.raises(ValueError, match="read back, gives other outputs"):
        trainer.export(tmp_path / "other.keras")


def test_a_keras_file_of_a_model_that_draws_when_it_predicts(tmp_path):
    def make_model():
        x = keras.Input((3,))
        return keras.Model(x, keras.layers.Dropout(0.5)(keras.layers.Dense(4)(x), training=True))

    trainer = make_net_trainer(make_model, replicas=2)
    before = everything(trainer)
    loaded = export_keras_file(trainer, tmp_path / "model.keras")
    assert_weights([w.numpy() for w in loaded.weights], [w.numpy() for w in trainer.model.weights])
    assert not np.array_equal(loaded(ROWS["x"]), loaded(ROWS["x"]))
    assert_equal(everything(trainer), before)


@pytest.mark.parametrize("precision", mostly_wide(["mixed_float16", "mixed_bfloat16"]))
def test_a_keras_file_keeps_the_precision(precision, tmp_path):
    trainer = make_trainer(precision=precision, replicas=2)
    trainer.fit(dataset(), steps=2)
    loaded = export_keras_file(trainer, tmp_path / "model.keras")
    assert {weight.dtype for weight in loaded.weights} == {"float32"}
    outputs = loaded(ROWS["x"])
    assert outputs.dtype == precision.removeprefix("mixed_")
    np.testing.assert_allclose(tf.cast(outputs, tf.float32), trainer.predict(dataset()), rtol=2e-2, atol=2e-2)


def unregistered_loss(y_true, y_pred):
    return keras.losses.mean_squared_error(y_true, y_pred)


@pytest.mark.parametrize("is_function", mostly_wide([False, True]))
@pytest.mark.parametrize("precision", mostly_wide(["float32", "mixed_float16"]))
def test_a_keras_file_of_a_compiled_model_is_not_compiled(is_function, precision, tmp_path):
    def plain():
        return keras.Sequential([keras.Input((3,)), keras.layers.Dense(64), keras.layers.Dense(2)])

    def compiled():
        model = plain()
        model.compile(keras.optimizers.Adam(0.01), unregistered_loss, metrics=["mae"])
        return model

    with policy(precision):  # as a user sets it before the model is made
        given = compiled if is_function else compiled()
    trainer = distloop.Trainer(distloop.from_keras(given), on(1, precision=precision))
    data = dataset((ROWS["x"], ROWS["more"]["z"]))
    trainer.fit(data, steps=2)
    size = sum(weight.numpy().nbytes for weight in trainer.model.weights)
    loaded = export_keras_file(trainer, tmp_path / "model.keras")
    assert not loaded.compiled
    assert trainer.model.compiled and trainer.model.optimizer is not None
    assert_weights([w.numpy() for w in loaded.weights], [w.numpy() for w in trainer.model.weights])
    plain().save(tmp_path / "plain.keras")
    assert os.path.getsize(tmp_path / "model.keras") < os.path.getsize(tmp_path / "plain.keras") + size  # no slots
    trainer.fit(data, steps=4)
    assert trainer.step == 4


@pytest.mark.parametrize(("of_first", "of_second", "dropout"), mostly_wide([(1, 1, 0.0), (2, 2, 0.0), (1, 2, 0.5)]))
def test_a_run_starts_from_a_keras_file(of_first, of_second, dropout, tmp_path, capsys):
    data = distloop.make_dataset(classification(16), 8)
    first = distloop.Trainer(classifier(dropout=dropout), on(of_first, average_decay=0.5))
    first.fit(data, steps=4)
    first.export(tmp_path / "model.keras")
    still = classifier(dropout=dropout, optimizer=lambda: keras.optimizers.SGD(0.0))
    second = distloop.Trainer(still, on(of_second, init_from=str(tmp_path / "model.keras"), seed=1))
    assert not np.allclose(second.model.get_weights()[0], averages(first)[0], rtol=1e-3)
    second.fit(data, steps=1)
    assert_weights(second.model.get_weights(), averages(first))
    assert "4 of 4 variables start from" in capsys.readouterr().out
    if dropout:
        assert not np.array_equal(*local_values(second, second.state.seeds[0]))


class Affine(tf.Module):
    def __init__(self):
        super().__init__()
        self.weight = tf.Variable(tf.ones([3, 4]))

    def __call__(self, x, training=False):
        return x @ self.weight


def two_models():
    return {"a": sequential()(), "b": sequential()()}


REGISTER = r".*@keras.saving.register_keras_serializable\(\)"


@pytest.mark.parametrize(
    ("make_model", "says"),
    [
        (Affine, "the model is a Affine, no keras.Model: give a path without .keras"),
        (lambda: keras.layers.Dense(4), "the model is a Dense, no keras.Model: give a path without .keras"),
        (lambda: {"a": Affine()}, "the model is a dict, no keras.Model: give a path without .keras"),
        (two_models, r"one model, and there is a dict of 2, .* trainer.model\['a'\].save\("),
        (lambda: [sequential()()], r"one model, and there is a list of 1, .* trainer.model\[0\].save\("),
        (Unregistered, rf"\(Could not locate class 'Unregistered'\): {REGISTER}"),
        (sequential(UnregisteredLayer), rf"\(Could not locate class 'UnregisteredLayer'\): {REGISTER}"),
        (sequential(lambda: keras.layers.Lambda(lambda x: x)), r"Python lambda\): .*@keras.saving.register"),
    ],
    ids=["module", "layer", "dict of modules", "dict", "list", "class", "layer class", "lambda"],
)
def test_a_model_that_no_keras_file_can_hold_is_refused(make_model, says, tmp_path):
    trainer = make_net_trainer(make_model)
    trainer.predict(dataset())  # builds the model
    with pytest.raises(ValueError, match=says) as caught:
        trainer.export(tmp_path / "model.keras")
    assert "\n" not in str(caught.value) and ". " not in str(caught.value)
    assert os.listdir(tmp_path) == []


@pytest.mark.wide
def test_models_of_a_dict_are_saved_one_by_one_as_the_refusal_says(tmp_path):
    trainer = make_net_trainer(two_models, average_decay=0.9, replicas=2)
    trainer.fit(dataset(), steps=3)
    with pytest.raises(ValueError, match="with trainer.state.averaged") as caught:
        trainer.export(tmp_path / "model.keras")
    line = str(caught.value).split(": ", 1)[1].rstrip(".").replace("path.keras", str(tmp_path / "a.keras"))
    exec(line, {"trainer": trainer})  # the code that it names
    loaded = keras.models.load_model(tmp_path / "a.keras").get_weights()
    assert_weights(loaded, averages(trainer)[: len(loaded)])

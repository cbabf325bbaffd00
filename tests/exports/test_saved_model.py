"""SavedModels: one signature for each predict function, with the averaged weights, checked before it has its name."""

import os

import keras
import numpy as np
import pytest
import tensorflow as tf

import distloop
from tests.exports.export_trainers import ROWS, dataset, make_trainer, serve, signatures_of
from tests.problems import assert_equal, everything, mostly_wide, on

pytestmark = pytest.mark.slow


def make_pair(model):
    """Returns two functions: one reads x, the other x and z."""

    def classify(batch):
        return model(batch["x"], training=False)  # [B, 4]

    def embed(batch):
        hidden = model.layers[0](batch["x"])  # [B, 5]
        return {"hidden": hidden, "both": tf.concat([hidden, batch["more"]["z"]], -1)}  # [B, 7]

    return {"classify": classify, "embed": embed}


def make_trainer_of(functions_of, replicas=1, **settings):
    """Returns a trainer whose predict_fn is `functions_of(model)`."""

    def model_fn():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(5, "tanh"), keras.layers.Dense(4)])

        def loss_fn(batch, training):
            return {"loss": tf.reduce_sum(tf.square(model(batch["x"], training=training)), -1)}

        return distloop.ModelSpec(model, keras.optimizers.SGD(0.1), loss_fn, predict_fn=functions_of(model))

    return distloop.Trainer(model_fn, on(replicas, **settings))


def test_dropout_is_off_where_predict_fn_says_so_and_the_batch_is_free(tmp_path):
    trainer = make_trainer()
    trainer.predict(distloop.make_dataset(ROWS, 4, drop_remainder=True))  # its batch dimension is fixed
    trainer.export(tmp_path / "model")
    served = signatures_of(tmp_path / "model")["serving_default"]  # loaded once: random streams would begin anew
    first, second = (served(x=tf.constant(ROWS["x"]))["output"].numpy() for _ in range(2))
    np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize("precision", mostly_wide(["mixed_float16", "mixed_bfloat16"]))
def test_half_precision_outputs_stay_as_they_are_on_request(precision, tmp_path):
    trainer = make_trainer(precision=precision)
    half = trainer.predict(dataset(), keep_dtypes=True)
    assert half.dtype == tf.as_dtype(precision.removeprefix("mixed_")).as_numpy_dtype
    np.testing.assert_array_equal(half.astype(np.float32), trainer.predict(dataset()))
    parts = list(trainer.stream_predictions(dataset(), keep_dtypes=True))
    np.testing.assert_array_equal(np.concatenate(parts), half)
    keep_dtypes = precision == "mixed_float16"
    trainer.export(tmp_path / "model", keep_dtypes=keep_dtypes)
    output = serve(tmp_path / "model")["output"]
    assert output.dtype == (half.dtype if keep_dtypes else np.float32)
    np.testing.assert_allclose(output.astype(np.float32), half.astype(np.float32), rtol=1e-2, atol=1e-2)


def test_an_export_before_any_data_is_refused(tmp_path):
    with pytest.raises(ValueError, match="export needs to know what a batch looks like; call fit, evaluate or predict"):
        make_trainer().export(tmp_path / "model")


@pytest.mark.parametrize("replicas", mostly_wide([1, 2]))
def test_a_function_that_draws_is_exported_and_moves_no_random_stream(replicas, tmp_path):
    trainer = make_trainer(lambda model, batch: model(batch["x"], training=True), replicas=replicas)  # dropout
    trainer.fit(dataset(), steps=1)
    before = everything(trainer)
    trainer.export(tmp_path / "model")
    assert_equal(everything(trainer), before)
    assert not np.array_equal(serve(tmp_path / "model")["output"], trainer.model(ROWS["x"], training=False))


# Several predict functions ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("replicas", mostly_wide([1, 2]))
def test_each_function_has_a_signature_of_what_it_reads_with_averages(replicas, tmp_path):
    trainer = make_trainer_of(make_pair, replicas, average_decay=0.9)
    untrained = {name: trainer.predict(dataset(), signature=name) for name in ("classify", "embed")}
    trainer.fit(dataset(), steps=5)
    before, trained = everything(trainer), trainer.model(ROWS["x"], training=False).numpy()
    embedded = trainer.predict(dataset(), signature="embed")
    logits = trainer.predict(dataset(), signature="classify")
    assert logits.shape == (11, 4) and embedded["hidden"].shape == (11, 5) and embedded["both"].shape == (11, 7)
    for others in (trained, untrained["classify"]):
        assert not np.allclose(logits, others, rtol=1e-3)
    assert not np.allclose(embedded["hidden"], untrained["embed"]["hidden"], rtol=1e-3)
    for settings in ({}, {"signature": None}, {"signature": "serving_default"}):  # the first function
        np.testing.assert_array_equal(trainer.predict(dataset(), **settings), logits)
    parts = list(trainer.stream_predictions(dataset(), signature="embed"))
    assert [len(part["both"]) for part in parts] == [4, 4, 3]
    np.testing.assert_array_equal(np.concatenate([part["both"] for part in parts]), embedded["both"])
    trainer.export(tmp_path / "model")
    assert_equal(everything(trainer), before)
    served = signatures_of(tmp_path / "model")
    assert set(served) == {"classify", "embed", "serving_default"}
    for name in ("classify", "serving_default"):
        outputs = served[name](x=tf.constant(ROWS["x"]))
        np.testing.assert_allclose(outputs["output"], logits, rtol=1e-5, atol=1e-6)
    outputs = served["embed"](x=tf.constant(ROWS["x"]), more_z=tf.constant(ROWS["more"]["z"]))
    assert set(outputs) == {"hidden", "both"}
    for name, expected in embedded.items():
        np.testing.assert_allclose(outputs[name], expected, rtol=1e-5, atol=1e-6)


def test_a_function_called_serving_default_is_the_default_anywhere(tmp_path):
    def functions_of(model):
        pair = make_pair(model)
        return {"embed": pair["embed"], "serving_default": pair["classify"]}

    trainer = make_trainer_of(functions_of)
    assert set(trainer.predict(dataset())) == {"hidden", "both"}  # the first
    logits = trainer.predict(dataset(), signature="serving_default")
    trainer.export(tmp_path / "model")
    assert set(signatures_of(tmp_path / "model")) == {"embed", "serving_default"}
    np.testing.assert_allclose(serve(tmp_path / "model")["output"], logits, rtol=1e-5, atol=1e-6)


# Comparing with what was read back ----------------------------------------------------------------------------------


@pytest.mark.parametrize("names", mostly_wide(["classify embed", "embed classify"]))
def test_each_signature_is_compared_before_the_export_has_its_name(names, tmp_path, monkeypatch):
    def save_another(*arguments, **settings):
        bias.assign_add(ones)
        save(*arguments, **settings)
        bias.assign_sub(ones)

    trainer = make_trainer_of(lambda model: {name: make_pair(model)[name] for name in names.split()})
    trainer.predict(dataset())
    save, bias = tf.saved_model.save, trainer.model.layers[-1].bias  # of classify alone
    ones = np.ones(bias.shape)
    with monkeypatch.context() as patch:
        patch.setattr(tf.saved_model, "save", save_another)
        expected = r"exported model returns other values of 'output' than predict_fn\['classify'\], by up to 1:"
        with pytest.raises(ValueError, match=expected):
            trainer.export(tmp_path / "model")
    assert os.listdir(tmp_path) == []
    trainer.export(tmp_path / "model")


def test_a_function_that_takes_no_ones_is_exported_and_logged(tmp_path, caplog):
    def predict_of(model, batch):
        with tf.control_dependencies([tf.debugging.assert_none_equal(batch["x"], 1.0)]):
            return model(batch["x"], training=False)

    trainer = make_trainer(predict_of)
    predictions = trainer.predict(dataset(), signature="serving_default")  # as a single function is called, too
    trainer.export(tmp_path / "model")
    np.testing.assert_allclose(serve(tmp_path / "model")["output"], predictions, rtol=1e-6)
    warnings = [record.getMessage() for record in caplog.records if record.name == "distloop"]
    assert warnings == ["The export was not compared with predict_fn, which cannot be run on ones."]


def test_a_path_that_tensorflow_takes_for_a_pattern_is_named(tmp_path, caplog):
    trainer = make_trainer()
    trainer.build(distloop.make_dataset(ROWS, 4))
    trainer.export(tmp_path / "lr=[0.1]")
    assert "lr=[0.1]' for a pattern, and loads no SavedModel from there: move it to be served." in caplog.text
    os.rename(tmp_path / "lr=[0.1]", tmp_path / "model")
    assert tf.saved_model.load(tmp_path / "model").signatures

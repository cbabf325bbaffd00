"""What is served: a SavedModel that needs no distloop, takes what predict_fn reads and answers what predict does."""

import os
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

import distloop
from tests.problems import assert_equal, everything, on

pytestmark = pytest.mark.slow  # half a minute or so in all; left to `make test`

RNG = np.random.default_rng(0)
ROWS = {
    "x": RNG.normal(size=(11, 3)).astype(np.float32),
    "more": {"z": RNG.normal(size=(11, 2)).astype(np.float32)},
    "label": RNG.integers(0, 4, size=11).astype(np.int32),
}


def dataset(rows=ROWS, batch_size=4):
    return distloop.make_dataset(rows, batch_size)


def make_trainer(predict_of=None, replicas=1, read=lambda batch: batch["x"], features=3, **settings):
    """Makes a trainer with a small model; `predict_of(model, batch)` is its predict_fn."""

    def model_fn():
        layers = [keras.layers.Dense(5, "tanh"), keras.layers.Dropout(0.5), keras.layers.Dense(4)]
        model = keras.Sequential([keras.Input((features,)), *layers])

        def loss_fn(batch, training):
            return {"loss": tf.reduce_sum(tf.square(model(read(batch), training=training)), -1)}

        def predict_fn(batch):
            return predict_of(model, batch) if predict_of else model(read(batch), training=False)

        return distloop.ModelSpec(model, keras.optimizers.SGD(0.1), loss_fn, predict_fn=predict_fn)

    return distloop.Trainer(model_fn, on(replicas, **settings))


def exported(trainer, path, data=None):
    """Exports and returns the predictions and the signature of what was exported."""
    predictions = trainer.predict(data or dataset())
    trainer.export(path)
    signature = tf.saved_model.load(str(path)).signatures["serving_default"]
    return predictions, signature


def names_of(signature):
    return set(signature.structured_input_signature[1])


def constants(**arrays):
    return {name: tf.constant(array) for name, array in arrays.items()}


@pytest.mark.slow
def test_the_exported_model_loads_without_distloop_and_predicts_the_same(tmp_path):
    trainer = make_trainer(replicas=2, average_decay=0.5)
    trainer.fit(dataset(), steps=3)
    predictions = trainer.predict(dataset())
    trainer.export(tmp_path / "model")
    np.save(tmp_path / "x.npy", ROWS["x"])
    program = """
import sys
import numpy as np
import tensorflow as tf
serve = tf.saved_model.load("model").signatures["serving_default"]
np.save("found.npy", serve(x=tf.constant(np.load("x.npy")))["output"].numpy())
assert not {name for name in sys.modules if name.partition(".")[0] == "distloop"}
"""
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True, capture_output=True)
    np.testing.assert_allclose(np.load(tmp_path / "found.npy"), predictions, rtol=1e-6, atol=1e-6)


def test_the_batch_dimension_is_free(tmp_path):
    predictions, serve = exported(make_trainer(), tmp_path / "model", dataset(batch_size=11))
    for size in (1, 7, 11):
        found = serve(x=tf.constant(ROWS["x"][:size]))["output"]
        np.testing.assert_allclose(found, predictions[:size], rtol=1e-6)


def test_the_batch_dimension_is_free_even_if_the_data_fixed_it(tmp_path):
    data = distloop.make_dataset(ROWS, 4, drop_remainder=True)
    predictions, serve = exported(make_trainer(), tmp_path / "model", data)
    np.testing.assert_allclose(serve(x=tf.constant(ROWS["x"][:7]))["output"], predictions[:7], rtol=1e-6)


def test_only_entries_that_predict_fn_reads_are_asked_for(tmp_path):
    _, serve = exported(make_trainer(), tmp_path / "model")
    assert names_of(serve) == {"x"}


def test_nested_entries_are_named_by_their_path(tmp_path):
    trainer = make_trainer(read=lambda b: tf.concat([b["x"], b["more"]["z"]], -1), features=5)
    predictions, serve = exported(trainer, tmp_path / "model")
    assert names_of(serve) == {"x", "more_z"}
    found = serve(**constants(x=ROWS["x"], more_z=ROWS["more"]["z"]))
    np.testing.assert_allclose(found["output"], predictions, rtol=1e-6)


def test_entries_of_a_tuple_are_named_by_their_place(tmp_path):
    trainer = make_trainer(read=lambda b: tf.concat([b[0], b[1]["z"]], -1), features=5)
    rows = (ROWS["x"], {"z": ROWS["more"]["z"]}, ROWS["label"])
    predictions, serve = exported(trainer, tmp_path / "model", dataset(rows))
    assert names_of(serve) == {"x0", "x1_z"}
    found = serve(**constants(x0=ROWS["x"], x1_z=ROWS["more"]["z"]))
    np.testing.assert_allclose(found["output"], predictions, rtol=1e-6)


def test_a_batch_that_is_one_tensor_is_named_x(tmp_path):
    predictions, serve = exported(make_trainer(read=lambda b: b), tmp_path / "model", dataset(ROWS["x"]))
    assert names_of(serve) == {"x"}
    np.testing.assert_allclose(serve(x=tf.constant(ROWS["x"]))["output"], predictions, rtol=1e-6)


def test_outputs_keep_their_names(tmp_path):
    def predict_of(model, batch):
        logits = model(batch["x"], training=False)
        return {"logits": logits, "best": tf.argmax(logits, -1)}

    predictions, serve = exported(make_trainer(predict_of), tmp_path / "model")
    found = serve(x=tf.constant(ROWS["x"]))
    assert set(found) == set(predictions) == {"logits", "best"}
    np.testing.assert_allclose(found["logits"], predictions["logits"], rtol=1e-6)
    np.testing.assert_array_equal(found["best"], predictions["best"])


def test_outputs_without_names_are_numbered(tmp_path):
    def predict_of(model, batch):
        logits = model(batch["x"], training=False)
        return logits, tf.argmax(logits, -1)

    predictions, serve = exported(make_trainer(predict_of), tmp_path / "model")
    found = serve(x=tf.constant(ROWS["x"]))
    assert set(found) == {"output_0", "output_1"}
    np.testing.assert_allclose(found["output_0"], predictions[0], rtol=1e-6)


@pytest.mark.parametrize("precision", ["mixed_float16", "mixed_bfloat16"])
def test_half_precision_outputs_stay_as_they_are_on_request(precision, tmp_path):
    trainer = make_trainer(precision=precision)
    half = trainer.predict(dataset(), keep_dtypes=True)
    assert half.dtype == tf.as_dtype(precision.removeprefix("mixed_")).as_numpy_dtype
    np.testing.assert_array_equal(half.astype(np.float32), trainer.predict(dataset()))
    parts = list(trainer.stream_predictions(dataset(), keep_dtypes=True))
    np.testing.assert_array_equal(np.concatenate(parts), half)
    trainer.export(tmp_path / "model", keep_dtypes=True)
    serve = tf.saved_model.load(str(tmp_path / "model")).signatures["serving_default"]
    assert serve(x=tf.constant(ROWS["x"]))["output"].dtype == half.dtype


def test_tensorflows_own_command_runs_what_was_exported(tmp_path):
    trainer = make_trainer()
    predictions, _ = exported(trainer, tmp_path / "model")
    np.save(tmp_path / "x.npy", ROWS["x"])
    command = os.path.join(os.path.dirname(sys.executable), "saved_model_cli")
    arguments = ["run", "--dir", tmp_path / "model", "--tag_set", "serve", "--signature_def", "serving_default"]
    arguments += ["--inputs", f"x={tmp_path / 'x.npy'}", "--outdir", tmp_path / "out"]
    subprocess.run([command, *map(str, arguments)], check=True, capture_output=True, cwd=tmp_path, timeout=120)
    np.testing.assert_allclose(np.load(tmp_path / "out" / "output.npy"), predictions, rtol=1e-5, atol=1e-6)


def test_what_was_exported_converts_to_tflite(tmp_path):
    predictions, _ = exported(make_trainer(), tmp_path / "model")
    flat = tf.lite.TFLiteConverter.from_saved_model(str(tmp_path / "model")).convert()
    runner = tf.lite.Interpreter(model_content=flat).get_signature_runner("serving_default")
    np.testing.assert_allclose(runner(x=ROWS["x"])["output"], predictions, rtol=1e-4, atol=1e-5)


def test_an_export_that_answers_otherwise_never_takes_its_name(tmp_path, monkeypatch):
    trainer = make_trainer()
    trainer.predict(dataset())
    save = tf.saved_model.save

    def save_another(module, path, signatures):
        weights = [v for v in module.variables_served if v.dtype == tf.float32]
        for weight in weights:
            weight.assign(weight + 1.0)
        save(module, path, signatures=signatures)
        for weight in weights:
            weight.assign(weight - 1.0)

    monkeypatch.setattr(tf.saved_model, "save", save_another)
    with pytest.raises(ValueError, match="What was exported gives 'output' otherwise than predict_fn does"):
        trainer.export(tmp_path / "model")
    assert os.listdir(tmp_path) == []


def test_half_precision_outputs_are_served_as_float32(tmp_path):
    predictions, serve = exported(make_trainer(precision="mixed_bfloat16"), tmp_path / "model")
    found = serve(x=tf.constant(ROWS["x"]))["output"]
    assert found.dtype == tf.float32 and predictions.dtype == np.float32
    np.testing.assert_allclose(found, predictions, rtol=1e-2, atol=1e-2)


def test_ragged_entries_that_are_not_read_are_no_hindrance(tmp_path):
    words = tf.ragged.constant([[1], [2, 2], [], [4]])
    data = tf.data.Dataset.from_tensor_slices({"x": ROWS["x"][:4], "words": words}).batch(2)
    predictions, serve = exported(make_trainer(), tmp_path / "model", data)
    assert names_of(serve) == {"x"}
    np.testing.assert_allclose(serve(x=tf.constant(ROWS["x"][:4]))["output"], predictions, rtol=1e-6)


def test_the_averaged_weights_are_served_and_those_that_train_stay(tmp_path):
    trainer = make_trainer(replicas=2, average_decay=0.9)
    trainer.fit(dataset(), steps=5)
    before = everything(trainer)
    trained = trainer.model(ROWS["x"], training=False).numpy()
    predictions, serve = exported(trainer, tmp_path / "model")
    found = serve(x=tf.constant(ROWS["x"]))["output"].numpy()
    np.testing.assert_allclose(found, predictions, rtol=1e-5, atol=1e-6)
    assert not np.allclose(found, trained, rtol=1e-3)
    assert_equal(everything(trainer), before)


def test_dropout_is_off_where_predict_fn_says_so(tmp_path):
    _, serve = exported(make_trainer(), tmp_path / "model")
    first, second = (serve(x=tf.constant(ROWS["x"]))["output"].numpy() for _ in range(2))
    np.testing.assert_array_equal(first, second)


def test_an_export_is_replaced_whole(tmp_path):
    path = tmp_path / "model"
    trainer = make_trainer()
    first, _ = exported(trainer, path)
    (path / "left_over").write_text("of the first export")
    trainer.fit(dataset(), steps=3)
    second, serve = exported(trainer, path)
    found = serve(x=tf.constant(ROWS["x"]))["output"].numpy()
    np.testing.assert_allclose(found, second, rtol=1e-6)
    assert not np.allclose(first, second, rtol=1e-3)
    assert not (path / "left_over").exists()
    assert os.listdir(tmp_path) == ["model"]


def test_an_export_that_fails_leaves_the_one_before_it(tmp_path, monkeypatch):
    path = tmp_path / "model"
    trainer = make_trainer()
    predictions, _ = exported(trainer, path)
    trainer.fit(dataset(), steps=1)

    def fail(module, directory, **arguments):
        os.makedirs(directory)
        raise OSError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(tf.saved_model, "save", fail)
        with pytest.raises(OSError, match="No space left"):
            trainer.export(path)
    assert os.listdir(tmp_path) == ["model"]
    serve = tf.saved_model.load(str(path)).signatures["serving_default"]
    np.testing.assert_allclose(serve(x=tf.constant(ROWS["x"]))["output"], predictions, rtol=1e-6)


@pytest.mark.parametrize("replicas", [1, 2])
def test_training_goes_on_after_an_export(tmp_path, replicas):
    trainers = [make_trainer(replicas=replicas, average_decay=0.9) for _ in range(2)]
    for trainer, is_exported in zip(trainers, (False, True), strict=True):
        data = dataset()
        trainer.fit(data, steps=2)
        if is_exported:
            trainer.export(tmp_path / "model")
        trainer.fit(data, steps=4)
    assert_equal(*(dict(enumerate(everything(trainer).values())) for trainer in trainers))  # Keras numbers its names


def test_an_empty_directory_is_taken(tmp_path):
    (tmp_path / "model").mkdir()
    exported(make_trainer(), tmp_path / "model")


def test_a_missing_directory_above_is_made(tmp_path):
    exported(make_trainer(), tmp_path / "runs" / "1" / "model")


def test_a_directory_of_something_else_is_refused_and_kept(tmp_path):
    path = tmp_path / "thesis"
    path.mkdir()
    (path / "chapter1").write_text("It was a dark and stormy night.")
    trainer = make_trainer()
    trainer.predict(dataset())
    with pytest.raises(ValueError, match="thesis' holds something that is no SavedModel; give a path that is free"):
        trainer.export(path)
    assert [child.name for child in path.iterdir()] == ["chapter1"]


def test_a_file_in_the_way_is_refused_and_kept(tmp_path):
    path = tmp_path / "thesis"
    path.write_text("It was a dark and stormy night.")
    trainer = make_trainer()
    trainer.predict(dataset())
    with pytest.raises(ValueError, match="thesis' .*no SavedModel; give a path that is free"):
        trainer.export(path)
    assert path.read_text() == "It was a dark and stormy night."


def test_an_export_before_any_data_is_refused(tmp_path):
    with pytest.raises(ValueError, match="export needs to know what a batch looks like; call fit, evaluate or predict"):
        make_trainer().export(tmp_path / "model")


def test_an_export_of_what_reads_nothing_is_refused(tmp_path):
    trainer = make_trainer(lambda model, batch: tf.zeros([4, 1]), replicas=1)
    trainer.fit(dataset(), steps=1)
    with pytest.raises(ValueError, match="predict_fn reads nothing from its batch, .*: compute from the batch"):
        trainer.export(tmp_path / "model")


def test_entries_that_would_share_a_name_are_refused(tmp_path):
    rows = {"a": {"b": ROWS["x"]}, "a_b": ROWS["x"]}
    trainer = make_trainer(read=lambda b: b["a_b"])
    trainer.predict(dataset(rows))
    with pytest.raises(ValueError, match="Two entries of a batch would both be named 'a_b' .*: rename one"):
        trainer.export(tmp_path / "model")

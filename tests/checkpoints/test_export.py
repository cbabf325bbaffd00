"""What is served: SavedModels and Keras files that need no distloop and answer what predict does."""

import os
import random
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

import distloop
from tests.problems import assert_equal, classification, classifier, everything, local_values, on, weights

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


def test_more_than_ten_entries_of_a_tuple_keep_their_places(tmp_path):
    rows = (ROWS["x"], *(np.full((11, 1), 10.0**i, np.float32) for i in range(-5, 6)))

    def predict_of(model, batch):
        return tf.concat(batch[1:], -1) * tf.reduce_sum(batch[0], -1, keepdims=True)

    predictions, serve = exported(make_trainer(predict_of, read=lambda b: b[0]), tmp_path / "model", dataset(rows))
    found = serve(**constants(**{f"x{i}": array for i, array in enumerate(rows)}))["output"]
    np.testing.assert_allclose(found, predictions, rtol=1e-6)


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


def test_ragged_entries_that_are_read_are_taken_apart(tmp_path):
    words = tf.ragged.constant([[1.0], [2.0, 2.0], [], [4.0]])
    data = tf.data.Dataset.from_tensor_slices({"x": ROWS["x"][:4], "words": words}).batch(3)

    def predict_of(model, batch):
        return model(batch["x"], training=False) + tf.reduce_sum(batch["words"], -1)[:, tf.newaxis]

    trainer = make_trainer(predict_of)
    predictions, serve = exported(trainer, tmp_path / "model", data)
    assert names_of(serve) == {"x", "words", "words_1"}
    parts = {"words": words.values, "words_1": words.row_splits}
    found = serve(x=tf.constant(ROWS["x"][:4]), **parts)["output"]
    np.testing.assert_allclose(found, predictions, rtol=1e-6)
    without = trainer.model(ROWS["x"][:4], training=False)
    np.testing.assert_allclose(found - without, np.repeat([[1.0], [4.0], [0.0], [4.0]], 4, 1), rtol=1e-4, atol=1e-5)


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


# Several predict functions ------------------------------------------------------------------------------------------


def make_pair(model):
    """Makes two functions: one reads x, the other x and z."""

    def classify(batch):
        return model(batch["x"], training=False)  # [B, 4]

    def embed(batch):
        hidden = model.layers[0](batch["x"])  # [B, 5]
        return {"hidden": hidden, "both": tf.concat([hidden, batch["more"]["z"]], -1)}  # [B, 7]

    return {"classify": classify, "embed": embed}


def make_trainer_of(functions_of, replicas=1, **settings):
    """Makes a trainer whose predict_fn is what `functions_of(model)` gives."""

    def model_fn():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(5, "tanh"), keras.layers.Dense(4)])

        def loss_fn(batch, training):
            return {"loss": tf.reduce_sum(tf.square(model(batch["x"], training=training)), -1)}

        return distloop.ModelSpec(model, keras.optimizers.SGD(0.1), loss_fn, predict_fn=functions_of(model))

    return distloop.Trainer(model_fn, on(replicas, **settings))


@pytest.mark.parametrize("replicas", [1, 2])
def test_each_predict_function_has_a_signature_that_takes_what_it_reads(replicas, tmp_path):
    trainer = make_trainer_of(make_pair, replicas, average_decay=0.5)
    trainer.fit(dataset(), steps=3)
    logits = trainer.predict(dataset(), signature="classify")
    embedded = trainer.predict(dataset(), signature="embed")
    assert logits.shape == (11, 4) and embedded["hidden"].shape == (11, 5) and embedded["both"].shape == (11, 7)
    trainer.export(tmp_path / "model")
    served = tf.saved_model.load(str(tmp_path / "model")).signatures
    assert set(served) == {"classify", "embed", "serving_default"}
    assert names_of(served["classify"]) == names_of(served["serving_default"]) == {"x"}
    assert names_of(served["embed"]) == {"x", "more_z"}
    for name in ("classify", "serving_default"):
        np.testing.assert_allclose(served[name](x=tf.constant(ROWS["x"]))["output"], logits, rtol=1e-5, atol=1e-6)
    found = served["embed"](**constants(x=ROWS["x"], more_z=ROWS["more"]["z"]))
    assert set(found) == {"hidden", "both"}
    for name, expected in embedded.items():
        np.testing.assert_allclose(found[name], expected, rtol=1e-5, atol=1e-6)


def test_without_a_signature_the_first_function_predicts():
    trainer = make_trainer_of(make_pair)
    first = trainer.predict(dataset(), signature="classify")
    for given in ({}, {"signature": None}, {"signature": "serving_default"}):
        np.testing.assert_array_equal(trainer.predict(dataset(), **given), first)
    assert first.shape == (11, 4)


def test_the_one_function_is_called_serving_default():
    trainer = make_trainer()
    np.testing.assert_array_equal(trainer.predict(dataset(), signature="serving_default"), trainer.predict(dataset()))


def test_a_batch_at_a_time_takes_a_signature():
    trainer = make_trainer_of(make_pair)
    whole = trainer.predict(dataset(), signature="embed")
    parts = list(trainer.stream_predictions(dataset(), signature="embed"))
    assert [len(part["both"]) for part in parts] == [4, 4, 3]
    np.testing.assert_array_equal(np.concatenate([part["both"] for part in parts]), whole["both"])


def test_each_function_predicts_with_the_weights_of_now():
    trainer = make_trainer_of(make_pair)
    before = {name: trainer.predict(dataset(), signature=name) for name in ("classify", "embed")}
    trainer.fit(dataset(), steps=2)
    after = {name: trainer.predict(dataset(), signature=name) for name in ("embed", "classify")}
    assert not np.allclose(before["classify"], after["classify"], rtol=1e-3)
    assert not np.allclose(before["embed"]["hidden"], after["embed"]["hidden"], rtol=1e-3)
    assert after["classify"].shape == (11, 4)


def test_a_function_called_serving_default_is_it_wherever_it_stands(tmp_path):
    def functions_of(model):
        pair = make_pair(model)
        return {"embed": pair["embed"], "serving_default": pair["classify"]}

    trainer = make_trainer_of(functions_of)
    assert set(trainer.predict(dataset())) == {"hidden", "both"}  # the first
    logits = trainer.predict(dataset(), signature="serving_default")
    trainer.export(tmp_path / "model")
    served = tf.saved_model.load(str(tmp_path / "model")).signatures
    assert set(served) == {"embed", "serving_default"}
    found = served["serving_default"](x=tf.constant(ROWS["x"]))
    np.testing.assert_allclose(found["output"], logits, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("place", [0, 1])
def test_each_signature_is_compared_before_the_export_has_its_name(place, tmp_path, monkeypatch):
    names = ["embed"]
    names.insert(place, "classify")
    trainer = make_trainer_of(lambda model: {name: make_pair(model)[name] for name in names})
    trainer.predict(dataset())
    bias = trainer.model.layers[-1].bias  # of classify alone
    save = tf.saved_model.save

    def save_another(*arguments, **settings):
        bias.assign_add(np.ones(4))
        save(*arguments, **settings)
        bias.assign_sub(np.ones(4))

    with monkeypatch.context() as patch:
        patch.setattr(tf.saved_model, "save", save_another)
        with pytest.raises(
            ValueError, match=r"gives 'output' otherwise than predict_fn\['classify'\] does, by up to 1:"
        ):
            trainer.export(tmp_path / "model")
    assert os.listdir(tmp_path) == []
    trainer.export(tmp_path / "model")


def test_a_function_that_reads_nothing_is_named(tmp_path):
    trainer = make_trainer_of(lambda model: {**make_pair(model), "nothing": lambda batch: tf.zeros([4, 1])})
    trainer.fit(dataset(), steps=1)
    with pytest.raises(ValueError, match=r"predict_fn\['nothing'\] reads nothing from its batch"):
        trainer.export(tmp_path / "model")
    assert os.listdir(tmp_path) == []


def image_net():
    """A net for images of any size that a filter fits in."""
    layers = [keras.layers.Conv2D(2, 5, strides=2), keras.layers.Conv2D(2, 5), keras.layers.GlobalMaxPooling2D()]
    return keras.Sequential([keras.Input((None, None, 1)), *layers])


def image_trainer():
    def model_fn():
        model = image_net()
        return distloop.ModelSpec(
            model,
            keras.optimizers.SGD(0.1),
            lambda batch, training: {"loss": tf.reduce_sum(model(batch["image"], training=training), -1)},
            predict_fn=lambda batch: model(batch["image"], training=False),
        )

    return distloop.Trainer(model_fn, on(1))


def images(size):
    return {"image": RNG.normal(size=(3, size, size, 1)).astype(np.float32)}


def free_images():
    signature = {"image": tf.TensorSpec([None, None, None, 1])}
    return tf.data.Dataset.from_generator(lambda: iter([images(20), images(24)]), output_signature=signature)


def test_a_net_that_takes_no_image_of_one_pixel_is_exported(tmp_path):
    trainer = image_trainer()
    trainer.fit(free_images(), steps=1)
    trainer.export(tmp_path / "model")
    serve = tf.saved_model.load(str(tmp_path / "model")).signatures["serving_default"]
    image = images(30)["image"]
    np.testing.assert_allclose(serve(image=tf.constant(image))["output"], trainer.model(image), rtol=1e-5, atol=1e-6)


def test_a_net_that_takes_no_image_of_one_pixel_is_still_compared(tmp_path, monkeypatch):
    trainer = image_trainer()
    trainer.fit(free_images(), steps=1)
    bias = trainer.model.layers[-2].bias
    save = tf.saved_model.save

    def save_another(*arguments, **settings):
        bias.assign_add([1.0, 1.0])
        save(*arguments, **settings)
        bias.assign_sub([1.0, 1.0])

    monkeypatch.setattr(tf.saved_model, "save", save_another)
    with pytest.raises(ValueError, match="otherwise than predict_fn does"):
        trainer.export(tmp_path / "model")


def test_a_function_that_takes_no_ones_is_exported_and_told(tmp_path, monkeypatch):
    def predict_of(model, batch):
        with tf.control_dependencies([tf.debugging.assert_none_equal(batch["x"], 1.0)]):
            return model(batch["x"], training=False)

    told = []
    monkeypatch.setattr(
        "distloop.checkpoints.export.logging.warning", lambda text, *arguments: told.append(text % arguments)
    )
    predictions, serve = exported(make_trainer(predict_of), tmp_path / "model")
    np.testing.assert_allclose(serve(x=tf.constant(ROWS["x"]))["output"], predictions, rtol=1e-6)
    assert told == ["What was exported is not compared with predict_fn, which cannot be run on ones."]


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_function_that_draws_is_exported_and_moves_no_random_stream(replicas, tmp_path):
    trainer = make_trainer(lambda model, batch: model(batch["x"], training=True), replicas=replicas)  # dropout
    trainer.fit(dataset(), steps=1)
    before = everything(trainer)
    trainer.export(tmp_path / "model")
    assert_equal(everything(trainer), before)
    assert not np.array_equal(served_by(tmp_path / "model"), trainer.model(ROWS["x"], training=False))


# Replacing an older export ------------------------------------------------------------------------------------------


def dead_process():
    """Gives the number of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def fail_to_save(*arguments, **settings):
    raise OSError("No space left on device")


@pytest.fixture
def two_exports(tmp_path):
    """A trainer that has exported, predictions of then, and the path."""
    trainer = make_trainer()
    predictions, _ = exported(trainer, tmp_path / "model")
    trainer.fit(dataset(), steps=3)
    return trainer, predictions, tmp_path / "model"


def served_by(path):
    serve = tf.saved_model.load(str(path)).signatures["serving_default"]
    return serve(x=tf.constant(ROWS["x"]))["output"].numpy()


def test_a_process_killed_between_two_renames_costs_no_export(tmp_path, monkeypatch):
    program = """
import os, signal, sys
import numpy as np
from tests.checkpoints.test_export import ROWS, dataset, make_trainer
trainer = make_trainer()
np.save("predictions.npy", trainer.predict(dataset()))
trainer.export("model")
trainer.fit(dataset(), steps=3)
rename, replace = os.rename, os.replace
def renamed(move):
    def until_killed(source, target, **settings):
        if target.endswith("model"):
            os.kill(os.getpid(), signal.SIGKILL)
        move(source, target, **settings)
    return until_killed
os.rename, os.replace = renamed(rename), renamed(replace)
trainer.export("model")
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
        capture_output=True,
        timeout=300,
    )
    assert done.returncode == -9, done.stderr.decode()
    left = [name for name in os.listdir(tmp_path) if name.startswith("model.")]
    assert len(left) == 2 and not (tmp_path / "model").exists(), "the kill came too early or too late to test anything"
    trainer = make_trainer()
    trainer.predict(dataset())
    monkeypatch.setattr(tf.saved_model, "save", fail_to_save)
    with pytest.raises(OSError, match="No space left"):
        trainer.export(tmp_path / "model")
    assert sorted(os.listdir(tmp_path)) == ["model", "predictions.npy"]
    np.testing.assert_allclose(served_by(tmp_path / "model"), np.load(tmp_path / "predictions.npy"), rtol=1e-6)


def test_what_killed_runs_left_is_removed_and_nothing_else(two_exports, tmp_path):
    trainer, _, path = two_exports
    gone = [f"model.{process}.{kind}" for process in (dead_process(), os.getpid()) for kind in ("tmp", "old")]
    kept = [f"model.{os.getppid()}.tmp", "model.backup.old", "model.1", "models.1.tmp", "a.model.1.tmp"]
    for name in gone + kept:
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("something")
    trainer.export(path)
    assert sorted(os.listdir(tmp_path)) == sorted(["model", *kept])
    assert not (path / "file").exists()
    np.testing.assert_allclose(served_by(path), trainer.predict(dataset()), rtol=1e-6)


def test_an_older_export_stays_if_the_new_one_cannot_take_its_name(two_exports, tmp_path, monkeypatch):
    trainer, before, path = two_exports
    moves = {"rename": os.rename, "replace": os.replace}

    def refuse(move):
        def moved(source, target, **settings):
            if str(source).endswith(".tmp"):
                raise PermissionError("not now")
            moves[move](source, target, **settings)

        return moved

    with monkeypatch.context() as patch:
        for move in moves:
            patch.setattr(os, move, refuse(move))
        with pytest.raises(PermissionError, match="not now"):
            trainer.export(path)
    assert os.listdir(tmp_path) == ["model"]
    np.testing.assert_allclose(served_by(path), before, rtol=1e-6)


def test_an_older_export_that_cannot_be_removed_is_no_error(two_exports, tmp_path, monkeypatch):
    trainer, before, path = two_exports

    def rmtree(path, ignore_errors=False, **settings):
        if str(path).endswith(".old") and not ignore_errors:
            raise OSError("Device or resource busy")

    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", rmtree)
        trainer.export(path)
    now = trainer.predict(dataset())
    np.testing.assert_allclose(served_by(path), now, rtol=1e-6)
    assert not np.allclose(before, now, rtol=1e-3)
    trainer.export(path)  # the next one removes what is left
    assert os.listdir(tmp_path) == ["model"]


@pytest.mark.parametrize("name", ["model", "model.keras"])
def test_what_a_link_points_at_is_replaced(name, tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / name).symlink_to(tmp_path / "real" / name)
    trainer = make_trainer()
    trainer.predict(dataset())
    for steps in (1, 3):
        trainer.fit(dataset(), steps=steps)
        trainer.export(tmp_path / name)
    assert (tmp_path / name).is_symlink()
    assert os.listdir(tmp_path / "real") == [name] and sorted(os.listdir(tmp_path)) == [name, "real"]
    if name == "model":
        np.testing.assert_allclose(served_by(tmp_path / name), trainer.predict(dataset()), rtol=1e-6)
    else:
        found = keras.models.load_model(tmp_path / name)(ROWS["x"])
        np.testing.assert_allclose(found, trainer.predict(dataset()), rtol=1e-6)


@pytest.mark.parametrize("name", ["model", "model.keras"])
def test_what_takes_the_name_is_on_the_disk(name, tmp_path, monkeypatch):
    trainer = make_trainer()
    trainer.predict(dataset())
    synced, fsync, moves = [], os.fsync, {"rename": os.rename, "replace": os.replace}

    def sync(descriptor):
        synced.append(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    def move_checked(move):
        def moved(source, target):
            inside = [os.path.join(folder, n) for folder, folders, files in os.walk(source) for n in folders + files]
            assert {os.stat(path).st_ino for path in [source, *inside]} <= set(synced)
            moves[move](source, target)
            synced.clear()

        return moved

    monkeypatch.setattr(os, "fsync", sync)
    for move in moves:
        monkeypatch.setattr(os, move, move_checked(move))
    trainer.export(tmp_path / name)
    assert synced == [os.stat(tmp_path).st_ino]  # the directory, after the move


@pytest.mark.parametrize("name", ["model", "model.keras"])
def test_a_place_that_cannot_be_is_refused(name, tmp_path):
    (tmp_path / "file").write_text("in the way")
    trainer = make_trainer()
    trainer.predict(dataset())
    with pytest.raises(ValueError, match=f"file/{name}' cannot be written .*: give another path"):
        trainer.export(tmp_path / "file" / name)


# Keras files --------------------------------------------------------------------------------------------------------


def exported_file(trainer, path):
    """Exports and reads the file back."""
    trainer.export(path)
    return keras.models.load_model(path)


def averages(trainer):
    return [average.numpy() for average in trainer.state.average.variables]


def assert_weights(found, expected):
    assert len(found) == len(expected) > 0
    for a, b in zip(found, expected, strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_keras_file_predicts_as_predict_does_with_the_averaged_weights(replicas, tmp_path):
    trainer = make_trainer(replicas=replicas, average_decay=0.9)
    trainer.fit(dataset(), steps=5)
    before, predictions = everything(trainer), trainer.predict(dataset())
    loaded = exported_file(trainer, tmp_path / "model.keras")
    np.testing.assert_allclose(loaded.predict(ROWS["x"], verbose=0), predictions, rtol=1e-6, atol=1e-7)
    assert not np.allclose(trainer.model(ROWS["x"], training=False), predictions, rtol=1e-3)
    assert_weights([weight.numpy() for weight in loaded.weights], averages(trainer))
    assert_equal(everything(trainer), before)
    assert os.listdir(tmp_path) == ["model.keras"]
    for weight in loaded.weights:
        assert isinstance(weight.value, tf.Variable) and not isinstance(weight.value, tf.distribute.DistributedValues)
    if replicas > 1:  # so the line above says something
        assert isinstance(trainer.model.weights[0].value, tf.distribute.DistributedValues)


def test_a_keras_file_loads_without_distloop(tmp_path):
    trainer = make_trainer(replicas=2, average_decay=0.5)
    trainer.fit(dataset(), steps=3)
    trainer.export(tmp_path / "model.keras")
    np.save(tmp_path / "x.npy", ROWS["x"])
    program = """
import sys
import keras
import numpy as np
np.save("found.npy", keras.models.load_model("model.keras").predict(np.load("x.npy")))
assert not {name for name in sys.modules if name.partition(".")[0] == "distloop"}
"""
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True, capture_output=True)
    np.testing.assert_allclose(np.load(tmp_path / "found.npy"), trainer.predict(dataset()), rtol=1e-6, atol=1e-6)


def test_a_keras_file_needs_no_data_and_no_predict_fn(tmp_path):
    def model_fn():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
        return distloop.ModelSpec(model, keras.optimizers.SGD(0.1), lambda b, training: {"loss": model(b)[:, 0]})

    trainer = distloop.Trainer(model_fn, on(2))
    loaded = exported_file(trainer, tmp_path / "deep" / "model.keras")
    assert_weights([w.numpy() for w in loaded.weights], list(weights(trainer).values()))


def test_a_keras_file_replaces_an_older_one(tmp_path):
    path = tmp_path / "model.keras"
    trainer = make_trainer()
    first = exported_file(trainer, path).get_weights()
    trainer.fit(dataset(), steps=3)
    leftover = tmp_path / f"model.keras.{dead_process()}.tmp.keras"
    leftover.write_text("half a file")
    second = exported_file(trainer, path).get_weights()
    assert_weights(second, [w.numpy() for w in trainer.model.weights])
    assert not np.allclose(first[0], second[0], rtol=1e-3)
    assert os.listdir(tmp_path) == ["model.keras"]


def test_a_keras_file_that_cannot_be_written_leaves_the_one_before_it(tmp_path, monkeypatch):
    path = tmp_path / "model.keras"
    trainer = make_trainer()
    first = exported_file(trainer, path).get_weights()
    trainer.fit(dataset(), steps=3)

    def fail(model, filepath, **settings):
        with open(filepath, "w") as file:
            file.write("half a file")
        raise OSError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(keras.saving, "save_model", fail)
        with pytest.raises(OSError, match="No space left"):
            trainer.export(path)
    assert os.listdir(tmp_path) == ["model.keras"]
    assert_weights(keras.models.load_model(path).get_weights(), first)


@pytest.mark.parametrize("wrong", ["one bit", "a weight less"])
def test_a_keras_file_with_other_weights_never_takes_its_name(wrong, tmp_path, monkeypatch):
    trainer = make_trainer()
    load = keras.models.load_model

    def load_another(path):
        model = load(path)
        if wrong == "one bit":
            bias = model.weights[-1].numpy()
            bias[-1] = -0.0  # equal to the 0.0 that it was, in all but one bit
            model.weights[-1].assign(bias)
            return model
        return keras.Model(model.inputs, model.layers[0](model.inputs[0]))

    monkeypatch.setattr(keras.models, "load_model", load_another)
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


def make_net_trainer(make_model, replicas=1, predict_of=None, **settings):
    """Makes a trainer for what `make_model` makes, which takes x."""

    def model_fn():
        model = make_model()
        predict = predict_of or (lambda m, batch: m(batch["x"], training=False))

        def loss_fn(batch, training):
            outputs = [m(batch["x"], training=training) for m in tf.nest.flatten(model)]
            return {"loss": tf.reduce_sum(tf.square(sum(outputs)), -1)}

        return distloop.ModelSpec(
            model, keras.optimizers.SGD(0.1), loss_fn, predict_fn=lambda batch: predict(model, batch)
        )

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


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize(
    "make_model",
    [Registered, lambda: keras.Sequential([keras.layers.Dense(4), keras.layers.Dropout(0.5)])],
    ids=["class", "no input shape"],
)
def test_a_keras_file_of_a_model_that_the_data_built(make_model, replicas, tmp_path):
    trainer = make_net_trainer(make_model, replicas, average_decay=0.9)
    with pytest.raises(ValueError, match="not built.*call fit, evaluate or predict"):
        trainer.export(tmp_path / "model.keras")
    assert os.listdir(tmp_path) == []
    trainer.fit(dataset(), steps=3)
    loaded = exported_file(trainer, tmp_path / "model.keras")
    predictions = trainer.predict(dataset())
    for size in (11, 3):  # any number of rows, whatever the batches were
        np.testing.assert_allclose(loaded.predict(ROWS["x"][:size], verbose=0), predictions[:size], rtol=1e-5)


def test_a_keras_file_of_a_model_with_several_inputs_by_name(tmp_path):
    def make_model():
        x, z = keras.Input((3,), name="x"), keras.Input((2,), name="z")
        joined = keras.layers.Concatenate()([x, keras.layers.Dense(2)(z)])
        return keras.Model({"x": x, "more": [z]}, {"logits": keras.layers.Dense(4)(joined), "z": z * 2.0})

    def model_fn():
        model = make_model()
        outputs_of = lambda b: model({"x": b["x"], "more": [b["more"]["z"]]}, training=False)  # noqa: E731
        loss_fn = lambda b, training: {"loss": tf.reduce_sum(outputs_of(b)["logits"], -1)}  # noqa: E731
        return distloop.ModelSpec(model, keras.optimizers.SGD(0.1), loss_fn, predict_fn=outputs_of)

    trainer = distloop.Trainer(model_fn, on(2))
    trainer.fit(dataset(), steps=2)
    found = exported_file(trainer, tmp_path / "model.keras")({"x": ROWS["x"], "more": [ROWS["more"]["z"]]})
    predictions = trainer.predict(dataset())
    assert set(found) == set(predictions) == {"logits", "z"}
    np.testing.assert_allclose(found["logits"], predictions["logits"], rtol=1e-5, atol=1e-6)


def test_a_keras_file_of_a_net_that_takes_no_image_of_one_pixel(tmp_path, monkeypatch):
    trainer = image_trainer()
    image = images(30)["image"]
    found = exported_file(trainer, tmp_path / "model.keras")(image)
    np.testing.assert_allclose(found, trainer.model(image), rtol=1e-5, atol=1e-6)
    load = keras.models.load_model

    def load_another(path):  # the same weights, other outputs
        model = load(path)
        return keras.Model(model.inputs, model.outputs[0] + 1.0)

    monkeypatch.setattr(keras.models, "load_model", load_another)
    with pytest.raises(ValueError, match="read back, gives other outputs"):
        trainer.export(tmp_path / "other.keras")


def test_a_keras_file_of_a_model_that_draws_when_it_predicts(tmp_path):
    def make_model():
        x = keras.Input((3,))
        return keras.Model(x, keras.layers.Dropout(0.5)(keras.layers.Dense(4)(x), training=True))

    trainer = make_net_trainer(make_model, replicas=2)
    before = everything(trainer)
    loaded = exported_file(trainer, tmp_path / "model.keras")
    assert_weights([w.numpy() for w in loaded.weights], [w.numpy() for w in trainer.model.weights])
    assert not np.array_equal(loaded(ROWS["x"]), loaded(ROWS["x"]))
    assert_equal(everything(trainer), before)


def test_a_keras_file_leaves_pythons_random_numbers_alone(tmp_path):
    trainer = make_trainer()
    before = random.getstate()
    keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    assert random.getstate() != before  # making layers draws from them, as reading a file back does
    before = random.getstate()
    trainer.export(tmp_path / "model.keras")
    assert random.getstate() == before


@pytest.mark.parametrize("precision", ["mixed_float16", "mixed_bfloat16"])
def test_a_keras_file_keeps_the_precision(precision, tmp_path):
    trainer = make_trainer(precision=precision, replicas=2)
    trainer.fit(dataset(), steps=2)
    loaded = exported_file(trainer, tmp_path / "model.keras")
    assert {weight.dtype for weight in loaded.weights} == {"float32"}
    found = loaded(ROWS["x"])
    assert found.dtype == precision.removeprefix("mixed_")
    np.testing.assert_allclose(tf.cast(found, tf.float32), trainer.predict(dataset()), rtol=2e-2, atol=2e-2)


def unregistered_loss(y_true, y_pred):
    return keras.losses.mean_squared_error(y_true, y_pred)


@pytest.mark.parametrize("is_function", [False, True])
@pytest.mark.parametrize("precision", ["float32", "mixed_float16"])
def test_a_keras_file_of_a_compiled_model_is_not_compiled(is_function, precision, tmp_path):
    def compiled():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(64), keras.layers.Dense(2)])
        model.compile(keras.optimizers.Adam(0.01), unregistered_loss, metrics=["mae"])
        return model

    trainer = distloop.Trainer(distloop.from_keras(compiled if is_function else compiled()), on(2, precision=precision))
    trainer.fit(dataset((ROWS["x"], ROWS["more"]["z"])), steps=2)
    was_compiled, size = trainer.model.compiled, sum(weight.numpy().nbytes for weight in trainer.model.weights)
    loaded = exported_file(trainer, tmp_path / "model.keras")
    assert not loaded.compiled
    assert trainer.model.compiled == was_compiled == is_function
    if is_function:
        assert trainer.model.optimizer is not None
    assert_weights([w.numpy() for w in loaded.weights], [w.numpy() for w in trainer.model.weights])
    plain = keras.Sequential([keras.Input((3,)), keras.layers.Dense(64), keras.layers.Dense(2)])
    plain.save(tmp_path / "plain.keras")
    assert os.path.getsize(tmp_path / "model.keras") < os.path.getsize(tmp_path / "plain.keras") + size  # no slots
    trainer.fit(dataset((ROWS["x"], ROWS["more"]["z"])), steps=4)
    assert trainer.step == 4


@pytest.mark.parametrize("replicas", [1, 2])
def test_training_goes_on_after_a_keras_file(tmp_path, replicas):
    trainers = [make_trainer(replicas=replicas, average_decay=0.9) for _ in range(2)]
    for trainer, is_exported in zip(trainers, (False, True), strict=True):
        data = dataset()
        trainer.fit(data, steps=2)
        if is_exported:
            trainer.export(tmp_path / "model.keras")
        trainer.fit(data, steps=4)
    assert_equal(*(dict(enumerate(everything(trainer).values())) for trainer in trainers))
    assert (tmp_path / "model.keras").is_file()


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_run_starts_from_a_keras_file(replicas, tmp_path, capsys):
    data = distloop.make_dataset(classification(16), 8)
    first = distloop.Trainer(classifier(), on(replicas, average_decay=0.5))
    first.fit(data, steps=4)
    first.export(tmp_path / "model.keras")
    still = {"optimizer": lambda: keras.optimizers.SGD(0.0)}
    second = distloop.Trainer(classifier(**still), on(replicas, init_from=str(tmp_path / "model.keras"), seed=1))
    assert not np.allclose(second.model.get_weights()[0], averages(first)[0], rtol=1e-3)
    second.fit(data, steps=1)
    assert_weights(second.model.get_weights(), averages(first))
    assert "4 of 4 variables start from" in capsys.readouterr().out


def test_a_run_with_dropout_starts_from_a_keras_file(tmp_path, capsys):
    data = distloop.make_dataset(classification(16), 8)
    first = distloop.Trainer(classifier(dropout=0.5), on(2))
    first.fit(data, steps=4)
    first.export(tmp_path / "model.keras")
    still = {"optimizer": lambda: keras.optimizers.SGD(0.0), "dropout": 0.5}
    second = distloop.Trainer(classifier(**still), on(2, init_from=str(tmp_path / "model.keras"), seed=1))
    second.fit(data, steps=1)
    assert_weights(second.model.get_weights(), [w.numpy() for w in first.model.weights])
    assert "4 of 4 variables start from" in capsys.readouterr().out
    streams = local_values(second, second.state.seeds[0])
    assert not np.array_equal(*streams)


class Affine(tf.Module):
    def __init__(self):
        super().__init__()
        self.weight = tf.Variable(tf.ones([3, 4]))

    def __call__(self, x, training=False):
        return x @ self.weight


@pytest.mark.parametrize(
    ("make_model", "says"),
    [
        (Affine, "the model is a Affine, no keras.Model: give a path without .keras"),
        (lambda: keras.layers.Dense(4), "the model is a Dense, no keras.Model: give a path without .keras"),
        (lambda: {"a": Affine()}, "the model is a dict, no keras.Model: give a path without .keras"),
        (
            lambda: {"a": sequential()(), "b": sequential()()},
            r"one model, and there is a dict of 2, .* trainer.model\['a'\].save\(",
        ),
        (lambda: [sequential()()], r"one model, and there is a list of 1, .* trainer.model\[0\].save\("),
        (Unregistered, r"\(Could not locate class 'Unregistered'\): .*@keras.saving.register_keras_serializable\(\)"),
        (
            sequential(UnregisteredLayer),
            r"\(Could not locate class 'UnregisteredLayer'\): .*@keras.saving.register_keras_serializable\(\)",
        ),
        (sequential(lambda: keras.layers.Lambda(lambda x: x)), r"Python lambda\): .*@keras.saving.register"),
    ],
    ids=["module", "layer", "dict of modules", "dict", "list", "class", "layer class", "lambda"],
)
def test_what_no_keras_file_can_hold_is_refused(make_model, says, tmp_path):
    trainer = make_net_trainer(make_model, predict_of=lambda m, batch: tf.nest.flatten(m)[0](batch["x"]))
    trainer.fit(dataset(), steps=1)
    with pytest.raises(ValueError, match=says) as caught:
        trainer.export(tmp_path / "model.keras")
    assert "\n" not in str(caught.value) and ". " not in str(caught.value)
    assert os.listdir(tmp_path) == []


def test_models_of_a_dict_are_saved_one_by_one_as_the_refusal_says(tmp_path):
    trainer = make_net_trainer(lambda: {"a": sequential()(), "b": sequential()()}, average_decay=0.9, replicas=2)
    trainer.fit(dataset(), steps=3)
    with pytest.raises(ValueError, match="with trainer.state.averaged") as caught:
        trainer.export(tmp_path / "model.keras")
    line = str(caught.value).split(": ", 1)[1].rstrip(".").replace("path.keras", str(tmp_path / "a.keras"))
    exec(line, {"trainer": trainer})  # the code that it names
    found = keras.models.load_model(tmp_path / "a.keras").get_weights()
    assert_weights(found, averages(trainer)[: len(found)])


def test_a_directory_in_the_way_of_a_keras_file_is_refused_and_kept(tmp_path):
    path = tmp_path / "model.keras"
    path.mkdir()
    (path / "chapter1").write_text("It was a dark and stormy night.")
    with pytest.raises(ValueError, match="model.keras' is a directory; .*: remove it, or give another path"):
        make_trainer().export(path)
    assert os.listdir(path) == ["chapter1"]

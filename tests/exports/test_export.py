"""What SavedModels and Keras files share: the old one is kept until the new one is whole, and no distloop is needed."""

import os
import subprocess
import sys
import textwrap

import keras
import numpy as np
import pytest
import tensorflow as tf

from distloop.exports.export import call_on_ones, output_difference, prepare_path
from distloop.model.saved_state import relative_difference
from tests.exports.export_trainers import (
    ROWS,
    assert_weights,
    dataset,
    dead_process,
    export_keras_file,
    make_trainer,
    serve,
)
from tests.problems import full_disk, mostly_wide, refused

FORMATS = ["model", "model.keras", "model.tflite", "model.npz", "model.safetensors"]
each_kind = pytest.mark.parametrize("name", ["model", "model.keras"])


@pytest.fixture(scope="module")
def untrained():
    """A trainer that has seen data, for questions that change nothing in it."""
    trainer = make_trainer()
    trainer.predict(dataset())
    return trainer


@pytest.mark.wide
@pytest.mark.slow
def test_exports_work_without_distloop_and_with_tensorflows_own_command(tmp_path):
    trainer = make_trainer(replicas=2, average_decay=0.5)
    trainer.fit(dataset(), steps=3)
    predictions = trainer.predict(dataset())
    for name in ("model", "model.keras"):
        trainer.export(tmp_path / name)
    np.save(tmp_path / "x.npy", ROWS["x"])
    program = """
    import sys
    import keras
    import numpy as np
    import tensorflow as tf
    from tensorflow.python.tools import saved_model_cli
    x = np.load("x.npy")
    np.save("served.npy", tf.saved_model.load("model").signatures["serving_default"](x=tf.constant(x))["output"])
    np.save("predicted.npy", keras.models.load_model("model.keras").predict(x))
    assert not {name for name in sys.modules if name.partition(".")[0] == "distloop"}
    arguments = "run --dir model --tag_set serve --signature_def serving_default --inputs x=x.npy --outdir ."
    sys.argv[1:] = arguments.split()
    saved_model_cli.main()
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    for name in ("served", "predicted", "output"):
        np.testing.assert_allclose(np.load(tmp_path / f"{name}.npy"), predictions, rtol=1e-5, atol=1e-6)


# Replacing an older export ------------------------------------------------------------------------------------------


def write_old(path):
    path.mkdir()
    (path / "saved_model.pb").write_text("old")


def test_leftovers_of_dead_processes_and_nothing_else_are_cleaned_up(tmp_path):
    path, dead = tmp_path / "model", dead_process()
    gone = [f"model.{process}-0123abcd.{end}" for process in (dead, os.getpid()) for end in ("tmp", "tmp.keras")]
    kept = [f"model.{os.getppid()}-0123abcd.tmp", "model.backup.old", "model.20240101.old"]
    kept += ["models.1.tmp", "a.model.1.tmp"]
    for name in [*gone, *kept]:
        (tmp_path / name).mkdir()
    for _ in range(2):  # the second time, a new export has the name of the old one
        write_old(tmp_path / f"model.{dead}-0123abcd.old")
        assert prepare_path(str(path), tf.distribute.get_strategy()) == str(path)
        assert sorted(os.listdir(tmp_path)) == sorted(["model", *kept])
        assert (path / "saved_model.pb").read_text() == "old"


def predict_from(path):
    """Returns what an export of either kind computes for x."""
    if path.suffix == ".keras":
        return keras.models.load_model(path)(ROWS["x"]).numpy()
    return serve(path)["output"]


@pytest.mark.slow
@each_kind
def test_an_export_is_replaced_whole_even_behind_a_link(name, tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / name).symlink_to(tmp_path / "real" / name)
    trainer, outputs = make_trainer(), []
    trainer.predict(dataset())

    for steps in (1, 3):
        trainer.fit(dataset(), steps=steps)
        trainer.export(tmp_path / name)
        outputs.append(predict_from(tmp_path / name))
        assert relative_difference(outputs[-1], trainer.predict(dataset())) <= 1e-6  # its operations are not fused
        if name == "model":
            (tmp_path / name / "left_over").touch()
    assert not np.allclose(*outputs, rtol=1e-3)
    assert (tmp_path / name).is_symlink()
    assert os.listdir(tmp_path / "real") == [name] and sorted(os.listdir(tmp_path)) == [name, "real"]


@pytest.mark.slow
@pytest.mark.parametrize("name", mostly_wide(FORMATS, "model", "model.safetensors"))
def test_an_export_to_a_full_disk_is_said_and_keeps_the_old_one(name, untrained, tmp_path):
    def files():
        return {file.name: file.read_bytes() for file in [path, *path.rglob("*")] if file.is_file()}

    untrained.export(path := tmp_path / name)
    old = files()
    for num_bytes in (0, 50):
        with full_disk(num_bytes):
            refused(lambda: untrained.export(path), "/", " cannot be written (", "File too large", "): make room")
        assert os.listdir(tmp_path) == [name] and files() == old


@each_kind
def test_a_place_that_cannot_be_is_refused(name, untrained, tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ValueError, match=f"file/{name}' cannot be written .*File exists: .*give another path"):
        untrained.export(tmp_path / "file" / name)


@pytest.mark.parametrize("name", ["model.h5", "model.weights.h5", "model.pb", "model.pt"])
def test_a_suffix_of_a_format_that_exports_do_not_have_is_refused(name, untrained, tmp_path):
    sentence = f"{name}' was given for an export; it is a .keras, .npz, .safetensors, .tflite or .onnx file"
    with pytest.raises(ValueError, match=sentence):
        untrained.export(tmp_path / name)
    assert os.listdir(tmp_path) == []


@pytest.mark.slow
def test_missing_directories_are_made_and_an_empty_one_is_taken(untrained, tmp_path):
    untrained.export(tmp_path / "runs" / "1" / "model")
    (tmp_path / "model").mkdir()
    untrained.export(tmp_path / "model")
    loaded = export_keras_file(untrained, tmp_path / "a" / "b.keras")
    assert_weights(loaded.get_weights(), untrained.model.get_weights())


def test_something_other_than_an_export_is_refused_and_kept(untrained, tmp_path):
    for name in ("thesis", "thesis.keras"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "chapter1").touch()
    (tmp_path / "poem").write_text("It was a dark and stormy night.")
    for name, sentence in [
        ("thesis", "thesis' holds something that is no SavedModel; give a path that is free"),
        ("thesis.keras", "thesis.keras' is a directory; .*: remove it, or give another path"),
        ("poem", "poem' .*no SavedModel; give a path that is free"),
    ]:
        with pytest.raises(ValueError, match=sentence):
            untrained.export(tmp_path / name)
    assert os.listdir(tmp_path / "thesis") == os.listdir(tmp_path / "thesis.keras") == ["chapter1"]
    assert (tmp_path / "poem").read_text() == "It was a dark and stormy night."


# Comparing outputs --------------------------------------------------------------------------------------------------


def test_free_axes_grow_until_a_function_takes_the_examples(caplog):
    def call(image):
        if image.shape[1] < 5:
            raise ValueError("the filter does not fit")
        return tf.reduce_sum(image, [1, 2])

    examples, outputs = call_on_ones(call, tf.TensorSpec([None, None, None]), "the net")
    assert examples.shape == [2, 32, 32] and outputs.numpy().tolist() == [32.0 * 32] * 2
    assert call_on_ones(call, tf.TensorSpec([None, 4]), "the net") is None
    messages = [record.getMessage() for record in caplog.records if record.name == "distloop"]
    assert messages == ["The export was not compared with the net, which cannot be run on ones."]


def test_examples_are_two_rows_of_ones_of_every_kind():
    specs = {"text": tf.TensorSpec([None], "string"), "words": tf.RaggedTensorSpec([None, None], tf.int32)}
    examples, _ = call_on_ones(lambda rows: rows, specs, "the net")
    assert examples["text"].numpy().tolist() == [b"1", b"1"] and examples["words"].to_list() == [[1], [1]]


@pytest.mark.parametrize(
    ("output", "expected", "difference"),
    [
        ([1.0, 2.0], [1.0, 2.0005], 0.0),
        ([1.0, 2.0], [1.0, 2.5], 0.5),
        ([np.nan], [np.nan], 0.0),
        ([1.0, 2.0], [1.0], np.inf),
        ([1, 2], [1, 3], 0.0),  # whole numbers, which may be near a tie
    ],
)
def test_outputs_differ_by_their_largest_difference_beyond_the_tolerance(output, expected, difference):
    assert output_difference(tf.constant(output), tf.constant(expected)) == difference

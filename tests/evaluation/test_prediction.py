"""Prediction: outputs in order, checks of what predict_fn returned, and which function of it is called."""

import os
import types

import keras
import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

import distloop
from distloop.evaluation.prediction import DEFAULT_SIGNATURE, Predictor, check_outputs, write_outputs
from tests.problems import on


def make_trainer():
    def model_fn():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        loss_fn = lambda batch, training: {"loss": model(batch["x"])[:, 0]}  # noqa: E731
        double = lambda batch: {"y": 2.0 * batch["x"][:, 0]}  # noqa: E731
        return distloop.ModelSpec(model, keras.optimizers.SGD(0.1), loss_fn, predict_fn=double)

    return distloop.Trainer(model_fn, on(1))


def test_outputs_come_in_order_a_batch_at_a_time_or_joined():
    trainer = make_trainer()
    data = tf.data.Dataset.from_tensor_slices({"x": np.arange(5, dtype=np.float32)[:, None]}).batch(2)
    parts = [part["y"].tolist() for part in trainer.stream_predictions(data)]
    assert parts == [[0.0, 2.0], [4.0, 6.0], [8.0]]
    assert trainer.predict(data)["y"].tolist() == [0.0, 2.0, 4.0, 6.0, 8.0]


def test_half_precision_is_cast_unless_it_is_kept():
    outputs = {"a": tf.ones([3, 2], tf.float16), "b": tf.ones([3], tf.int32)}
    assert [t.dtype for t in tf.nest.flatten(check_outputs(outputs, 3))] == [tf.float32, tf.int32]
    assert check_outputs(outputs, 3, keep_dtypes=True)["a"].dtype == tf.float16


@pytest.mark.parametrize("output", [tf.constant(1.0), tf.ones([2, 4])])
def test_outputs_without_a_row_for_each_row_of_input_are_refused(output):
    with pytest.raises(ValueError, match=r"one row of output per row of input, \[3, ...\]"):
        check_outputs(output, 3)


def test_ragged_outputs_pass():
    check_outputs(tf.ragged.constant([[1], [], [2, 3]]), 3)


def predictor(predict_fn):
    return Predictor(types.SimpleNamespace(spec=types.SimpleNamespace(predict_fn=predict_fn)))


def test_without_a_name_the_first_function_is_called():
    several = predictor({"classify": abs, "embed": abs})
    assert [several._find(name) for name in (None, DEFAULT_SIGNATURE, "embed")] == ["classify", "classify", "embed"]


def test_a_function_of_that_name_goes_before_the_first():
    assert predictor({"embed": abs, DEFAULT_SIGNATURE: abs})._find(DEFAULT_SIGNATURE) == DEFAULT_SIGNATURE


def test_an_unknown_name_is_refused_with_those_that_there_are():
    with pytest.raises(ValueError, match=r"signature='other'.*\['classify', 'embed'\]"):
        predictor({"classify": abs, "embed": abs})._find("other")
    with pytest.raises(ValueError, match="just one predict_fn: leave signature out"):
        predictor(abs)._find("other")


def test_a_spec_without_predict_fn_is_told_what_to_give():
    with pytest.raises(ValueError, match="ModelSpec has no predict_fn; give"):
        predictor(None)._find(None)


def parts(array, sizes):
    return np.split(array, np.cumsum(sizes)[:-1])


@pytest.mark.parametrize("dtype", ["float32", "int64", "bool", "float16", "S3"])
@pytest.mark.parametrize("shape", [(), (2,), (2, 0), (3, 4)])
def test_batches_become_one_array_that_can_be_mapped(dtype, shape, tmp_path):
    whole = np.arange(1200 * np.prod(shape, dtype=int)).reshape(1200, *shape).astype(dtype)
    write_outputs(tmp_path / "out", parts(whole, [1, 9, 90, 1100]), is_chief=True)
    assert os.listdir(tmp_path) == ["out"] and os.listdir(tmp_path / "out") == ["outputs.npy"]
    read = np.load(tmp_path / "out" / "outputs.npy", mmap_mode="r" if whole.size else None)
    assert read.dtype == whole.dtype and read.shape == whole.shape
    np.testing.assert_array_equal(read, whole)


def test_outputs_by_name_have_a_file_each_and_an_older_directory_is_replaced(tmp_path):
    for rows in (2, 3):
        batches = [{name: (np.ones([2, 3]), np.zeros(2)) for name in ["a/b", "c"]}] * rows
        write_outputs(f"{tmp_path}/new/out", batches, is_chief=True)
    assert sorted(os.listdir(tmp_path / "new" / "out")) == ["a_b.0.npy", "a_b.1.npy", "c.0.npy", "c.1.npy"]
    assert np.load(tmp_path / "new" / "out" / "c.1.npy").shape == (6,)


def test_an_error_on_the_way_leaves_the_older_directory(tmp_path):
    def fail():
        yield np.zeros(3)
        raise KeyError("x")

    write_outputs(tmp_path / "out", [np.ones(2)], is_chief=True)
    with pytest.raises(KeyError):
        write_outputs(tmp_path / "out", fail(), is_chief=True)
    assert os.listdir(tmp_path) == ["out"] and np.load(tmp_path / "out" / "outputs.npy").tolist() == [1, 1]


def test_what_is_no_chief_takes_all_batches_and_writes_nothing(tmp_path):
    batches = iter([np.zeros(2)] * 3)
    write_outputs(tmp_path / "out", batches, is_chief=False)
    assert not os.listdir(tmp_path) and next(batches, None) is None


def test_what_a_file_cannot_hold_is_refused_in_a_sentence(tmp_path):
    for batches, sentence in [
        (
            [np.zeros([2, 3]), np.zeros([2, 4])],
            r"Rows of float64 \[4\] follow rows of float64 \[3\], and one file holds",
        ),
        ([{"a/b": np.zeros(2), "a_b": np.zeros(2)}], r"would be one of the files \['a_b'\]"),
        ([np.array([b"a", "b"], object)], "The output 'outputs' is of object, which an .npy file cannot hold"),
        ([{"x": np.zeros(2, ml_dtypes.bfloat16)}], "The output 'x' is of bfloat16"),
        ([], "is empty; distloop needs one batch at least"),
    ]:
        with pytest.raises(ValueError, match=sentence):
            write_outputs(tmp_path / "out", batches, is_chief=True)
    assert not os.listdir(tmp_path)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").touch()
    for path in (tmp_path / "out", tmp_path / "out" / "thesis.tex"):
        with pytest.raises(
            ValueError, match="is not a directory of .npy files alone, and predictions would replace it"
        ):
            write_outputs(path, [np.zeros(2)], is_chief=True)


def test_a_url_is_refused_before_a_batch_is_taken():
    def batches():
        raise AssertionError
        yield

    with pytest.raises(ValueError, match=r"path='s3://bucket/out' is a URL, .*: give a directory of this machine\."):
        write_outputs("s3://bucket/out", batches(), is_chief=True)


def test_a_file_that_is_none_of_the_predictions_keeps_its_directory_from_being_replaced(tmp_path):
    np.save(tmp_path / "train.npy", np.zeros(2))
    with pytest.raises(ValueError, match=r"holds train.npy, which is none of these predictions \(outputs.npy\)"):
        write_outputs(tmp_path, [np.zeros([2])], is_chief=True)
    assert os.listdir(tmp_path) == ["train.npy"]


def test_the_directory_may_begin_with_a_tilde_and_end_with_a_slash(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write_outputs("~/out/", [np.ones(2)], is_chief=True)
    assert os.listdir(tmp_path / "out") == ["outputs.npy"]

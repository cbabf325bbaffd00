"""Prediction: checks of what predict_fn returned, which function of it is called, and files of outputs."""

import os
import types

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

from distloop.evaluation.prediction import DEFAULT_SIGNATURE, Predictor, check_outputs, write_outputs


def test_half_precision_is_cast_unless_it_is_kept():
    outputs = {"a": tf.ones([3, 2], tf.float16), "b": tf.ones([3], tf.int32)}
    assert [t.dtype for t in tf.nest.flatten(check_outputs(outputs, 3))] == [tf.float32, tf.int32]
    assert check_outputs(outputs, 3, keep_dtypes=True)["a"].dtype == tf.float16


@pytest.mark.parametrize("output", [tf.constant(1.0), tf.ones([2, 4])])
def test_outputs_without_a_row_for_each_row_of_input_are_refused(output):
    with pytest.raises(ValueError, match=r"one row of output per row of input, \[3, ...\]"):
        check_outputs(output, 3)
    check_outputs(tf.ragged.constant([[1], [], [2, 3]]), 3)


def predictor(predict_fn):
    return Predictor(types.SimpleNamespace(spec=types.SimpleNamespace(predict_fn=predict_fn)))


def test_without_a_name_the_first_function_is_called_unless_one_has_the_name_of_the_default():
    several = predictor({"classify": abs, "embed": abs})
    assert [several._find(name) for name in (None, DEFAULT_SIGNATURE, "embed")] == ["classify", "classify", "embed"]
    assert predictor({"embed": abs, DEFAULT_SIGNATURE: abs})._find(DEFAULT_SIGNATURE) == DEFAULT_SIGNATURE


def test_an_unknown_name_is_refused_with_those_that_there_are():
    with pytest.raises(ValueError, match=r"signature='other'.*\['classify', 'embed'\]"):
        predictor({"classify": abs, "embed": abs})._find("other")
    with pytest.raises(ValueError, match="just one predict_fn: leave signature out"):
        predictor(abs)._find("other")
    with pytest.raises(ValueError, match="ModelSpec has no predict_fn; give"):
        predictor(None)._find(None)


@pytest.mark.parametrize("dtype", ["float32", "int64", "bool", "float16", "S3"])
@pytest.mark.parametrize("shape", [(), (2,), (2, 0), (3, 4)])
def test_batches_become_one_array_that_can_be_mapped(dtype, shape, tmp_path):
    whole = np.arange(1200 * np.prod(shape, dtype=int)).reshape(1200, *shape).astype(dtype)
    write_outputs(tmp_path / "out", np.split(whole, [1, 10, 100]), is_chief=True)
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


@pytest.mark.parametrize(
    ("batches", "sentence"),
    [
        (
            [np.zeros([2, 3]), np.zeros([2, 4])],
            r"Rows of float64 \[4\] follow rows of float64 \[3\], and one file holds",
        ),
        ([{"a/b": np.zeros(2), "a_b": np.zeros(2)}], r"would be one of the files \['a_b'\]"),
        ([np.array([b"a", "b"], object)], "The output 'outputs' is of object, which an .npy file cannot hold"),
        ([{"x": np.zeros(2, ml_dtypes.bfloat16)}], "The output 'x' is of bfloat16"),
        ([], "is empty; distloop needs one batch at least"),
    ],
)
def test_what_a_file_cannot_hold_is_refused_in_a_sentence(batches, sentence, tmp_path):
    with pytest.raises(ValueError, match=sentence):
        write_outputs(tmp_path / "out", batches, is_chief=True)
    assert not os.listdir(tmp_path)


def test_a_place_that_holds_something_else_is_refused_in_a_sentence_and_kept(tmp_path):
    thesis, train = tmp_path / "out" / "thesis.tex", tmp_path / "data" / "train.npy"
    for file in (thesis, train):
        file.parent.mkdir()
        file.touch()
    sentence = "is not a directory of .npy files alone, and predictions would replace it"
    for path in (thesis.parent, thesis):
        with pytest.raises(ValueError, match=sentence):
            write_outputs(path, [np.zeros(2)], is_chief=True)
    with pytest.raises(ValueError, match=r"holds train.npy, which is none of these predictions \(outputs.npy\)"):
        write_outputs(train.parent, [np.zeros(2)], is_chief=True)
    assert thesis.is_file() and train.is_file()


def test_a_url_is_refused_before_a_batch_is_taken():
    def batches():
        raise AssertionError
        yield

    with pytest.raises(ValueError, match=r"path='s3://bucket/out' is a URL, .*: give a directory of this machine\."):
        write_outputs("s3://bucket/out", batches(), is_chief=True)


def test_the_directory_may_begin_with_a_tilde_and_end_with_a_slash(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write_outputs("~/out/", [np.ones(2)], is_chief=True)
    assert os.listdir(tmp_path / "out") == ["outputs.npy"]

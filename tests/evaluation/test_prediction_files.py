"""Outputs in files: appended a batch at a time, whole or not there."""

import os

import ml_dtypes
import numpy as np
import pytest

from distloop.evaluation.prediction_files import write_outputs


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

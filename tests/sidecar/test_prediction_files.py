"""The files of predictions: whole or not there, and only in place of older predictions."""

import os

import ml_dtypes
import numpy as np
import pytest

from distloop.sidecar.prediction_files import write_outputs
from tests.problems import full_disk, refused


@pytest.mark.parametrize("dtype", ["float32", "int64", "bool", "float16", "S3"])
@pytest.mark.parametrize("shape", [(), (2,), (2, 0), (3, 4)])
def test_batches_become_one_array_that_can_be_mapped(dtype, shape, tmp_path):
    whole = np.arange(1200 * np.prod(shape, dtype=int)).reshape(1200, *shape).astype(dtype)
    write_outputs(tmp_path / "out", np.split(whole, [1, 10, 100]), is_chief=True)
    assert os.listdir(tmp_path) == ["out"] and os.listdir(tmp_path / "out") == ["outputs.npy"]
    read = np.load(tmp_path / "out" / "outputs.npy", mmap_mode="r" if whole.size else None)
    assert read.dtype == whole.dtype and read.shape == whole.shape
    np.testing.assert_array_equal(read, whole)


def test_outputs_by_name_have_a_file_each_and_replace_an_older_directory(tmp_path):
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


def test_a_full_disk_is_said_in_a_sentence_and_leaves_the_older_directory(tmp_path):
    write_outputs(tmp_path / "out", [np.ones(2)], is_chief=True)
    for num_bytes in (0, 100_000):
        with full_disk(num_bytes):
            write = lambda: write_outputs(tmp_path / "out", [np.ones(10_000)] * 9, is_chief=True)  # noqa: E731
            refused(write, f"'{tmp_path}/out' cannot be written (File too large): make room")
    (tmp_path / "file").touch()
    refused(lambda: write_outputs(tmp_path / "file" / "out", [np.ones(2)], is_chief=True), "out' cannot be written")
    assert sorted(os.listdir(tmp_path)) == ["file", "out"] and len(np.load(tmp_path / "out" / "outputs.npy")) == 2


def test_an_error_of_the_data_stays_what_it_is(tmp_path):
    def batches():
        yield np.ones(2)
        raise FileNotFoundError("data.csv")

    with pytest.raises(FileNotFoundError, match="data.csv"):
        write_outputs(tmp_path / "out", batches(), is_chief=True)


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


def test_a_path_that_holds_something_else_is_refused_and_kept(tmp_path):
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

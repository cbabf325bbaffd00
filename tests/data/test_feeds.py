"""Batches that Python makes, as datasets: what is in a batch, and errors of the user's code."""

import traceback

import numpy as np
import pytest
import tensorflow as tf

import distloop
from distloop.data import feeds
from distloop.data.source import Source
from tests.data.python_batches import ONE, Numbers, Tensor, batch, failure, taken, three
from tests.problems import batch_taker, classifier, mirrored, on, refused


class Broken(Numbers):
    def __getitem__(self, index):
        if index == 4:
            raise OSError("disk is gone")
        return super().__getitem__(index)


def broken():
    yield from (rows_of(0), rows_of(1))
    raise OSError("disk is gone")


@pytest.mark.parametrize(
    "make",
    [lambda: broken, lambda: Broken(6), lambda: Broken(6, workers=2)],
    ids=["a generator", "a PyDataset", "workers of a PyDataset"],
)
def test_an_error_in_data_of_python_shows_its_line(make):
    error = failure(Source(make(), ONE), 5)
    assert isinstance(error, OSError)
    assert 'raise OSError("disk is gone")' in "".join(traceback.format_exception(error))


def test_an_error_in_batches_that_are_read_again_shows_its_line():
    source = Source(broken, ONE)
    source.go_to({"batches": 3, "skipped": []})
    with pytest.raises(OSError, match="disk is gone") as caught:
        source.iterator()
    assert 'raise OSError("disk is gone")' in "".join(traceback.format_exception(caught.value))


def test_axes_and_batch_sizes_that_differ_in_two_batches_are_free():
    source = Source(lambda: ({"x": np.zeros([2, n, 4])} for n in (3, 5, 9)), ONE)
    assert source.info.element_spec["x"].shape.as_list() == [None, None, 4]
    taken(source, 3)
    fixed = Source(lambda: ({"x": np.zeros([2, n])} for n in (3, 3, 9)), ONE)
    assert "shape (2, 9)" in str(failure(fixed, 3))
    assert Source(three, mirrored(2)).info.replica_batch_sizes == (1, 1)
    assert Source(lambda: (batch(n, rows=n + 1) for n in range(3)), ONE).info.batch_size is None


def test_batches_are_structures_of_arrays():
    label, text = Tensor(np.array([1, 2])), ["a", "bc"]
    rows = feeds.as_arrays([Tensor(np.zeros([2, 3])), {"label": label, "text": text, "weight": [0.5, 1.0]}])
    assert isinstance(rows, tuple)
    assert [array.dtype.kind for array in rows[1].values()] == ["i", "U", "f"]
    source = Source(lambda: iter([rows]), ONE)
    assert source.info.element_spec[1]["text"] == tf.TensorSpec([None], tf.string)
    assert batch_taker(source, source.iterator())().rows[1]["text"].numpy().tolist() == [b"a", b"bc"]


@pytest.mark.parametrize(
    ("batches", "part"),
    [
        ([], "is empty"),
        ([(np.zeros(2), None)], "batch is an array"),
        ([{"x": np.zeros(2)}, {"y": np.zeros(2)}], "same structure"),
        ([np.zeros(2), np.zeros([2, 1])], "number of axes"),
        ([np.float32(1.0)], "call .batch"),
    ],
)
def test_batches_that_are_none_are_refused(batches, part):
    refused(lambda: Source(lambda: iter(batches), ONE), part)


def rows_of(seed):
    random = np.random.default_rng(seed)
    return {"x": random.normal(size=[12, 8]).astype(np.float32), "label": random.integers(0, 4, [12])}


@pytest.mark.slow
def test_fit_evaluate_and_predict_take_a_generator_function(tmp_path, capsys):
    def batches():
        yield from map(rows_of, range(4))

    def trained(steps, workdir=""):
        trainer = distloop.Trainer(classifier(), on(1, workdir=str(workdir)))
        trainer.fit(batches, steps=steps, evals={"test": batches})
        return trainer

    trained(3, tmp_path)
    trainer = trained(6, tmp_path)
    assert trainer.evaluate(batches) == trained(6).evaluate(batches)
    assert trainer.predict(batches).shape == (48, 4)
    assert capsys.readouterr().out.count("reads it again up to its position") == 2


@pytest.mark.slow
def test_an_error_in_a_generator_leaves_fit_as_it_is():
    with pytest.raises(OSError, match="disk is gone") as caught:
        distloop.Trainer(classifier(), on(1)).fit(broken, steps=9)
    assert {frame.name for frame in traceback.extract_tb(caught.value.__traceback__)} >= {"broken"}
    assert "distloop/data" not in "".join(traceback.format_exception(caught.value))

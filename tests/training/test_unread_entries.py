"""Entries of a batch that no loss reads: which ones they are, and what a run says of them."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import distloop
from distloop.training.unread_entries import Reads, report
from tests.problems import on, refused

ENTRIES = {"image": tf.TensorSpec([4, 2]), "meta": {"id": tf.TensorSpec([4], tf.string), "age": tf.TensorSpec([4])}}


def traced(fn, specs):
    """Returns what a function of a batch reads."""
    reads = Reads()

    def trace(batch):
        tf.shape(tf.nest.flatten(batch)[0])  # what reads them elsewhere does not count
        with reads.recorded(batch) as returned:
            returned.append(fn(batch))

    tf.function(trace, autograph=False).get_concrete_function(specs)
    return reads


def test_an_entry_is_read_if_an_operation_of_the_loss_takes_it():
    reads = traced(lambda batch: tf.cond(tf.constant(True), lambda: batch["meta"]["age"], lambda: 0.0), ENTRIES)
    assert reads.entries == {"image": False, "meta/age": True, "meta/id": False}


def test_an_entry_that_the_loss_returns_as_a_weight_is_read():
    reads = traced(lambda batch: {"loss": distloop.weighted(batch["image"][:, 0], batch["meta"]["age"])}, ENTRIES)
    assert reads.entries == {"image": True, "meta/age": True, "meta/id": False}


def test_entries_of_tuples_and_ragged_ones_count():
    specs = (tf.RaggedTensorSpec([None, None], tf.int32), tf.RaggedTensorSpec([None, None], tf.int32))
    assert traced(lambda batch: tf.reduce_sum(batch[1]), specs).entries == {"0": False, "1": True}


def test_eagerly_nothing_is_recorded():
    reads = Reads()
    with reads.recorded({"x": tf.zeros([2])}):
        pass
    assert reads.entries == {}


def test_an_entry_that_one_of_several_losses_reads_is_read(capsys):
    images, ages = (
        traced(fn, ENTRIES)
        for fn in (lambda batch: tf.reduce_sum(batch["image"]), lambda batch: batch["meta"]["age"] + 1.0)
    )
    report([images, ages], "name", is_shown=True)
    assert (
        capsys.readouterr().out
        == "distloop: entries of each batch that no loss_fn reads: meta/id (loaded all the same)\n"
    )
    report([images, ages], "name", is_shown=False)
    assert capsys.readouterr() == ("", "")
    report([images], "warn", is_shown=True)
    assert "warning: No loss_fn reads these entries of a batch, which are loaded" in capsys.readouterr().err
    refused(lambda: report([images], "refuse", is_shown=False), "No loss_fn reads", "meta/age, meta/id", "dataset.map")


def test_of_many_entries_the_first_are_named(capsys):
    report([traced(lambda batch: None, {f"x{i}": tf.TensorSpec([2]) for i in range(9)})], "name", is_shown=True)
    assert capsys.readouterr().out.endswith("x0, x1, x2, x3, x4, x5, x6, x7, 1 more (loaded all the same)\n")


@pytest.mark.slow
def test_a_run_names_them_once_and_refuses_them_on_request(capsys):
    def model_fn():
        layer = keras.layers.Dense(1)
        loss_fn = lambda batch, training: {"loss": layer(batch["x"])[:, 0]}  # noqa: E731
        return distloop.ModelSpec(layer, keras.optimizers.SGD(0.1), loss_fn)

    rows = {"x": np.ones([7, 2], np.float32), "path": np.array(["a"] * 7), "meta": {"id": np.arange(7)}}
    data = distloop.make_dataset(rows, 7)
    trainer = distloop.Trainer(model_fn, on(1, microbatches=2))
    trainer.fit(data, steps=2)
    trainer.fit(data, steps=4)
    assert capsys.readouterr().out.count("entries of each batch that no loss_fn reads: meta/id, path (") == 1
    trainer = distloop.Trainer(model_fn, on(1, unread_entries="refuse"))
    refused(lambda: trainer.fit(data, steps=2), "No loss_fn reads these entries", "all the same: meta/id, path;")
    assert trainer.step == 0

"""The warning about a function that is traced again and again."""

import numpy as np
import tensorflow as tf

import distloop
from distloop.data.shards import Batch, Layout
from distloop.training.compiled_loop import MOST_TRACES, Traces, describe
from tests.problems import classification, classifier, on


def test_batches_are_described_by_their_entries():
    dataset = tf.data.Dataset.from_tensor_slices({"x": tf.zeros([4, 3]), "y": tf.zeros([4], tf.int32)}).batch(2)
    expected = {"x": "float32 [None, 3]", "y": "int32 [None]"}
    assert describe(iter(dataset)) == expected
    assert describe(Batch({"x": tf.zeros([2, 3])}, tf.constant(2))) == {"x": "float32 [2, 3]"}
    assert describe(Layout(False, False)) == describe(tf.constant(1)) == {}


def test_the_warning_names_what_changed_and_comes_again_when_their_number_has_doubled(caplog):
    traces = Traces("train step")
    for length in range(4 * MOST_TRACES):
        traces.add((Batch({"x": tf.zeros([2, length]), "y": tf.zeros([2])}, None), Layout(False, False)))
    counts = [int(record.getMessage().split()[5]) for record in caplog.records]
    assert counts == [MOST_TRACES + 1, 2 * (MOST_TRACES + 1)]
    assert "changed x from float32 [2, 4] to float32 [2, 5]. Give" in caplog.text


def test_evaluating_one_shape_after_another_warns(caplog, monkeypatch):
    monkeypatch.setattr("distloop.training.compiled_loop.MOST_TRACES", 1)
    trainer = distloop.Trainer(classifier(), on(1))
    for rows in (2, 3):
        data = tf.data.Dataset.from_tensors({name: np.asarray(v) for name, v in classification(rows).items()})
        trainer.evaluate(data)
    assert "The evaluation was traced 2 times" in caplog.text and "[2, 8] to float32 [3, 8]" in caplog.text

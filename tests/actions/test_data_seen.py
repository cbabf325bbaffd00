"""What a run has read of its data."""

import json

import numpy as np
import pytest
import tensorflow as tf

import distloop
from distloop.actions.action import Report
from distloop.actions.data_seen import DataSeen
from distloop.data.source import Source
from tests.problems import classification, classifier, on


def seen_after(data, num_batches):
    source = Source(data, tf.distribute.get_strategy())
    source.batches_taken = num_batches
    return DataSeen(source)(Report(num_batches, 100, {}, state=None))


def test_epochs_follow_from_the_place():
    assert seen_after(distloop.make_dataset(np.arange(10.0), 4), 7) == {"epochs_seen": 7 / 3}
    assert seen_after(tf.data.Dataset.range(10).batch(5), 3) == {"epochs_seen": 1.5}


def test_a_mixture_counts_the_examples_of_each_source():
    web, code = {"x": np.arange(9.0)}, {"x": np.arange(5.0)}
    data = distloop.make_dataset(distloop.Mixture({"web": web, "code": code}, {"web": 0.75, "code": 0.25}), 4)
    seen = seen_after(data, 8)
    assert seen["web/examples_seen"] == 24.0 and seen["code/examples_seen"] == 8.0


def test_endless_data_has_no_epochs():
    assert seen_after(tf.data.Dataset.range(10).repeat().batch(5), 3) == {}


@pytest.mark.slow
def test_rows_tell_what_was_read_over_stops_and_going_on(tmp_path):
    rows, config = classification(40), on(1, workdir=str(tmp_path), log_every=2, eval_every=0)
    for steps in (3, 7):
        data = tf.data.Dataset.from_tensor_slices(rows).batch(16)  # of 16, 16 and 8 rows
        distloop.Trainer(classifier(), config).fit(data, steps=steps)
    written = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert {row["step"]: row["examples_seen"] for row in written} == {2: 32, 3: 40, 4: 56, 6: 80, 7: 96}
    assert written[-1]["epochs_seen"] == 7 / 3

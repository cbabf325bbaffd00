"""Mixtures: several sources with weights, in one stream."""

import functools
import json
import re

import numpy as np
import pytest
import tensorflow as tf

import distloop
from distloop.actions.built_in import DataSeen
from distloop.data.numbered import WorkerRows
from distloop.data.source import Source
from distloop.mixtures.mixtures import Mixture, round_fractions
from tests import problems
from tests.problems import mirrored, report


class Rows:
    """Rows of a text that grows, read one by one."""

    def __init__(self, letter, count):
        self.letter, self.count = letter, count

    def __len__(self):
        return self.count

    def __getitem__(self, row):
        if row == 3:
            raise KeyError(row)
        return {"text": [self.letter + str(row)] * (1 + row % 2)}


class Together(Rows):
    asked: tuple = ()

    def __getitems__(self, numbers):
        self.asked += tuple(numbers)
        return [self[number] for number in numbers]


def first_word(example, seed):
    return {"text": example["text"][0], "seed": seed}


def mixture(weights=None, size=17):
    weights = weights or {"a": 0.7, "b": 0.3}
    return Mixture({"a": np.arange(100), "b": np.arange(1000, 1000 + size)}, weights)


def batches_of(dataset, count):
    return [tf.nest.map_structure(lambda t: t.numpy().tolist(), batch) for batch in dataset.take(count)]


def test_fractions_are_exact_or_else_rounded_by_the_largest_remainder():
    assert round_fractions([0.7, 0.3]) == (7, 3)
    assert round_fractions([1 / 3, 1 / 6, 1 / 2]) == (2, 1, 3)
    assert round_fractions([1.0]) == (1,)
    assert round_fractions([0.333333, 0.666667]) == (3333, 6667)
    assert round_fractions([2**-0.5, 1 - 2**-0.5 - 1e-4, 1e-4]) == (7071, 2928, 1)


@pytest.mark.slow
@pytest.mark.parametrize("source", ["arrays", "python"])
def test_a_mixture_begins_at_any_batch_bit_for_bit_on_any_workers(source):
    b = np.arange(1000, 1009)
    mixed = Mixture({"a": np.arange(40), "b": b if source == "arrays" else b.tolist()}, {"a": 1, "b": 2})
    data = distloop.make_dataset(mixed, 5, shuffle=True, seed=4, map_fn=lambda e, seed: (e, seed))
    whole = batches_of(data.starting_at(0), 22)  # more than two epochs, and eight of the smaller source
    assert len(data) == 10 and data.element_spec[0].shape.as_list() == [5]
    assert len({tuple(seed) for _, seeds in whole for seed in seeds}) == 22 * 5
    for first in (9, 20):
        assert batches_of(data.starting_at(first), 2) == whole[first : first + 2]
    parts = [batches_of(data.starting_at(7, worker_rows=WorkerRows(worker, 2, 2)), 1)[0][0] for worker in range(2)]
    assert parts[0][:2] + parts[1][2:] == whole[7][0]


@pytest.mark.slow
def test_weights_and_batch_size_change_at_a_batch():
    data = distloop.make_dataset(mixture({0: {"a": 1, "b": 0}, 4: {"a": 0.5, "b": 0.5}}), {0: 4, 6: 10})
    batches = batches_of(data.starting_at(0), 8)
    assert batches[:4] == np.arange(16).reshape(4, 4).tolist()
    assert batches[4] == [16, 1000, 17, 1001] and [len(batch) for batch in batches[4:]] == [4, 4, 10, 10]
    assert data.element_spec.shape.as_list() == [None]
    assert data.order.seen(6) == {"a": 20, "b": 4}
    changing, alone = (distloop.make_dataset(np.arange(20), size, shuffle=True) for size in ({0: 4, 2: 8}, 4))
    assert sum(batches_of(changing.starting_at(0), 6), []) == sum(batches_of(alone.starting_at(0), 10), [])


@pytest.mark.slow
def test_a_run_goes_on_at_its_example_with_another_batch_size(capsys):
    def source(weights, size):
        return Source(distloop.make_dataset(mixture(weights), size, shuffle=True, seed=5), mirrored(1))

    weights = {0: {"a": 0.7, "b": 0.3}, 8: {"a": 0.2, "b": 0.8}}
    first = source(weights, {0: 4, 6: 8})
    stream = np.concatenate([next(first.iterator()).numpy() for _ in range(12)])
    first.batches_taken, first.skipped_batches = 7, {9}
    place = first.position()
    assert place["examples"] == 32 and place["batch_size"] == 8 and len(json.dumps(place)) < 1000
    for other in ({0: {"a": 7, "b": 3}}, {**weights, 20: {"a": 1, "b": 0}}):
        again = source(other, {0: 4, 6: 8})
        again.go_to(place)
        assert next(again.iterator()).numpy().tolist() == stream[32:40].tolist()
    smaller = source({0: weights[0]}, 4)
    capsys.readouterr()
    smaller.go_to(place)
    assert "batches had 8 examples, these have 4: going on at batch 8" in capsys.readouterr().err
    assert smaller.skipped_batches == {12}
    assert next(smaller.iterator()).numpy().tolist() == stream[32:36].tolist()
    words = "had the fractions a 70 %, b 30 % from example 0 .*data given has the fractions a 50 %, b 50 %"
    with pytest.raises(ValueError, match=words):
        source({"a": 1, "b": 1}, {0: 4, 6: 8}).go_to(place)


@pytest.mark.slow
def test_sources_of_python_are_mixed_and_their_rows_are_named():
    together = Together("b", 3)
    mixed = Mixture({"a": Rows("a", 3), "b": together}, {"a": 1, "b": 1}, examples_per_epoch=8)
    data = distloop.make_dataset(mixed, 4, map_fn=first_word)
    texts = [[b"a0", b"b0", b"a1", b"b1"], [b"a2", b"b2", b"a0", b"b0"]]
    assert [batch["text"] for batch in batches_of(data.starting_at(0), 2)] == texts
    assert len(data) == 2 and set(together.asked) == {0, 1, 2}
    bad = Mixture({"a": Rows("a", 30), "b": Rows("b", 3)}, {"a": 1, "b": 1})
    with pytest.raises(Exception, match="Row 3 of 'a' could not be read"):
        batches_of(distloop.make_dataset(bad, 8, map_fn=first_word).starting_at(0), 1)


def test_arrays_on_disk_stay_there_and_a_changed_one_is_named(tmp_path):
    def source(values, name):
        np.save(tmp_path / name, values)
        on_disk = np.load(tmp_path / name, mmap_mode="r")
        mixed = Mixture({"a": on_disk, "b": np.zeros(5, np.int64)}, {"a": 1, "b": 1})
        assert mixed.as_arrays() is None
        return Source(distloop.make_dataset(mixed, 4), mirrored(1))

    before = source(np.arange(7), "rows.npy")
    assert next(before.iterator()).numpy().tolist() == [0, 0, 1, 0]
    before.batches_taken = 1
    words = "had content [0-9a-f]{8}:, and the data given has content [0-9a-f]{8}:: give the data"
    with pytest.raises(ValueError, match=words):
        source(np.arange(1, 8), "changed.npy").go_to(before.position())


@pytest.mark.parametrize(
    ("sources", "weights", "words"),
    [
        ({}, {}, "was given no sources"),
        ([[1], [2]], [3, 1], "was given sources=[[1], [2]]; sources and weights are dicts by name"),
        ({"a": [1], "b": [2]}, [3, 1], "was given weights=[3, 1]; sources and weights are dicts by name"),
        ({"a": [1], "b": [2]}, {"a": 1}, "sources of a Mixture are 'a', 'b', and weights were given for 'a': give"),
        ({"a": [1], "b": [2]}, {"a": 1, "b": -1}, "weights are 0 or more"),
        ({"a": [1], "b": [2]}, {"a": 0, "b": 0}, "weights are 0 or more"),
        ({"a": [1], "b": [2]}, {"a": 1, "b": 1e-6}, "The weight of 'b' is 1e-06 of all, less than the smallest"),
        ({"a": [1]}, {5: {"a": 1}}, "weights from batch 5 on were given; the first batch is 0"),
        ({"a": tf.data.Dataset.range(2)}, {"a": 1}, "'a' of a Mixture is a _RangeDataset; a Mixture takes arrays"),
    ],
)
def test_what_cannot_be_mixed_is_refused(sources, weights, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        Mixture(sources, weights)


def mixed(a, b):
    return Mixture({"a": a, "b": b}, {"a": 1, "b": 1})


@pytest.mark.parametrize(
    ("source", "batch_size", "words"),
    [
        (mixed([1.5, 2.5], np.zeros([3, 2], np.float32)), 4, "entry of float32 [2] and float32 []; an entry is"),
        (mixed(np.zeros(3, np.int32), np.zeros(3, np.int64)), 4, "entry of int32 [] and int64 []; an entry is"),
        (mixed([{"x": 1}], [{"y": 1}]), 4, "Row 0 of 'b' is {'y': int64 []}, where the first one is {'x'"),
        (
            tf.data.Dataset.range(9),
            {0: 2, 3: 4},
            "lengths, processes or a batch_size that changes were given with a tf.data.Dataset",
        ),
        (np.arange(9), {1: 2}, "batch_size from batch 1 on were given; the first batch is 0"),
    ],
)
def test_sources_with_other_examples_or_a_fixed_batch_size_are_refused(source, batch_size, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        distloop.make_dataset(source, batch_size)


def test_a_mixture_counts_the_examples_of_each_source():
    web, code = {"x": np.arange(9.0)}, {"x": np.arange(5.0)}
    data = distloop.make_dataset(distloop.Mixture({"web": web, "code": code}, {"web": 0.75, "code": 0.25}), 4)
    source = Source(data, mirrored(1))
    source.batches_taken = 8
    seen = DataSeen(source)(report(8))
    assert seen["web/examples_seen"] == 24.0 and seen["code/examples_seen"] == 8.0


SMALL, LARGE = problems.classification(50), problems.classification(100)
UNEVEN = distloop.Mixture({"a": LARGE, "b": SMALL}, {"a": 100, "b": 50})
PASSES = {
    "evaluate": lambda trainer, path, data, batches: trainer.evaluate(data.take(batches) if batches else data),
    "evals": lambda trainer, path, data, batches: trainer.fit(
        problems.batches(8, 16), steps=1, evals={"test": distloop.Evaluation(data, batches=batches)}
    ),
    "predict": lambda trainer, path, data, batches: trainer.predict(data, batches=batches),
    "files": lambda trainer, path, data, batches: trainer.predict(data, batches=batches, path=path),
    "stream": lambda trainer, path, data, batches: list(trainer.stream_predictions(data, batches=batches)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PASSES)
def test_a_pass_that_would_not_have_every_row_once_is_refused(name, tmp_path):
    read = functools.partial(PASSES[name], distloop.Trainer(problems.classifier(), problems.on(1)), tmp_path)
    for sizes, held in ((64, 192), ({0: 50, 2: 40}, 140)):
        words = "150 examples", f"3 batches hold {held}", "each source of a mixture by itself"
        problems.refused(functools.partial(read, distloop.make_dataset(UNEVEN, sizes), 0), *words)
    read(distloop.make_dataset(UNEVEN, 64), 2)
    read(distloop.make_dataset(UNEVEN, 50), 0)

"""Data by number: batches that are a function of their number."""

import json
import time

import numpy as np
import pytest
import tensorflow as tf

import distloop
from distloop.data.iterators import fresh_copy
from distloop.data.numbered import NumberedDataset, Share, convert_numbered
from distloop.data.shards import shard_bounds
from distloop.data.source import Source
from tests.problems import mirrored


class Rows:
    """Rows of a number and a text; counts what is read."""

    def __init__(self, count=23):
        self.count, self.read = count, []

    def __len__(self):
        return self.count

    def __getitem__(self, row):
        self.read.append(row)
        return {"x": np.float32(row), "name": str(row)}


def augment(example, seed):
    return {**example, "noise": tf.random.stateless_normal([2], seed)}


def batches_of(dataset, count=None):
    return [tf.nest.map_structure(lambda t: t.numpy().tolist(), b) for b in (dataset.take(count) if count else dataset)]


@pytest.mark.slow
@pytest.mark.parametrize("source", [np.arange(23), Rows()], ids=["arrays", "source"])
def test_a_dataset_begins_at_any_batch_bit_for_bit(source):
    data = distloop.make_dataset(source, 5, shuffle=True, seed=4, map_fn=lambda e, seed: (e, seed))
    whole = batches_of(data.starting_at(0), 14)  # nearly three epochs of 5 batches, the last of each with 3 rows
    for first in (1, 4, 5, 11):
        assert batches_of(data.starting_at(first), 3) == whole[first : first + 3]


@pytest.mark.slow
def test_the_first_batch_costs_the_same_at_any_place_of_ten_million_rows():
    data = distloop.make_dataset(np.arange(10_000_000), 128, shuffle=True, map_fn=lambda row, seed: (row, seed))
    next(iter(data.starting_at(5)))
    began = time.monotonic()
    next(iter(data.starting_at(0)))
    from_start = time.monotonic() - began
    began = time.monotonic()
    next(iter(data.starting_at(1_000_000)))  # in the 13th epoch
    assert time.monotonic() - began < from_start + 1


@pytest.mark.slow
def test_each_iteration_is_the_next_epoch():
    data = distloop.make_dataset(np.arange(10), 4, shuffle=True)
    epochs = [batches_of(data) for _ in range(3)]
    assert sum(epochs, []) == batches_of(data.starting_at(0), 9)
    assert batches_of(data.fresh()) == batches_of(fresh_copy(data)) == epochs[0]
    assert len(data) == 3


def test_methods_of_tf_data_give_each_repetition_another_order():
    data = distloop.make_dataset(np.arange(10), 4, shuffle=True).filter(lambda batch: True).repeat(3)
    rows = [row for batch in data for row in batch.numpy().tolist()]
    epochs = [rows[:10], rows[10:20], rows[20:]]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len(set(map(tuple, epochs))) == 3
    copy = fresh_copy(data)
    assert [row for batch in copy for row in batch.numpy().tolist()] == rows


@pytest.mark.slow
def test_map_and_take_keep_the_place_a_number():
    data = distloop.make_dataset(np.arange(10), 4, shuffle=True)
    changed = data.map(lambda batch: batch * 10).take(2)
    assert isinstance(changed, NumberedDataset) and len(changed) == 2
    first, second = batches_of(data), batches_of(data)
    expected = [[[10 * row for row in batch] for batch in epoch[:2]] for epoch in (first, second)]
    assert batches_of(changed.starting_at(0), 4) == expected[0] + expected[1]
    assert batches_of(changed.starting_at(3), 1) == expected[1][1:]
    same = changed.first_pass_again()
    assert batches_of(same.starting_at(0), 4) == 2 * expected[0]


@pytest.mark.wide
@pytest.mark.slow
def test_workers_read_their_rows_alone_and_place_them_where_they_belong():
    for size in (1, 5, 6, 7, 23):
        source = Rows()
        data = distloop.make_dataset(source, size, shuffle=True, map_fn=augment)
        whole = batches_of(data.starting_at(0), 6)
        parts = []
        for worker in range(2):
            parts.append(batches_of(data.starting_at(0, share=Share(worker, 2, min_rows=6)), 6))
        for number, batch in enumerate(whole):
            rows = len(batch["x"])
            for replica in range(6):  # three on each worker
                start, end = (0, rows) if rows < 6 else shard_bounds(replica, 6, rows)
                part = parts[replica // 3][number]
                assert all(part[name][start:end] == batch[name][start:end] for name in batch)
                assert len(part["x"]) == rows


def test_a_worker_reads_no_row_of_another():
    source = Rows()
    data = distloop.make_dataset(source, 23)
    for worker, expected in enumerate([range(0, 11), range(11, 23)]):
        source.read.clear()
        batches_of(data.starting_at(0, share=Share(worker, 2, min_rows=6)), 3)
        assert set(source.read) == set(expected)


def test_the_place_is_a_few_numbers():
    data = distloop.make_dataset(Rows(), 4, shuffle=True, seed=7, map_fn=augment)
    source = Source(data, mirrored(1))
    source.batches_taken = 1_000_000
    place = source.save_position()
    assert place == {
        "batches": 1_000_000,
        "skipped": [],
        "batch_size": 4,
        "batches_per_epoch": 6,
        "seed": 7,
        "num_rows": 23,
        "order": 1,
    }
    assert len(json.dumps(place)) < 1000


@pytest.mark.slow
def test_a_source_goes_on_at_its_place_on_any_number_of_replicas():
    def data():
        return distloop.make_dataset(Rows(), 4, shuffle=True, seed=7, map_fn=augment)

    first = Source(data(), mirrored(1))
    whole = [next(first.iterator()) for _ in range(13)]
    for replicas in (1, 2):
        source = Source(data(), mirrored(replicas))
        source.restore_position({**first.save_position(), "batches": 7})
        for expected in whole[7:]:
            batch = next(source.iterator())
            rows, size = batch if source.layout.is_padded else (batch, None)
            size = len(expected["x"]) if size is None else int(size)
            for name in expected:
                np.testing.assert_array_equal(rows[name][:size], expected[name])
    assert source.seeks and not source.resume  # nothing to say: it is at its position at once


PLACE = {"batches": 5, "skipped": [], "batch_size": 4, "seed": 7, "num_rows": 23, "order": 1}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"seed": 8}, "the checkpoint's data had seed=7, and the data given has seed=8: give the data"),
        ({"num_rows": 24}, "had 23 rows, and the data given has 24 rows"),
        ({"order": 0}, "had version 1 of the order"),
        ({"fingerprint": "ab"}, "had no fingerprint, and the data given has content ab"),
    ],
)
def test_a_position_in_other_data_is_refused(change, words):
    facts = {name: PLACE[name] for name in ("batch_size", "seed", "num_rows", "order")}
    assert convert_numbered(PLACE, facts) is PLACE
    with pytest.raises(ValueError, match=words):
        convert_numbered(PLACE, {**facts, **change})
    assert convert_numbered({**PLACE, "batches": 0}, {**facts, **change})["batches"] == 0  # nothing was read yet


def test_a_place_in_data_without_numbers_is_refused():
    with pytest.raises(ValueError, match="at its position in the data, as the checkpoint is of other data, such as"):
        convert_numbered({"batches": 5, "skipped": []}, PLACE)


def test_a_file_that_changed_since_the_checkpoint_is_named(tmp_path):
    def write(texts, index_dir):
        paths = []
        for name, text in texts.items():
            paths.append(str(tmp_path / name))
            with tf.io.TFRecordWriter(paths[-1]) as writer:
                for number in range(5):
                    writer.write(f"{text}{number}")
        return Source(distloop.make_dataset(distloop.open_records(paths, index_dir=str(index_dir)), 2), mirrored(1))

    indexes = tmp_path / "before", tmp_path / "after"
    for index in indexes:
        index.mkdir()
    source = write({"train-0": "a", "train-1": "b"}, indexes[0])
    rows = [next(source.iterator()).numpy().tolist() for _ in range(2)]
    assert rows == [[b"a0", b"a1"], [b"a2", b"a3"]]
    source.batches_taken = 2
    place = source.save_position()
    assert len(json.dumps(place)) < 1000
    same = write({"train-0": "a", "train-1": "b"}, indexes[1])
    same.restore_position(place)
    assert next(same.iterator()).numpy().tolist() == [b"a4", b"b0"]
    other = write({"train-0": "a", "train-1": "c"}, tmp_path)
    with pytest.raises(ValueError, match=r"as the records of '.*train-1' have changed: give the data"):
        other.restore_position(place)


@pytest.mark.slow
def test_limits_and_overfitting_go_on_at_their_place():
    for settings in ({"limit": 2}, {"limit": 2, "is_cached": True}):
        data = distloop.make_dataset(np.arange(20), 4, shuffle=True)
        source = Source(data, mirrored(1), **settings)
        whole = [next(source.iterator()).numpy().tolist() for _ in range(6)]
        assert (whole[:2] == whole[2:4]) == ("is_cached" in settings)
        source.restore_position({**source.save_position(), "batches": 3})
        assert [next(source.iterator()).numpy().tolist() for _ in range(3)] == whole[3:]


def test_a_function_over_batches_gets_the_rows_of_all_workers():
    def reversed_rows(batch):
        return tf.reverse(batch, [0])

    data = distloop.make_dataset(np.arange(10) + 1, 4, shuffle=True)
    changed = data.map(reversed_rows).take(2)
    for worker in range(2):
        feed = changed.fresh()
        feed.read_share(Share(worker, 2, min_rows=2))
        assert feed.share is None
        assert batches_of(feed.dataset(), 4) == batches_of(changed.starting_at(0), 4)
        feed = data.map_rows(lambda batch: batch * 10)
        feed.read_share(Share(worker, 2, min_rows=2))
        assert next(iter(feed.dataset())).numpy().tolist().count(0) == 2  # the other worker's


def place_in(batches, size, other_size, drop=False, other_drop=False, limit=0, other_limit=0):
    """Returns the place that a run of 1000 rows has after some batches, in other batches."""

    def facts(size, drop_remainder, limit):
        data = distloop.make_dataset(np.arange(1000), size, drop_remainder=drop_remainder)
        return (data.take(limit) if limit else data).facts_at({})

    place = {"batches": batches, "skipped": [batches - 1], **facts(size, drop, limit)}
    found = convert_numbered(place, facts(other_size, other_drop, other_limit))
    return found["batches"], found["skipped"]


def test_a_place_is_the_same_epoch_and_example_in_epochs_of_other_batches(capsys):
    assert place_in(150, 64, 128, drop=True, other_drop=True) == (70, [])  # the start of epoch 10, and no batch
    assert place_in(152, 64, 128, drop=True, other_drop=True) == (71, [70])
    assert place_in(16 * 3, 64, 128) == (8 * 3, [8 * 2 + 7])
    assert "batches had 64 examples, these have 128: going on at batch 24, at the same" in capsys.readouterr().err
    assert place_in(15 * 9, 64, 64, drop=True) == (16 * 9, [16 * 8 + 14])
    assert "epochs had 15 batches, these have 16: going on at batch 144, in the same epoch" in capsys.readouterr().err
    assert place_in(16 * 9 + 3, 64, 64, other_limit=2)[0] == 2 * 10  # behind the end of the shorter epoch 9
    assert place_in(2 * 9 + 1, 64, 64, limit=2)[0] == 16 * 9 + 1
    assert place_in(2 * 9 + 1, 64, 32, limit=2, other_limit=4)[0] == 4 * 9 + 2
    assert place_in(2 * 9 + 1, 64, 64, limit=2, other_limit=2)[0] == 2 * 9 + 1


def test_a_place_of_an_older_version_does_not_know_the_length_of_its_epochs():
    facts = distloop.make_dataset(np.arange(23), 2, shuffle=True, seed=7).facts_at({})
    assert convert_numbered(PLACE, facts)["batches"] == 2 * 5
    assert convert_numbered({**PLACE, "batch_size": 2}, facts)["batches"] == 5


@pytest.mark.parametrize("drop", [False, True])
@pytest.mark.parametrize(("num_rows", "batch_size", "limit"), [(13, 5, 0), (15, 5, 0), (13, 1, 0), (13, 5, 1)])
def test_a_pass_over_arrays_in_their_order_traces_nothing(num_rows, batch_size, limit, drop, monkeypatch):
    arrays = {"x": np.arange(2 * num_rows).reshape(-1, 2), "of": (np.array([str(i) for i in range(num_rows)]),)}
    data = distloop.make_dataset(arrays, batch_size, drop_remainder=drop)
    data = data.take(limit) if limit else data
    by_number = data.starting_at(0).take(data.order.batches_per_epoch)
    monkeypatch.setattr(tf.data.Dataset, "map", None)
    in_order = data.starting_at(0, repeat=False)
    assert in_order.element_spec == by_number.element_spec
    assert batches_of(in_order) == batches_of(by_number)


def test_a_pass_over_fewer_rows_than_a_batch_has_one_batch():
    data = distloop.make_dataset(np.arange(3), 5)
    assert batches_of(data.starting_at(0, repeat=False)) == [[0, 1, 2]]


def test_a_pass_over_nested_lists_of_arrays_and_over_shuffled_ones_is_read_by_number():
    lists = distloop.make_dataset({"x": [np.arange(4), np.arange(4)]}, 2)
    assert batches_of(lists.starting_at(0, repeat=False), 1) == batches_of(lists.starting_at(0), 1)
    shuffled = distloop.make_dataset(np.arange(40), 20, shuffle=True)
    assert batches_of(shuffled.starting_at(0, repeat=False)) == batches_of(shuffled.starting_at(0), 2)

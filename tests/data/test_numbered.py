"""Data by number: batches that are a function of their number."""

import math
import time

import numpy as np
import pytest
import tensorflow as tf

import distloop
from distloop.data.iterators import fresh_copy
from distloop.data.numbered import NumberedDataset, WorkerRows
from distloop.data.order import Access
from distloop.data.shards import shard_bounds
from distloop.data.source import Source
from tests.data.python_batches import Rows
from tests.problems import mirrored


def converted(position, facts):
    return distloop.make_dataset(np.arange(23), 2).convert(position, facts)


def rows_of_two():
    """Rows of a number and a text."""
    return Rows(lambda row: {"x": np.float32(row), "name": str(row)}, 23)


def augment(example, seed):
    return {**example, "noise": tf.random.stateless_normal([2], seed)}


def batches_of(dataset, count=None):
    return [tf.nest.map_structure(lambda t: t.numpy().tolist(), b) for b in (dataset.take(count) if count else dataset)]


@pytest.mark.slow
@pytest.mark.parametrize("source", [np.arange(23), rows_of_two()], ids=["arrays", "source"])
def test_a_dataset_begins_at_any_batch_bit_for_bit(source):
    data = distloop.make_dataset(source, 5, shuffle=True, seed=4, map_fn=lambda e, seed: (e, seed))
    whole = batches_of(data.starting_at(0), 14)  # nearly three epochs of 5 batches, the last of each with 3 rows
    for first in (1, 4, 5, 11):
        assert batches_of(data.starting_at(first), 3) == whole[first : first + 3]


@pytest.mark.slow
def test_the_first_batch_costs_the_same_at_any_place_of_ten_million_rows():
    data = distloop.make_dataset(np.arange(10_000_000), 128, shuffle=True, map_fn=lambda row, seed: (row, seed))
    next(iter(data.starting_at(5)))
    times = []
    for place in (0, 1_000_000):  # the latter is in the 13th epoch
        began = time.monotonic()
        next(iter(data.starting_at(place)))
        times.append(time.monotonic() - began)
    assert times[1] < times[0] + 30  # hours, if batches were made up to there


@pytest.mark.slow
def test_each_iteration_and_each_repetition_of_tf_data_is_the_next_epoch():
    data = distloop.make_dataset(np.arange(10), 4, shuffle=True)
    epochs = [batches_of(data) for _ in range(3)]
    assert sum(epochs, []) == batches_of(data.starting_at(0), 9)
    assert batches_of(data.fresh()) == batches_of(fresh_copy(data)) == epochs[0]
    assert len(data) == 3
    repeated = data.fresh().filter(lambda batch: True).repeat(3)
    rows = sum(batches_of(repeated), [])
    epochs = [rows[:10], rows[10:20], rows[20:]]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len(set(map(tuple, epochs))) == 3
    assert sum(batches_of(fresh_copy(repeated)), []) == rows


@pytest.mark.slow
def test_map_and_take_keep_the_place_a_number():
    data = distloop.make_dataset(np.arange(10), 4, shuffle=True)
    changed = data.map(lambda batch: batch * 10).take(2)
    assert isinstance(changed, NumberedDataset) and len(changed) == 2
    first, second = ([[10 * row for row in batch] for batch in batches_of(data)[:2]] for _ in range(2))
    assert batches_of(changed.starting_at(0), 4) == first + second
    assert batches_of(changed.starting_at(3), 1) == second[1:]
    assert batches_of(changed.first_pass_again().starting_at(0), 4) == 2 * first


@pytest.mark.wide
def test_workers_read_their_rows_alone_and_place_them_where_they_belong():
    for size in (1, 5, 6, 7, 23):
        data = distloop.make_dataset(rows_of_two(), size, shuffle=True, map_fn=augment)
        parts = [batches_of(data.starting_at(0, worker_rows=WorkerRows(worker, 2, 6)), 6) for worker in range(2)]
        for number, batch in enumerate(batches_of(data.starting_at(0), 6)):
            rows = len(batch["x"])
            for replica in range(6):  # three on each worker
                start, end = (0, rows) if rows < 6 else shard_bounds(replica, 6, rows)
                part = parts[replica // 3][number]
                assert all(part[name][start:end] == batch[name][start:end] for name in batch)
                assert len(part["x"]) == rows


def test_a_worker_reads_no_row_of_another():
    source = rows_of_two()
    data = distloop.make_dataset(source, 23)
    for worker, expected in enumerate([range(0, 11), range(11, 23)]):
        source.read.clear()
        batches_of(data.starting_at(0, worker_rows=WorkerRows(worker, 2, min_rows=6)), 3)
        assert set(source.read) == set(expected)


@pytest.mark.slow
def test_a_position_is_a_few_numbers_that_serve_any_number_of_replicas():
    def source_on(replicas):
        return Source(distloop.make_dataset(rows_of_two(), 4, shuffle=True, seed=7, map_fn=augment), mirrored(replicas))

    first = source_on(1)
    first.batches_taken = 1_000_000
    place = first.position()
    facts = {"batch_size": 4, "batches_per_epoch": 6, "seed": 7, "num_rows": 23, "order": 1}
    assert place == {"batches": 1_000_000, "skipped": [], **facts}
    first = source_on(1)
    whole = [next(first.iterator()) for _ in range(13)]
    for replicas in (1, 2):
        source = source_on(replicas)
        source.go_to({**place, "batches": 7})
        for expected in whole[7:]:
            batch = next(source.iterator())
            rows, size = batch if source.layout.is_padded else (batch, len(expected["x"]))
            for name in expected:
                np.testing.assert_array_equal(rows[name][: int(size)], expected[name])
        assert source.access is Access.SEEKS and not source.resume  # nothing to say: it is at its position at once


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
    assert converted(PLACE, facts) is PLACE
    with pytest.raises(ValueError, match=words):
        converted(PLACE, {**facts, **change})
    assert converted({**PLACE, "batches": 0}, {**facts, **change})["batches"] == 0  # nothing was read yet
    with pytest.raises(ValueError, match="at its position in the data, as the checkpoint is of other data, such as"):
        converted({"batches": 5, "skipped": []}, facts)


@pytest.mark.slow
def test_limits_and_overfitting_go_on_at_their_place():
    for settings in ({"limit": 2}, {"limit": 2, "is_cached": True}):
        data = distloop.make_dataset(np.arange(20), 4, shuffle=True)
        source = Source(data, mirrored(1), **settings)
        whole = [next(source.iterator()).numpy().tolist() for _ in range(6)]
        assert (whole[:2] == whole[2:4]) == ("is_cached" in settings)
        source.go_to({**source.position(), "batches": 3})
        assert [next(source.iterator()).numpy().tolist() for _ in range(3)] == whole[3:]


def test_a_function_over_batches_gets_the_rows_of_all_workers():
    data = distloop.make_dataset(np.arange(10) + 1, 4, shuffle=True)
    changed = data.map(lambda batch: tf.reverse(batch, [0])).take(2)
    for worker in range(2):
        feed = changed.fresh()
        feed.read_only(WorkerRows(worker, 2, min_rows=2))
        assert feed.worker_rows is None
        assert batches_of(feed.dataset(), 4) == batches_of(changed.starting_at(0), 4)
        feed = data.map_rows(lambda batch: batch * 10)
        feed.read_only(WorkerRows(worker, 2, min_rows=2))
        assert next(iter(feed.dataset())).numpy().tolist().count(0) == 2  # the other worker's


def place_in(batches, size, other_size, drop=False, other_drop=False, limit=0, other_limit=0, num_rows=1000):
    """Returns the place that a run has after some batches, in other batches."""

    def facts(size, drop_remainder, limit):
        data = distloop.make_dataset(np.arange(num_rows), size, drop_remainder=drop_remainder)
        return (data.take(limit) if limit else data).facts_at({})

    place = {"batches": batches, "skipped": [batches - 1], **facts(size, drop, limit)}
    found = converted(place, facts(other_size, other_drop, other_limit))
    return found["batches"], found["skipped"]


@pytest.mark.parametrize("num_batches", [1, 3, 5, 6, 11])
@pytest.mark.parametrize(("saved", "size"), [(2, 4), (4, 2), (4, 3), (3, 7)])
def test_a_place_leaves_no_example_out_when_the_batch_size_changes(num_batches, saved, size):
    def rows_before(count, batch_size):
        epoch, batch = divmod(count, math.ceil(10 / batch_size))
        return 10 * epoch + batch * batch_size

    found, _ = place_in(num_batches, saved, size, num_rows=10)
    assert 0 <= rows_before(num_batches, saved) - rows_before(found, size) < size


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


def test_a_position_of_an_older_version_knows_no_length_of_its_epochs():
    facts = distloop.make_dataset(np.arange(23), 2, shuffle=True, seed=7).facts_at({})
    assert converted(PLACE, facts)["batches"] == 2 * 5
    assert converted({**PLACE, "batch_size": 2}, facts)["batches"] == 5


@pytest.mark.parametrize("drop", [False, True])
@pytest.mark.parametrize(("num_rows", "batch_size", "limit"), [(13, 5, 0), (15, 5, 0), (13, 1, 0), (13, 5, 1)])
def test_a_pass_over_arrays_in_their_order_makes_no_dataset(num_rows, batch_size, limit, drop, monkeypatch):
    arrays = {"x": np.arange(2 * num_rows).reshape(-1, 2), "of": (np.array([str(i) for i in range(num_rows)]),)}
    data = distloop.make_dataset(arrays, batch_size, drop_remainder=drop)
    data = data.take(limit) if limit else data
    expected = batches_of(data.starting_at(0, repeat=False))
    monkeypatch.setattr(tf.data.Dataset, "range", None)
    assert rows_of(data.row_iterator(0)) == expected
    assert data.row_iterator(0).element_spec == data.element_spec


def rows_of(iterator):
    """Takes all batches of an iterator over rows in memory."""
    batches = []
    while iterator.has_next():
        batches.append(tf.nest.map_structure(lambda t: t.numpy().tolist(), next(iterator)))
    return batches


def test_arrays_of_any_length_and_any_batch_size_need_one_trace():
    sums = tf.function(lambda iterator: tf.reduce_sum(next(iterator)))
    for num_rows, batch_size in ((4, 3), (9, 3), (2, 5)):
        iterator = distloop.make_dataset(np.arange(num_rows), batch_size).row_iterator(0)
        assert sums(iterator).numpy() == sum(range(min(num_rows, batch_size)))
        assert bool(iterator.has_next()) == (num_rows > batch_size)
    assert sums.experimental_get_tracing_count() == 1


def test_a_small_batch_of_rows_is_padded_with_copies_that_do_not_count():
    *_, (rows, size) = rows_of(distloop.make_dataset(np.arange(5), 4).row_iterator(4))
    assert rows == [4, 4, 4, 4] and size == 1


def test_a_pass_over_few_rows_nested_lists_of_arrays_and_shuffled_rows():
    assert rows_of(distloop.make_dataset(np.arange(3), 5).row_iterator(0)) == [[0, 1, 2]]
    lists = distloop.make_dataset({"x": [np.arange(4), np.arange(4)]}, 2)  # tf.data stacks a list
    assert lists.row_iterator(0) is None
    assert batches_of(lists.starting_at(0, repeat=False), 1) == batches_of(lists.starting_at(0), 1)
    assert distloop.make_dataset(np.arange(4), 2).map(lambda x: x + 1).row_iterator(0) is None
    shuffled = distloop.make_dataset(np.arange(40), 20, shuffle=True)
    assert shuffled.row_iterator(0) is None
    assert batches_of(shuffled.starting_at(0, repeat=False)) == batches_of(shuffled.starting_at(0), 2)

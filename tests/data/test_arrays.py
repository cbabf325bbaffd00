"""Datasets made from arrays."""

import os

import numpy as np
import pytest
import tensorflow as tf

from distloop.data.arrays import make_dataset
from distloop.data.source import Source
from tests.problems import batch_taker, mirrored, of_unknown_length


def flat(dataset):
    return [int(value) for batch in dataset.as_numpy_iterator() for value in batch]


def test_arrays_become_batches_in_order():
    dataset = make_dataset({"x": np.arange(10).reshape(5, 2), "y": {"z": np.arange(5)}}, 2)
    batches = list(dataset.as_numpy_iterator())
    assert [len(batch["x"]) for batch in batches] == [2, 2, 1]
    assert np.concatenate([batch["x"] for batch in batches]).tolist() == np.arange(10).reshape(5, 2).tolist()
    assert np.concatenate([batch["y"]["z"] for batch in batches]).tolist() == list(range(5))
    assert len(dataset) == 3


def test_drop_remainder_leaves_the_odd_batch_out_and_knows_the_batch_size():
    dataset = make_dataset(np.arange(5), 2, drop_remainder=True)
    assert dataset.element_spec.shape == [2]
    assert flat(dataset) == [0, 1, 2, 3]


EXAMPLES = [np.arange(20), tf.data.Dataset.range(20)]


@pytest.mark.parametrize("examples", EXAMPLES, ids=["arrays", "dataset"])
def test_shuffling_gives_every_epoch_another_order_and_every_row_once(examples):
    dataset = make_dataset(examples, 4, shuffle=True)
    first, second = flat(dataset), flat(dataset)
    assert sorted(first) == sorted(second) == list(range(20))
    assert first != list(range(20)) and first != second
    repeated = flat(make_dataset(examples, 4, shuffle=True).repeat(2))
    assert sorted(repeated[:20]) == list(range(20)) and repeated[:20] != repeated[20:]


@pytest.mark.parametrize("examples", EXAMPLES, ids=["arrays", "dataset"])
def test_the_seed_fixes_the_order(examples):
    orders = [flat(make_dataset(examples, 4, shuffle=True, seed=seed).repeat(2)) for seed in (3, 3, 4)]
    assert orders[0] == orders[1] != orders[2]


def test_rows_of_several_arrays_stay_together_when_shuffled():
    dataset = make_dataset({"x": np.arange(20), "y": 10 * np.arange(20)}, 3, shuffle=True)
    for batch in dataset.as_numpy_iterator():
        np.testing.assert_array_equal(10 * batch["x"], batch["y"])


@pytest.mark.parametrize("examples", EXAMPLES, ids=["arrays", "dataset"])
def test_a_buffer_shuffles_rows_that_are_near(examples):
    order = flat(make_dataset(examples, 4, shuffle=3))
    assert sorted(order) == list(range(20)) and order != list(range(20))
    assert all(value <= place + 2 for place, value in enumerate(order))  # never earlier than the buffer allows


def test_a_cached_dataset_is_read_once():
    reads = []

    def examples():
        reads.append(True)
        yield from range(4)

    dataset = tf.data.Dataset.from_generator(examples, output_signature=tf.TensorSpec([], tf.int64))
    cached = make_dataset(dataset, 2, cache=True)
    assert flat(cached) == flat(cached) == [0, 1, 2, 3]
    assert len(reads) == 1


def test_the_position_in_shuffled_arrays_can_be_saved_and_is_small(tmp_path):
    rows = np.zeros([2000, 1000], np.float32)  # 8 MB
    rows[:, 0] = np.arange(2000)

    def source():
        return Source(make_dataset(rows, 8, shuffle=True), mirrored(2))

    def take(source, count):
        take_batch = batch_taker(source, source.iterator())
        return [take_batch().rows.numpy()[:, 0].tolist() for _ in range(count)]

    first = source()
    take(first, 300)  # into the second epoch
    path = tf.train.Checkpoint(iterator=first.iterator()).write(os.path.join(tmp_path, "position"))
    expected = take(first, 5)
    second = source()
    tf.train.Checkpoint(iterator=second.iterator()).read(path)
    assert take(second, 5) == expected
    assert sum(os.path.getsize(os.path.join(tmp_path, name)) for name in os.listdir(tmp_path)) < 1_000_000


@pytest.mark.parametrize("batch_size", [0, -1])
def test_a_batch_without_rows_is_refused(batch_size):
    with pytest.raises(ValueError, match=f"batch_size={batch_size} was given; a batch has one row at least"):
        make_dataset(np.arange(5), batch_size)


def test_arrays_of_different_lengths_are_refused():
    with pytest.raises(ValueError, match=r"Arrays of \[4, 5\] rows were given; they need the same number"):
        make_dataset({"x": np.zeros([4]), "y": np.zeros([5])}, 2)


@pytest.mark.parametrize("arrays", [np.zeros([0, 3]), np.float32(1.0)])
def test_arrays_without_rows_are_refused(arrays):
    with pytest.raises(ValueError, match=r"Arrays of \[0\] rows were given"):
        make_dataset(arrays, 2)


def test_all_of_a_dataset_of_unknown_length_cannot_be_shuffled():
    with pytest.raises(ValueError, match="shuffle=True was given with a dataset of unknown length; give the number"):
        make_dataset(of_unknown_length(tf.data.Dataset.range(9)), 2, shuffle=True)

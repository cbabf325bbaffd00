"""What is known about a dataset before it is read."""

import numpy as np
import pytest
import tensorflow as tf

from distloop.data.arrays import make_dataset
from distloop.data.source import Source
from tests.problems import mirrored, numbers, sizes_1_to_9

ONE = tf.distribute.get_strategy()


def test_single_examples_are_refused():
    with pytest.raises(ValueError, match=r"hold a scalar .*, so they are single examples; .*: call .batch\("):
        Source(tf.data.Dataset.from_tensor_slices({"x": tf.zeros([4, 2]), "y": tf.zeros([4])}), ONE)


def test_entries_with_different_first_axes_are_refused():
    with pytest.raises(ValueError, match=r"first axes of \[2, 3\]; the entries of a batch share .*: call .batch\("):
        Source(tf.data.Dataset.from_tensor_slices({"x": tf.zeros([4, 2]), "y": tf.zeros([4, 3])}), ONE)


def test_sparse_tensors_are_refused():
    sparse = tf.data.Dataset.from_tensor_slices(tf.sparse.eye(4)).batch(2)
    with pytest.raises(ValueError, match="gives a sparse tensor .*: turn it into a dense or ragged one"):
        Source(sparse, ONE)


def test_entries_that_are_none_are_refused():
    with pytest.raises(ValueError, match="None"):
        Source(tf.data.Dataset.from_tensors({"x": tf.zeros([4, 2]), "y": None}), ONE)


@pytest.mark.parametrize(
    ("count", "batch_size", "microbatches", "sizes"),
    [
        (1, 10, 1, [10]),
        (2, 10, 1, [5, 5]),
        (3, 10, 1, [3, 3, 4]),
        (4, 3, 1, [1, 1, 1, 0]),
        (2, 3, 4, [3, 0]),
    ],
)
def test_the_rows_that_each_replica_takes_are_told(count, batch_size, microbatches, sizes):
    strategy = mirrored(count) if count > 1 else ONE
    source = Source(numbers(20, batch_size), strategy, microbatches=microbatches)
    assert source.split() == (batch_size, sizes)
    assert sum(sizes) == batch_size


def test_the_size_of_a_batch_is_found_behind_what_keeps_it():
    data = tf.data.Dataset.range(20).batch(4, num_parallel_calls=2).shuffle(3).cache().take(3).repeat().prefetch(1)
    assert Source(data, ONE).split() == (4, [4])
    assert Source(make_dataset(np.arange(9.0), 5, shuffle=True), ONE).split() == (5, [5])
    assert Source(tf.data.Dataset.range(20).batch(4, drop_remainder=True).map(lambda x: x), ONE).split() == (4, [4])


def test_the_size_of_a_batch_is_not_guessed():
    assert Source(sizes_1_to_9(), ONE).split() is None
    assert Source(numbers(20, 4).unbatch().padded_batch(3), ONE).split() == (3, [3])
    assert Source(numbers(20, 4).concatenate(numbers(20, 5)), ONE).split() is None
    distributed = mirrored(2).experimental_distribute_dataset(numbers(8, 4))
    assert Source(distributed, mirrored(2)).split() is None

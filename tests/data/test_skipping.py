"""Skipping in pieces."""

import time

import pytest
import tensorflow as tf

from distloop.data.skipping import Behind
from tests.problems import mirrored, numbers


def test_batches_are_skipped_and_the_iterator_is_behind_them():
    iterator = iter(numbers(12, 2).repeat())
    assert Behind(iterator, 8).skip() == 0
    assert next(iterator)["x"].numpy().tolist() == [4, 5]


def test_a_piece_ends_when_its_time_is_over_and_reads_one_batch_at_least():
    iterator = iter(numbers(12, 2).repeat())
    assert Behind(iterator, 5).skip(secs=-1.0) == 4
    assert next(iterator)["x"].numpy().tolist() == [2, 3]
    start = time.monotonic()
    assert 0 < Behind(iterator, 10**9).skip(secs=0.1) < 10**9 - 1
    assert time.monotonic() - start < 2.0


@pytest.mark.slow
def test_the_batches_of_a_distributed_dataset_are_skipped():
    strategy = mirrored(2)
    iterator = iter(strategy.experimental_distribute_dataset(numbers(12, 4)))
    behind = Behind(iterator, 2)
    assert [behind.skip(1), behind.skip()] == [1, 0]
    values = strategy.experimental_local_results(next(iterator)["x"])
    assert [value.numpy().tolist() for value in values] == [[8, 9], [10, 11]]


def test_data_that_ends_while_it_is_skipped_is_an_error():
    with pytest.raises(tf.errors.OutOfRangeError):
        Behind(iter(numbers(4, 2)), 3).skip()

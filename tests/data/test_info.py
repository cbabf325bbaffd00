"""What is known about a dataset before it is read."""

import math

import numpy as np
import pytest
import tensorflow as tf

from distloop.data.info import are_rows_alike, inspect
from distloop.data.make_dataset import make_dataset
from distloop.data.shards import pad, shard_bounds
from distloop.distributed.devices import Replicas
from tests.optimizers.test_gradients import adding_by_collectives
from tests.problems import mirrored, numbers, of_unknown_length, sizes_1_to_9

ONE = tf.distribute.get_strategy()


def test_sparse_tensors_and_none_are_refused():
    with pytest.raises(ValueError, match="gives a sparse tensor .*: turn it into a dense or ragged one"):
        inspect(tf.data.Dataset.from_tensor_slices(tf.sparse.eye(4)).batch(2), ONE)
    with pytest.raises(ValueError, match="None"):
        inspect(tf.data.Dataset.from_tensors({"x": tf.zeros([4, 2]), "y": None}), ONE)


def sizes(dataset, strategy=ONE, microbatches=1):
    info = inspect(dataset, strategy, microbatches=microbatches)
    return info.batch_size, info.replica_batch_sizes


@pytest.mark.parametrize(
    ("count", "batch_size", "microbatches", "expected"),
    [(1, 10, 1, (10,)), (2, 10, 1, (5, 5)), (3, 10, 1, (3, 3, 4)), (4, 3, 1, (3, 0, 0, 0)), (2, 3, 4, (3, 0))],
)
def test_the_rows_of_each_replica_are_known(count, batch_size, microbatches, expected):
    strategy = mirrored(count) if count > 1 else ONE
    assert sizes(numbers(20, batch_size), strategy, microbatches) == (batch_size, expected)


def test_the_batch_size_is_known_behind_operations_and_never_guessed():
    data = tf.data.Dataset.range(20).batch(4, num_parallel_calls=2).shuffle(3).cache().take(3).repeat().prefetch(1)
    assert sizes(data) == (4, (4,))
    assert sizes(make_dataset(np.arange(9.0), 5, shuffle=True)) == (5, (5,))
    assert sizes(tf.data.Dataset.range(20).batch(4, drop_remainder=True).map(lambda x: x)) == (4, (4,))
    assert sizes(numbers(20, 4).unbatch().padded_batch(3)) == (3, (3,))
    assert sizes(sizes_1_to_9()) == sizes(numbers(20, 4).concatenate(numbers(20, 5))) == (None, ())


def test_rows_are_counted_only_where_the_batches_may_have_changed():
    """Counting them costs a batch of a small model as much as computing it."""
    pairs = tf.data.Dataset.from_tensor_slices((np.arange(9.0), np.arange(9)))
    batched = pairs.batch(4)
    for data in (batched, batched.cache().repeat().prefetch(2), pairs.batch(4, num_parallel_calls=2).shuffle(2)):
        assert are_rows_alike(data)
    cut = batched.map(lambda a, b: (a, b[:1]))
    merged = tf.data.Dataset.zip((numbers(9, 4), numbers(8, 4)))
    made = make_dataset({"x": np.arange(9.0), "y": np.arange(9)}, 4)
    for data in (cut, cut.cache(), merged, batched.concatenate(cut), made.map(lambda batch: batch)):
        assert not are_rows_alike(data)


@pytest.mark.parametrize(
    ("dataset", "expected"),
    [(numbers(10, 4), 3), (of_unknown_length(numbers(10, 4)), None), (numbers(10, 4).repeat(), math.inf)],
    ids=["known", "unknown", "endless"],
)
def test_the_length_of_a_pass_is_known_without_reading(dataset, expected):
    info = inspect(dataset, ONE)
    assert info.num_batches == expected
    assert info.is_endless == (expected == math.inf)


@pytest.mark.parametrize(("batch_size", "microbatches", "virtual"), [(8, 1, 0), (8, 3, 0), (8, 1, 8), (3, 1, 0)])
def test_no_replica_has_more_rows_of_any_batch_than_is_known_before(batch_size, microbatches, virtual):
    strategy = adding_by_collectives(4)
    settings = {"microbatches": microbatches, "replicas": Replicas(4, virtual)}
    info = inspect(numbers(8 * batch_size - 1, batch_size), strategy, **settings)
    of_replicas = []  # rows that each has of a batch of each size, without padding
    for size in range(1, batch_size + 1):
        padded = int(tf.shape(pad(tf.range(size), info.layout.min_rows).rows)[0])
        shards = [shard_bounds(replica, 4, padded) for replica in range(4)]
        of_replicas += [min(size, end) - min(size, start) for start, end in shards]
    assert info.layout.max_replica_rows == max(of_replicas)
    whole = inspect(tf.data.Dataset.range(80).batch(16, drop_remainder=True), strategy)
    assert whole.layout.max_replica_rows == 4

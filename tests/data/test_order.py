"""The order of examples, as a function of a batch's number."""

import numpy as np
import pytest
import tensorflow as tf

from distloop.data.order import Order, example_seeds, permute


def rows_of(order, batch, *bounds):
    rows, epochs = order.rows(tf.constant(batch, tf.int64), *bounds)
    return rows.numpy().tolist(), epochs.numpy().tolist()


def epoch_of(order, epoch):
    first = epoch * order.batches_per_epoch
    return [row for batch in range(first, first + order.batches_per_epoch) for row in rows_of(order, batch)[0]]


@pytest.mark.parametrize("num_rows", [1, 2, 10, 23])
def test_every_epoch_has_every_row_once_and_an_order_of_its_own(num_rows):
    order = Order(num_rows=num_rows, batch_size=4, seed=3, is_shuffled=True)
    epochs = [epoch_of(order, epoch) for epoch in range(3)]
    assert all(sorted(rows) == list(range(num_rows)) for rows in epochs)
    if num_rows > 2:
        assert len(set(map(tuple, epochs))) == 3


def test_the_seed_chooses_the_order_and_nothing_else_does():
    orders = [
        epoch_of(Order(num_rows=30, batch_size=size, seed=s, is_shuffled=True), 5) for size, s in [(4, 1), (7, 1)]
    ]
    assert orders[0] == orders[1] != epoch_of(Order(num_rows=30, batch_size=4, seed=2, is_shuffled=True), 5)


def test_rows_come_in_order_unless_they_are_shuffled():
    order = Order(num_rows=5, batch_size=2)
    assert [rows_of(order, batch) for batch in (0, 2, 3)] == [([0, 1], [0, 0]), ([4], [0]), ([0, 1], [1, 1])]


def test_a_batch_is_the_same_in_parts():
    order = Order(num_rows=10, batch_size=8, is_shuffled=True)
    whole = rows_of(order, 2)[0]
    assert rows_of(order, 2, 0, 3)[0] + rows_of(order, 2, 3, 8)[0] == whole
    assert rows_of(order, 3, 1, 2)[0] == rows_of(order, 3)[0][1:]  # the odd last batch


def test_remainder_and_limit():
    assert Order(num_rows=10, batch_size=4, drop_remainder=True).batches_per_epoch == 2
    limited = Order(num_rows=10, batch_size=4, limit=1, is_shuffled=True)
    assert rows_of(limited, 1) == rows_of(Order(num_rows=10, batch_size=4, is_shuffled=True), 3)
    odd = Order(num_rows=10, batch_size=4)
    assert [int(odd.size(tf.constant(batch, tf.int64))) for batch in (0, 2, 5)] == [4, 2, 2]


def test_neighbours_in_the_order_do_not_correlate():
    # TensorFlow's own index_shuffle, with 4 rounds, fails this at 10 to 50 deviations.
    count = 50_000
    for num_rows in (10_000_000, 60_000):
        for epoch in range(3):
            places = permute(tf.range(count, dtype=tf.int64), num_rows, 7, tf.constant(epoch, tf.int64)).numpy()
            for lag in (1, 2, 16, 64):
                correlation = np.corrcoef(places[:-lag], places[lag:])[0, 1]
                assert abs(correlation) * np.sqrt(count) < 4.5


def test_permutations_may_differ_from_index_to_index():
    indices, counts = tf.constant([0, 1, 2, 0, 1], tf.int64), tf.constant([3, 3, 3, 2, 2], tf.int64)
    mixed = permute(indices, counts, 5, tf.constant([1, 1, 1, 4, 4], tf.int64)).numpy().tolist()
    assert mixed[:3] == permute(indices[:3], 3, 5, tf.constant(1, tf.int64)).numpy().tolist()
    assert mixed[3:] == permute(indices[3:], 2, 5, tf.constant(4, tf.int64)).numpy().tolist()


def test_each_example_of_each_epoch_has_a_seed_of_its_own():
    rows, epochs = np.divmod(np.arange(40, dtype=np.int64), 4)
    all_seeds = [example_seeds(seed, tf.constant(rows), tf.constant(epochs)).numpy() for seed in (0, 1, 2**31 - 1)]
    assert len({tuple(seed) for seeds in all_seeds for seed in seeds}) == 120
    assert np.min(all_seeds) >= 0  # NumPy takes no negative seeds

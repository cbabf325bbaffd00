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
    return sum((rows_of(order, first + batch)[0] for batch in range(order.batches_per_epoch)), [])


@pytest.mark.parametrize("num_rows", [1, 2, 10, 23])
def test_every_epoch_has_every_row_once_and_an_order_of_its_own(num_rows):
    order = Order(num_rows=num_rows, batch_size=4, seed=3, is_shuffled=True)
    epochs = [epoch_of(order, epoch) for epoch in range(3)]
    assert all(sorted(rows) == list(range(num_rows)) for rows in epochs)
    if num_rows > 2:
        assert len(set(map(tuple, epochs))) == 3


def test_the_seed_alone_chooses_the_order_of_shuffled_rows():
    first, larger, other = (
        epoch_of(Order(num_rows=30, batch_size=size, seed=seed, is_shuffled=True), 5)
        for size, seed in [(4, 1), (7, 1), (4, 2)]
    )
    assert first == larger != other
    order = Order(num_rows=5, batch_size=2)
    assert [rows_of(order, batch) for batch in (0, 2, 3)] == [([0, 1], [0, 0]), ([4], [0]), ([0, 1], [1, 1])]


def test_parts_of_a_batch_the_remainder_and_the_limit():
    order = Order(num_rows=10, batch_size=8, is_shuffled=True)
    assert rows_of(order, 2, 0, 3)[0] + rows_of(order, 2, 3, 8)[0] == rows_of(order, 2)[0]
    assert rows_of(order, 3, 1, 2)[0] == rows_of(order, 3)[0][1:]  # the odd last batch
    assert Order(num_rows=10, batch_size=4, drop_remainder=True).batches_per_epoch == 2
    limited = Order(num_rows=10, batch_size=4, limit=1, is_shuffled=True)
    assert rows_of(limited, 1) == rows_of(Order(num_rows=10, batch_size=4, is_shuffled=True), 3)
    odd = Order(num_rows=10, batch_size=4)
    assert [int(odd.size(tf.constant(batch, tf.int64))) for batch in (0, 2, 5)] == [4, 2, 2]


@pytest.mark.parametrize("num_rows", [10_000_000, 60_000])
def test_neighbours_in_the_order_do_not_correlate(num_rows):
    # TensorFlow's own index_shuffle, with 4 rounds, fails this at 10 to 50 deviations.
    count = 50_000
    for epoch in range(3):
        places = permute(tf.range(count, dtype=tf.int64), num_rows, 7, tf.constant(epoch, tf.int64)).numpy()
        for lag in (1, 2, 16, 64):
            assert abs(np.corrcoef(places[:-lag], places[lag:])[0, 1]) * np.sqrt(count) < 4.5


def test_permutations_may_differ_from_index_to_index():
    indices, counts = tf.constant([0, 1, 2, 0, 1], tf.int64), tf.constant([3, 3, 3, 2, 2], tf.int64)
    mixed = permute(indices, counts, 5, tf.constant([1, 1, 1, 4, 4], tf.int64)).numpy().tolist()
    for part, count, epoch in ((slice(3), 3, 1), (slice(3, None), 2, 4)):
        assert mixed[part] == permute(indices[part], count, 5, tf.constant(epoch, tf.int64)).numpy().tolist()


def test_each_example_of_each_epoch_has_a_seed_of_its_own():
    rows, epochs = np.divmod(np.arange(40, dtype=np.int64), 4)
    all_seeds = [example_seeds(seed, tf.constant(rows), tf.constant(epochs)).numpy() for seed in (0, 1, 2**31 - 1)]
    assert len({tuple(seed) for seeds in all_seeds for seed in seeds}) == 120
    assert np.min(all_seeds) >= 0  # NumPy takes no negative seeds

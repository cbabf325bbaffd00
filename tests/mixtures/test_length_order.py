"""Batches of like lengths, as a function of their number."""

from dataclasses import replace

import numpy as np
import pytest
import tensorflow as tf

import distloop
from distloop.data.numbered import Share, convert_place
from distloop.data.order import Order
from distloop.mixtures.orders import by_length

LENGTHS = np.random.default_rng(0).integers(1, 100, 1030)
PLAIN = Order(num_rows=1030, batch_size=5, seed=2, is_shuffled=True)  # windows of 500, 500 and 30 rows
ORDER = by_length(PLAIN, LENGTHS, ())


def rows_of(order, batch, *bounds):
    return order.rows(tf.constant(batch, tf.int64), *bounds)[0].numpy().tolist()


def width_of(order, batch):
    return int(order.width(tf.constant(batch, tf.int64)))


@pytest.mark.slow
def test_every_epoch_has_every_row_once_in_batches_of_like_lengths():
    epochs = [[rows_of(ORDER, batch) for batch in range(first, first + 206)] for first in (0, 206)]
    assert all(sorted(sum(epoch, [])) == list(range(1030)) for epoch in epochs) and epochs[0] != epochs[1]
    spread = [np.ptp(LENGTHS[rows]) for rows in epochs[0][:200]]
    assert max(spread) <= 12 and np.mean(spread) < 3
    widths = [width_of(ORDER, batch) for batch in range(206)]
    assert widths == [LENGTHS[rows].max() for rows in epochs[0]]
    assert abs(np.corrcoef(widths[:100], range(100))[0, 1]) < 0.3  # batches of a window are shuffled


def test_any_batch_is_the_first_one_and_is_the_same_in_parts():
    fresh = by_length(PLAIN, LENGTHS, ())
    assert rows_of(fresh, 10**6) == rows_of(ORDER, 10**6)
    assert rows_of(fresh, 7, 0, 2) + rows_of(fresh, 7, 2, 5) == rows_of(ORDER, 7)
    assert int(fresh.rows(tf.constant(300, tf.int64))[1][0]) == 1
    assert rows_of(replace(ORDER, is_one_epoch=True), 206 + 9) == rows_of(ORDER, 9)
    assert rows_of(replace(ORDER, limit=3), 4) == rows_of(ORDER, 206 + 1)


@pytest.mark.slow
def test_the_odd_batch_is_in_the_last_window_or_left_out():
    odd = by_length(replace(PLAIN, batch_size=8), LENGTHS, ())
    sizes = [int(odd.size(tf.constant(batch, tf.int64))) for batch in range(129)]
    assert sorted(sizes) == [6] + [8] * 128 and sizes.index(6) >= 100
    seen = [odd.seen(129 + batch)["data"] for batch in range(130)]
    assert np.diff(seen).tolist() == [int(odd.size(tf.constant(129 + batch, tf.int64))) for batch in range(129)]
    dropped = replace(odd, drop_remainder=True)
    assert all(len(rows_of(dropped, batch)) == 8 for batch in range(128)) and dropped.batches_per_epoch == 128


def test_batches_are_padded_to_the_next_boundary():
    order = by_length(PLAIN, LENGTHS, (100, 20, 50))
    assert {width_of(order, batch) for batch in range(50)} == {20, 50, 100}
    assert order.static_width is None and by_length(PLAIN, LENGTHS, [100]).static_width == 100


def with_mask(example, seed):
    return {"x": example["x"], "mask": tf.ones_like(example["x"]), "seed": seed}


@pytest.mark.slow
@pytest.mark.parametrize("map_fn", [None, with_mask])
def test_rows_are_read_and_padded_on_any_number_of_workers(map_fn):
    source = [{"x": np.arange(1, 1 + length), "y": np.int64(length)} for length in LENGTHS[:60]]
    data = distloop.make_dataset(source, 7, shuffle=True, seed=3, lengths=LENGTHS[:60], map_fn=map_fn)
    batches = list(data.starting_at(4).take(8))
    for number, batch in enumerate(batches, start=4):
        rows = rows_of(data.order, number)
        assert batch["x"].shape == [len(rows), LENGTHS[rows].max()]
        assert np.count_nonzero(batch["x"], axis=1).tolist() == LENGTHS[rows].tolist()
        if map_fn is not None:
            np.testing.assert_array_equal(batch["mask"], np.minimum(batch["x"], 1))
    assert data.element_spec["x"].shape.as_list() == [None, None]
    half = len(batches[0]["x"]) // 2
    for worker, bounds in enumerate([slice(0, half), slice(half, None)]):
        part = next(iter(data.starting_at(4, share=Share(worker, 2, 2))))
        np.testing.assert_array_equal(part["x"][bounds], batches[0]["x"][bounds])
        assert part["x"].shape == batches[0]["x"].shape


def test_a_list_of_arrays_is_rows_where_it_has_as_many_lengths():
    rows = [np.arange(length) for length in (3, 1, 2)]
    batch = next(iter(distloop.make_dataset(rows, 3, lengths=[3, 1, 2])))
    assert batch.numpy().tolist() == [[0, 0, 0], [0, 1, 0], [0, 1, 2]]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"lengths": [1, 2]}, r"lengths of int64 \[2\] were given for 3 rows"),
        ({"lengths": [1.0, 2.0, 3.0]}, r"lengths of float64 \[3\] were given"),
        ({"lengths": [1, 2, 9], "pad_to": [4, 8]}, "The longest row has 9, and pad_to ends at 8: add 9"),
        ({"lengths": [1, 1, 1], "source": np.arange(3)}, "all examples have the same shape: leave lengths out"),
        ({"lengths": [1, 1, 1], "source": tf.data.Dataset.range(3)}, "or lengths, were given with a tf.data.Dataset"),
        ({"lengths": [1, 2, 3], "batch_size": {0: 1, 5: 2}}, "a batch_size that changes; use distloop.pack"),
        ({}, "or lengths, by which rows of like lengths are padded"),
    ],
)
def test_lengths_that_do_not_fit_are_refused(settings, words):
    settings = {"source": [np.zeros(1 + row) for row in range(3)] + [np.zeros(0)], "batch_size": 2, **settings}
    if isinstance(settings["source"], list):
        settings["source"] = [{"x": array} for array in settings["source"][:3]]
    with pytest.raises(ValueError, match=words):
        distloop.make_dataset(**settings)


def test_a_place_in_other_batches_is_refused():
    def facts_of(order):
        return {**order.facts_at({"batches": 9}), "order": 1}

    place = {"batches": 9, "skipped": [], **facts_of(ORDER)}
    assert convert_place(place, facts_of(ORDER)) is place
    for other in (by_length(PLAIN, LENGTHS + 1, ()), by_length(replace(PLAIN, batch_size=6), LENGTHS, ())):
        with pytest.raises(ValueError, match="had batches by length, of 5 examples in windows of 500 "):
            convert_place(place, facts_of(other))
    with pytest.raises(ValueError, match="and the data given has no lengths"):
        convert_place(place, facts_of(PLAIN))

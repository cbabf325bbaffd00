"""The orders of mixtures and of batches of like lengths, as functions of a batch's number."""

import json
from dataclasses import replace

import numpy as np
import pytest
import tensorflow as tf

import distloop
from distloop.data.numbered import NumberedDataset, WorkerRows
from distloop.data.order import Order
from distloop.data.rows import ArrayRows
from distloop.mixtures.orders import MixedOrder, arrange, by_length

MIXED = MixedOrder(
    names=("web", "books", "code"),
    rows_of=(50, 7, 20),
    ratios=((0, (7, 2, 1)), (9, (1, 0, 2)), (20, (3, 3, 4))),
    batch_sizes=((0, 4), (15, 6)),
    examples_per_epoch=77,
    seed=3,
    is_shuffled=True,
)


def converted(position, facts):
    return distloop.make_dataset(np.arange(23), 2).convert(position, facts)


def rows_of(order, batch, *bounds):
    rows, epochs = order.rows(tf.constant(batch, tf.int64), *bounds)
    return list(zip(rows.numpy().tolist(), epochs.numpy().tolist(), strict=True))


def sources_of(order, num_batches):
    rows = [row for batch in range(num_batches) for row, _ in rows_of(order, batch)]
    return np.searchsorted(np.cumsum(order.rows_of), rows, side="right")


@pytest.mark.parametrize("slots", [(1,), (7, 3), (1, 1, 1), (0, 5, 1), (9_001, 937, 61, 1), (1, 40, 1, 23, 5)])
def test_every_prefix_has_its_fractions_up_to_one_example(slots):
    taken = np.cumsum(np.eye(len(slots))[arrange(slots)[0]], axis=0)
    assert taken[-1].tolist() == list(slots)
    quota = np.arange(1, sum(slots) + 1)[:, None] * np.array(slots) / sum(slots)
    assert np.abs(taken - quota).max() < 1


@pytest.mark.slow
def test_what_was_seen_is_a_closed_form_over_stages_and_batch_sizes():
    sources = sources_of(MIXED, 40)
    for batch in (0, 1, 8, 9, 10, 15, 16, 20, 39):
        num_examples = MIXED.examples_before(batch)
        assert list(MIXED.seen(batch).values()) == np.bincount(sources[:num_examples], minlength=3).tolist()
    assert MIXED.examples_before(20) == 15 * 4 + 5 * 6 and MIXED.batch_at(15 * 4 + 5 * 6 - 1) == 19
    assert MIXED.seen(10**9)["books"] > 10**9
    assert Order(num_rows=10, batch_size=4).seen(7) == {"data": 24}
    assert Order(num_rows=10, batch_size=4, drop_remainder=True).seen(5) == {"data": 20}


@pytest.mark.slow
def test_each_source_has_its_own_epochs_each_with_every_row_once():
    examples = [example for batch in range(40) for example in rows_of(MIXED, batch)]
    first = 0
    for count in MIXED.rows_of:
        source = [(row - first, epoch) for row, epoch in examples if first <= row < first + count]
        first += count
        assert [epoch for _, epoch in source] == [i // count for i in range(len(source))]
        for start in range(0, len(source) - count + 1, count):
            assert sorted(row for row, _ in source[start : start + count]) == list(range(count))
    twins = replace(MIXED, rows_of=(20, 20, 20), ratios=((0, (1, 1, 1)),))
    orders = [[row % 20 for row, _ in rows_of(twins, batch)] for batch in range(3)]
    assert len({tuple(np.ravel(orders)[source::3]) for source in range(3)}) == 3  # sources do not go in step


@pytest.mark.slow
def test_a_batch_is_the_same_in_parts_and_for_any_batch_size():
    whole = rows_of(MIXED, 18)
    assert rows_of(MIXED, 18, 0, 2) + rows_of(MIXED, 18, 2, 6) == whole
    fixed = replace(MIXED, batch_sizes=((0, 4),), ratios=MIXED.ratios[:1])
    other = replace(fixed, batch_sizes=((0, 10),))
    stream = [example for batch in range(20) for example in rows_of(fixed, batch)]
    assert [example for batch in range(8) for example in rows_of(other, batch)] == stream
    assert int(MIXED.size(tf.constant(14, tf.int64))) == 4 and int(MIXED.size(tf.constant(15, tf.int64))) == 6


def test_one_source_comes_in_the_order_that_it_has_alone():
    alone = Order(num_rows=12, batch_size=4, seed=3, is_shuffled=True)
    mixed = replace(MIXED, names=("web",), rows_of=(12,), ratios=((0, (1,)),), batch_sizes=((0, 4),))
    assert all(rows_of(mixed, batch) == rows_of(alone, batch) for batch in range(7))


def test_limit_and_one_epoch():
    assert MIXED.batches_per_epoch == 20 and replace(MIXED, limit=3).batches_per_epoch == 3
    rows = ArrayRows(np.arange(MIXED.num_rows))
    one = NumberedDataset(rows, replace(MIXED, limit=3), None).first_pass_again()
    assert next(iter(one.starting_at(7))).numpy().tolist() == [row for row, _ in rows_of(MIXED, 1)]
    assert list(one.seen(7).values()) == (2 * np.array(list(MIXED.seen(3).values())) + [3, 1, 0]).tolist()


def test_a_position_depends_on_the_stages_that_have_begun_and_on_no_other():
    def mixture(order, batch):
        return order.facts_at({"batches": batch})["mixture"]

    later = replace(MIXED, ratios=(*MIXED.ratios[:2], (20, (1, 1, 1)), (30, (5, 1, 1))))
    assert mixture(MIXED, 20) == mixture(later, 20) and "web 33.33 %, books 0 %, code 66.67 %" in mixture(later, 20)
    assert mixture(MIXED, 21) != mixture(later, 21)
    assert mixture(MIXED, 5) != mixture(replace(MIXED, rows_of=(50, 8, 20)), 5)
    names = tuple(f"a name that is long{i}" for i in range(90))
    many = replace(MIXED, names=names, rows_of=(5,) * 90, ratios=((0, (1,) * 90),))
    assert len(json.dumps(many.facts_at({"batches": 10**9}))) < 500


LENGTHS = np.random.default_rng(0).integers(1, 100, 1030)
PLAIN = Order(num_rows=1030, batch_size=5, seed=2, is_shuffled=True)  # windows of 500, 500 and 30 rows
BY_LENGTH = by_length(PLAIN, LENGTHS, ())


def numbers_of(order, batch, *bounds):
    return order.rows(tf.constant(batch, tf.int64), *bounds)[0].numpy().tolist()


def width_of(order, batch):
    return int(order.width(tf.constant(batch, tf.int64)))


@pytest.mark.slow
def test_every_epoch_has_every_row_once_in_batches_of_like_lengths():
    epochs = [[numbers_of(BY_LENGTH, batch) for batch in range(first, first + 206)] for first in (0, 206)]
    assert all(sorted(sum(epoch, [])) == list(range(1030)) for epoch in epochs) and epochs[0] != epochs[1]
    spread = [np.ptp(LENGTHS[rows]) for rows in epochs[0][:200]]
    assert max(spread) <= 12 and np.mean(spread) < 3
    widths = [width_of(BY_LENGTH, batch) for batch in range(206)]
    assert widths == [LENGTHS[rows].max() for rows in epochs[0]]
    assert abs(np.corrcoef(widths[:100], range(100))[0, 1]) < 0.3  # batches of a window are shuffled
    order = by_length(PLAIN, LENGTHS, (100, 20, 50))  # batches are padded to the next boundary
    assert {width_of(order, batch) for batch in range(50)} == {20, 50, 100}
    assert order.static_width is None and by_length(PLAIN, LENGTHS, [100]).static_width == 100


def test_any_batch_is_the_first_one_and_is_the_same_in_parts():
    fresh = by_length(PLAIN, LENGTHS, ())
    assert numbers_of(fresh, 10**6) == numbers_of(BY_LENGTH, 10**6)
    assert numbers_of(fresh, 7, 0, 2) + numbers_of(fresh, 7, 2, 5) == numbers_of(BY_LENGTH, 7)
    assert int(fresh.rows(tf.constant(300, tf.int64))[1][0]) == 1
    assert numbers_of(replace(BY_LENGTH, limit=3), 4) == numbers_of(BY_LENGTH, 206 + 1)


@pytest.mark.slow
def test_the_odd_batch_is_in_the_last_window_or_left_out():
    odd = by_length(replace(PLAIN, batch_size=8), LENGTHS, ())
    first, second = np.reshape([int(odd.size(tf.constant(batch, tf.int64))) for batch in range(258)], [2, 129]).tolist()
    assert sorted(first) == [6] + [8] * 128 and first.index(6) >= 100
    seen = [odd.seen(129 + batch)["data"] for batch in range(130)]
    assert np.diff(seen).tolist() == second
    dropped = replace(odd, drop_remainder=True)
    assert all(len(numbers_of(dropped, batch)) == 8 for batch in range(128)) and dropped.batches_per_epoch == 128


def with_mask(example, seed):
    return {"x": example["x"], "mask": tf.ones_like(example["x"]), "seed": seed}


@pytest.mark.slow
@pytest.mark.parametrize("map_fn", [None, with_mask])
def test_rows_are_read_and_padded_on_any_number_of_workers(map_fn):
    source = [{"x": np.arange(1, 1 + length), "y": np.int64(length)} for length in LENGTHS[:60]]
    data = distloop.make_dataset(source, 7, shuffle=True, seed=3, lengths=LENGTHS[:60], map_fn=map_fn)
    batches = list(data.starting_at(4).take(8))
    for number, batch in enumerate(batches, start=4):
        rows = numbers_of(data.order, number)
        assert batch["x"].shape == [len(rows), LENGTHS[rows].max()]
        assert np.count_nonzero(batch["x"], axis=1).tolist() == LENGTHS[rows].tolist()
        if map_fn is not None:
            np.testing.assert_array_equal(batch["mask"], np.minimum(batch["x"], 1))
    assert data.element_spec["x"].shape.as_list() == [None, None]
    half = len(batches[0]["x"]) // 2
    for worker, bounds in enumerate([slice(0, half), slice(half, None)]):
        part = next(iter(data.starting_at(4, worker_rows=WorkerRows(worker, 2, 2))))
        np.testing.assert_array_equal(part["x"][bounds], batches[0]["x"][bounds])
        assert part["x"].shape == batches[0]["x"].shape


THREE = [np.arange(length) for length in (3, 1, 2)]


def test_a_list_of_arrays_is_rows_where_it_has_as_many_lengths():
    batch = next(iter(distloop.make_dataset(THREE, 3, lengths=[3, 1, 2])))
    assert batch.numpy().tolist() == [[0, 0, 0], [0, 1, 0], [0, 1, 2]]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"lengths": [1, 2]}, r"lengths of int64 \[2\] were given for 3 rows"),
        ({"lengths": [1.0, 2.0, 3.0]}, r"lengths of float64 \[3\] were given"),
        ({"lengths": [1, 2, 9], "pad_to": [4, 8]}, "The longest row has 9, and pad_to ends at 8: add 9"),
        ({"lengths": [1, 1, 1], "source": np.arange(3)}, "all examples have the same shape: leave lengths out"),
        (
            {"lengths": [1, 1, 1], "source": tf.data.Dataset.range(3)},
            "map_fn, lengths, processes or a batch_size that changes were given with",
        ),
        ({"lengths": [1, 2, 3], "batch_size": {0: 1, 5: 2}}, "a batch_size that changes; use distloop.pack"),
        ({}, "or lengths, by which rows of like lengths are padded"),
    ],
)
def test_lengths_that_do_not_fit_are_refused(settings, words):
    with pytest.raises(ValueError, match=words):
        distloop.make_dataset(**{"source": [{"x": row} for row in THREE], "batch_size": 2, **settings})


ODD = [np.arange(1 + n % 7) for n in range(34)]  # 4 batches of 8, and 2 rows


def test_a_position_in_other_batches_is_refused():
    def facts_of(order):
        return {**order.facts_at({"batches": 9}), "order": 1}

    place = {"batches": 9, "skipped": [], **facts_of(BY_LENGTH)}
    assert converted(place, facts_of(BY_LENGTH)) is place
    assert converted({**place, "skipped": [7]}, facts_of(replace(BY_LENGTH, drop_remainder=True)))  # 5 divides 1030
    for other in (by_length(PLAIN, LENGTHS + 1, ()), by_length(replace(PLAIN, batch_size=6), LENGTHS, ())):
        with pytest.raises(ValueError, match="had batches by length, of 5 examples in windows of 500 "):
            converted(place, facts_of(other))
    with pytest.raises(ValueError, match="and the data given has no lengths"):
        converted(place, facts_of(PLAIN))


@pytest.mark.parametrize("limit", [0, 3])
@pytest.mark.parametrize("drops", [False, True])
def test_a_position_by_length_needs_the_odd_rows_as_they_were(drops, limit):
    def dataset(drop_remainder):
        data = distloop.make_dataset(
            [{"x": row} for row in ODD], 8, shuffle=True, lengths=list(map(len, ODD)), drop_remainder=drop_remainder
        )
        return data.take(limit) if limit else data

    def position_in(data):
        return json.loads(json.dumps({"batches": 3, "skipped": [], **data.facts_at({"batches": 3})}))

    given, other = dataset(drops), dataset(not drops)
    saved = position_in(given)
    old = {**saved, "lengths": saved["lengths"].partition(",")[0]}  # of a version that did not save it
    for position in (saved, old):
        assert given.convert(position, given.facts_at(position)) is position
    change = f"drop_remainder={drops}, and the data given has batches by length, .*, drop_remainder={not drops}: give"
    with pytest.raises(ValueError, match=change):
        other.convert(saved, other.facts_at(saved))
    if not limit:
        with pytest.raises(ValueError, match="had batches by length, of 8 examples in windows of 800 "):
            other.convert(old, other.facts_at(old))
    shorter = given.take(2)  # the same drop_remainder, and another limit
    assert shorter.convert(old, shorter.facts_at(old))["batches"] == 2

"""The order of a mixture's examples, as a function of a batch's number."""

import json
from dataclasses import replace

import numpy as np
import pytest
import tensorflow as tf

from distloop.data.order import Order
from distloop.mixtures.orders import MixedOrder, arrange

NAMES = ("web", "books", "code")
MIXED = MixedOrder(
    names=NAMES,
    rows_of=(50, 7, 20),
    shares=((0, (7, 2, 1)), (9, (1, 0, 2)), (20, (3, 3, 4))),
    batch_sizes=((0, 4), (15, 6)),
    examples_per_epoch=77,
    seed=3,
    is_shuffled=True,
)


def rows_of(order, batch, *bounds):
    rows, epochs = order.rows(tf.constant(batch, tf.int64), *bounds)
    return list(zip(rows.numpy().tolist(), epochs.numpy().tolist(), strict=True))


def sources_of(order, num_batches):
    rows = [row for batch in range(num_batches) for row, _ in rows_of(order, batch)]
    return np.searchsorted(np.cumsum(order.rows_of), rows, side="right")


@pytest.mark.parametrize("slots", [(1,), (7, 3), (1, 1, 1), (0, 5, 1), (9_001, 937, 61, 1), (1, 40, 1, 23, 5)])
def test_every_prefix_has_its_shares_up_to_one_example(slots):
    taken = np.cumsum(np.eye(len(slots))[arrange(slots)], axis=0)
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
    twins = replace(MIXED, rows_of=(20, 20, 20), shares=((0, (1, 1, 1)),))
    orders = [[row % 20 for row, _ in rows_of(twins, batch)] for batch in range(3)]
    assert len({tuple(np.ravel(orders)[source::3]) for source in range(3)}) == 3  # sources do not go in step


@pytest.mark.slow
def test_a_batch_is_the_same_in_parts_and_for_any_batch_size():
    whole = rows_of(MIXED, 18)
    assert rows_of(MIXED, 18, 0, 2) + rows_of(MIXED, 18, 2, 6) == whole
    fixed = replace(MIXED, batch_sizes=((0, 4),), shares=MIXED.shares[:1])
    other = replace(fixed, batch_sizes=((0, 10),))
    stream = [example for batch in range(20) for example in rows_of(fixed, batch)]
    assert [example for batch in range(8) for example in rows_of(other, batch)] == stream
    assert int(MIXED.size(tf.constant(14, tf.int64))) == 4 and int(MIXED.size(tf.constant(15, tf.int64))) == 6


def test_one_source_comes_in_the_order_that_it_has_alone():
    alone = Order(num_rows=12, batch_size=4, seed=3, is_shuffled=True)
    mixed = replace(MIXED, names=("web",), rows_of=(12,), shares=((0, (1,)),), batch_sizes=((0, 4),))
    assert all(rows_of(mixed, batch) == rows_of(alone, batch) for batch in range(7))


def test_limit_and_one_epoch():
    assert MIXED.batches_per_epoch == 20 and replace(MIXED, limit=3).batches_per_epoch == 3
    one = replace(MIXED, limit=3, is_one_epoch=True)
    assert rows_of(one, 7) == rows_of(MIXED, 1)
    assert list(one.seen(7).values()) == (2 * np.array(list(MIXED.seen(3).values())) + [3, 1, 0]).tolist()


def test_a_place_depends_on_the_stages_that_have_begun_and_on_no_other():
    def mixture(order, batch):
        return order.facts_at({"batches": batch})["mixture"]

    later = replace(MIXED, shares=(*MIXED.shares[:2], (20, (1, 1, 1)), (30, (5, 1, 1))))
    assert mixture(MIXED, 20) == mixture(later, 20) and "web 33.33 %, books 0 %, code 66.67 %" in mixture(later, 20)
    assert mixture(MIXED, 21) != mixture(later, 21)
    assert mixture(MIXED, 5) != mixture(replace(MIXED, rows_of=(50, 8, 20)), 5)
    many = replace(MIXED, names=tuple("a name that is long" + str(i) for i in range(90)), rows_of=(5,) * 90)
    many = replace(many, shares=((0, (1,) * 90),))
    assert len(json.dumps(many.facts_at({"batches": 10**9}))) < 500

"""Updates of a table's rows: the same as those of the whole table, and no other row is touched."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import distloop
from distloop.optimizers.gradients import Rows, write_rows
from distloop.optimizers.slot_store import SlotStore, View
from distloop.tables import row_updates
from distloop.tables.sparse_packing import to_slices

SHAPE = (6, 2)
NUMBERS = [[4, 1], [1, 5], [4, 5]]  # rows with a gradient, by step


def start():
    return np.linspace(-1, 1, 12).reshape(SHAPE).astype(np.float32)


def gradient_of(step):
    values = np.cos(np.arange(4).reshape([2, 2]) + step).astype(np.float32)
    return to_slices(Rows(tf.constant(NUMBERS[step], tf.int64), tf.constant(values)), SHAPE)


def train(optimizer, *, is_sparse, steps=3):
    """Returns the table and all slots after each step, eagerly, as a step applies them."""
    table = keras.Variable(start(), name="table")
    optimizer.build([table])
    row_updates.update_rows(optimizer)
    SlotStore(optimizer, [View(table, table, 1.0)])
    history = []
    for step in range(steps):
        gradient = gradient_of(step)
        is_kept = is_sparse and row_updates.why_dense(optimizer, table) is None
        optimizer.apply([gradient if is_kept else tf.convert_to_tensor(gradient)], [table])
        history.append([v.numpy().copy() for v in (table, *optimizer.variables) if v.shape == SHAPE])
    return history


BY_ROWS = {
    "SGD": lambda: keras.optimizers.SGD(0.1),
    "Adagrad": lambda: keras.optimizers.Adagrad(0.1),
    "schedule": lambda: keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)),
}
AS_A_WHOLE = {
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "SGD with decay": lambda: keras.optimizers.SGD(0.1, weight_decay=0.1),
    "Adam": lambda: keras.optimizers.Adam(0.1),
    "AdamW": lambda: keras.optimizers.AdamW(0.1),
    "RMSprop": lambda: keras.optimizers.RMSprop(0.1),
    "Ftrl": lambda: keras.optimizers.Ftrl(0.1),
}


@pytest.mark.parametrize("name", BY_ROWS)
def test_a_sparse_gradient_trains_a_table_as_its_dense_one(name):
    make = BY_ROWS[name]
    assert row_updates.why_dense(make(), keras.Variable(start())) is None
    for sparse, dense in zip(train(make(), is_sparse=True), train(make(), is_sparse=False), strict=True):
        for one, other in zip(sparse, dense, strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("name", AS_A_WHOLE)
def test_a_rule_that_moves_every_row_is_named_with_its_lazy_variant(name):
    why = row_updates.why_dense(AS_A_WHOLE[name](), keras.Variable(start()))
    assert "every row" in why or "moves rows without a gradient" in why
    assert name == "SGD with decay" or "distloop.Lazy" in why


def test_constraints_and_weight_decay_need_complete_tables():
    table = keras.Variable(start(), name="table")
    decayed = keras.optimizers.Adagrad(0.1, weight_decay=0.1)
    assert row_updates.why_dense(decayed, table) == "weight decay moves every row"
    decayed.exclude_from_weight_decay([table])
    assert row_updates.why_dense(decayed, table) is None
    table.constraint = keras.constraints.NonNeg()
    for optimizer in (decayed, distloop.LazyAdam()):
        assert "constraint" in row_updates.why_dense(optimizer, table)


def test_reads_after_an_update_share_the_memory_of_the_table():
    table = tf.Variable(start())
    write_rows(table, tf.constant([1]), tf.ones([1, 2]))
    row_updates.subtract_rows(table, tf.constant([1]), tf.ones([1, 2]))
    views = [np.asarray(memoryview(table.read_value())) for _ in range(2)]
    assert np.shares_memory(*views), "TensorFlow copied the table at each read"

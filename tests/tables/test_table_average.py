"""The average of a table, of which each step brings some rows up to date: its formula."""

import numpy as np
import pytest
import tensorflow as tf

from distloop.tables import row_updates
from distloop.tables.table_average import TableAverage
from tests.problems import assert_close

RATES = (0.5, 0.1, 0.2, 0.3, 0.05, 0.25)


def train(average, table, expected, is_sparse):
    """Adds 1 to some rows of the table in each step; returns the average that each step has by the formula."""
    for step, rate in enumerate(RATES):
        numbers = tf.constant([step % 3, 4])
        gradient = tf.IndexedSlices(tf.ones([2, 2]), numbers, tf.constant([5, 2])) if is_sparse(step) else tf.ones([5])
        average.touch(gradient)
        row_updates.subtract_rows(table, numbers, -tf.ones([2, 2]))
        average.move(tf.constant(rate))
        expected = expected + np.float32(rate) * (table.numpy() - expected)
        assert_close({"average": average.numpy()}, {"average": expected})
    return expected


@pytest.fixture
def table():
    return tf.Variable(tf.reshape(tf.range(10.0), [5, 2]))


def test_rows_are_brought_up_to_date_when_they_change_or_are_read(table):
    average = TableAverage(table)
    train(average, table, table.numpy(), lambda step: True)
    np.testing.assert_array_equal(average.stored["rows"].numpy()[3], [6.0, 7.0])  # no step has touched it


def test_after_a_gradient_that_is_not_sparse_all_rows_are_up_to_date(table):
    average = TableAverage(table)
    train(average, table, table.numpy(), lambda step: step != 4)
    train(average, table, average.numpy(), lambda step: False)
    assert average.raw() == {}


def test_what_is_stored_comes_back_and_a_step_elsewhere_moves_it(table):
    average, other = TableAverage(table), TableAverage(table)
    expected = train(average, table, table.numpy(), lambda step: True)
    other.restore_raw(average.raw())
    assert other.numpy().tobytes() == average.numpy().tobytes()
    other.touch(None)
    other.move(tf.constant(0.5))
    assert_close({"average": other.numpy()}, {"average": expected + 0.5 * (table.numpy() - expected)})
    average.assign(other.numpy())  # starts anew
    assert average.raw() == {} and other.numpy().tobytes() == average.numpy().tobytes()

"""Padding of examples whose shapes differ."""

import pytest
import tensorflow as tf

from distloop.data.padding import pad_row, pad_rows


def width(size):
    return tf.constant(size, tf.int64)


def test_free_axes_are_padded_with_zeros_or_empty_texts():
    spec = tf.TensorSpec([None, 2, None], tf.float32)
    assert pad_row(tf.ones([1, 2, 3]), spec, width(3)).numpy().tolist() == [[[1] * 3] * 2] + [[[0] * 3] * 2] * 2
    texts = pad_row(tf.constant(["a"]), tf.TensorSpec([None], tf.string), width(2))
    assert texts.numpy().tolist() == [b"a", b""]
    fixed = tf.ones([2])
    assert pad_row(fixed, tf.TensorSpec([2], tf.float32), width(9)) is fixed


def test_entries_of_many_rows_are_padded_at_once():
    values, shapes = tf.range(6), tf.constant([[2, 2], [1, 2]], tf.int64)
    padded = pad_rows(values, shapes, tf.TensorSpec([None, 2], tf.int32), width(3))
    assert padded.numpy().tolist() == [[[0, 1], [2, 3], [0, 0]], [[4, 5], [0, 0], [0, 0]]]


def test_an_example_that_is_too_long_is_refused():
    with pytest.raises(tf.errors.InvalidArgumentError, match="An example is longer than the longest of its batch"):
        pad_row(tf.ones([3]), tf.TensorSpec([None], tf.float32), width(2))
    with pytest.raises(tf.errors.InvalidArgumentError, match="lengths are those of the examples that are trained on"):
        pad_rows(tf.ones([3]), tf.constant([[3]], tf.int64), tf.TensorSpec([None], tf.float32), width(2))

"""Sparse gradients: some rows of a table's gradient; all other rows are 0.

    rows = from_slices(tape.gradient(loss, table))    # 64 x 8 lookups: numbers [512], values [512, width]
    rows = join([rows, of_another_microbatch])        # the sum, as a longer list
    rows = merge(rows)                                # each number once; its values are added in list order
    gradient = to_slices(rows, table.shape)           # or to_dense(rows, table.shape)

A table is a variable whose first axis counts its rows. It does not know who computes gradients or applies them.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import tensorflow as tf


class Rows(NamedTuple):
    """A sparse gradient; a number that occurs more than once stands for the sum of its values."""

    numbers: tf.Tensor  # [n] int64: which rows of the table
    values: tf.Tensor  # [n, width]: a row of several axes is flat


Segment: TypeAlias = tf.Tensor | Rows  # the flat gradients of some variables, or the rows of one table


def from_slices(gradient: tf.IndexedSlices, shape: Sequence[int]) -> Rows:
    """Returns the rows of a gradient from a tape.

    Args:
        gradient: indices `[n]`, values `[n, ...]`.
        shape: of the table, static.
    """
    numbers = tf.cast(tf.reshape(gradient.indices, [-1]), tf.int64)
    return Rows(numbers, tf.reshape(gradient.values, [tf.size(numbers), row_size(shape)]))


def to_slices(rows: Rows, shape: Sequence[int]) -> tf.IndexedSlices:
    """Returns rows as TensorFlow's optimizers take them; `shape` is that of the table."""
    values = tf.reshape(rows.values, [-1, *shape[1:]])
    return tf.IndexedSlices(values, rows.numbers, tf.constant(list(shape), tf.int64))


def to_dense(rows: Rows, shape: Sequence[int]) -> tf.Tensor:
    """Returns the whole gradient, `[rows of the table, width]`; duplicates are added in the order of the list."""
    return tf.math.unsorted_segment_sum(rows.values, rows.numbers, shape[0])


def row_size(shape: Sequence[int]) -> int:
    """Returns the elements in a row of a table."""
    return int(tf.TensorShape(shape[1:]).num_elements() or 1)


def join(parts: Sequence[Rows]) -> Rows:
    """Returns the sum of several parts: their lists, one after the other."""
    return Rows(*(tf.concat(tensors, 0) for tensors in zip(*parts, strict=True)))


def merge(rows: Rows) -> Rows:
    """Returns rows whose numbers differ, in the order in which each occurs first.

    The values of a number are added in the order of the list, so that the same list gives the same bits anywhere.
    """
    numbers, places = tf.unique(rows.numbers)
    return Rows(numbers, tf.math.unsorted_segment_sum(rows.values, places, tf.size(numbers)))


def values_of(gradient: Any) -> tf.Tensor:
    """Returns the elements of a gradient that may differ from 0; of merged rows, each element once."""
    return gradient.values if isinstance(gradient, (Rows, tf.IndexedSlices)) else gradient


def map_values(fn: Callable[..., tf.Tensor], gradient: Any, *others: Any) -> Any:
    """Returns a gradient with other values, which `fn` computes from its own and those of `others`; it maps 0 to 0."""
    values = fn(values_of(gradient), *map(values_of, others))
    if isinstance(gradient, Rows):
        return gradient._replace(values=values)
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return values

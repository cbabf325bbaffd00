"""Table rows: sparse gradients as rows of a table, and access to single rows of a variable.

    rows = Rows(numbers, values)
    rows = map_values(lambda values: 2.0 * values, rows)          # as of a dense gradient
    write_rows(table, rows.numbers, read_rows(table, rows.numbers) - rows.values)

A table is a variable whose first axis counts its rows. `tables/` makes such gradients, and applies them.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import tensorflow as tf

from distloop.variables import tensorflow_variable


class Rows(NamedTuple):
    """A sparse gradient; a number that occurs more than once stands for the sum of its values."""

    numbers: tf.Tensor  # [n] int64: which rows of the table
    values: tf.Tensor  # [n, width]: a row of several axes is flat


Segment: TypeAlias = tf.Tensor | Rows  # the flat gradients of some variables, or the rows of one table


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


def read_rows(variable: Any, numbers: tf.Tensor) -> tf.Tensor:
    """Returns rows of a variable by their numbers, `[n]`."""
    plain = tensorflow_variable(variable)
    rows = tf.raw_ops.ResourceGather(resource=plain.handle, indices=numbers, dtype=plain.dtype)
    return tf.ensure_shape(rows, [None, *plain.shape[1:]])


def write_rows(variable: Any, numbers: tf.Tensor, rows: tf.Tensor) -> None:
    """Writes rows of a variable; their numbers `[n]` differ."""
    handle = tensorflow_variable(variable).handle
    tf.raw_ops.ResourceScatterUpdate(resource=handle, indices=numbers, updates=rows)
    _read_without_copies(handle)


def _read_without_copies(handle: Any) -> None:
    """Lets reads of a variable share its memory again, which a scatter operation has ended for all later ones.

    Else each step's forward pass copies the table: 229 ms instead of 0.4 at a million rows of 32. A read that somebody
    still holds when the next scatter comes is copied then.
    """
    tf.raw_ops.DisableCopyOnRead(resource=handle)

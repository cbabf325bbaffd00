"""Padding of examples whose shapes differ, so that the rows of a batch can be stacked.

It does not know how long the rows of a batch are.
"""

import tensorflow as tf

from distloop.errors import require

_TOO_LONG = (
    "An example is longer than the longest of its batch in the lengths given to make_dataset: lengths are those of the "
    "examples that are trained on, after map_fn."
)


def pad_row(entry: tf.Tensor, spec: tf.TensorSpec, width: tf.Tensor) -> tf.Tensor:
    """Returns an entry of an example, padded with zeros, or empty texts, to a width in each axis that is free.

    Args:
        entry: of one example.
        spec: of the entry in all examples.
        width: int64 [].
    """
    if spec.shape.is_fully_defined():
        return entry
    shape = tf.shape(entry, tf.int64)
    missing = [width - shape[axis] if size is None else 0 for axis, size in enumerate(spec.shape)]
    fits = require(tf.reduce_all([count >= 0 for count in missing]), _TOO_LONG)
    ends = tf.where(fits, tf.stack([tf.cast(count, tf.int64) for count in missing]), 0)
    padded = tf.pad(entry, tf.stack([tf.zeros_like(ends), ends], 1))
    return tf.ensure_shape(padded, spec.shape)


def pad_rows(values: tf.Tensor, shapes: tf.Tensor, spec: tf.TensorSpec, width: tf.Tensor) -> tf.Tensor:
    """Returns entries of several examples that differ in their first axis alone, padded and stacked, `[b, width, ...]`.

    Args:
        values: of all entries, one after the other.
        shapes: of the entries, int64 [b, rank].
        spec: of the entry in all examples.
        width: int64 [].
    """
    lengths = shapes[:, 0]
    fits = require(tf.reduce_all(lengths <= width), _TOO_LONG)
    rest = spec.shape[1:].as_list()
    ragged = tf.RaggedTensor.from_row_lengths(tf.reshape(values, [-1, *rest]), lengths, validate=False)
    shape = tf.stack([tf.constant(-1, tf.int64), tf.where(fits, width, 0), *(tf.constant(n, tf.int64) for n in rest)])
    padded = ragged.to_tensor(shape=shape)
    padded.set_shape([None, None, *rest])
    return padded

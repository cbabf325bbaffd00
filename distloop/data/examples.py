"""Common types and shapes of examples, which are structures of NumPy arrays, and their padding.

    spec = common_spec("the rows", [example, other])        # "ids": int64 [None]

It does not know where examples come from.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from distloop.errors import require

_TOO_LONG = (
    "An example is longer than the longest of its batch in the lengths given to make_dataset: lengths are those of the "
    "examples that are trained on, after map_fn."
)


def common_spec(name: str, examples: list[Any]) -> Any:
    """Returns the spec that fits some examples of one structure; an axis in which they differ is free.

    Args:
        name: of what they are examples, for a sentence.
        examples: from `as_example`.

    Raises:
        ValueError: if entries differ in types or numbers of axes, or TensorFlow has no such type.
    """
    return tf.nest.map_structure(lambda *arrays: _common_spec(name, arrays), *examples)


def _common_spec(name: str, arrays: tuple[np.ndarray, ...]) -> tf.TensorSpec:
    typed = [array for array in arrays if array.size] or arrays  # an empty list has no type
    has_other_objects = any(a.dtype == object and not all(isinstance(v, (str, bytes)) for v in a.flat) for a in arrays)
    if len({array.dtype for array in typed}) > 1 or len({array.ndim for array in arrays}) > 1 or has_other_objects:
        raise ValueError(
            f"Rows of {name} have an entry of {' and '.join(sorted({describe(a) for a in arrays}))}; an "
            "entry is an array, a number or a text, with the same type and number of axes in all rows."
        )
    sizes_by_axis = zip(*(array.shape for array in arrays), strict=True)
    axes = [sizes[0] if len(set(sizes)) == 1 else None for sizes in sizes_by_axis]
    return tf.TensorSpec(axes, tf.string if typed[0].dtype == object else tf.as_dtype(typed[0].dtype))


def describe(example: Any) -> str:
    """Returns types and shapes of an example, or of the spec of one, for a sentence."""
    if isinstance(example, tf.TensorSpec):
        return f"{example.dtype.name} {example.shape.as_list()}"
    if isinstance(example, np.ndarray):
        is_other = example.dtype == object and not example.ndim and not isinstance(example.item(), (str, bytes))
        return type(example.item()).__name__ if is_other else f"{example.dtype.name} {list(example.shape)}"
    if isinstance(example, Mapping):
        return "{" + ", ".join(f"{name!r}: {describe(entry)}" for name, entry in example.items()) + "}"
    return "(" + ", ".join(describe(entry) for entry in example) + ")"


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


def pad_rows(entries: Sequence[np.ndarray], spec: tf.TensorSpec, width: int) -> np.ndarray:
    """Returns entries of several examples, padded as by `pad_row` and stacked, `[b, ...]`; the errors are the same."""
    shape = [width if size is None else size for size in spec.shape]
    dtype = spec.dtype.as_numpy_dtype
    padded = np.full([len(entries), *shape], b"" if dtype is object else 0, dtype)
    for row, entry in zip(padded, entries, strict=True):
        if any(size > most for size, most in zip(entry.shape, shape, strict=True)):
            raise ValueError(_TOO_LONG)
        row[tuple(map(slice, entry.shape))] = entry
    return padded

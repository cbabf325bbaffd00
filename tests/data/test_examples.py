"""Examples as structures of NumPy arrays, and the padding of those whose shapes differ."""

from typing import NamedTuple

import numpy as np
import pytest
import tensorflow as tf

from distloop.data.examples import describe, pad_row, pad_rows
from distloop.data.python_rows import as_example
from tests.data.python_batches import Tensor


class Pair(NamedTuple):
    x: float
    y: int


@pytest.mark.parametrize(
    ("example", "words"),
    [
        (0.5, "float32 []"),
        (np.float64(0.5), "float32 []"),  # which is a Python float
        (np.zeros(2), "float64 [2]"),
        ((0.5, 3), "(float32 [], int64 [])"),  # inputs and label
        (Pair(0.5, 3), "(float32 [], int64 [])"),
        ((Tensor([1.5, 2.5]), 3), "(float64 [2], int64 [])"),
        ({"ids": [1, 2], "texts": ["a", "bc"]}, "{'ids': int64 [2], 'texts': object [2]}"),
        ([[1, 2, 3], [4, 5, 6]], "int64 [2, 3]"),
        ([[[0.5]], [[1.5]]], "float32 [2, 1, 1]"),
        ([[1, 2], [3]], "(int64 [2], int64 [1])"),
        ([np.zeros(2), 1], "(float64 [2], int64 [])"),
        ([], "float32 [0]"),
        (True, "bool []"),
        (None, "NoneType"),
    ],
)
def test_examples_become_arrays(example, words):
    assert describe(as_example(example)) == words


def test_texts_keep_zeros_at_their_end_and_a_named_tuple_stays_one():
    assert as_example(b"a\0").item() == b"a\0" and as_example([b"a\0", b"b"]).tolist() == [b"a\0", b"b"]
    assert as_example(Pair(0.5, 3)).y == 3


def padded(row, shape, width):
    row = tf.constant(row)
    return pad_row(row, tf.TensorSpec(shape, row.dtype), tf.constant(width, tf.int64)).numpy().tolist()


def test_free_axes_are_padded_and_a_longer_example_is_refused():
    assert padded(np.ones([1, 2, 3]), [None, 2, None], 3) == [[[1] * 3] * 2] + [[[0] * 3] * 2] * 2
    assert padded(["a"], [None], 2) == [b"a", b""]
    fixed = tf.ones([2])
    assert pad_row(fixed, tf.TensorSpec([2], tf.float32), tf.constant(9, tf.int64)) is fixed
    with pytest.raises(tf.errors.InvalidArgumentError, match="An example is longer than the longest of its batch"):
        padded(np.ones(3), [None], 2)


def test_entries_of_many_rows_are_padded_at_once():
    rows = [np.array([[0, 1], [2, 3]]), np.array([[4, 5]])]
    found = pad_rows(rows, tf.TensorSpec([None, 2], tf.int32), 3)
    assert found.dtype == np.int32 and found.tolist() == [[[0, 1], [2, 3], [0, 0]], [[4, 5], [0, 0], [0, 0]]]
    texts = pad_rows([np.array(["a"], object)], tf.TensorSpec([None], tf.string), 2)
    assert texts.tolist() == [["a", b""]]
    with pytest.raises(ValueError, match="lengths are those of the examples that are trained on"):
        pad_rows([np.ones([3])], tf.TensorSpec([None], tf.float32), 2)

"""Examples as structures of NumPy arrays."""

from typing import NamedTuple

import numpy as np
import pytest
import tensorflow as tf

from distloop.data.examples import as_example, common_spec, describe


class Pair(NamedTuple):
    x: float
    y: int


class Tensor:
    """As PyTorch's, on another device and with a gradient."""

    def __init__(self, values):
        self.values = values

    def detach(self):
        return self

    def cpu(self):
        return np.asarray(self.values)


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


def test_texts_keep_zeros_at_their_end():
    assert as_example(b"a\0").item() == b"a\0" and as_example([b"a\0", b"b"]).tolist() == [b"a\0", b"b"]


def test_a_named_tuple_stays_one():
    assert as_example(Pair(0.5, 3)).y == 3


def test_examples_have_a_common_spec():
    spec = common_spec("the rows", [as_example({"a": part, "b": "x"}) for part in ([1], [2, 3], [])])
    assert spec == {"a": tf.TensorSpec([None], tf.int64), "b": tf.TensorSpec([], tf.string)}
    assert common_spec("the rows", [as_example([])] * 2) == tf.TensorSpec([0], tf.float32)
    with pytest.raises(ValueError, match=r"Rows of the rows have an entry of float32 \[\] and int64 \[\]; an entry is"):
        common_spec("the rows", [as_example(1), as_example(0.5)])

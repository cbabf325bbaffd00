"""Values that workers exchange arrive as they were sent."""

import math

import ml_dtypes
import numpy as np
import pytest

from distloop.distributed import payloads


def exchanged(value):
    return payloads.decode(payloads.encode(value))


@pytest.mark.parametrize(
    "value",
    [None, True, -3, 2**70, 0.1, math.inf, "é", [], [1, [2.5, None]], {}, {"dict": {"array": "x"}, "": [{"a": 1}]}],
)
def test_values_of_json_arrive_as_they_are(value):
    assert exchanged(value) == value


@pytest.mark.parametrize("dtype", ["float16", "float32", "int8", "uint64", "bool", "complex64", "U3", "S2", "M8[s]"])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0), (2, 3)])
def test_arrays_arrive_with_dtype_and_shape(dtype, shape):
    assert_arrives(np.arange(math.prod(shape)).reshape(shape).astype(dtype))


def assert_arrives(array):
    arrived = exchanged({"array": array})["array"]
    assert isinstance(arrived, np.ndarray) and arrived.dtype == array.dtype and arrived.shape == array.shape
    np.testing.assert_array_equal(arrived, array)


@pytest.mark.parametrize("array", [np.float32([[1, 2, 3], [4, 5, 6]]).T, np.int64([[1, 2, 3], [4, 5, 6]])[:, ::-2]])
def test_arrays_arrive_whatever_the_order_of_their_memory(array):
    assert not array.flags.c_contiguous
    assert_arrives(array)


def test_scalars_of_numpy_stay_scalars_and_keep_their_bits():
    arrived = exchanged([np.float32(0.1), np.int64(2**62 + 1), np.float64("nan")])
    assert [type(value) for value in arrived] == [np.float32, np.int64, np.float64]
    assert arrived[:2] == [np.float32(0.1), 2**62 + 1] and math.isnan(arrived[2])


def test_tuples_become_lists():
    assert exchanged({"shape": (2, 3)}) == {"shape": [2, 3]}


@pytest.mark.parametrize(
    "value", [object(), {1: 2}, {"a": {3}}, b"bytes", np.array([None]), np.zeros(2, ml_dtypes.bfloat16)]
)
def test_other_values_are_refused_in_a_sentence(value):
    with pytest.raises(ValueError, match=r"of type \w+ was given to exchange between workers; they exchange None, .*"):
        payloads.encode(value)

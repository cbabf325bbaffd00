"""Questions about workers, on strategies of one process; tests/test_workers.py has several processes."""

import math

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

from distloop.distributed import collectives
from distloop.distributed.strategies import make_strategy
from tests.problems import on


@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_a_single_process_is_the_chief_with_all_replicas_and_no_heartbeat(replicas):
    strategy = make_strategy(on(replicas))
    assert collectives.num_workers(strategy) == 1
    assert collectives.worker_index(strategy) == 0
    assert collectives.num_local_replicas(strategy) == replicas
    assert collectives.is_chief(strategy)
    assert collectives.heartbeat_of(strategy) is None
    collectives.report_phase(strategy, "evaluating")  # to nobody


def test_one_worker_meets_itself_and_sums_its_replicas_once():
    strategy, vote = make_strategy(on(2)), collectives.Vote(step=3, has_ended=True)
    assert collectives.exchange(strategy, vote) == [vote] and collectives.gather(strategy, 3.5) == [3.5]
    total = tf.function(lambda value: collectives.sum_over_workers(strategy, value))(tf.constant([1.0, 2.0]))
    np.testing.assert_array_equal(total, [1.0, 2.0])


@pytest.mark.parametrize("value", [None, 1.5, "text", {"rows": [1, 2]}])
def test_one_worker_exchanges_values_with_itself(value):
    one = collectives.Workers(make_strategy(on(2)))
    assert (one.index, one.count, one.is_chief) == (0, 1, True)
    one.barrier()
    assert one.gather(value) == [value] and one.broadcast(value) == value
    assert one.broadcast((1, value)) == [1, value]  # as several would
    with pytest.raises(ValueError, match=r"^<object .* of type object was given to exchange between workers"):
        one.gather(object())


def exchanged(value):
    return collectives.decode(collectives.encode(value))


@pytest.mark.parametrize(
    "value",
    [None, True, -3, 2**70, 0.1, math.inf, "é", [], [1, [2.5, None]], {}, {"dict": {"array": "x"}, "": [{"a": 1}]}],
)
def test_values_of_json_arrive_as_they_are(value):
    assert exchanged(value) == value


def assert_arrives(array):
    arrived = exchanged({"array": array})["array"]
    assert isinstance(arrived, np.ndarray) and arrived.dtype == array.dtype and arrived.shape == array.shape
    np.testing.assert_array_equal(arrived, array)


@pytest.mark.parametrize("dtype", ["float16", "float32", "int8", "uint64", "bool", "complex64", "U3", "S2", "M8[s]"])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0), (2, 3)])
def test_arrays_arrive_with_dtype_and_shape_in_any_memory_order(dtype, shape):
    array = np.arange(math.prod(shape)).reshape(shape).astype(dtype)
    for other in (array, array.T, array[..., ::-2] if shape else array):
        assert_arrives(other)


def test_scalars_of_numpy_stay_scalars_and_keep_their_bits():
    assert exchanged({"shape": (2, 3)}) == {"shape": [2, 3]}  # a tuple becomes a list
    arrived = exchanged([np.float32(0.1), np.int64(2**62 + 1), np.float64("nan")])
    assert [type(value) for value in arrived] == [np.float32, np.int64, np.float64]
    assert arrived[:2] == [np.float32(0.1), 2**62 + 1] and math.isnan(arrived[2])


@pytest.mark.parametrize(
    "value", [object(), {1: 2}, {"a": {3}}, b"bytes", np.array([None]), np.zeros(2, ml_dtypes.bfloat16)]
)
def test_other_values_are_refused_in_a_sentence(value):
    with pytest.raises(ValueError, match=r"of type \w+ was given to exchange between workers; they exchange None, .*"):
        collectives.encode(value)

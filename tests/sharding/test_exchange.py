"""Tensors travel between workers bit for bit, in few messages or many, and each sum arrives where it is wanted."""

import unittest.mock

import numpy as np
import pytest
import tensorflow as tf

import distloop
from distloop.distributed import collectives, tensorflow_internals
from distloop.distributed.strategies import make_strategy
from distloop.sharding.exchange import Exchange
from tests import forked

WORKERS = 3
DTYPES = ["float32", "float16", "bfloat16", "float64", "int32", "int64"]
SIZES = [0, 1, 7, 100, 1000]
OWNERS = [2, 0, 1, 2, 0]


def tensors(worker, dtype):
    """Tensors of one worker whose sums are exact in every dtype."""
    return [tf.cast(tf.range(size) % 50 + 10 * worker, dtype) for size in SIZES]


def exchange():
    """Returns the sums and values that a worker gets, by dtype."""
    strategy = make_strategy(distloop.Config(device="cpu"))
    worker, between = collectives.worker_index(strategy), Exchange(strategy)

    @tf.function(autograph=False)
    def exchanged():
        results = {}
        for dtype in DTYPES:
            own = tensors(worker, dtype)
            specs = [t if s == worker else tf.TensorSpec(t.shape, dtype) for t, s in zip(own, OWNERS, strict=True)]
            found = [*between.collect(own, OWNERS), *between.broadcast(specs, OWNERS)]
            results[dtype] = [tf.cast(value, tf.float64) for value in found]
        return results

    with unittest.mock.patch.object(tensorflow_internals, "LARGEST_MESSAGE_BYTES", 256):
        for _ in range(2):  # a second run of the same graph
            results = exchanged()
    return tf.nest.map_structure(lambda value: value.numpy(), results)


@pytest.mark.slow
def test_sums_arrive_on_their_owner_alone_and_values_on_every_worker():
    for worker, results in enumerate(forked.run_in_workers(exchange, WORKERS)):
        for dtype in DTYPES:
            of_workers = [[np.asarray(tf.cast(t, tf.float64)) for t in tensors(w, dtype)] for w in range(WORKERS)]
            sums = [sum(of[i] for of in of_workers) if owner == worker else [] for i, owner in enumerate(OWNERS)]
            values = [of_workers[owner][i] for i, owner in enumerate(OWNERS)]
            for i, (found, expected) in enumerate(zip(results[dtype], sums + values, strict=True)):
                np.testing.assert_array_equal(found, expected, f"{dtype} {i} on {worker}")

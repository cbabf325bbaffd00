"""Tensors travel between workers bit for bit, in few messages or many, and each sum arrives where it is wanted."""

import json
import os
import sys
import unittest.mock

import numpy as np
import pytest
import tensorflow as tf

import distloop
from distloop.distributed import tensorflow_internals
from distloop.distributed.strategies import make_strategy
from distloop.sharding import sharding
from tests import forked

WORKERS = 3
DTYPES = ["float32", "float16", "bfloat16", "float64", "int32", "int64"]
SIZES = [0, 1, 7, 100, 1000]
OWNERS = [2, 0, 1, 2, 0]


def tensors(worker, dtype):
    """Tensors of one worker whose sums are exact in every dtype."""
    return [tf.cast(tf.range(size) % 50 + 10 * worker, dtype) for size in SIZES]


def main(out):
    distloop.prepare(distloop.Config(device="cpu"))
    strategy = make_strategy(distloop.Config(device="cpu"))
    worker = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    between = sharding.Exchange(strategy)

    @tf.function(autograph=False)
    def exchanged():
        results = {}
        for dtype in DTYPES:
            own = tensors(worker, dtype)
            sums = between.collect(own, OWNERS)
            specs = [t if s == worker else tf.TensorSpec(t.shape, dtype) for t, s in zip(own, OWNERS, strict=True)]
            values = between.broadcast(specs, OWNERS)
            results |= {f"{dtype}/sum/{i}": value for i, value in enumerate(sums)}
            results |= {f"{dtype}/value/{i}": value for i, value in enumerate(values)}
        return {name: tf.cast(value, tf.float64) for name, value in results.items()}

    with unittest.mock.patch.object(tensorflow_internals, "LARGEST_MESSAGE_BYTES", 256):
        for _ in range(2):  # a second run of the same graph
            results = exchanged()
    np.savez(os.path.join(out, f"{worker}.npz"), **{name: value.numpy() for name, value in results.items()})


@pytest.mark.slow
def test_sums_arrive_on_their_owner_alone_and_values_on_every_worker(tmp_path):
    program = ["-m", "tests.sharding.test_exchange", str(tmp_path)]
    done = forked.launch([f"--workers={WORKERS}", *program], env=os.environ, timeout=100)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    for worker in range(WORKERS):
        found = np.load(tmp_path / f"{worker}.npz")
        for dtype in DTYPES:
            of_workers = [tensors(w, dtype) for w in range(WORKERS)]
            for i, owner in enumerate(OWNERS):
                total = sum(np.asarray(tf.cast(of[i], tf.float64)) for of in of_workers)
                expected = total if owner == worker else np.zeros([0])
                np.testing.assert_array_equal(found[f"{dtype}/sum/{i}"], expected, f"{dtype} {i} on {worker}")
                value = np.asarray(tf.cast(of_workers[owner][i], tf.float64))
                np.testing.assert_array_equal(found[f"{dtype}/value/{i}"], value, f"{dtype} {i} on {worker}")


if __name__ == "__main__":
    main(sys.argv[1])

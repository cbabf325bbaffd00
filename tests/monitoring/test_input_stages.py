"""The closing lines of real runs name the stage of the input that is slow."""

import itertools
import re
import time
import types

import keras
import numpy as np
import pytest
import tensorflow as tf

import distloop
from distloop.data import python_rows, rows
from distloop.monitoring import timing
from tests.problems import mostly_wide, on

pytestmark = pytest.mark.slow
SECS = 0.004  # a row


class Rows:
    """Rows that take as long as is said to be read, of some numbers."""

    def __init__(self, secs=0.0, size=4):
        self.secs, self.row = secs, np.ones(size, np.float32)

    def __len__(self):
        return 10_000

    def __getitem__(self, number):
        if self.secs:
            time.sleep(self.secs)
        return {"x": self.row}


def slowly(example, seed):
    """A map_fn that TensorFlow cannot trace."""
    time.sleep(SECS)
    return {"x": np.asarray(example["x"]) + 1}


def traced(example, seed):
    product = tf.linalg.matmul(tf.ones([500, 500]) * example["x"][0], tf.ones([500, 500]))
    return {"x": tf.reduce_mean(tf.linalg.matmul(product, product), 0)[:4]}


class ArrayOnDisk:
    """An array that is not in memory, whose rows are slow."""

    shape, dtype, filename = (10_000, 4), np.dtype("float32"), "slow"

    def __getitem__(self, number):
        time.sleep(SECS)
        return np.ones([len(range(*number.indices(10_000))), 4] if isinstance(number, slice) else 4, np.float32)


def slow_batches():
    while True:
        time.sleep(4 * SECS)
        yield {"x": np.ones([8, 4], np.float32)}


def mapped_slowly():
    sleep = lambda x: tf.numpy_function(lambda x: time.sleep(SECS) or x, [x], tf.float32)  # noqa: E731
    return tf.data.Dataset.from_tensors(np.ones(4, np.float32)).repeat().map(sleep).shuffle(8)


def batched():
    examples = mapped_slowly().map(lambda x: {"x": tf.ensure_shape(x, [4])})
    return examples.batch(8)


LARGE = 400_000  # numbers in a row
CASES = {
    "reading a source": (lambda: distloop.make_dataset(Rows(SECS), 8, shuffle=True), "reading"),
    "map_fn of Python": (lambda: distloop.make_dataset(Rows(), 8, map_fn=slowly), "map_fn"),
    "map_fn in processes": (lambda: distloop.make_dataset(Rows(), 8, map_fn=slowly, processes=2), "map_fn"),
    "reading in processes": (lambda: distloop.make_dataset(Rows(SECS), 8, processes=2), "reading"),
    "copying from processes": (lambda: distloop.make_dataset(Rows(size=LARGE), 8, processes=1), "copying"),
    "map_fn of TensorFlow over arrays": (lambda: distloop.make_dataset(ARRAYS, 8, map_fn=traced), "map_fn"),
    "map_fn of TensorFlow over a source": (lambda: distloop.make_dataset(Rows(), 8, map_fn=traced), "map_fn"),
    "reading before a map_fn of TensorFlow": (
        lambda: distloop.make_dataset(Rows(SECS), 8, map_fn=lambda e, seed: {"x": e["x"] + 1}),
        "reading",
    ),
    "batching large rows": (lambda: distloop.make_dataset(Rows(size=LARGE), 64), "batching"),
    "reading arrays on disk": (lambda: distloop.make_dataset({"x": ArrayOnDisk()}, 8, shuffle=True), "reading"),
    "a function over batches": (
        lambda: distloop.make_dataset(ARRAYS, 8).map(
            lambda b: {"x": tf.ensure_shape(tf.numpy_function(slow_copy, [b["x"]], tf.float32), [None, 4])}
        ),
        "Map",
    ),
    "a generator": (lambda: slow_batches, "Generator"),
    "a pipeline of tf.data": (batched, "Map"),
}
KEPT = ["reading a source", "map_fn in processes", "copying from processes", "batching large rows", "a generator"]
KEPT += ["a pipeline of tf.data"]
ARRAYS = {"x": np.ones([10_000, 4], np.float32)}


def slow_copy(x):
    time.sleep(4 * SECS)
    return x


def model_fn():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    loss_fn = lambda batch, training: {"loss": model(batch["x"][:, :4])[:, 0]}  # noqa: E731
    return distloop.ModelSpec(model, keras.optimizers.SGD(0.0), loss_fn)


@pytest.mark.parametrize("case", mostly_wide(CASES, *KEPT))
def test_the_stage_that_is_slow_is_named(case, monkeypatch, capsys):
    monkeypatch.setattr(timing, "VERDICT_SECS", 0.0)
    make, stage = CASES[case]
    distloop.Trainer(model_fn, on(1, console="lines")).fit(make(), steps=25)
    lines = [line for line in capsys.readouterr().out.splitlines() if "time: " in line or " of the time " in line]
    time_line, hint = lines
    assert re.search(rf"input \([0-9.]+ s of {stage}\b", time_line), time_line
    assert re.search(rf"went by waiting for data, most of it in {stage}: try ", hint), hint


def test_the_clock_is_read_a_few_times_a_batch(monkeypatch):
    data = distloop.make_dataset(Rows(), 64, map_fn=slowly)
    reads = itertools.count()
    clock = types.SimpleNamespace(perf_counter=lambda: float(next(reads)), monotonic=time.monotonic)
    monkeypatch.setattr(python_rows, "time", clock)
    monkeypatch.setattr(rows, "time", clock)
    data._reader._is_slow = False
    next(iter(data.starting_at(0).prefetch(0).take(1)))
    assert next(reads) <= 8 * 8  # batches are read ahead


def test_two_calls_of_fit_have_seconds_of_their_own(monkeypatch, capsys):
    monkeypatch.setattr(timing, "VERDICT_SECS", 0.0)
    trainer, data = distloop.Trainer(model_fn, on(1, console="lines")), distloop.make_dataset(Rows(0.05), 8)
    secs = []  # rows are slower than a step of a busy machine, which would wait for none
    for until in (30, 33):
        trainer.fit(data, steps=until)
        shown = re.search(r"input \(([0-9.]+) s of reading", capsys.readouterr().out)
        secs.append(float(shown[1]) if shown else 0.0)  # the start of three steps may take all of the time
    assert secs[1] < secs[0]

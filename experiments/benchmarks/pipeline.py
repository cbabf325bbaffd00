"""Pipeline: the time of a step in two stages, by number of microbatches.

    python -m experiments.benchmarks.pipeline

Eight dense layers of 512, batches of 512 rows; each device is a virtual CPU. Two stages with two threads, and beside
them one thread that does all the work, each in a process of its own. Other work on the machine changes the times.
"""

import concurrent.futures
import multiprocessing
import statistics
import time

import keras
import numpy as np
import tensorflow as tf
from absl import app, flags

import distloop

WIDTH, LAYERS, ROWS = 512, 8, 512
MICROBATCHES = flags.DEFINE_list("microbatches", ["1", "2", "4", "8"], "Numbers of microbatches to time.")
TURNS = flags.DEFINE_integer("turns", 8, "Turns per number of microbatches, ten steps each.")


def model_fn(num_stages):
    dense = [keras.layers.Dense(WIDTH, activation="relu") for _ in range(LAYERS)]
    model = distloop.split(keras.Sequential([keras.Input((WIDTH,)), *dense]), num_stages)

    def loss_fn(batch, training):
        return {"loss": tf.reduce_mean(tf.square(model(batch, training=training)), -1)}

    return distloop.ModelSpec(model, keras.optimizers.SGD(0.01), loss_fn)


def make_trainer(num_stages, microbatches):
    config = distloop.Config(
        device="cpu",
        strategy="none",
        num_stages=num_stages,
        microbatches=microbatches,
        console="quiet",
        log_every=0,
        executor="parallel",
    )
    return distloop.Trainer(lambda: model_fn(num_stages), config)


def time_steps(num_stages, threads, counts, turns):
    """Returns the median seconds per step for each number of microbatches."""
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(threads)
    distloop.prepare(distloop.Config(device="cpu", num_stages=num_stages))
    data = tf.data.Dataset.from_tensors(np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype(np.float32)).repeat()
    trainers = {count: make_trainer(num_stages, count) for count in counts}
    step_secs = {count: [] for count in counts}
    for trainer in trainers.values():
        trainer.fit(data, steps=5)
    for _ in range(turns):
        for count, trainer in trainers.items():
            begun = time.perf_counter()
            trainer.fit(data, steps=trainer.step + 10)
            step_secs[count].append((time.perf_counter() - begun) / 10)
    return {count: statistics.median(secs) for count, secs in step_secs.items()}


def in_new_process(function, *arguments):
    """Calls a function in a new process, where TensorFlow has not started, and returns its result."""
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(function, *arguments).result()


def main(_):
    counts = [int(count) for count in MICROBATCHES.value]
    serial = in_new_process(time_steps, 1, 1, counts, TURNS.value)
    pipeline = in_new_process(time_steps, 2, 2, counts, TURNS.value)
    print("microbatches; ms per step on one thread, in 2 stages; 2 stages / one thread, / one thread uncut, / 2 uncut")
    for count in counts:
        ratios = [pipeline[count] / base for base in (serial[count], serial[counts[0]], pipeline[counts[0]])]
        print(count, *(f"{secs[count] * 1e3:.1f}" for secs in (serial, pipeline)), *(f"{r:.2f}" for r in ratios))


if __name__ == "__main__":
    app.run(main)

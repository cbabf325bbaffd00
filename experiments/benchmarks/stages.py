"""What stages gain and keep: the time of a step by number of microbatches, and the memory that its activations take.

    python -m experiments.benchmarks.stages

Eight dense layers of 512, each device a virtual CPU. Times: batches of 512 rows, two threads for two stages, turn by
turn in one process; beside them one thread, which does all the work alone. Memory: batches of 8,192 rows, what each
device holds at its peak, variables included, from the profile of a step. A machine that does something else gives other
times.
"""

import concurrent.futures
import itertools
import multiprocessing
import statistics
import tempfile
import time

import keras
import numpy as np
import tensorflow as tf
from absl import app, flags

import distloop

WIDTH, LAYERS = 512, 8
MICROBATCHES = flags.DEFINE_list("microbatches", ["1", "2", "4", "8"], "Into how many parts batches are cut.")
TURNS = flags.DEFINE_integer("turns", 8, "How often each number of microbatches is timed, ten steps each.")


def model_fn(num_stages, recompute=False, devices=None):
    dense = [keras.layers.Dense(WIDTH, activation="relu") for _ in range(LAYERS)]
    model = distloop.split(keras.Sequential([keras.Input((WIDTH,)), *dense]), num_stages, devices, recompute=recompute)

    def loss_fn(batch, training):
        return {"loss": tf.reduce_mean(tf.square(model(batch, training=training)), -1)}

    return distloop.ModelSpec(model, keras.optimizers.SGD(0.01), loss_fn)


def make_trainer(num_stages, microbatches, recompute=False, devices=None, **settings):
    config = distloop.Config(
        device="cpu",
        strategy="none",
        num_stages=num_stages,
        microbatches=microbatches,
        console="quiet",
        log_every=0,
        executor="parallel",
        **settings,
    )
    return distloop.Trainer(lambda: model_fn(num_stages, recompute, devices), config)


def make_data(rows):
    return tf.data.Dataset.from_tensors(np.random.default_rng(0).normal(size=(rows, WIDTH)).astype(np.float32)).repeat()


def start(num_stages, threads):
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(threads)
    distloop.prepare(distloop.Config(device="cpu", num_stages=num_stages))


def time_steps(num_stages, threads, counts, turns):
    """Measures the median time of a step, in seconds, for each number of microbatches."""
    start(num_stages, threads)
    data = make_data(512)
    trainers = {count: make_trainer(num_stages, count) for count in counts}
    took = {count: [] for count in counts}
    for trainer in trainers.values():
        trainer.fit(data, steps=5)
    for _ in range(turns):
        for count, trainer in trainers.items():
            begun = time.perf_counter()
            trainer.fit(data, steps=trainer.step + 10)
            took[count].append((time.perf_counter() - begun) / 10)
    return {count: statistics.median(times) for count, times in took.items()}


def peaks(num_stages, microbatches, recompute):
    """Measures what each stage's device holds at its peak, in GB; all of one stage is on the second device."""
    start(max(2, num_stages), 2)
    devices = [f"CPU:{1 if num_stages == 1 else stage}" for stage in range(num_stages)]
    with tempfile.TemporaryDirectory() as directory:
        trainer = make_trainer(num_stages, microbatches, recompute, devices, workdir=directory, profile="2:3")
        trainer.fit(make_data(8192), steps=4)
        rows = distloop.read_metrics(directory)
    return [rows[-1][f"stage_{stage}/device_memory_gb"] for stage in range(num_stages)]


def alone(function, *arguments):
    """Calls a function in a process of its own, which TensorFlow has not started in."""
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(function, *arguments).result()


def main(_):
    counts = [int(count) for count in MICROBATCHES.value]
    serial = alone(time_steps, 1, 1, counts, TURNS.value)
    staged = alone(time_steps, 2, 2, counts, TURNS.value)
    print("microbatches; ms a step on one thread and in 2 stages; of one thread, of it uncut, of 2 stages uncut")
    for count in counts:
        ratios = [staged[count] / other for other in (serial[count], serial[counts[0]], staged[counts[0]])]
        print(count, *(f"{secs[count] * 1e3:.1f}" for secs in (serial, staged)), *(f"{ratio:.2f}" for ratio in ratios))
    (whole,) = alone(peaks, 1, 1, False)
    print(f"one device holds {whole * 1e3:.0f} MB at its peak")
    for num_stages, count, recompute in itertools.product([1, 2, 4], [1, 8], [False, True]):
        shares = [held / whole for held in alone(peaks, num_stages, count, recompute)]
        print(
            f"{num_stages} stages, {count} microbatches, recompute={recompute}:",
            " ".join(f"{share:.2f}" for share in shares),
            "of it",
        )


if __name__ == "__main__":
    app.run(main)

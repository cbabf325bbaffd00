"""Recompute: the memory and the time of a step with and without `recompute`.

    python -m experiments.benchmarks.recompute

The language model of `experiments/language_model.py` with its blocks recomputed, and a convnet of residual blocks. The
times are of one process, in turns. The memory is what the process of each grew by in its first steps, less what it
grows by with 2 rows. Other work on the machine changes the times.
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
from experiments import language_model

PATTERN, CHANNELS, SIZE, CONV_BLOCKS = "^block_", 32, 32, 8
ROWS = {"language model": 64, "convnet": 64}
TURNS = flags.DEFINE_integer("turns", 10, "Turns of each, five steps a turn.")
WORKLOADS = flags.DEFINE_list("workloads", list(ROWS), "Which of them to measure.")


def make_conv_block(name):
    inputs = keras.Input((SIZE, SIZE, CHANNELS))
    hidden = inputs
    for activation in ("relu", None):
        hidden = keras.layers.Conv2D(CHANNELS, 3, padding="same", use_bias=False)(hidden)
        hidden = keras.layers.BatchNormalization()(hidden)
        hidden = keras.layers.Activation(activation)(hidden)
    return keras.Model(inputs, keras.layers.Activation("relu")(inputs + hidden), name=name)


def convnet_fn():
    stem = keras.layers.Conv2D(CHANNELS, 3, padding="same")
    head = [keras.layers.GlobalAveragePooling2D(), keras.layers.Dense(10)]
    blocks = [make_conv_block(f"block_{i}") for i in range(CONV_BLOCKS)]
    model = keras.Sequential([keras.Input((SIZE, SIZE, 3)), stem, *blocks, *head], name="convnet")

    def loss_fn(batch, training):
        logits = model(batch["image"], training=training)
        return {"loss": keras.losses.sparse_categorical_crossentropy(batch["label"], logits, from_logits=True)}

    return distloop.ModelSpec(model, keras.optimizers.SGD(0.01, momentum=0.9), loss_fn)


def make_data(workload, rows):
    rng = np.random.default_rng(0)
    if workload == "convnet":
        batch = {
            "image": rng.normal(size=(rows, SIZE, SIZE, 3)).astype(np.float32),
            "label": rng.integers(0, 10, rows),
        }
    else:
        shape = (rows, language_model.CONTEXT.value)
        text = rng.integers(0, 256, (rows, shape[1] + 1)).astype(np.uint8)
        batch = {"bytes": text, "weight": np.ones(shape, np.float32)}
    return tf.data.Dataset.from_tensors(batch).repeat()


def make_trainer(workload, pattern):
    config = distloop.Config(device="cpu", num_devices=1, console="quiet", log_every=0, recompute=pattern)
    distloop.prepare(config)
    return distloop.Trainer(convnet_fn if workload == "convnet" else language_model.model_fn, config)


def peak_gb():
    """Returns the peak memory of this process, in GB."""
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmHWM:")) * 1024 / 1e9


def prepare_flags():
    flags.FLAGS(["recompute"])


def measure_growth(workload, pattern, rows):
    """Returns by how many GB the process grows in its first steps, and the activations that are estimated, in GB."""
    prepare_flags()
    trainer = make_trainer(workload, pattern)
    data = make_data(workload, rows)
    estimate = distloop.estimate_memory(trainer, data)
    before = peak_gb()
    trainer.fit(data, steps=3)
    return peak_gb() - before, estimate.parts["activations"] / 1e9


def time_steps(workload, turns):
    """Returns the median seconds of a step without and with recomputation, and the median of their ratios."""
    prepare_flags()
    trainers = [make_trainer(workload, pattern) for pattern in ("", PATTERN)]
    data = make_data(workload, ROWS[workload])
    for trainer in trainers:
        trainer.fit(data, steps=3)
    secs = [[], []]
    for _ in range(turns):
        for trainer, times in zip(trainers, secs, strict=True):
            start = time.perf_counter()
            trainer.fit(data, steps=trainer.step + 5)
            times.append((time.perf_counter() - start) / 5)
    ratios = [again / kept for kept, again in zip(*secs, strict=True)]
    return statistics.median(secs[0]), statistics.median(secs[1]), statistics.median(ratios)


def in_new_process(fn, *arguments):
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(fn, *arguments).result()


def main(_):
    print("| model | rows | activations | peak memory | step | step with / without |")
    print("|---|---|---|---|---|---|")
    for workload in WORKLOADS.value:
        memories = []
        for pattern in ("", PATTERN):
            few, _ = in_new_process(measure_growth, workload, pattern, 2)
            all_rows, activations = in_new_process(measure_growth, workload, pattern, ROWS[workload])
            memories.append((activations, all_rows - few))
        kept, again, ratio = in_new_process(time_steps, workload, TURNS.value)
        (estimated, measured), (estimated_again, measured_again) = memories
        print(
            f"| {workload} | {ROWS[workload]} | {estimated:.3f} -> {estimated_again:.3f} GB "
            f"({estimated_again / estimated:.2f}) | {measured:.3f} -> {measured_again:.3f} GB "
            f"({measured_again / measured:.2f}) | {kept * 1e3:.0f} -> {again * 1e3:.0f} ms | {ratio:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    app.run(main)

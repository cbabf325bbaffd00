"""Times one training step: distloop next to a loop over constant data and the usual loop written by hand, on CPUs.

    python -m experiments.benchmarks.step_time --workloads=tiny,deep --replicas=1,2,4

Every workload and replica count runs in a process of its own, on that many virtual CPUs; the systems take turns there.

- `bare`: a compiled loop over constant data; metrics are computed, not reduced.
- `handloop`: a compiled loop over `experimental_distribute_dataset`, loss and accuracy reduced each step.
- `distloop`: `Trainer.fit` with TensorBoard scalars, metrics.jsonl and console lines each 100 steps. Each round is one
  `fit` call, its start included: more `--steps` show the step alone.

How to read the table: `us/step` is the median over the rounds, and drifts with the machine; `/bare` and `/handloop` are
medians of each round's own ratio, and are what to compare. Below 1 is faster.

Seen on 2 cores, TensorFlow 2.21.0, Keras 3.15.1, 2026-11-21, ratio to handloop on 1, 2, 4 replicas: tiny 1.5, 0.38,
0.40; deep 1.13, 0.60, 0.65. Of tiny's 1.5 on 1 replica the steps are 1.15: a norm, a check of it that the update waits
for, weights, and the time at the iterator. The rest is the boundary each 100 steps: 0.6 ms to call the compiled loop,
0.4 ms to write numbers to TensorBoard, metrics.jsonl and the console, and what the processor's caches lose by both.
"""

import concurrent.futures
import contextlib
import datetime
import io
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf
from absl import app, flags

WORKLOADS = {"tiny": [32], "deep": [32] * 19}  # widths of the hidden layers; one more layer gives the logits
SYSTEMS = ["bare", "handloop", "distloop"]
FEATURES, CLASSES, BATCH_SIZE, BATCHES, LOG_EVERY = 16, 10, 64, 64, 100

_WORKLOADS = flags.DEFINE_list("workloads", list(WORKLOADS), "Which models.")
_REPLICAS = flags.DEFINE_list("replicas", ["1", "2", "4"], "Numbers of replicas.")
_SYSTEMS = flags.DEFINE_list("systems", SYSTEMS, "Which systems.")
_ROUNDS = flags.DEFINE_integer("rounds", 5, "Turns each system gets.", lower_bound=1)
_STEPS = flags.DEFINE_integer("steps", 1_000, "Steps in a turn.", lower_bound=1)

RunFn = Callable[[int], None]  # trains for that many steps


def make_model(workload: str) -> keras.Model:
    layers = [keras.layers.Dense(width, activation="relu") for width in WORKLOADS[workload]]
    return keras.Sequential([keras.Input((FEATURES,)), *layers, keras.layers.Dense(CLASSES)])


def make_dataset() -> tf.data.Dataset:
    """Makes the dataset of global batches, {"x": [B, 16], "label": [B]}, that repeats for ever."""
    generator = np.random.default_rng(0)
    x = generator.normal(size=(BATCHES * BATCH_SIZE, FEATURES)).astype(np.float32)
    label = generator.integers(CLASSES, size=len(x)).astype(np.int32)
    dataset = tf.data.Dataset.from_tensor_slices({"x": x, "label": label})
    return dataset.batch(BATCH_SIZE, drop_remainder=True).cache().repeat()


def make_values(model: keras.Model, batch: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
    """Returns loss and accuracy per example, [B] each."""
    logits = model(batch["x"], training=True)  # [B, 10]
    return {
        "loss": keras.losses.sparse_categorical_crossentropy(batch["label"], logits, from_logits=True),
        "accuracy": keras.metrics.sparse_categorical_accuracy(batch["label"], logits),
    }


def make_step(workload: str, strategy: tf.distribute.Strategy) -> Callable[[dict], tuple]:
    """Makes the step of the loops written by hand: a replica's share of the batch in, its part of the means out."""
    with strategy.scope():
        model = make_model(workload)
        optimizer = keras.optimizers.Adam(1e-3)
        optimizer.build(model.trainable_variables)

    def step(batch):
        with tf.GradientTape() as tape:
            values = make_values(model, batch)
            loss = tf.reduce_sum(values["loss"]) / BATCH_SIZE
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)  # sums over the replicas
        return loss, tf.reduce_sum(values["accuracy"]) / BATCH_SIZE

    return step


def make_run(step_fn: Callable[[], list[tf.Tensor]], size: int) -> RunFn:
    """Makes a compiled loop over a step that returns `size` numbers; their sums are read once, at the end."""

    @tf.function(autograph=False)
    def loop(steps):
        def body(i, sums):
            return i + 1, [a + b for a, b in zip(sums, step_fn(), strict=True)]

        return tf.while_loop(lambda i, _: i < steps, body, [tf.constant(0), [tf.zeros([])] * size])

    def run(steps):
        _, sums = loop(tf.constant(steps))
        sums[0].numpy()

    return run


def make_bare(workload: str, strategy: tf.distribute.Strategy) -> RunFn:
    """Makes the loop over constant data: what the step itself costs, the optimizer's reduction included."""
    step = make_step(workload, strategy)
    batch = next(iter(strategy.experimental_distribute_dataset(make_dataset().take(1))))

    def step_fn():
        values = strategy.run(step, args=(batch,))
        return [part for value in values for part in strategy.experimental_local_results(value)]

    return make_run(step_fn, 2 * strategy.num_replicas_in_sync)


def make_handloop(workload: str, strategy: tf.distribute.Strategy) -> RunFn:
    """Makes the loop that a careful person writes with tf.distribute."""
    step = make_step(workload, strategy)
    iterator = iter(strategy.experimental_distribute_dataset(make_dataset()))

    def step_fn():
        values = strategy.run(step, args=(next(iterator),))
        return [strategy.reduce("SUM", value, axis=None) for value in values]

    return make_run(step_fn, 2)


def make_distloop(workload: str, replicas: int, workdir: str) -> RunFn:
    """Makes the loop under test."""
    import distloop  # here, so that the others can be timed without it

    def model_fn():
        model = make_model(workload)
        return distloop.ModelSpec(
            model, keras.optimizers.Adam(1e-3), loss_fn=lambda batch, training: make_values(model, batch)
        )

    config = distloop.Config(
        workdir=workdir,
        strategy="mirrored" if replicas > 1 else "none",
        device="cpu",
        num_devices=replicas,
        batch_size=BATCH_SIZE,
        log_every=LOG_EVERY,
    )
    trainer, dataset = distloop.Trainer(model_fn, config), make_dataset()

    def run(steps):
        with contextlib.redirect_stdout(io.StringIO()):  # the lines cost what they cost, but hide the table
            trainer.fit(dataset, steps=trainer.step + steps)

    return run


def measure(
    workload: str, replicas: int, systems: list[str], rounds: int, steps: int, workdir: str
) -> dict[str, list[float]]:
    """Times the systems by turns; runs in a fresh process.

    Returns:
        The microseconds per step of every round, by system.
    """
    tf.config.set_visible_devices([], "GPU")
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * replicas)
    # bare and handloop share one strategy: the collectives of two over the same devices would clash.
    devices = [device.name for device in tf.config.list_logical_devices("CPU")]
    strategy = tf.distribute.MirroredStrategy(devices) if replicas > 1 else tf.distribute.get_strategy()
    make_fns = {
        "bare": lambda: make_bare(workload, strategy),
        "handloop": lambda: make_handloop(workload, strategy),
        "distloop": lambda: make_distloop(workload, replicas, workdir),
    }
    runs = {system: make_fns[system]() for system in systems}
    for run in runs.values():  # traces, and lets the threads and caches settle
        run(100)
        run(steps)
    times: dict[str, list[float]] = {system: [] for system in systems}
    for _ in range(rounds):
        for system, run in runs.items():
            start = time.perf_counter()
            run(steps)
            times[system].append((time.perf_counter() - start) / steps * 1e6)
    return times


def median_ratio(times: dict[str, list[float]], system: str, base: str) -> str:
    """Returns the median over the rounds of one system's time over another's, as text."""
    if base not in times:
        return "-"
    return f"{statistics.median(a / b for a, b in zip(times[system], times[base], strict=True)):.2f}"


def main(_):
    for flag, allowed in ((_WORKLOADS, list(WORKLOADS)), (_SYSTEMS, SYSTEMS)):
        if not set(flag.value) <= set(allowed):
            raise app.UsageError(f"--{flag.name} is {','.join(flag.value)}; choose from {','.join(allowed)}.")
    spawn = multiprocessing.get_context("spawn")
    print(
        f"TensorFlow {tf.__version__}, Keras {keras.__version__}, NumPy {np.__version__}, {os.cpu_count()} CPUs, "
        f"{datetime.date.today()}; {_ROUNDS.value} rounds of {_STEPS.value} steps, batch {BATCH_SIZE}"
    )
    print(f"{'workload':<10}{'replicas':>8}  {'system':<10}{'us/step':>8}{'/bare':>8}{'/handloop':>11}", flush=True)
    for workload in _WORKLOADS.value:
        for replicas in map(int, _REPLICAS.value):
            with (
                tempfile.TemporaryDirectory() as workdir,
                concurrent.futures.ProcessPoolExecutor(1, mp_context=spawn) as process,
            ):
                arguments = workload, replicas, _SYSTEMS.value, _ROUNDS.value, _STEPS.value, workdir
                times = process.submit(measure, *arguments).result()
            for system in times:
                bare, handloop = (median_ratio(times, system, base) for base in ("bare", "handloop"))
                time_us = statistics.median(times[system])
                print(f"{workload:<10}{replicas:>8}  {system:<10}{time_us:>8.0f}{bare:>8}{handloop:>11}", flush=True)


if __name__ == "__main__":
    app.run(main)

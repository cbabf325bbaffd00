"""Times several workers: distloop next to the loop written by hand with tf.distribute, and two workers next to one.

    python -m experiments.benchmarks.workers --steps=500

- `step`: microseconds of a step of a small model on 2 workers, by turns in the same processes; as in `step_time`.
- `scaling`: examples per second of 2 workers over those of 1, a compute-bound convolutional network, one thread each,
  the same batch per worker. 2.0 is ideal.

Seen on 2 cores: see WORKSPACE.md, "Several workers".
"""

import contextlib
import io
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

import keras
import numpy as np
import tensorflow as tf
from absl import app, flags

from experiments.benchmarks import step_time

_PART = flags.DEFINE_enum("part", "", ["", "step", "scaling"], "What a worker measures; set by the benchmark itself.")
_RESULT = flags.DEFINE_string("result", "", "Where a worker leaves what it measured.")

IMAGES_PER_WORKER = 64


def measure_step(workload: str) -> dict[str, list[float]]:
    """Times distloop and the loop by hand by turns, on every worker; microseconds per step of each round."""
    import distloop

    def model_fn():
        model = step_time.make_model(workload)
        return distloop.ModelSpec(
            model, keras.optimizers.Adam(1e-3), lambda batch, training: step_time.make_values(model, batch)
        )

    config = distloop.Config(workdir=f"{_RESULT.value}.run", device="cpu", num_devices=1, log_every=step_time.LOG_EVERY)
    trainer = distloop.Trainer(model_fn, config)
    dataset = step_time.make_dataset()
    handloop = step_time.make_handloop(workload, trainer.strategy)

    def fit(steps: int) -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            trainer.fit(dataset, steps=trainer.step + steps)

    runs = {"handloop": handloop, "distloop": fit}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run(100)
    for _ in range(flags.FLAGS.rounds):
        for name, run in runs.items():
            start = time.perf_counter()
            run(flags.FLAGS.steps)
            times[name].append((time.perf_counter() - start) / flags.FLAGS.steps * 1e6)
    return times


def measure_scaling() -> dict[str, list[float]]:
    """Measures examples per second of each round, over all workers."""
    import distloop

    def model_fn():
        conv = [keras.layers.Conv2D(32, 3, padding="same", activation="relu") for _ in range(3)]
        model = keras.Sequential([keras.Input((28, 28, 1)), *conv, keras.layers.Flatten(), keras.layers.Dense(10)])
        return distloop.ModelSpec(
            model,
            keras.optimizers.Adam(1e-3),
            lambda batch, training: {
                "loss": keras.losses.sparse_categorical_crossentropy(
                    batch["label"], model(batch["image"], training=training), from_logits=True
                )
            },
        )

    workers = len(json.loads(os.environ["TF_CONFIG"])["cluster"]["worker"])
    trainer = distloop.Trainer(model_fn, distloop.Config(device="cpu", num_devices=1, log_every=0))
    rows = IMAGES_PER_WORKER * workers
    batch = {"image": np.ones((rows, 28, 28, 1), np.float32), "label": np.zeros(rows, np.int32)}
    dataset = tf.data.Dataset.from_tensors(batch).cache().repeat()
    speeds = []
    with contextlib.redirect_stdout(io.StringIO()):
        trainer.fit(dataset, steps=5)
        for _ in range(flags.FLAGS.rounds):
            start = time.perf_counter()
            trainer.fit(dataset, steps=trainer.step + 20)
            speeds.append(20 * rows / (time.perf_counter() - start))
    return {"examples per second": speeds}


def launch(workers: int, part: str, workload: str) -> dict[str, list[float]]:
    """Runs a part on some local workers, one thread each; gives what the chief measured."""
    with tempfile.TemporaryDirectory() as directory:
        result = os.path.join(directory, "result.json")
        command = [
            sys.executable,
            "-m",
            "distloop.launch",
            f"--workers={workers}",
            "-m",
            "experiments.benchmarks.workers",
        ]
        flags_given = [
            f"--part={part}",
            f"--result={result}",
            f"--rounds={flags.FLAGS.rounds}",
            f"--steps={flags.FLAGS.steps}",
        ]
        threads = {"TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "1"}
        subprocess.run(
            [*command, *flags_given, workload], env={**os.environ, **threads}, check=True, capture_output=True
        )
        with open(result, encoding="utf-8") as file:
            return json.load(file)


def main(arguments):
    if _PART.value:
        found = measure_step(arguments[1]) if _PART.value == "step" else measure_scaling()
        if json.loads(os.environ["TF_CONFIG"])["task"]["index"] == 0:
            with open(_RESULT.value, "w", encoding="utf-8") as file:
                json.dump(found, file)
        return
    for workload in flags.FLAGS.workloads:
        times = launch(2, "step", workload)
        ratio = step_time.median_ratio(times, "distloop", "handloop")
        medians = {name: f"{statistics.median(values):.0f} us" for name, values in times.items()}
        print(f"step, {workload}, 2 workers: {medians}, distloop / handloop {ratio}", flush=True)
    speeds = {workers: launch(workers, "scaling", "")["examples per second"] for workers in (1, 2)}
    best = {workers: max(values) for workers, values in speeds.items()}
    medians = {workers: statistics.median(values) for workers, values in speeds.items()}
    print(
        f"scaling, 1 -> 2 workers, one thread each: {medians[2] / medians[1]:.2f} by medians, {best[2] / best[1]:.2f} "
        f"by best rounds ({best[1]:.0f} and {best[2]:.0f} examples per second)"
    )


if __name__ == "__main__":
    app.run(main)

"""Times what a checkpoint costs a run: distloop next to `tf.train.CheckpointManager`, on a 41-million-parameter MLP.

    python -m experiments.benchmarks.checkpoint_stall --rounds=5

The systems take turns in one process, on the same weights and slots of Adam (124 million floats, 494 MB):

- `distloop save`: until `fit` goes on; the file is written in the background, and waited for outside the time.
- `manager save`: `CheckpointManager.save`, which writes before it returns.
- `distloop load`, `manager restore`: from the file to the variables.

`after` is how much longer the next step takes than a step without a save: it copies the weights that the file still
needs.

Seen on 2 cores, TensorFlow 2.21.0, Keras 3.15.1, 2026-11-21, 4 rounds, beside other work: a save
stalls 4 ms, 0.01 of the manager's 0.26 to 1.43 s; the step after it takes 0.15 to 1.5 s longer, while the file is
written by the same two cores; loading takes 0.93 of the manager's time.
"""

import os
import shutil
import statistics
import tempfile
import time

import keras
import numpy as np
import tensorflow as tf
from absl import app, flags

import distloop

_ROUNDS = flags.DEFINE_integer("rounds", 5, "Turns each system gets.", lower_bound=1)
_WIDTHS = flags.DEFINE_list("widths", ["8000", "4000", "2000", "500", "300", "1"], "Of the MLP, its input first.")


def make_trainer(workdir):
    widths = [int(width) for width in _WIDTHS.value]

    def model_fn():
        layers = [keras.layers.Dense(width, activation="relu") for width in widths[1:-1]]
        model = keras.Sequential([keras.Input((widths[0],)), *layers, keras.layers.Dense(widths[-1])])

        def loss_fn(batch, training):
            return {"loss": tf.square(model(batch, training=training)[:, 0])}

        return distloop.ModelSpec(model, keras.optimizers.Adam(1e-4), loss_fn)

    return distloop.Trainer(model_fn, distloop.Config(workdir=workdir, device="cpu", num_devices=1, log_every=1))


def timed(fn):
    start = time.perf_counter()
    fn()
    return time.perf_counter() - start


def main(_):
    with tempfile.TemporaryDirectory() as workdir:
        trainer = make_trainer(os.path.join(workdir, "distloop"))
        rows = np.zeros([16, int(_WIDTHS.value[0])], np.float32)
        data = tf.data.Dataset.from_tensors(rows)
        trainer.fit(data, steps=2)
        variables = {v.path: v.value for v in [*trainer.model.variables, *trainer.optimizer.variables]}
        checkpoint = tf.train.Checkpoint(**{name.replace("/", "_"): v for name, v in variables.items()})
        manager = tf.train.CheckpointManager(checkpoint, os.path.join(workdir, "manager"), max_to_keep=1)
        loop, source = trainer._train_loop, trainer._train_source

        def step():
            loop._run_steps(source, 1)

        times = {name: [] for name in ("distloop save", "after", "manager save", "distloop load", "manager restore")}
        for _ in range(_ROUNDS.value):
            step()
            usual = timed(step)
            times["distloop save"].append(timed(lambda: trainer._save({})))
            times["after"].append(timed(step) - usual)
            trainer._checkpoints.wait()
            times["manager save"].append(timed(manager.save))
            times["distloop load"].append(timed(trainer.restore))
            times["manager restore"].append(timed(lambda: manager.restore_or_initialize()))
            shutil.rmtree(os.path.join(workdir, "manager"))
            os.makedirs(os.path.join(workdir, "manager"))
        for name, secs in times.items():
            print(f"{name:<16}{statistics.median(secs):8.3f} s   {min(secs):.3f} to {max(secs):.3f}")
        stall = [a + b for a, b in zip(times["distloop save"], times["after"], strict=True)]
        for name, own, other in (
            ("save", times["distloop save"], times["manager save"]),
            ("save and after", stall, times["manager save"]),
            ("load", times["distloop load"], times["manager restore"]),
        ):
            print(f"{name}: {statistics.median(a / b for a, b in zip(own, other, strict=True)):.2f} of the manager's")


if __name__ == "__main__":
    app.run(main)

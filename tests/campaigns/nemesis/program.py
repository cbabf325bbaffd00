"""The program under test: trains a model of 14 weights and logs each step to a file that it does not own.

    NEMESIS_LOG=/tmp/log python -m tests.campaigns.nemesis.program --workdir=/tmp/run

A line of the log is a JSON object: what happened (`event`), when (`time`, monotonic), in which process (`life`,
`process`, `worker`), and

    going on    step, digest    the checkpoint that this process restored, or step 0
    step        step, ids, digest, share    rows of the global batch, in ascending order; digest of all that training
                                     changes; where this worker's part of the batch begins
    saved       step            the chief sees the name of a new checkpoint
    child       pid             of a process that was started
    left        step            the run was saved and left, because something asked for it
    finished    step, digest    fit has returned

The rows of a batch travel through distloop as metrics: `ids0` to `ids7` are numbers in base 8, in which the digit
i of `ids<k>` counts row 8 k + i, so that a row which is trained twice or not at all shows.
"""

import atexit
import hashlib
import json
import os
import subprocess
import time

import keras
import numpy as np
import tensorflow as tf
from absl import app

import distloop
from tests import problems
from tests.campaigns.nemesis.setting import BATCH_SIZE, ROWS, STEPS

distloop.define_flags(steps=STEPS, batch_size=BATCH_SIZE, device="cpu", log_every=1, average_decay=0.9)


class Log:
    """Appends events to the harness's file; each is one write, so events of several processes do not mix."""

    def __init__(self, environment):
        config = json.loads(environment.get("TF_CONFIG", '{"task": {"index": 0}}'))
        self.worker = config["task"]["index"]
        self._who = {"life": environment.get("NEMESIS_LIFE", ""), "process": os.urandom(4).hex()}
        self._who |= {"pid": os.getpid(), "worker": self.worker}
        self._file = os.open(environment["NEMESIS_LOG"], os.O_WRONLY | os.O_APPEND)

    def write(self, event, **values):
        line = {"time": time.monotonic(), "event": event, **self._who, **values}
        os.write(self._file, json.dumps(line).encode() + b"\n")


class Record(distloop.Action):
    """Logs each step on every worker, and what the chief sees in the workdir."""

    every = 1

    def __init__(self, trainer, log, environment):
        self._trainer, self._log = trainer, log
        self._secs = float(environment.get("NEMESIS_STEP_SECS", "0"))
        self._noise = int(environment.get("NEMESIS_NOISE", "0"))
        self._has_child = environment.get("NEMESIS_CHILD") == str(log.worker)
        self._is_going_on = False
        self._checkpoints = set()  # name and inode

    def set_state(self, state):
        self._go_on(state["step"])

    def get_state(self):
        return {"step": self._trainer.step}

    def __call__(self, report):
        if not self._is_going_on:
            self._go_on(0)
        ids = [8 * k + i for k in range(8) for i in _digits(report.metrics[f"ids{k}"] * BATCH_SIZE)]
        workers = self._trainer.workers
        share = workers.index / workers.count  # workers of one share have the same random state
        self._log.write("step", step=report.step, ids=ids, digest=digest(self._trainer), share=share)
        for step in sorted(step for step, _ in self._look()):
            self._log.write("saved", step=step)
        if self._noise:
            print("." * self._noise, flush=True)
        time.sleep(self._secs)

    def _go_on(self, step):
        self._is_going_on = True
        self._look()
        self._log.write("going on", step=step, digest=digest(self._trainer))
        if self._has_child:
            child = subprocess.Popen(["sleep", "600"])
            atexit.register(child.kill)
            self._log.write("child", child=child.pid)

    def _look(self):
        """Returns the checkpoints, by step and inode, that were not there at the last look."""
        directory = os.path.join(self._trainer.config.workdir, "checkpoints")
        checkpoints = set()
        if self._log.worker == 0 and self._trainer.config.workdir and os.path.isdir(directory):
            for name in os.listdir(directory):
                try:
                    if name.isdigit():
                        checkpoints.add((int(name), os.stat(os.path.join(directory, name, "manifest.json")).st_ino))
                except FileNotFoundError:  # deleted in the meantime
                    continue
        new, self._checkpoints = checkpoints - self._checkpoints, checkpoints
        return new


def _digits(number):
    """Returns the places of a number in base 8, each as often as its digit says."""
    assert number == int(number), number
    return [i for i in range(8) for _ in range(int(number) // 8**i % 8)]


def digest(trainer):
    values = problems.everything(trainer)
    total = hashlib.sha256()
    for name in sorted(values):
        total.update(name.encode() + values[name].tobytes())
    return total.hexdigest()[:16]


def model_fn():
    layers = [keras.layers.Dense(2), keras.layers.Dropout(0.5), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((4,)), *layers])

    def loss_fn(batch, training):
        error = model(batch["x"], training=training)[:, 0] - batch["y"]
        digit = tf.pow(8.0, tf.cast(batch["id"] % 8, tf.float32))
        ids = {f"ids{k}": tf.where(batch["id"] // 8 == k, digit, 0.0) for k in range(8)}
        return {"loss": error**2, **ids}

    return distloop.ModelSpec(model, keras.optimizers.Adam(0.01), loss_fn)


def rows():
    random = np.random.default_rng(0)
    x = random.normal(size=(ROWS, 4)).astype(np.float32)
    return {"x": x, "y": x.sum(axis=1), "id": np.arange(ROWS)}


def main(_):
    log = Log(os.environ)
    log.write("began")
    config = distloop.Config.from_flags()
    distloop.prepare(config)
    trainer = distloop.Trainer(model_fn, config)
    data = distloop.make_dataset(rows(), BATCH_SIZE, shuffle=True)
    try:
        trainer.fit(data, actions=[Record(trainer, log, os.environ)])
    except SystemExit:
        log.write("left", step=trainer.step)
        raise
    log.write("finished", step=trainer.step, digest=digest(trainer))


if __name__ == "__main__":
    app.run(main)

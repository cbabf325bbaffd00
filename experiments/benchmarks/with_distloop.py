"""The loop under test: `Trainer.fit` with everything on."""

import contextlib
import io
import time

import keras

import distloop
from experiments.benchmarks import workloads
from experiments.benchmarks.turns import System

LOG_EVERY = 100


def make_trainer(workload: workloads.Workload, replicas: int, workdir: str, **settings: object) -> distloop.Trainer:
    """Makes a trainer with TensorBoard, metrics.jsonl and console lines each 100 steps."""

    def model_fn():
        model = workload.make_model()
        return distloop.ModelSpec(
            model,
            keras.optimizers.Adam(workloads.LEARNING_RATE),
            loss_fn=lambda batch, training: workload.values(model, *batch, training=training),
            predict_fn=lambda batch: model(batch[0], training=False),
        )

    config = distloop.Config(
        **{"workdir": workdir, "device": "cpu", "num_devices": replicas, "log_every": LOG_EVERY, **settings}
    )
    return distloop.Trainer(model_fn, config)


class Fit(System):
    """`fit`, a call at a time; what it prints costs what it costs, but is not seen."""

    def __init__(self, trainer: distloop.Trainer, workload: workloads.Workload, batch_size: int):
        self._trainer, self._dataset = trainer, workload.dataset(batch_size)

    def call(self, steps: int, actions: tuple = ()) -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            self._trainer.fit(self._dataset, steps=self._trainer.step + steps, actions=actions)

    def steps_secs(self, steps: int) -> float:
        marks = _Marks(every=self._trainer.step + 1)
        self.call(steps + 1, (marks,))
        return marks.times[-1] - marks.times[0]


class _Marks:
    """An action that keeps the times of the first step of a call, and of its last."""

    def __init__(self, every: int):
        self.every, self.times = every, []

    def __call__(self, report: distloop.Report) -> None:
        self.times.append(time.perf_counter())

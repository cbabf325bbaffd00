"""distloop: `Trainer.fit` with all monitoring on."""

import contextlib
import io
from collections.abc import Callable

import keras

import distloop
from experiments.benchmarks import workloads
from experiments.benchmarks.turns import System

LOG_EVERY = 100

# Monitoring level -> settings; all return to the host every 100 steps.
MONITORING = {
    "off": {"workdir": "", "log_every": 0, "console": "quiet"},
    "on": {},
    "histograms": {"histograms_every": 500},
}


def make_trainer(workload: workloads.Workload, replicas: int, workdir: str, **settings: object) -> distloop.Trainer:
    """Returns a trainer with TensorBoard, metrics.jsonl and console lines every 100 steps."""

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
    """`fit`, one call at a time; its output is discarded, but the time of printing counts.

    An action takes the times. On several workers it adds a synchronization at each log, which counts too.
    """

    def __init__(self, trainer: distloop.Trainer, workload: workloads.Workload, batch_size: int):
        self.trainer, self._dataset = trainer, workload.dataset(batch_size)

    def call(self, steps: int, actions: tuple = ()) -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            self.trainer.fit(self._dataset, steps=self.trainer.step + steps, actions=actions)

    def steps_secs(self, steps: int) -> float:
        times = []
        self.call(steps + 1, (self._after_first_step(lambda: times.append(self.clock())),))
        return times[-1] - times[0]

    def first_step(self, done: Callable[[], None]) -> None:
        self.call(1, (self._after_first_step(done),))

    def _after_first_step(self, fn: Callable[[], None]) -> distloop.Action:
        """Returns an action that is due after the next step and at the end of the call."""

        def action(report: distloop.Report) -> None:
            fn()

        action.every = self.trainer.step + 1
        return action

"""Keras: `Model.fit`, `evaluate` and `predict`."""

import time

import keras
import tensorflow as tf

from experiments.benchmarks import workloads
from experiments.benchmarks.turns import System


class Fit(System):
    """`Model.fit`, one call at a time, without its progress bar."""

    def __init__(
        self,
        workload: workloads.Workload,
        strategy: tf.distribute.Strategy,
        batch_size: int,
        steps_per_execution: int = 1,
        jit_compile: bool | str = False,
        data: object = None,
    ):
        with strategy.scope():
            self.model = workload.make_model()
            kind = "Binary" if workload.is_binary else "SparseCategorical"
            self.model.compile(
                keras.optimizers.Adam(workloads.LEARNING_RATE),
                getattr(keras.losses, f"{kind}Crossentropy")(from_logits=True),
                metrics=[keras.metrics.BinaryAccuracy(threshold=0.0) if workload.is_binary else "accuracy"],
                steps_per_execution=steps_per_execution,
                jit_compile=jit_compile,
            )
        self.least = steps_per_execution
        self._dataset = data or workload.dataset(batch_size)

    def call(self, steps: int, callbacks: tuple = ()) -> None:
        self.model.fit(self._dataset, steps_per_epoch=steps, verbose=0, callbacks=list(callbacks))

    def steps_secs(self, steps: int) -> float:
        marks = _Marks()
        self.call(steps, (marks,))
        return marks.end - marks.start


class _Marks(keras.callbacks.Callback):
    """Records when the first step begins and when the last one ends."""

    def __init__(self):
        super().__init__()
        self.start = self.end = 0.0

    def on_train_batch_begin(self, batch, logs=None):
        self.start = self.start or time.perf_counter()

    def on_epoch_end(self, epoch, logs=None):
        self.end = time.perf_counter()

"""Hand-written loops on tf.distribute: a call per step, a compiled loop, and a compiled loop over constant data."""

import functools
import operator
from collections.abc import Callable

import numpy as np
import tensorflow as tf

from experiments.benchmarks import workloads
from experiments.benchmarks.turns import System


class ByHand:
    """A model under a strategy, trained by several loops that share its weights."""

    def __init__(self, workload: workloads.Workload, strategy: tf.distribute.Strategy, batch_size: int):
        self._workload, self._strategy, self._batch_size = workload, strategy, batch_size
        with strategy.scope():
            self.model = workload.make_model()
            self.optimizer = tf.keras.optimizers.Adam(workloads.LEARNING_RATE)
            self.optimizer.build(self.model.trainable_variables)

    def _dataset(self, num_examples: int | None = None) -> tf.distribute.DistributedDataset:
        return self._strategy.experimental_distribute_dataset(self._workload.dataset(self._batch_size, num_examples))

    def _step(self, batch: tuple) -> list[tf.Tensor]:
        """Trains on one replica's rows of the batch; returns its parts of the mean loss and accuracy."""
        model = self.model
        with tf.GradientTape() as tape:
            values = self._workload.values(model, *batch, training=True)
            examples = values["loss"].shape.num_elements() * self._strategy.num_replicas_in_sync
            loss = tf.reduce_sum(values["loss"]) / examples
        gradients = tape.gradient(loss, model.trainable_variables)
        self.optimizer.apply(gradients, model.trainable_variables)  # sums over the replicas
        return [loss, tf.reduce_sum(values["accuracy"]) / examples]

    def _reduced_step(self, iterator: tf.distribute.DistributedIterator) -> list[tf.Tensor]:
        values = self._strategy.run(self._step, args=(next(iterator),))
        return [self._strategy.reduce("SUM", value, axis=None) for value in values]

    def bare(self) -> System:
        """Returns the loop over constant data: the cost of the step itself, including the optimizer's all-reduce."""
        batch = next(iter(self._dataset(self._batch_size)))

        def step_fn():
            values = self._strategy.run(self._step, args=(batch,))
            return [part for value in values for part in self._strategy.experimental_local_results(value)]

        return System(_compiled_loop(step_fn, 2 * len(self._strategy.experimental_local_results(batch[0]))))

    def handloop(self) -> System:
        """Returns the usual compiled loop."""
        iterator = iter(self._dataset())
        return System(_compiled_loop(lambda: self._reduced_step(iterator), 2))

    def hand(self) -> System:
        """Returns the usual loop: one tf.function call per step; the host reads loss and accuracy every 100 steps."""
        iterator = iter(self._dataset())
        step_fn = tf.function(lambda: self._reduced_step(iterator), autograph=False)

        def call(steps):
            sums = [0.0, 0.0]
            for i in range(steps):
                sums = [a + b for a, b in zip(sums, step_fn(), strict=True)]
                if i % 100 == 99 or i == steps - 1:
                    sums = [float(a) for a in sums]

        return System(call)

    def evaluate(self, num_examples: int) -> Callable[[], np.ndarray]:
        """Returns the usual evaluation: one tf.function call per batch; sums of loss, accuracy and examples."""
        dataset = self._dataset(num_examples)
        sums_fn = tf.function(self._reduced_sums, autograph=False)
        return lambda: functools.reduce(operator.add, map(sums_fn, dataset)).numpy()

    def evaluate_compiled(self, num_examples: int) -> Callable[[], np.ndarray]:
        """Returns an evaluation in one compiled call."""
        dataset = self._dataset(num_examples)

        @tf.function
        def loop():
            sums = tf.zeros([3])
            for batch in dataset:
                sums += self._reduced_sums(batch)
            return sums

        return lambda: loop().numpy()

    def predict(self, num_examples: int) -> Callable[[], np.ndarray]:
        """Returns the usual prediction: one tf.function call per batch; all outputs in order."""
        dataset = self._dataset(num_examples)

        @tf.function(autograph=False)
        def predict_fn(batch):
            return self._strategy.run(lambda features, _: self.model(features, training=False), args=batch)

        def call():
            parts = [self._strategy.experimental_local_results(predict_fn(batch)) for batch in dataset]
            return np.concatenate([part.numpy() for replicas in parts for part in replicas])

        return call

    def _reduced_sums(self, batch: tuple) -> tf.Tensor:
        def sums(*rows):
            values = self._workload.values(self.model, *rows, training=False)
            examples = tf.cast(tf.size(values["loss"]), tf.float32)
            return tf.stack([*map(tf.reduce_sum, values.values()), examples])

        return self._strategy.reduce("SUM", self._strategy.run(sums, args=batch), axis=None)


def _compiled_loop(step_fn: Callable[[], list[tf.Tensor]], size: int) -> Callable[[int], None]:
    """Returns a compiled loop over a step that returns `size` numbers; the host reads their sums once, at the end."""

    @tf.function(autograph=False)
    def loop(steps):
        def body(i, sums):
            return i + 1, [a + b for a, b in zip(sums, step_fn(), strict=True)]

        return tf.while_loop(lambda i, _: i < steps, body, [tf.constant(0), [tf.zeros([])] * size])

    def call(steps):
        _, sums = loop(tf.constant(steps))
        sums[0].numpy()

    return call

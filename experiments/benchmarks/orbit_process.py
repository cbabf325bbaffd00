"""Orbit's `Controller.train` in a separate process, because Orbit needs Keras 2.

    echo 100 | python -m experiments.benchmarks.orbit_process tiny 1 WORKDIR

Each line of input is a number of steps; each line of output, the seconds that they took. `with_orbit` creates the
environment and starts this process.
"""

import os
import sys
import time

import orbit
import tensorflow as tf

from experiments.benchmarks import places, workloads

LOG_EVERY = 100


class Trainer(orbit.StandardTrainer):
    """The trainer of Orbit's guide."""

    def __init__(self, workload: workloads.Workload, strategy: tf.distribute.Strategy, batch_size: int):
        self._workload, self._strategy = workload, strategy
        with strategy.scope():
            self.model = workload.make_model()
            self.optimizer = tf.keras.optimizers.Adam(workloads.LEARNING_RATE)
            self.metrics = {name: tf.keras.metrics.Mean(name) for name in ("loss", "accuracy")}
        super().__init__(strategy.experimental_distribute_dataset(workload.dataset(batch_size)))

    def train_loop_begin(self):
        for metric in self.metrics.values():
            metric.reset_states()

    def train_step(self, iterator):
        def step(batch):
            with tf.GradientTape() as tape:
                values = self._workload.values(self.model, *batch, training=True)
                loss = tf.reduce_mean(values["loss"]) / self._strategy.num_replicas_in_sync
            variables = self.model.trainable_variables
            self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
            for name, metric in self.metrics.items():
                metric.update_state(values[name])

        self._strategy.run(step, args=(next(iterator),))

    def train_loop_end(self):
        return {name: metric.result() for name, metric in self.metrics.items()}


def main(name: str, replicas: str, workdir: str) -> None:
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    sys.stdout = open(os.devnull, "w")  # discards Orbit's output
    workload, strategy = workloads.WORKLOADS[name], places.make_strategy(int(replicas))
    trainer = Trainer(workload, strategy, workload.global_batch_size(int(replicas)))
    controller = orbit.Controller(
        global_step=trainer.optimizer.iterations,
        trainer=trainer,
        strategy=strategy,
        steps_per_loop=LOG_EVERY,
        summary_dir=workdir,
    )
    for line in sys.stdin:
        until = trainer.optimizer.iterations.numpy() + int(line)
        start = time.perf_counter()
        controller.train(until, checkpoint_at_completion=False)
        print(time.perf_counter() - start, file=answers, flush=True)
    os._exit(0)  # deleting a distributed iterator can take half a minute


if __name__ == "__main__":
    main(*sys.argv[1:])

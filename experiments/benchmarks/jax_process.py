"""JAX in a process of its own: a jitted step, a scan over steps, and Keras's `fit` on JAX.

    echo 100 | python -m experiments.benchmarks.jax_process scan tiny 1

Each line of input is a number of steps; each line of output, the seconds that they took. `peers` creates the
environment and starts this process. The model and Adam are those of Keras, called without state, as they compile to the
same operations as ones written by hand.
"""

import itertools
import os
import sys
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import keras
import numpy as np
import tensorflow as tf

from experiments.benchmarks import goals, peers, turns, with_keras, workloads

LOG_EVERY = 100  # steps after which the host reads loss and accuracy


def make_step(workload: workloads.Workload, model: keras.Model, optimizer: keras.Optimizer) -> Callable:
    """Returns a function from state, features and labels to the next state, and sums of loss and accuracy."""

    def loss_of(trained, others, features, labels):
        logits, others = model.stateless_call(trained, others, features, training=True)
        if workload.is_binary:
            losses = keras.losses.binary_crossentropy(labels, logits, from_logits=True)
            accuracy = jnp.mean((logits > 0) == (labels > 0.5))
        else:
            losses = keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True)
            accuracy = jnp.mean(jnp.argmax(logits, -1) == labels)
        return jnp.mean(losses), (others, accuracy)

    differentiate = jax.value_and_grad(loss_of, has_aux=True)

    def step(state, features, labels):
        trained, others, slots, sums = state
        (loss, (others, accuracy)), gradients = differentiate(trained, others, features, labels)
        trained, slots = optimizer.stateless_apply(slots, gradients, trained)
        return trained, others, slots, sums + jnp.stack([loss, accuracy])

    return step


class Loop(turns.System):
    """A jitted step, or a jitted scan over several; the host reads loss and accuracy every LOG_EVERY steps."""

    def __init__(self, workload: workloads.Workload, replicas: int, steps_at_once: int):
        batch_size = workload.global_batch_size(replicas)
        model, optimizer = workload.make_model(), keras.optimizers.Adam(workloads.LEARNING_RATE)
        optimizer.build(model.trainable_variables)
        mesh = jax.sharding.Mesh(jax.devices(), ("data",))
        specs = jax.sharding.PartitionSpec
        whole = jax.sharding.NamedSharding(mesh, specs())
        rows = jax.sharding.NamedSharding(mesh, specs("data") if steps_at_once == 1 else specs(None, "data"))
        groups = (model.trainable_variables, model.non_trainable_variables, optimizer.variables)
        values = tuple([variable.value for variable in group] for group in groups)
        self.least, self._rows = steps_at_once, rows
        self._state = jax.device_put((*values, jnp.zeros(2)), whole)
        step = make_step(workload, model, optimizer)

        def scan(state, features, labels):
            return jax.lax.scan(lambda state, batch: (step(state, *batch), None), state, (features, labels))[0]

        self._train = jax.jit(step if steps_at_once == 1 else scan, donate_argnums=0)
        batches = endless(workload, batch_size)
        if steps_at_once > 1:  # stacked once, as the batches of the other loops are cut once
            chunks = [itertools.islice(batches, steps_at_once) for _ in range(8)]
            batches = itertools.cycle([[np.stack(arrays) for arrays in zip(*chunk, strict=True)] for chunk in chunks])
        self._batches = batches

    def call(self, steps: int) -> None:
        for done in range(self.least, steps + 1, self.least):
            self._state = self._train(self._state, *jax.device_put(next(self._batches), self._rows))
            if done % LOG_EVERY < self.least or done == steps:
                self._state[-1].tolist()


def endless(workload: workloads.Workload, batch_size: int) -> Iterator[tuple[np.ndarray, ...]]:
    """Yields batches of NumPy arrays; Keras on JAX takes twice as long with those of a `tf.data.Dataset`."""
    arrays = workload.make_rows(np.random.default_rng(0), batch_size * workload.num_batches)
    starts = range(0, len(arrays[0]), batch_size)
    yield from itertools.cycle([tuple(array[i : i + batch_size] for array in arrays) for i in starts])


def make(name: str, workload: workloads.Workload, replicas: int) -> turns.System:
    if not name.startswith("keras"):
        return Loop(workload, replicas, peers.LEAST.get(name, 1))
    if replicas > 1:
        keras.distribution.set_distribution(keras.distribution.DataParallel())
    batch_size, strategy = workload.global_batch_size(replicas), tf.distribute.get_strategy()
    least, data = peers.LEAST.get(name, 1), endless(workload, batch_size)
    return with_keras.Fit(workload, strategy, batch_size, least, jit_compile="auto", data=data)


def make_passes(workload: workloads.Workload, fit: with_keras.Fit, kind_of_call: str) -> turns.System:
    """Returns whole calls of `evaluate` or `predict` of Keras, over arrays."""
    features, labels = workload.make_rows(np.random.default_rng(0), goals.EXAMPLES)
    data = (features, labels) if kind_of_call == "evaluate" else (features,)
    call = getattr(fit.model, kind_of_call)
    return turns.System(lambda count: [call(*data, batch_size=goals.BATCH_SIZE, verbose=0) for _ in range(count)])


def main(name: str, workload: str, replicas: str, kind_of_call: str = "fit") -> None:
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    sys.stdout = open(os.devnull, "w")
    tf.config.set_visible_devices([], "GPU")  # which TensorFlow would fill
    system = make(name, workloads.EVERY[workload], int(replicas))
    if kind_of_call != "fit":
        system = make_passes(workloads.EVERY[workload], system, kind_of_call)
    for line in sys.stdin:
        print(system.steps_secs(int(line)), file=answers, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

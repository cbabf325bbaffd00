"""Exchange: tensors that a worker sends to one other worker, or to all, during a step.

    exchange = Exchange(strategy)
    sums = exchange.collect([a, b], owners=[0, 1])        # on worker 0 the sum of a, on worker 1 that of b
    values = exchange.broadcast([c, spec], senders=[0, 1])  # c of worker 0 and d of worker 1, on both

All is called in a `tf.function`, outside of replicas and on every worker. It does not know what the tensors mean.
"""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from distloop.distributed import strategies, tensorflow_internals, workers
from distloop.distributed.devices import HOST
from distloop.optimizers import gradients


class Exchange:
    """Sends tensors between the workers of a run."""

    def __init__(self, strategy: tf.distribute.Strategy):
        """Prepares; all workers make one."""
        self._strategy = strategy
        self._worker, self._num_workers = workers.worker_index(strategy), workers.num_workers(strategy)
        self._has_gpus = strategies.has_gpus(strategy)
        tensorflow_internals.make_pairs(strategy)
        with tensorflow_internals.outside_strategies(), tf.device(HOST):
            self._count = tf.Variable(0, dtype=tf.int64, trainable=False)

    def collect(self, tensors: Sequence[tf.Tensor], owners: Sequence[int]) -> list[tf.Tensor]:
        """Returns sums of tensors over the workers, each on one worker alone.

        Each worker sends its tensor as soon as it is computed: the last layers', while the backward pass goes on.

        Args:
            tensors: of this worker, flat.
            owners: the worker that gets each sum.

        Returns:
            The sums that this worker gets, each on the device of its tensor, and empty tensors for the others.
        """
        sums, sent = [], list[tf.Tensor]()

        def pass_on(sender: int, receiver: int, value: Any) -> tf.Tensor:
            # NCCL waits for ever if two workers begin with different ones; in one order, none does.
            with tf.control_dependencies(sent[-1:] if self._has_gpus else []):
                sent.append(tensorflow_internals.send(self._strategy, sender, receiver, value))
            return sent[-1]

        for tensor, owner in reversed(list(zip(tensors, owners, strict=True))):
            if owner != self._worker:
                pass_on(self._worker, owner, tensor)
                sums.append(tf.zeros([0], tensor.dtype))
                continue
            spec = tf.TensorSpec(tensor.shape, tensor.dtype)
            of_workers = [tensor if w == owner else pass_on(w, owner, spec) for w in range(self._num_workers)]
            with tf.device(tensor.device):
                sums.append(tf.add_n(of_workers))
        self._keep(sent)
        return sums[::-1]

    def broadcast(self, values: Sequence[tf.Tensor | tf.TensorSpec], senders: Sequence[int]) -> list[tf.Tensor]:
        """Returns tensors of several workers on every worker; the small ones of a worker travel together.

        Args:
            values: of static shapes; what another worker sends is given as its spec.
            senders: the worker that sends each.
        """
        groups: dict[Any, list[int]] = {}  # which values travel together
        for i, (value, sender) in enumerate(zip(values, senders, strict=True)):
            is_large = value.shape.num_elements() * value.dtype.size > gradients.LARGEST_PACKED_BYTES
            groups.setdefault((sender, value.dtype, i if is_large else None), []).append(i)
        received: dict[int, tf.Tensor] = {}
        before: list[tf.Tensor] = []  # one after the other: all workers in one order, and little memory
        for (sender, dtype, _), numbers in groups.items():
            of_group = [values[i] for i in numbers]
            sizes = [value.shape.num_elements() for value in of_group]
            is_here = isinstance(of_group[0], tf.Tensor)
            flat = tf.TensorSpec([sum(sizes)], dtype)
            if is_here:
                flat = tf.concat([tf.reshape(value, [-1]) for value in of_group], 0)
            with tf.control_dependencies(before):
                flat = tensorflow_internals.broadcast(self._strategy, sender, flat)
            before = [flat]
            pieces = tf.split(flat, sizes) if len(sizes) > 1 else [flat]
            received |= {i: tf.reshape(piece, values[i].shape) for i, piece in zip(numbers, pieces, strict=True)}
        self._keep(before)
        return [received[i] for i in range(len(values))]

    def _keep(self, sent: Sequence[tf.Tensor]) -> None:
        """Keeps TensorFlow from leaving out a send that nothing waits for, whose receiver would hang.

        An assignment is never left out.
        """
        with tf.control_dependencies(sent):
            self._count.assign_add(1)

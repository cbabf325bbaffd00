"""Exchange: sends tensors between workers by TensorFlow's collectives; a scope for variables on one device.

exchange = Exchange(strategy)                           # in a `tf.function`, on every worker
sums = exchange.collect([a, b], owners=[0, 1])          # on worker 0 the sum of a, on worker 1 the sum of b
values = exchange.broadcast([c, spec], senders=[0, 1])  # c of worker 0 and d of worker 1, on both
with outside_strategies(), tf.device("CPU:1"):
    variable = tf.Variable(0.0)                         # on CPU:1 alone
"""

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute import distribute_lib
from tensorflow.python.ops import resource_variable_ops

from distloop.distributed import collectives, strategies, tensorflow_internals
from distloop.distributed.devices import HOST
from distloop.optimizers import gradients


class Exchange:
    """Sends tensors between the workers of a run."""

    def __init__(self, strategy: tf.distribute.Strategy):
        """Prepares; all workers make one."""
        self._strategy = strategy
        self._worker, self._num_workers = collectives.worker_index(strategy), collectives.num_workers(strategy)
        self._has_gpus = strategies.has_gpus(strategy)
        for pair in itertools.combinations(range(self._num_workers), 2):  # all workers number the pairs alike
            strategy.extended._collective_keys.get_group_key([_name(pair)])
        with outside_strategies(), tf.device(HOST):
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
                sent.append(self._send(sender, value, _name(sorted([sender, receiver])), 2))
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
                flat = self._send(sender, flat, self._strategy.extended.worker_devices[0], self._num_workers)
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

    def _send(self, sender: int, value: tf.Tensor | tf.TensorSpec, group: str, size: int) -> tf.Tensor:
        """Returns a tensor of one worker on each of a group of workers, bit for bit, in some messages.

        All of the group call it, in a `tf.function`, outside of replicas. The first device of each takes part.

        Args:
            sender: the index of the worker.
            value: the tensor on that worker, of static shape; its spec on the others.
            group: its name: that of a pair, or, for all workers, the device, as when a variable is made.
            size: the number of workers in the group.
        """
        keys, messages = self._strategy.extended._collective_keys, list[tf.Tensor]()
        key = keys.get_group_key([group])
        sent = {2: tf.float16, 4: tf.float32, 8: tf.float64}[value.dtype.size]  # collectives know few types
        most, count = tensorflow_internals.LARGEST_MESSAGE_BYTES // value.dtype.size, value.shape.num_elements()
        with tf.device(self._strategy.extended.worker_devices[0]):
            flat = tf.bitcast(tf.reshape(value, [-1]), sent) if self._worker == sender else None
            for start in range(0, max(count, 1), most):
                ids = {"group_size": size, "group_key": key, "instance_key": keys.get_instance_key(key, group)}
                shape = [min(most, count - start)]
                with tf.control_dependencies(messages[-1:]):
                    if flat is not None:
                        message = tf.raw_ops.CollectiveBcastSendV2(input=tf.slice(flat, [start], shape), **ids)
                    else:
                        message = tf.raw_ops.CollectiveBcastRecvV2(T=sent, shape=shape, **ids)
                messages.append(message)
            if flat is not None:
                with tf.control_dependencies(messages):
                    return tf.identity(value)
            received = tf.concat(messages, 0) if len(messages) > 1 else messages[0]
            return tf.reshape(tf.bitcast(received, value.dtype), value.shape)


def _name(pair: Sequence[int]) -> str:
    return f"workers {pair[0]} and {pair[1]}"


@contextlib.contextmanager
def outside_strategies() -> Iterator[None]:
    """Enters a scope without a strategy, inside that of one: variables made in it are on one device, and not mirrored.

    TensorFlow refuses to nest the default strategy's scope, and each strategy makes the variables of its own.
    """

    def create(next_creator: Any, *, colocate_with: Any = None, **settings: Any) -> tf.Variable:
        settings = {name: value for name, value in settings.items() if name != "use_resource"}
        with contextlib.nullcontext() if colocate_with is None else tf.device(colocate_with.device):
            return resource_variable_ops.ResourceVariable(**settings)

    distribute_lib._push_per_thread_mode(distribute_lib._get_default_replica_mode())
    try:
        with tf.variable_creator_scope(create):
            yield
    finally:
        distribute_lib._pop_per_thread_mode()

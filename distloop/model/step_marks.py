"""Step marks: after an error in the compiled loop, whether each variable has the value of a finished step.

    marks = StepMarks(strategy)
    with marks.around(is_fetched):              # in the compiled loop
        train_step(batch)
    marks.are_equal                             # on the host, once an error has ended the loop

Where an operation fails, TensorFlow begins no other one: what a step wrote before stays. So a step raises a count on
the host when its batch is there, before its first write, and a count on each device after its last write there.
"""

import contextlib
from collections.abc import Iterator, Sequence

import tensorflow as tf

from distloop.distributed import strategies
from distloop.distributed.devices import HOST, short_device
from distloop.graph_functions import may_write


class StepMarks:
    """The numbers of steps that have begun, and that have ended on each device."""

    def __init__(self, strategy: tf.distribute.Strategy):
        """Creates the counts; call it outside a `tf.function`."""
        self._begun = _count(HOST)
        lead = strategies.lead_device(strategy)
        devices = [lead, HOST, *strategies.replica_devices(strategy)]
        self._ended = {short_device(device): _count(device) for device in devices}
        self._lead = short_device(lead)

    @property
    def are_equal(self) -> bool:
        """Whether each step that has begun has ended on all devices."""
        return all(int(ended) == int(self._begun) for ended in self._ended.values())

    @contextlib.contextmanager
    def around(self, is_fetched: Sequence[tf.Tensor]) -> Iterator[None]:
        """Counts the step that is traced, or runs eagerly, in this block.

        Args:
            is_fetched: tensors that are there once the batch is; the step writes nothing before.
        """
        with tf.control_dependencies(is_fetched):
            begun = self._begun.assign_add(1, read_value=False)
        is_eager, graph = tf.executing_eagerly(), tf.compat.v1.get_default_graph()
        num_ops = 0 if is_eager else len(graph.get_operations())
        yield
        writes = [] if is_eager else [op for op in graph.get_operations()[num_ops:] if may_write(op)]
        for op in writes:
            op._add_control_input(begun)  # replicas are traced in threads, which no scope of this one reaches
        for device, ended in self._ended.items():
            with tf.device(device), tf.control_dependencies([op for op in writes if self._device_of(op) == device]):
                ended.assign_add(1, read_value=False)

    def _device_of(self, op: tf.Operation) -> str:
        """Returns the device whose count follows an operation."""
        device = short_device(op.device) if op.device else self._lead
        return device if device in self._ended else self._lead


def _count(device: str) -> tf.Variable:
    with tf.device(device):
        return tf.Variable(0, dtype=tf.int64, trainable=False)

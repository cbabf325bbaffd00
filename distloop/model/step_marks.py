"""Step marks: when each step of the compiled loop began and ended, and so whether an error has left a finished step.

    marks = StepMarks(strategy)
    marks.start(count)                          # in the compiled loop, before its steps
    begun = marks.begin(number, is_fetched)     # in each step
    train_step(batch)
    ended_at = marks.end(number, begun, failed)
    marks.are_equal                             # on the host, once an error has ended the loop

Where an operation fails, TensorFlow begins no other one: what a step wrote before stays. So a step records the time on
the host when its batch is there, before its first write, and another one after its last write there; for each other
device, it raises a count after its last write there.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.ops.resource_variable_ops import ResourceVariable

from distloop.distributed import strategies
from distloop.distributed.devices import HOST, short_device
from distloop.graph_functions import has_clock, may_write, read_clock

_HOST = short_device(HOST)


class StepMarks:
    """The times at which the steps of a call have begun and ended, and how many each other device has ended.

    Attributes:
        times: `[count]` each: when the steps' batches were there, and what `end` recorded, by `read_clock`; 0: not yet.
    """

    def __init__(self, strategy: tf.distribute.Strategy):
        """Creates the variables; call it outside a `tf.function`."""
        self.times = [_variable(HOST, tf.float64, [None]) for _ in range(2)]
        lead = strategies.lead_device(strategy)
        devices = {short_device(device): device for device in [lead, *strategies.replica_devices(strategy)]}
        self._num_ended = {name: _variable(device, tf.int64, []) for name, device in devices.items() if name != _HOST}
        self._lead = short_device(lead)

    @property
    def are_equal(self) -> bool:
        """Whether each step that has begun has ended on all devices."""
        begun, ended = (int(np.count_nonzero(times.numpy())) for times in self.times)
        return all(begun <= count for count in (ended, *map(int, self._num_ended.values())))

    def start(self, count: tf.Tensor) -> None:
        """Forgets the steps before; `count` is the most steps that follow."""
        self.times[1].assign(self.times[0].assign(tf.zeros([count], tf.float64)))  # one after the other
        for num_ended in self._num_ended.values():
            num_ended.assign(0)

    def begin(self, number: tf.Tensor, is_fetched: Sequence[tf.Tensor]) -> Any:
        """Records that a step begins; returns the operation, None eagerly.

        Args:
            number: of the step, from 0 in each call of the loop.
            is_fetched: tensors that are there once its batch is; the step writes nothing before.
        """
        with tf.device(HOST), tf.control_dependencies(is_fetched):
            return _record(self.times[0], number)[0]

    def end(self, number: tf.Tensor, begun: Any, failed: tf.Tensor, time: tf.Tensor | None = None) -> tf.Tensor:
        """Records that a step has ended, once all that was traced since its beginning is written; returns the time.

        Args:
            number: of the step.
            begun: as `begin` returned it.
            failed: what the host has to know before.
            time: recorded in place of the present one, which is not waited for: when the step began.
        """
        operations = [] if begun is None else begun.graph.get_operations()
        writes: dict[str, list[Any]] = {name: [] for name in (_HOST, *self._num_ended)}
        for op in filter(may_write, operations[operations.index(begun) + 1 :] if operations else ()):
            op._add_control_input(begun)  # replicas are traced in threads, which no scope of this one reaches
            writes.get(short_device(op.device) if op.device else "", writes[self._lead]).append(op)
        for name, num_ended in self._num_ended.items():
            with tf.device(num_ended.device), tf.control_dependencies(writes[name]):
                num_ended.assign_add(1, read_value=False)
        with tf.device(HOST), tf.control_dependencies(writes[_HOST] if time is not None else [*writes[_HOST], failed]):
            return _record(self.times[1], number, time)[1]


def _variable(device: str, dtype: tf.DType, shape: Sequence[int | None]) -> tf.Variable:
    # On this device alone, where the caller is in the scope of a strategy, too. An array: eagerly, `tf.zeros` sends its
    # shape to the device, which can fail with the error of another thread, or hang: threads share one rendezvous.
    with tf.device(device):
        return ResourceVariable(np.zeros([0] * len(shape)), dtype=dtype, shape=shape, trainable=False)


def _record(times: tf.Variable, number: tf.Tensor, time: tf.Tensor | None = None) -> tuple[Any, tf.Tensor]:
    """Writes the time of a step, 1 where a graph has no clock; returns the operation and the time."""
    now = (read_clock() if time is None else time) if has_clock() else tf.constant(1.0, tf.float64)
    return tf.raw_ops.ResourceScatterUpdate(resource=times.handle, indices=number, updates=now), now

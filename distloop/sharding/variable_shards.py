"""Variable shards: plans which device updates which shard, and joins stored shards into one variable.

plan([1280, 320], [64, 64], 2, [0, 0])     # [[Slice(0, 768, 0), Slice(768, 512, 1)], [Slice(0, 320, 1)]]
joined = JoinedVariable("momentum", [first, second], (120, 100))
joined.assign(value), tf.identity(joined)                      # as if it were one variable
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import tensorflow as tf

from distloop.graph_functions import graph_function
from distloop.variables import ComposedVariable, tensorflow_variable

# TensorFlow takes slices that begin at 64 bytes without a copy: 16 elements of float32.
_ALIGNMENT = 16
# A variable is cut between rows if these are at least so large, and there are so many: then replicas take over the
# shards of others row by row, without new memory, which would cost more than the copy.
_SMALLEST_ROW, _FEWEST_ROWS = 64, 1000


class Slice(NamedTuple):
    """Some elements of a flat variable, and the number of the device that updates them."""

    start: int
    size: int
    device: int


def has_rows(shape: Sequence[int]) -> bool:
    """Returns whether a variable of a shape is cut between rows, and written by rows."""
    row = math.prod(shape[1:])
    return len(shape) > 1 and row >= _SMALLEST_ROW and shape[0] * row >= _FEWEST_ROWS * math.lcm(row, _ALIGNMENT)


def unit(shape: Sequence[int]) -> int:
    """Returns the number of elements of which the shards of a variable have a multiple."""
    return math.lcm(math.prod(shape[1:]), _ALIGNMENT) if has_rows(shape) else 4 * _ALIGNMENT


def plan(sizes: Sequence[int], units: Sequence[int], count: int, taken: Sequence[int]) -> list[list[Slice]]:
    """Splits variables over devices so that all have alike, and cuts as few as possible.

    The largest variables come first, each to the device that has least; what goes beyond the mean goes to the next one.

    Args:
        sizes: the elements of each variable.
        units: the elements of which the first shards of a variable have a multiple; all, if it may not be cut.
        count: of the devices.
        taken: the elements that each device has already.

    Returns:
        The slices of each variable, in the order of its elements.
    """
    load = list(taken)
    mean = (sum(sizes) + sum(taken)) / count
    slices: list[list[Slice]] = [[] for _ in sizes]
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        start = 0
        while start < sizes[i] or not slices[i]:  # one without elements has a shard, too
            device, rest = load.index(min(load)), sizes[i] - start
            room = mean - load[device]
            size = units[i] * max(1, round(room / units[i])) if rest > room + units[i] else rest
            slices[i].append(Slice(start, size, device))
            load[device] += size
            start += size
    return slices


@dataclass(frozen=True)
class VariableShard:
    """A shard of a variable that one device updates.

    Attributes:
        variable: the variable of the model.
        replica: the variable of the replica on that device.
        start, size: the shard's elements in the flat variable.
        shape: of its values, `[rows, ...]` or `[size]`; that of the variable if the shard is all of it.
        device: its name.
        worker: the index of the worker that has this device.
        view: `replica` if the shard is all of it; else a variable on that device, with the shard's values while the
            update runs. Of a shard on another worker, a variable without elements.
        trained: the Keras variable around the view, for the optimizer.
    """

    variable: Any
    replica: tf.Variable
    start: int
    size: int
    shape: tuple[int, ...]
    device: str
    worker: int
    view: tf.Variable
    trained: Any

    @property
    def is_here(self) -> bool:
        """Whether a device of this worker updates the shard."""
        return tuple(self.view.shape) == self.shape

    @property
    def rows(self) -> tf.Tensor:
        """The numbers of the shard's rows, if it consists of rows."""
        first = self.start * self.replica.shape[0] // self.replica.shape.num_elements()
        return tf.range(first, first + self.shape[0])

    def __tf_tensor__(self, dtype: Any = None, name: str | None = None) -> tf.Tensor:
        """Returns the weights of the shard, in the shape of the view; without a copy."""
        return self.take(tf.identity(self.replica))

    def take(self, value: tf.Tensor) -> tf.Tensor:
        """Returns the elements of the shard out of a tensor of the variable's size, in the shape of the view."""
        with tf.device(self.device):
            flat = tf.slice(tf.reshape(value, [-1]), [self.start], [self.view.shape.num_elements()])
            return tf.reshape(flat, self.view.shape)


class JoinedVariable(ComposedVariable):
    """Variables on several devices as one, of which each has some elements.

    All workers convert it to a tensor, or none, if some shards are on others: each waits until all are there.

    Attributes:
        name, shape, dtype: of the variable.
        shards: the TensorFlow variables, in the order of their elements; those of other workers have no value here.
    """

    is_mirrored = False

    def __init__(
        self,
        name: str,
        shards: Sequence[Any],
        shape: Sequence[int],
        shapes: Sequence[Sequence[int]] | None = None,
        read: Callable[[], Sequence[tf.Tensor]] | None = None,
    ):
        """Stores the shards.

        Args:
            name: of the variable.
            shards: its variables.
            shape: of the variable.
            shapes: of the shards, each on the worker that has it; None: all are here.
            read: returns the values of all shards, on every worker, in a `tf.function`; None: all are here.
        """
        self.name = name
        self.shards = tuple(tensorflow_variable(shard) for shard in shards)
        self.shape = tf.TensorShape(shape)
        self.dtype = self.shards[0].dtype
        self._shapes = [tuple(shape) for shape in shapes or [shard.shape for shard in self.shards]]
        self.is_here = read is None
        self._read = read or (lambda: self.shards)
        self._read_eagerly = graph_function(self._read) if read else self._read

    def value(self) -> tf.Tensor:
        """Returns the value, on the device of the caller."""
        shards = self._read_eagerly() if tf.executing_eagerly() else self._read()
        return tf.reshape(tf.concat([tf.reshape(shard, [-1]) for shard in shards], 0), self.shape)

    def assign(self, value: Any) -> None:
        """Sets the shards to those of a value."""
        flat = tf.reshape(tf.cast(value, self.dtype), [-1])
        start = 0
        for shard, shape in zip(self.shards, self._shapes, strict=True):
            size = math.prod(shape)
            if tuple(shard.shape) == shape:  # it is here
                with tf.device(shard.device):
                    shard.assign(tf.reshape(flat[start : start + size], shape))
            start += size

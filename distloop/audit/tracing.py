"""Traces of user code: calls a function in a graph as one of several replicas, and collects its operations.

    with as_replica(1, 2, used) as operations:
        loss_fn(batch, True)

This module does not know what the operations are searched for.
"""

import contextlib
import random
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.eager import context

from distloop.graph_functions import graph_function, with_called

COLLECTIVES = {"all_reduce", "all_gather"}
_HELD = 0.9  # a draw; Keras's dropout then drops nothing
_DRAWS = re.compile("Random(?!.*Get)|TruncatedNormal|Multinomial")  # types of operations


@contextlib.contextmanager
def as_replica(replica: int, num_replicas: int, used: set[str]) -> Iterator[list[tf.Operation]]:
    """Calls user code as a replica of several, on one device, while a graph is traced.

    Args:
        replica: its number.
        num_replicas: the number of replicas that the code sees.
        used: gets the names of the `COLLECTIVES` that the code calls, and of what it asks about where it runs, such as
            "replica_id_in_sync_group".

    Yields:
        A list that holds the new operations afterwards. Placeholders are left out: only the first of two calls adds
        them, for what the graph captures.
    """
    graph = tf.compat.v1.get_default_graph()
    operations: list[tf.Operation] = []
    before = len(graph.get_operations())
    with _ReplicaContext(replica, num_replicas, used):
        yield operations
    operations += [op for op in graph.get_operations()[before:] if op.type != "Placeholder"]


class _ReplicaContext(tf.distribute.ReplicaContext):
    """Stands for one of several replicas; a collective operation returns this replica's own value."""

    def __init__(self, replica: int, num_replicas: int, used: set[str]):
        super().__init__(tf.distribute.get_strategy(), 0)  # TensorFlow's default one, whose variables have one part
        self._replica, self._num_replicas, self._used = replica, num_replicas, used

    @property
    def replica_id_in_sync_group(self) -> int:
        self._used.add("replica_id_in_sync_group")
        return self._replica

    @property
    def num_replicas_in_sync(self) -> int:
        self._used.add("num_replicas_in_sync")
        return self._num_replicas

    def all_reduce(self, reduce_op: Any, value: Any, options: Any = None) -> Any:
        self._used.add("all_reduce")
        return value

    def all_gather(self, value: Any, axis: Any, options: Any = None) -> Any:
        self._used.add("all_gather")
        return value


def drawing_operations(operations: Iterable[tf.Operation]) -> list[tf.Operation]:
    """Returns the operations that draw random numbers."""
    return [op for op in operations if _DRAWS.search(op.type)]


def labelled_operations(operations: Iterable[tf.Operation]) -> Iterator[tuple[tf.Operation, tf.Tensor, int]]:
    """Yields the operations that take numbers of classes, each with these numbers and how many classes there are.

    `tf.one_hot` accepts any number; the cross entropy of others is an error on a CPU, and NaN on a GPU.
    """
    for op in operations:
        if op.type == "SparseSoftmaxCrossEntropyWithLogits":
            logits, numbers = op.inputs
            classes = logits.shape[-1]
        elif op.type == "OneHot":
            numbers, classes = op.inputs[0], tf.get_static_value(op.inputs[1])
        else:
            continue
        if classes is not None:
            yield op, tf.cast(numbers, tf.int64), int(classes)


def hold_draws(operations: Sequence[tf.Operation]) -> bool:
    """Replaces floating-point random numbers in a graph by a constant, so that whole and halved batches get the same.

    Returns whether random numbers are left: whole numbers, and those in functions that the operations call.
    """
    held = [op for op in drawing_operations(operations) if op.outputs[0].dtype.is_floating]
    for op in held:
        drawn = op.outputs[0]
        consumers = drawn.consumers()
        constant = tf.fill(tf.shape(drawn), tf.cast(_HELD, drawn.dtype))
        for consumer in consumers:
            for i, tensor in enumerate(consumer.inputs):
                if tensor is drawn:
                    consumer._update_input(i, constant)  # TensorFlow has no public way to rewire an operation
    return len(held) < len(drawing_operations(with_called(operations)))


def compiled(fn: Callable[..., Any], *arguments: Any) -> Any:
    """Returns a concrete function for the given arguments."""
    return graph_function(fn).get_concrete_function(*arguments)


@contextlib.contextmanager
def preserved_random_state() -> Iterator[None]:
    """Restores the global random state of Python, NumPy and TensorFlow on exit."""
    eager = context.context()  # private: TensorFlow's seed, and the generator of operation seeds, if there is one yet
    python, numpy, tensorflow = random.getstate(), np.random.get_state(), (eager._seed, getattr(eager, "_rng", None))
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        eager._seed, eager._rng = tensorflow

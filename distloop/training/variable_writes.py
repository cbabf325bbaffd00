"""Variables that a piece of the graph writes: find them, read and assign them, restore them.

    with recorded_writes(candidates) as written:
        outputs = loss_fn(rows, True)
    written                                            # the BatchNormalization statistics, random streams, ...

It does not know what writes the variables, or why they are restored.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from distloop.training.state import TrainState
from distloop.variables import tensorflow_variable

READS = {"ReadVariableOp", "ResourceGather", "ResourceGatherNd", "VariableShape", "VarIsInitializedOp"}


def read(variables: Sequence[Any]) -> list[tf.Tensor]:
    """Returns the values of some variables; in replica context."""
    return [tf.identity(v) for v in variables]


def assign(variables: Sequence[Any], values: Sequence[tf.Tensor]) -> None:
    """Assigns a value to each variable; in replica context."""
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)


@contextlib.contextmanager
def recorded_writes(candidates: Sequence[Any]) -> Iterator[list[Any]]:
    """Records which variables the operations traced in this block may write; call in replica context.

    Eagerly, a step's writes are unknown before it runs, and all replicas must treat the same variables alike: every
    candidate counts as written.

    Args:
        candidates: the variables to look for.

    Yields:
        A list, filled on exit: the candidates whose resource is an input of any operation but a read.
    """
    written: list[Any] = []
    graph = tf.compat.v1.get_default_graph()
    num_ops = len(graph.get_operations())
    yield written
    if tf.executing_eagerly():
        written += candidates
        return
    resources = {
        id(outermost(tensor))
        for op in graph.get_operations()[num_ops:]
        if op.type not in READS
        for tensor in op.inputs
        if tensor.dtype == tf.resource
    }
    written += [v for v in candidates if id(tensorflow_variable(v).handle) in resources]


@contextlib.contextmanager
def restored_writes(state: TrainState) -> Iterator[None]:
    """Restores non-trainable variables on exit, except RNG state, which the loop restores; call in replica context."""
    seeds = {id(v) for v in state.seeds}
    candidates = [v for v in state.untrained_variables if id(v) not in seeds]
    before = read(candidates)
    with recorded_writes(candidates) as written:
        yield
    are_written = {id(v) for v in written}
    for variable, value in zip(candidates, before, strict=True):
        if id(variable) in are_written:
            variable.assign(value)


def outermost(tensor: tf.Tensor) -> tf.Tensor:
    """Returns the eager tensor that a tensor captured by a function's graph stands for."""
    while (graph := getattr(tensor, "graph", None)) is not None:
        outer = next((outer for outer, inner in getattr(graph, "captures", ()) if inner is tensor), None)
        if outer is None:
            break
        tensor = outer
    return tensor

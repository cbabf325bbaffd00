"""Variables that a piece of the graph writes: find them, read and assign them, restore them.

    with recorded_writes(candidates) as written:
        outputs = loss_fn(rows, True)
    written                                            # the BatchNormalization statistics, random streams, ...

    with own_values(variables, values) as scope:       # nothing is written
        outputs = loss_fn(rows, True)
    scope.get_current_value(variables[0])

It does not know what writes the variables, or why they are restored.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from distloop.operations import written_resources
from distloop.training.state import TrainState
from distloop.variables import tensorflow_variable


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

    Eagerly, all replicas must treat the same variables alike, and a step's writes are unknown before it runs: each
    candidate that is not trainable counts as written, and a trainable one if its value changed on any replica.

    Args:
        candidates: the variables to look for.

    Yields:
        A list, filled on exit with the candidates that are written.
    """
    written: list[Any] = []
    if tf.executing_eagerly():
        before = read(candidates)
        yield written
        are_changed = _are_changed(candidates, before)
        written += [v for v, is_changed in zip(candidates, are_changed, strict=True) if is_changed or not v.trainable]
        return
    graph = tf.compat.v1.get_default_graph()
    num_ops = len(graph.get_operations())
    yield written
    resources = written_resources(graph.get_operations()[num_ops:])
    written += [v for v in candidates if id(tensorflow_variable(v).handle) in resources]


def _are_changed(variables: Sequence[Any], before: Sequence[tf.Tensor]) -> list[bool]:
    """Returns whether each variable has another value than before on any replica; eagerly, in replica context."""
    changes = [
        float(value.numpy().tobytes() != old.numpy().tobytes())
        for value, old in zip(read(variables), before, strict=True)
    ]
    context = tf.distribute.get_replica_context()
    if context.num_replicas_in_sync > 1:
        changes = context.all_reduce(tf.distribute.ReduceOp.SUM, tf.constant(changes)).numpy()
    return [bool(change) for change in changes]


def own_values(variables: Sequence[Any], values: Sequence[tf.Tensor]) -> keras.StatelessScope:
    """Returns a scope in which Keras variables have other values, and what is assigned to any stays in the scope."""
    return keras.StatelessScope(list(zip(variables, values, strict=True)), collect_losses=True)


@contextlib.contextmanager
def restored_writes(state: TrainState) -> Iterator[None]:
    """Restores the model's variables on exit; call in replica context.

    Random streams and states of recurrent layers go on from batch to batch; the loop restores them.
    """
    going_on = {id(v) for v in (*state.seeds, *state.recurrent_states)}
    candidates = [v for v in (*state.untrained_variables, *state.trained_variables) if id(v) not in going_on]
    before = read(candidates)
    with recorded_writes(candidates) as written:
        yield
    are_written = {id(v) for v in written}
    for variable, value in zip(candidates, before, strict=True):
        if id(variable) in are_written:
            variable.assign(value)

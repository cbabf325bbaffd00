"""Variable writes: finds the variables that the forward pass writes, restores them, and merges their values.

    with recorded_writes(candidates) as mutated:
        outputs = loss_fn(rows, True)
    mutated                                            # the BatchNormalization statistics, random streams, ...

    with own_values(variables, values) as scope:       # nothing is written
        outputs = loss_fn(rows, True)
    scope.get_current_value(variables[0])

    state_updates = StateUpdates(state, microbatches=4, replaced=[])
    flat = state_updates.flatten(mutated, values, [], rows, microbatch)    # summed over microbatches by the caller
    state_updates.rewind(mutated, before, microbatch)
    values, _ = state_updates.merge(mutated, after, flat)

Each microbatch of a replica, virtual or not, starts from the values that the variables have when the step begins. A
float gets the mean over the rows, any other variable the value of its replica's last microbatch; of virtual replicas,
that of the first one, on every replica. Random streams and Keras metrics go on from one microbatch to the next.
"""

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from distloop.graph_functions import assigned_resources
from distloop.model.state import TrainState
from distloop.variables import tensorflow_variable


def read(variables: Sequence[Any]) -> list[tf.Tensor]:
    """Returns the values of some variables, each on its device; in replica context."""
    values = []
    for variable in variables:
        with tf.device(tensorflow_variable(variable).device):  # as of a stage of a pipeline
            values.append(tf.identity(variable))
    return values


def assign(variables: Sequence[Any], values: Sequence[tf.Tensor], unless: tf.Tensor | None = None) -> None:
    """Assigns a value to each variable, unless a scalar condition is true; in replica context."""
    for variable, value in zip(variables, values, strict=True):
        with tf.device(tensorflow_variable(variable).device):
            variable.assign(value if unless is None else tf.where(unless, variable, value))


@contextlib.contextmanager
def recorded_writes(candidates: Sequence[Any], leave_out: Collection[str] = ()) -> Iterator[list[Any]]:
    """Records which candidates the operations traced in this block may write; call in replica context.

    Eagerly, all replicas must treat the same variables alike, and a step's writes are unknown before it runs: each
    candidate that is not trainable counts as mutated, and a trainable one if its value changed on any replica.

    Args:
        candidates: variables.
        leave_out: names of operations that do not count, read on exit.

    Yields:
        A list, filled on exit with the candidates that are written.
    """
    mutated: list[Any] = []
    if tf.executing_eagerly():
        before = read(candidates)
        yield mutated
        ids = {id(v) for v in changed(candidates, before)}
        mutated += [v for v in candidates if id(v) in ids or not v.trainable]
        return
    graph = tf.compat.v1.get_default_graph()
    num_ops = len(graph.get_operations())
    yield mutated
    resources = assigned_resources(op for op in graph.get_operations()[num_ops:] if op.name not in leave_out)
    mutated += [v for v in candidates if id(tensorflow_variable(v).handle) in resources]


def changed(variables: Sequence[Any], before: Sequence[tf.Tensor]) -> list[Any]:
    """Returns the variables that have another value than before on any replica; eagerly, in replica context."""
    pairs = zip(read(variables), before, strict=True)
    changes = [float(value.numpy().tobytes() != old.numpy().tobytes()) for value, old in pairs]
    context = tf.distribute.get_replica_context()
    if context.num_replicas_in_sync > 1:
        changes = context.all_reduce(tf.distribute.ReduceOp.SUM, tf.constant(changes)).numpy()
    return [v for v, change in zip(variables, changes, strict=True) if change]


def own_values(variables: Sequence[Any], values: Sequence[tf.Tensor]) -> keras.StatelessScope:
    """Returns a scope in which Keras variables have other values, and what is assigned to any stays in the scope."""
    return keras.StatelessScope(list(zip(variables, values, strict=True)), collect_losses=True)


@contextlib.contextmanager
def restored_writes(state: TrainState) -> Iterator[None]:
    """Restores the model's variables on exit; call in replica context.

    Random streams and states of recurrent layers go on from batch to batch; the loop restores them. Where an operation
    of a graph fails, nothing is restored: `state.passes_write` is then whether that matters.
    """
    going_on = {id(v) for v in (*state.seeds, *state.recurrent_states)}
    candidates = [v for v in (*state.untrained_variables, *state.trained_variables) if id(v) not in going_on]
    before = read(candidates)
    try:
        with recorded_writes(candidates) as mutated:
            yield
    except BaseException:
        if tf.executing_eagerly():
            assign(candidates, before)
        raise
    state.passes_write = state.passes_write or bool(mutated) and not tf.executing_eagerly()
    values = {id(v): value for v, value in zip(candidates, before, strict=True)}
    assign(mutated, [values[id(v)] for v in mutated])


def preserved(state: TrainState) -> contextlib.ExitStack:
    """Returns a scope that restores what no update trains, random streams too; for calls of the model by itself."""
    variables = [copy for v in state.untrained_variables for copy in state.replica_variables(v)]
    scope = contextlib.ExitStack()
    scope.callback(assign, variables, read(variables))
    return scope


class StateUpdates:
    """Merges what the microbatches of a batch write to a variable into one value; call in replica context.

    Attributes:
        carried: identities of the variables that go on from one microbatch to the next.
    """

    def __init__(self, state: TrainState, *, microbatches: int, replaced: Sequence[Any]):
        """Prepares.

        Args:
            state: what is trained.
            microbatches: of each replica, virtual or not.
            replaced: variables that get the maximum of their replacements; together N elements.

        Raises:
            ValueError: if the model has states of a whole batch's rows, and there are several microbatches.
        """
        if microbatches > 1 and state.recurrent_states:
            raise ValueError(
                f"{microbatches=} was given with a stateful recurrent layer, whose states belong to the rows of a "
                "whole batch: give microbatches=1, or stateful=False."
            )
        self.carried = {id(v) for v in (*state.seeds, *state.keras_metrics.variables().values())}
        self._microbatches = microbatches
        self._microbatches_here = state.replicas.per_device * microbatches
        self._num_microbatches = state.replicas.count * microbatches
        self._takes_first = state.replicas.same_bits and state.replicas.count > 1
        self._replaced = list(replaced)

    def with_mean(self, mutated: Sequence[Any]) -> list[Any]:
        """Returns the variables that get the mean over the rows."""
        return [v for v in mutated if id(v) not in self.carried and tf.as_dtype(v.dtype).is_floating]

    def from_first(self, mutated: Sequence[Any]) -> list[Any]:
        """Returns the variables that get the value of the first virtual replica."""
        others = self.carried | {id(v) for v in self.with_mean(mutated)}
        return [v for v in mutated if id(v) not in others] if self._takes_first else []

    def flatten(
        self,
        mutated: Sequence[Any],
        values: Sequence[Any],
        replacements: Sequence[tf.Tensor],
        rows: tf.Tensor,
        microbatch: tf.Tensor | int,
    ) -> tf.Tensor | None:
        """Returns what to sum over the microbatches, after one of them ran.

        Args:
            mutated: the variables that it wrote.
            values: what it wrote to each.
            replacements: for the replaced variables.
            rows: their number in the microbatch, without padding.
            microbatch: its number in its replica.

        Returns:
            `[F]`: the rows, each value times the rows; the bytes of values of the first virtual replica, zeros from the
            others; and `[P, N]` zeros but for the replacements at its index. None: there is nothing to sum.
        """
        pieces = []
        by_id = {id(v): value for v, value in zip(mutated, values, strict=True)}
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        if self._num_microbatches > 1 and (averaged := self.with_mean(mutated)):
            rows = tf.cast(rows, tf.float32)
            pieces += [rows, *(tf.cast(by_id[id(v)], tf.float32) * rows for v in averaged)]
        if from_first := self.from_first(mutated):
            is_first = tf.equal(replica * self._microbatches_here + microbatch, self._microbatches - 1)  # its last
            pieces += [tf.where(is_first, _to_bytes(by_id[id(v)]), 0.0) for v in from_first]
        if replacements:
            is_here = tf.equal(tf.range(self._num_microbatches), replica * self._microbatches_here + microbatch)  # [P]
            pieces.append(tf.where(is_here[:, tf.newaxis], _join(replacements), 0.0))
        return _join(pieces) if pieces else None

    def rewind(self, mutated: Sequence[Any], before: Mapping[int, tf.Tensor], microbatch: tf.Tensor | int) -> None:
        """Restores the mutated variables' values before the step, by their `id`, for the next microbatch, if any."""
        if self._microbatches == 1:
            return
        is_last = tf.equal(microbatch, self._microbatches - 1)
        for variable in mutated:
            if id(variable) not in self.carried:
                variable.assign(tf.where(is_last, tf.convert_to_tensor(variable), before[id(variable)]))

    def merge(
        self, mutated: Sequence[Any], after: Sequence[tf.Tensor], flat: tf.Tensor | None
    ) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """Returns the values that the mutated and the replaced variables get.

        Args:
            mutated: the variables that any microbatch wrote.
            after: their values on this replica.
            flat: the sum of `flatten` over all microbatches; None: there was nothing to sum.
        """
        if flat is None:
            return list(after), []
        values = {id(v): value for v, value in zip(mutated, after, strict=True)}
        if self._num_microbatches > 1 and (averaged := self.with_mean(mutated)):
            rows = flat[0]
            totals, flat = _cut(flat[1:], averaged)
            for variable, total in zip(averaged, totals, strict=True):
                mean = tf.cast(tf.math.divide_no_nan(total, rows), variable.dtype)
                values[id(variable)] = tf.where(rows > 0, mean, values[id(variable)])  # a batch may have no rows
        for variable in self.from_first(mutated):
            size = _to_bytes(values[id(variable)]).shape.num_elements()
            values[id(variable)] = _from_bytes(flat[:size], variable)
            flat = flat[size:]
        replacements: list[tf.Tensor] = []
        if self._replaced:
            replacements, _ = _cut(tf.reduce_max(tf.reshape(flat, [self._num_microbatches, -1]), 0), self._replaced)
        return list(values.values()), replacements


def _join(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Returns the elements of all tensors in one vector, float32."""
    flat = [tf.reshape(tf.cast(tensor, tf.float32), [-1]) for tensor in tensors]
    return tf.concat(flat, 0) if len(flat) > 1 else flat[0]


def _cut(flat: tf.Tensor, variables: Sequence[Any]) -> tuple[list[tf.Tensor], tf.Tensor]:
    """Returns the first elements of a vector in the variables' shapes, and the others."""
    shapes = [tf.TensorShape(variable.shape) for variable in variables]
    sizes = [shape.num_elements() for shape in shapes]
    *pieces, rest = tf.split(flat, [*sizes, flat.shape[0] - sum(sizes)])
    return [tf.reshape(piece, shape) for piece, shape in zip(pieces, shapes, strict=True)], rest


def _to_bytes(value: Any) -> tf.Tensor:
    """Returns the bytes of a tensor as float32 numbers, which keep them in a sum with zeros, `[n]`."""
    value = tf.convert_to_tensor(value)
    value = tf.cast(value, tf.uint8) if value.dtype == tf.bool else tf.bitcast(value, tf.uint8)
    return tf.reshape(tf.cast(value, tf.float32), [-1])


def _from_bytes(flat: tf.Tensor, variable: Any) -> tf.Tensor:
    """Returns a value for a variable from the result of `_to_bytes`."""
    dtype, shape = tf.as_dtype(variable.dtype), tf.TensorShape(variable.shape)
    per_element = [] if dtype.size == 1 else [dtype.size]
    value = tf.reshape(tf.cast(flat, tf.uint8), [*shape, *per_element])
    return tf.cast(value, tf.bool) if dtype == tf.bool else tf.bitcast(value, dtype)

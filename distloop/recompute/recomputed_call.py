"""One call of a layer that the backward pass computes again.

    outputs = RecomputedCall(layer, "net/block_0", layer.call, (arguments, options), first_calls)()

What the call computes is on no tape; in its place stands one operation, whose derivative calls the layer again under a
tape of its own. The second call sees the values that variables had before the first one, so it draws the same random
numbers, and it writes nothing. Recording an operation on a tape is a private part of TensorFlow.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.common.stateless_scope import get_stateless_scope
from tensorflow.compiler.tf2xla.ops import gen_xla_ops
from tensorflow.python.eager import record
from tensorflow.python.eager import tape as tapes
from tensorflow.python.ops import control_flow_util

from distloop.layer_calls import call_context, in_call_context
from distloop.operations import RECOMPUTED_SCOPE, outermost
from distloop.recompute.recomputation_limits import FirstCall, FirstCalls, is_continuous, refusal
from distloop.variables import tensorflow_variable


class RecomputedCall:
    """One call of a layer that is recomputed in the backward pass."""

    def __init__(
        self, layer: Any, path: str, call: Callable[..., Any], arguments: tuple[Any, Any], first_calls: FirstCalls
    ):
        """Prepares; nothing is computed yet.

        Args:
            layer: the layer.
            path: its path, for messages.
            call: its function.
            arguments: of the call, by position and by name.
            first_calls: gets this call.
        """
        self._layer, self._path, self._call, self._first_calls = layer, path, call, first_calls
        self._arguments = arguments
        self._flat = tf.nest.flatten(arguments, expand_composites=True)
        self._masks = _masks(self._flat)
        self._watched = [i for i, value in enumerate(self._flat) if _has_gradient(value) and _is_watched(value)]
        self._context = call_context()
        # By `id`. Later calls may write them before the second one.
        kept = [v for v in layer.non_trainable_variables if not _is_watched(tensorflow_variable(v).handle)]
        self._before = {id(v): tf.identity(tensorflow_variable(v)) for v in kept}
        if (outer := get_stateless_scope()) is not None:
            self._before |= outer.state_mapping
        self._changed: set[int] = set()  # the variables that the layer writes, by `id`
        self._reads: list[tf.Tensor] = []  # tensors that it is not given, and handles of variables; watched by a tape
        self._has_gradient: list[bool] = []  # of each output

    def __call__(self) -> Any:
        """Computes the layer and records how it is differentiated; returns its outputs."""
        graph = self._first_calls.graph
        scope_name, first = graph.get_name_scope(), len(graph.get_operations())
        for variable in self._layer.trainable_weights:
            tapes.variable_accessed(tensorflow_variable(variable))  # for tapes that watch what is read
        with record.stop_recording(), _Scope(self._before) as scope:
            outputs = self._call(*self._arguments[0], **self._arguments[1])
        operations = graph.get_operations()[first:]  # those of other replicas too, where it waits for them
        self._reads = self._find_reads(operations)
        flat = tf.nest.flatten(outputs, expand_composites=True)
        self._has_gradient = [_has_gradient(value) for value in flat]
        losses = [(loss, self._owners(loss)) for loss in scope.losses]
        with record.stop_recording():
            results = [tf.identity(v) for v in (*self._differentiable(flat), *(loss for loss, _ in losses))]
        self._write(scope)
        own = [op for op in operations if op.name.startswith(f"{scope_name}/")]
        first_call = FirstCall(self._path, scope_name, own, len(graph.get_operations()))
        first_call.refuse_writes()
        self._first_calls.add(first_call)
        self._record(results, first_call)
        remaining = iter(results)
        given = [next(remaining) if is_one else v for v, is_one in zip(flat, self._has_gradient, strict=True)]
        _attach_masks(given, _masks(flat))
        for loss, (_, owners) in zip(remaining, losses, strict=True):
            for owner in owners:
                owner.add_loss(loss)
        return tf.nest.pack_sequence_as(outputs, given, expand_composites=True)

    def _differentiable(self, flat: Sequence[Any]) -> list[tf.Tensor]:
        """Returns those of the flat outputs that have gradients."""
        return [value for value, is_one in zip(flat, self._has_gradient, strict=True) if is_one]

    def _find_reads(self, operations: Sequence[tf.Operation]) -> list[tf.Tensor]:
        """Returns what operations of the first call read of what a tape watches, besides the call's arguments."""
        given, made = {id(value) for value in self._flat}, {id(op) for op in operations}
        inputs = {id(tensor): tensor for op in operations for tensor in op.inputs if id(tensor) not in given}
        tensors = [t for t in inputs.values() if id(t.op) not in made and _has_gradient(t)]
        handles = {id(handle): handle for t in inputs.values() if t.dtype == tf.resource for handle in [outermost(t)]}
        return [tensor for tensor in (*tensors, *handles.values()) if _is_watched(tensor)]

    def _write(self, scope: "_Scope") -> None:
        """Writes, once, what the first call assigned to variables; keeps the values before it."""
        self._changed = set(scope.changed)
        written = [(variable, scope.state_mapping[key]) for key, variable in scope.changed.items()]
        for variable, value in written:
            plain = tensorflow_variable(variable)
            if getattr(value, "graph", self._first_calls.graph) is not self._first_calls.graph:
                raise refusal(self._path, f"writes {variable.path!r} in a loop or a branch of TensorFlow")
            if _is_watched(plain.handle):
                raise refusal(self._path, f"writes {variable.path!r}, which is trained")
            if id(variable) not in self._before:
                self._before[id(variable)] = tf.identity(plain)
        for variable, value in written:
            variable.assign(value)

    def _record(self, results: Sequence[tf.Tensor], first_call: FirstCall) -> None:
        """Records, on the tapes that watch an input, how to differentiate the results."""
        sources = [*(self._flat[i] for i in self._watched), *self._reads]
        if not sources or not results:
            return

        def differentiate(*slopes: Any) -> list[Any]:
            sources, tape, again = self._recompute(slopes, first_call)
            gradients: list[Any] = tape.gradient(again, sources, output_gradients=list(slopes))
            # All together: else the next layer is computed again while the activations of this one are still kept.
            known = tf.nest.flatten([g for g in gradients if g is not None], expand_composites=True)
            with tf.control_dependencies(known):
                together: list[Any] = tf.nest.map_structure(_identity, gradients, expand_composites=True)
            return together

        record.record_operation(RECOMPUTED_SCOPE, list(results), sources, differentiate)

    def _recompute(
        self, slopes: Sequence[Any], first_call: FirstCall
    ) -> tuple[list[tf.Tensor], tf.GradientTape, list[tf.Tensor]]:
        """Calls the layer again, not before the slopes are there.

        Args:
            slopes: the derivatives of the objective by the results.
            first_call: of the layer.

        Returns:
            What to differentiate by, the tape, and the results.
        """
        slopes = [slope.values if isinstance(slope, tf.IndexedSlices) else slope for slope in slopes]
        graph = tf.compat.v1.get_default_graph()
        with tf.name_scope(RECOMPUTED_SCOPE), tf.control_dependencies(slopes):
            flat, before = self._barrier(slopes)
            arguments, options = tf.nest.pack_sequence_as(self._arguments, flat, expand_composites=True)
            sources, first = [*(flat[i] for i in self._watched), *self._reads], len(graph.get_operations())
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                for source in sources:
                    tape.watch(source)
                with _Scope(before) as scope, in_call_context(self._context):
                    outputs = self._call(*arguments, **options)
            for loss in scope.losses:
                self._owners(loss)
        first_call.refuse_reads(graph.get_operations()[first:])
        again = self._differentiable(tf.nest.flatten(outputs, expand_composites=True))
        return sources, tape, [*again, *scope.losses]

    def _barrier(self, slopes: Sequence[tf.Tensor]) -> tuple[list[Any], dict[int, tf.Tensor]]:
        """Returns the arguments and the variables' values as tensors that are there after the slopes.

        What is computed from them is then never taken for what the first call computed, which would be kept. XLA knows
        no control dependencies, but a barrier.
        """
        changed = {key: value for key, value in self._before.items() if key in self._changed}
        tensors = [value for value in (*self._flat, *changed.values()) if _is_value(value)]
        if control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()):
            after = gen_xla_ops.xla_optimization_barrier([*tensors, *slopes])[: len(tensors)]
        else:
            after = [tf.identity(tensor) for tensor in tensors]
        remaining = iter(after)
        flat = [next(remaining) if _is_value(value) else value for value in self._flat]
        _attach_masks(flat, self._masks)
        return flat, self._before | dict(zip(changed, remaining, strict=True))

    def _owners(self, loss: Any) -> list[Any]:
        """Returns the layers that added a loss, and has Keras forget it."""
        owners = [part for part in self._layer._flatten_layers() if id(loss) in part._loss_ids]
        for owner in owners:
            owner._loss_ids.discard(id(loss))
        return owners


class _Scope(keras.StatelessScope):
    """A scope that keeps what is assigned to Keras variables.

    Attributes:
        changed: the variables, by `id`.
    """

    def __init__(self, values: Mapping[int, tf.Tensor]):
        """Takes values of variables by `id`; others have those that they have."""
        super().__init__(collect_losses=True, initialize_variables=False)
        self.state_mapping.update(values)
        self.changed: dict[int, Any] = {}

    def add_update(self, update: tuple[Any, Any]) -> None:
        """Keeps a value; no gradient flows through a variable that is written and read."""
        variable, value = update
        self.changed[id(variable)] = variable
        super().add_update((variable, tf.stop_gradient(value) if value.dtype.is_floating else value))


def _is_value(value: Any) -> bool:
    """Returns whether a flat argument is a tensor with a value, and no handle of a variable."""
    return isinstance(value, tf.Tensor) and value.dtype != tf.resource


def _has_gradient(value: Any) -> bool:
    return isinstance(value, tf.Tensor) and is_continuous(value)


def _is_watched(tensor: tf.Tensor) -> bool:
    """Returns whether a tape needs the gradient of a tensor or of a variable's handle."""
    return bool(record.should_record_backprop([tensor]))


def _identity(tensor: tf.Tensor | None) -> tf.Tensor | None:
    return None if tensor is None else tf.identity(tensor)


def _masks(values: Sequence[Any]) -> list[Any]:
    """Returns Keras's mask of each tensor; None: it has none."""
    return [getattr(value, "_keras_mask", None) for value in values]


def _attach_masks(values: Sequence[Any], masks: Sequence[Any]) -> None:
    """Attaches Keras's masks to tensors."""
    for value, mask in zip(values, masks, strict=True):
        if mask is not None:
            value._keras_mask = mask

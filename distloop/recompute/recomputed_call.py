"""One call of a layer that the backward pass computes again, and what such a layer must not do.

    outputs = RecomputedCall(layer, "net/block_0", layer.call, (arguments, options))()

On the tape stands one operation for the call, whose derivative calls the layer again under a tape of its own. The
second call sees the values that variables had before the first one, so it draws the same random numbers, and it writes
nothing. Whatever else the first call computed has a derivative that is an error. Recording an operation on a tape is a
private part of TensorFlow, and `tf.recompute_grad`, which does it, has no second derivatives, no sparse ones, and none
by tensors of the closure.
"""

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.common import global_state
from keras.src.backend.common.stateless_scope import get_stateless_scope
from tensorflow.compiler.tf2xla.ops import gen_xla_ops
from tensorflow.python.eager import record
from tensorflow.python.eager import tape as tapes
from tensorflow.python.ops import control_flow_util

from distloop.graph_functions import RECOMPUTED_SCOPE, may_write, outermost
from distloop.optimizers.keras_hooks import masks_of, with_masks
from distloop.variables import tensorflow_variable

_CONTEXT = ("current_call_ctx", "autocast_scope")  # what Keras knows in a call of a layer, such as `training`
_WITHOUT_SLOPE = ("Const", "Placeholder", "StopGradient")  # types of operations through which no gradient flows


class RecomputedCall:
    """One call of a layer that is recomputed in the backward pass."""

    def __init__(self, layer: Any, path: str, call: Callable[..., Any], arguments: tuple[Any, Any]):
        """Prepares; nothing is computed yet.

        Args:
            layer: the layer.
            path: its path, for messages.
            call: its function.
            arguments: of the call, by position and by name.
        """
        self._path, self._graph = path, tf.compat.v1.get_default_graph()
        self._layer, self._call, self._arguments = layer, call, arguments
        self._flat = _flatten(arguments)
        self._masks = masks_of(self._flat)
        self._watched = [i for i, value in enumerate(self._flat) if _has_gradient(value) and _is_watched(value)]
        # A copy: in Keras's own, a layer that is called with `training=False` changes `training` for all later ones.
        self._context = {name: copy.copy(global_state.get_global_attribute(name)) for name in _CONTEXT}
        # By `id`. Later calls may write them before the second one.
        kept = [v for v in layer.non_trainable_variables if not _is_watched(tensorflow_variable(v).handle)]
        self._before = {id(v): tf.identity(tensorflow_variable(v)) for v in kept}
        if (outer := get_stateless_scope()) is not None:
            self._before |= outer.state_mapping

    def __call__(self) -> Any:
        """Computes the layer and records how it is differentiated; returns its outputs.

        Raises:
            ValueError: if the layer writes what a second call would write again.
        """
        first = len(self._graph.get_operations())
        for variable in self._layer.trainable_weights:
            tapes.variable_accessed(tensorflow_variable(variable))  # for tapes that watch what is read
        with record.stop_recording(), _Scope(self._before) as scope:
            outputs = self._call(*self._arguments[0], **self._arguments[1])
        operations = self._graph.get_operations()[first:]  # those of other replicas too, where it waits for them
        own = [op for op in operations if op.name.startswith(f"{self._graph.get_name_scope()}/")]
        self._refuse_writes(own)
        self._computed = [t for op in own if op.type not in _WITHOUT_SLOPE for t in op.outputs if _has_gradient(t)]
        self._reads = self._find_reads(operations)  # tensors that it is not given, and handles of variables
        flat = _flatten(outputs)
        owners = [self._take_back(loss) for loss in scope.losses]
        with record.stop_recording():
            results = [tf.identity(value) for value in (*filter(_has_gradient, flat), *scope.losses)]
        self._write(scope)
        sources = self._sources(self._flat)
        self._refuse_leaks(sources)
        if sources and results:
            record.record_operation(RECOMPUTED_SCOPE, results, sources, self._differentiate)
        remaining = iter(results)
        passed = [next(remaining) if _has_gradient(value) else value for value in flat]
        with_masks(passed, masks_of(flat))
        for loss, layers in zip(remaining, owners, strict=True):
            for layer in layers:
                layer.add_loss(loss)
        return tf.nest.pack_sequence_as(outputs, passed, expand_composites=True)

    def _sources(self, flat: Sequence[Any]) -> list[tf.Tensor]:
        return [*(flat[i] for i in self._watched), *self._reads]

    def _find_reads(self, operations: Sequence[tf.Operation]) -> list[tf.Tensor]:
        """Returns what operations of the first call read of what a tape watches, besides the call's arguments."""
        arguments, made = {id(value) for value in self._flat}, {id(op) for op in operations}
        inputs = {id(tensor): tensor for op in operations for tensor in op.inputs if id(tensor) not in arguments}
        tensors = [t for t in inputs.values() if id(t.op) not in made and _has_gradient(t)]
        handles = {id(handle): handle for t in inputs.values() if t.dtype == tf.resource for handle in [outermost(t)]}
        return [tensor for tensor in (*tensors, *handles.values()) if _is_watched(tensor)]

    def _write(self, scope: "_Scope") -> None:
        """Writes, once, what the first call assigned to variables; keeps the values before it."""
        self._changed = set(scope.changed)  # by `id`
        for key, variable in scope.changed.items():
            value, plain = scope.state_mapping[key], tensorflow_variable(variable)
            if getattr(value, "graph", self._graph) is not self._graph:
                raise refusal(self._path, f"writes {variable.path!r} in a loop or a branch of TensorFlow")
            if _is_watched(plain.handle):
                raise refusal(self._path, f"writes {variable.path!r}, which is trained")
            if key not in self._before:
                self._before[key] = tf.identity(plain)
            variable.assign(value)

    def _differentiate(self, *slopes: Any) -> list[Any]:
        """Calls the layer again, not before the derivatives by its results are there; returns those by its sources."""
        values = [slope.values if isinstance(slope, tf.IndexedSlices) else slope for slope in slopes]
        with tf.name_scope(RECOMPUTED_SCOPE), tf.control_dependencies(values):
            flat, before = self._barrier(values)
            arguments, options = tf.nest.pack_sequence_as(self._arguments, flat, expand_composites=True)
            sources = self._sources(flat)
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                for source in sources:
                    tape.watch(source)
                self._refuse_leaks(sources)
                with _Scope(before) as scope, _in_call_context(self._context):
                    outputs = self._call(*arguments, **options)
            for loss in scope.losses:
                self._take_back(loss)
        again = [*filter(_has_gradient, _flatten(outputs)), *scope.losses]
        gradients: list[Any] = tape.gradient(again, sources, output_gradients=list(slopes))
        # All together: else the next layer is computed again while the activations of this one are still kept.
        with tf.control_dependencies(_flatten([g for g in gradients if g is not None])):
            return tf.nest.map_structure(
                lambda g: None if g is None else tf.identity(g), gradients, expand_composites=True
            )

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
        with_masks(flat, self._masks)
        return flat, self._before | dict(zip(changed, remaining, strict=True))

    def _take_back(self, loss: Any) -> list[Any]:
        """Has Keras forget a loss; returns the layers that added it."""
        owners = [layer for layer in self._layer._flatten_layers() if id(loss) in layer._loss_ids]
        for owner in owners:
            owner._loss_ids.discard(id(loss))
        return owners

    def _refuse_writes(self, operations: Sequence[tf.Operation]) -> None:
        """Refuses writes to variables that are no variables of Keras: the second call would write again."""
        for op in operations:
            if may_write(op):
                what = f"writes to a variable or a generator by TensorFlow's operation {op.type}"
                raise refusal(self._path, what)

    def _refuse_leaks(self, sources: Sequence[tf.Tensor]) -> None:
        """Has the tapes refuse to differentiate what leaves the first call by other ways than its outputs.

        Such a gradient would be lost, as no tape knows how the first call computed it.
        """
        for tensor in self._computed:
            record.record_operation("leak", [tensor], sources, functools.partial(self._refuse_leak, tensor))

    def _refuse_leak(self, tensor: tf.Tensor, *_: Any) -> None:
        what = f"keeps the tensor {tensor.name!r} of its call for later, by other ways than its outputs"
        raise refusal(self._path, what)


def refusal(path: str, what: str) -> ValueError:
    """Returns an error about a layer that cannot be recomputed, for what it does."""
    error = ValueError(
        f"recompute was given, and the layer {path!r}, which it matches, {what}; the backward pass cannot call it "
        "again: give a regular expression that leaves this layer out."
    )
    vars(error)["_keras_call_info_injected"] = True  # else Keras adds the arguments of all calls around it
    return error


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


def _flatten(structure: Any) -> list[Any]:
    return list(tf.nest.flatten(structure, expand_composites=True))


def _is_value(value: Any) -> bool:
    """Returns whether a flat argument is a tensor with a value, and no handle of a variable."""
    return isinstance(value, tf.Tensor) and value.dtype != tf.resource


def _has_gradient(value: Any) -> bool:
    return isinstance(value, tf.Tensor) and bool(value.dtype.is_floating or value.dtype.is_complex)


def _is_watched(tensor: tf.Tensor) -> bool:
    """Returns whether a tape needs the gradient of a tensor or of a variable's handle."""
    return bool(record.should_record_backprop([tensor]))


@contextlib.contextmanager
def _in_call_context(values: Mapping[str, Any]) -> Iterator[None]:
    """Enters the context of an earlier call."""
    before = {name: global_state.get_global_attribute(name) for name in values}
    for name, value in values.items():
        global_state.set_global_attribute(name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            global_state.set_global_attribute(name, value)

"""Recomputation: layers whose activations the backward pass computes again, in place of keeping them.

    spec = with_recomputation(spec, "block_")                 # acts where loss_fn is under a tape, in a graph

Only the inputs of such a layer are kept (Chen et al. 2016, arXiv:1604.06174). The second call sees the values that
variables had before the first one, so it draws the same random numbers, and it writes nothing. Recording an
operation on a tape is a private part of TensorFlow.
"""

import functools
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf
from keras.src.backend.common.stateless_scope import get_stateless_scope
from tensorflow.compiler.tf2xla.ops import gen_xla_ops
from tensorflow.python.eager import record
from tensorflow.python.ops import control_flow_util

from distloop.distributed import gathering
from distloop.distributed.pipeline import find_pipelines
from distloop.layer_calls import ReplacedCalls, call_context, in_call_context
from distloop.operations import outermost, written_resources
from distloop.training.spec import ModelSpec
from distloop.variables import layers_by_path, tensorflow_variable, top_layers

SCOPE = "recomputed"  # the name scope of operations of a second call
_MAX_PATHS = 8  # in an error message


def find_layers(model: Any, pattern: str) -> dict[str, Any]:
    """Returns the layers of a model in whose path a regular expression is found.

    Args:
        model: as for `named_variables`.
        pattern: the regular expression.

    Raises:
        ValueError: if there are none.
    """
    layers = {path: v for path, v in layers_by_path(model).items() if not isinstance(v, keras.layers.InputLayer)}
    chosen = {path: layer for path, layer in layers.items() if re.search(pattern, path)}
    if not chosen:
        paths = ", ".join([*list(layers)[:_MAX_PATHS], *(["..."] if len(layers) > _MAX_PATHS else [])])
        raise ValueError(
            f"recompute={pattern!r} was given, which is found in no path of a layer of the model ("
            f"{paths or 'it has no Keras layers'}): give another regular expression, or leave it out."
        )
    return chosen


def with_recomputation(spec: ModelSpec, pattern: str) -> ModelSpec:
    """Returns a spec whose `loss_fn`s recompute the layers in whose path a regular expression is found.

    Args:
        spec: what the user gives.
        pattern: the regular expression; empty: the spec stays as it is.

    Raises:
        ValueError: if no layer matches, as far as the layers are built, or the model has stages.
    """
    if not pattern:
        return spec
    if networks := find_pipelines(spec.model):
        raise ValueError(
            f"recompute={pattern!r} was given with a network of {len(networks[0])} stages, which are recomputed as a "
            "whole: give distloop.split(model, num_stages, recompute=True) in place of the setting."
        )
    if all(layer.built for top in top_layers(spec.model) for layer in top._flatten_layers()):
        find_layers(spec.model, pattern)  # else when the model is built and called
    return spec.with_functions(functools.partial(recomputing, model=spec.model, pattern=pattern))


def recomputing(fn: Callable[..., Any], *, model: Any, pattern: str) -> Callable[..., Any]:
    """Returns a function that recomputes layers where it is differentiated; elsewhere it is `fn`.

    Args:
        fn: a `loss_fn`, called with a batch and `training`; or another function, called with a batch alone.
        model: as for `named_variables`.
        pattern: a regular expression; of the layers within each other that match, the outer one is recomputed.
    """

    @functools.cache
    def replaced() -> ReplacedCalls:
        return ReplacedCalls(find_layers(model, pattern), _replacement)

    @functools.wraps(fn)
    def call(batch: Any, *arguments: Any) -> Any:
        is_training = bool(arguments) and bool(arguments[0])
        if not is_training or tf.executing_eagerly() or not record.could_possibly_record():
            return fn(batch, *arguments)
        before = _thread.passes
        _thread.passes = passes = _Passes(tf.compat.v1.get_default_graph())
        try:
            with replaced():
                outputs = fn(batch, *arguments)
            passes.refuse_leaks(outputs)
            return outputs
        finally:
            _thread.passes = before

    return call


class _Thread(threading.local):
    """What a thread, such as that of a replica, does at the moment."""

    passes: "_Passes | None" = None  # of the function that is traced; None: layers compute as ever


_thread = _Thread()


def _replacement(path: str, layer: Any, call: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function in place of a layer's `call`."""

    @functools.wraps(call)
    def replacement(*arguments: Any, **options: Any) -> Any:
        passes = _thread.passes
        if passes is None or passes.graph is not tf.compat.v1.get_default_graph():
            return call(*arguments, **options)  # within a recomputed layer, or in a loop, whose gradient has no tape
        _thread.passes = None
        try:
            with gathering.refused(_refusal(path, "calls gather_rows")):
                recomputed = _Pass(layer, path, call, (arguments, options), passes)
                return recomputed()
        finally:
            _thread.passes = passes

    return replacement


class _FirstCall(NamedTuple):
    """The operations of a first call."""

    path: str
    replica: str  # its name scope; replicas are traced into one graph
    made: list[tf.Operation]
    end: int  # of those that pass its results on, in the graph


class _Passes:
    """The first calls of recomputed layers in a graph, by one thread.

    Attributes:
        graph: the graph.
        first_calls: the calls so far.
    """

    def __init__(self, graph: Any):
        """Starts without calls."""
        self.graph = graph
        self.first_calls: list[_FirstCall] = []

    def refuse_leaks(self, outputs: Any) -> None:
        """Refuses tensors that leave a recomputed layer by other ways than its outputs: their gradients would be lost.

        Args:
            outputs: of the function, which has been traced.

        Raises:
            ValueError: if there are any.
        """
        owners = {id(op): call for call in self.first_calls for op in call.made}
        for i, op in enumerate(self.graph.get_operations()):
            for tensor in op.inputs if owners else ():
                owner = owners.get(id(tensor.op))
                if owner is None or i < owner.end or owner.replica != _replica_of(op.name):
                    continue
                if _is_computed(tensor):
                    raise _leak(owner.path, tensor)
        for tensor in tf.nest.flatten(outputs, expand_composites=True):
            if isinstance(tensor, tf.Tensor) and id(tensor.op) in owners and _is_computed(tensor):
                raise _leak(owners[id(tensor.op)].path, tensor)


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


class _Pass:
    """One call of a layer that is recomputed in the backward pass."""

    def __init__(self, layer: Any, path: str, call: Callable[..., Any], arguments: Any, passes: _Passes):
        """Prepares; the arguments are those of the call, by position and by name."""
        self._layer, self._path, self._call, self._passes = layer, path, call, passes
        self._arguments = arguments
        self._flat = tf.nest.flatten(arguments, expand_composites=True)
        self._masks = [getattr(value, "_keras_mask", None) for value in self._flat]
        self._context = call_context()
        outer = get_stateless_scope()
        self._before: dict[int, tf.Tensor] = dict(outer.state_mapping) if outer is not None else {}
        self._changed: set[int] = set()  # the variables that the layer writes, by `id`
        self._closures: list[tf.Tensor] = []  # tensors that the layer reads and was not given
        self._handles: list[tf.Tensor] = []  # of the variables that it reads
        self._name_scope = passes.graph.get_name_scope()  # that of this call of the layer
        self._made: set[int] = set()  # the operations of the first call, by `id`

    def __call__(self) -> Any:
        """Computes the layer and records how it is differentiated; returns its outputs."""
        graph = self._passes.graph
        first = len(graph.get_operations())
        with record.stop_recording(), _Scope(self._before) as scope:
            outputs = self._call(*self._arguments[0], **self._arguments[1])
        operations = graph.get_operations()[first:]  # those of other replicas too, where it waits for them
        self._find_inputs(operations)
        own = [op for op in operations if op.name.startswith(f"{self._name_scope}/")]
        self._made = {id(op) for op in own}
        flat = tf.nest.flatten(outputs, expand_composites=True)
        losses = [(loss, self._owners(loss)) for loss in scope.losses]
        is_result = [isinstance(value, tf.Tensor) and _is_continuous(value) for value in flat]
        with record.stop_recording():
            results = [tf.identity(value) for value, is_one in zip(flat, is_result, strict=True) if is_one]
            results += [tf.identity(loss) for loss, _ in losses]
        self._write(scope, graph)
        self._refuse_writes(own)
        replica = _replica_of(f"{self._name_scope}/")
        self._passes.first_calls.append(_FirstCall(self._path, replica, own, len(graph.get_operations())))
        self._record(results, is_result)
        remaining = iter(results)
        given = [next(remaining) if is_one else value for value, is_one in zip(flat, is_result, strict=True)]
        _attach_masks(given, [getattr(value, "_keras_mask", None) for value in flat])
        for loss, (_, owners) in zip(remaining, losses, strict=True):
            for owner in owners:
                owner.add_loss(loss)
        return tf.nest.pack_sequence_as(outputs, given, expand_composites=True)

    def _find_inputs(self, operations: Sequence[tf.Operation]) -> None:
        """Finds what the first call read of what a tape watches, besides its arguments."""
        given, made = {id(value) for value in self._flat}, {id(op) for op in operations}
        inputs = {id(tensor): tensor for op in operations for tensor in op.inputs if id(tensor) not in given}
        handles = {id(handle): handle for t in inputs.values() if t.dtype == tf.resource for handle in [outermost(t)]}
        self._handles = [handle for handle in handles.values() if record.should_record_backprop([handle])]
        self._closures = [
            tensor
            for tensor in inputs.values()
            if id(tensor.op) not in made and _is_continuous(tensor) and record.should_record_backprop([tensor])
        ]

    def _write(self, scope: _Scope, graph: Any) -> None:
        """Writes, once, what the first call assigned to variables; keeps the values before it."""
        self._changed = set(scope.changed)
        written = [(variable, scope.state_mapping[key]) for key, variable in scope.changed.items()]
        for variable, value in written:
            if getattr(value, "graph", graph) is not graph:
                raise ValueError(_refusal(self._path, f"writes {variable.path!r} in a loop or a branch of TensorFlow"))
            if id(variable) not in self._before:
                self._before[id(variable)] = tf.identity(tensorflow_variable(variable))
        for variable, value in written:
            variable.assign(value)

    def _refuse_writes(self, operations: Sequence[tf.Operation]) -> None:
        """Refuses writes to variables that are no variables of Keras: the second call would write again."""
        lookups = re.compile(r"LookupTable(Find|Size|Export)(V2)?")
        writing = [op for op in operations if not lookups.fullmatch(op.type) and written_resources([op])]
        if writing:
            what = f"writes to a variable or a generator by TensorFlow's operation {writing[0].type}"
            raise ValueError(_refusal(self._path, what))

    def _record(self, results: Sequence[tf.Tensor], is_result: Sequence[bool]) -> None:
        """Records, on the tapes that watch an input, how to differentiate the results."""
        watched = [
            i
            for i, value in enumerate(self._flat)
            if isinstance(value, tf.Tensor) and _is_continuous(value) and record.should_record_backprop([value])
        ]
        sources = [*(self._flat[i] for i in watched), *self._closures, *self._handles]
        if not sources or not results:
            return

        def differentiate(*slopes: Any) -> list[Any]:
            flat, tape, again = self._recompute(slopes, watched, is_result)
            inner = [*(flat[i] for i in watched), *self._closures, *self._handles]
            gradients: list[Any] = tape.gradient(again, inner, output_gradients=list(slopes))
            # All together: else the next layer is computed again while the activations of this one are still kept.
            known = tf.nest.flatten([g for g in gradients if g is not None], expand_composites=True)
            with tf.control_dependencies(known):
                together: list[Any] = tf.nest.map_structure(_identity, gradients, expand_composites=True)
            return together

        record.record_operation(SCOPE, list(results), sources, differentiate)

    def _recompute(
        self, slopes: Sequence[Any], watched: Sequence[int], is_result: Sequence[bool]
    ) -> tuple[list[Any], tf.GradientTape, list[tf.Tensor]]:
        """Calls the layer again, not before the slopes are there; returns arguments, the tape, and the results."""
        slopes = [slope.values if isinstance(slope, tf.IndexedSlices) else slope for slope in slopes]
        graph = tf.compat.v1.get_default_graph()
        passes, _thread.passes = _thread.passes, None
        try:
            with tf.name_scope(SCOPE), tf.control_dependencies(slopes):
                flat, before = self._barrier(slopes)
                arguments, options = tf.nest.pack_sequence_as(self._arguments, flat, expand_composites=True)
                first = len(graph.get_operations())
                with tf.GradientTape(watch_accessed_variables=False) as tape:
                    for source in (*(flat[i] for i in watched), *self._closures, *self._handles):
                        tape.watch(source)
                    with _Scope(before) as scope, in_call_context(self._context):
                        outputs = self._call(*arguments, **options)
                for loss in scope.losses:
                    self._owners(loss)
        finally:
            _thread.passes = passes
        self._refuse_kept(graph.get_operations()[first:])
        again = tf.nest.flatten(outputs, expand_composites=True)
        chosen = [value for value, is_one in zip(again, is_result, strict=True) if is_one]
        return flat, tape, [*chosen, *scope.losses]

    def _barrier(self, slopes: Sequence[tf.Tensor]) -> tuple[list[Any], dict[int, tf.Tensor]]:
        """Returns the arguments and the variables' values as tensors that are there after the slopes.

        What is computed from them is then never taken for what the first call computed, which would be kept. XLA knows
        no control dependencies, but a barrier.
        """
        changed = {key: value for key, value in self._before.items() if key in self._changed}
        tensors = [value for value in (*self._flat, *changed.values()) if isinstance(value, tf.Tensor)]
        if control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()):
            after = gen_xla_ops.xla_optimization_barrier([*tensors, *slopes])[: len(tensors)]
        else:
            after = [tf.identity(tensor) for tensor in tensors]
        remaining = iter(after)
        flat = [next(remaining) if isinstance(value, tf.Tensor) else value for value in self._flat]
        _attach_masks(flat, self._masks)
        return flat, self._before | dict(zip(changed, remaining, strict=True))

    def _refuse_kept(self, operations: Sequence[tf.Operation]) -> None:
        """Refuses a second call that reads what the first one computed and the layer kept."""
        replica = _replica_of(f"{self._name_scope}/")
        for tensor in (tensor for op in operations if _replica_of(op.name) == replica for tensor in op.inputs):
            if id(tensor.op) in self._made and _is_computed(tensor):
                raise _leak(self._path, tensor)

    def _owners(self, loss: Any) -> list[Any]:
        """Returns the layers that added a loss, and has Keras forget it."""
        owners = [part for part in self._layer._flatten_layers() if id(loss) in part._loss_ids]
        for owner in owners:
            owner._loss_ids.discard(id(loss))
        return owners


def _identity(tensor: tf.Tensor | None) -> tf.Tensor | None:
    return None if tensor is None else tf.identity(tensor)


def _attach_masks(values: Sequence[Any], masks: Sequence[Any]) -> None:
    """Attaches Keras's masks to tensors; None: there is none."""
    for value, mask in zip(values, masks, strict=True):
        if mask is not None:
            value._keras_mask = mask


def _replica_of(name: str) -> str:
    """Returns the scope, in the name of an operation, in which TensorFlow traces a replica; empty for the first one."""
    match = re.search(r"(?:^|/)(replica_\d+)/", name)
    return match[1] if match else ""


def _is_continuous(tensor: tf.Tensor) -> bool:
    """Returns whether a tensor has gradients."""
    return bool(tensor.dtype.is_floating or tensor.dtype.is_complex)


def _is_computed(tensor: tf.Tensor) -> bool:
    """Returns whether a tensor may depend on what is differentiated by."""
    return _is_continuous(tensor) and tensor.op.type not in ("Const", "Placeholder", "StopGradient")


def _leak(path: str, tensor: tf.Tensor) -> ValueError:
    return ValueError(
        _refusal(path, f"keeps the tensor {tensor.name!r} of its call for later, by other ways than its outputs")
    )


def _refusal(path: str, what: str) -> str:
    """Returns a sentence about a layer that cannot be recomputed."""
    return (
        f"recompute was given, and the layer {path!r}, which it matches, {what}; the backward pass cannot call it "
        "again: give a regular expression that leaves this layer out."
    )

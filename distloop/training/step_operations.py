"""Operations of a traced step: finds the origin of a NaN and draws that no checkpoint can repeat, and warns.

    @tf.function
    def check(batch):
        results = ...
        checked = floating_tensors(graph)
        return are_finite(checked)                         # [T]

    op = find_origin(results, checked, check(batch).numpy())

    with unsaved_draws_refused(state):
        outcome = step(batch, layout)                      # raises a ValueError if the traced step draws such numbers
    warn(step, graph)                                      # of what the user may not expect of it

A step is traced once more with the verdict "all finite" on every tensor in it. From a result that is not finite, the
search follows inputs that are not finite either, back to operations whose inputs are all finite. So it does not stop at
a harmless infinity, such as the mask of an attention layer.

`tf.random.normal`, `tf.nn.dropout` and others count their draws in the kernel of the operation, where nothing can read
or restore the count. A `tf.random.Generator` counts in a variable, which is saved only if it is in the model. Keras's
random numbers have their state in the model (`RandomStreams`).
"""

import contextlib
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from distloop.errors import user_line
from distloop.graph_functions import BACKWARD_SCOPE, DRAWS_FROM_KERNEL, outermost, reached, with_called
from distloop.log import log
from distloop.model.guards import SEED_ADVICE
from distloop.model.state import TrainState
from distloop.settings.precision import FLOAT16
from distloop.training.forward_backward import ForwardBackward
from distloop.training.step import TrainStep
from distloop.variables import tensorflow_variable

_NOISE_LAYERS = (
    keras.layers.Dropout,
    keras.layers.AlphaDropout,
    keras.layers.GaussianDropout,
    keras.layers.GaussianNoise,
)
_DRAWS_BY_SEED = re.compile("Stateless(?!.*Get).*(Random|Normal|Multinomial)")  # types of operations

# Types of operations whose draws are counted in a variable.
_DRAWS_FROM_VARIABLE = re.compile(
    r"Rng(Skip|ReadAndSkip)|Stateful(Uniform|UniformInt|UniformFullInt|StandardNormal|StandardNormalV2|"
    r"TruncatedNormal|RandomBinomial)"
)


def floating_tensors(graph: tf.Graph) -> list[tf.Tensor]:
    """Returns the floating-point tensors that a graph has so far."""
    return [t for op in graph.get_operations() for t in op.outputs if t.dtype.is_floating]


def are_finite(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Returns for each tensor whether all of it is finite: `[T]`, bool; in the tensors' graph."""
    return tf.stack([tf.reduce_all(tf.math.is_finite(tensor)) for tensor in tensors])


def find_origin(
    results: Iterable[tf.Tensor], tensors: Sequence[tf.Tensor], verdicts: Sequence[bool]
) -> tf.Operation | None:
    """Returns the first operation with finite inputs and an output that made a result not finite; None: all are finite.

    The search starts at the results. `tensors` are those of the graph that were checked, in order, `verdicts` whether
    each was finite. Collectives are left out: they pass on what another replica or worker made.
    """
    bad = {id(tensor) for tensor, is_finite in zip(tensors, verdicts, strict=True) if not is_finite}
    position = {id(tensor): i for i, tensor in enumerate(tensors)}
    ways = reached((t for t in results if id(t) in bad), lambda t: [i for i in t.op.inputs if id(i) in bad])
    origins = [t for t in ways if not (t.op.type.startswith("Collective") or any(id(i) in bad for i in t.op.inputs))]
    return min(origins, key=lambda tensor: position[id(tensor)]).op if origins else None


def describe(op: tf.Operation, layers: Iterable[Any], *, has_direction: bool = True) -> str:
    """Returns an operation's type, layer, direction (forward or backward pass) and the user's line.

    It may belong to one of some Keras layers; the direction is left out where it is of no interest.
    """
    words = [op.type]
    if (layer := _layer_of(op, layers)) is not None:
        words.append(f"in layer {getattr(layer, 'path', None) or layer.name}")
    if has_direction:
        words.append("in the backward pass" if BACKWARD_SCOPE in op.name else "in the forward pass")
    forward = _forward_op(op)
    if forward is not None and (line := user_line(forward.traceback)):
        words.append(f"({line})")
    return " ".join(words)


def _forward_op(op: tf.Operation) -> tf.Operation | None:
    """Returns the forward operation whose gradient an operation is part of: the user's line is about that one."""
    if BACKWARD_SCOPE not in op.name:
        return op
    for source in op.inputs:  # SqrtGrad takes the output of Sqrt
        if BACKWARD_SCOPE not in source.op.name and op.type.startswith(source.op.type):
            return source.op
    by_name = {other.name: other for other in op.graph.get_operations()}
    scopes = op.name.replace(BACKWARD_SCOPE, "").split("/")  # gradient_tape/net/truediv/RealDiv
    names = ["/".join(scopes[:end]) for end in range(len(scopes) - 1, 0, -1)]
    return next((by_name[name] for name in names if name in by_name), None)


def _layer_of(op: tf.Operation, layers: Iterable[Any]) -> Any:
    """Returns the innermost layer among the scopes in the operation's name; a repeated scope ends in a number."""
    by_name = {layer.name: layer for layer in layers}
    for scope in reversed(op.name.split("/")[:-1]):
        for name in (scope, re.sub(r"_\d+$", "", scope)):
            if name in by_name:
                return by_name[name]
    return None


@contextlib.contextmanager
def unsaved_draws_refused(state: TrainState) -> Iterator[None]:
    """Raises a ValueError if the operations traced in this block draw numbers that no checkpoint of a state can repeat.

    Eagerly, nothing is checked.
    """
    if tf.executing_eagerly():
        yield
        return
    graph = tf.compat.v1.get_default_graph()
    num_operations = len(graph.get_operations())
    yield
    for op in unsaved_draws(graph.get_operations()[num_operations:], state):
        layers = [each for tops in state.layers_of_update.values() for top in tops for each in top._flatten_layers()]
        raise ValueError(
            f"{describe(op, layers, has_direction=False)} draws random numbers from a state that no "
            f"checkpoint holds, so a resumed run would draw others: {SEED_ADVICE}, or draw in the dataset."
        )


def unsaved_draws(operations: Iterable[tf.Operation], state: TrainState) -> Iterator[tf.Operation]:
    """Yields the operations that draw from a state that no checkpoint holds, those in called functions included."""
    saved: set[int] | None = None
    for op in with_called(operations):
        if DRAWS_FROM_KERNEL.fullmatch(op.type):
            yield op
        elif _DRAWS_FROM_VARIABLE.fullmatch(op.type):
            if saved is None:
                variables = state.all_variables().values()
                saved = {id(copy.handle) for variable in variables for copy in state.replica_variables(variable)}
            if id(outermost(op.inputs[0])) not in saved:
                yield op


def has_fixed_seed(op: tf.Operation) -> bool:
    """Returns whether an operation draws the same random numbers whenever it runs, as constants alone make its seed."""
    names = [argument.name for argument in op.op_def.input_arg]
    seed = next((name for name in ("seed", "key") if name in names), None)
    if seed is None or not op.type.startswith("Stateless"):
        return False
    ways = reached([op.inputs[names.index(seed)]], lambda tensor: tensor.op.inputs)
    return all(tensor.op.inputs or tensor.op.type == "Const" for tensor in ways)


def warn(train_step: TrainStep, graph: tf.Graph) -> None:
    """Logs what the user may not expect of a step, once it is traced."""
    for sentence in surprises(train_step, graph):
        log.warning("%s", sentence)


def surprises(train_step: TrainStep, graph: tf.Graph) -> Iterator[str]:
    """Yields sentences about what the user may not expect of a traced step; `graph` holds its operations."""
    for update in train_step.updates:
        if update.update.has_loss:
            yield from _of_loss(train_step, update)
        half = [layer.name for layer in layers_of(train_step, update) if layer.compute_dtype == FLOAT16.compute_dtype]
        if half and update.loss_scaler is None:
            yield (
                f"Layers such as {half[0]} compute in float16 and the loss is not scaled, so small gradients become 0: "
                f"set precision={FLOAT16.name}, or give distloop.LossScaleOptimizer."
            )
        yield from _of_mutated(train_step, update)
    layers = [layer for update in train_step.updates for layer in layers_of(train_step, update)]
    draws = [op for op in with_called(graph.get_operations()) if _DRAWS_BY_SEED.match(op.type)]
    for op in dict.fromkeys(describe(op, layers) for op in draws if has_fixed_seed(op)):
        yield f"{op} draws the same numbers in each step and on each replica, as its seed is a constant: {SEED_ADVICE}."


def _of_loss(train_step: TrainStep, update: ForwardBackward) -> Iterator[str]:
    """Yields sentences about variables that the loss does not reach, and layers that compute as in evaluation."""
    state, mutated = train_step.state, {id(v) for v in update.trace.mutated}
    unreached = [v for v, is_reached in zip(update.variables, update.trace.reached, strict=True) if not is_reached]
    if unreached:
        paths = ", ".join(state.paths[id(v)] for v in unreached)
        yield f"The loss does not depend on {paths}, which stays as it is: leave it out with ModelSpec(trainable=...)."
    with state.frozen:
        layers = list(_layers_with_modes(state.layers_of_update[update.name], {id(v) for v in update.variables}))
    if layers and not any(id(v) in mutated for layer in layers for v in layer.variables):
        names = ", ".join(layer.path or layer.name for layer in layers[:3])
        yield (
            f"Layers such as {names} compute in the step as in evaluation, or not at all: pass the argument training "
            "of loss_fn on, as in model(x, training=training)."
        )


def _layers_with_modes(layers: Iterable[Any], trained: set[int]) -> Iterator[Any]:
    """Yields the layers that compute otherwise in training, those that no update trains left out."""
    for layer in layers:
        if isinstance(layer, keras.layers.BatchNormalization):
            if layer.trainable:
                yield layer
        elif isinstance(layer, _NOISE_LAYERS):
            if getattr(layer, "rate", 0) or getattr(layer, "stddev", 0):
                yield layer
        elif not layer.weights or any(id(weight) in trained for weight in layer.weights):
            yield from _layers_with_modes(layer._flatten_layers(include_self=False, recursive=False), trained)


def _of_mutated(train_step: TrainStep, update: ForwardBackward) -> Iterator[str]:
    """Yields sentences about variables that the forward pass writes, and that differ between replicas from then on."""
    state = train_step.state
    if state.strategy.num_replicas_in_sync == 1 or state.replicas.same_bits:
        return
    kept_equal = {id(v) for v in update.state_updates.with_mean(update.trace.mutated)}
    kept_equal |= update.state_updates.carried
    for variable in (v for v in update.trace.mutated if id(v) not in kept_equal):
        if tensorflow_variable(variable).aggregation == tf.VariableAggregation.NONE:
            yield (
                f"The forward pass writes {state.paths[id(variable)]}, of dtype {tf.as_dtype(variable.dtype).name}, "
                "which has no mean, so each replica keeps its own, and a checkpoint the first's: make it a float, or "
                "add_weight(..., aggregation='mean')."
            )


def layers_of(train_step: TrainStep, update: ForwardBackward) -> list[Any]:
    """Returns the layers that an update trains, at any depth."""
    layers = train_step.state.layers_of_update[update.name]
    return [each for layer in layers for each in layer._flatten_layers()]

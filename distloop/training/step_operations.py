"""Operations of a traced step: finds the origin of a NaN, and random draws that no checkpoint can repeat.

    @tf.function
    def check(batch):
        results = ...
        checked = floating_tensors(graph)
        return are_finite(checked)                         # [T]

    op = find_origin(results, checked, check(batch).numpy())

    with unsaved_draws_refused(state):
        outcome = step(batch, layout)                      # raises a ValueError if the traced step draws such numbers

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

import tensorflow as tf

from distloop.errors import user_line
from distloop.graph_functions import BACKWARD_SCOPE, DRAWS_FROM_KERNEL, outermost, with_called
from distloop.model.state import TrainState
from distloop.model.user_functions import SEED_ADVICE

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
    each was finite.
    """
    bad = {id(tensor) for tensor, is_finite in zip(tensors, verdicts, strict=True) if not is_finite}
    position = {id(tensor): i for i, tensor in enumerate(tensors)}
    origins: list[tf.Tensor] = []
    seen: set[int] = set()
    stack = [tensor for tensor in results if id(tensor) in bad]
    while stack:
        tensor = stack.pop()
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        bad_inputs = [source for source in tensor.op.inputs if id(source) in bad]
        stack += bad_inputs
        if not bad_inputs:
            origins.append(tensor)
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
        layers = [part for tops in state.layers_of_update.values() for top in tops for part in top._flatten_layers()]
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
                saved = {id(part.handle) for variable in variables for part in state.replica_variables(variable)}
            if id(outermost(op.inputs[0])) not in saved:
                yield op


def has_fixed_seed(op: tf.Operation) -> bool:
    """Returns whether an operation draws the same random numbers whenever it runs, as constants alone make its seed."""
    names = [argument.name for argument in op.op_def.input_arg]
    seed = next((name for name in ("seed", "key") if name in names), None)
    stack, seen = [op.inputs[names.index(seed)].op] if seed and op.type.startswith("Stateless") else [], set()
    while stack:
        source = stack.pop()
        if not source.inputs and source.type != "Const":
            return False
        stack += [tensor.op for tensor in source.inputs if tensor.op.name not in seen]
        seen.add(source.name)
    return bool(seen)

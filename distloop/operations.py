"""Operations: lists the operations of traced functions, their random draws and their writes.

    for op in with_called(graph.get_operations()):
        if DRAWS_FROM_KERNEL.fullmatch(op.type): ...

It does not know what the functions are for.
"""

import re
from collections.abc import Iterable, Iterator
from typing import Any

import tensorflow as tf

# Types of operations whose kernel counts the draws, where nothing can read or restore the count; by the list of
# TensorFlow's operations that are stateful and have a seed, cuDNN's layers apart.
DRAWS_FROM_KERNEL = re.compile(
    r"Random(Uniform|UniformInt|StandardNormal|Gamma|Poisson|PoissonV2|Shuffle|Crop)|(Parameterized)?TruncatedNormal|"
    r"Multinomial|SampleDistortedBoundingBox(V2)?|\w+CandidateSampler"
)

BACKWARD_SCOPE = "gradient_tape/"  # of operations that a tape creates
RECOMPUTED_SCOPE = "recomputed"  # of operations of a layer that the backward pass computes again

# Types of operations that only read a variable.
_READS = {"ReadVariableOp", "ResourceGather", "ResourceGatherNd", "VariableShape", "VarIsInitializedOp"}
# TensorFlow's attribute of an operation that calls functions: the numbers of the inputs that these only read.
_READ_ONLY_INPUTS = "_read_only_resource_inputs"


def with_called(operations: Iterable[tf.Operation]) -> Iterator[tf.Operation]:
    """Yields operations, and those of the functions that they call: branches, bodies of loops, `tf.function`s."""
    seen: set[str] = set()
    stack = [iter(operations)]
    while stack:
        op = next(stack[-1], None)
        if op is None:
            stack.pop()
            continue
        yield op
        for attribute in _function_attributes(op):
            stack += [iter(graph.get_operations()) for graph in _graphs_of(op, attribute, seen)]


def called_graphs(op: tf.Operation, attribute: str = "") -> list[Any]:
    """Returns the graphs of the functions that an operation calls; of one attribute alone, such as "body", if given."""
    names = [attribute] if attribute else _function_attributes(op)
    return [graph for name in names for graph in _graphs_of(op, name, set())]


_attributes_of_type: dict[str, list[str]] = {}


def _function_attributes(op: tf.Operation) -> list[str]:
    """Returns the names of an operation's attributes that are functions; the same for each type of operation."""
    if op.type not in _attributes_of_type:
        attributes = [attribute.name for attribute in op.op_def.attr if attribute.type in ("func", "list(func)")]
        _attributes_of_type[op.type] = attributes
    return _attributes_of_type[op.type]


def _graphs_of(op: tf.Operation, attribute: str, seen: set[str]) -> Iterator[Any]:
    """Yields the graphs of the functions in an operation's attribute that were not seen yet."""
    value = op.get_attr(attribute)
    for function in value if isinstance(value, (list, tuple)) else [value]:
        if function.name not in seen:
            seen.add(function.name)
            # TensorFlow shows the graph of a called function, with the lines of its code, by this method alone. The
            # functions of TensorFlow 1, as in its CTC loss, have none.
            graph = getattr(op.graph._get_function(function.name), "graph", None)
            if graph is not None:
                yield graph


def written_resources(operations: Iterable[tf.Operation]) -> set[int]:
    """Returns the identities of the resources, such as the handles of variables, that operations may write."""
    return {id(outermost(tensor)) for op in operations for tensor in _written_inputs(op)}


def _written_inputs(op: tf.Operation) -> list[tf.Tensor]:
    """Returns the inputs of an operation that are resources which it may write."""
    resources = {i: tensor for i, tensor in enumerate(op.inputs) if tensor.dtype == tf.resource}
    if not resources or op.type in _READS:
        return []
    try:
        read_only = op.get_attr(_READ_ONLY_INPUTS)
    except ValueError:  # the operation calls no function
        read_only = []
    return [tensor for i, tensor in resources.items() if i not in read_only]


def outermost(tensor: tf.Tensor) -> tf.Tensor:
    """Returns the eager tensor that a tensor captured by a function's graph stands for."""
    while (graph := getattr(tensor, "graph", None)) is not None:
        outer = next((outer for outer, inner in getattr(graph, "captures", ()) if inner is tensor), None)
        if outer is None:
            break
        tensor = outer
    return tensor

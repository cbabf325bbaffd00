"""The operations of traced functions, and those that draw random numbers from a state of their own.

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

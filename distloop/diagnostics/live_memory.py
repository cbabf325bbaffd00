"""Memory of a traced function: the bytes of its tensors, in the order in which it computes them.

    peak = peak_of(graph)
    peak.activations, peak.gradients          # bytes, where their sum is largest

A tensor takes memory from its operation to the last one that reads it. Variables and the function's inputs are left
out: they are there before. It does not know what the function is for.
"""

import re
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from distloop.operations import BACKWARD_SCOPE, RECOMPUTED_SCOPE, called_graphs

_RECOMPUTED = re.compile(rf"(^|/){RECOMPUTED_SCOPE}(_\d+)?/")  # those of a forward pass within the backward pass
# Operations that pass on their first input: TensorFlow copies nothing.
_SAME_MEMORY = {"Identity", "IdentityN", "Reshape", "Squeeze", "ExpandDims", "StopGradient", "PreventGradient"}
_SAME_MEMORY |= {"CheckNumerics", "EnsureShape"}
# There before, or a few numbers.
_NO_MEMORY = {"Placeholder", "ReadVariableOp", "Const", "VarHandleOp", "BroadcastGradientArgs", "Shape"}
_LOOPS = {"While", "StatelessWhile"}
_ELEMENTS = {"TensorListPushBack": 1, "TensorListSetItem": 2}  # operation -> which input becomes an element of a list


class Peak(NamedTuple):
    """What is in memory where a function needs most, in bytes.

    Attributes:
        activations: results of the forward pass that the backward pass still reads, recomputed ones included.
        gradients: results of the backward pass.
        num_unknown: tensors of unknown size, which are not counted.
    """

    activations: int = 0
    gradients: int = 0
    num_unknown: int = 0

    @property
    def total(self) -> int:
        """The sum."""
        return self.activations + self.gradients


def peak_of(graph: Any) -> Peak:
    """Returns the most memory that the tensors of a function's graph take at a time.

    Args:
        graph: a `FuncGraph`; operations that its outputs do not need are left out.
    """
    operations = _needed(graph)
    last_use = {id(_memory_of(tensor)): i for i, op in enumerate(operations) for tensor in op.inputs}
    last_use |= {id(_memory_of(tensor)): len(operations) for tensor in graph.outputs}
    freed: dict[int, list[tuple[bool, int]]] = {}  # after which operation: bytes, and of which pass
    live = {False: 0, True: 0}  # whether of the backward pass -> bytes
    peaks, num_unknown, has_turned = [Peak()], 0, False
    for i, op in enumerate(operations):
        has_turned |= BACKWARD_SCOPE in op.name
        is_backward = has_turned and (BACKWARD_SCOPE in op.name or not _RECOMPUTED.search(op.name))
        for most in [peak_of(called) for called in called_graphs(op)]:
            num_unknown += most.num_unknown
            peaks.append(_peak(live, Peak(0, most.total) if is_backward else most))
        for tensor in op.outputs:
            size = _bytes(tensor)
            num_unknown += size is None
            if size and _memory_of(tensor) is tensor:
                live[is_backward] += size
                freed.setdefault(last_use.get(id(tensor), i), []).append((is_backward, size))
        peaks.append(_peak(live, Peak()))
        for is_of_backward, size in freed.pop(i, []):
            live[is_of_backward] -= size
    return max(peaks, key=lambda peak: peak.total)._replace(num_unknown=num_unknown)


def _peak(live: dict[bool, int], more: Peak) -> Peak:
    return Peak(live[False] + more.activations, live[True] + more.gradients)


def _needed(graph: Any) -> list[tf.Operation]:
    """Returns the operations that a function runs, in order: TensorFlow leaves out those that no result needs."""
    needed: set[int] = set()
    stack = [*(tensor.op for tensor in graph.outputs), *graph.control_outputs]
    while stack:
        op = stack.pop()
        if id(op) not in needed:
            needed.add(id(op))
            stack += [*(tensor.op for tensor in op.inputs), *op.control_inputs]
    return [op for op in graph.get_operations() if id(op) in needed]


def _memory_of(tensor: tf.Tensor) -> tf.Tensor:
    """Returns the tensor whose memory a tensor shares; itself if it has its own."""
    while tensor.op.type in _SAME_MEMORY:
        tensor = tensor.op.inputs[tensor.value_index]
    return tensor


def _bytes(tensor: tf.Tensor) -> int | None:
    """Returns the bytes that a tensor adds; None: its size is unknown while tracing."""
    if tensor.op.type in _NO_MEMORY or tensor.dtype in (tf.resource, tf.string):
        return 0
    return _bytes_of_list(tensor) if tensor.dtype == tf.variant else _size(tensor)


def _size(tensor: tf.Tensor) -> int | None:
    elements = tensor.shape.num_elements()
    return None if elements is None else int(elements) * int(tensor.dtype.size)


def _bytes_of_list(tensor: tf.Tensor) -> int | None:
    """Returns the bytes that a loop collects in a list of tensors, an element in each iteration."""
    op = tensor.op
    if op.type == "TensorListFromTensor":
        return _bytes(op.inputs[0])
    if op.type not in _LOOPS:
        return 0
    (body,) = called_graphs(op, "body")
    added = _memory_of(body.outputs[tensor.value_index])
    if added.op.type not in _ELEMENTS:
        return 0
    element = _memory_of(added.op.inputs[_ELEMENTS[added.op.type]])
    after = [_memory_of(b) for a, b in zip(body.inputs, body.outputs, strict=True) if a is element]
    if after and (after[0] is element or id(after[0]) in _elements(body)):
        return 0  # it is the same in all iterations, or an element of another list since the iteration before
    size, iterations = _size(element), _most_iterations(op)
    return None if size is None or iterations is None else size * iterations


def _elements(body: Any) -> set[int]:
    """Returns the `id` of each tensor that a loop's body adds to a list."""
    operations = [op for op in body.get_operations() if op.type in _ELEMENTS]
    return {id(_memory_of(op.inputs[_ELEMENTS[op.type]])) for op in operations}


def _most_iterations(loop: tf.Operation) -> int | None:
    """Returns the `maximum_iterations` of a loop; None: it has none, or it is unknown while tracing."""
    limit = loop.inputs[1]
    if limit.op.type == "Max":  # of one number, as Keras's recurrent layers give it
        limit = limit.op.inputs[0]
    value = tf.get_static_value(limit)
    return None if value is None or np.max(value) < 0 else int(np.max(value))

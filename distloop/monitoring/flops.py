"""Owns how much a model computes: floating-point operations, counted in a traced graph, and what devices can do.

    per_pass = count(graph)                                  # None: there is something in it that cannot be counted
    peak = peak_of("NVIDIA A100-SXM4-80GB", is_half=True)    # 312e12 a second

Multiplications and additions of matrix products, convolutions and einsums, as is usual for the utilization of a device
(Chowdhery et al. 2022, arXiv:2204.02311, appendix B); all else is small beside them.
"""

import math
import re
from typing import Any

import tensorflow as tf

TRAINING_PASSES = 3  # forward, and backward twice as much: gradients of inputs and of weights (arXiv:2001.08361)

# What a device does at best, dense, in operations a second: float32 (TF32 where it has that, TensorFlow's default), and
# half precision. From NVIDIA's data sheets; the first name that a device's name holds counts.
_PEAKS = {
    "H200": (494e12, 989e12),
    "H100 PCIe": (378e12, 756e12),
    "H100": (494e12, 989e12),
    "A100": (156e12, 312e12),
    "L40S": (183e12, 362e12),
    "L4": (60e12, 121e12),
    "V100": (15.7e12, 125e12),
    "T4": (8.1e12, 65e12),
}
_CALLS = {"PartitionedCall", "StatefulPartitionedCall"}
_BRANCHES = {"While", "StatelessWhile", "If", "StatelessIf", "Case", "StatelessCase"}


def peak_of(device: str, is_half: bool) -> float | None:
    """Tells what a device can do at best.

    Args:
        device: its name, as its maker calls it.
        is_half: in float16 or bfloat16; else in float32.

    Returns:
        Floating-point operations a second; None: not known.
    """
    names = [name for name in _PEAKS if re.search(rf"\b{re.escape(name)}\b", device)]
    return _PEAKS[names[0]][is_half] if names else None


def count(graph: tf.Graph) -> float | None:
    """Counts the floating-point operations that one run of a graph takes.

    Returns:
        None where a size is not known while tracing, or depends on a loop or a branch.
    """
    total = 0.0
    for op in graph.get_operations():
        if op.type in _CALLS:
            found = count(_body(graph, op.get_attr("f").name))
        elif op.type in _BRANCHES:
            # How often a body runs is known only then; where there is nothing to count in it, no matter.
            found = 0.0 if all(count(_body(graph, name)) == 0.0 for name in _bodies(op)) else None
        else:
            found = _count_op(op)
        if found is None:
            return None
        total += found
    return total


def _bodies(op: tf.Operation) -> list[str]:
    """Names the functions that a loop or a branch may run."""
    attributes = [
        op.get_attr(name) for name in op.node_def.attr if op.node_def.attr[name].WhichOneof("value") == "func"
    ]
    attributes += op.get_attr("branches") if "branches" in op.node_def.attr else []
    return [function.name for function in attributes]


def _body(graph: Any, name: str) -> tf.Graph:
    """Finds a function that a graph calls."""
    while (found := graph._get_function(name)) is None:
        graph = graph.outer_graph
    body: tf.Graph = found.graph
    return body


def _count_op(op: tf.Operation) -> float | None:
    """Counts those of one operation: two for each number of the result and each pair that is multiplied for it."""
    kind = op.type
    if kind == "Einsum":
        terms = op.get_attr("equation").decode().partition("->")[0].split(",")
        shapes = [tensor.shape for tensor in op.inputs]
        if "..." in "".join(terms) or any(shape.rank != len(term) for shape, term in zip(shapes, terms, strict=True)):
            return None
        sizes = {label: size for shape, term in zip(shapes, terms, strict=True) for label, size in zip(term, shape)}  # noqa: B905
        return None if None in sizes.values() else 2.0 * math.prod(sizes.values())
    if kind == "MatMul":
        inner = op.inputs[0].shape[0 if op.get_attr("transpose_a") else 1]
        result = op.outputs[0].shape
    elif kind in ("BatchMatMul", "BatchMatMulV2", "BatchMatMulV3"):
        inner = op.inputs[0].shape[-2 if op.get_attr("adj_x") else -1]
        result = op.outputs[0].shape
    elif kind in ("Conv2D", "Conv3D"):
        inner = op.inputs[1].shape[:-1].num_elements()  # height x width x channels of a group
        result = op.outputs[0].shape
    elif kind == "DepthwiseConv2dNative":
        inner = op.inputs[1].shape[:2].num_elements()
        result = op.outputs[0].shape
    elif kind in ("Conv2DBackpropInput", "Conv3DBackpropInputV2"):  # a transposed convolution: from its input's side
        inner = op.inputs[1].shape[:-1].num_elements()
        result = op.inputs[2].shape
    else:
        return 0.0
    numbers = result.num_elements()
    return None if inner is None or numbers is None else 2.0 * inner * numbers

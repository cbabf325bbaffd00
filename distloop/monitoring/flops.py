"""FLOPs: the floating-point operations of a traced graph, and the peak performance of known devices.

    per_pass = count(graph)                                  # None: some operation cannot be counted
    peak = peak_of("NVIDIA A100-SXM4-80GB", is_half=True)    # 312e12 a second

Counted are the multiplications and additions of matrix products, convolutions and einsums, as is usual for model FLOPs
utilization (Chowdhery et al. 2022, arXiv:2204.02311, appendix B); all other operations are negligible.
"""

import math
import re
from typing import Any

import tensorflow as tf

TRAINING_PASSES = 3  # one forward; backward costs two: gradients of inputs and of weights (arXiv:2001.08361)

# Peak dense operations per second in float32 (TF32 if the device has it, TensorFlow's default) and in half precision,
# from NVIDIA's data sheets. The first entry whose name occurs in the device's name counts.
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
    """Returns the peak performance of a device, in floating-point operations per second; None: unknown device.

    Args:
        device: the vendor's name of the device.
        is_half: True for float16 and bfloat16, False for float32.
    """
    names = [name for name in _PEAKS if re.search(rf"\b{re.escape(name)}\b", device)]
    return _PEAKS[names[0]][is_half] if names else None


def count(graph: tf.Graph | None) -> float | None:
    """Returns the floating-point operations of one run of a graph.

    Returns:
        None if a shape or a function's graph is unknown while tracing, or if a loop or a branch contains operations
        that count.
    """
    if graph is None:
        return None
    total = 0.0
    for op in graph.get_operations():
        if op.type in _CALLS:
            operations = count(_body(graph, op.get_attr("f").name))
        elif op.type in _BRANCHES:
            # The number of iterations is unknown; it does not matter if there is nothing to count in the body.
            operations = 0.0 if all(count(_body(graph, name)) == 0.0 for name in _bodies(op)) else None
        else:
            operations = _count_op(op)
        if operations is None:
            return None
        total += operations
    return total


def _bodies(op: tf.Operation) -> list[str]:
    """Returns the names of the functions that a loop or a branch may run."""
    attributes = [
        op.get_attr(name) for name in op.node_def.attr if op.node_def.attr[name].WhichOneof("value") == "func"
    ]
    attributes += op.get_attr("branches") if "branches" in op.node_def.attr else []
    return [function.name for function in attributes]


def _body(graph: Any, name: str) -> tf.Graph | None:
    """Returns the graph of a function that a graph calls; functions of TensorFlow 1, as in its CTC loss, have none."""
    while (function := graph._get_function(name)) is None:
        graph = graph.outer_graph
    return getattr(function, "graph", None)


def _count_op(op: tf.Operation) -> float | None:
    """Returns the operations of one node: 2 x elements of the result x products in each; None: unknown."""
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

"""GPU kernels: finds the operations of a graph that TensorFlow cannot run on a GPU, on any machine.

    for op in off_the_gpu(graph):            # a FuncGraph, traced without devices
        op.type, op.traceback

TensorFlow registers the GPU kernels of all operations, also where there is no GPU.
"""

import functools
from collections.abc import Iterator
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import kernels

from distloop.graph_functions import called_graphs

SHAPES = {"Shape", "ShapeN", "Size", "Rank"}  # types of operations that run where their input is
RUN_PYTHON = {"EagerPyFunc", "PyFunc", "PyFuncStateless"}  # on any device


@functools.cache
def registered(kind: str) -> list[Any]:
    """Returns what TensorFlow knows about the kernels of a type of operations."""
    return sorted(kernels.get_registered_kernels_for_op(kind).kernel, key=lambda kernel: -kernel.priority)


def find_kernel(op: Any) -> Any:
    """Returns the kernel that runs an operation on a GPU; None: there is none."""
    for device_type in ("GPU", "DEFAULT"):
        for kernel in registered(op.type):
            if kernel.device_type == device_type and not kernel.label and _fits(kernel, op):
                return kernel
    return None


def _fits(kernel: Any, op: Any) -> bool:
    pairs = [(c.allowed_values.list.type, op.node_def.attr[c.name]) for c in kernel.constraint]
    return all(set(types).issuperset([v.type] if v.type else v.list.type) for types, v in pairs if types)


def is_on_gpu(handle: Any) -> bool:
    """Returns whether a resource is a variable of a dtype that TensorFlow keeps on a GPU."""
    data = getattr(handle, "_handle_data", None)
    if data is None or not data.is_set:
        return False
    constraints = [kernel.constraint for kernel in registered("VarHandleOp") if kernel.device_type == "DEFAULT"]
    return data.shape_and_type[0].dtype in {
        dtype for of_kernel in constraints for c in of_kernel for dtype in c.allowed_values.list.type
    }


def is_compiled(op: Any) -> bool:
    """Returns whether XLA compiles a call as a whole."""
    return "_XlaMustCompile" in op.node_def.attr and bool(op.node_def.attr["_XlaMustCompile"].b)


def off_the_gpu(graph: Any) -> Iterator[tf.Operation]:
    """Yields the operations of a graph, and of the functions that it calls, that run on the host or in Python.

    What is placed on the host by `tf.device`, constants, and what takes a resource of the host are left out.
    """
    constant = set[int]()  # operations whose results TensorFlow computes once
    inputs = {id(tensor.op) for tensor in graph.inputs}
    for op in graph.get_operations():
        if id(op) in inputs or "CPU" in op.device.upper() or is_compiled(op):
            continue
        is_shape = op.type in SHAPES and all(tensor.shape.is_fully_defined() for tensor in op.inputs)
        if is_shape or (op.outputs and not op.op_def.is_stateful and all(id(t.op) in constant for t in op.inputs)):
            constant.add(id(op))
        elif any(tensor.dtype == tf.resource and not is_on_gpu(tensor) for tensor in op.inputs):
            continue
        elif called := called_graphs(op):
            for of_function in called:
                yield from off_the_gpu(of_function)
        elif op.type in RUN_PYTHON or find_kernel(op) is None:
            yield op

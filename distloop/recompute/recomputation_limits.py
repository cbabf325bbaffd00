"""Recomputation limits: refuses layers that the backward pass cannot call again, by their traced operations.

    first_calls = FirstCalls(graph)
    first_calls.add(FirstCall(path, scope, operations, end))     # of each layer that is recomputed
    first_calls.refuse_leaks(outputs)                            # of the function that called them

It does not know how a layer is called again.
"""

import re
from collections.abc import Iterable
from typing import Any, NamedTuple

import tensorflow as tf

from distloop.operations import written_resources

_LOOKUPS = re.compile(r"LookupTable(Find|Size|Export)(V2)?")  # types of operations that do not write to a table


class FirstCall(NamedTuple):
    """The operations of a layer's call in the forward pass."""

    path: str  # of the layer
    scope: str  # its name scope; replicas are traced into one graph, each in a scope of its own
    operations: list[tf.Operation]
    end: int  # of those that pass its results on, in the graph

    def refuse_writes(self) -> None:
        """Refuses writes to variables that are no variables of Keras: the second call would write again.

        Raises:
            ValueError: if there are any.
        """
        writing = [op for op in self.operations if not _LOOKUPS.fullmatch(op.type) and written_resources([op])]
        if writing:
            what = f"writes to a variable or a generator by TensorFlow's operation {writing[0].type}"
            raise refusal(self.path, what)

    def refuse_reads(self, operations: Iterable[tf.Operation]) -> None:
        """Refuses a second call that reads what this one computed and the layer kept.

        Args:
            operations: of the second call.

        Raises:
            ValueError: if it does.
        """
        made, replica = {id(op) for op in self.operations}, _replica_of(self.scope)
        for tensor in (tensor for op in operations if _replica_of(op.name) == replica for tensor in op.inputs):
            if id(tensor.op) in made and _is_computed(tensor):
                raise _leak(self.path, tensor)


class FirstCalls:
    """The first calls of recomputed layers in a graph, by one thread.

    Attributes:
        graph: the graph.
    """

    def __init__(self, graph: Any):
        """Starts without calls."""
        self.graph = graph
        self._calls: list[FirstCall] = []

    def add(self, call: FirstCall) -> None:
        """Adds a call."""
        self._calls.append(call)

    def refuse_leaks(self, outputs: Any) -> None:
        """Refuses tensors that leave a recomputed layer by other ways than its outputs: their gradients would be lost.

        Args:
            outputs: of the function that called the layers, which has been traced.

        Raises:
            ValueError: if there are any.
        """
        owners = {id(op): (call, _replica_of(call.scope)) for call in self._calls for op in call.operations}
        for i, op in enumerate(self.graph.get_operations()):
            for tensor in op.inputs if owners else ():
                call, replica = owners.get(id(tensor.op), (None, ""))
                if call and i >= call.end and replica == _replica_of(op.name) and _is_computed(tensor):
                    raise _leak(call.path, tensor)
        for tensor in tf.nest.flatten(outputs, expand_composites=True):
            if isinstance(tensor, tf.Tensor) and id(tensor.op) in owners and _is_computed(tensor):
                raise _leak(owners[id(tensor.op)][0].path, tensor)


def refusal(path: str, what: str) -> ValueError:
    """Returns an error about a layer that cannot be recomputed, for what it does."""
    error = ValueError(
        f"recompute was given, and the layer {path!r}, which it matches, {what}; the backward pass cannot call it "
        "again: give a regular expression that leaves this layer out."
    )
    vars(error)["_keras_call_info_injected"] = True  # else Keras adds the arguments of all calls around it
    return error


def is_continuous(tensor: tf.Tensor) -> bool:
    """Returns whether a tensor has gradients."""
    return bool(tensor.dtype.is_floating or tensor.dtype.is_complex)


def _leak(path: str, tensor: tf.Tensor) -> ValueError:
    what = f"keeps the tensor {tensor.name!r} of its call for later, by other ways than its outputs"
    return refusal(path, what)


def _is_computed(tensor: tf.Tensor) -> bool:
    """Returns whether a tensor may depend on what is differentiated by."""
    return is_continuous(tensor) and tensor.op.type not in ("Const", "Placeholder", "StopGradient")


def _replica_of(name: str) -> str:
    """Returns the scope, in the name of an operation, in which TensorFlow traces a replica; empty for the first one."""
    match = re.search(r"(?:^|/)(replica_\d+)(?:/|$)", name)
    return match[1] if match else ""

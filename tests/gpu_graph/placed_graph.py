"""Placed graph: where TensorFlow would run the operations of a step on a machine with GPUs, and what they wait for.

    placed = place(graph, readers={"IteratorGetNext"})
    [node.device for node in placed.step]                     # "host", or as in "GPU:0"

Functions, branches and loops are one graph, as TensorFlow inlines them (its `lower_while_op.cc`, `lower_if_op.cc` and
`placer.cc`): an operation without a device gets that of the operation that calls its function; what takes a variable
runs where the variable is; a loop variable lives where its first value was computed; an iteration begins when the
condition is known and all side effects of the one before it are done. The module judges nothing.
"""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from distloop.audit.gpu_kernels import SHAPES, find_kernel, is_compiled, is_on_gpu
from distloop.errors import innermost_line
from distloop.graph_functions import called_graphs, reached
from distloop.model.memory import known_bytes

HOST, FIRST_GPU = "host", "GPU:0"
DEVICE = "_distloop_device"  # the attribute of a variable's handle that names the device which was asked for
_LOOPS, _BRANCHES = {"While", "StatelessWhile"}, {"If", "StatelessIf", "Case", "StatelessCase"}
_CALLS = {"PartitionedCall", "StatefulPartitionedCall"}


class Node:
    """An operation at the device where it runs, or a stand-in for what TensorFlow makes of a branch or a loop.

    Attributes:
        op: the operation; that which calls the function, for a stand-in.
        type: of the operation, or what it stands for.
        asked_for: the device that it is to run on: "host", or as in "GPU:0"; empty: it does not matter.
        device: the device that it runs on; empty: wherever its result is needed, as of a constant.
        edges: what it waits for.
        has_fallen_back: whether it runs on the host as it has no kernel for the device.
        is_on_gpu: whether it computes with a GPU's memory, rather than with shapes in the host's, or is a stand-in.
        with_it: what runs whenever it runs: the side effects of its function.
        is_constant: whether it is the same in all steps.
        next: of a variable of the loop over steps, its value for the next step; else None.
    """

    def __init__(self, op: Any, kind: str, asked_for: str, with_it: Sequence["Node"], is_constant: bool = False):
        """Places an operation; the edges come later."""
        self.op, self.type, self.asked_for, self.with_it = op, kind, asked_for, with_it
        self.is_operation, self.is_constant = op is not None and kind == op.type, is_constant
        is_for_gpu = self.is_operation and not is_constant and asked_for.startswith("GPU")
        kernel = find_kernel(op) if is_for_gpu else None
        self.has_fallen_back = is_for_gpu and kernel is None
        self.device = "" if is_constant else HOST if self.has_fallen_back else asked_for
        self.site = asked_for if is_constant else self.device  # where it waits for others
        self.edges: list[Edge] = []
        self.next: Node | None = None
        self._arguments = ([], []) if kernel is None else _host_arguments(op, kernel)
        tensors = [*self._arguments[0], *self._arguments[1]]
        self.is_on_gpu = self.device.startswith("GPU") and kernel is not None and not all(tensors)

    @property
    def line(self) -> str | None:
        """The line of the code that made the operation, as in `model.py:12`."""
        return None if self.op is None else innermost_line(self.op.traceback)

    @property
    def behind_identity(self) -> "Node":
        """The operation whose result an operation hands on; itself if it computes one."""
        return self.edges[0].producer.behind_identity if self.type == "Identity" else self

    def memory(self, dtype: tf.DType, index: int, *, is_output: bool) -> str:
        """Returns the device whose memory an argument of the operation is in."""
        if dtype in (tf.string, tf.resource) or (not self.is_operation and dtype == tf.int32):
            return HOST
        in_host = self._arguments[is_output]
        return HOST if index < len(in_host) and in_host[index] else self.device


class Edge(NamedTuple):
    """What an operation waits for: a tensor, or that another operation is done.

    Attributes:
        producer, consumer: the operations.
        output: its number among those of the producer; None: a mere dependency.
        source, target: the devices whose memory holds the tensor.
        bytes: of the tensor; None: unknown while tracing.
    """

    producer: Node
    consumer: Node
    output: int | None
    source: str
    target: str
    bytes: int | None

    @property
    def is_copy(self) -> bool:
        """Whether something goes from a GPU to the host, or back; of a mere dependency, whether the host waits."""
        ends = {self.source, self.target} - {""}
        return len(ends) == 2 and (self.target == HOST or (self.source == HOST and self.output is not None))


class _Value(NamedTuple):
    """A tensor, and what computes it."""

    node: Node
    output: int
    tensor: tf.Tensor


class PlacedGraph:
    """The operations of one step.

    Attributes:
        step: the operations that a step runs, with its condition.
        next_values: what the step hands to the next one, a stand-in for each value.
        condition: of the loop over steps; None: there is no loop.
        effects: the operations that must be done before the next step begins.
        not_followed: the functions whose operations TensorFlow does not show.
    """

    def __init__(self, step: list[Node], next_values: list[Node], condition: Node | None, effects: list[Node]):
        """Leaves out what no result of the step needs, as TensorFlow does."""
        results = [*next_values, *effects, *([condition] if condition else [])]
        needed = set(reached(results, lambda node: [*(edge.producer for edge in node.edges), *node.with_it]))
        self.step = [node for node in step if node in needed]
        self.next_values, self.condition, self.effects = next_values, condition, effects
        self.not_followed: set[str] = set()


def place(graph: Any, readers: set[str]) -> PlacedGraph:
    """Returns the operations of a step: an iteration of the loop that reads batches, or else the whole function.

    Args:
        graph: a `FuncGraph`.
        readers: the types of the operations that read a batch.
    """
    captured = {id(inner): outer for outer, inner in graph.captures}
    arguments = []
    for tensor in graph.inputs:
        outer = captured.get(id(tensor))
        device = _device_of_resource(outer) if tensor.dtype == tf.resource else HOST if outer is None else ""
        arguments.append(_Value(Node(None, "argument", device, ()), 0, tensor))
    placer = _Placer(readers)
    outputs, effects = placer.inline(graph, arguments, "", None)
    placed = placer.step or PlacedGraph(placer.nodes, [value.node for value in outputs], None, effects)
    placed.not_followed = placer.not_followed
    return placed


class _Placer:
    """Inlines the functions of a graph and places their operations.

    Attributes:
        nodes: all that was placed since the step began.
        step: the step; None: not found yet.
        not_followed: as of `PlacedGraph`.
    """

    def __init__(self, readers: set[str]):
        self._readers = readers
        self.nodes: list[Node] = []
        self.step: PlacedGraph | None = None
        self.not_followed: set[str] = set()

    def inline(
        self, graph: Any, arguments: Sequence[_Value], caller: str, gate: Node | None
    ) -> tuple[list[_Value], list[Node]]:
        """Places the operations of a function.

        Args:
            graph: of the function.
            arguments: one for each of its inputs.
            caller: the device of the operation that calls it; empty: none was asked for.
            gate: what decides whether it runs; None: it always does.

        Returns:
            Its results, and its side effects.
        """
        values = {id(tensor): value for tensor, value in zip(graph.inputs, arguments, strict=False)}
        done: dict[int, list[Node]] = {}  # by operation, what has run when it is done
        effects: list[Node] = []
        inputs = {id(tensor.op) for tensor in graph.inputs}
        for op in graph.get_operations():
            if id(op) in inputs:
                continue
            given = [values[id(tensor)] for tensor in op.inputs if id(tensor) in values]
            before = [node for control in op.control_inputs for node in done.get(id(control), [])]
            before += [gate] if gate is not None else []
            results, done[id(op)] = self._place(op, given, before, _short(op.device) or caller, effects)
            values |= {id(t): value for t, value in zip(op.outputs, results, strict=False)}
        effects += [node for op in graph.control_outputs for node in done.get(id(op), [])]
        return [values[id(tensor)] for tensor in graph.outputs if id(tensor) in values], effects

    def _place(
        self, op: Any, given: list[_Value], before: list[Node], device: str, with_it: list[Node]
    ) -> tuple[list[_Value], list[Node]]:
        """Places an operation; returns its results, and what has run when it is done."""
        graphs = called_graphs(op) if op.type in _LOOPS | _BRANCHES | _CALLS else []
        if op.type in _CALLS and graphs and not is_compiled(op):
            gate = self._stand_in(op, "call", "", [], before, with_it) if before else None
            results, effects = self.inline(graphs[0], given, device, gate)
            return results, effects or ([gate] if gate else [value.node for value in results])
        if op.type in _BRANCHES and graphs:
            return self._branch(op, graphs, given, before, device, with_it)
        if op.type in _LOOPS and graphs:
            return self._loop(op, given, before, device, with_it)
        if op.type in _LOOPS | _BRANCHES | _CALLS and not is_compiled(op):
            self.not_followed.add(op.name)
        if op.type == "Identity" and given and not before and device in ("", given[0].node.site):
            return [given[0]._replace(tensor=op.outputs[0])], [given[0].node]  # which TensorFlow takes out
        is_constant = _is_constant(op, given)  # TensorFlow computes it once
        node = Node(op, op.type, self._device(op, given, device), with_it, is_constant)
        self._connect(node, [value for value in given if value.node.is_constant or not is_constant], before)
        return [_Value(node, i, tensor) for i, tensor in enumerate(op.outputs)], [node]

    def _device(self, op: Any, given: Sequence[_Value], device: str) -> str:
        """Returns the device that an operation is to run on."""
        of_resources = [v.node.device for v in given if v.tensor.dtype == tf.resource and v.node.device]
        if of_resources or device:
            return [*of_resources, device][0]
        return given[0].node.device if op.type in SHAPES and given else FIRST_GPU

    def _branch(
        self, op: Any, graphs: Sequence[Any], given: list[_Value], before: list[Node], device: str, with_it: list[Node]
    ) -> tuple[list[_Value], list[Node]]:
        """Places all branches, which wait until the host knows which one to take."""
        gate = self._stand_in(op, op.type, HOST, given[:1], before, with_it)
        ends = [self.inline(graph, given[1:], device, gate) for graph in graphs]
        results = []
        for i, tensor in enumerate(op.outputs):
            inputs = [outputs[i] for outputs, _ in ends if i < len(outputs)]
            merged = self._stand_in(op, "Merge", device or FIRST_GPU, inputs, [], with_it)
            results.append(_Value(merged, 0, tensor))
        return results, [gate, *(node for _, effects in ends for node in effects)]

    def _loop(
        self, op: Any, given: list[_Value], before: list[Node], device: str, with_it: list[Node]
    ) -> tuple[list[_Value], list[Node]]:
        """Places the condition and the body of a loop; of the loop over steps, keeps the step apart."""
        (condition,), (body,) = called_graphs(op, "cond"), called_graphs(op, "body")
        is_over_steps = self.step is None and self._reads(body)
        variables = []
        for value in given:
            at = (value.node.asked_for or FIRST_GPU) if value.tensor.dtype != tf.resource else value.node.device
            variables.append(self._stand_in(op, "loop variable", at, [value], before, with_it))
        arguments = [_Value(node, 0, value.tensor) for node, value in zip(variables, given, strict=True)]
        if is_over_steps:
            self.nodes = []
        (decision,), _ = self.inline(condition, arguments, device, None)
        gate = self._stand_in(op, "condition of the loop", HOST, [decision], [], with_it)
        results, effects = self.inline(body, arguments, device, None if is_over_steps else gate)
        if is_over_steps:
            step = self.nodes
            for variable, result in zip(variables, results, strict=True):
                variable.next = self._stand_in(op, "next value", variable.device, [result], [], ())
            self.step = PlacedGraph(step, [v.next for v in variables if v.next is not None], gate, effects)
        else:
            for variable, result in zip(variables, results, strict=True):
                self._connect(variable, [result], [gate, *effects])
        return arguments, [gate, *effects]

    def _reads(self, graph: Any) -> bool:
        """Returns whether a function reads a batch, other than in a loop of its own."""
        return any(
            op.type in self._readers or (op.type not in _LOOPS and any(map(self._reads, called_graphs(op))))
            for op in graph.get_operations()
        )

    def _stand_in(
        self, op: Any, kind: str, device: str, given: list[_Value], before: list[Node], with_it: Sequence[Node]
    ) -> Node:
        node = Node(op, kind if kind != op.type else f"{kind}'s condition", device, with_it)
        self._connect(node, given, before)
        return node

    def _connect(self, node: Node, given: Sequence[_Value], before: Sequence[Node]) -> None:
        """Adds a node with what it waits for."""
        self.nodes.append(node)
        for i, (producer, index, tensor) in enumerate(given):
            if tensor.dtype == tf.resource:
                source = target = ""  # a handle
            else:
                target = node.memory(tensor.dtype, i, is_output=False)
                source = producer.memory(tensor.dtype, index, is_output=True) or target
            size = None if tensor.dtype == tf.variant else known_bytes(tensor)
            node.edges.append(Edge(producer, node, index, source, target, size))
        node.edges += [Edge(earlier, node, None, earlier.site, node.site, 0) for earlier in before]


def _is_constant(op: Any, given: Sequence[_Value]) -> bool:
    """Returns whether TensorFlow's graph optimizer replaces an operation by its result."""
    if op.type in SHAPES and all(tensor.shape.is_fully_defined() for tensor in op.inputs):
        return True
    are_constant = len(given) == len(op.inputs) and all(value.node.is_constant for value in given)
    return bool(op.outputs) and not op.op_def.is_stateful and are_constant


def _short(device: str) -> str:
    """Returns "host" or as in "GPU:1" for the name of a device; empty if it names none."""
    match = re.search(r"(CPU|GPU):(\d+)$", device.upper())
    return "" if match is None else HOST if match[1] == "CPU" else match[0]


def _device_of_resource(handle: Any) -> str:
    """Returns the device of a variable, or of another resource, which is on the host."""
    return (_short(getattr(handle, DEVICE, "")) or FIRST_GPU) if is_on_gpu(handle) else HOST


def _host_arguments(op: Any, kernel: Any) -> tuple[list[bool], list[bool]]:
    """Returns for each input and each output of an operation whether a kernel has it in the host's memory."""
    both = []
    for arguments, tensors in ((op.op_def.input_arg, op.inputs), (op.op_def.output_arg, op.outputs)):
        names = []
        for argument in arguments:
            count = op.get_attr(argument.number_attr) if argument.number_attr else 1
            count = len(op.get_attr(argument.type_list_attr)) if argument.type_list_attr else count
            names += [argument.name] * count
        in_host = set(kernel.host_memory_arg)
        pairs = zip(names, tensors, strict=False)
        both.append([name in in_host or tensor.dtype in (tf.string, tf.resource) for name, tensor in pairs])
    return both[0], both[1]

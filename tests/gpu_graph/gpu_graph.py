"""GPU graph: what a traced function would do on GPUs in each step, found in its graph without running it.

    found = look(graph, "train step")                # a FuncGraph
    found.on_host, found.copies, found.waits         # each with the line of the code that made the operation
    print(found)                                     # as a table

TensorFlow registers the GPU kernels of its operations on any machine. From them follows which operations of a graph
fall back to the host, and which tensors are copied between a GPU and the host. A step is an iteration of the loop that
reads batches; without such a loop, the whole function. This module traces nothing (`pretended_gpus`), and places
operations as `placed_graph` does.
"""

import collections
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from distloop.audit.gpu_kernels import RUN_PYTHON
from distloop.graph_functions import reached
from tests.gpu_graph.placed_graph import HOST, Node, PlacedGraph, place

_READERS = {"IteratorGetNext", "IteratorGetNextSync", "OptionalGetValue"}  # types of operations that return a batch
_PASS_ON = {"Identity", "IdentityN", "AssignVariableOp"}
_MOST_NAMES = 3  # of the numbers that a step waits for


class OnHost(NamedTuple):
    """An operation that is to run on a GPU, and runs on the host.

    Attributes:
        operation: its type and the dtypes of its inputs, as in `Cumprod(int64)`.
        reason: why it does.
        name: of the operation, with that of its layer.
        line: of the code that made it, as in `model.py:12`.
    """

    operation: str
    reason: str
    name: str
    line: str | None


class Copy(NamedTuple):
    """A tensor that each step copies between the host and a GPU.

    Attributes:
        path: "into" the step; "out of" it; "through" the host, from a GPU to a GPU.
        source: the device: `host`, or as in `GPU:0`.
        target: likewise.
        producer: the type of the operation that computes the tensor.
        consumer: the type of the first one that takes it.
        bytes: its size, 0 for a mere dependency; None: unknown while tracing.
        is_late: whether it holds rows of a batch that the same step read, so that they travel before it computes.
        line: of the code that made the operation on the host.
    """

    path: str
    source: str
    target: str
    producer: str
    consumer: str
    bytes: int | None
    is_late: bool
    line: str | None


class Wait(NamedTuple):
    """What holds back the next step until a GPU has computed numbers of this one.

    Attributes:
        what: the condition of the loop, or an operation with a side effect that runs on the host.
        numbers: the types of the operations that compute what it waits for.
        line: of the code that made it.
    """

    what: str
    numbers: tuple[str, ...]
    line: str | None


@dataclass(frozen=True)
class GpuGraph:
    """What each step of a function does on GPUs.

    Attributes:
        name: of the function.
        operations: device -> the number of operations.
        on_host: the operations that fall back to the host.
        copies: each tensor once for each device that gets it.
        waits: what holds back the next step.
        not_followed: the functions whose operations TensorFlow does not show.
    """

    name: str
    operations: Mapping[str, int]
    on_host: tuple[OnHost, ...]
    copies: tuple[Copy, ...]
    waits: tuple[Wait, ...]
    not_followed: tuple[str, ...]

    def __str__(self) -> str:
        counts = ", ".join(f"{count:,} on {device}" for device, count in sorted(self.operations.items()))
        rows = [f"runs on the host: {f.operation}, {f.reason}{_at(f.line)}" for f in self.on_host]
        for copy in sorted(self.copies, key=lambda copy: ("through", "out of", "into").index(copy.path)):
            size = "of unknown size" if copy.bytes is None else f"{copy.bytes:,} bytes"
            late = ", rows that this step read" if copy.is_late else ""
            way = "through the host" if copy.path == "through" else f"{copy.path} the step"
            ends = f"{copy.source} -> {copy.target}, {copy.producer} -> {copy.consumer}"
            rows.append(f"{way}: {ends}, {size}{late}{_at(copy.line)}")
        rows += [f"the next step waits: {w.what} needs {', '.join(w.numbers)}{_at(w.line)}" for w in self.waits]
        rows += [f"not followed: {name}" for name in self.not_followed]
        alike = collections.Counter(rows)
        lines = [f"{count} x {row}" if count > 1 else row for row, count in alike.items()]
        return "\n  ".join([f"{self.name}: {counts or 'no'} operations", *lines])

    @property
    def through(self) -> list[Copy]:
        """The copies of what goes through the host within a step."""
        return [copy for copy in self.copies if copy.path == "through"]


def look(graph: Any, name: str) -> GpuGraph:
    """Returns what each step of a function does on GPUs.

    Args:
        graph: a `FuncGraph`, whose operations without a device count as placed on the first GPU.
        name: of the function.
    """
    placed = place(graph, _READERS)
    judge = _Judge(placed)
    return GpuGraph(
        name=name,
        operations=collections.Counter(node.device for node in placed.step if node.is_operation and node.device),
        on_host=tuple(filter(None, map(_on_host, placed.step))),
        copies=tuple(judge.copies()),
        waits=tuple(judge.waits()),
        not_followed=tuple(sorted(placed.not_followed)),
    )


def _on_host(node: Node) -> OnHost | None:
    reason = "it runs Python" if node.type in RUN_PYTHON else "it has no GPU kernel" if node.has_fallen_back else ""
    dtypes = ", ".join(tensor.dtype.name for tensor in node.op.inputs) if reason else ""
    return OnHost(f"{node.type}({dtypes})", reason, node.op.name, node.line) if reason else None


class _Judge:
    """Follows the numbers of a step through the operations that run on the host."""

    def __init__(self, placed: PlacedGraph):
        """Finds where tensors are copied, and which operations on the host depend on them."""
        self._placed = placed
        self._users: dict[Node, list[Node]] = collections.defaultdict(list)
        for node in placed.step:
            for edge in node.edges:
                self._users[edge.producer].append(node)
        self._copied = [edge for node in placed.step for edge in node.edges if edge.is_copy]
        to_host = [edge for edge in self._copied if edge.target == HOST]
        of_step = set(placed.step)
        self._from_gpu = self._followers(edge.consumer for edge in to_host)
        self._late = self._followers(edge.consumer for edge in to_host if edge.producer in of_step)
        self._rows = self._followers(node for node in placed.step if node.type in _READERS)
        self._to_gpu = self._leaders(edge.producer for n in placed.step if n.is_on_gpu for edge in n.edges)

    def copies(self) -> Iterator[Copy]:
        """Yields the copies of a step, each tensor once for each device."""
        seen = set()
        for edge in self._copied:
            producer, consumer = edge.producer, edge.consumer
            key = producer, edge.output, edge.target
            if key not in seen:
                seen.add(key)
                if edge.target == HOST:
                    path = "through" if consumer.is_on_gpu or consumer in self._to_gpu else "out of"
                else:
                    path = "through" if producer in self._from_gpu else "into"
                line = (consumer if edge.target == HOST else producer).line
                holds_rows = edge.output is not None and producer in self._rows
                is_late = edge.target != HOST and holds_rows and self._is_computed_with(consumer)
                yield Copy(path, edge.source, edge.target, producer.type, consumer.type, edge.bytes, is_late, line)

    def waits(self) -> Iterator[Wait]:
        """Yields what holds back the next step."""
        condition = self._placed.condition
        if condition is None:
            return
        for node in reached([condition], _before):
            if node.next is not None:
                value = node.next.edges[0]
                is_copied = value.is_copy or value.target != HOST  # to the host, where the condition is
                is_new = value.producer.next is None  # not a number of the step before, handed on
                if is_new and (value.producer in self._late or is_copied):
                    yield Wait("the condition of the loop", self._numbers(node.next), condition.line)
        for node in dict.fromkeys(self._placed.effects):
            if node in self._late and not node.is_on_gpu:
                yield Wait(node.type, self._numbers(node), node.line)
        homes = {node.device for node in self._placed.next_values if node.edges[0].target}  # of all but resources
        for device, count in collections.Counter(node.site for node in self._placed.effects if node.is_on_gpu).items():
            if homes - {device}:
                yield Wait(
                    f"the loop, whose variables are not on {device},", (f"{count} side effects",), condition.line
                )

    def _numbers(self, node: Node) -> tuple[str, ...]:
        """Returns the types of the operations on GPUs whose results an operation waits for."""
        copied = [edge for leader in self._leaders([node]) for edge in leader.edges if edge.is_copy]
        copied = [edge for edge in copied if edge.output is not None] or copied
        producers = [edge.producer for edge in copied or node.edges]
        return tuple(dict.fromkeys(producer.behind_identity.type for producer in producers))[:_MOST_NAMES]

    def _is_computed_with(self, node: Node) -> bool:
        """Returns whether rows are computed with, and not only handed to the next step."""
        after = reached([node], lambda node: self._users[node])
        return any(node.is_operation and node.type not in _PASS_ON for node in after)

    def _followers(self, nodes: Iterable[Node]) -> set[Node]:
        """Returns operations and those after them, as far as they run on the host."""
        return set(reached(_of_host(nodes), lambda node: _of_host(self._users[node])))

    def _leaders(self, nodes: Iterable[Node]) -> set[Node]:
        """Returns operations of the step and those before them, as far as they run on the host."""
        return set(reached(_of_host(nodes), lambda node: _of_host(_before(node))))


def _before(node: Node) -> list[Node]:
    """Returns the operations of a step that an operation waits for."""
    return [] if node.next else [edge.producer for edge in node.edges]


def _of_host(nodes: Iterable[Node]) -> list[Node]:
    return [node for node in nodes if not node.is_on_gpu]


def _at(line: str | None) -> str:
    return f" ({line})" if line else ""

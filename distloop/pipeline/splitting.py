"""Splitting: finds where a Keras graph can be cut into stages, and which cuts balance the stages.

    stages = split_graph(model, 4)                          # four Keras models, one after the other
    ends = balance(np.array([1.0, 1.0, 2.0]), 2, "...")     # [2, 3]: layers 0 and 1 in one stage, layer 2 in the other

It does not know devices.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import numpy as np

from distloop.variables import named_variables, tensorflow_variable


class _Piece(NamedTuple):
    """A part of a functional model that cannot be cut further."""

    end: Any  # its symbolic output tensor; of the last piece, the model's outputs
    parameter_bytes: float
    work: float  # estimated multiplications per example


def split_graph(model: keras.Model, num_stages: int) -> list[keras.Model]:
    """Returns the stages of a functional or Sequential model, cut where a single tensor passes on.

    Raises:
        ValueError: if the graph has fewer pieces than stages; the message names layers whose outputs would cross a cut.
    """
    graph = model._functional if isinstance(model, keras.Sequential) else model
    pieces = _pieces(graph, num_stages)
    costs = relative([piece.parameter_bytes for piece in pieces]) + relative([piece.work for piece in pieces])
    tensors = [graph._inputs_struct, *(pieces[end - 1].end for end in balance(costs, num_stages, "its graph"))]
    return [keras.Model(start, end) for start, end in zip(tensors, tensors[1:], strict=False)]


def balance(costs: np.ndarray, num_stages: int, network: str) -> list[int]:
    """Returns the end of each stage, such that the largest cost of a stage is as small as possible.

    Args:
        costs: of each layer, `[L]`.
        num_stages: S, from 1 to L.
        network: its description, for the message.

    Raises:
        ValueError: if there are more stages than layers.
    """
    _require_enough(len(costs), num_stages, network)
    cost_until = np.concatenate([[0.0], np.cumsum(costs)])

    @functools.cache
    def best(end: int, stages: int) -> tuple[float, tuple[int, ...]]:
        if stages == 1:
            return cost_until[end], (end,)
        splits = [(best(cut, stages - 1), cost_until[end] - cost_until[cut]) for cut in range(stages - 1, end)]
        return min((max(cost, last), (*cuts, end)) for (cost, cuts), last in splits)

    return list(best(len(costs), num_stages)[1])


def relative(costs: Sequence[float]) -> np.ndarray:
    """Returns costs as fractions of their sum."""
    return np.array(costs) / max(sum(costs), 1.0)


def parameter_bytes(module: Any) -> float:
    """Returns the bytes of a module's parameters; 0 if it is not built."""
    variables = [tensorflow_variable(v) for v in named_variables(module).values()]
    return float(sum(int(np.prod(v.shape)) * v.dtype.size for v in variables))


def _pieces(graph: Any, num_stages: int) -> list[_Piece]:
    """Returns the pieces of a functional model, a chain in the order of execution."""
    by_depth = graph._nodes_by_depth
    nodes = [node for depth in sorted(by_depth, reverse=True) for node in by_depth[depth] if not node.is_input]
    pieces, start = [], 0
    obstacles: dict[int, str] = {}  # index of a node -> why the graph cannot be cut before it
    for cut in range(1, len(nodes)):
        crossing, shared = _crossing_tensors(graph, nodes, cut), _shared_layers(nodes, cut)
        if len(crossing) == 1 and not shared:
            pieces.append(_Piece(crossing[0], *_cost(nodes[start:cut])))
            start = cut
            continue
        names = [repr(tensor._keras_history.operation.name) for tensor in crossing]
        what = f"{shared[0]!r} is called before and after" if shared else f"the outputs of {' and '.join(names)} cross"
        obstacles[cut] = f"{what} a cut after {nodes[cut - 1].operation.name!r}"
    pieces.append(_Piece(graph._outputs_struct, *_cost(nodes[start:])))
    if len(pieces) < num_stages <= len(nodes):
        middle = min(obstacles, key=lambda cut: abs(cut - len(nodes) / 2))
        raise ValueError(
            f"num_stages={num_stages} was given, but the graph of the model {graph.name!r} is a chain of {len(pieces)} "
            f"at most, for {obstacles[middle]}: give num_stages={len(pieces)}, or make stages by hand with "
            "distloop.stages([...])."
        )
    _require_enough(len(nodes), num_stages, f"the model {graph.name!r}")
    return pieces


def _crossing_tensors(graph: Any, nodes: Sequence[Any], cut: int) -> list[Any]:
    """Returns the tensors that nodes from `cut` on, or the model's outputs, take from the nodes before."""
    after = nodes[cut:]
    needed = [tensor for node in after for tensor in node.input_tensors] + list(graph.outputs)
    made = {id(tensor) for node in after for tensor in node.output_tensors}
    return list({id(tensor): tensor for tensor in needed if id(tensor) not in made}.values())


def _shared_layers(nodes: Sequence[Any], cut: int) -> list[str]:
    """Returns the names of layers that are called both before and after a cut."""
    shared = {id(node.operation) for node in nodes[:cut]} & {id(node.operation) for node in nodes[cut:]}
    return [node.operation.name for node in nodes[:cut] if id(node.operation) in shared]


def _cost(nodes: Sequence[Any]) -> tuple[float, float]:
    """Returns the bytes of parameters and the estimated multiplications per example of some calls of layers."""
    operations = {id(node.operation): node.operation for node in nodes}.values()
    work = 0.0
    for node in nodes:
        shape = node.output_tensors[0].shape
        positions = float(np.prod([size or 1 for size in shape[1:-1]]))  # each of them uses all parameters
        parameters = parameter_bytes(node.operation) / 4
        work += positions * (1 if isinstance(node.operation, keras.layers.Embedding) else parameters + (shape[-1] or 1))
    return sum(map(parameter_bytes, operations)), work


def _require_enough(count: int, num_stages: int, network: str) -> None:
    if num_stages > count:
        raise ValueError(
            f"num_stages={num_stages} was given, but {network} has {count} layers, and a stage needs one at least: "
            f"give num_stages={count} or fewer."
        )

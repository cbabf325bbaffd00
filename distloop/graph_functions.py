"""Graph functions: makes `tf.function`s, lists the operations of traced ones, and counts their arithmetic.

    read = graph_function(lambda: strategy.run(read_on_replica))
    for op in with_called(graph.get_operations()):
        if DRAWS_FROM_KERNEL.fullmatch(op.type): ...
    flops = count_flops(graph)                          # None: some operation cannot be counted
    peak_of("NVIDIA A100-SXM4-80GB", is_half=True)      # 312e12 a second

TensorFlow counts the traces of all functions made of one line of code together, and warns at the fifth: of five
trainers in a process, each of which traces such a function once.
"""

import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.framework import config

from distloop.log import log

# Types of operations whose kernel counts the draws, where nothing can read or restore the count; by the list of
# TensorFlow's operations that are stateful and have a seed, cuDNN's layers apart.
DRAWS_FROM_KERNEL = re.compile(
    r"Random(Uniform|UniformInt|StandardNormal|Gamma|Poisson|PoissonV2|Shuffle|Crop)|(Parameterized)?TruncatedNormal|"
    r"Multinomial|SampleDistortedBoundingBox(V2)?|\w+CandidateSampler"
)

BACKWARD_SCOPE = "gradient_tape/"  # of operations that a tape creates
RECOMPUTED_SCOPE = "recomputed"  # of operations of a layer that the backward pass computes again

# Types of operations that only read a variable or a table.
_READS = {"ReadVariableOp", "ResourceGather", "ResourceGatherNd", "VariableShape", "VarIsInitializedOp"}
_READS |= {"LookupTableFindV2", "LookupTableSizeV2", "LookupTableExportV2"}
# TensorFlow's attribute of an operation that calls functions: the numbers of the inputs that these only read.
_READ_ONLY_INPUTS = "_read_only_resource_inputs"

_T = TypeVar("_T")
MOST_TRACES = 5  # without a warning

_NUM_PAIRS = 5  # readings of two clocks, the closest of which counts

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


def graph_function(fn: Callable[..., Any], *, autograph: bool = False, **options: Any) -> Any:
    """Returns a `tf.function`, with AutoGraph if it is of a user's function; the options are those of `tf.function`."""
    traced = tf.function(fn, autograph=autograph, **options)
    traced._omit_frequent_tracing_warning = True  # private: users could not avoid it
    return traced


def compiled(fn: Callable[..., Any], eager: bool = False, *, name: str = "function", max_traces: int = 0) -> Any:
    """Returns `fn` as a `tf.function` of its own, so that TensorFlow counts the traces of each trainer apart.

    Args:
        fn: without AutoGraph.
        eager: whether to return `fn` itself instead.
        name: what it is called in the warning about many traces.
        max_traces: as `Config.max_traces`.
    """
    if eager:
        return fn
    traces = Traces(name, max_traces)

    def traced(*arguments: Any) -> Any:
        traces.add(arguments)
        return fn(*arguments)

    return graph_function(traced)


def called_by_kind(run: Any, eager: bool) -> Callable[..., Any]:
    """Returns a function that calls what `compiled` returned: the trace for its iterator and layout, without a search.

    TensorFlow finds the trace from all arguments of a call, which takes 0.6 ms, as long as a pass over a small batch.
    """
    traces: dict[Any, Any] = {}

    def call(iterator: Any, layout: Any, *numbers: tf.Tensor) -> Any:
        if (kind := (iterator._type_spec, layout)) not in traces:
            traces[kind] = run.get_concrete_function(iterator, layout, *numbers)
        return (run if tf.config.functions_run_eagerly() else traces[kind])(iterator, layout, *numbers)

    return run if eager else call


class Traces:
    """The traces of one function."""

    def __init__(self, name: str, most: int = 0):
        """Stores what the function is called in the warning, and the most traces that it may have; 0: any number."""
        self._name, self._most = name, most
        self._count = 0
        self._next_warning = MOST_TRACES + 1
        self._last: dict[str, str] = {}

    def add(self, arguments: tuple[Any, ...]) -> None:
        """Counts a trace; warns at the one after `MOST_TRACES`, and whenever their number has doubled since.

        Args:
            arguments: of the function: iterators, tensors, Python values.

        Raises:
            ValueError: if it is traced more often than it may be.
        """
        described = {name: text for argument in arguments for name, text in describe(argument).items()}
        self._count += 1
        changed = ", ".join(
            f"{name or 'the batch'} from {self._last.get(name, 'nothing')} to {described.get(name, 'nothing')}"
            for name in sorted(described.keys() | self._last.keys())
            if described.get(name) != self._last.get(name)
        )
        if 0 < self._most < self._count:
            raise ValueError(
                f"The {self._name} was to be traced {self._count} times, and max_traces={self._most} was given; the "
                f"last trace changed {changed or 'nothing but the dataset'}: give batches of one shape, padded or from "
                "one dataset that declares axes that vary as None, or raise max_traces."
            )
        if self._count == self._next_warning:
            self._next_warning = 2 * self._count
            log.warning(
                "The %s was traced %d times, which takes seconds each time. The last time changed %s. Give batches of "
                "one shape: pad them, or make one dataset of all, so that tf.data declares axes that vary as None.",
                self._name,
                self._count,
                changed or "nothing but the dataset",
            )
        self._last = described


def describe(argument: Any) -> dict[str, str]:
    """Returns dtype and shape of each entry of the batches that an argument holds, by path."""
    spec = getattr(argument, "element_spec", argument)
    spec = getattr(spec, "rows", spec)  # of a `Batch`
    return {
        "/".join(map(str, path)): f"{leaf.dtype.name} {_shape(leaf.shape)}"
        for path, leaf in keras.tree.flatten_with_path(spec)
        if isinstance(leaf, tf.TensorSpec | tf.Tensor) and leaf.shape.rank != 0
    }


def _shape(shape: tf.TensorShape) -> list[int | None] | str:
    return "of unknown shape" if shape.rank is None else list(shape)


def has_clock() -> bool:
    """Returns whether a graph may read the time, which TensorFlow's deterministic operations forbid."""
    return not config.is_op_determinism_enabled()


_read_the_clock = False  # whether a graph of this process reads the time


def enable_determinism() -> None:
    """Turns TensorFlow's deterministic operations on, for all of this process.

    Raises:
        ValueError: if a graph of this process reads the time, as that graph would fail from then on.
    """
    if has_clock() and _read_the_clock:
        raise ValueError(
            "TensorFlow's deterministic operations were asked for, but another Trainer of this process has made graphs "
            "that read the time, which they forbid: give the first Trainer of the process deterministic=True."
        )
    config.enable_op_determinism()


def read_clock() -> tf.Tensor:
    """Returns the Unix time in seconds, `[]` of float64; always 0 where a graph has no clock."""
    global _read_the_clock
    if not has_clock():
        return tf.constant(0.0, tf.float64)
    _read_the_clock = True
    return tf.timestamp()


def time_after(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Returns the time at which all of some tensors are computed, as `read_clock`."""
    with tf.control_dependencies(tensors):
        return read_clock()


NO_LIMIT_SECS = 1e9  # finite, for `tf.debugging.enable_check_numerics`, which stops at each infinity in a graph


class TimeLimit:
    """A time limit in a graph, whose only clock can be set; a clock set back by more than the limit ends it, too.

    Where a graph has no clock, the time is never over.
    """

    def __init__(self, secs: tf.Tensor):
        """Starts the time; `secs` is a float64."""
        self.began_at, self._limit = read_clock(), tf.square(tf.maximum(secs, 0.0))

    def is_ahead(self, now: tf.Tensor | None = None) -> tf.Tensor:
        """Computes whether the time is not over yet, as of a time; None: of this moment."""
        if not has_clock():
            return tf.constant(True)
        return tf.math.squared_difference(read_clock() if now is None else now, self.began_at) < self._limit


def graph_clock() -> Callable[[Any], np.ndarray]:
    """Returns a function from times of `read_clock`, in order, to those of the monotonic clock.

    The times lie between this call and that of the function. Where the clock was set in between, the results are
    inexact, but in order, and between the two calls. Where a graph has no clock, the function takes numbers of steps,
    in order, as if all steps had taken equally long.
    """
    began_at = time.monotonic()

    def convert(times: Any) -> np.ndarray:
        ended_at, times = time.monotonic(), np.asarray(times)
        if has_clock():
            pairs = [(time.monotonic(), time.time(), time.monotonic()) for _ in range(_NUM_PAIRS)]
            before, unix_time, after = min(pairs, key=lambda pair: pair[2] - pair[0])  # others were interrupted
            times = times + ((before + after) / 2 - unix_time)
        else:
            times = began_at + (ended_at - began_at) * times / max(1.0, times.max(initial=0.0))
        return np.maximum.accumulate(np.clip(times, began_at, ended_at))

    return convert


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
            stack += [iter(graph.get_operations()) for graph in _graphs_of(op, attribute, seen) if graph is not None]


def called_graphs(op: tf.Operation, attribute: str = "") -> list[Any]:
    """Returns the graphs of the functions that an operation calls; of one attribute alone, such as "body", if given."""
    names = [attribute] if attribute else _function_attributes(op)
    return [graph for name in names for graph in _graphs_of(op, name, set()) if graph is not None]


_attributes_of_type: dict[str, list[str]] = {}


def _function_attributes(op: tf.Operation) -> list[str]:
    """Returns the names of an operation's attributes that are functions; the same for each type of operation."""
    if op.type not in _attributes_of_type:
        attributes = [attribute.name for attribute in op.op_def.attr if attribute.type in ("func", "list(func)")]
        _attributes_of_type[op.type] = attributes
    return _attributes_of_type[op.type]


def _graphs_of(op: tf.Operation, attribute: str, seen: set[str]) -> Iterator[Any]:
    """Yields the graphs of the functions in an operation's attribute that were not seen yet; None if one has none."""
    value = op.get_attr(attribute)
    for function in value if isinstance(value, (list, tuple)) else [value]:
        if function.name not in seen:
            seen.add(function.name)
            # TensorFlow shows the graph of a called function, with the lines of its code, by this method alone. The
            # functions of TensorFlow 1, as in its CTC loss, have none.
            yield getattr(op.graph._get_function(function.name), "graph", None)


def reached(start: Iterable[_T], neighbours: Callable[[_T], Iterable[_T]]) -> Iterator[_T]:
    """Yields tensors or operations, and all that are reached from one neighbour to the next, each once."""
    seen, stack = set[int](), list(start)
    while stack:
        if id(each := stack.pop()) not in seen:
            seen.add(id(each))
            yield each
            stack += neighbours(each)


def assigned_resources(operations: Iterable[tf.Operation]) -> set[int]:
    """Returns the identities of the resources, such as the handles of variables, that operations may write."""
    return {id(outermost(tensor)) for op in operations for tensor in _assigned_inputs(op)}


def may_write(op: tf.Operation) -> bool:
    """Returns whether an operation may write a variable or another resource."""
    return bool(_assigned_inputs(op))


def _assigned_inputs(op: tf.Operation) -> list[tf.Tensor]:
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


def peak_of(device: str, is_half: bool) -> float | None:
    """Returns the peak performance of a device, in floating-point operations per second; None: unknown device.

    Args:
        device: the vendor's name of the device.
        is_half: True for float16 and bfloat16, False for float32.
    """
    names = [name for name in _PEAKS if re.search(rf"\b{re.escape(name)}\b", device)]
    return _PEAKS[names[0]][is_half] if names else None


def count_flops(graph: tf.Graph | None) -> float | None:
    """Returns the floating-point operations of one run of a graph.

    Counted are the multiplications and additions of matrix products, convolutions and einsums, as is usual for model
    FLOPs utilization (Chowdhery et al. 2022, arXiv:2204.02311, appendix B); all other operations are negligible.

    Returns:
        None if a shape or a function's graph is unknown while tracing, or if a loop or a branch contains operations
        that count.
    """
    if graph is None:
        return None
    total = 0.0
    for op in graph.get_operations():
        if op.type in _CALLS or op.type in _BRANCHES:
            graphs = [called for name in _function_attributes(op) for called in _graphs_of(op, name, set())]
            counts = [count_flops(called) for called in graphs]
            # The number of iterations is unknown; it does not matter if there is nothing to count in the body.
            operations = counts[0] if op.type in _CALLS else None if any(count != 0.0 for count in counts) else 0.0
        else:
            operations = _flops_of(op)
        if operations is None:
            return None
        total += operations
    return total


def _flops_of(op: tf.Operation) -> float | None:
    """Returns the arithmetic of one operation: 2 x elements of the result x products in each; None: unknown."""
    kind = op.type
    if kind == "Einsum":
        terms = op.get_attr("equation").decode().partition("->")[0].split(",")
        shapes = [tensor.shape for tensor in op.inputs]
        if "..." in "".join(terms) or any(shape.rank != len(term) for shape, term in zip(shapes, terms, strict=True)):
            return None
        sizes = {label: size for shape, term in zip(shapes, terms, strict=True) for label, size in zip(term, shape)}  # noqa: B905
        return None if None in sizes.values() else 2.0 * math.prod(sizes.values())
    is_transposed = kind in ("Conv2DBackpropInput", "Conv3DBackpropInputV2")  # a convolution, from its input's side
    if kind == "MatMul":
        inner = op.inputs[0].shape[0 if op.get_attr("transpose_a") else 1]
    elif kind in ("BatchMatMul", "BatchMatMulV2", "BatchMatMulV3"):
        inner = op.inputs[0].shape[-2 if op.get_attr("adj_x") else -1]
    elif kind in ("Conv2D", "Conv3D") or is_transposed:
        inner = op.inputs[1].shape[:-1].num_elements()  # height x width x channels of a group
    elif kind == "DepthwiseConv2dNative":
        inner = op.inputs[1].shape[:2].num_elements()
    else:
        return 0.0
    result = op.inputs[2] if is_transposed else op.outputs[0]
    numbers = result.shape.num_elements()
    return None if inner is None or numbers is None else 2.0 * inner * numbers

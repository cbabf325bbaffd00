"""Owns the spreading of one network over several devices: its stages, what runs in which order, and where to cut.

    model = distloop.split(keras_model, num_stages=4)          # in model_fn: cut at layers, one stage on each device
    model = distloop.stages([encoder, blocks, head])           # or cut by hand: parts that are called one after another
    logits = model(images, training=training)                  # in loss_fn and predict_fn, as any model

A stage's variables live on its device, its forward pass runs there, and so does its backward pass: the step takes
gradients with `tf.gradients`, which puts each operation beside the one that it belongs to. The microbatches of a step
are in one graph, so that stages work on different ones at the same time. It does not know how a step goes.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.ops import resource_variable_ops

from distloop.distributed import workers
from distloop.distributed.devices import short_device
from distloop.variables import Arrangement, is_seed, named_variables, tensorflow_variable


class Stages(Arrangement):
    """A network whose parts run one after the other, each stage on its device; made by `stages` or `split`.

    Attributes:
        whole: the Keras model, or the list of modules, that it runs; names of variables are those in it, wherever it
            is cut.
        parts: by stage, the modules that it calls one after the other.
        devices: of each stage, as in `GPU:0`; empty where there is one stage, which runs where everything does.
    """

    def __init__(self, whole: Any, parts: Sequence[Sequence[Any]], devices: Sequence[str] | None, recompute: bool):
        """Use `stages` or `split`.

        Args:
            whole: as the attribute.
            parts: as the attribute.
            devices: as for `stages`.
            recompute: as for `stages`.
        """
        self.whole = whole
        self.devices = _choose_devices(len(parts), devices)
        self.parts = [list(stage) for stage in parts]
        self._recompute = recompute
        self._is_placed = bool(self.devices)
        self._finished: Sequence[Sequence[tf.Tensor]] = ()  # as for `ordered`
        self._require_disjoint()
        self._place()

    def __len__(self) -> int:
        """Counts the stages."""
        return len(self.parts)

    def __call__(self, inputs: Any, training: bool | None = None) -> Any:
        """Runs the network.

        Args:
            inputs: what the first part takes, tensors `[B, ...]`.
            training: is given to those parts that take it.

        Returns:
            What the last part gives.
        """
        for stage in range(len(self)):
            inputs = self._run(stage, inputs, training)
        if tf.executing_eagerly():
            self._place()  # what this call has built
        return inputs

    @property
    def output_names(self) -> list[str]:
        """The names of a Keras model's outputs."""
        return list(getattr(self.whole, "output_names", None) or [])

    def variables_of(self, stage: int) -> list[Any]:
        """Lists the variables of a stage."""
        return list(named_variables(self.parts[stage]).values())

    def describe(self) -> str:
        """Says how many parameters are where, as in `2 = 1,024 on CPU:0 + 512 on CPU:1`."""
        counts = [sum(int(np.prod(v.shape)) for v in self.variables_of(i) if not is_seed(v)) for i in range(len(self))]
        parts = [f"{count:,} on {device}" for count, device in zip(counts, self.devices, strict=True)]
        return f"{len(self)} = {' + '.join(parts)}"

    @contextlib.contextmanager
    def ordered(self, finished: Sequence[Sequence[tf.Tensor]]) -> Iterator[None]:
        """Orders the forward passes that are traced meanwhile, one of each microbatch.

        With S stages, stage s, from 0, begins a microbatch when the one S - s + 1 before it has come back there, and
        holds the activations of so many at most. That is 1F1B (Narayanan et al. 2019, PipeDream, section 3.2) with one
        more in the queue, so that a device does not wait for its next.

        Args:
            finished: the gradients of each microbatch that was traced, added up to those before; grows meanwhile.
        """
        self._finished = finished
        try:
            yield
        finally:
            self._finished = ()

    @contextlib.contextmanager
    def unplaced(self) -> Iterator[None]:
        """Traces what is traced meanwhile without devices, to run anywhere."""
        self._is_placed = False
        try:
            yield
        finally:
            self._is_placed = bool(self.devices)

    def _run(self, stage: int, inputs: Any, training: bool | None) -> Any:
        call = functools.partial(self._call, stage, training=training)
        if self._recompute and training:
            call = functools.partial(self._call_twice, stage, call)
        if not self._is_placed:
            return call(inputs)
        with tf.device(self.devices[stage]):
            with tf.control_dependencies(self._before(stage)):
                copies = tf.nest.map_structure(tf.identity, inputs)
            return call(_masked(copies, _masks(inputs)))

    def _before(self, stage: int) -> list[tf.Tensor]:
        """Lists what a stage's next forward pass comes after."""
        ahead = len(self) - stage + 1
        if len(self._finished) < ahead or tf.executing_eagerly():
            return []
        graph = tf.compat.v1.get_default_graph()  # another one in a branch of loss_fn
        gradients = [tensor for tensor in self._finished[-ahead] if tensor.graph is graph]
        return [gradient for gradient in gradients if short_device(gradient.device) == self.devices[stage]]

    def _call(self, stage: int, inputs: Any, training: bool | None) -> Any:
        for part in self.parts[stage]:
            inputs = part(inputs, training=training) if _takes_training(part) else part(inputs)
        return inputs

    def _call_twice(self, stage: int, call: Callable[[Any], Any], inputs: Any) -> Any:
        """Runs a stage that keeps no activations: the backward pass computes them again, with the same random draws."""
        kept = [v for v in self.variables_of(stage) if isinstance(v, keras.Variable) and not v.trainable]
        before = [(variable, tf.identity(variable)) for variable in kept]
        masks: list[Any] | None = None  # of the outputs, once they were computed

        def run(*flat: tf.Tensor) -> Any:
            nonlocal masks
            # The second pass sees what the first one saw, such as places in random streams, and writes nothing.
            scope = contextlib.nullcontext() if masks is None else keras.StatelessScope(state_mapping=before)
            with scope:
                outputs = call(_masked(tf.nest.pack_sequence_as(inputs, flat), _masks(inputs)))
            if masks is None:
                masks = _masks(outputs)
            return outputs

        outputs = tf.recompute_grad(run)(*tf.nest.flatten(inputs))
        return _masked(outputs, masks or [])

    def _place(self) -> None:
        """Moves each variable to its stage's device, where it is not there yet."""
        for stage, device in enumerate(self.devices):
            for variable in self.variables_of(stage):
                for local in tf.distribute.get_strategy().experimental_local_results(tensorflow_variable(variable)):
                    if short_device(local.device) != device:
                        _move(local, device)

    def _require_disjoint(self) -> None:
        owners: dict[int, int] = {}
        for stage in range(len(self)):
            for variable in self.variables_of(stage):
                owner = owners.setdefault(id(tensorflow_variable(variable)), stage)
                if owner != stage:
                    raise ValueError(
                        f"The variable {getattr(variable, 'path', variable.name)!r} is used in stages {owner} and "
                        f"{stage}, but a variable lives on one device: put the modules that share it into one stage."
                    )


def stages(modules: Sequence[Any], devices: Sequence[str] | None = None, *, recompute: bool = False) -> Stages:
    """Spreads a network over several devices: one stage for each module; to be called in `model_fn`.

    Args:
        modules: Keras layers or models, or `tf.Module`s, called one after the other, each with what the one before it
            gave (and with `training`, if it takes that). A list of modules makes one stage of them.
        devices: one for each stage, such as `["GPU:0", "GPU:1"]`; None: this process's devices, in their order.
        recompute: whether the backward pass computes a stage's activations again, in place of keeping them: less memory
            for one more forward pass. Random draws and Keras variables are as the first time.

    Returns:
        What is called like a model, for `ModelSpec(model=...)` and in `loss_fn`.

    Raises:
        ValueError: if there are fewer devices than stages, the strategy copies the network to several devices, or
            stages share a variable.
    """
    parts = [list(stage) if isinstance(stage, (list, tuple)) else [stage] for stage in modules]
    if not parts or not all(parts):
        raise ValueError(f"stages was given {modules!r}; it takes a list of modules, one or more for each stage.")
    return Stages([part for stage in parts for part in stage], parts, devices, recompute)


def split(model: Any, num_stages: int, devices: Sequence[str] | None = None, *, recompute: bool = False) -> Stages:
    """Cuts a network into stages of about the same size, by parameters and work; to be called in `model_fn`.

    Args:
        model: a Keras model, Sequential or functional, that is built; or a list of modules as for `stages`.
        num_stages: how many; 1: the network stays whole, under any strategy.
        devices: as for `stages`.
        recompute: as for `stages`.

    Returns:
        As `stages`.

    Raises:
        ValueError: if the network cannot be cut into so many, or as for `stages`.
    """
    if isinstance(num_stages, bool) or not isinstance(num_stages, int) or num_stages < 1:
        raise ValueError(f"split was given num_stages={num_stages!r}; it takes a whole number, 1 or more.")
    if isinstance(model, (list, tuple)):
        costs = _shares([_size(part) for part in model]) + _shares([1.0] * len(model))
        ends = _balance(costs, num_stages, "the list of modules")
        parts = [list(model[start:end]) for start, end in zip([0, *ends], ends, strict=False)]
        return Stages(list(model), parts, devices, recompute)
    if not isinstance(model, keras.Model) or not isinstance(model, keras.Sequential | keras.Function):
        raise ValueError(
            f"split was given a {type(model).__name__}; it cuts a Sequential or functional Keras model, or a list of "
            "modules: give one of them, or make stages by hand with distloop.stages([...])."
        )
    if not model.built:
        raise ValueError(
            f"The model {model.name!r} is not built, so nobody knows how large its layers are: begin it with "
            "keras.Input(shape), or call model.build(shape)."
        )
    if num_stages == 1:
        return Stages(model, [[model]], devices, recompute)
    return Stages(model, _cut(model, num_stages), devices, recompute)


class _Piece(NamedTuple):
    """A part of a functional model that cannot be cut further."""

    end: Any  # the symbolic tensor that it gives; the last one, the model's outputs
    size: float  # of its parameters, in bytes
    work: float  # about, in multiplications for an example


def _cut(model: keras.Model, num_stages: int) -> list[list[keras.Model]]:
    """Cuts a functional model where one tensor alone passes on."""
    graph = model._functional if isinstance(model, keras.Sequential) else model
    pieces = _pieces(graph, num_stages)
    costs = _shares([piece.size for piece in pieces]) + _shares([piece.work for piece in pieces])
    tensors = [graph._inputs_struct, *(pieces[end - 1].end for end in _balance(costs, num_stages, "its graph"))]
    return [[keras.Model(start, end)] for start, end in zip(tensors, tensors[1:], strict=False)]


def _pieces(graph: Any, num_stages: int) -> list[_Piece]:
    """Takes a functional model apart into a chain.

    Raises:
        ValueError: if there are fewer pieces than stages; it names layers whose outputs would cross a cut.
    """
    by_depth = graph._nodes_by_depth
    nodes = [node for depth in sorted(by_depth, reverse=True) for node in by_depth[depth] if not node.is_input]
    pieces, begun = [], 0
    obstacles: dict[int, str] = {}  # by place, what keeps the graph from being cut there
    for place in range(1, len(nodes)):
        before, after = nodes[:place], nodes[place:]
        needed = [tensor for node in after for tensor in node.input_tensors] + list(graph.outputs)
        made = {id(tensor) for node in after for tensor in node.output_tensors}
        crossing = list({id(tensor): tensor for tensor in needed if id(tensor) not in made}.values())
        both = {id(node.operation) for node in before} & {id(node.operation) for node in after}
        shared = [node.operation.name for node in before if id(node.operation) in both]
        if len(crossing) == 1 and not shared:
            pieces.append(_Piece(crossing[0], *_cost(nodes[begun:place])))
            begun = place
        else:
            names = [repr(tensor._keras_history.operation.name) for tensor in crossing]
            obstacles[place] = (
                f"the outputs of {' and '.join(names)} cross a cut after {nodes[place - 1].operation.name!r}"
                if not shared
                else f"{shared[0]!r} is called before and after a cut after {nodes[place - 1].operation.name!r}"
            )
    pieces.append(_Piece(graph._outputs_struct, *_cost(nodes[begun:])))
    if len(pieces) < num_stages <= len(nodes):
        middle = min(obstacles, key=lambda place: abs(place - len(nodes) / 2))
        raise ValueError(
            f"num_stages={num_stages} was given, but the graph of the model {graph.name!r} is a chain of {len(pieces)} "
            f"at most, for {obstacles[middle]}: give num_stages={len(pieces)}, or make stages by hand with "
            "distloop.stages([...])."
        )
    _require_enough(len(nodes), num_stages, f"the model {graph.name!r}")
    return pieces


def _cost(nodes: Sequence[Any]) -> tuple[float, float]:
    """Estimates what some calls of layers cost: bytes of parameters, and multiplications for an example."""
    operations = {id(node.operation): node.operation for node in nodes}.values()
    work = 0.0
    for node in nodes:
        shape = node.output_tensors[0].shape
        positions = float(np.prod([size or 1 for size in shape[1:-1]]))  # each of which meets all parameters
        parameters = _size(node.operation) / 4
        work += positions * (1 if isinstance(node.operation, keras.layers.Embedding) else parameters + (shape[-1] or 1))
    return sum(map(_size, operations)), work


def _size(part: Any) -> float:
    """Counts the bytes of a module's parameters, as far as they are there."""
    variables = [tensorflow_variable(v) for v in named_variables(part).values()]
    return float(sum(int(np.prod(v.shape)) * v.dtype.size for v in variables))


def _shares(costs: Sequence[float]) -> np.ndarray:
    return np.array(costs) / max(sum(costs), 1.0)


def _balance(costs: np.ndarray, num_stages: int, what: str) -> list[int]:
    """Finds where each stage ends, so that the costliest one costs as little as possible."""
    _require_enough(len(costs), num_stages, what)
    until = np.concatenate([[0.0], np.cumsum(costs)])

    @functools.cache
    def best(end: int, stages: int) -> tuple[float, tuple[int, ...]]:
        if stages == 1:
            return until[end], (end,)
        found = [(best(cut, stages - 1), until[end] - until[cut]) for cut in range(stages - 1, end)]
        return min((max(cost, last), (*cuts, end)) for (cost, cuts), last in found)

    return list(best(len(costs), num_stages)[1])


def _require_enough(count: int, num_stages: int, what: str) -> None:
    if num_stages > count:
        raise ValueError(
            f"num_stages={num_stages} was given, but {what} has {count} layers, and a stage needs one at least: give "
            f"num_stages={count} or fewer."
        )


def _choose_devices(count: int, devices: Sequence[str] | None) -> list[str]:
    """Finds the device of each stage; none where there is one stage and nobody says where.

    Raises:
        ValueError: if there are too few, or the strategy has several devices of its own.
    """
    if count == 1 and devices is None:
        return []
    replicas = workers.num_local_replicas(tf.distribute.get_strategy())
    if replicas > 1:
        raise ValueError(
            f"A network of {count} stages was made under a strategy that copies it to {replicas} devices: give "
            f"strategy=none and num_stages={count}, so that each stage has a device of its own."
        )
    here = [short_device(d.name) for kind in ("GPU", "CPU") for d in tf.config.list_logical_devices(kind)]
    if devices is None:
        kind = here[0].partition(":")[0]
        devices = [device for device in here if device.startswith(kind)][:count]
        if len(devices) < count:
            raise ValueError(
                f"{count} stages were asked for, but there are {len(devices)} devices ({', '.join(devices)}): give "
                f"num_stages={len(devices)} or fewer, num_stages={count} with device=cpu, or devices=[...], where one "
                "may stand several times."
            )
    found = [short_device(device) for device in devices]
    if unknown := [device for device in found if device not in here]:
        raise ValueError(f"devices={list(devices)} were given; {unknown[0]} is none of {', '.join(here)}: give those.")
    if len(found) != count:
        raise ValueError(f"devices={list(devices)} were given for {count} stages: give one for each.")
    return found


def find_stages(model: Any) -> list[Stages]:
    """Finds the networks of several stages in a model.

    Args:
        model: as `ModelSpec` takes it.
    """
    if isinstance(model, Stages):
        return [model] if model.devices else []
    children: Any = ()
    if isinstance(model, Mapping):
        children = model.values()
    elif isinstance(model, (list, tuple)):
        children = model
    elif isinstance(model, tf.Module) and not isinstance(model, keras.Layer):
        children = [child for name, child in vars(model).items() if name not in model._TF_MODULE_IGNORED_PROPERTIES]
    return [found for child in children for found in find_stages(child)]


def _move(variable: Any, device: str) -> None:
    """Moves a TensorFlow variable to another device; whoever holds it need not know."""
    with tf.device(device):
        there = resource_variable_ops.ResourceVariable(variable.read_value(), trainable=False)
    variable._handle = there._handle


def _masks(tensors: Any) -> list[Any]:
    """Lists the masks that Keras layers have left on tensors; None where there is none."""
    return [getattr(tensor, "_keras_mask", None) for tensor in tf.nest.flatten(tensors)]


def _masked(tensors: Any, masks: Sequence[Any]) -> Any:
    """Gives tensors their masks, for the next layer to find."""
    for tensor, mask in zip(tf.nest.flatten(tensors), masks, strict=False):
        if mask is not None:
            tensor._keras_mask = mask
    return tensors


def _takes_training(part: Any) -> bool:
    return isinstance(part, keras.Layer) or "training" in inspect.signature(part).parameters

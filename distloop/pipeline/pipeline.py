"""Pipelines: networks of stages on several devices, and the order in which stages compute microbatches.

    model = distloop.split(keras_model, num_stages=4)          # in model_fn: cut between layers, one stage per device
    model = distloop.stages([encoder, blocks, head])           # or cut by hand: modules that are called in this order
    logits = model(images, training=training)                  # in loss_fn and predict_fn, like any model

The variables of a stage live on its device; its forward and backward pass run there. Gradients are computed with
`tf.gradients`, which places each operation of the backward pass beside its forward operation. The microbatches of a
step are in one graph, so that stages work on different ones at the same time. `splitting.py` chooses the cuts. This
module does not know how a step goes.
"""

import contextlib
import inspect
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.ops import resource_variable_ops

from distloop.distributed import strategies
from distloop.distributed.devices import short_device
from distloop.errors import require_bool
from distloop.graph_functions import may_write
from distloop.log import shown
from distloop.optimizers.keras_hooks import masks_of, with_masks
from distloop.pipeline import splitting
from distloop.pipeline.stage_placement import StagePlacement
from distloop.settings.durations import whole_number
from distloop.variables import ModelRunner, is_seed, named_variables, tensorflow_variable


class Pipeline(ModelRunner):
    """A network whose stages run one after the other, each on its device; made by `stages` or `split`.

    Attributes:
        model: the Keras model, or the list of modules; variables have the names that they have in it, for any cuts.
        modules: the modules of each stage, called one after the other.
        devices: the device of each stage, as in `GPU:0`, of the first replica in this process; empty for a single
            stage on the default device.
    """

    make_placement = StagePlacement  # where a model with such networks computes

    def __init__(self, model: Any, modules: Sequence[Sequence[Any]], devices: Sequence[str] | None, recompute: bool):
        """Places the variables; use `stages` or `split`.

        Args:
            model: as the attribute.
            modules: as the attribute.
            devices: as for `stages`.
            recompute: as for `stages`.
        """
        self.model = model
        self._of_replicas = _choose_devices(len(modules), devices)
        self.devices = self._of_replicas[0]
        self.modules = [list(stage) for stage in modules]
        self._recompute = recompute
        self._is_placed = bool(self.devices)
        self._finished = dict[int, Sequence[Sequence[tf.Tensor]]]()  # thread that traces a replica -> as for `ordered`
        self._require_disjoint()
        self._place_variables()

    def __len__(self) -> int:
        return len(self.modules)

    def __call__(self, inputs: Any, training: bool | None = None) -> Any:
        """Runs the network.

        Args:
            inputs: the inputs of the first module, tensors `[B, ...]`.
            training: passed to the modules that take it.

        Returns:
            The outputs of the last module.
        """
        for stage in range(len(self)):
            inputs = self._run(stage, inputs, training)
        if tf.executing_eagerly():
            self._place_variables()  # of layers that this call has built
        return inputs

    def device(self, stage: int) -> str:
        """Returns the device of a stage of the replica that is computed; outside of replicas, of the first one."""
        is_alone = 1 in (len(self._of_replicas), tf.distribute.get_strategy().num_replicas_in_sync)  # as in an audit
        if is_alone or (context := tf.distribute.get_replica_context()) is None:
            return self.devices[stage]
        return self._of_replicas[int(tf.get_static_value(context.replica_id_in_sync_group))][stage]

    def variables_of(self, stage: int) -> list[Any]:
        """Returns the variables of a stage."""
        return list(named_variables(self.modules[stage]).values())

    def describe(self) -> str:
        """Returns the number of parameters on each device, as in `2 = 1,024 on CPU:0 + 512 on CPU:1`."""
        counts = [sum(int(np.prod(v.shape)) for v in self.variables_of(i) if not is_seed(v)) for i in range(len(self))]
        sizes = [f"{count:,} on {device}" for count, device in zip(counts, self.devices, strict=True)]
        return f"{len(self)} = {' + '.join(sizes)}"

    @contextlib.contextmanager
    def ordered(self, finished: Sequence[Sequence[tf.Tensor]]) -> Iterator[None]:
        """Enters a scope in which the forward pass of a microbatch is traced, after those before it.

        With S stages, stage s, counted from 0, begins a microbatch when the backward pass of the microbatch S - s + 1
        before it has finished on that stage, so it holds the activations of at most S - s + 1 microbatches. This is
        1F1B (Narayanan et al. 2019, PipeDream, section 3.2) with one more microbatch in the queue, so that a device
        does not wait for its next one.

        Args:
            finished: for each microbatch traced so far, the sum of the gradients up to it.
        """
        self._finished[threading.get_ident()] = finished
        try:
            yield
        finally:
            del self._finished[threading.get_ident()]

    @contextlib.contextmanager
    def unplaced(self) -> Iterator[None]:
        """Enters a scope in which the network is traced without devices, to be served anywhere."""
        self._is_placed = False
        try:
            yield
        finally:
            self._is_placed = bool(self.devices)

    def _run(self, stage: int, inputs: Any, training: bool | None) -> Any:
        call = self._call_recomputed if self._recompute and training else self._call
        if not self._is_placed:
            return call(stage, inputs, training)
        with tf.device(self.device(stage)):
            with tf.control_dependencies(self._predecessors(stage)):
                copies = tf.nest.map_structure(tf.identity, inputs)
            return call(stage, with_masks(copies, masks_of(inputs)), training)

    def _predecessors(self, stage: int) -> list[tf.Tensor]:
        """Returns the tensors that a stage's next forward pass waits for."""
        queue_size = len(self) - stage + 1
        finished = self._finished.get(threading.get_ident(), ())
        if len(finished) < queue_size or tf.executing_eagerly():
            return []
        graph, device = tf.compat.v1.get_default_graph(), self.device(stage)  # another graph in a branch of loss_fn
        return [t for t in finished[-queue_size] if t.graph is graph and short_device(t.device) == device]

    def _call(self, stage: int, inputs: Any, training: bool | None) -> Any:
        for module in self.modules[stage]:
            takes_training = isinstance(module, keras.Layer) or "training" in inspect.signature(module).parameters
            inputs = module(inputs, training=training) if takes_training else module(inputs)
        return inputs

    def _call_recomputed(self, stage: int, inputs: Any, training: bool | None) -> Any:
        """Runs a stage without keeping activations: the backward pass recomputes them with the same random draws."""
        stateful = [v for v in self.variables_of(stage) if isinstance(v, keras.Variable) and not v.trainable]
        before = [(variable, tf.identity(variable)) for variable in stateful]
        masks: list[Any] | None = None  # of the outputs; None: the first pass has not ended

        def run(*flat: tf.Tensor) -> Any:
            nonlocal masks
            # The second pass reads the variables as the first one did, such as random states, and writes nothing.
            scope = contextlib.nullcontext() if masks is None else _writing_nothing(stage, before)
            with scope:
                copies = with_masks(tf.nest.pack_sequence_as(inputs, flat), masks_of(inputs))
                outputs = self._call(stage, copies, training)
            masks = masks_of(outputs)
            return outputs

        outputs = tf.recompute_grad(run)(*tf.nest.flatten(inputs))
        return with_masks(outputs, masks or [])

    def _place_variables(self) -> None:
        """Moves each variable to its stage's device, unless it is there already."""
        for stage in range(len(self.devices)):
            for variable in map(tensorflow_variable, self.variables_of(stage)):
                copies = tf.distribute.get_strategy().experimental_local_results(variable)
                for copy, devices in zip(copies, self._of_replicas, strict=False):
                    if short_device(copy.device) != devices[stage]:
                        _move(copy, devices[stage])

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


@contextlib.contextmanager
def _writing_nothing(stage: int, values: Sequence[tuple[Any, tf.Tensor]]) -> Iterator[None]:
    """Enters a scope in which Keras variables have some values, and keep theirs; refuses writes to other variables."""
    with tf.name_scope("recomputed") as name, keras.StatelessScope(state_mapping=values):
        yield
    operations = [] if tf.executing_eagerly() else tf.compat.v1.get_default_graph().get_operations()
    for op in operations:
        if op.name.startswith(name) and may_write(op):  # not that of a replica that is traced meanwhile
            raise ValueError(
                f"recompute=True was given, and stage {stage} writes to a variable or a generator by TensorFlow's "
                f"operation {op.type}, which the backward pass would do again: make it a weight of a Keras layer, "
                "with add_weight(trainable=False), or leave recompute out."
            )


def stages(modules: Sequence[Any], devices: Sequence[str] | None = None, *, recompute: bool = False) -> Pipeline:
    """Builds a pipeline with one stage for each module; to be called in `model_fn`.

    Args:
        modules: Keras layers or models, or `tf.Module`s, called one after the other, each with the outputs of the one
            before it (and with `training`, if it takes that). A list of modules becomes one stage.
        devices: one for each stage, such as `["GPU:0", "GPU:1"]`, of one replica after the other; None: this process's
            devices, in their order.
        recompute: True to recompute a stage's activations in the backward pass instead of keeping them: less memory for
            one more forward pass. Random draws and Keras variables are the same in both passes.

    Returns:
        The pipeline, for `ModelSpec(model=...)`; it is called like a model in `loss_fn`.

    Raises:
        ValueError: if there are fewer devices than stages, or stages share a variable.
    """
    require_bool("stages", recompute=recompute)
    staged = [list(stage) if isinstance(stage, (list, tuple)) else [stage] for stage in modules]
    if not staged or not all(staged):
        raise ValueError(f"stages was given {modules!r}; it takes a list of modules, one or more for each stage.")
    return Pipeline([module for stage in staged for module in stage], staged, devices, recompute)


def split(model: Any, num_stages: int, devices: Sequence[str] | None = None, *, recompute: bool = False) -> Pipeline:
    """Builds a pipeline by cutting a network into stages of similar size and work; to be called in `model_fn`.

    Args:
        model: a built Keras model, Sequential or functional; or a list of modules as for `stages`.
        num_stages: number of stages; 1: the network stays one, under any strategy.
        devices: as for `stages`.
        recompute: as for `stages`.

    Returns:
        As `stages`.

    Raises:
        ValueError: if the network cannot be cut into that many stages, or as for `stages`.
    """
    require_bool("split", recompute=recompute)
    if (whole_number(num_stages) or 0) < 1:
        raise ValueError(f"split was given num_stages={shown(num_stages)}; it takes a whole number, 1 or more.")
    if isinstance(model, (list, tuple)):
        sizes = splitting.relative([splitting.parameter_bytes(module) for module in model])
        ends = splitting.balance(sizes + splitting.relative([1.0] * len(model)), num_stages, "the list of modules")
        staged = [list(model[start:end]) for start, end in zip([0, *ends], ends, strict=False)]
        return Pipeline(list(model), staged, devices, recompute)
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
    models = [model] if num_stages == 1 else splitting.split_graph(model, num_stages)
    return Pipeline(model, [[stage] for stage in models], devices, recompute)


def _choose_devices(count: int, devices: Sequence[str] | None) -> list[list[str]]:
    """Returns for each replica in this process the device of each stage; `[[]]` for a single one on the default device.

    Raises:
        ValueError: if there are too few devices, or replicas add by collectives, which are made for one device each.
    """
    if count == 1 and devices is None:
        return [[]]
    strategy = tf.distribute.get_strategy()
    firsts = [short_device(device) for device in strategies.replica_devices(strategy)]
    needed = count * len(firsts)
    if len(firsts) > 1 and strategies.uses_collectives(strategy):
        raise ValueError(
            f"A network of {count} stages was made under a strategy that adds over {len(firsts)} replicas of a process "
            f"by collectives: give num_stages={count} and num_devices={needed} without a strategy object, and on "
            f"several workers num_devices={count}."
        )
    available = [short_device(d.name) for kind in ("GPU", "CPU") for d in tf.config.list_logical_devices(kind)]
    if devices is None:  # those from its own on
        alike = [device for device in available if device.startswith(firsts[0].partition(":")[0])]
        devices = [device for first in firsts for device in alike[alike.index(first) :][:count]]
        if len(set(devices)) < needed:
            begin = f" on each of {len(firsts)} replicas, which begin on {' and '.join(firsts)}," if firsts[1:] else ""
            fewer = f"num_stages={len(alike)} or fewer, " if not firsts[1:] else ""
            raise ValueError(
                f"{count} stages{begin} were asked for, but there are {len(alike)} devices ({', '.join(alike)}): give "
                f"{fewer}num_stages={count} and num_devices={needed} with device=cpu, or devices=[...], where one may "
                "stand several times."
            )
    chosen = [short_device(device) for device in devices]
    if unknown := [device for device in chosen if device not in available]:
        raise ValueError(
            f"devices={list(devices)} were given; {unknown[0]} is none of {', '.join(available)}: give those."
        )
    if len(chosen) != needed:
        each = f" on each of {len(firsts)} replicas" if len(firsts) > 1 else ""
        raise ValueError(f"devices={list(devices)} were given for {count} stages{each}: give one for each.")
    return [chosen[start : start + count] for start in range(0, needed, count)]


def _move(variable: Any, device: str) -> None:
    """Moves a TensorFlow variable to another device, in place."""
    with tf.device(device):
        moved = resource_variable_ops.ResourceVariable(variable.read_value(), trainable=False)
    if container := getattr(variable.handle, "_distributed_container", None):  # by which Keras knows a replica's copy
        moved.handle._distributed_container = container
    variable._handle = moved.handle

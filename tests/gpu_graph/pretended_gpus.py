"""Pretended GPUs: traces the train step, evaluation and prediction of a model for GPUs that are not there.

    for found in trace_on_gpus(model_fn, Config(clip_norm=1.0), dataset, gpus=2):
        print(found)                                    # a `GpuGraph`

No step runs, and nothing that `distloop` or TensorFlow keeps for the process is another afterwards. Variables are made
where there is a device; their handles know which one was asked for.
"""

import contextlib
import dataclasses
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf
from keras.src.backend.common import global_state
from tensorflow.python.eager import context
from tensorflow.python.ops import resource_variable_ops

from distloop.audit.tracing import preserved_random_state
from distloop.data.source import Data, Source
from distloop.distributed import devices, strategies
from distloop.evaluation.evaluation import EvalLoop
from distloop.evaluation.prediction import Predictor
from distloop.keras_models.fit_arguments import read_arguments
from distloop.model.spec import ModelSpec
from distloop.run.assembly import make_train_loop, make_training_source
from distloop.settings.config import Config
from distloop.trainer import Trainer
from distloop.training.compiled_loop import NO_LIMIT_SECS, CompiledLoop, _limits
from tests.gpu_graph.gpu_graph import GpuGraph, look
from tests.gpu_graph.placed_graph import DEVICE, FIRST_GPU

_WORKERS = 2  # that a step of several is traced for
_NAMES = "object_name_uids"  # Keras's counts of the layers of each name


def trace_on_gpus(
    model_fn: Callable[[], ModelSpec],
    config: Config,
    data: Data,
    gpus: int,
    prepare: Callable[..., None] = lambda state, source, loop: None,
) -> list[GpuGraph]:
    """Returns what the train step, evaluation and, with a `predict_fn`, prediction would do on so many GPUs.

    Args:
        model_fn: as for `Trainer`; it is called once more.
        config: its device, number of devices and workdir do not count; with `strategy="multi_worker"`, the first of two
            workers with so many GPUs each is traced, and its train step alone.
        data: as for `Trainer.fit`.
        gpus: how many; with `num_stages`, the stages take them.
        prepare: called with the state, the source and the loop before the step is traced, as an action may be.

    Raises:
        ValueError: as of `Trainer` and `Trainer.fit`.
    """
    is_several = config.strategy == "multi_worker"
    here = dataclasses.replace(
        config,
        strategy="auto" if is_several else config.strategy,
        device="gpu",
        num_devices=0 if config.num_stages > 1 else gpus,
        console="quiet",
        eager=False,
        fast_dev_run=False,
    )
    with pretended_gpus(gpus):
        strategy = _one_of_workers(gpus) if is_several else strategies.make_strategy(here)
        trainer = Trainer(model_fn, here, strategy=strategy)
        trainer.build(data)
        state, arguments = trainer.state, read_arguments(data, None, {})
        source, loop = make_training_source(arguments, state, here), make_train_loop(state, here)
        source.iterator()
        prepare(state, source, loop)
        if is_several:
            _pretend_workers(strategy, _WORKERS)
        found = [look(_graph_of(loop._compiled, source), "train step")]
        if is_several:
            return found
        reading = arguments.source_settings(here.global_batch_size(state.strategy))
        source = Source(data, state.strategy, repeat=False, replicas=state.replicas, **reading)
        pass_over, limits = EvalLoop(state), (tf.constant(0, tf.int64), tf.constant(np.inf, tf.float64))
        pass_over.build_metrics(source)
        function = pass_over._run.get_concrete_function(source.new_iterator(), source.layout, *limits)
        found.append(look(function.graph, "evaluation"))
        if state.spec.predict_fn is not None:
            predict = Predictor(state)._loop()._run_joined  # which joins the outputs of several batches
            function = predict.get_concrete_function(source.new_iterator(), source.layout)
            found.append(look(function.graph, "prediction"))
    return found


def _one_of_workers(gpus: int) -> tf.distribute.Strategy:
    """Returns the strategy of a worker with so many GPUs, which is the only one until `_pretend_workers`."""
    return tf.distribute.MultiWorkerMirroredStrategy._from_local_devices([f"/device:GPU:{i}" for i in range(gpus)])


def _pretend_workers(strategy: tf.distribute.Strategy, count: int) -> None:
    """Lets a strategy of `_one_of_workers` trace functions as if there were so many workers; none of them can run."""
    extended = strategy.extended
    extended._num_workers = count
    for operations in (extended._cross_device_ops, extended._host_cross_device_ops):
        for owner in (operations, *operations._launchers):
            owner._group_size *= count


@contextlib.contextmanager
def pretended_gpus(count: int) -> Iterator[None]:
    """Enters a scope in which distloop sees so many GPUs, and variables are said to be on those."""
    device_of = resource_variable_ops.BaseResourceVariable.device
    asked_for = property(lambda self: getattr(self._handle, DEVICE, None) or device_of.fget(self))
    make = resource_variable_ops.ResourceVariable.__init__

    def note(self: Any, *arguments: Any, **settings: Any) -> None:
        make(self, *arguments, **settings)
        setattr(self._handle, DEVICE, context.context().device_name or f"/job:localhost/device:{FIRST_GPU}")

    def listed(of_tensorflow: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
        def devices_of(kind: str | None = None) -> list[Any]:
            gpus = [types.SimpleNamespace(name=f"/device:GPU:{i}", device_type="GPU") for i in range(count)]
            others = [device for device in of_tensorflow() if device.device_type != "GPU"]
            return [device for device in (*others, *gpus) if kind in (None, device.device_type)]

        return devices_of

    names = global_state.get_global_attribute(_NAMES)
    with contextlib.ExitStack() as stack:
        stack.enter_context(preserved_random_state())
        stack.callback(global_state.set_global_attribute, _NAMES, names and names.copy())
        for owner, name, value in (
            (resource_variable_ops.ResourceVariable, "__init__", note),
            (resource_variable_ops.BaseResourceVariable, "device", asked_for),
            (tf.config, "list_logical_devices", listed(tf.config.list_logical_devices)),
            (tf.config, "list_physical_devices", listed(tf.config.list_physical_devices)),
            (devices, "prepare_process", lambda config: None),  # it would set memory growth, and seed
            (strategies, "_make_mirrored", strategies._make_mirrored.__wrapped__.__wrapped__),  # keeps no strategy
        ):
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)
        yield


def _graph_of(loop: CompiledLoop, source: Source):
    """Returns the graph of a loop over steps on some data; nothing runs."""
    loop._prepare(source)
    return loop._run.get_concrete_function(source.iterator(), source.layout, *_limits(0, 1, NO_LIMIT_SECS)).graph

"""GPU checks: finds what would leave a GPU in each step, in the graph of a model's forward and backward pass."""

from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from distloop.audit.checks import Finding
from distloop.audit.gpu_graph import GpuGraph, look
from distloop.audit.placed_graph import HOST
from distloop.audit.probe import Probe
from distloop.audit.tracing import as_replica, compiled
from distloop.data import shards
from distloop.model.spec import Update
from distloop.training.forward_backward import ForwardBackward

_OF_KERAS = {("Cast", "StatelessRandomGetKeyCounter"), ("BitwiseAnd", "Less")}  # of its random draws, and its argmax


def host_operations(probe: Probe) -> Iterator[Finding]:
    """Checks that the forward and the backward pass stay on a GPU, where the model is on one."""
    for update in probe.state.spec.updates:
        yield from dict.fromkeys(_findings(look(_graph_of(probe, update), update.name)))


def _graph_of(probe: Probe, update: Update) -> Any:
    """Returns the graph of an update's forward and backward pass on one device, which is traced and not run."""
    update_pass = ForwardBackward(probe.state, update)
    count = tf.constant(shards.batch_size(probe.rows), tf.float32)

    def compute(rows: Any) -> Any:
        with as_replica(0, 1, set()), probe.state.placement.unplaced():
            return update_pass.differentiate.by_path(rows, update_pass.loss_factor(count), training=True)

    return compiled(compute, probe.rows).graph


def _findings(found: GpuGraph) -> Iterator[Finding]:
    fallen = set()
    for f in found.on_host:
        fallen.add(f.line)
        yield Finding(
            "runs on the host when this model is on a GPU",
            _named(f.operation, f.name, f.line),
            "the GPU waits for Python in each step: write it with TensorFlow's operations, or do it in the dataset"
            if "Python" in f.reason
            else "TensorFlow has no GPU kernel for it: compute it in another dtype or by other operations, or do it in "
            "the dataset, which prepares batches while the GPU computes",
        )
    for copy in found.through:
        is_users = copy.bytes != 0 and _is_users(copy.line) and copy.line not in fallen
        if copy.target == HOST and is_users and (copy.producer, copy.consumer) not in _OF_KERAS:
            yield Finding(
                "goes to the host and back",
                f"{copy.producer} -> {copy.consumer} ({copy.line})",
                "in each step the GPU waits until the host has its result, as for int32 numbers, which TensorFlow "
                "compares and adds on the host, and within tf.device('/CPU:0'): use int64 or float32, or another place",
            )


def _named(operation: str, name: str, line: str | None) -> str:
    """Returns an operation with the line of the user's code, or else with its own name, which tells the layer."""
    return f"{operation} ({line if _is_users(line) else name})"


def _is_users(line: str | None) -> bool:
    return line is not None and not line.startswith("distloop/")

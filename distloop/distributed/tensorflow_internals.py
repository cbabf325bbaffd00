"""TensorFlow internals: all private attributes and patches of TensorFlow that `distributed` needs.

A new version of TensorFlow is checked here first. It does not know distloop's settings.
"""

import contextlib
import ctypes
import functools
import itertools
import os
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python import pywrap_tfe
from tensorflow.python.distribute import collective_all_reduce_strategy
from tensorflow.python.eager import context
from tensorflow.python.framework import errors_impl
from tensorflow.python.ops import custom_gradient

from distloop.threads import replaced

# gRPC holds a message several times, in new memory each time, which costs more than a copy: with 80 MB in one message,
# the step of a model of 41 million parameters took half as long again, and 0.5 GB more, than with messages like these.
LARGEST_MESSAGE_BYTES = 4 * 2**20
# A strategy takes a key for each group of devices, of which it has a few. The first strategy keeps TensorFlow's keys.
_key_bases = itertools.count(0, 100_000)


def rank_and_size(strategy: tf.distribute.Strategy) -> tuple[int, int]:
    """Returns the index of this worker and the number of workers; (0, 1) if the strategy has only this process."""
    count = int(getattr(strategy.extended, "_num_workers", 1))
    return (int(getattr(strategy.extended, "_id_in_cluster", 0)) if count > 1 else 0), count


def cross_device_ops(strategy: tf.distribute.Strategy) -> tf.distribute.CrossDeviceOps | None:
    """Returns the object that reduces over replicas; None for a strategy of one replica."""
    return getattr(strategy.extended, "_cross_device_ops", None)


def collective_implementation(strategy: tf.distribute.Strategy) -> str | None:
    """Returns the collective library that was asked for, as in `NCCL`; None if the reduction uses no collectives."""
    options = getattr(cross_device_ops(strategy), "_options", None)
    implementation = getattr(options, "implementation", None)
    return None if implementation is None else implementation.value


def abort_collectives() -> None:
    """Ends the collectives that wait for other workers with an error; no other one can begin afterwards."""
    context.context().abort_collective_ops(errors_impl.ABORTED, "The other workers did not come.")


def own_collective_keys(kind: type[tf.distribute.Strategy]) -> contextlib.AbstractContextManager[None]:
    """Gives a mirrored strategy, of this class, that is created inside keys of its own for its collectives.

    TensorFlow gives those of each strategy the same keys, so that a strategy over four GPUs fails after one over two.
    """
    return replaced(kind, "_collective_key_base", next(_key_bases))


def local_devices(device_type: str, count: int) -> contextlib.AbstractContextManager[None]:
    """Gives a multi-worker strategy that is created inside `count` devices; TensorFlow takes one CPU or every GPU."""

    def first_devices(self: Any, resolver: Any, worker_device: str) -> tuple[tuple[str, ...], str]:
        return tuple(f"{worker_device}/device:{device_type}:{i}" for i in range(count)), device_type

    extended = collective_all_reduce_strategy.CollectiveAllReduceExtended
    return replaced(extended, "_initialize_local_devices", first_devices)


@contextlib.contextmanager
def silence_allowed(secs: float) -> Iterator[None]:
    """Lets workers of a strategy that is created inside be silent for `secs`; TensorFlow ends all of them after ten."""
    eager = context.context()
    configure = eager.configure_coordination_service
    eager.configure_coordination_service = functools.partial(configure, heartbeat_timeout_in_ms=round(secs * 1000))
    try:
        yield
    finally:
        del eager.configure_coordination_service  # that of the class shows again


@contextlib.contextmanager
def joining_without_gil() -> Iterator[None]:
    """Lets other Python threads run while TensorFlow joins the workers, which takes up to an hour if one has died.

    TensorFlow's own binding holds the GIL for that time: no heartbeat could be sent or received, nor the process ended.
    """
    try:
        library = ctypes.CDLL(os.path.join(tf.sysconfig.get_lib(), "libtensorflow_cc.so.2"))  # loaded already
    except OSError:  # another build of TensorFlow: keep its own binding
        yield
        return
    library.TF_NewStatus.restype, library.TF_Message.restype = ctypes.c_void_p, ctypes.c_char_p
    pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
    pointer_of.restype, pointer_of.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]

    def join(context: Any, server: bytes) -> None:
        status = ctypes.c_void_p(library.TF_NewStatus())
        size = ctypes.c_size_t(len(server))
        library.TFE_EnableCollectiveOps(ctypes.c_void_p(pointer_of(context, None)), server, size, status)
        if code := library.TF_GetCode(status):
            message = library.TF_Message(status).decode(errors="replace")
            raise errors_impl.exception_type_from_error_code(code)(None, None, message)
        library.TF_DeleteStatus(status)

    with replaced(pywrap_tfe, "TFE_EnableCollectiveOps", join):
        yield


def sum_over_replicas(tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Returns the sums of tensors over all replicas and workers, in replica context; they have no gradient.

    `ReplicaContext.all_reduce` registers a gradient function, which TensorFlow keeps, with the whole graph, as long as
    the process lives: 8 MB for each `fit` of a small model.
    """
    strategy, options = tf.distribute.get_strategy(), tf.distribute.experimental.CommunicationOptions
    reduce = functools.partial(strategy.extended._replica_ctx_all_reduce, tf.distribute.ReduceOp.SUM)
    if rank_and_size(strategy)[1] == 1:
        # Each tensor alone: TensorFlow's collectives would copy all of them into one vector, which has one dtype.
        return list(reduce(list(tensors), options(bytes_per_pack=1)))
    pieces = [_pieces(tensor) for tensor in tensors]
    sums = {}
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        of_dtype = [piece for of_tensor in pieces for piece in of_tensor if piece.dtype == dtype]
        sums[dtype] = iter(reduce(of_dtype, options(bytes_per_pack=LARGEST_MESSAGE_BYTES - 1)))
    joined = [[next(sums[piece.dtype]) for piece in of_tensor] for of_tensor in pieces]
    return [tf.concat(of_tensor, 0) if len(of_tensor) > 1 else of_tensor[0] for of_tensor in joined]


def _pieces(tensor: tf.Tensor) -> list[tf.Tensor]:
    """Returns a flat tensor in pieces of `LARGEST_MESSAGE_BYTES`; one of another rank, or smaller, as it is."""
    most = LARGEST_MESSAGE_BYTES // tensor.dtype.size
    if tensor.shape.rank != 1 or tensor.shape[0] is None or tensor.shape[0] <= most:
        return [tensor]
    return [tensor[start : start + most] for start in range(0, tensor.shape[0], most)]


def all_reduce_without_graph_walks() -> contextlib.AbstractContextManager[None]:
    """Traces each all-reduce of a replica function in constant time.

    `ReplicaContext.all_reduce` is a custom gradient, for which TensorFlow walks back through the graph to look for
    variables of TensorFlow 1. The result depends on the other replicas, so each walk visits all that they have traced,
    in time quadratic in its size: four replicas of MobileNetV2 with synchronized BatchNormalization, which has 624
    all-reduces with those of the backward pass, took more than four minutes. Within a `tf.function` there are no such
    variables; those that a custom gradient reads are recorded by its tape.
    """
    return replaced(custom_gradient, "_get_dependent_variables", lambda input_ops, output_ops: [])

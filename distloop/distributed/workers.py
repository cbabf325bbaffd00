"""The workers of a run while it computes: their number, the chief, and collectives over them that the host calls.

    if workers.is_chief(strategy):
        write_file()
    values = workers.gather(strategy, 1.0)      # [W], the number of every worker, on every worker

It does not know how the workers met (`strategies`), nor how a failure is noticed (`heartbeat`).
"""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from distloop.distributed import tensorflow_internals
from distloop.distributed.heartbeat import Heartbeat
from distloop.distributed.liveness import GATHERING

_HEARTBEAT = "_distloop_heartbeat"  # the attribute of a strategy that holds its heartbeat


def num_workers(strategy: tf.distribute.Strategy) -> int:
    """Returns the number of processes that take part."""
    return tensorflow_internals.place_in_cluster(strategy)[1]


def worker_index(strategy: tf.distribute.Strategy) -> int:
    """Returns the index of this worker, from 0; worker 0 is the chief."""
    return tensorflow_internals.place_in_cluster(strategy)[0]


def num_local_replicas(strategy: tf.distribute.Strategy) -> int:
    """Returns the number of replicas on this worker."""
    return strategy.num_replicas_in_sync // num_workers(strategy)


def first_replica(strategy: tf.distribute.Strategy) -> int:
    """Returns the index, among all replicas, of this worker's first one."""
    return worker_index(strategy) * num_local_replicas(strategy)


def is_chief(strategy: tf.distribute.Strategy) -> bool:
    """Returns True on the worker that writes the files of the run."""
    return worker_index(strategy) == 0


def attach_heartbeat(strategy: tf.distribute.Strategy, heartbeat: Heartbeat) -> None:
    """Lets `heartbeat_of` return this heartbeat for the strategy."""
    setattr(strategy, _HEARTBEAT, heartbeat)


def heartbeat_of(strategy: tf.distribute.Strategy) -> Heartbeat | None:
    """Returns the heartbeat between the workers; None on a single worker, or if the user created the strategy."""
    heartbeat: Heartbeat | None = getattr(strategy, _HEARTBEAT, None)
    return heartbeat


def report_phase(strategy: tf.distribute.Strategy, phase: str) -> None:
    """Sends the other workers the phase that this worker is in, as in "evaluating"."""
    if (heartbeat := heartbeat_of(strategy)) is not None:
        heartbeat.phase = phase


def gather(strategy: tf.distribute.Strategy, value: float | Sequence[float]) -> np.ndarray:
    """Returns a number, or K of them, of every worker on every worker: `[W]` or `[W, K]`. All workers must call it."""
    if num_workers(strategy) == 1:
        return np.array([value], np.float64)
    heartbeat = heartbeat_of(strategy)
    phase = heartbeat.phase if heartbeat is not None else ""
    report_phase(strategy, GATHERING)
    values: np.ndarray = _gather_function(strategy)(tf.constant(value, tf.float64)).numpy()
    report_phase(strategy, phase)
    return values


@functools.cache
def _gather_function(strategy: tf.distribute.Strategy) -> Any:
    one_hot = np.eye(num_workers(strategy))[worker_index(strategy)]
    return tf.function(lambda value: sum_over_workers(strategy, tf.tensordot(one_hot, value, 0)), autograph=False)


def sum_over_workers(strategy: tf.distribute.Strategy, value: tf.Tensor) -> tf.Tensor:
    """Returns the sum of a tensor over the workers. All must call it, in a `tf.function` and outside `strategy.run`."""
    local = num_local_replicas(strategy)

    def all_reduce(value: tf.Tensor) -> tf.Tensor:
        context = tf.distribute.get_replica_context()
        is_first = tf.equal(context.replica_id_in_sync_group % local, 0)  # one replica speaks for its worker
        return context.all_reduce(tf.distribute.ReduceOp.SUM, tf.where(is_first, value, tf.zeros_like(value)))

    return strategy.experimental_local_results(strategy.run(all_reduce, args=(value,)))[0]

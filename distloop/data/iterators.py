"""Dataset iterators: deletes iterators in a thread, skips batches in pieces, copies datasets.

    iterator = iterate(dataset)              # in place of iter(dataset)
    fast_forward = FastForward(iterator, 300)
    read_again(fast_forward, strategy, stop_requests, say, show_progress)      # before the first step
    dataset = fresh_copy(dataset)            # as it was before its first iterator, however often it was read since

Deleting an iterator waits for the thread of tf.data that tunes it. That thread sleeps twice as long each time, up to a
minute, and its wake-up call can come too early: of 60 iterators 8 seconds old, 4 took from 2 to 41 seconds to delete.
So threads delete them. Until then each holds 17 threads and 2 MB on two devices, so a new one waits where very many
have ended and are not yet deleted.

Batches are skipped in pieces, as `Dataset.skip` is one operation that nothing can end. All workers look every half
second whether the run is to stop, and stop together. Data by number has no need of this.
"""

import atexit
import dataclasses
import queue
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from distloop.data.numbered import NumberedDataset
from distloop.distributed import collectives
from distloop.distributed.collectives import Status, Vote
from distloop.distributed.devices import HOST
from distloop.errors import first_line, raise_as_user_error
from distloop.graph_functions import NO_LIMIT_SECS, TimeLimit, graph_function
from distloop.log import log
from distloop.threads import once
from distloop.workers.preemption import SAVES, Interrupted, StopRequests

_IGNORE_EXTERNAL_STATE = 1  # a policy of tf.data: a Python function's state is not copied
# The index of the input that draws seeds.
_SEEDS_INPUT = {"ShuffleDatasetV3": 4, "ShuffleAndRepeatDatasetV2": 5, "RandomDatasetV2": 2}
_SEED_GENERATOR = "private_seed_generator"
# Datasets that draw no seeds for an order.
IN_ORDER = frozenset(
    f"{name}Dataset"
    for name in "AssertCardinality Batch Cache Concatenate Filter FlatMap Map Options PaddedBatch ParallelBatch "
    "ParallelMap Prefetch Range Repeat Restructured Shard Skip Take TakeWhile Tensor TensorSlice Unbatch Zip".split()
)
_PIECE_SECS = 0.5
_SILENT_SECS = 2.0  # reading that takes no longer is not announced
_RELEASE_SECS = 0.2  # after which the caller has released every object of a deleted iterator
_EXIT_SECS = 1.0  # the longest that the end of the process waits for deletions
_MOST_ENDED = 50  # iterators that are not yet deleted
_ROOM_SECS = 60.0  # the longest that a new one waits for a deletion


_is_exiting = threading.Event()


def iterate(dataset: Any) -> Any:
    """Returns an iterator that is deleted in a thread, for which the end of the process waits a second at most.

    Args:
        dataset: a `tf.data.Dataset`.
    """
    deletions = _deletions()
    deletions.wait_for_room()
    iterator = iter(dataset)
    weakref.finalize(iterator, deletions.add, [iterator._iterator_resource])
    return iterator


@once
def _deletions() -> "_Deletions":
    atexit.register(_finish)
    return _Deletions(_MOST_ENDED)


class _Deletions:
    """The iterators that have ended and are not yet deleted."""

    def __init__(self, most: int):
        """Starts the thread that waits for them; from `most` of them on, `wait_for_room` waits."""
        self._most = most
        self._ended: queue.SimpleQueue[tuple[float, list[Any]]] = queue.SimpleQueue()  # when each ended, its objects
        self._num_deleting = 0  # taken from `_ended` and not yet deleted
        self._changed = threading.Condition()
        threading.Thread(target=self._delete_all, name="distloop-iterators", daemon=True).start()

    def wait_for_room(self) -> None:
        with self._changed:
            self._changed.wait_for(self._has_room, _ROOM_SECS)

    def add(self, objects: list[Any]) -> None:
        self._ended.put((time.monotonic(), objects))

    def _has_room(self) -> bool:
        return self._ended.qsize() + self._num_deleting < self._most or _is_exiting.is_set()

    def _delete_all(self) -> None:
        kept: list[list[Any]] = []
        while True:
            ended_at, objects = self._ended.get()
            with self._changed:
                self._num_deleting += 1
            secs = ended_at + _RELEASE_SECS - time.monotonic()
            time.sleep(min(max(0.0, secs), _RELEASE_SECS))  # tests of users set the clock back
            if _is_exiting.is_set():
                kept.append(objects)
            else:
                threading.Thread(target=self._delete, args=[objects], name="distloop-iterator", daemon=True).start()
            del objects

    def _delete(self, objects: list[Any]) -> None:
        objects.clear()
        with self._changed:
            self._num_deleting -= 1
            self._changed.notify_all()


def _finish() -> None:
    """Begins no more deletions, and waits a moment for those under way.

    A thread that returns from TensorFlow while Python ends would abort the process, with code 134.
    """
    _is_exiting.set()
    deadline = time.monotonic() + _EXIT_SECS
    for thread in threading.enumerate():
        if thread.name == "distloop-iterator" and thread.is_alive():
            thread.join(max(0.0, deadline - time.monotonic()))


def kinds_of(dataset: Any) -> set[str]:
    """Returns the class names of a dataset and of all that it reads; "variant" stands for those of its functions."""
    captured = [t for function in dataset._functions() for t in function.function.captured_inputs]
    kinds = {type(dataset).__name__.lstrip("_"), *(t.dtype.name for t in captured if t.dtype == tf.variant)}
    return kinds.union(*map(kinds_of, dataset._inputs()))


def fresh_copy(dataset: Any) -> Any:
    """Returns the dataset as it was before it was first read; the same object if it does not shuffle.

    Data that is no `tf.data.Dataset` is returned as it is.
    All iterators over one dataset draw their shuffle seeds from one stream, so the second one has another order. An
    iterator over a copy draws from a stream of its own. If no copy can be made, a warning says why.
    """
    if isinstance(dataset, NumberedDataset):
        return dataset.fresh()
    if not isinstance(dataset, tf.data.Dataset) or kinds_of(dataset) <= IN_ORDER:  # the graph holds arrays in memory
        return dataset
    try:
        serialized = tf.raw_ops.DatasetToGraphV2(
            input_dataset=dataset._variant_tensor, external_state_policy=_IGNORE_EXTERNAL_STATE
        )
        graph = tf.compat.v1.GraphDef.FromString(serialized.numpy())
        shuffles = [node for node in graph.node if node.op in _SEEDS_INPUT]
        if not shuffles:
            return dataset
        graph.node.add(name=_SEED_GENERATOR, op="DummySeedGenerator")
        for node in shuffles:
            node.input[_SEEDS_INPUT[node.op]] = _SEED_GENERATOR
        copy = tf.raw_ops.DatasetFromGraph(graph_def=graph.SerializeToString())
    except (tf.errors.OpError, ValueError) as error:  # a graph has at most 2 GB
        log.warning("The dataset cannot be copied (%s): it is shuffled in another order now.", first_line(error))
        return dataset
    return tf.data.experimental.from_variant(copy, dataset.element_spec)


@dataclasses.dataclass(eq=False)
class FastForward:
    """Skips batches of an iterator that is some behind its position.

    Attributes:
        iterator: over a dataset.
        num_batches: how many it is fast_forward.
    """

    iterator: Any
    num_batches: int

    def skip(self, most: int | None = None, secs: float = NO_LIMIT_SECS) -> int:
        """Reads batches and throws them away; returns how many are then left, or raises an error of the user's code.

        Args:
            most: how many to read; None: all.
            secs: after which it begins no other batch; it reads one at least.
        """
        count = self.num_batches if most is None else min(most, self.num_batches)
        if count:
            with tf.device(HOST):
                limits = tf.constant(count, tf.int64), tf.constant(secs, tf.float64)
                try:
                    self.num_batches -= int(_discard(self.iterator, *limits))
                except tf.errors.OutOfRangeError:  # the data has ended, and is not empty
                    raise
                except tf.errors.OpError as error:
                    raise_as_user_error(error)
        return self.num_batches


@graph_function
def _discard(iterator: Any, count: tf.Tensor, secs: tf.Tensor) -> tf.Tensor:
    """Returns how many batches were read when so many were, or so many seconds had passed."""
    time_limit = TimeLimit(secs)

    def read(done: tf.Tensor) -> tuple[tf.Tensor]:
        batch = next(iterator)
        with tf.control_dependencies(tf.nest.flatten(batch, expand_composites=True)):
            return (done + 1,)

    def goes_on(done: tf.Tensor) -> tf.Tensor:
        return (done < count) & (time_limit.is_ahead() | (done == 0))

    return tf.while_loop(goes_on, read, (tf.constant(0, tf.int64),), parallel_iterations=1)[0]


def read_again(
    fast_forward: FastForward,
    strategy: tf.distribute.Strategy,
    stop_requests: StopRequests | None,
    say: Callable[[str], None],
    show_progress: Callable[[int, str], None],
) -> None:
    """Reads data up to its position; all workers call it.

    Args:
        fast_forward: the data, which may be at its position already.
        strategy: of the workers.
        stop_requests: asked between two pieces whether to go on; None: nothing stops it.
        say: prints a line, once, if it takes longer than two seconds.
        show_progress: called between two pieces with the batches read so far, and what is being done.

    Raises:
        Interrupted: if any worker has a reason to leave the run.
        ValueError: if the time limit of the process is too short for it, so that the run would never go on.
    """
    if not (total := fast_forward.num_batches):
        return
    collectives.report_phase(strategy, "skipping the batches already seen")
    start = time.monotonic()
    if stop_requests is not None:
        stop_requests.plan = "leaving after this batch, with the checkpoint as it is"
    left = fast_forward.skip(1)  # takes longer than others: buffers are filled
    first_secs, is_announced = time.monotonic() - start, False
    while True:
        left = fast_forward.skip(left, _PIECE_SECS)
        secs, done = time.monotonic() - start, total - left
        total_secs = first_secs + (secs - first_secs) / max(1, done - 1) * (total - 1)
        status = Status.GOES_ON if stop_requests is None else _status(stop_requests, total_secs)
        votes = collectives.exchange(strategy, Vote(status, has_ended=not left))
        if all(vote.has_ended for vote in votes):
            if stop_requests is not None:
                stop_requests.plan = SAVES
            return
        if leaving := {vote.status: index for index, vote in enumerate(votes) if vote.status != Status.GOES_ON}:
            where = f"with {left:,} of {total:,} batches left to skip"
            if Status.IS_ASKED not in leaving:
                raise ValueError(
                    f"max_secs ended the process {where}, so the same command would never train: raise max_secs, or "
                    "use distloop.make_dataset, whose data is at its position at once."
                )
            why = (stop_requests and stop_requests.reason) or f"by worker {leaving[Status.IS_ASKED]}"
            raise Interrupted(f"Interrupted {why} {where}", has_trained=False)
        if not is_announced and total_secs > _SILENT_SECS:
            is_announced = True
            say(
                f"Skipping {total:,} batches already seen (about {total_secs:,.0f} s); data of distloop.make_dataset "
                "is at its position at once."
            )
        if is_announced:
            show_progress(done, "skipping batches already seen")


def _status(stop_requests: StopRequests, total_secs: float) -> Status:
    """Returns whether this worker is to stop, and why, if the reading takes so long as a whole."""
    if stop_requests.reason is None:
        return Status.GOES_ON
    lacks_time = stop_requests.is_out_of_time and total_secs >= stop_requests.max_secs
    return Status.LACKS_TIME if lacks_time else Status.IS_ASKED

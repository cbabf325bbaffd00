"""Workers of a run: the number of workers, the chief, and collectives that the host calls.

    if workers.is_chief(strategy):
        write_file()
    votes = workers.exchange(strategy, Vote(step=100))              # of all workers, on every worker
    paths = workers.gather(strategy, {"path": "a.npy"})             # a list of W values

It does not know how the workers met (`strategies`), nor how a failure is noticed (`heartbeat`).
"""

import base64
import contextlib
import enum
import io
import json
import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from distloop.distributed import tensorflow_internals
from distloop.graph_functions import graph_function
from distloop.threads import once
from distloop.workers.heartbeat import Heartbeat
from distloop.workers.liveness import GATHERING
from distloop.workers.preemption import Interrupted, OtherFailed, StopRequests

_AGREE_SECS = 3.0  # that a worker which failed waits for the others to save
_HEARTBEAT = "_distloop_heartbeat"  # the attribute of a strategy that holds its heartbeat
_MIN_WORDS, _MAX_WORDS = 32, 2**17  # of 8 bytes, that workers exchange in one collective


class Workers:
    """The workers of a run, for what a program does between steps; with one worker, nothing is exchanged.

    All workers must call `barrier`, `gather` and `broadcast`, and in the same order: each waits until all are there. In
    an action, call them on every worker or on none.
    """

    def __init__(self, strategy: tf.distribute.Strategy):
        """Stores the strategy."""
        self._strategy = strategy

    @property
    def index(self) -> int:
        """The index of this worker, from 0."""
        return worker_index(self._strategy)

    @property
    def count(self) -> int:
        """The number of workers."""
        return num_workers(self._strategy)

    @property
    def is_chief(self) -> bool:
        """Whether this is worker 0, which writes the files of the run."""
        return is_chief(self._strategy)

    def barrier(self) -> None:
        """Waits until all workers are here."""
        exchange(self._strategy, Vote())

    def gather(self, value: Any) -> list[Any]:
        """Returns the values of all workers, in their order, on every worker.

        Args:
            value: None, booleans, numbers, strings, NumPy arrays, and lists and dicts of them.

        Returns:
            One value for each worker; tuples come back as lists.

        Raises:
            ValueError: on every worker, if the value of one holds something else.
        """
        try:
            data, is_error = encode(value), False
        except ValueError as error:
            data, is_error = str(error).encode(), True
        votes = exchange(self._strategy, Vote(num_bytes=len(data), is_error=is_error))
        received = _gather_bytes(self._strategy, data, [int(vote.num_bytes) for vote in votes])
        for index, message in enumerate(received):
            if votes[index].is_error:
                raise ValueError(message.decode() if self.count == 1 else f"Worker {index}: {message.decode()}")
        return [decode(message) for message in received]

    def broadcast(self, value: Any) -> Any:
        """Returns the chief's value on every worker; those of the others do not count.

        Args:
            value: as for `gather`.

        Raises:
            ValueError: as for `gather`.
        """
        return self.gather(value if self.is_chief else None)[0]


def num_workers(strategy: tf.distribute.Strategy) -> int:
    """Returns the number of processes that take part."""
    return tensorflow_internals.rank_and_size(strategy)[1]


def worker_index(strategy: tf.distribute.Strategy) -> int:
    """Returns the index of this worker, from 0; worker 0 is the chief."""
    return tensorflow_internals.rank_and_size(strategy)[0]


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


def report_phase(strategy: tf.distribute.Strategy, phase: str, step: tf.Variable | None = None) -> None:
    """Sends the other workers the phase that this worker is in, as in "evaluating".

    Args:
        strategy: of the run.
        phase: in a word or two.
        step: the global step of the model that computes, which is sent from now on; None: that of the phase before.
    """
    if (heartbeat := heartbeat_of(strategy)) is not None:
        heartbeat.phase = phase
        if step is not None:
            heartbeat.step = lambda: int(step)


def require_same(strategy: tf.distribute.Strategy, what: str, facts: Mapping[str, object]) -> None:
    """Compares facts between the workers before they compute together. All workers must call it.

    Args:
        strategy: of the run.
        what: the workers are about to do, such as "train".
        facts: by name, compared as texts.

    Raises:
        ValueError: on every worker, if one differs; in a collective, all would wait for it without an end.
    """
    if num_workers(strategy) == 1:
        return
    texts = {"what to do": what, **{name: str(value) for name, value in facts.items()}}
    chief, *others = Workers(strategy).gather(texts)
    index, other = next(((i, other) for i, other in enumerate(others, 1) if other != chief), (0, chief))
    if index == 0:
        return
    name = next(name for name in {**chief, **other} if chief.get(name) != other.get(name))
    raise ValueError(
        f"The workers differ in {name} before they {chief['what to do']}: {_shorten(chief.get(name))} on worker 0, "
        f"{_shorten(other.get(name))} on worker {index}; let every worker run the same lines, with the same data."
    )


def _shorten(text: str | None) -> str:
    return "missing" if text is None else text if len(text) <= 200 else f"{text[:200]}..."


def gather(strategy: tf.distribute.Strategy, value: Any) -> list[Any]:
    """Returns the values of all workers, as `Workers.gather`. All workers must call it."""
    return Workers(strategy).gather(value)


class Status(enum.IntEnum):
    """What a worker is about to do where the workers meet."""

    GOES_ON = 0
    IS_ASKED = 1  # to leave the run
    LACKS_TIME = 2  # to leave the run, by a time limit that is too short for what it does
    HAS_FAILED = 3  # and waits in `agree_to_save`


class Vote(NamedTuple):
    """The record that each worker sends to all others where they meet.

    It is the same in the loop, at boundaries, in evaluations and predictions, and before other values are exchanged, so
    that a worker that has failed meets the others wherever they meet next.
    """

    status: float = Status.GOES_ON
    step: float = 0
    max_steps: float = 0  # that the next loop may run; in an evaluation, the batches of its next chunk
    secs: float = 0.0  # that the run has trained, by the worker's clock
    has_ended: float = False  # whether the data that is read has ended; at a boundary, whether an action ends the run
    num_bytes: float = 0  # of a value that follows
    is_error: float = False  # whether the value is the message of an error


def exchange(strategy: tf.distribute.Strategy, vote: Vote) -> list[Vote]:
    """Returns the votes of all workers, in their order. All workers must call it.

    Raises:
        OtherFailed: if another worker has failed, and this one has not.
    """
    if num_workers(strategy) == 1:
        return [vote]
    votes = [Vote(*numbers) for numbers in _gather(strategy, np.array(vote, np.float64)).tolist()]
    failed = [index for index, other in enumerate(votes) if other.status == Status.HAS_FAILED]
    if failed and vote.status != Status.HAS_FAILED:
        raise OtherFailed(f"Worker {failed[0]} failed at step {votes[failed[0]].step:.0f}")
    return votes


def agree_to_go_on(strategy: tf.distribute.Strategy, requests: StopRequests | None, vote: Vote) -> list[Vote]:
    """Exchanges votes, with the status that the requests give; returns those of all workers. All must call it.

    Args:
        strategy: of the run.
        requests: this worker's; None: it is asked for nothing.
        vote: with the step, for the message.

    Raises:
        Interrupted: on every worker, if any is asked to stop, unless the data of all has ended; OtherFailed if one has
            failed.
    """
    reason = requests.reason if requests is not None else None
    votes = exchange(strategy, vote._replace(status=Status.GOES_ON if reason is None else Status.IS_ASKED))
    asked = [index for index, other in enumerate(votes) if other.status == Status.IS_ASKED]
    if asked and not all(other.has_ended for other in votes):
        raise Interrupted(f"Interrupted {reason or f'by worker {asked[0]}'} at step {vote.step:.0f}")
    return votes


def agree_to_save(strategy: tf.distribute.Strategy, step: int) -> bool:
    """Returns whether all workers save a run that an error of this one ends, as they meet here or have failed, too.

    Workers that wait in another collective cannot be asked. After some seconds this one waits no longer.
    """
    votes: list[Vote] = []

    def ask() -> None:
        with contextlib.suppress(tf.errors.OpError):
            votes.extend(exchange(strategy, Vote(Status.HAS_FAILED, step)))

    thread = threading.Thread(target=ask, name="distloop-agreement", daemon=True)
    thread.start()
    thread.join(_AGREE_SECS)
    if thread.is_alive():
        tensorflow_internals.abort_collectives()
        thread.join(_AGREE_SECS)
    return len({vote.step for vote in votes if vote.status == Status.HAS_FAILED}) == 1


def _gather_bytes(strategy: tf.distribute.Strategy, data: bytes, sizes: Sequence[int]) -> list[bytes]:
    """Returns the bytes of every worker, whose numbers are `sizes`."""
    if num_workers(strategy) == 1:
        return [data]
    words = min(max(_MIN_WORDS, 1 << (max(sizes) // 8).bit_length()), _MAX_WORDS)  # each length costs a trace
    num_pieces = -(-max(sizes) // (8 * words))
    padded = np.frombuffer(data.ljust(8 * words * num_pieces, b"\0"), np.int64)
    pieces = [_gather(strategy, piece) for piece in np.split(padded, num_pieces)]  # each [W, words]
    return [np.concatenate([piece[index] for piece in pieces]).tobytes()[:size] for index, size in enumerate(sizes)]


def _gather(strategy: tf.distribute.Strategy, values: np.ndarray) -> np.ndarray:
    """Returns numbers of every worker, `[W, ...]`; on several workers."""
    heartbeat = heartbeat_of(strategy)
    phase = heartbeat.phase if heartbeat is not None else ""
    report_phase(strategy, GATHERING)
    gathered: np.ndarray = _gather_function(strategy, values.shape, values.dtype)(tf.constant(values)).numpy()
    report_phase(strategy, phase)
    return gathered


@once
def _gather_function(strategy: tf.distribute.Strategy, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
    is_this_one = np.arange(num_workers(strategy)).reshape(-1, *(1 for _ in shape)) == worker_index(strategy)

    def gather_values(values: tf.Tensor) -> tf.Tensor:
        return sum_over_workers(strategy, tf.where(is_this_one, values, tf.zeros_like(values)))  # [W, ...]

    return graph_function(gather_values).get_concrete_function(tf.TensorSpec(shape, dtype))


def sum_over_workers(strategy: tf.distribute.Strategy, value: tf.Tensor) -> tf.Tensor:
    """Returns the sum of a tensor over the workers. All must call it, in a `tf.function` and outside `strategy.run`."""
    local = num_local_replicas(strategy)

    def all_reduce(value: tf.Tensor) -> tf.Tensor:
        context = tf.distribute.get_replica_context()
        is_first = tf.equal(context.replica_id_in_sync_group % local, 0)  # one replica speaks for its worker
        return context.all_reduce(tf.distribute.ReduceOp.SUM, tf.where(is_first, value, tf.zeros_like(value)))

    return strategy.experimental_local_results(strategy.run(all_reduce, args=(value,)))[0]


def encode(value: Any) -> bytes:
    """Returns a value as bytes; no pickle, so that reading them runs nothing.

    Args:
        value: None, booleans, numbers, strings, NumPy arrays and scalars, tensors, and lists, tuples and dicts of them.

    Raises:
        ValueError: if the value holds something else.
    """
    return json.dumps(_to_json(value)).encode()


def decode(data: bytes) -> Any:
    """Returns the value of `encode`: tuples are lists, tensors are arrays."""
    return _from_json(json.loads(data))


def _to_json(value: Any) -> Any:
    """Returns a value for JSON: each dict is the only entry of another one, whose key says what it stands for."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, (list, tuple)):
        return [_to_json(item) for item in value]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {"dict": {key: _to_json(item) for key, item in value.items()}}
    array = np.asarray(value) if hasattr(value, "__array__") else None
    if array is None or array.dtype.kind not in "biufcSUmM":
        raise ValueError(
            f"{value!r:.100} of type {type(value).__name__} was given to exchange between workers; they exchange None, "
            "booleans, numbers, strings, NumPy arrays, and lists and dicts (with strings as keys) of them."
        )
    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    kind = "scalar" if isinstance(value, np.generic) else "array"
    return {kind: base64.b64encode(file.getvalue()).decode()}


def _from_json(value: Any) -> Any:
    if isinstance(value, list):
        return [_from_json(item) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "dict":
        return {key: _from_json(item) for key, item in content.items()}
    array = np.load(io.BytesIO(base64.b64decode(content)), allow_pickle=False)
    return array[()] if kind == "scalar" else array

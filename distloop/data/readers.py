"""Batch readers: reads each kind of Python data from any batch on, as directly as possible.

    reader = read_iterable(loader)
    for batch, state in reader.read(1000, None, True):      # from batch 1000 on, over all passes

It does not know what is in a batch.
"""

import concurrent.futures
import contextlib
import itertools
import math
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import keras
import numpy as np
from keras.src.trainers.data_adapters.py_dataset_adapter import OrderedEnqueuer

from distloop.data.rows import ENDLESS
from distloop.log import log

READ_AGAIN = "a resumed run reads it again up to its position, which is exact if it gives the same batches each time"

_NUM_PEEKED = 2  # batches that are looked at before


class Reader(NamedTuple):
    """How one kind of data is read.

    Attributes:
        read: returns batches, and the state of the data after each or None, from a number of a batch, the state there
            if it is known, and whether to go on after the last batch.
        peek: returns up to two batches, and the states after them; reads of the same data see the batches again.
        num_batches: of one pass; inf: endless; None: unknown.
        resume: how a run that is resumed gets to its position.
        seeks: whether it does so without reading what comes before.
        restarts: whether the data can be read more than once.
        against_waiting: what to try where steps wait for the data.
    """

    read: Callable[[int, Any, bool], Iterator[tuple[Any, Any]]]
    peek: Callable[[], list[tuple[Any, Any]]]
    num_batches: float | None
    resume: str
    seeks: bool = False
    restarts: bool = True
    against_waiting: str = (
        "more workers if it is a loader that has some, less work for a batch, or distloop.make_dataset(source, "
        "batch_size), which reads examples in threads"
    )


class _Rest(keras.utils.PyDataset):
    """The batches of a PyDataset with some numbers, in their order."""

    def __init__(self, data: keras.utils.PyDataset, numbers: list[int] | None, first: int):
        super().__init__()
        self._data, self._numbers, self._first = data, numbers, first

    @property
    def num_batches(self) -> int | None:
        return None if self._numbers is None else len(self._numbers)

    def __getitem__(self, index: int) -> Any:
        return self._data[self._first + index if self._numbers is None else self._numbers[index]]


def read_py_dataset(data: keras.utils.PyDataset, shuffle_seed: int | None) -> Reader:
    """Returns the reader of a PyDataset, which gives each batch by its number.

    Args:
        data: its workers, if it asks for some, make the batches.
        shuffle_seed: of the order of the batches, another one each epoch; None: by their numbers.
    """
    num_ended = 0  # epochs; their number only grows, as on_epoch_end cannot be undone

    def end_epochs(count: int) -> None:
        nonlocal num_ended
        while num_ended < count:
            data.on_epoch_end()
            num_ended += 1

    def read(first: int, state: Any, repeat: bool) -> Iterator[tuple[Any, Any]]:
        num_batches = data.num_batches
        epoch, first = (0, first) if num_batches is None else divmod(first, num_batches)
        while True:
            end_epochs(epoch)
            data.on_epoch_begin()
            numbers = None if num_batches is None else list(range(num_batches))
            if numbers is not None and shuffle_seed is not None:
                numbers = np.random.default_rng([shuffle_seed, epoch]).permutation(num_batches).tolist()
            rest = _Rest(data, numbers and numbers[first:], first)
            for batch in _in_background(rest, data):
                yield batch, None
            epoch, first = epoch + 1, 0
            if not repeat:
                data.on_epoch_end()
                return

    def peek() -> list[tuple[Any, Any]]:
        count = _NUM_PEEKED if data.num_batches is None else min(_NUM_PEEKED, data.num_batches)
        return [(data[number], None) for number in range(count)]

    count = math.inf if data.num_batches is None else data.num_batches
    resume = "a resumed run calls on_epoch_end for each epoch before its position, and is at its position at once"
    faster = "a larger workers= of the PyDataset, use_multiprocessing=True, or less work in its __getitem__"
    return Reader(read, peek, count, resume, seeks=True, against_waiting=faster)


def _in_background(rest: _Rest, data: keras.utils.PyDataset) -> Iterator[Any]:
    """Yields batches, made by the workers that a PyDataset asks for, in their order."""
    if data.workers <= 1 and not (data.workers and data.use_multiprocessing):
        yield from (rest[i] for i in (itertools.count() if rest.num_batches is None else range(rest.num_batches)))
        return
    enqueuer = OrderedEnqueuer(rest, data.workers, data.use_multiprocessing, data.max_queue_size)
    enqueuer.start()
    try:
        yield from itertools.islice(enqueuer.get(), rest.num_batches)
    finally:
        enqueuer.stop()


def read_iterable(data: Any) -> Reader:
    """Returns the reader of an object whose passes `iter` starts; a Grain `MapDataset` shuffles each anew."""
    length: float | None = None
    with contextlib.suppress(TypeError, NotImplementedError):  # such as a DataLoader of an IterableDataset
        length = len(data)
    if length is not None and length > ENDLESS:
        length = math.inf
    is_map_dataset = hasattr(data, "to_iter_dataset")
    endless = data.repeat() if is_map_dataset and length != math.inf else data
    samplers = [data, getattr(data, "sampler", None)]
    generators: list[Any] = [getattr(sampler, "generator", None) for sampler in samplers]
    generators = [generator for generator in generators if hasattr(generator, "set_state")]
    at_start = [generator.get_state() for generator in generators]

    def open_pass(epoch: int, repeat: bool) -> Iterator[Any]:
        if epoch == 0:
            for generator, state in zip(generators, at_start, strict=True):
                generator.set_state(state)
        for sampler in samplers:
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)
        # A process that a thread of TensorFlow's forks would end with code 1, as Python does not know that thread.
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            return pool.submit(iter, endless if repeat else data).result()

    return reader_of_passes(open_pass, length)


def reader_of_passes(open_pass: Callable[[int, bool], Iterator[Any]], num_batches: float | None) -> Reader:
    """Returns the reader of data whose passes a function opens, by their number, and whether others are to follow."""

    def read(first: int, state: Any, repeat: bool) -> Iterator[tuple[Any, Any]]:
        epoch = 0 if state is None else state["pass"]
        batches = open_pass(epoch, repeat)
        if state is not None and not _has_taken(batches, state["iterator"]):
            state, epoch, batches = None, 0, open_pass(0, repeat)
        num_to_skip = first if state is None else 0
        while True:
            is_empty = state is None
            for batch in batches:
                is_empty = False
                if num_to_skip:
                    num_to_skip -= 1
                else:
                    yield batch, _state_of(batches, epoch)
            if not repeat:
                return
            if is_empty:
                raise ValueError(
                    f"Pass {epoch + 1} over the data had no batch: give an object that starts anew whenever it is "
                    "read, such as a function that returns a new generator."
                )
            state, epoch = None, epoch + 1
            batches = open_pass(epoch, repeat)

    def peek() -> list[tuple[Any, Any]]:
        return list(itertools.islice(read(0, None, False), _NUM_PEEKED))

    return Reader(read, peek, num_batches, READ_AGAIN)


def _state_of(batches: Iterator[Any], epoch: int) -> Any:
    """Returns the state of a pass, as JSON can hold it; None: it has none."""
    if not hasattr(batches, "get_state") or not hasattr(batches, "set_state"):
        return None
    state = batches.get_state()
    return {"pass": epoch, "iterator": state.decode() if isinstance(state, bytes) else state}


def _has_taken(batches: Any, state: Any) -> bool:
    """Returns whether an iterator has taken its state of before; a warning says why not."""
    try:
        batches.set_state(state.encode() if isinstance(state, str) else state)
    except Exception as error:  # such as another data source
        reason = str(error).partition("\n")[0].rstrip(".")
        log.warning("The data's iterator refused its state (%s): reading the data again up to its position.", reason)
        return False
    return True


class _Progress:
    """How far an iterator was read, and the batches that were only looked at."""

    def __init__(self) -> None:
        self.num_taken = 0
        self.peeked: list[Any] = []


_progress: weakref.WeakKeyDictionary[Any, _Progress] = weakref.WeakKeyDictionary()  # by iterator


def read_once(iterator: Iterator[Any]) -> Reader:
    """Returns the reader of an iterator, such as a generator, which cannot be started again."""
    progress, end = _Progress(), object()
    with contextlib.suppress(TypeError):  # there is no weak reference to a zip, for one
        progress = _progress.setdefault(iterator, progress)

    was_read = ValueError(
        f"The {type(iterator).__name__} given was read before and cannot start again: give the function that makes it, "
        "without calling it."
    )

    def read(first: int, state: Any, repeat: bool) -> Iterator[tuple[Any, Any]]:
        if progress.num_taken > first:
            raise was_read
        while (batch := progress.peeked.pop(0) if progress.peeked else next(iterator, end)) is not end:
            progress.num_taken += 1
            if progress.num_taken > first:
                yield batch, None
        if repeat:
            raise ValueError(
                f"The {type(iterator).__name__} given ended after {progress.num_taken} batches and cannot start "
                "again: give the function that makes it, without calling it, or train for fewer steps."
            )

    def peek() -> list[tuple[Any, Any]]:
        progress.peeked += itertools.islice(iterator, max(0, _NUM_PEEKED - len(progress.peeked)))
        if progress.num_taken and not progress.peeked:
            raise was_read
        return [(batch, None) for batch in progress.peeked]

    return Reader(read, peek, None, READ_AGAIN, restarts=False)

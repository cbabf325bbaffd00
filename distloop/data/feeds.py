"""Feeds: batches that PyDatasets, generators, Grain or PyTorch's DataLoader make, as datasets.

    feed = make_feed(data)                          # None: it is none of these
    dataset = feed.dataset(first=1000)              # a tf.data.Dataset from batch 1000 on

Each kind of data is read from any batch on, as directly as possible.
"""

import concurrent.futures
import contextlib
import itertools
import math
import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from distloop.data.examples import common_spec, describe
from distloop.data.order import Access
from distloop.data.py_dataset import NUM_PEEKED, PyDatasetBatches, is_trained_on, mark_as_trained_on
from distloop.data.python_rows import unmasked
from distloop.data.rows import ENDLESS
from distloop.errors import EMPTY_DATASET, carry
from distloop.log import log
from distloop.threads import Gate

READ_AGAIN = "a resumed run reads it again up to its position, which is exact if it gives the same batches each time"

_NO_BATCHES = (str, bytes, Mapping, list, tuple, set, frozenset, range, np.ndarray, tf.Tensor, tf.Variable)


class Feed:
    """Batches that Python makes, as a dataset that begins at any of them.

    Attributes:
        element_spec: of a batch before `map_batch`; an axis in which the first two batches differ is free.
        batch_size: rows of a batch, if the first two batches agree; else None.
        resume: a sentence: how a run that is resumed gets to its position.
        access: how the data gets to a position.
        against_waiting: what to try where steps wait for the data.
        map_batch: changes each batch, as `Dataset.map` does; None: nothing does.
        gate: at which the threads wait that read the data.
    """

    against_waiting = (
        "more workers if it is a loader that has some or by workers= of the PyDataset, less work for a batch, or "
        "distloop.make_dataset(source, batch_size), which reads examples in threads"
    )

    def __init__(
        self,
        read: Callable[[int, Any, bool], Iterator[tuple[Any, Any]]],
        num_batches: float | None,
        peek: Callable[[], list[tuple[Any, Any]]] | None = None,
        *,
        resume: str = READ_AGAIN,
        access: Access = Access.AGAIN,
        orders_itself: Any = None,
    ):
        """Reads the first two batches.

        Args:
            read: returns batches, and the state of the data after each or None, from a number of a batch, the state
                there if it is known, and whether to go on after the last batch.
            num_batches: of one pass; inf: endless; None: unknown.
            peek: returns up to two batches, and the states after them, which are read again; None: the first ones are.
            resume: as the attribute.
            access: how the data gets to a position; data with states seeks.
            orders_itself: the data, if its order depends on what was read of it before; else None.

        Raises:
            ValueError: if there is no batch, or batches are no structures of arrays, [B, ...].
        """
        peeked = list(itertools.islice(read(0, None, False), NUM_PEEKED)) if peek is None else peek()
        if not peeked:
            raise ValueError(EMPTY_DATASET)
        batches = [as_arrays(batch) for batch, _ in peeked]
        self._read, self._num_batches = read, num_batches
        self._orders_itself, self._was_trained_on = orders_itself, False
        self.map_batch: Callable[..., Any] | None = None
        self.gate = Gate()
        self._first_batch = batches[0]
        self.element_spec = _element_spec(batches)
        sizes = {array.shape[0] if array.ndim else None for batch in batches for array in tf.nest.flatten(batch)}
        self.batch_size = sizes.pop() if len(sizes) == 1 else None
        has_states = peeked[0][1] is not None
        self.access = Access.SEEKS if has_states else access
        self.resume = "a resumed run is at its position at once, by the iterator's state" if has_states else resume
        self._states: dict[int, Any] = {}  # by the number of batches before it

    def require_restart(self) -> None:
        """Raises a ValueError if the data can be read only once."""
        if self.access is Access.ONCE:
            raise ValueError(
                "The data given is an iterator, which cannot be read again from an earlier batch (as several "
                "evaluations, on_divergence=rollback and find_learning_rate have to): give the function that makes it, "
                "without calling it."
            )

    def first_rows(self) -> Any:
        """Returns the first batch."""
        rows = tf.nest.map_structure(tf.convert_to_tensor, self._first_batch)
        return rows if self.map_batch is None else self.map_batch(rows)

    def one_pass(self, *, is_endless_if_unknown: bool = False) -> tf.data.Dataset:
        """Returns a dataset of one pass over the data, which knows its length if the data does.

        Args:
            is_endless_if_unknown: whether data that does not know its length counts as endless.
        """
        dataset = self._dataset(lambda: self._read(0, None, False))
        length = self._num_batches
        if length is None and not is_endless_if_unknown:
            return dataset
        count = tf.data.INFINITE_CARDINALITY if length in (None, math.inf) else int(length)
        return dataset.apply(tf.data.experimental.assert_cardinality(count))

    def dataset(self, first: int = 0, state: Any = None, *, repeat: bool = True) -> tf.data.Dataset:
        """Returns a dataset that begins at a batch, counted from 0 over all passes.

        Args:
            first: the number of the batch.
            state: what `state_at` returned for it; None: unknown.
            repeat: whether the dataset starts again at the end of the data.
        """
        return self._dataset(lambda: self._noting_states(first, state, repeat))

    def state_at(self, num_batches: int) -> Any:
        """Returns the state of the data after so many batches, as JSON can hold it; None: it has none."""
        return self._states.get(num_batches)

    def forget(self, num_batches: int) -> None:
        """Forgets the states of the data before so many batches, which nothing asks for any more."""
        for number in [number for number in list(self._states) if number < num_batches]:  # a thread adds others
            self._states.pop(number, None)

    def begin_training(self) -> None:
        """Notes that a run trains on the data; call it before any batch is read for training."""
        self._was_trained_on = self._orders_itself is not None and mark_as_trained_on(self._orders_itself)

    def require_first_run(self) -> None:
        """Raises a ValueError if an earlier run has changed the order of the data."""
        if self._was_trained_on:
            raise ValueError(
                f"The {type(self._orders_itself).__name__} given was trained on before in this process, which has "
                "changed its order, and the run goes on in the middle of it: make it anew for each call of fit or "
                "replay, as a new process does."
            )

    def require_untrained(self) -> None:
        """Raises a ValueError if a pass would change the order of data that is trained on."""
        data = self._orders_itself
        if is_trained_on(data) and not isinstance(data, keras.utils.PyDataset):
            raise ValueError(
                f"The {type(data).__name__} given to evaluate or predict on was trained on, and each pass draws from "
                "the generator that orders its batches: make another loader, with a generator of its own."
            )

    def _noting_states(self, first: int, state: Any, repeat: bool) -> Iterator[tuple[Any, Any]]:
        self._states = {first: state}
        for number, (batch, after) in enumerate(self._read(first, state, repeat), first + 1):
            self._states[number] = after
            yield batch, after

    def _dataset(self, read: Callable[[], Iterator[tuple[Any, Any]]]) -> tf.data.Dataset:
        def generate() -> Iterator[Any]:
            try:
                for batch, _ in self.gate.through(read()):
                    yield as_arrays(batch)
            except Exception as error:  # of the user's code: TensorFlow would pass on its text alone
                raise carry(error) from error

        dataset = tf.data.Dataset.from_generator(generate, output_signature=self.element_spec)
        return dataset if self.map_batch is None else dataset.map(self.map_batch)


def make_feed(
    data: Any,
    *,
    shuffle_seed: int | None = None,
    make_again: Callable[[], Any] | None = None,
    limit: int = 0,
    counts_empty: bool = True,
) -> Feed | None:
    """Returns a feed of batches that Python makes.

    Args:
        data: a `PyDataset`, an iterator, or an object whose passes `iter` starts, such as a DataLoader.
        shuffle_seed: of the order of a `PyDataset`'s batches, another one each epoch; None: by their numbers.
        make_again: returns the data anew, if a function has made it.
        limit: the most batches of a pass that others follow, and of each epoch of a `PyDataset`, after which its hooks
            are called; 0: all. An iterator that no function makes has one pass, which it does not limit.
        counts_empty: whether batches without rows count for the limit; those of a `PyDataset` do.

    Returns:
        The feed; None: the data is something else, such as a `tf.data.Dataset`.

    Raises:
        ValueError: if there is no batch, or batches are no structures of arrays, [B, ...].
    """
    if isinstance(data, keras.utils.PyDataset):
        batches = PyDatasetBatches(data, shuffle_seed, limit)
        own = data if batches.orders_itself else None
        at = "a resumed run calls the hooks of each epoch before its position, and is at its position at once"
        return Feed(batches.read, batches.num_batches, batches.peek, resume=at, access=Access.SEEKS, orders_itself=own)
    if isinstance(data, (tf.data.Dataset, *_NO_BATCHES)) or not hasattr(data, "__iter__"):
        return None
    if not hasattr(data, "__next__"):
        return _feed_of_iterable(data, limit, counts_empty)
    if make_again is not None:
        passes = itertools.chain([data], iter(make_again, None))  # the first one is peeked at
        return _feed_of_passes(lambda epoch, repeat: next(passes), None, limit, counts_empty)
    return _feed_of_iterator(data)


def _feed_of_iterable(data: Any, limit: int, counts_empty: bool) -> Feed:
    """Returns the feed of an object whose passes `iter` starts; a Grain `MapDataset` shuffles each anew."""
    length: float | None = None
    with contextlib.suppress(TypeError, NotImplementedError):  # such as a DataLoader of an IterableDataset
        length = math.inf if len(data) > ENDLESS else len(data)
    endless = data.repeat() if hasattr(data, "to_iter_dataset") and length != math.inf else data
    limit = limit if length is None or limit < length else 0  # all passes end before it
    owners = [data, getattr(data, "batch_sampler", None)]
    samplers = [*owners, *(getattr(owner, "sampler", None) for owner in owners)]
    generators = [s.generator for s in samplers if hasattr(getattr(s, "generator", None), "set_state")]
    at_start = [generator.get_state() for generator in generators]
    before_pass = list(at_start)

    def restore(states: list[Any]) -> None:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)

    def open_pass(epoch: int, repeat: bool) -> Iterator[Any]:
        before_pass[:] = [generator.get_state() for generator in generators]
        if epoch == 0:
            restore(at_start)
        for owner in (*samplers, getattr(data, "dataset", None)):
            if hasattr(owner, "set_epoch"):
                owner.set_epoch(epoch)
        batches = endless if repeat else data
        if limit and batches is not data:
            batches = endless[epoch * len(data) : (epoch + 1) * len(data)]
        # A process that a thread of TensorFlow's forks would end with code 1, as Python does not know that thread.
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            return pool.submit(iter, batches).result()

    orders_itself = data if generators else None
    return _feed_of_passes(open_pass, length, limit, counts_empty, orders_itself, lambda: restore(before_pass))


def _feed_of_passes(
    open_pass: Callable[[int, bool], Iterator[Any]],
    num_batches: float | None,
    limit: int,
    counts_empty: bool,
    orders_itself: Any = None,
    end_pass: Callable[[], None] = lambda: None,
) -> Feed:
    """Returns the feed of data whose passes a function opens, by their number, and whether others are to follow.

    Each pass that others follow ends with its batch number `limit`, if that is not 0. Another function is called after
    the first look at the data, and after a pass that none follows.
    """

    def read(first: int, state: Any, repeat: bool) -> Iterator[tuple[Any, Any]]:
        most = limit if limit and repeat else math.inf
        epoch, taken = (0, 0) if state is None else (state["pass"], state.get("taken", 0))
        batches = open_pass(epoch, repeat)
        if state is not None and not _has_taken(batches, state["iterator"]):
            state, epoch, taken, batches = None, 0, 0, open_pass(0, repeat)
        num_to_skip = first if state is None else 0
        while True:
            is_empty = state is None
            for batch in batches if taken < most else ():
                is_empty = False
                if not counts_empty:  # the arrays are yielded, as another library's tensors may be copied from a device
                    batch = as_arrays(batch)
                taken += counts_empty or any(array.shape[:1] != (0,) for array in tf.nest.flatten(batch))
                if num_to_skip:
                    num_to_skip -= 1
                else:
                    yield batch, _state_of(batches, epoch, taken)
                if taken == most:
                    break
            if not repeat:
                end_pass()
                return
            if is_empty:
                raise ValueError(
                    f"Pass {epoch + 1} over the data had no batch: give an object that starts anew whenever it is "
                    "read, such as a function that returns a new generator."
                )
            state, epoch, taken = None, epoch + 1, 0
            batches = open_pass(epoch, repeat)

    feed = Feed(read, num_batches, orders_itself=orders_itself)
    end_pass()
    return feed


def _state_of(batches: Iterator[Any], epoch: int, taken: int) -> Any:
    """Returns the state of a pass of which so many batches were taken, as JSON can hold it; None: it has none."""
    if not hasattr(batches, "get_state") or not hasattr(batches, "set_state"):
        return None
    state = batches.get_state()
    return {"pass": epoch, "taken": taken, "iterator": state.decode() if isinstance(state, bytes) else state}


def _has_taken(batches: Any, state: Any) -> bool:
    """Returns whether an iterator has taken its state of before; a warning says why not."""
    try:
        batches.set_state(state.encode() if isinstance(state, str) else state)
    except Exception as error:  # such as another data source
        reason = str(error).partition("\n")[0].rstrip(".")
        log.warning("The data's iterator refused its state (%s): reading the data again up to its position.", reason)
        return False
    return True


_progress: weakref.WeakKeyDictionary[Any, types.SimpleNamespace] = weakref.WeakKeyDictionary()  # by iterator


def _feed_of_iterator(iterator: Iterator[Any]) -> Feed:
    """Returns the feed of an iterator, such as a generator, which cannot be started again."""
    # How far it was read, and the batches that were only looked at.
    progress, end = types.SimpleNamespace(num_taken=0, peeked=[]), object()
    with contextlib.suppress(TypeError):  # there is no weak reference to a zip, for one
        progress = _progress.setdefault(iterator, progress)

    name, remedy = type(iterator).__name__, "give the function that makes it, without calling it"
    was_read = ValueError(f"The {name} given was read before and cannot start again: {remedy}.")

    def read(first: int, state: Any, repeat: bool) -> Iterator[tuple[Any, Any]]:
        if progress.num_taken > first:
            raise was_read
        while (batch := progress.peeked.pop(0) if progress.peeked else next(iterator, end)) is not end:
            progress.num_taken += 1
            if progress.num_taken > first:
                yield batch, None
        if repeat:
            raise ValueError(
                f"The {name} given ended after {progress.num_taken} batches and cannot start again: {remedy}, or train "
                "for fewer steps."
            )

    def peek() -> list[tuple[Any, Any]]:
        if progress.num_taken:
            raise was_read
        progress.peeked += itertools.islice(iterator, max(0, NUM_PEEKED - len(progress.peeked)))
        return [(batch, None) for batch in progress.peeked]

    return Feed(read, None, peek, access=Access.ONCE)


def as_arrays(batch: Any) -> Any:
    """Returns a batch with NumPy arrays as leaves: of a list of numbers or texts, and of tensors of other libraries.

    Lists of anything else become tuples, as `tf.data` would stack them.
    """
    if isinstance(batch, Mapping):
        return {name: as_arrays(entry) for name, entry in batch.items()}
    if isinstance(batch, (list, tuple)) and not all(isinstance(entry, (str, bytes, int, float)) for entry in batch):
        entries = [as_arrays(entry) for entry in batch]
        return type(batch)(*entries) if hasattr(batch, "_fields") else tuple(entries)
    if hasattr(batch, "detach"):  # PyTorch's tensors, which may have a gradient or be on another device
        batch = batch.detach().cpu()
    return np.asarray(unmasked(batch))


def _element_spec(batches: list[Any]) -> Any:
    """Returns the spec that fits all of some batches; the first axis is free.

    Raises:
        ValueError: if their structures, types or numbers of axes differ, or TensorFlow has no such type.
    """
    examples = tf.nest.map_structure(lambda a: a.astype(object) if a.dtype.kind in "US" else a, batches)
    try:
        spec = common_spec("the data", examples)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"The data gives batches of {' and '.join(map(describe, batches))}; each batch is an array, or a dict or "
            "tuple of arrays of numbers or texts, [B, ...], with the same structure, types and number of axes."
        ) from error
    return tf.nest.map_structure(lambda s: tf.TensorSpec([None, *s.shape[1:]] if s.shape.rank else [], s.dtype), spec)

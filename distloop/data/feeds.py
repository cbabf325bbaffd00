"""Batches made in Python as datasets, by PyDatasets, generators, Grain or PyTorch's DataLoader.

    feed = make_feed(data)                          # None: it is none of these
    dataset = feed.dataset(first=1000)              # a tf.data.Dataset from batch 1000 on

It does not know how a kind of data reaches a position, nor replicas.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from distloop.data.examples import common_spec, describe
from distloop.data.readers import Reader, read_iterable, read_once, read_py_dataset, reader_of_passes
from distloop.errors import EMPTY_DATASET, carry

_NO_BATCHES = (str, bytes, Mapping, list, tuple, set, frozenset, range, np.ndarray, tf.Tensor, tf.Variable)


class Feed:
    """Batches that Python makes, as a dataset that begins at any of them.

    Attributes:
        element_spec: of a batch before `map_batch`; an axis in which the first two batches differ is free.
        batch_size: rows of a batch, if the first two batches agree; else None.
        resume: a sentence: how a run that is resumed gets to its position.
        seeks: whether it does so without reading what comes before.
        goes_on: whether it does so by itself, as it seeks or cannot start again.
        against_waiting: what to try where steps wait for the data.
        oldest_place: returns the first batch whose state may still be asked for.
    """

    def __init__(self, reader: Reader, map_batch: Callable[..., Any] | None = None):
        """Reads the first two batches.

        Args:
            reader: of the data.
            map_batch: changes each batch, as `Dataset.map` does; None: nothing does.

        Raises:
            ValueError: if there is no batch, or batches are no structures of arrays, [B, ...].
        """
        peeked = reader.peek()
        if not peeked:
            raise ValueError(EMPTY_DATASET)
        batches = [as_arrays(batch) for batch, _ in peeked]
        self._reader = reader
        self._map_batch = map_batch
        self._first_batch = batches[0]
        self.element_spec = _element_spec(batches)
        sizes = {array.shape[0] if array.ndim else None for batch in batches for array in tf.nest.flatten(batch)}
        self.batch_size = sizes.pop() if len(sizes) == 1 else None
        self.resume, self.against_waiting = reader.resume, reader.against_waiting
        self._has_states = peeked[0][1] is not None
        self.seeks = reader.seeks or self._has_states
        self.goes_on = self.seeks or not reader.restarts
        if self._has_states:
            self.resume = "a resumed run is at its position at once, by the state of the iterator"
        self.oldest_place: Callable[[], int] = lambda: 0
        self._states: dict[int, Any] = {}  # by the number of batches before it
        self._oldest = 0

    def require_restart(self) -> None:
        """Raises a ValueError if the data can be read only once."""
        if not self._reader.restarts:
            raise ValueError(
                "The data given is an iterator, which cannot be read again from an earlier batch (as several "
                "evaluations, on_divergence=rollback, microbatches=auto and find_learning_rate have to): give the "
                "function that makes it, without calling it."
            )

    def first_rows(self) -> Any:
        """Returns the first batch."""
        rows = tf.nest.map_structure(tf.convert_to_tensor, self._first_batch)
        return rows if self._map_batch is None else self._map_batch(rows)

    def one_pass(self, *, is_endless_if_unknown: bool = False) -> tf.data.Dataset:
        """Returns a dataset of one pass over the data, which knows its length if the data does.

        Args:
            is_endless_if_unknown: whether data that does not know its length counts as endless.
        """
        dataset = self._dataset(lambda: self._reader.read(0, None, False))
        length = self._reader.num_batches
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

    def seen(self, num_batches: int) -> Mapping[str, int]:
        """Returns nothing: there is one source."""
        return {}

    def state_at(self, num_batches: int) -> Any:
        """Returns the state of the data after so many batches, as JSON can hold it; None: it has none."""
        return self._states.get(num_batches)

    def _noting_states(self, first: int, state: Any, repeat: bool) -> Iterator[tuple[Any, Any]]:
        if not self._has_states:
            yield from self._reader.read(first, state, repeat)
            return
        self._states, self._oldest = {first: state}, first
        for number, (batch, after) in enumerate(self._reader.read(first, state, repeat), first + 1):
            self._states[number] = after
            while self._oldest < self.oldest_place():
                self._states.pop(self._oldest, None)
                self._oldest += 1
            yield batch, after

    def _dataset(self, read: Callable[[], Iterator[tuple[Any, Any]]]) -> tf.data.Dataset:
        def generate() -> Iterator[Any]:
            try:
                for batch, _ in read():
                    yield as_arrays(batch)
            except Exception as error:  # of the user's code: TensorFlow would pass on its text alone
                raise carry(error) from error

        dataset = tf.data.Dataset.from_generator(generate, output_signature=self.element_spec)
        return dataset if self._map_batch is None else dataset.map(self._map_batch)


def make_feed(
    data: Any,
    *,
    shuffle_seed: int | None = None,
    make_again: Callable[[], Any] | None = None,
    map_batch: Callable[..., Any] | None = None,
) -> Feed | None:
    """Returns a feed of batches that Python makes.

    Args:
        data: a `PyDataset`, an iterator, or an object whose passes `iter` starts, such as a DataLoader.
        shuffle_seed: of the order of a `PyDataset`'s batches, another one each epoch; None: by their numbers.
        make_again: returns the data anew, if a function has made it.
        map_batch: changes each batch, as `Dataset.map` does; None: nothing does.

    Returns:
        The feed; None: the data is something else, such as a `tf.data.Dataset`.

    Raises:
        ValueError: if there is no batch, or batches are no structures of arrays, [B, ...].
    """
    is_tensorflows = isinstance(data, (tf.data.Dataset, tf.distribute.DistributedDataset))
    if isinstance(data, keras.utils.PyDataset):
        reader = read_py_dataset(data, shuffle_seed)
    elif is_tensorflows or isinstance(data, _NO_BATCHES) or not hasattr(data, "__iter__"):
        return None
    elif not hasattr(data, "__next__"):
        reader = read_iterable(data)
    elif make_again is not None:
        passes = itertools.chain([data], iter(make_again, None))  # the first one is peeked at
        reader = reader_of_passes(lambda epoch, repeat: next(passes), None)
    else:
        reader = read_once(data)
    return Feed(reader, map_batch)


def as_arrays(batch: Any) -> Any:
    """Returns a batch with NumPy arrays as leaves: of a list of numbers or texts, and of tensors of other libraries.

    Lists of anything else become tuples, as `tf.data` would stack them.
    """
    if isinstance(batch, Mapping):
        return {name: as_arrays(part) for name, part in batch.items()}
    if isinstance(batch, (list, tuple)) and not all(isinstance(part, (str, bytes, int, float)) for part in batch):
        parts = [as_arrays(part) for part in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else tuple(parts)
    if hasattr(batch, "detach"):  # PyTorch's tensors, which may have a gradient or be on another device
        batch = batch.detach().cpu()
    return np.asarray(batch)


def _element_spec(batches: list[Any]) -> Any:
    """Returns the spec that fits all of some batches; the first axis is free.

    Raises:
        ValueError: if their structures, types or numbers of axes differ, or TensorFlow has no such type.
    """
    try:
        spec = common_spec(
            "the data", tf.nest.map_structure(lambda a: a.astype(object) if a.dtype.kind in "US" else a, batches)
        )
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"The data gives batches of {' and '.join(map(describe, batches))}; each batch is an array, or a dict or "
            "tuple of arrays of numbers or texts, [B, ...], with the same structure, types and number of axes."
        ) from error
    return tf.nest.map_structure(lambda s: tf.TensorSpec([None, *s.shape[1:]] if s.shape.rank else [], s.dtype), spec)

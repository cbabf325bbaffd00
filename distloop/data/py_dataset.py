"""Keras's PyDatasets, read from any batch on, with the hooks of each epoch before it.

    batches = PyDatasetBatches(data, shuffle_seed=0)
    batches.read(first=1000, state=None, repeat=True)           # from batch 1000 on, over all epochs

A PyDataset may draw the order of an epoch in `on_epoch_begin` or `on_epoch_end`. What was drawn cannot be drawn again,
so this module records which data was trained on, loaders with a generator of their own included.
"""

import contextlib
import itertools
import math
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np
from keras.src.trainers.data_adapters.py_dataset_adapter import OrderedEnqueuer

from distloop.data.rows import ENDLESS
from distloop.log import log

NUM_PEEKED = 2  # batches that are looked at before, from which the element spec is made
_trained_on: weakref.WeakSet[Any] = weakref.WeakSet()


def mark_as_trained_on(data: Any) -> bool:
    """Records that a run trains on some data; returns whether one did before. Data without a hash is not recorded."""
    is_known = is_trained_on(data)
    with contextlib.suppress(TypeError):
        _trained_on.add(data)
    return is_known


def is_trained_on(data: Any) -> bool:
    """Returns whether a run trains or trained on some data in this process."""
    with contextlib.suppress(TypeError):
        return data in _trained_on
    return False


class PyDatasetBatches:
    """The batches of a PyDataset over all epochs, made by the workers that the PyDataset asks for.

    Attributes:
        num_batches: of an epoch; inf: endless.
        orders_itself: whether a hook may change the order from epoch to epoch.
    """

    def __init__(self, data: keras.utils.PyDataset, shuffle_seed: int | None, limit: int = 0):
        """Calls no hook yet.

        Args:
            data: the user's.
            shuffle_seed: of the order of the batches, another one each epoch; None: by their numbers.
            limit: the most batches of an epoch; 0: all.
        """
        self._data, self._shuffle_seed = data, shuffle_seed
        self._length = data.num_batches
        self.num_batches = min(limit or math.inf, math.inf if self._length is None else self._length)
        names = ("on_epoch_begin", "on_epoch_end")
        self.orders_itself = any(getattr(type(data), n) is not getattr(keras.utils.PyDataset, n) for n in names)
        self._num_begun = 0  # epochs; it only grows

    def peek(self) -> list[tuple[Any, Any]]:
        """Returns the first two batches."""
        return [(self._data[number], None) for number in range(min(NUM_PEEKED, int(min(self.num_batches, ENDLESS))))]

    def read(self, first: int, state: Any, repeat: bool) -> Iterator[tuple[Any, Any]]:
        """Yields batches, each with None; the arguments are those of `Feed`'s `read`.

        A pass of an evaluation leaves the order of data that is trained on as it is.

        Raises:
            ValueError: if the length has changed.
        """
        data, is_endless = self._data, self.num_batches == math.inf
        epoch, first = (0, first) if is_endless else divmod(first, int(self.num_batches))
        calls_hooks = not repeat and not is_trained_on(data)
        while True:
            if repeat:
                self._begin(epoch)
            elif calls_hooks:
                data.on_epoch_begin()
            if (length := data.num_batches) != self._length:
                raise ValueError(
                    f"The {type(data).__name__} given had {self._length} batches when it was first read, and has "
                    f"{length} now: its length must stay as it is, as positions depend on it; make another one."
                )
            for batch in _in_background(data, self._numbers(epoch)[first:]):
                yield batch, None
            epoch, first = epoch + 1, 0
            if not repeat:
                if calls_hooks:
                    data.on_epoch_end()
                return

    def _numbers(self, epoch: int) -> Sequence[int]:
        """Returns the numbers of the batches of an epoch, in their order."""
        if self.num_batches == math.inf:
            return range(4 * ENDLESS)
        if self._shuffle_seed is None or self._length is None:
            return range(int(self.num_batches))
        numbers = np.random.default_rng([self._shuffle_seed, epoch]).permutation(self._length)
        return list(map(int, numbers[: int(self.num_batches)]))

    def _begin(self, epoch: int) -> None:
        """Calls the hooks up to the beginning of an epoch, as if all epochs before it had been read."""
        if self.orders_itself and self._num_begun > epoch + 1:
            log.warning(
                "Going back to epoch %d of the %s given, which has begun epoch %d: what on_epoch_begin and "
                "on_epoch_end have changed stays changed, so examples of epoch %d may come twice or never.",
                *(epoch + 1, type(self._data).__name__, self._num_begun, epoch + 1),
            )
        while self._num_begun <= epoch:
            if self._num_begun:
                self._data.on_epoch_end()
            self._data.on_epoch_begin()
            self._num_begun += 1


class _Rest(keras.utils.PyDataset):
    """The batches of a PyDataset with some numbers, in their order."""

    def __init__(self, data: keras.utils.PyDataset, numbers: Sequence[int]):
        super().__init__()
        self._data, self._numbers = data, numbers

    @property
    def num_batches(self) -> int | None:
        return None if len(self._numbers) > ENDLESS else len(self._numbers)

    def __getitem__(self, index: int) -> Any:
        return self._data[self._numbers[index]]


def _in_background(data: keras.utils.PyDataset, numbers: Sequence[int]) -> Iterator[Any]:
    """Yields batches with some numbers, made by the workers that a PyDataset asks for, in their order."""
    if data.workers <= 1 and not (data.workers and data.use_multiprocessing):
        yield from (data[number] for number in numbers)
        return
    rest = _Rest(data, numbers)
    enqueuer = OrderedEnqueuer(rest, data.workers, data.use_multiprocessing, data.max_queue_size)
    enqueuer.start()
    try:
        yield from itertools.islice(enqueuer.get(), rest.num_batches)
    finally:
        enqueuer.stop()

"""Source: a user's data, repeated and padded, and read again up to the position of a stopped run.

    source = Source(dataset, strategy, microbatches=1)
    batch = next_batch(source.iterator(), source.layout)

One iterator on the host gives the global batches, of which each replica slices its rows (`shards.take_shard`).
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import keras
import numpy as np
import tensorflow as tf

from distloop.data.arrays import Arrays, are_arrays, as_arrays
from distloop.data.columns import content_of
from distloop.data.feeds import READ_AGAIN, Feed
from distloop.data.info import DataInfo, are_rows_alike, can_be_inspected, count_batches, inspect
from distloop.data.iterators import FastForward, fresh_copy, iterate
from distloop.data.numbered import NumberedDataset, RowIterator, WorkerRows
from distloop.data.opening import DROPS_EMPTY, open_data, with_empty_batches
from distloop.data.order import CONTENT, Access, Position, convert_batches, facts_of
from distloop.data.shards import check_rows, pack_element, pad, static_batch_size
from distloop.distributed import collectives
from distloop.distributed.devices import HOST, Replicas, require_no_other_scope
from distloop.errors import EMPTY_DATASET
from distloop.installed import import_part
from distloop.log import log
from distloop.monitoring.profiler import pipeline_secs
from distloop.workers import environment

Data: TypeAlias = (
    tf.data.Dataset
    | Callable[[tf.distribute.InputContext], tf.data.Dataset]
    | Callable[[], tf.data.Dataset]
    | Arrays
    | keras.utils.PyDataset
    | Iterable[Any]  # of batches: a generator, a Grain dataset, a DataLoader
    | Callable[[], Iterable[Any]]
)

_MAX_REMEMBERED = 8  # sources of passes: preparing a dataset takes as long as a short pass over it
_do_not_convert = tf.autograph.experimental.do_not_convert  # AutoGraph would write a file for each function


class Source:
    """A user's data, one iterator over it, and the number of batches taken from it.

    Attributes:
        data: the object that the user gave, to recognize it.
        feed: gives its batches; None: `tf.data` does.
        numbered: the feed, if it is data by number of which all workers read the same; None: it is not.
        info: what is known about the data.
        layout: what tracing needs to know about the batches.
        batches_taken: how many batches the iterator has given since the first one.
        is_lost: whether it may have given others, too, as a loop failed; `go_to` finds it again.
        skipped_batches: the numbers, from 0, of batches to leave out of training.
        asked_for: the arguments of `fit` that it serves, to recognize them.
        steps_per_epoch: the batches of an epoch that were asked for; None: those of a pass.
        has_class_weights: whether each batch gets class weights as its last entry.
        strategy: whose replicas split each batch.
        against_waiting: what to try where steps wait for the data; empty for a `tf.data.Dataset`.
        resume: how a resumed run gets to its position in batches that Python makes; empty for other data.
        access: how the data gets to a position.
        depends_on_workers: whether its batches are others with another number of workers.
        fast_forward: reads the batches between the iterator and its position.
        gate: entered by each call that reads the data.
    """

    def __init__(
        self,
        data: Data,
        strategy: tf.distribute.Strategy,
        *,
        microbatches: int = 1,
        replicas: Replicas | None = None,
        repeat: bool = True,
        may_go_back: bool = False,
        steps_per_epoch: int | None = None,
        asked_for: tuple[Any, ...] = (),
        is_stacked: bool = False,
        **reading: Any,
    ):
        """Checks the data; reads it only to count the batches of a worker's shard. All workers call it.

        Args:
            data: global batches; a function that returns them, or a worker's shard for an `InputContext`; arrays.
            strategy: as the attribute.
            microbatches: in which a replica computes its rows.
            replicas: on which a step is defined; None: the strategy's.
            repeat: whether finite data starts again at its end.
            may_go_back: whether a position may be restored after a read; a copy of the dataset is read, shuffled alike.
            steps_per_epoch: as the attribute.
            asked_for: as the attribute.
            is_stacked: whether batches are taken from stacks of several, by `stack` in place of `iterator`.
            **reading: how it is read, as for `open_data`.

        Raises:
            ValueError: if `data` is none of these, is not batched, or is known to be empty.
        """
        require_no_other_scope(strategy)
        self.strategy, self.asked_for, self.steps_per_epoch = strategy, asked_for, steps_per_epoch
        self.batches_taken, self.is_lost, self.skipped_batches = 0, False, set[int]()
        self._num_workers, self._worker = collectives.num_workers(strategy), collectives.worker_index(strategy)
        self._repeat, self._may_go_back, self._reading = repeat, may_go_back, reading
        self._microbatches, self._replicas, self._is_stacked = microbatches, replicas, is_stacked
        self.has_class_weights = reading.get("map_batch") is not None
        self._read(data)

    def _read(self, data: Data) -> None:
        """Opens the data, and finds out what is known about it."""
        self.data = data
        opened = open_data(data, self._num_workers, self._worker, **self._reading)
        self._dataset, self.feed, self.gate = opened.dataset, opened.feed, opened.gate
        self.gate.keep_readings(self, self._repeat)
        self._count_batches = functools.cache(functools.partial(count_batches, self._dataset))
        if isinstance(self.feed, Feed) and self._may_go_back:
            self.feed.require_restart()
        self.depends_on_workers = opened.takes_context
        self._lay_out()
        starts_anywhere = opened.begins_anywhere and not self.info.num_missing_batches
        self._empty_batches = self._reading.get("empty_batches", "step")
        counts_all = not (isinstance(self.feed, Feed) and self._empty_batches in DROPS_EMPTY)
        self._starting_feed = self.feed if starts_anywhere else None
        if self._repeat and isinstance(self._starting_feed, Feed):
            self._starting_feed.begin_training()
        access = Access.AGAIN if self.feed is None else self.feed.access
        self.access = access if (starts_anywhere and counts_all) or access is Access.ONCE else Access.AGAIN
        self.resume = "" if self.feed is None else self.feed.resume if starts_anywhere and counts_all else READ_AGAIN
        self._seeks = counts_all and access is not Access.AGAIN  # else batches up to a position are read again
        self.against_waiting = "" if self.feed is None else self.feed.against_waiting

    def refresh(self, data: Data) -> None:
        """Copies arrays anew if they have changed in place since they were copied; the position in their order stays.

        Args:
            data: that the source was made from.
        """
        position = self.position()
        content = position.pop(CONTENT, None)
        if content is None or (arrays := as_arrays(data)) is None:
            return
        if not any(collectives.gather(self.strategy, content != content_of(tf.nest.flatten(arrays)))):
            return
        log.warning(
            "The arrays given hold other values than at the last call of fit: going on at the same position in their "
            "order, with the values of now."
        )
        self._read(data)
        self.go_to(position)

    def _lay_out(self) -> None:
        """Finds out which rows each replica computes; the next iterator begins with the first batch."""
        self.info = inspect(
            self._dataset,
            self.strategy,
            microbatches=self._microbatches,
            replicas=self._replicas,
            is_sharded=self.depends_on_workers and self._num_workers > 1,
            batch_size=None if self.feed is None else self.feed.batch_size,
        )
        layout = self.layout = self.info.layout
        self._iterator: Any = None
        self._stacks: Any = None  # of which batches are taken
        if self._is_stacked:
            xla_loop = import_part("xla.xla_loop", "jit_compile=loop")
            self._stacks = xla_loop.Stacks(self.info.element_spec, self.info.batch_size)
        self.fast_forward = FastForward(None, 0)
        self._full_pipeline: tf.data.Dataset | None = None  # from the first batch
        self._batch_size = self.layout.gather_sizes(self.strategy, self.info.batch_size or 0)[0] or None
        self.numbered = self.feed if isinstance(self.feed, NumberedDataset) and not self.layout.is_sharded else None
        if self.numbered is not None and self._num_workers > 1:
            self.numbered.read_only(WorkerRows(self._worker, self._num_workers, layout.min_rows, layout.ratios))

    def count_batches(self) -> float | None:
        """Returns the batches in one pass; counts them once where a `tf.data` dataset does not know. None: unknown."""
        if self.info.num_batches is not None or self.feed is not None:
            return self.info.num_batches  # a generator of unknown length may never end
        return self._count_batches()

    def stage_secs(self) -> dict[str, float]:
        """Returns the seconds that threads have worked on each stage of the input since its iterator began."""
        secs = pipeline_secs(self._iterator)
        return self.feed.stage_secs(secs) if isinstance(self.feed, NumberedDataset) else secs

    def require_batch(self) -> None:
        """Raises a ValueError if a dataset of unknown length has no batch, where a look at it changes nothing."""
        if self.info.num_batches is None and self.feed is None and can_be_inspected(self._dataset):
            self.first_rows()

    def first_rows(self) -> Any:
        """Returns the first batch, to build a model from.

        Raises:
            ValueError: if the data is empty.
        """
        if self.feed is not None:
            return self.feed.first_rows()
        for rows in fresh_copy(self._dataset):
            return rows
        raise ValueError(EMPTY_DATASET)

    def iterator(self) -> Any:
        """Returns the iterator, at the position where the last loop left it."""
        if self._iterator is None:
            self._iterator = self.new_iterator()
        elif self.is_lost and self.access is not Access.ONCE:  # since another `fit`
            self.go_to(self.position())
        self.fast_forward.skip()
        return self._iterator

    def new_iterator(self) -> Any:
        """Returns a new iterator at the first batch; the position in the data stays."""
        with tf.device(HOST):
            if self._stacks is not None:
                return iterate(self._stacks.dataset(self._pipeline_from_start()))
            return self._row_iterator() or iterate(self._pipeline_from_start())

    def stack(self, number: int) -> Any:
        """Returns the stack that holds a batch, by its number: the next batch, or one that was not yet taken."""
        return self._stacks.at(self.iterator(), number)

    def _row_iterator(self) -> RowIterator | None:
        """Returns an iterator over one pass of arrays in memory; None: other data, or none that ends."""
        if self._repeat or not isinstance(self._starting_feed, NumberedDataset):
            return None
        return self._starting_feed.row_iterator(self.layout.min_rows if self.layout.is_padded else 0)

    def _pipeline_from_start(self) -> tf.data.Dataset:
        """Returns the pipeline from the first batch on; tracing it takes longer than a short pass."""
        if self._full_pipeline is None or self._may_go_back:
            self._full_pipeline, _ = self._pipeline_at()
        return self._full_pipeline

    def iterator_spec(self) -> tf.TypeSpec:
        """Returns the type of `new_iterator`, to trace with."""
        rows = self._row_iterator()
        return tf.data.IteratorSpec(self._pipeline_from_start().element_spec) if rows is None else rows._type_spec

    def start_loop(self) -> int | None:
        """Takes the batches to skip here, before a loop; returns the most that it may take, None: any number."""
        while self.batches_taken in self.skipped_batches:
            if self._stacks is None:
                next(self.iterator())
            self.batches_taken += 1
        return min((b - self.batches_taken for b in self.skipped_batches if b > self.batches_taken), default=None)

    def count(self, num_batches: int, *, is_lost: bool = False) -> None:
        """Counts batches that a loop has taken; if the loop has failed, the iterator may be further, and is lost."""
        self.batches_taken += num_batches
        self.is_lost |= is_lost
        if isinstance(self.feed, Feed):
            self.feed.forget(self.batches_taken)

    def leave_out(self, batches: Iterable[int]) -> None:
        """Leaves out these batches alone, by their numbers from 0."""
        self.skipped_batches = set(batches)

    def position(self) -> Position:
        """Returns the position in the data: the number of batches taken, the batches to skip, and what they depend on.

        TensorFlow's own state of an iterator is not used: in 12 to 22 of 38 restores, later epochs had another order.
        """
        position: Position = {"batches": self.batches_taken, "skipped": sorted(self.skipped_batches)}
        position |= self._facts(position)
        # A worker that reads its own shard has a state of its own, and the checkpoint is the chief's.
        if self.access is Access.SEEKS and isinstance(self.feed, Feed) and not self.layout.is_sharded:
            state = self.feed.state_at(self.batches_taken)
            position |= {} if state is None else {"state": state}
        return position

    def go_to(self, position: Position) -> None:
        """Reads the same data up to a position, on any number of replicas."""
        position = self.convert(position)
        self._may_go_back |= self._iterator is not None
        self.batches_taken = taken = position["batches"]
        if taken and self._iterator is None and isinstance(self.feed, Feed) and "state" not in position:
            self.feed.require_first_run()
        self.is_lost, self.skipped_batches = False, set(position["skipped"])
        self.gate.end()
        with tf.device(HOST):
            pipeline, num_to_skip = self._pipeline_at(taken, position.get("state"))
            if self._stacks is not None:
                self._stacks.begin(taken)
                pipeline = self._stacks.dataset(pipeline, num_to_skip)
                num_to_skip //= self._stacks.size
            self._iterator = iterate(pipeline)
        self.fast_forward = FastForward(self._iterator, num_to_skip)

    def convert(self, position: Position) -> Position:
        """Returns a position in the same data, if that had other batches, in batches of now."""
        if self.numbered is None and isinstance(self.feed, NumberedDataset):  # of its shards the batches alone count
            position = {name: value for name, value in position.items() if name != "order"}
        convert = convert_batches if self.numbered is None or "workers" in position else self.numbered.convert
        converted = convert(position, self._facts(position))
        return {**converted, **self._facts(converted)}

    def examples_of(self, batch: int) -> np.ndarray | None:
        """Returns the numbers of the examples in a batch, `[b]`, given its number over all epochs; None: no numbers."""
        return None if self.numbered is None else self.numbered.examples_of(batch)[0]

    @property
    def can_be_read_again(self) -> bool:
        """Whether the data gives a batch again: it is not read once, and has no state that changes with each epoch."""
        return not isinstance(self.feed, Feed) or self.feed.access is Access.AGAIN

    def read_again(self, batch: int) -> Iterator[Any]:
        """Yields the rows of some batches that were trained on, and of the one with a number over all epochs at last.

        Data by number begins with the batch before it, other data with its first batch. Data that cannot be read again
        yields nothing.
        """
        first = max(0, batch - 1) if isinstance(self.feed, NumberedDataset) else 0
        if not self.can_be_read_again:
            return
        self._may_go_back = True
        self.is_lost |= isinstance(self.feed, Feed)  # whose gate is that of this reading, too
        pipeline, _ = self._pipeline_at(first)
        for number, element in enumerate(itertools.islice(iterate(pipeline), batch + 1 - first), first):
            if number == batch or number not in self.skipped_batches:
                yield element[0] if self.layout.is_padded else element

    def _facts(self, position: Mapping[str, Any]) -> dict[str, Any]:
        """Returns what a position depends on, for JSON; the same on all workers, as the checkpoint is the chief's."""
        if self.numbered is not None:
            return self.numbered.facts_at(position)
        num_workers = self._num_workers if self.depends_on_workers else None
        return facts_of(num_batches=self.info.num_batches, batch_size=self._batch_size, num_workers=num_workers)

    def _pipeline_at(self, first: int = 0, state: Any = None) -> tuple[tf.data.Dataset, int]:
        """Returns all that training needs from a batch or an earlier one on, and the number of batches between them."""
        with tf.device(HOST):
            if (feed := self._starting_feed) is not None:
                begin, state, to_skip = (first, state, 0) if self._seeks else (0, None, first)
                dataset = feed.dataset(begin, state, repeat=self._repeat)
                dataset = with_empty_batches(dataset, self._empty_batches) if isinstance(feed, Feed) else dataset
                are_alike = isinstance(feed, NumberedDataset) and feed.are_rows_alike
                return _prepared(dataset, self.info, dataset.options(), repeat=False, are_alike=are_alike), to_skip
            dataset = fresh_copy(self._dataset) if self._may_go_back else self._dataset
            are_alike, options = are_rows_alike(dataset), self._dataset.options()
            return _prepared(dataset, self.info, options, repeat=self._repeat, are_alike=are_alike), first


@dataclasses.dataclass(eq=False)
class Passes:
    """The sources of the latest datasets that were read in passes.

    Attributes:
        strategy: whose replicas split each batch.
        reading: how each is read, as arguments of `Source`.
    """

    strategy: tf.distribute.Strategy
    reading: Mapping[str, Any]
    _sources: list[Source] = dataclasses.field(default_factory=list, init=False)  # the latest first

    def source(self, data: Data, limit: int = 0, *, may_be_endless: bool = False) -> Source:
        """Returns the source of a dataset: a new one, unless the same object is among the latest.

        Args:
            data: a dataset, a function of `tf.distribute.InputContext`, or arrays.
            limit: the largest number of batches of a pass; 0: all.
            may_be_endless: whether the caller ends a pass over endless data itself.

        Raises:
            ValueError: if the data breaks a rule, is endless and may not be, or a pass would not have every row once.
        """
        source = next((s for s in self._sources if s.data is data), None)
        source = source or Source(data, self.strategy, repeat=False, **self.reading)
        if isinstance(source.feed, Feed):
            source.feed.require_untrained()
        if isinstance(source.feed, NumberedDataset):
            source.feed.order.require_pass(limit)
        if source.info.is_endless and not (limit or may_be_endless):
            raise ValueError("The dataset given to measure on is endless; one pass never ends: use take(batches).")
        if not are_arrays(data):  # a copy of arrays is as large as they are, and they may change in place
            self._sources = [source, *(s for s in self._sources if s is not source)][:_MAX_REMEMBERED]
        return source


def _prepared(
    dataset: tf.data.Dataset, info: DataInfo, user_options: tf.data.Options, *, repeat: bool, are_alike: bool = False
) -> tf.data.Dataset:
    """Returns a dataset checked, padded, repeated and prefetched; with threads of its own unless the user set some."""
    spec, num_missing, min_rows = info.element_spec, info.num_missing_batches, info.layout.min_rows
    if not are_alike and len(tf.nest.flatten(spec)) > 1 and static_batch_size(spec) is None:
        dataset = dataset.map(_do_not_convert(lambda *batch: check_rows(pack_element(batch, spec))))
    if info.layout.is_padded:
        dataset = dataset.map(_do_not_convert(lambda *batch: pad(pack_element(batch, spec), min_rows)[:2]))
    if num_missing:  # in the last steps of the longer shards, this worker has rows that do not count
        rows, _ = next(iterate(dataset))
        dataset = dataset.concatenate(tf.data.Dataset.from_tensors((rows, tf.constant(0))).repeat(num_missing))
    options = tf.data.Options()
    if user_options.threading.private_threadpool_size is None:
        options.threading.private_threadpool_size = environment.count_cores()
    return (dataset.repeat() if repeat else dataset).prefetch(tf.data.AUTOTUNE).with_options(options)

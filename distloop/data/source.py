"""A user's data with a place in it: repeated, padded, and read again up to the place where a run stopped.

    source = Source(dataset, strategy, microbatches=1)
    batch = next_batch(source.iterator(), source.layout)

One iterator on the host gives the global batches. Each replica slices its rows by its own id (`shards.take_shard`), so
the rows keep their order on any number of replicas. It does not know what a step does with a batch.
"""

import functools
from collections.abc import Callable, Iterable, Mapping
from inspect import signature
from typing import Any, NamedTuple, TypeAlias

import keras
import tensorflow as tf

from distloop.data.arrays import Arrays, as_dataset, convert_position, sizes_of
from distloop.data.copies import fresh_copy
from distloop.data.feeds import Feed, make_feed
from distloop.data.info import count_batches, inspect
from distloop.data.iterators import iterate
from distloop.data.readers import READ_AGAIN
from distloop.data.shards import check_rows, pad, static_batch_size
from distloop.distributed import cores, workers
from distloop.distributed.devices import HOST
from distloop.errors import EMPTY_DATASET

Data: TypeAlias = (
    tf.data.Dataset
    | Callable[[tf.distribute.InputContext], tf.data.Dataset]
    | Callable[[], tf.data.Dataset]
    | tf.distribute.DistributedDataset
    | Arrays
    | keras.utils.PyDataset
    | Iterable[Any]  # of batches: a generator, a Grain dataset, a DataLoader
    | Callable[[], Iterable[Any]]
)


class Source:
    """A user's data, one iterator over it, and the number of batches taken from it.

    Attributes:
        data: the object that the user gave, to recognize it.
        info: what is known about the data.
        layout: what tracing needs to know about the batches.
        batches_taken: how many batches the iterator has given since the first one.
        skipped_batches: the numbers, from 0, of batches to leave out of training.
        asked_for: the arguments of `fit` that it serves, to recognize them.
        resume: how a resumed run gets to its place in batches that Python makes; empty for other data.
        seeks: whether it does so without reading the batches before its place.
    """

    def __init__(
        self,
        data: Data,
        strategy: tf.distribute.Strategy,
        *,
        microbatches: int = 1,
        repeat: bool = True,
        may_go_back: bool = False,
        limit: int = 0,
        is_cached: bool = False,
        batch_size: int = 1,
        shuffle_seed: int | None = None,
        steps_per_epoch: int | None = None,
        map_batch: Callable[..., Any] | None = None,
        asked_for: tuple[Any, ...] = (),
    ):
        """Checks the data; reads it only to count the batches of a worker's shard. All workers call it.

        Args:
            data: a dataset of global batches; a function that returns one; a function of `WorkerContext` that returns
                one worker's shard; a `DistributedDataset` that `strategy` made; or NumPy arrays.
            strategy: whose replicas share out each batch.
            microbatches: the parts in which a replica computes its rows.
            repeat: whether finite data starts again at its end.
            may_go_back: whether a position may be restored after the data was read. The dataset is copied then, so
                that it is shuffled alike each time.
            limit: the most batches in a pass; 0: all.
            is_cached: whether each pass repeats the batches of the first one.
            batch_size: of arrays, the examples in a global batch.
            shuffle_seed: of arrays, the seed of the order, which changes each epoch; None: the order given.
            steps_per_epoch: the batches of an epoch; None: those of a pass.
            map_batch: changes each batch, as `Dataset.map` does; None: nothing does.
            asked_for: the arguments of `fit` that it serves, to recognize them.

        Raises:
            ValueError: if `data` is none of these, is not batched, or is known to be empty.
        """
        self.data = data
        self.batches_taken = 0
        self.skipped_batches: set[int] = set()
        self.asked_for = asked_for
        self._strategy = strategy
        self._repeat = repeat
        self._steps_per_epoch = steps_per_epoch
        num_workers = workers.num_workers(strategy)
        dataset = as_dataset(data, batch_size, shuffle_seed)
        reading: dict[str, Any] = {"repeat": repeat, "shuffle_seed": shuffle_seed, "map_batch": map_batch}
        dataset, feed, takes_context = open_data(dataset, num_workers, workers.worker_index(strategy), **reading)
        if feed is not None and may_go_back:
            feed.require_restart()
        is_sharded = takes_context and num_workers > 1
        is_split = isinstance(dataset, tf.distribute.DistributedDataset)
        if limit and is_split:
            raise ValueError(
                f"A pass of {limit} batches was asked for (limit_train_batches or overfit_batches), but the data given "
                "is a DistributedDataset, which TensorFlow has split already: give the plain dataset, or call take() "
                "on it before it is distributed."
            )
        if limit:
            dataset = dataset.take(limit)
        self._dataset = dataset.cache() if is_cached else dataset
        self._may_go_back = may_go_back and not is_split
        rows = None if feed is None else feed.batch_size
        self._inspect = functools.partial(inspect, self._dataset, strategy, is_sharded=is_sharded, batch_size=rows)
        self.set_microbatches(microbatches)
        self._sizes = {} if limit else sizes_of(data, batch_size)
        self._feed = feed
        self._begins_anywhere = feed is not None and not (limit or is_cached or self.info.num_missing_batches)
        self.seeks = self._begins_anywhere and feed is not None and feed.seeks
        self.resume = "" if feed is None else feed.resume if self._begins_anywhere else READ_AGAIN
        if feed is not None:
            feed.oldest_place = lambda: self.batches_taken

    def set_microbatches(self, microbatches: int) -> None:
        """Sets the parts in which a replica computes its rows; the next iterator begins with the first batch."""
        self.info = self._inspect(microbatches=microbatches)
        self.layout = self.info.layout
        self._iterator: Any = None
        self._whole_pipeline: tf.data.Dataset | None = None  # from the first batch

    def describe(self) -> str:
        """Returns a sentence about what this worker reads and which part of it its replicas take."""
        index, local = workers.worker_index(self._strategy), workers.num_local_replicas(self._strategy)
        worker = f"worker {index} of {workers.num_workers(self._strategy)}"
        if self.layout.is_sharded:
            batches = "endless batches" if self.info.is_endless else f"{self.info.num_batches} batches a pass"
            missing = self.info.num_missing_batches
            fillers = f", {missing} of them without examples, as other shards are longer" if missing else ""
            return f"{worker} reads its own shard, {batches}{fillers}."
        if self.layout.is_split:
            return f"{worker} reads its part of TensorFlow's DistributedDataset."
        first, last = index * local, (index + 1) * local - 1
        shards = f"shard {first}" if local == 1 else f"shards {first} to {last}"
        replicas = self._strategy.num_replicas_in_sync
        return f"{worker} reads every batch and trains on {shards} of {replicas} of its rows."

    def batches_per_epoch(self) -> int:
        """Returns the number of batches in one pass; reads a `tf.data` dataset of unknown length to count them.

        Raises:
            ValueError: if the data is endless or empty.
        """
        if self._steps_per_epoch is not None:
            return self._steps_per_epoch
        num_batches = self.info.num_batches
        if num_batches is None and not self.layout.is_split and self._feed is None:  # a generator may never end
            num_batches = count_batches(self._dataset)
            if not num_batches:
                raise ValueError(EMPTY_DATASET)
        if num_batches is None or self.info.is_endless:
            raise ValueError(
                "epochs were given, but the dataset is endless or of unknown length, so an epoch has no end: "
                "give steps instead, or steps_per_epoch."
            )
        return int(num_batches)

    def examples_per_step(self) -> int:
        """Returns the number of examples in a whole batch, over all workers; all of them call it.

        Raises:
            ValueError: if it is not known before the data is read.
        """
        size = self.info.batch_size or 0
        sizes = workers.gather(self._strategy, float(size)) if self.layout.is_sharded else [size]
        if not all(sizes):
            raise ValueError(
                "A duration in examples was given, but the dataset's batch size is not known before it is read: call "
                ".batch(batch_size) on the dataset last, or give steps."
            )
        return int(sum(sizes))

    def first_rows(self) -> Any:
        """Returns the first batch, to build a model from; if TensorFlow has split it, the first replica's part.

        Raises:
            ValueError: if the data is empty.
        """
        if self._feed is not None:
            return self._feed.first_rows()
        for rows in self._dataset:
            return tf.nest.map_structure(lambda t: getattr(t, "values", (t,))[0] if self.layout.is_split else t, rows)
        raise ValueError(EMPTY_DATASET)

    def iterator(self) -> Any:
        """Returns the iterator, at the place where the last loop left it."""
        if self._iterator is None:
            self._iterator = self.new_iterator()
        return self._iterator

    def new_iterator(self) -> Any:
        """Returns a new iterator at the first batch; the place in the data stays."""
        if self.layout.is_split:
            return iterate(self._dataset)
        with tf.device(HOST):
            if self._whole_pipeline is None or self._may_go_back:  # tracing it takes longer than a short pass
                self._whole_pipeline = self._pipeline()
            return iterate(self._whole_pipeline)

    def start_loop(self) -> int | None:
        """Takes the batches to skip at this place, before a loop starts.

        Returns:
            The most batches that the loop may take; None: any number.
        """
        left = self._left_of_pass()
        while self.batches_taken in self.skipped_batches:
            next(self.iterator())
            self.batches_taken += 1
            left = self._left_of_pass()
        ahead = [batch - self.batches_taken for batch in self.skipped_batches if batch > self.batches_taken]
        return min([*ahead, *([] if left is None else [left])], default=None)

    def save_position(self) -> dict[str, Any]:
        """Returns the place in the data for JSON: the number of batches taken and the batches to skip.

        TensorFlow's own state of an iterator is not used: if a pipeline prefetches and shuffles each epoch anew, later
        epochs came in another order in 12 to 22 of 38 restores.
        """
        position = {"batches": self.batches_taken, "skipped": sorted(self.skipped_batches), **self._sizes}
        # A worker that reads its own shard has a state of its own, and the checkpoint is the chief's.
        if self._feed is not None and self.seeks and not self.layout.is_sharded:
            state = self._feed.state_at(self.batches_taken)
            position |= {} if state is None else {"state": state}
        return position

    def restore_position(self, position: Mapping[str, Any]) -> None:
        """Reads the same data up to the place of `save_position`, on any number of replicas."""
        position = convert_position(position, **self._sizes)
        self._may_go_back |= self._iterator is not None and not self.layout.is_split
        self.batches_taken = position["batches"]
        self.skipped_batches = set(position["skipped"])
        if self.layout.is_split:
            left = self._left_of_pass()
            self._iterator = iterate(self._dataset)
            for _ in range(self.batches_taken if left is None else int(self.info.num_batches or 0) - left):
                next(self._iterator)
            return
        with tf.device(HOST):
            self._iterator = iterate(self._pipeline(self.batches_taken, position.get("state")))

    def _pipeline(self, skip: int = 0, state: Any = None) -> tf.data.Dataset:
        """Returns the dataset with all that training needs: checked, padded, repeated, prefetched."""
        spec, num_missing = self.info.element_spec, self.info.num_missing_batches
        if (feed := self._feed if self._begins_anywhere else None) is not None:
            dataset = feed.dataset(skip, state)
        else:
            dataset = fresh_copy(self._dataset) if self._may_go_back else self._dataset
        do_not_convert = tf.autograph.experimental.do_not_convert  # AutoGraph would write a file for each function
        if len(tf.nest.flatten(spec)) > 1 and static_batch_size(spec) is None:
            dataset = dataset.map(do_not_convert(lambda *batch: check_rows(_pack_element(batch, spec))))
        if self.layout.is_padded:
            dataset = dataset.map(do_not_convert(lambda *batch: pad(_pack_element(batch, spec), self.info.min_rows)))
        if num_missing:  # in the last steps of the longer shards, this worker has rows that do not count
            filler = next(iterate(dataset))._replace(size=tf.constant(0))
            dataset = dataset.concatenate(tf.data.Dataset.from_tensors(filler).repeat(num_missing))
        if self._repeat and feed is None:
            dataset = dataset.repeat()
        if skip and feed is None:
            dataset = dataset.skip(skip)
        return _with_private_threads(dataset.prefetch(tf.data.AUTOTUNE), self._dataset.options())

    def _left_of_pass(self) -> int | None:
        """Returns the batches left of a pass over a DistributedDataset, which cannot be repeated within a loop."""
        if not self.layout.is_split or self.info.is_endless:
            return None
        if self.info.num_batches is None:
            raise ValueError(
                "The DistributedDataset given does not know its length; distloop has to, to start it again at its end: "
                "give the plain dataset, which distloop splits itself, or call repeat() before it is distributed."
            )
        num_batches = int(self.info.num_batches)
        left = num_batches - self.batches_taken % num_batches
        if left == num_batches:
            self._iterator = None
        return left


class WorkerContext(tf.distribute.InputContext):
    """What an input function is told about its worker.

    One dataset serves all replicas of a worker, so each worker counts as one replica: what a function for
    `distribute_datasets_from_function` computes for a replica, by `get_per_replica_batch_size` or by hand, is then the
    worker's part of a global batch.
    """

    def __init__(self, num_workers: int, worker: int):
        """Describes one of several workers, by its index."""
        super().__init__(num_workers, worker, num_replicas_in_sync=num_workers)

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """Returns the examples of a global batch that this worker reads.

        Raises:
            ValueError: if the workers cannot read equal parts.
        """
        if global_batch_size % self.num_input_pipelines:
            raise ValueError(
                f"get_per_replica_batch_size({global_batch_size}) was called on {self.num_input_pipelines} workers, "
                "which cannot read equal parts of such a batch: give a multiple of their number."
            )
        return int(global_batch_size // self.num_input_pipelines)


class OpenedData(NamedTuple):
    """A user's data, opened by a worker."""

    dataset: Any  # of one pass
    feed: Feed | None  # that gives the dataset, if Python makes the batches
    takes_context: bool  # whether it was made by a function of a `WorkerContext`


def open_data(
    data: Any,
    num_workers: int,
    worker: int,
    *,
    repeat: bool = False,
    shuffle_seed: int | None = None,
    map_batch: Callable[..., Any] | None = None,
) -> OpenedData:
    """Opens a dataset, or batches that Python makes, which a function may make for a worker.

    Args:
        data: what the user gave, arrays excepted.
        num_workers: of the run.
        worker: the index of this one.
        repeat: whether a feed starts again at the end of the data.
        shuffle_seed: of the order of a `PyDataset`'s batches; None: by their numbers.
        map_batch: changes each batch, as `Dataset.map` does; None: nothing does.

    Raises:
        ValueError: if it is neither.
    """
    takes_context, make = False, None
    if callable(data) and not isinstance(data, (tf.data.Dataset, keras.utils.PyDataset)):
        takes_context = _takes_argument(data)
        make = functools.partial(data, WorkerContext(num_workers, worker)) if takes_context else data
        data = make()
    map_batch = map_batch and tf.autograph.experimental.do_not_convert(map_batch)
    feed = make_feed(data, repeat=repeat, shuffle_seed=shuffle_seed, make_again=make, map_batch=map_batch)
    if feed is not None:
        one_pass = feed.one_pass(is_endless_if_unknown=takes_context and num_workers > 1)  # shards may differ in length
        return OpenedData(one_pass, feed, takes_context)
    if not isinstance(data, (tf.data.Dataset, tf.distribute.DistributedDataset)):
        raise ValueError(
            f"The data given is a {type(data).__name__}; distloop takes a tf.data.Dataset of global batches, a "
            "function of tf.distribute.InputContext that returns one, NumPy arrays, [N, ...], alone or in a dict, "
            "tuple or list, or batches from a PyDataset, a generator, a Grain dataset or a DataLoader: turn lists of "
            "numbers into arrays with np.asarray, or make a dataset with distloop.make_dataset(arrays, batch_size)."
        )
    return OpenedData(data if map_batch is None else data.map(map_batch), None, takes_context)


def _takes_argument(fn: Callable[..., Any]) -> bool:
    """Returns whether a function may be called with one argument."""
    try:
        signature(fn).bind(None)
    except TypeError:
        return False
    except ValueError:  # Python does not know the signatures of some functions of C
        return True
    return True


def _with_private_threads(dataset: tf.data.Dataset, user_options: tf.data.Options) -> tf.data.Dataset:
    """Returns the pipeline with a thread pool of its own, unless the user has set one."""
    options = tf.data.Options()
    if user_options.threading.private_threadpool_size is None:
        options.threading.private_threadpool_size = cores.count()
    return dataset.with_options(options)


def _pack_element(arguments: tuple[Any, ...], spec: Any) -> Any:
    """Returns a dataset's element from the arguments over which `Dataset.map` has spread it."""
    return arguments if isinstance(spec, tuple) and not hasattr(spec, "_fields") else arguments[0]

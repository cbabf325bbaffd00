"""A user's dataset with a place in it: repeated, padded, and started again where a run stopped.

A `Source` has one iterator on the host, whose global batches every replica slices by its own id, so rows keep their
order on any number of replicas:

    source = Source(dataset, strategy, microbatches=1)
    batch = next_batch(source.iterator(), source.layout)
"""

import itertools
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf
from absl import logging

from distloop.data.arrays import Arrays, as_dataset
from distloop.data.copies import fresh_copy
from distloop.data.info import batch_size_told, cardinality, require_batched
from distloop.data.iterators import iterate
from distloop.data.shards import Layout, check_rows, pad, static_batch_size
from distloop.distributed import cores, strategies, workers
from distloop.distributed.devices import HOST
from distloop.errors import EMPTY_DATASET

Data: TypeAlias = (
    tf.data.Dataset
    | Callable[[tf.distribute.InputContext], tf.data.Dataset]
    | tf.distribute.DistributedDataset
    | Arrays
)


class Source:
    """Data of the user, repeated or not, with one iterator and the number of batches it gave."""

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
    ):
        """Checks the data and plans the pipeline; reads nothing yet.

        Args:
            data: a dataset of global batches; a function of `tf.distribute.InputContext` that returns one worker's
                share; or a `DistributedDataset` that `strategy` made.
            strategy: who takes part.
            microbatches: into how many parts a replica cuts its share.
            repeat: whether finite data starts again at its end.
            may_go_back: whether a position is to be restored after the data was read; it is copied then, so that each
                time it is shuffled alike.
            limit: how many batches a pass has at most; 0: all.
            is_cached: whether each pass gives the batches of the first one again.
            batch_size: of arrays, the examples in a global batch.
            shuffle_seed: of arrays, the seed of the order, which changes each epoch; None: the order given.

        Raises:
            ValueError: if `data` is none of these, is not batched, or is known to be empty.
        """
        self.data = data  # what the user gave, to know it again
        self.batches_taken = 0
        self.skipped_batches: set[int] = set()  # numbers, from 0, of those that nobody trains on
        self._microbatches = microbatches
        self._repeat = repeat
        self._iterator: Any = None
        self._whole: tf.data.Dataset | None = None  # the pipeline from the beginning, once it was built
        data = as_dataset(data, batch_size, shuffle_seed)
        is_sharded = False
        if callable(data) and not isinstance(data, tf.data.Dataset):
            num_workers, index = workers.num_workers(strategy), workers.worker_index(strategy)
            data = data(tf.distribute.InputContext(num_workers, index, strategy.num_replicas_in_sync))
            is_sharded = num_workers > 1
        is_split = isinstance(data, tf.distribute.DistributedDataset)
        if not isinstance(data, tf.data.Dataset) and not is_split:
            raise ValueError(
                f"The data given is a {type(data).__name__}; distloop takes a tf.data.Dataset of global batches, a "
                "function of tf.distribute.InputContext that returns one, or NumPy arrays, [N, ...], alone or in a "
                "dict, tuple or list: turn lists of numbers into arrays with np.asarray, or make a dataset with "
                "distloop.make_dataset(arrays, batch_size)."
            )
        if limit and is_split:
            raise ValueError(
                f"A pass of {limit} batches was asked for (limit_train_batches or overfit_batches), but the data given "
                "is a DistributedDataset, which TensorFlow has split already: give the plain dataset, or call take() "
                "on it before it is distributed."
            )
        if limit:
            data = data.take(limit)
        if is_cached:
            data = data.cache()
        self._dataset = data
        self._may_go_back = may_go_back and not is_split
        self.element_spec = data.element_spec
        if not is_split:
            require_batched(self.element_spec)
        length = cardinality(data)
        if length == 0:
            raise ValueError(EMPTY_DATASET)
        self.is_endless = length == np.inf
        replicas = workers.num_local_replicas(strategy) if is_sharded else strategy.num_replicas_in_sync
        self._least = replicas * microbatches  # rows, so that every microbatch has one
        static = static_batch_size(self.element_spec) if not is_split else None
        is_padded = not is_split and self._least > 1 and (static is None or static < self._least)
        self._share_length, self._missing = None, 0
        self._strategy = strategy
        if is_sharded:
            self._share_length, self._missing, is_padded = self._agree_on_length(strategy, is_padded)
        self.layout = Layout(is_split, is_padded, is_sharded)
        self.layout = self.layout._replace(most_rows=self._most_rows())

    def describe(self) -> str:
        """Says what this worker reads and which part of it its replicas take."""
        num_workers, index = workers.num_workers(self._strategy), workers.worker_index(self._strategy)
        local, replicas = workers.num_local_replicas(self._strategy), self._strategy.num_replicas_in_sync
        worker = f"worker {index} of {num_workers}"
        if self.layout.is_sharded:
            batches = "endless batches" if self._share_length is None else f"{self._share_length} batches a pass"
            lacking = f", {self._missing} of which are other workers' alone" if self._missing else ""
            return f"{worker} reads its own share, {batches}{lacking}."
        if self.layout.is_split:
            return f"{worker} reads what TensorFlow's DistributedDataset gives it."
        first, last = index * local, (index + 1) * local - 1
        which = f"share {first}" if local == 1 else f"shares {first} to {last}"
        return f"{worker} reads every batch and trains on {which} of {replicas} of its rows."

    def split(self) -> tuple[int, list[int]] | None:
        """Finds the size of a whole batch, and how many of its rows each replica takes; of a share, this worker's.

        Returns:
            None where the dataset does not tell, and where TensorFlow splits it.
        """
        batch_size = None if self.layout.is_split else batch_size_told(self._dataset)
        if batch_size is None:
            return None
        replicas = self._strategy.num_replicas_in_sync
        if self.layout.is_sharded:
            replicas = workers.num_local_replicas(self._strategy)
        rows = max(batch_size, self._least)  # those that pad it come last, and do not count
        ends = [min(batch_size, replica * rows // replicas) for replica in range(replicas + 1)]
        return batch_size, [end - start for start, end in itertools.pairwise(ends)]

    def _most_rows(self) -> int | None:
        """Finds how many rows a replica takes at most, on any worker.

        Returns:
            None where the dataset does not tell, and where nobody asks, for each number is a trace of its own.
        """
        if not strategies.uses_collectives(self._strategy):
            return None
        split = self.split()
        most = 0 if split is None else max(split[1])
        if self.layout.is_sharded:
            each = workers.gather(self._strategy, most)
            most = 0 if 0 in each else int(each.max())
        return most or None

    def _agree_on_length(self, strategy: tf.distribute.Strategy, is_padded: bool) -> tuple[int | None, int, bool]:
        """Compares the shares of all workers.

        Returns:
            The batches of the longest (None: endless), how many this one lacks, and whether any is padded.
        """
        own = -1.0 if self.is_endless else self._count_batches()
        lengths = workers.gather(strategy, own)
        if lengths.min() < 0 < lengths.max():
            raise ValueError(
                f"The function of InputContext gave shares of {lengths.tolist()} batches, where -1 is endless; the "
                "workers' shares are all endless or all finite: call repeat() on all of them or on none."
            )
        if 0 in lengths:
            raise ValueError(
                f"The function of InputContext gave shares of {lengths.astype(int).tolist()} batches; every worker "
                "needs one batch at least: shard by examples, or make as many files as there are workers."
            )
        is_padded = bool(workers.gather(strategy, is_padded).any() or lengths.min() < lengths.max())
        return (None if own < 0 else int(lengths.max())), int(lengths.max() - own), is_padded

    def _count_batches(self) -> int:
        length = cardinality(self._dataset)
        if length is None:
            logging.info("The dataset does not know its length: reading it once to count its batches.")
            length = int(self._dataset.reduce(np.int64(0), lambda count, *_: count + 1))
        return int(length)

    def iterator(self) -> Any:
        """Gives the iterator, at the place where the last loop left it."""
        if self._iterator is None:
            self._iterator = self.new_iterator()
        return self._iterator

    def new_iterator(self) -> Any:
        """Makes an iterator at the data's beginning."""
        if self.layout.is_split:
            return iterate(self._dataset)
        with tf.device(HOST):
            if self._whole is None or self._may_go_back:  # tracing its functions takes longer than a short pass
                self._whole = self._pipeline()
            return iterate(self._whole)

    def save_position(self) -> dict[str, Any]:
        """Returns the place of the iterator, as JSON can hold it: the number of batches taken, and those to skip.

        TensorFlow's own state of an iterator is no alternative: where a pipeline prefetches and shuffles each epoch
        anew, later epochs came in another order in 12 to 22 of 38 restores.
        """
        return {"batches": self.batches_taken, "skipped": sorted(self.skipped_batches)}

    def restore_position(self, position: Mapping[str, Any]) -> None:
        """Goes to where `save_position` was called, in the same data, on any number of replicas."""
        self._may_go_back |= self._iterator is not None and not self.layout.is_split
        self.batches_taken = position["batches"]
        self.skipped_batches = set(position["skipped"])
        if self.batches_taken:
            logging.info("Reading the dataset up to batch %d.", self.batches_taken)
        if self.layout.is_split:
            left = self._left_of_pass()
            self._iterator = iterate(self._dataset)
            for _ in range(self.batches_taken if left is None else int(cardinality(self._dataset) or 0) - left):
                next(self._iterator)
            return
        with tf.device(HOST):
            self._iterator = iterate(self._pipeline(skip=self.batches_taken))

    def _pipeline(self, skip: int = 0) -> tf.data.Dataset:
        dataset = fresh_copy(self._dataset) if self._may_go_back else self._dataset
        if len(tf.nest.flatten(self.element_spec)) > 1 and static_batch_size(self.element_spec) is None:
            dataset = dataset.map(lambda *batch: check_rows(_undo_unpacking(batch, self.element_spec)))
        if self.layout.is_padded:
            dataset = dataset.map(lambda *batch: pad(_undo_unpacking(batch, self.element_spec), self._least))
        if self._missing:  # other workers have more: their last steps see rows of this one that do not count
            filler = next(iterate(dataset))._replace(size=tf.constant(0))
            dataset = dataset.concatenate(tf.data.Dataset.from_tensors(filler).repeat(self._missing))
        if self._repeat:
            dataset = dataset.repeat()
        if skip:
            dataset = dataset.skip(skip)
        return _own_threads(dataset.prefetch(tf.data.AUTOTUNE), self._dataset.options())

    def first_rows(self) -> Any:
        """Reads the first batch, for a model that does not know its input shapes; of a split one, the first part.

        Raises:
            ValueError: if the data is empty.
        """
        for element in self._dataset:
            return tf.nest.map_structure(
                lambda t: getattr(t, "values", (t,))[0] if self.layout.is_split else t, element
            )
        raise ValueError(EMPTY_DATASET)

    def start_loop(self) -> int | None:
        """Makes ready for a loop: drops the batches to skip that stand here.

        Returns:
            How many batches the loop may take at most; None: any number.
        """
        left = self._left_of_pass()
        while self.batches_taken in self.skipped_batches:
            next(self.iterator())
            self.batches_taken += 1
            left = self._left_of_pass()
        ahead = [batch - self.batches_taken for batch in self.skipped_batches if batch > self.batches_taken]
        return min([*ahead, *([] if left is None else [left])], default=None)

    def _left_of_pass(self) -> int | None:
        """Counts what is left of a pass over what TensorFlow has split, which cannot be repeated within a loop."""
        if not self.layout.is_split:
            return None
        length = cardinality(self._dataset)
        if length is None:
            raise ValueError(
                "The DistributedDataset given does not know its length; distloop has to, to start it again at its end: "
                "give the plain dataset, which distloop splits itself, or call repeat() before it is distributed."
            )
        if length == np.inf:
            return None
        left = int(length) - self.batches_taken % int(length)
        if left == length:
            self._iterator = None
        return left

    def batches_per_epoch(self) -> int:
        """Counts the batches of one pass, by reading it where the dataset does not know.

        Raises:
            ValueError: if it is endless.
        """
        length = cardinality(self._dataset) if self._share_length is None else self._share_length
        if length is None and not self.layout.is_split:
            length = self._count_batches()
            if not length:
                raise ValueError(EMPTY_DATASET)
        if length is None or length == np.inf:
            raise ValueError(
                "epochs were given, but the dataset is endless or of unknown length, so an epoch has no end: "
                "give steps instead."
            )
        return int(length)


def _own_threads(dataset: tf.data.Dataset, options_given: tf.data.Options) -> tf.data.Dataset:
    """Gives a pipeline a thread pool of its own, unless the user did."""
    options = tf.data.Options()
    if options_given.threading.private_threadpool_size is None:
        options.threading.private_threadpool_size = cores.count()
    return dataset.with_options(options)


def _undo_unpacking(batch: tuple[Any, ...], spec: Any) -> Any:
    """`Dataset.map` spreads tuples over arguments; this gives back what the element was."""
    return batch if isinstance(spec, tuple) and not hasattr(spec, "_fields") else batch[0]

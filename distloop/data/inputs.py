"""Owns the way from datasets to each replica's share: repeat, pad, slice, count.

A `Source` is a user's data with a place in it. Its global batches come from an iterator on the host, and each replica
slices its rows by its id, so rows keep their order on any number of replicas:

    source = Source(dataset, strategy, microbatches=1)
    batch = next_batch(iterator, source.layout)               # in the compiled loop, on the host
    rows, row_weights = take_share(batch, source.layout)      # on each replica

Replica r of R takes the rows from `r * B // R` up to `(r + 1) * B // R`: as even as whole rows allow, and nothing is
added, so that a BatchNormalization that is synchronized sees the same rows on any number of replicas. Only a batch too
small to give every replica and microbatch a row is padded, with its own rows and weight 0.
"""

import contextlib
import itertools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import tensorflow as tf
from absl import logging

from distloop.data.iterators import iterate
from distloop.distributed import cluster, cores
from distloop.distributed.cluster import HOST
from distloop.errors import USER_ERROR, require

Data: TypeAlias = (
    tf.data.Dataset | Callable[[tf.distribute.InputContext], tf.data.Dataset] | tf.distribute.DistributedDataset
)

ITERATOR = "input/iterator"  # the name of its state in a checkpoint
_IGNORE_EXTERNAL_STATE, _FAIL_ON_EXTERNAL_STATE = 1, 2  # tf.data's policies; 0 warns
_SEEDS_INPUT = {"ShuffleDatasetV3": 4, "ShuffleAndRepeatDatasetV2": 5}  # which input is the stream of seeds

# What may stand behind `batch`; a function that is mapped over batches is taken to keep their rows.
_KEEP_BATCHES = frozenset(
    f"{name}Dataset"
    for name in "Map ParallelMap Prefetch Repeat Shuffle Skip Take Shard Cache Options Filter AssertCardinality".split()
)

_EMPTY = "The dataset given is empty; distloop needs one batch at least: check its files or filter."


class Batch(NamedTuple):
    """A global batch, or a value per replica of one that TensorFlow has split already."""

    rows: Any  # the user's structure, tensors [B, ...]
    size: tf.Tensor | None  # []: how many rows count; None: all of them


class Layout(NamedTuple):
    """What must be known while tracing about the elements of an iterator."""

    is_split: bool  # whether TensorFlow has split each batch into a value per replica
    is_padded: bool  # whether elements are pairs of rows and how many of them count
    is_share: bool = False  # whether each worker has rows of its own
    most_rows: int | None = None  # of a replica's share, where the dataset tells; for collectives


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
        is_share = False
        if callable(data) and not isinstance(data, tf.data.Dataset):
            workers, index = cluster.num_workers(strategy), cluster.worker_index(strategy)
            data = data(tf.distribute.InputContext(workers, index, strategy.num_replicas_in_sync))
            is_share = workers > 1
        is_split = isinstance(data, tf.distribute.DistributedDataset)
        if not isinstance(data, tf.data.Dataset) and not is_split:
            raise ValueError(
                f"The data given is a {type(data).__name__}; distloop takes a tf.data.Dataset of global batches, or a "
                "function of tf.distribute.InputContext that returns one: distloop.make_dataset(arrays, batch_size) "
                "makes one from NumPy arrays."
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
            _require_batched(self.element_spec)
        length = _cardinality(data)
        if length == 0:
            raise ValueError(_EMPTY)
        self.is_endless = length == np.inf
        replicas = cluster.num_local_replicas(strategy) if is_share else strategy.num_replicas_in_sync
        self._least = replicas * microbatches  # rows, so that every microbatch has one
        static = static_batch_size(self.element_spec) if not is_split else None
        is_padded = not is_split and self._least > 1 and (static is None or static < self._least)
        self._share_length, self._missing = None, 0
        self._strategy = strategy
        if is_share:
            self._share_length, self._missing, is_padded = self._agree_on_length(strategy, is_padded)
        self.layout = Layout(is_split, is_padded, is_share)
        self.layout = self.layout._replace(most_rows=self._most_rows())

    def describe(self) -> str:
        """Says what this worker reads and which part of it its replicas take."""
        workers, index = cluster.num_workers(self._strategy), cluster.worker_index(self._strategy)
        local, replicas = cluster.num_local_replicas(self._strategy), self._strategy.num_replicas_in_sync
        worker = f"worker {index} of {workers}"
        if self.layout.is_share:
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
        batch_size = None if self.layout.is_split else _batch_size_told(self._dataset)
        if batch_size is None:
            return None
        replicas = self._strategy.num_replicas_in_sync
        if self.layout.is_share:
            replicas = cluster.num_local_replicas(self._strategy)
        rows = max(batch_size, self._least)  # those that pad it come last, and do not count
        ends = [min(batch_size, replica * rows // replicas) for replica in range(replicas + 1)]
        return batch_size, [end - start for start, end in itertools.pairwise(ends)]

    def _most_rows(self) -> int | None:
        """Finds how many rows a replica takes at most, on any worker.

        Returns:
            None where the dataset does not tell, and where nobody asks, for each number is a trace of its own.
        """
        if not cluster.uses_collectives(self._strategy):
            return None
        split = self.split()
        most = 0 if split is None else max(split[1])
        if self.layout.is_share:
            each = cluster.gather(self._strategy, most)
            most = 0 if 0 in each else int(each.max())
        return most or None

    def _agree_on_length(self, strategy: tf.distribute.Strategy, is_padded: bool) -> tuple[int | None, int, bool]:
        """Compares the shares of all workers.

        Returns:
            The batches of the longest (None: endless), how many this one lacks, and whether any is padded.
        """
        own = -1.0 if self.is_endless else self._count_batches()
        lengths = cluster.gather(strategy, own)
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
        is_padded = bool(cluster.gather(strategy, is_padded).any() or lengths.min() < lengths.max())
        return (None if own < 0 else int(lengths.max())), int(lengths.max() - own), is_padded

    def _count_batches(self) -> int:
        length = _cardinality(self._dataset)
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

    def save_position(self, by_count: bool) -> tuple[dict[str, tf.Tensor], dict[str, Any]]:
        """Tells where the iterator is.

        Args:
            by_count: as a number of batches alone. TensorFlow's own state is there at once, but where the pipeline
                prefetches and shuffles each epoch anew, some of the epochs to come were in another order (12 to 22 of
                38 restores; 4 with symbolic checkpoints, at four times the cost of a batch).

        Returns:
            The iterator's state, and what JSON can hold.

        Raises:
            ValueError: if the pipeline's state cannot be saved, as where a Python function makes the data.
        """
        notes = {
            "batches": self.batches_taken,
            "skipped": sorted(self.skipped_batches),
            "padded_to": self._least if self.layout.is_padded else 0,
        }
        if by_count or self.layout.is_split:
            return {}, notes
        try:
            state = tf.raw_ops.SerializeIterator(
                resource_handle=self.iterator()._iterator_resource, external_state_policy=_FAIL_ON_EXTERNAL_STATE
            )
        except tf.errors.OpError as error:
            what = (error.message or "").partition("\n")[0][:150].rstrip(" .:")
            raise ValueError(
                f"input_position=iterator was given, but this dataset's state cannot be saved ({what}): set "
                "input_position=count, which reads it again up to the place, or make it without Python functions."
            ) from error
        return {ITERATOR: state}, notes

    def restore_position(self, values: Mapping[str, tf.Tensor], notes: Mapping[str, Any]) -> None:
        """Goes to where `save_position` was called, in the same data, on any number of replicas."""
        self._may_go_back |= self._iterator is not None and not self.layout.is_split
        self.batches_taken = notes["batches"]
        self.skipped_batches = set(notes["skipped"])
        padded_to = self._least if self.layout.is_padded else 0
        if ITERATOR in values and notes["padded_to"] == padded_to:
            self._iterator = self.new_iterator()
            try:
                tf.raw_ops.DeserializeIterator(
                    resource_handle=self._iterator._iterator_resource, serialized=values[ITERATOR]
                )
                return
            except tf.errors.OpError as error:
                logging.warning(
                    "The position in the dataset does not fit this one (%s).", (error.message or "").partition("\n")[0]
                )
        if self.batches_taken:
            logging.info("Reading the dataset up to batch %d.", self.batches_taken)
        if self.layout.is_split:
            left = self._left_of_pass()
            self._iterator = iterate(self._dataset)
            for _ in range(self.batches_taken if left is None else int(_cardinality(self._dataset) or 0) - left):
                next(self._iterator)
            return
        with tf.device(HOST):
            self._iterator = iterate(self._pipeline(skip=self.batches_taken))

    def _pipeline(self, skip: int = 0) -> tf.data.Dataset:
        dataset = fresh_copy(self._dataset) if self._may_go_back else self._dataset
        if len(tf.nest.flatten(self.element_spec)) > 1 and static_batch_size(self.element_spec) is None:
            dataset = dataset.map(lambda *batch: _check_rows(_undo_unpacking(batch, self.element_spec)))
        if self.layout.is_padded:
            dataset = dataset.map(lambda *batch: _pad(_undo_unpacking(batch, self.element_spec), self._least))
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
        raise ValueError(_EMPTY)

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
        length = _cardinality(self._dataset)
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
        length = _cardinality(self._dataset) if self._share_length is None else self._share_length
        if length is None and not self.layout.is_split:
            length = self._count_batches()
            if not length:
                raise ValueError(_EMPTY)
        if length is None or length == np.inf:
            raise ValueError(
                "epochs were given, but the dataset is endless or of unknown length, so an epoch has no end: "
                "give steps instead."
            )
        return int(length)


class LastBatch:
    """A copy of the batch that a compiled loop took last, for a second look at it."""

    def __init__(self, iterator: Any):
        """Makes room for what an iterator gives; to be called outside a `tf.function`."""
        self._batch: Any = None  # its structure
        with tf.device(HOST):
            self._copies = [
                tf.Variable("" if spec.dtype == tf.string else tf.zeros([], spec.dtype), shape=tf.TensorShape(None))
                for spec in tf.nest.flatten(iterator.element_spec, expand_composites=True)
            ]

    def keep(self, batch: Batch) -> None:
        """Copies a batch; in a `tf.function`, outside `strategy.run`."""
        self._batch = batch
        parts = [part for part in tf.nest.flatten(batch, expand_composites=True) if part is not None]
        for copy, part in zip(self._copies, parts, strict=True):
            copy.assign(part)

    def get(self) -> Batch:
        """Gives the last batch that was kept."""
        values = iter(self._copies)
        parts = [
            None if part is None else next(values).read_value()
            for part in tf.nest.flatten(self._batch, expand_composites=True)
        ]
        return tf.nest.pack_sequence_as(self._batch, parts, expand_composites=True)


def next_batch(iterator: Any, layout: Layout) -> Batch:
    """Takes a batch; in a `tf.function`, outside `strategy.run`."""
    spec = iterator.element_spec
    leaves = tf.nest.flatten(spec)
    if layout.is_split or not all(isinstance(leaf, tf.TensorSpec) for leaf in leaves):
        return _as_batch(next(iterator), layout)
    # `next` hands over to another thread and back, 40 us of a small step; this waits where it is. The pipeline has
    # threads of its own (`_own_threads`), so that it is never the pipeline that waits for this one.
    tensors = tf.raw_ops.IteratorGetNextSync(
        iterator=iterator._iterator_resource,
        output_types=[leaf.dtype for leaf in leaves],
        output_shapes=[leaf.shape for leaf in leaves],
    )
    return _as_batch(tf.nest.pack_sequence_as(spec, tensors), layout)


def next_batch_if_any(iterator: Any, layout: Layout) -> tuple[tf.Tensor, Callable[[], Batch]]:
    """Takes a batch if there is one left: says whether, and gives a function that gets it."""
    optional = iterator.get_next_as_optional()
    return optional.has_value(), lambda: _as_batch(optional.get_value(), layout)


def _as_batch(element: Any, layout: Layout) -> Batch:
    return Batch(*element) if layout.is_padded else Batch(element, None)


def count_examples(batch: Batch, strategy: tf.distribute.Strategy) -> tf.Tensor:
    """Counts the rows of a batch that are no padding: a scalar int32; in a `tf.function`, outside `strategy.run`.

    Where each worker has rows of its own, those of this one alone.
    """
    if batch.size is not None:
        return batch.size
    first = strategy.experimental_local_results(tf.nest.flatten(batch.rows)[0])
    return tf.add_n([tf.convert_to_tensor(batch_size(part)) for part in first])


def take_share(
    batch: Batch, layout: Layout, microbatches: int = 1, microbatch: tf.Tensor | int = 0
) -> tuple[Any, tf.Tensor | None]:
    """Slices what one microbatch of this replica works on; in a replica's context.

    Args:
        batch: the global batch, or this replica's part where the layout is split.
        layout: of the iterator that gave it.
        microbatches: k, the parts a share is cut into.
        microbatch: which one, from 0.

    Returns:
        The rows, in the user's structure, `[b, ...]`, and their weights `[b]` (float32, 0 for padding), or None where
        all count.
    """
    context = tf.distribute.get_replica_context()
    replicas, replica = context.num_replicas_in_sync, context.replica_id_in_sync_group
    if layout.is_split:
        replicas, replica = 1, 0
    elif layout.is_share:
        replicas = cluster.num_local_replicas(context.strategy)
        replica = replica % replicas
    rows, size = batch
    if layout.is_split and microbatches > 1:
        rows, size = _pad(rows, microbatches)
    if replicas * microbatches == 1 and size is None:
        return rows, None
    total = batch_size(rows)
    share = replica * total // replicas, (replica + 1) * total // replicas
    length = share[1] - share[0]
    start = share[0] + microbatch * length // microbatches
    end = share[0] + (microbatch + 1) * length // microbatches
    # Untested, no GPU: on the host, so that a GPU is sent its own rows and not all of them.
    on_host = not layout.is_split and cluster.has_gpus(context.strategy)
    with tf.device(HOST) if on_host else contextlib.nullcontext():
        share_rows = tf.nest.map_structure(lambda t: t[start:end], rows)
    weights = None if size is None else tf.cast(tf.range(start, end) < size, tf.float32)
    return share_rows, weights


def share_size(batch: Batch, layout: Layout) -> tf.Tensor | int:
    """Counts the rows of this replica's share that are no padding; in a replica's context."""
    rows, weights = take_share(batch, layout)
    return batch_size(rows) if weights is None else tf.reduce_sum(weights)


def batch_size(rows: Any) -> tf.Tensor | int:
    """B: an int where it is known while tracing, else a scalar."""
    first = tf.nest.flatten(rows)[0]
    if isinstance(first, tf.RaggedTensor):
        return tf.cast(first.nrows(), tf.int32)
    return tf.shape(first)[0] if first.shape[0] is None else first.shape[0]


def static_batch_size(element_spec: Any) -> int | None:
    """B where the element spec knows it."""
    sizes = {spec.shape[0] for spec in tf.nest.flatten(element_spec)}
    return sizes.pop() if len(sizes) == 1 else None


def make_dataset(
    examples: Any,
    batch_size: int,
    *,
    shuffle: bool | int = False,
    seed: int = 0,
    cache: bool = False,
    drop_remainder: bool = False,
) -> tf.data.Dataset:
    """Makes a dataset of global batches from NumPy arrays or from a dataset of examples.

    Arrays are never copied row by row: only row numbers are shuffled, and whole batches are gathered, so a saved
    position is small too.

    Args:
        examples: arrays `[N, ...]` in any nested structure, or an unbatched `tf.data.Dataset`.
        batch_size: rows of a global batch.
        shuffle: True: over all examples, in another order each epoch; a number: over a buffer of so many examples.
        seed: of the order.
        cache: whether a dataset's examples are kept in memory after the first pass (arrays are there already).
        drop_remainder: whether the odd last batch is left out; distloop trains on it exactly.

    Returns:
        The dataset: cached, shuffled, batched, prefetched.

    Raises:
        ValueError: if arrays differ in length, or all of a dataset of unknown length are to be shuffled.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size} was given; a batch has one row at least.")
    if isinstance(examples, tf.data.Dataset):
        dataset = examples.cache() if cache else examples
        count = _cardinality(examples)
        if shuffle is True and (count is None or count == np.inf):
            raise ValueError(
                "shuffle=True was given with a dataset of unknown length; give the number of examples to hold and "
                "draw from, such as shuffle=10_000."
            )
        if shuffle:
            dataset = dataset.shuffle(int(count) if shuffle is True else shuffle, seed=seed)  # type: ignore[arg-type]
        return dataset.batch(batch_size, drop_remainder=drop_remainder).prefetch(tf.data.AUTOTUNE)
    arrays = tf.nest.map_structure(np.asarray, examples)
    lengths = {len(array) if array.ndim else 0 for array in tf.nest.flatten(arrays)}
    if len(lengths) != 1 or 0 in lengths:
        raise ValueError(f"Arrays of {sorted(lengths)} rows were given; they need the same number, 1 at least.")
    count = lengths.pop()
    with tf.device(HOST):
        tensors = tf.nest.map_structure(tf.constant, arrays)
    numbers = tf.data.Dataset.range(count)
    if shuffle:
        numbers = numbers.shuffle(count if shuffle is True else shuffle, seed=seed)
    batches = numbers.batch(batch_size, drop_remainder=drop_remainder)
    return batches.map(lambda rows: tf.nest.map_structure(lambda t: tf.gather(t, rows), tensors)).prefetch(
        tf.data.AUTOTUNE
    )


def explain(error: tf.errors.OpError) -> ValueError | None:
    """Says in one sentence what is wrong with the data, where an error of TensorFlow's is about that."""
    message = error.message or ""
    if isinstance(error, tf.errors.OutOfRangeError):
        return ValueError(_EMPTY)
    if "`generator` yielded" in message:
        line = next(line for line in message.splitlines() if "`generator` yielded" in line)
        what = line[line.index("`generator` yielded") :].rstrip(". ").replace(". The", "; the")[:300]
        return ValueError(
            f"A batch differs from those before it: {what}; every batch has the same structure, dtypes and number "
            "of axes: correct the generator or its output_signature."
        )
    if USER_ERROR in message:
        text = message.split(USER_ERROR)[1]
        return ValueError(text.replace("\\'", "'").replace('\\"', '"'))  # TensorFlow escapes quotes
    return None


def _check_rows(rows: Any) -> Any:
    """Checks, where tracing cannot know it, that a batch's entries have as many rows as each other."""
    size = batch_size(rows)
    entries = tf.nest.flatten(rows)
    wrong = (
        f"A batch's entries differ in their number of rows; tensors of shapes "
        f"{[list(entry.shape) for entry in entries]} share their first axis: batch them together."
    )
    for entry in entries[1:]:
        require(tf.equal(batch_size(entry), size), wrong)
    return rows


def _pad(rows: Any, least: int) -> Batch:
    """Repeats a batch's own rows, with weight 0, until there are `least` of them."""
    size = tf.convert_to_tensor(batch_size(rows))
    numbers = tf.range(least) % tf.maximum(size, 1)

    def repeated() -> Any:
        return tf.nest.map_structure(lambda t: tf.gather(t, numbers), rows)

    is_small = (size > 0) & (size < least)
    return Batch(tf.cond(is_small, repeated, lambda: tf.nest.map_structure(tf.identity, rows)), size)


def fresh_copy(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Copies a dataset as it was before anybody read it.

    All iterators over one dataset draw the seeds of its shuffles from one stream, so a second one shuffles otherwise;
    those of a copy draw from their own.
    """
    try:
        serialized = tf.raw_ops.DatasetToGraphV2(
            input_dataset=dataset._variant_tensor, external_state_policy=_IGNORE_EXTERNAL_STATE
        )
        graph = tf.compat.v1.GraphDef.FromString(serialized.numpy())
        shuffles = [node for node in graph.node if node.op in _SEEDS_INPUT]
        if not shuffles:
            return dataset
        graph.node.add(name="seeds_of_its_own", op="DummySeedGenerator")
        for node in shuffles:
            node.input[_SEEDS_INPUT[node.op]] = "seeds_of_its_own"
        copy = tf.raw_ops.DatasetFromGraph(graph_def=graph.SerializeToString())
    except (tf.errors.OpError, ValueError) as error:  # 2 GB is the largest graph
        what = error.message if isinstance(error, tf.errors.OpError) else str(error)
        logging.warning(
            "The dataset cannot be copied (%s), so it will be shuffled otherwise than before.",
            (what or "").partition("\n")[0][:150],
        )
        return dataset
    return tf.data.experimental.from_variant(copy, dataset.element_spec)


def _own_threads(dataset: tf.data.Dataset, options_given: tf.data.Options) -> tf.data.Dataset:
    """Gives a pipeline a thread pool of its own, unless the user did."""
    options = tf.data.Options()
    if options_given.threading.private_threadpool_size is None:
        options.threading.private_threadpool_size = cores.count()
    return dataset.with_options(options)


def _undo_unpacking(batch: tuple[Any, ...], spec: Any) -> Any:
    """`Dataset.map` spreads tuples over arguments; this gives back what the element was."""
    return batch if isinstance(spec, tuple) and not hasattr(spec, "_fields") else batch[0]


def _batch_size_told(dataset: Any) -> int | None:
    """Finds the rows of a whole batch without reading any; a last one may have fewer. None: nothing tells."""
    if (static := static_batch_size(dataset.element_spec)) is not None:
        return static
    while dataset is not None:
        if (found := getattr(dataset, "_batch_size", None)) is not None:
            return int(found)
        if type(dataset).__name__.lstrip("_") not in _KEEP_BATCHES:
            return None
        (dataset,) = dataset._inputs()
    return None


def _cardinality(data: Any) -> float | None:
    """Batches in one pass; inf if endless, None if the dataset does not know."""
    length = int(data.cardinality().numpy() if callable(getattr(data, "cardinality", None)) else data.cardinality)
    if length == tf.data.INFINITE_CARDINALITY:
        return np.inf
    return None if length == tf.data.UNKNOWN_CARDINALITY else length


def _require_batched(element_spec: Any) -> None:
    specs = tf.nest.flatten(element_spec)
    if not specs:
        raise ValueError("The dataset's elements hold no tensor; distloop needs batches of tensors, [B, ...].")
    for spec in specs:
        if not isinstance(spec, (tf.TensorSpec, tf.RaggedTensorSpec, tf.SparseTensorSpec)):
            raise ValueError(
                f"The dataset gives {spec!r}, such as None; distloop takes dense and ragged tensors, [B, ...]: leave "
                "the entry out with Dataset.map."
            )
        if isinstance(spec, tf.SparseTensorSpec):
            raise ValueError(
                f"The dataset gives a sparse tensor ({spec}); rows of it cannot be shared out: "
                "turn it into a dense or ragged one with Dataset.map."
            )
        if spec.shape.rank == 0:
            raise ValueError(
                f"The dataset's elements hold a scalar ({spec}), so they are single examples; distloop takes batches, "
                "[B, ...]: call .batch(batch_size) on the dataset."
            )
    sizes = {spec.shape[0] for spec in specs if spec.shape.rank} - {None}
    if len(sizes) > 1:
        raise ValueError(
            f"The dataset's tensors have first axes of {sorted(sizes)}; the entries of a batch share theirs, [B, ...]: "
            "call .batch(batch_size) on the dataset."
        )

"""Batches whose examples are a function of the batch's number, so that any of them can be the first.

    train = NumberedDataset(reader, Order(num_rows=len(reader), batch_size=64), None)
    train.starting_at(1_000_000)        # as fast as train.starting_at(0)

`WorkerRows` says which rows of a batch a worker reads.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from tensorflow.python.eager import context

from distloop.data.order import Access, Order, example_seeds, require_same_data
from distloop.data.rows import ArrayRows
from distloop.data.shards import pad, shard_bounds
from distloop.distributed.devices import HOST
from distloop.monitoring.profiler import FIRST_MAP

_ANONYMOUS = "cd2c89b7-88b7-44c8-ad83-06c2a9158347"  # TensorFlow's name of a variable that ends with its last handle
_ORDER_VERSION = 1  # of `Order`'s permutation, in checkpoints
_MOST_EPOCHS = 2**31
_do_not_convert = tf.autograph.experimental.do_not_convert  # AutoGraph would write a file for each function


class WorkerRows(NamedTuple):
    """The rows of each batch that a worker reads: those of its replicas. The rows of others are zeros.

    A batch of fewer rows than `min_rows` is read whole, since it is padded with copies of its rows.
    """

    worker: int
    num_workers: int
    min_rows: int
    ratios: tuple[int, ...] = ()  # of each replica in a batch; empty: equal ones

    def bounds(self, size: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the first row of a batch to read, and the one after the last, int64 []."""
        first, end = shard_bounds(self.worker, self.num_workers, size, self.ratios, self.min_rows)
        is_small = size < self.min_rows
        return tf.where(is_small, tf.zeros_like(size), first), tf.where(is_small, size, end)


class RowIteratorSpec(tf.TypeSpec):
    """The type of a `RowIterator`: the spec of a batch, and the rows to which a smaller one is padded; 0: none is."""

    value_type = property(lambda self: RowIterator)

    def __init__(self, batch: Any, min_rows: int):
        """Stores the arguments."""
        self.batch, self.min_rows = batch, min_rows

    def _serialize(self) -> Any:
        return self.batch, self.min_rows

    @property
    def _component_specs(self) -> list[tf.TensorSpec]:
        columns = [tf.TensorSpec([None, *spec.shape[1:]], spec.dtype) for spec in tf.nest.flatten(self.batch)]
        return [*columns, *[tf.TensorSpec([], tf.int64)] * 2, tf.TensorSpec([], tf.resource)]

    def _to_components(self, value: "RowIterator") -> list[tf.Tensor]:
        return value.components

    def _from_components(self, components: list[tf.Tensor]) -> "RowIterator":
        return RowIterator(self, components)


class RowIterator(tf.__internal__.CompositeTensor):
    """An iterator over batches of arrays in memory, in their order, without a pipeline of tf.data.

    A `tf.function` takes it as it takes an iterator of tf.data, and is traced once for arrays of any length.

    Attributes:
        element_spec: of a batch, without padding.
        components: the arrays and numbers that it consists of.
    """

    _type_spec: Any = None  # by which TensorFlow recognizes what is in `components`

    def __init__(self, spec: RowIteratorSpec, components: list[tf.Tensor]):
        """Stores the arguments; nothing is copied.

        Args:
            spec: of the batches.
            components: the arrays, `[N, ...]`; then int64 []: the examples of a batch, and how many of the N rows are
                read, the first ones; then the resource of a variable, int64 []: the first row of the next batch.
        """
        self._type_spec, self.element_spec, self.components = spec, spec.batch, components

    def has_next(self) -> tf.Tensor:
        """Computes whether there is another batch."""
        return self._first_row() < self.components[-2]

    def __next__(self) -> Any:
        """Computes the next batch, padded where it may have to be; there has to be one."""
        with tf.device(HOST):
            *columns, size, num_rows, position = self.components
            start, specs = self._first_row(), tf.nest.flatten(self.element_spec)
            tf.raw_ops.AssignAddVariableOp(resource=position, value=size)
            end = tf.minimum(start + size, num_rows)
            entries = [tf.ensure_shape(c[start:end], spec.shape) for c, spec in zip(columns, specs, strict=True)]
            rows = tf.nest.pack_sequence_as(self.element_spec, entries)
            return pad(rows, min_rows)[:2] if (min_rows := self._type_spec.min_rows) else rows

    def _first_row(self) -> tf.Tensor:
        return tf.ensure_shape(tf.raw_ops.ReadVariableOp(resource=self.components[-1], dtype=tf.int64), [])


@contextlib.contextmanager
def seeds_of_their_own() -> Iterator[None]:
    """Enters a scope in which datasets draw by the seeds given to them alone, whatever `tf.random.set_seed` got."""
    seeded = context.context()
    with contextlib.ExitStack() as stack:
        stack.callback(setattr, seeded, "_seed", seeded._seed)
        seeded._seed = None
        yield


class NumberedDataset(tf.data.Dataset):
    """A dataset of global batches by number, which begins at any of them at once.

    It is a `tf.data.Dataset`: each time it is read by itself, an epoch follows on the one before. `map` and `take` keep
    the position a number; other methods of `tf.data` return a plain dataset, which is read again to get to a position.
    It has the methods of a `Feed`, too, by which a `Source` reads it.

    Attributes:
        order: which examples are in a batch.
        mixes_rows: whether a function over batches may make a row from others of its batch.
        worker_rows: the rows that this worker reads; None: all.
        resume: empty, as there is nothing to say of it: a resumed run is at its position at once.
        access: how it gets to a position.
        against_waiting: what to try where steps wait for the data.
    """

    resume = ""
    access = Access.SEEKS
    against_waiting = (
        "less work in map_fn or the source's __getitem__, more worker processes for it (make_dataset's processes), a "
        "smaller dtype of the arrays, such as uint8 or float16, which the model casts, or a faster disk"
    )

    def __init__(
        self,
        reader: Any,
        order: Any,
        apply: Any,
        maps: tuple[Callable[[tf.data.Dataset], tf.data.Dataset], ...] = (),
        *,
        mixes_rows: bool = False,
        is_one_epoch: bool = False,
    ):
        """Remembers the arguments; a pipeline is built when it is read.

        Args:
            reader: of the examples.
            order: which examples are in a batch, an `Order` or what has its methods.
            apply: a `TracedMap`, which changes the examples of a batch, by their seeds; None: nothing does.
            maps: what `map` adds to a pipeline of batches, in their order.
            mixes_rows: whether one of them may make a row from others of its batch.
            is_one_epoch: whether every epoch repeats the first one.
        """
        self.order, self.mixes_rows = order, mixes_rows
        self._reader, self._apply, self._maps = reader, apply, maps
        self._is_one_epoch = is_one_epoch
        self._uses_seeds = apply is not None or reader.uses_seeds
        self._batch_size = order.batch_size  # for `info`, as tf.data's own datasets
        self._num_read = 0  # passes that began, by `iter`
        self.worker_rows: WorkerRows | None = None
        super().__init__(None)  # the tensor is made when tf.data asks for it

    def starting_at(self, first: int, *, repeat: bool = True, worker_rows: WorkerRows | None = None) -> tf.data.Dataset:
        """Returns a dataset of the batches from a number on.

        Args:
            first: the number, counted from 0 over all epochs.
            repeat: whether epochs follow without end; else the epoch of the first batch is the last.
            worker_rows: the rows to read, if functions over batches need no others; None: all.
        """
        per_epoch = self.order.batches_per_epoch
        end = per_epoch * (_MOST_EPOCHS if repeat else first // per_epoch + 1)
        return self._read(tf.data.Dataset.range(first, end), worker_rows)

    def row_iterator(self, min_rows: int) -> RowIterator | None:
        """Returns an iterator over one epoch of arrays in memory, in their order; None: it is of other data.

        Args:
            min_rows: to which smaller batches are padded; 0: they are not.
        """
        if not self._is_in_order():
            return None
        size, count = self.order.batch_size, self.order.batches_per_epoch
        sizes = [tf.constant(number, tf.int64) for number in (size, min(self.order.num_rows, size * count))]
        position = tf.raw_ops.VarHandleOp(dtype=tf.int64, shape=[], shared_name=_ANONYMOUS)  # no scope mirrors it
        tf.raw_ops.AssignVariableOp(resource=position, value=tf.constant(0, tf.int64))
        return RowIterator(RowIteratorSpec(self._batch_spec, min_rows), [*self._reader.columns, *sizes, position])

    def dataset(self, first: int = 0, state: Any = None, *, repeat: bool = True) -> tf.data.Dataset:
        """Returns a dataset of this worker's rows that begins at a batch, counted from 0 over all epochs."""
        return self.starting_at(first, repeat=repeat, worker_rows=self.worker_rows)

    def read_only(self, worker_rows: WorkerRows) -> None:
        """Reads some rows of each batch alone, unless a function over batches may need the others."""
        self.worker_rows = None if self.mixes_rows else worker_rows

    @property
    def batch_size(self) -> int | None:
        """The examples of a whole batch; None: it changes."""
        return self.order.largest_batch

    def seen(self, num_batches: int) -> Mapping[str, int]:
        """Returns how many examples of each source are in the first batches, by its name; of one source, nothing."""
        per_epoch = self.order.batches_per_epoch
        num_again, num_batches = divmod(num_batches, per_epoch) if self._is_one_epoch else (0, num_batches)
        of_epoch, counts = self.order.seen(per_epoch if num_again else 0), self.order.seen(num_batches)
        return {name: num_again * of_epoch[name] + n for name, n in counts.items()} if len(counts) > 1 else {}

    def examples_of(self, batch: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the numbers of the examples in a batch and the epochs of each, `[b]`, from 0; reads nothing.

        A source of a mixture has its own epochs. The batch is given by its number over all epochs.
        """
        passes, number = divmod(batch, self.order.batches_per_epoch) if self._is_one_epoch else (0, batch)
        rows, epochs = self.order.rows(tf.constant(number, tf.int64))
        return rows.numpy(), epochs.numpy() + passes

    def stage_secs(self, of_pipeline: Mapping[str, float]) -> dict[str, float]:
        """Returns the seconds of each stage of the input, from those of tf.data's operations."""
        rest = self._reader.unmeasured if self._apply is None else "map_fn"
        own: dict[str, float] = self._reader.stage_secs.of(of_pipeline.get(FIRST_MAP, 0.0), rest)
        return {name: secs for name, secs in of_pipeline.items() if name != FIRST_MAP} | own

    def first_rows(self) -> Any:
        """Returns the first batch."""
        return next(iter(self.starting_at(0)))

    def facts_at(self, position: Mapping[str, Any]) -> dict[str, Any]:
        """Returns what a position depends on, for JSON."""
        order = self.order
        return {
            **order.facts_at(position),
            **({"seed": order.seed} if order.is_shuffled or self._uses_seeds else {}),
            "num_rows": order.num_rows,
            "order": _ORDER_VERSION if order.is_shuffled else 0,
            **({"is_one_epoch": True} if self._is_one_epoch else {}),
            **self._reader.facts,
        }

    def convert(self, position: Mapping[str, Any], facts: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns a saved position in batches of this data; `facts` are those of `facts_at`.

        Raises:
            ValueError: if the position is one in other data, or in another order of it.
        """
        if not position["batches"]:
            return position
        require_same_data(position, facts, getattr(self._reader, "describe_change", None))
        converted: Mapping[str, Any] = self.order.convert(position, facts)
        return converted

    def first_pass_again(self) -> "NumberedDataset":
        """Returns the dataset of which every epoch repeats the first one."""
        return self._with(is_one_epoch=True)

    def fresh(self) -> "NumberedDataset":
        """Returns the dataset as it was before it was read."""
        return self._with()

    def map(self, map_func: Callable[..., Any], *args: Any, **kwargs: Any) -> "NumberedDataset":
        """Returns the dataset with a function applied to each batch, as `tf.data.Dataset.map` does."""
        maps = (*self._maps, lambda dataset: dataset.map(map_func, *args, **kwargs))
        return self._with(maps=maps, mixes_rows=True)

    def map_rows(self, map_func: Callable[..., Any]) -> "NumberedDataset":
        """Returns the dataset with a function applied to each batch that changes each row by itself."""
        return self._with(maps=(*self._maps, lambda dataset: dataset.map(map_func)))

    def take(self, count: int, name: str | None = None) -> tf.data.Dataset:
        """Returns the first batches of each epoch."""
        if not isinstance(count, (int, np.integer)) or count < 1:
            return super().take(count, name=name)
        limit = min(int(count), self.order.limit) if self.order.limit else int(count)
        return self._with(order=dataclasses.replace(self.order, limit=limit))

    def __iter__(self) -> Iterator[Any]:
        """Returns an iterator over the next epoch."""
        first = self._num_read * self.order.batches_per_epoch
        self._num_read += 1
        return iter(self.starting_at(first, repeat=False))

    def _with(self, **changes: Any) -> "NumberedDataset":
        arguments = {"reader": self._reader, "order": self.order, "apply": self._apply, "maps": self._maps}
        arguments |= {"mixes_rows": self.mixes_rows, "is_one_epoch": self._is_one_epoch}
        return NumberedDataset(**(arguments | changes))

    def _read(self, batches: tf.data.Dataset, worker_rows: WorkerRows | None = None) -> tf.data.Dataset:
        """Returns the batches with some numbers."""

        def read(batch: tf.Tensor) -> Any:
            batch = batch % self.order.batches_per_epoch if self._is_one_epoch else batch
            size = self.order.size(batch)
            first, end = (0, None) if worker_rows is None else worker_rows.bounds(size)
            rows, epochs = self.order.rows(batch, first, end)
            seeds = example_seeds(self.order.seed, rows, epochs) if self._uses_seeds else None
            width = self.order.width(batch)
            examples = self._reader.read(rows, seeds, width if self._apply is None else None)
            examples = examples if self._apply is None else self._apply(examples, seeds, width)
            if worker_rows is not None:
                among_zeros = functools.partial(_among_zeros, before=first, after=size - end)
                examples = tf.nest.map_structure(among_zeros, examples)
            tf.nest.map_structure(lambda entry, spec: entry.set_shape(spec.shape), examples, self._batch_spec)
            return examples

        dataset = batches.map(_do_not_convert(read), num_parallel_calls=tf.data.AUTOTUNE)
        for apply in self._maps:
            dataset = apply(dataset)
        return dataset.prefetch(tf.data.AUTOTUNE)

    @property
    def are_rows_alike(self) -> bool:
        """Whether all entries of a batch are known to have the same number of rows."""
        return not self._maps

    @functools.cached_property
    def _plain_pass(self) -> tf.data.Dataset:
        """Returns one pass, for tf.data alone; whenever that begins anew, at another epoch if epochs differ."""
        count = self.order.batches_per_epoch
        if self._is_one_epoch or not (self.order.is_stationary and (self.order.is_shuffled or self._uses_seeds)):
            return self._read(tf.data.Dataset.range(count))
        with seeds_of_their_own():
            draws = tf.data.Dataset.random(seed=self.order.seed, rerandomize_each_iteration=True).take(1)

        def epoch(draw: tf.Tensor) -> tf.data.Dataset:
            first = draw % _MOST_EPOCHS * count
            return tf.data.Dataset.range(first, first + count)

        batches = draws.flat_map(_do_not_convert(epoch)).apply(tf.data.experimental.assert_cardinality(count))
        return self._read(batches)

    def _inputs(self) -> list[tf.data.Dataset]:
        return []

    @property
    def _variant_tensor(self) -> tf.Tensor:
        return self._plain_pass._variant_tensor

    def cardinality(self) -> tf.Tensor:
        """Returns the number of batches of an epoch, int64 []."""
        return tf.constant(self.order.batches_per_epoch, tf.int64)

    @property
    def element_spec(self) -> Any:
        """The spec of a batch."""
        if self._maps:
            return self._plain_pass.element_spec
        return self._batch_spec

    @functools.cached_property
    def _batch_spec(self) -> Any:
        """The spec of a batch before `maps`."""
        size, width = self.order.static_size, self.order.static_width

        def batched(row: tf.TensorSpec) -> tf.TensorSpec:
            return tf.TensorSpec([size, *(width if n is None else n for n in row.shape)], row.dtype)

        return tf.nest.map_structure(batched, self._reader.spec if self._apply is None else self._apply.spec)

    def _is_in_order(self) -> bool:
        """Returns whether an epoch is of arrays in memory, unchanged and in their order."""
        is_plain = type(self.order) is Order and not self.order.is_shuffled
        is_unchanged = self._apply is None and not self._maps
        is_in_memory = isinstance(self._reader, ArrayRows) and self._reader.is_in_memory
        return is_plain and is_unchanged and is_in_memory and not _has_list(self._reader.spec)  # a list means a tensor


def _has_list(structure: Any) -> bool:
    inner = structure.values() if isinstance(structure, Mapping) else structure if isinstance(structure, tuple) else ()
    return isinstance(structure, list) or any(map(_has_list, inner))


def _among_zeros(entry: tf.Tensor, *, before: tf.Tensor, after: tf.Tensor) -> tf.Tensor:
    """Returns an entry `[b, ...]` with rows of zeros, or of empty texts, before and after it."""
    rest = tf.shape(entry, tf.int64)[1:]
    zeros = [tf.zeros(tf.concat([[count], rest], 0), entry.dtype) for count in (before, after)]
    padded = tf.concat([zeros[0], entry, zeros[1]], 0)
    padded.set_shape([None, *entry.shape[1:]])
    return padded

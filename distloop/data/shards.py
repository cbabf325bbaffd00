"""The shard of a global batch that each replica works on: slice, pad, count.

    batch = next_batch(iterator, source.layout)               # in the compiled loop, on the host
    rows, row_weights = take_shard(batch, source.layout)      # on each replica

Replica r of R takes the rows from `r * B // R` up to `(r + 1) * B // R`: as even as whole rows allow, or in the ratios
of `Config.device_shares`. Nothing is added, so synchronized BatchNormalization sees the same rows on any number of
replicas. Only a batch too small to give every replica and microbatch a row is padded with whole copies of itself, at
weight 0. Virtual replicas split a batch as replicas do: a device computes its own ones, one after the other.
"""

import contextlib
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from distloop.distributed import collectives, strategies
from distloop.distributed.devices import HOST
from distloop.errors import require


class Batch(NamedTuple):
    """A global batch, or one value per replica of a batch that was sent ahead."""

    rows: Any  # the user's structure, tensors [B, ...]
    size: tf.Tensor | None  # []: the number of rows that count; None: all of them
    total: tf.Tensor | int | None = None  # []: B, if each replica has its own rows alone; None: each has all


class BatchLayout(NamedTuple):
    """What tracing needs to know about the batches of an iterator."""

    is_padded: bool  # whether the iterator's elements are pairs of rows and how many of them count
    is_sharded: bool = False  # whether each worker reads a shard of the data, so that its batches are its own
    max_replica_rows: int | None = None  # of any batch, on any worker, if known; for collectives
    per_device: int = 1  # the virtual replicas that each device computes, as `Replicas.per_device`
    is_cut: bool = False  # whether each replica has its own rows, as from `RowsAhead`
    min_rows: int = 1  # one for each microbatch of each (virtual) replica; a batch with fewer rows is padded
    ratios: tuple[int, ...] = ()  # of each replica in a batch; empty: equal ones

    def replicas_of(self, strategy: tf.distribute.Strategy) -> int:
        """Returns how many replicas of a strategy split a batch: all, or this worker's of its own batch."""
        return collectives.num_local_replicas(strategy) if self.is_sharded else strategy.num_replicas_in_sync

    def batch_of(self, rows: Any) -> Batch:
        """Returns the batch of some rows that are not from the iterator, padded as those are."""
        return pad(rows, self.min_rows) if self.is_padded else Batch(rows, None)

    def known_size(self, element_spec: Any) -> int | None:
        """Returns how many rows of each batch count, given the spec of the iterator; None: batches differ."""
        return None if self.is_padded else static_batch_size(element_spec)

    def bounds(self, index: Any, shards: int, rows: Any) -> tuple[Any, Any]:
        """Returns the first row of a shard and the one after its last, as `shard_bounds`."""
        return shard_bounds(index, shards, rows, self.ratios, self.min_rows)

    def shard_sizes(self, shards: int, rows: int) -> list[int]:
        """Returns the number of rows of each shard, padding included."""
        return [end - start for start, end in (self.bounds(i, shards, rows) for i in range(shards))]

    def gather_sizes(self, strategy: tf.distribute.Strategy, size: int) -> list[int]:
        """Returns the sizes of the batches that a step takes: of each worker's own one, or of the global one."""
        return collectives.gather(strategy, size) if self.is_sharded else [size]

    def sum_over_batches(self, strategy: tf.distribute.Strategy, count: tf.Tensor) -> tf.Tensor:
        """Returns the sum of a count of rows over the batches that a step takes, in a `tf.function`."""
        return collectives.sum_over_workers(strategy, count) if self.is_sharded else count

    def check_same(self, strategy: tf.distribute.Strategy, what: str, facts: dict[str, Any]) -> None:
        """Checks that workers which read the same batches agree on some facts, as `collectives.require_same` does."""
        if not self.is_sharded:
            collectives.require_same(strategy, what, facts)


class RowsAhead:
    """The rows of the next batch on the devices of their replicas, which they reach while a step computes.

    Integers of 32 bits and texts wait on the host, where TensorFlow keeps variables of those.
    """

    def __init__(self, iterator: Any, layout: BatchLayout, strategy: tf.distribute.Strategy):
        """Creates variables for the rows of each replica; call it outside a `tf.function`.

        Args:
            iterator: of batches for which `are_possible` is true.
            layout: of the batches.
            strategy: whose replicas split each batch.
        """
        self._layout, self._strategy = layout, strategy
        self._specs = iterator.element_spec[0] if layout.is_padded else iterator.element_spec
        self._total: int | None = None  # B, if tracing has shown it
        self._shapes: dict[int, list[tf.TensorShape]] = {}  # of the rows of each replica; known once `put` is traced
        self._sizes = [_variable(tf.int32, HOST, []) for _ in range(2)]  # B, and how many rows count
        self._devices = strategies.replica_devices(strategy)
        specs = tf.nest.flatten(self._specs)
        self._rows = [
            [_variable(spec.dtype, HOST if spec.dtype in (tf.int32, tf.string) else device) for spec in specs]
            for device in self._devices
        ]

    @staticmethod
    def are_possible(iterator: Any) -> bool:
        """Returns whether batches are dense."""
        return all(isinstance(leaf, tf.TensorSpec) for leaf in tf.nest.flatten(iterator.element_spec))

    @property
    def layout(self) -> BatchLayout:
        """The layout of the batches that `swap` returns."""
        return self._layout._replace(is_cut=True)

    def put(self, batch: Batch) -> None:
        """Sends the rows of a batch to their devices; in a `tf.function`, outside `strategy.run`."""
        self._write_sizes(batch)
        self._strategy.run(self._send, args=(batch,))

    def swap(self, batch: Batch, after: tf.Tensor) -> Batch:
        """Sends the rows of a batch to their devices, and returns the batch that came before; called as `put`.

        Args:
            batch: the next one.
            after: what the work on the returned rows waits for.
        """

        def receive(batch: Batch) -> Any:
            shapes = self._shapes[self._replica()]
            with tf.device(self._devices[self._replica()]):
                rows = [variable.read_value() for variable in self._rows[self._replica()]]
                self._send(batch)
                with tf.control_dependencies([after]):
                    rows = [tf.ensure_shape(row, shape) for row, shape in zip(rows, shapes, strict=True)]
            return tf.nest.pack_sequence_as(self._specs, rows)

        total, size = (variable.read_value() for variable in self._sizes)
        total = total if self._total is None else self._total
        self._write_sizes(batch)
        return Batch(self._strategy.run(receive, args=(batch,)), size if self._layout.is_padded else None, total)

    def _write_sizes(self, batch: Batch) -> None:
        total = batch_size(batch.rows)
        self._total = total if isinstance(total, int) else None
        for variable, size in zip(self._sizes, (total, total if batch.size is None else batch.size), strict=True):
            variable.assign(size)

    def _send(self, batch: Batch) -> None:
        """Writes this replica's rows of a batch; in replica context."""
        rows = tf.nest.flatten(take_shard(batch, self._layout._replace(per_device=1))[0])
        self._shapes[self._replica()] = [row.shape for row in rows]
        for variable, row in zip(self._rows[self._replica()], rows, strict=True):
            variable.assign(row)

    def _replica(self) -> int:
        """Returns the index of a replica among those of this worker; in replica context."""
        return int(tf.get_static_value(tf.distribute.get_replica_context().replica_id_in_sync_group)) % len(self._rows)


def _variable(dtype: tf.DType, device: str, shape: Any = None) -> tf.Variable:
    with tf.device(HOST):  # no shape is sent to another device: see step_marks.py
        zero = tf.zeros([], dtype)
    with tf.device(device):
        return tf.Variable(zero, shape=tf.TensorShape(shape), trainable=False)


class LastBatch:
    """A copy of the last batch that a compiled loop took, to look at it again after a failure."""

    def __init__(self, iterator: Any):
        """Creates variables for the tensors of a batch; call it outside a `tf.function`."""
        self._batch: Any = None  # its structure
        specs = tf.nest.flatten(iterator.element_spec, expand_composites=True)
        self._copies = [_variable(spec.dtype, HOST) for spec in specs]

    def keep(self, batch: Batch) -> None:
        """Copies a batch; in a `tf.function`, outside `strategy.run`."""
        self._batch = batch
        tensors = [each for each in tf.nest.flatten(batch, expand_composites=True) if each is not None]
        for copy, tensor in zip(self._copies, tensors, strict=True):
            copy.assign(tensor)

    def get(self) -> Batch | None:
        """Returns the last batch that was kept; None: no step was traced to keep one."""
        values, leaves = iter(self._copies), tf.nest.flatten(self._batch, expand_composites=True)
        tensors = [None if leaf is None else next(values).read_value() for leaf in leaves]
        return tf.nest.pack_sequence_as(self._batch, tensors, expand_composites=True)


def next_batch(iterator: Any, layout: BatchLayout) -> Batch:
    """Returns the iterator's next batch; call it in a `tf.function`, outside `strategy.run`."""
    spec = iterator.element_spec
    leaves = tf.nest.flatten(spec)
    if not isinstance(iterator, tf.data.Iterator) or not all(isinstance(leaf, tf.TensorSpec) for leaf in leaves):
        return as_batch(next(iterator), layout)
    # `next` switches to another thread and back, 40 us of a small step; this operation waits in its own thread. It
    # cannot block the pipeline, which has a private thread pool (`source.Source`).
    tensors = tf.raw_ops.IteratorGetNextSync(
        iterator=iterator._iterator_resource,
        output_types=[leaf.dtype for leaf in leaves],
        output_shapes=[leaf.shape for leaf in leaves],
    )
    return as_batch(tf.nest.pack_sequence_as(spec, tensors), layout)


def no_rows(iterator: Any, layout: BatchLayout) -> Batch:
    """Returns what stands for a batch that is not read: zeros in the shapes of a batch, whose free axes are empty."""
    specs = tf.nest.flatten(iterator.element_spec)
    zeros = [tf.fill([size or 0 for size in spec.shape], tf.zeros([], spec.dtype)) for spec in specs]
    return as_batch(tf.nest.pack_sequence_as(iterator.element_spec, zeros), layout)


def next_batch_if_any(iterator: Any, layout: BatchLayout) -> tuple[tf.Tensor, Callable[[], Batch]]:
    """Returns whether the iterator had another batch, and a function that returns it."""
    if not isinstance(iterator, tf.data.Iterator):  # a `RowIterator`
        return iterator.has_next(), lambda: next_batch(iterator, layout)
    optional = iterator.get_next_as_optional()
    return optional.has_value(), lambda: as_batch(optional.get_value(), layout)


def as_batch(element: Any, layout: BatchLayout) -> Batch:
    """Returns the batch that an element of an iterator is."""
    return Batch(*element) if layout.is_padded else Batch(element, None)


def count_examples(batch: Batch) -> tf.Tensor:
    """Returns the number of rows without padding, int32 []; on this worker alone if each has its own batches.

    Call it in a `tf.function`, outside `strategy.run`.
    """
    return tf.convert_to_tensor(_total(batch) if batch.size is None else batch.size)


def shard_bounds(index: Any, shards: int, rows: Any, ratios: Sequence[int] = (), min_rows: int = 1) -> tuple[Any, Any]:
    """Returns the first row of a shard and the one after its last: `rows` cut as evenly as whole rows allow.

    Args:
        index: of the shard.
        shards: how many there are.
        rows: how many are cut, an int or a scalar.
        ratios: in which the rows are cut instead, one for each replica; a shard is of several replicas if there are
            fewer shards.
        min_rows: from which on no replica has less than its part of `min_rows`, however small its share is.
    """
    if not ratios:
        return index * rows // shards, (index + 1) * rows // shards
    is_known = isinstance(rows, int)
    total, larger, smaller = (rows, max, min) if is_known else (tf.cast(rows, tf.int64), tf.maximum, tf.minimum)
    least = smaller(total // len(ratios), min_rows // len(ratios))
    ends = [0 * total]
    for others, sum_of_ratios in zip(range(len(ratios) - 1, -1, -1), itertools.accumulate(ratios), strict=True):
        end = larger(total * sum_of_ratios // sum(ratios), ends[-1] + least)
        ends.append(smaller(end, total - others * least))
    first, each = int(tf.get_static_value(index)), len(ratios) // shards
    start, end = ends[first * each], ends[(first + 1) * each]
    return (start, end) if is_known else (tf.cast(start, rows.dtype), tf.cast(end, rows.dtype))


def take_shard(
    batch: Batch, layout: BatchLayout, microbatches: int = 1, microbatch: tf.Tensor | int = 0
) -> tuple[Any, tf.Tensor | None]:
    """Returns the rows of one microbatch of this replica; call it in replica context.

    Args:
        batch: the global batch.
        layout: of the iterator that the batch is from.
        microbatches: k, into which the shard of a replica, or of each virtual one, is cut.
        microbatch: its index, from 0; those of this replica's first virtual replica come first.

    Returns:
        The rows in the user's structure, `[b, ...]`, and their weights `[b]` (float32, 0 for padding), or None if all
        rows count.
    """
    context = tf.distribute.get_replica_context()
    each, replicas, replica = layout.per_device, context.num_replicas_in_sync, context.replica_id_in_sync_group
    if layout.is_sharded:
        replicas = layout.replicas_of(context.strategy)
        replica = replica % replicas
    if each > 1:
        replicas, replica = replicas * each, replica * each + microbatch // microbatches
        microbatch = microbatch % microbatches
    rows, size = batch[:2]
    if replicas * microbatches == 1 and size is None:
        return rows, None
    with _on_host(context.strategy):
        total = _total(batch)
        shard_start, shard_end = layout.bounds(replica, replicas, total)
        start, end = shard_bounds(microbatch, microbatches, shard_end - shard_start)
        start, end = shard_start + start, shard_start + end
        weights = None if size is None else tf.cast(tf.range(start, end) < size, tf.float32)
        own = layout.bounds(replica // each, replicas // each, total)[0] if layout.is_cut else 0
    with contextlib.nullcontext() if layout.is_cut else _on_host(context.strategy):
        is_own = layout.is_cut and each * microbatches == 1
        shard = rows if is_own else tf.nest.map_structure(lambda t: t[start - own : end - own], rows)
    sizes = layout.shard_sizes(replicas, total) if isinstance(total, int) else []
    are_known = bool(layout.ratios) or len(set(sizes)) == 1  # else the replica's own one is not, while tracing
    if sizes and are_known and not any(size % microbatches for size in sizes):
        cut_size = (shard_end - shard_start if layout.ratios else sizes[0]) // microbatches
        # TensorFlow does not know the difference of two bounds that are tensors.
        for tensor in (t for t in tf.nest.flatten(shard) if isinstance(t, tf.Tensor)):
            tensor.set_shape([cut_size, *tensor.shape[1:]])
    return shard, weights


def _on_host(strategy: tf.distribute.Strategy) -> contextlib.AbstractContextManager[Any]:
    """Returns the scope in which a shard is cut: the host, so that a GPU gets its own rows and no others."""
    return tf.device(HOST) if strategies.has_gpus(strategy) else contextlib.nullcontext()


def first_row_of(batch: Batch, layout: BatchLayout, index: int) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns where in the global batch the rows of a virtual replica begin, and how many that has, int32 [].

    Padding does not count.

    Args:
        batch: the global batch.
        layout: of the batch.
        index: of the virtual replica, among those that this device computes.
    """
    context, each = tf.distribute.get_replica_context(), layout.per_device
    replicas, replica = context.num_replicas_in_sync * each, context.replica_id_in_sync_group * each
    with _on_host(context.strategy):
        size = tf.convert_to_tensor(_total(batch))
        total = size if batch.size is None else batch.size
        return tf.minimum(shard_bounds(replica + index, replicas, size)[0], total), total


def _total(batch: Batch) -> tf.Tensor | int:
    """Returns B, with padding, of the rows that the replicas split."""
    return batch_size(batch.rows) if batch.total is None else batch.total


def batch_size(rows: Any) -> tf.Tensor | int:
    """Returns B: an int if it is known while tracing, else a scalar."""
    first = tf.nest.flatten(rows)[0]
    if isinstance(first, tf.RaggedTensor):
        return tf.cast(first.nrows(), tf.int32)
    return tf.shape(first)[0] if first.shape[0] is None else first.shape[0]


def static_batch_size(element_spec: Any) -> int | None:
    """Returns B if the element spec holds it, else None."""
    sizes = {spec.shape[0] for spec in tf.nest.flatten(element_spec)}
    return sizes.pop() if len(sizes) == 1 else None


def pack_element(arguments: tuple[Any, ...], spec: Any) -> Any:
    """Returns a dataset's element from the arguments over which `Dataset.map` has spread it."""
    return arguments if isinstance(spec, tuple) and not hasattr(spec, "_fields") else arguments[0]


def check_rows(rows: Any) -> Any:
    """Returns the rows of a batch; reading them fails if its entries differ in their number of rows."""
    size = batch_size(rows)
    entries = tf.nest.flatten(rows)
    shapes = ["unknown" if entry.shape.rank is None else list(entry.shape) for entry in entries]
    wrong = (
        f"A batch's entries differ in their number of rows; tensors of shapes {shapes} share their first axis: batch "
        "them together."
    )
    for entry in entries[1:]:
        require(tf.equal(batch_size(entry), size), wrong)
    return rows


def pad(rows: Any, min_rows: int) -> Batch:
    """Returns a batch of at least `min_rows` rows; its size is that without padding.

    The padding repeats the whole batch until `min_rows` divides its rows. So statistics over the rows of all replicas
    are those of the batch, and a microbatch holds padding alone or none.
    """
    size = tf.convert_to_tensor(batch_size(rows))
    padded_sizes = tf.constant([min_rows, *(math.lcm(n, min_rows) for n in range(1, min_rows))])
    numbers = tf.range(padded_sizes[tf.minimum(size, min_rows - 1)]) % tf.maximum(size, 1)

    def repeated() -> Any:
        return tf.nest.map_structure(lambda t: tf.gather(t, numbers), rows)

    is_small = (size > 0) & (size < min_rows)
    return Batch(tf.cond(is_small, repeated, lambda: tf.nest.map_structure(tf.identity, rows)), size)

"""Dataset info: element spec, length, batch size and rows of each replica, before a batch is read.

    info = inspect(dataset, strategy, microbatches=4)
    info.batch_size, info.replica_batch_sizes        # 10, (5, 5)

It does not know iterators or the position in the data.
"""

import dataclasses
import math
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from distloop.data.iterators import IN_ORDER, fresh_copy, kinds_of
from distloop.data.shards import BatchLayout, static_batch_size
from distloop.distributed import collectives, strategies
from distloop.distributed.devices import Replicas
from distloop.errors import EMPTY_DATASET
from distloop.log import log

# Datasets behind which the batch size stays the same; a function mapped over batches is assumed to keep their rows.
_KEEP_BATCHES = frozenset(
    f"{name}Dataset"
    for name in "Map ParallelMap Prefetch Repeat Shuffle Skip Take Shard Cache Options Filter AssertCardinality".split()
)
_KEEP_ROWS = _KEEP_BATCHES - {"MapDataset", "ParallelMapDataset"}
_BATCH = frozenset({"BatchDataset", "ParallelBatchDataset", "PaddedBatchDataset"})
# Datasets of which a look at the first batch runs no code of the user's that is to run once, and fills no cache.
_REPEATABLE = IN_ORDER - {"CacheDataset", "FlatMapDataset"} | {"ShuffleDataset"}


@dataclasses.dataclass(frozen=True)
class DataInfo:
    """What is known about a dataset before it is read.

    Attributes:
        element_spec: of a batch, before padding.
        layout: what tracing needs to know about the batches.
        num_batches: of one pass, the longest over all workers' shards; inf: endless; None: unknown.
        num_missing_batches: by which this worker's shard is shorter than the longest one.
        batch_size: of a whole batch, of this worker's shard if the data is sharded; None if unknown.
        replica_batch_sizes: the rows of a whole batch that each replica takes, virtual ones if there are any, of this
            worker's if the data is sharded.
    """

    element_spec: Any
    layout: BatchLayout
    num_batches: float | None
    num_missing_batches: int
    batch_size: int | None
    replica_batch_sizes: tuple[int, ...]

    @property
    def is_endless(self) -> bool:
        """Whether a pass over the data never ends."""
        return self.num_batches == math.inf


def inspect(
    dataset: Any,
    strategy: tf.distribute.Strategy,
    *,
    microbatches: int = 1,
    replicas: Replicas | None = None,
    is_sharded: bool = False,
    batch_size: int | None = None,
) -> DataInfo:
    """Checks a dataset and returns what is known about it; on several workers, all of them call it.

    Args:
        dataset: read only to count a shard's batches.
        strategy: whose replicas split each batch.
        microbatches: in which a replica computes its rows.
        replicas: on which a step is defined; None: the strategy's.
        is_sharded: whether the dataset is this worker's shard, so that other workers have other examples.
        batch_size: of a whole batch, where the dataset cannot know it; None: the dataset may.

    Raises:
        ValueError: if the dataset is not batched or known to be empty, if the shards do not fit together, if
            workers that should read the same do not, or if batches depend on the devices and must not.
    """
    replicas = replicas or Replicas(strategy.num_replicas_in_sync)
    if (replicas.same_bits or replicas.ratios) and is_sharded:
        raise ValueError(
            f"{replicas.setting} was given with a shard for each worker, whose batches depend on the devices: give "
            "the plain dataset of global batches, which distloop splits."
        )
    _require_batched(dataset.element_spec)
    num_batches, num_missing = cardinality(dataset), 0
    if num_batches == 0:
        raise ValueError(EMPTY_DATASET)
    layout = BatchLayout(False, is_sharded, per_device=replicas.per_device, ratios=replicas.ratios)
    shards = layout.replicas_of(strategy) * layout.per_device
    layout = layout._replace(min_rows=(min_rows := shards * microbatches))
    static_size = static_batch_size(dataset.element_spec)
    is_padded = min_rows > 1 and (static_size is None or static_size < min_rows)
    if is_sharded:
        num_batches, num_missing = _compare_shards(count_batches(dataset), strategy)
        is_padded = any(collectives.gather(strategy, is_padded or num_missing > 0))
    batch_size = batch_size or _find_batch_size(dataset)
    sizes = () if batch_size is None else _replica_batch_sizes(batch_size, shards, layout)
    padded_rows = min_rows if is_padded and static_size is None else 0
    facts = {"the batch size": batch_size, "the batches of a pass": num_batches, "a batch": dataset.element_spec}
    layout.check_same(strategy, "read a dataset", facts)
    most = _max_replica_rows(sizes, layout, padded_rows, strategy)
    layout = layout._replace(is_padded=is_padded, max_replica_rows=most)
    return DataInfo(dataset.element_spec, layout, num_batches, num_missing, batch_size, sizes)


def cardinality(data: Any) -> float | None:
    """Returns the number of batches in one pass; inf if endless, None if the dataset does not know."""
    length = int(data.cardinality())
    return {tf.data.INFINITE_CARDINALITY: math.inf, tf.data.UNKNOWN_CARDINALITY: None}.get(length, length)


def count_batches(dataset: tf.data.Dataset) -> float:
    """Returns the number of batches in one pass, inf if endless; reads a copy of a dataset of unknown length once."""
    length = cardinality(dataset)
    if length is None:
        log.info("The dataset does not know its length: reading it once to count its batches.")
        add_one = tf.autograph.experimental.do_not_convert(lambda count, *_: count + 1)
        length = int(fresh_copy(dataset).reduce(np.int64(0), add_one))
    return length


def can_be_inspected(dataset: Any) -> bool:
    """Returns whether a dataset gives the same batches after a look at its first one; of generators, nobody knows."""
    return kinds_of(dataset) <= _REPEATABLE


def are_rows_alike(dataset: Any) -> bool:
    """Returns whether all entries of a batch are known to have the same number of rows: nothing follows `batch`."""
    while (kind := type(dataset).__name__.lstrip("_")) in _KEEP_ROWS:
        (dataset,) = dataset._inputs()
    return kind in _BATCH


def _compare_shards(num_batches: float, strategy: tf.distribute.Strategy) -> tuple[float, int]:
    """Returns the number of batches of the longest shard, and how many of them this worker's shard lacks."""
    lengths = collectives.gather(strategy, -1 if num_batches == math.inf else int(num_batches))
    if min(lengths) < 0 < max(lengths):
        raise ValueError(
            f"The function of InputContext gave shards of {lengths} batches, where -1 is endless; the "
            "workers' shards are all endless or all finite: call repeat() on all of them or on none."
        )
    if 0 in lengths:
        raise ValueError(
            f"The function of InputContext gave shards of {lengths} batches; every worker "
            "needs one batch at least: shard by examples, or make as many files as there are workers."
        )
    if num_batches == math.inf:
        return math.inf, 0
    return max(lengths), max(lengths) - int(num_batches)


def _find_batch_size(dataset: Any) -> int | None:
    """Returns the rows of a whole batch without reading any, or None; the last batch may have fewer."""
    if (static_size := static_batch_size(dataset.element_spec)) is not None:
        return static_size
    while getattr(dataset, "_batch_size", None) is None and type(dataset).__name__.lstrip("_") in _KEEP_BATCHES:
        (dataset,) = dataset._inputs()
    return None if (batch_size := getattr(dataset, "_batch_size", None)) is None else int(batch_size)


def _replica_batch_sizes(batch_size: int, replicas: int, layout: BatchLayout) -> tuple[int, ...]:
    """Returns how many rows of a whole batch each replica takes; padding comes last and does not count."""
    rows = batch_size if batch_size >= layout.min_rows else math.lcm(batch_size, layout.min_rows)
    bounds = (layout.bounds(replica, replicas, rows) for replica in range(replicas))
    return tuple(min(batch_size, end) - min(batch_size, start) for start, end in bounds)


def _max_replica_rows(
    sizes: tuple[int, ...], layout: BatchLayout, padded_rows: int, strategy: tf.distribute.Strategy
) -> int | None:
    """Returns the largest number of rows that a replica of any worker takes, without padding.

    Args:
        sizes: rows of a whole batch that each (virtual) replica takes.
        layout: of the batches.
        padded_rows: the rows below which a batch that is no whole one is padded; 0: there is none.
        strategy: of the replicas.

    Returns:
        None if unknown, or if no collective needs it, since each number costs a trace.
    """
    if not strategies.uses_collectives(strategy):
        return None
    each = layout.per_device
    most = max((sum(sizes[i : i + each]) for i in range(0, len(sizes), each)), default=0)
    if layout.ratios:  # of a smaller batch, a replica may take a row more
        most = max(most, math.ceil(sum(sizes) * max(layout.ratios) / sum(layout.ratios)))
    for rows in range(1, min(padded_rows, sum(sizes))):  # the first replica may take all of them, before their copies
        most = max(most, min(rows, each * max(layout.shard_sizes(len(sizes), math.lcm(rows, padded_rows)))))
    rows_by_worker = layout.gather_sizes(strategy, most)
    return None if 0 in rows_by_worker else max(rows_by_worker)


def _require_batched(element_spec: Any) -> None:
    """Raises a ValueError unless every entry is a batch of dense or ragged tensors, `[B, ...]`, with one B."""
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
                f"The dataset gives a sparse tensor ({spec}), whose rows cannot be split between replicas: "
                "turn it into a dense or ragged one with Dataset.map."
            )
    rows = [spec for spec in specs if spec.shape.rank != 0]
    sizes = {spec.shape[0] for spec in rows if spec.shape.rank}
    if len(rows) < len(specs):
        path, spec = next(entry for entry in keras.tree.flatten_with_path(element_spec) if entry[1].shape.rank == 0)
        name = "/".join(map(str, path))
        if None in sizes or (len(rows) > 1 and len(sizes) == 1):
            raise ValueError(
                f"The dataset's entry {name!r} is a scalar beside rows; distloop takes batches, whose entries have a "
                "row for each example, [B, ...]: repeat it with Dataset.map, as in tf.repeat(scalar, tf.shape(x)[0]), "
                "or call .batch(batch_size) if the elements are single examples."
            )
        raise ValueError(
            f"The dataset's elements hold a scalar ({spec}), so they are single examples; distloop takes batches, "
            "[B, ...]: call .batch(batch_size) on the dataset."
        )
    if len(sizes - {None}) > 1:
        raise ValueError(
            f"The dataset's tensors have first axes of {sorted(sizes - {None})}; the entries of a batch share theirs, "
            "[B, ...]: call .batch(batch_size) on the dataset if its elements are single examples, or leave out with "
            "Dataset.map what has no row for each example."
        )

"""Skipping below maps: a pipeline that begins at a batch and computes none of the batches before it.

    dataset = begin_at(dataset, 300)         # None: the batches have to be read again

A pipeline that shuffles, maps and batches numbers, arrays in memory or a list of files skips examples where they are
cheap: above the shuffle, below the maps. The epochs before the place still draw their shuffle seeds. A pipeline whose
batches might change is left alone.
"""

from typing import Any

import tensorflow as tf

from distloop.operations import with_called

_MOST_ROWS = 1_000_000  # to skip: it is one operation, of seconds, that a stop waits for
_BATCHES = {"_BatchDataset", "_ParallelBatchDataset"}
_MAPS = {"_MapDataset", "_ParallelMapDataset"}
_PLAIN = {"_PrefetchDataset", "_OptionsDataset"}
_CHEAP_SOURCES = {"_RangeDataset", "_TensorSliceDataset"}


def begin_at(dataset: tf.data.Dataset, num_batches: int) -> tf.data.Dataset | None:
    """Returns a dataset without end that begins at a batch; None: it cannot be shown that no batch changes.

    It shuffles as the next iterator over the dataset would.

    Args:
        dataset: of batches. If it has an end, it is repeated.
        num_batches: in front of the first one to return, over all epochs.
    """
    try:
        return _begin_at(dataset, num_batches)
    except AttributeError:  # a version of TensorFlow that keeps the parts of a pipeline elsewhere
        return None


def _begin_at(dataset: tf.data.Dataset, num_batches: int) -> tf.data.Dataset | None:
    stages, base = [], dataset
    while _kind(base) in _BATCHES | _MAPS | _PLAIN or _repeats_without_end(base):
        stages.append(base)
        base = base._input_dataset
    repeats = [number for number, stage in enumerate(stages) if _repeats_without_end(stage)]
    batches = [number for number, stage in enumerate(stages) if _kind(stage) in _BATCHES]
    if len(batches) != 1 or len(repeats) > 1 or not _is_cheap(base) or not all(map(_gives_the_same, stages)):
        return None
    end = repeats[0] if repeats else -1  # an epoch's stages are those below the repeat
    num_rows, batch = int(base.cardinality()), stages[batches[0]]
    size = int(batch._batch_size)
    if num_rows < 1:
        return None
    if batches[0] < end:  # a batch may hold the end of an epoch and the start of the next
        rows = num_batches * size
    else:
        per_epoch = num_rows // size if bool(batch._drop_remainder) else -(-num_rows // size)
        epoch, batch_of_epoch = divmod(num_batches, per_epoch)
        rows = epoch * num_rows + batch_of_epoch * size
    if not 0 < rows <= _MOST_ROWS:
        return None
    begun = base.repeat(rows // num_rows + 1).skip(rows)
    for stage in reversed(stages[end + 1 :]):
        begun = _again(stage, begun)
    whole = stages[end + 1] if end + 1 < len(stages) else base
    begun = begun.concatenate(whole.repeat())
    for stage in reversed(stages[: max(end, 0)]):
        begun = _again(stage, begun)
    return begun


def _kind(dataset: tf.data.Dataset) -> str:
    return type(dataset).__name__


def _repeats_without_end(dataset: tf.data.Dataset) -> bool:
    return _kind(dataset) == "_RepeatDataset" and int(dataset._count) < 0


def _is_cheap(dataset: tf.data.Dataset) -> bool:
    """Returns whether a dataset and all below it give their examples at once."""
    if _kind(dataset) in _PLAIN | {"_ShuffleDataset"}:
        return _is_cheap(dataset._input_dataset)
    return _kind(dataset) in _CHEAP_SOURCES


def _gives_the_same(stage: tf.data.Dataset) -> bool:
    """Returns whether a stage gives the same for the same examples, in their order, and changes nothing else."""
    if stage.options().deterministic is False or getattr(stage, "_deterministic", None) == "false":
        return False
    if not all(isinstance(spec, tf.TensorSpec) for spec in tf.nest.flatten(stage.element_spec)):
        return False
    if _kind(stage) not in _MAPS:
        return True
    return not any(op.op_def.is_stateful for op in with_called(stage._map_func.function.graph.get_operations()))


def _again(stage: tf.data.Dataset, below: tf.data.Dataset) -> tf.data.Dataset:
    """Returns the same stage over another dataset."""
    if _kind(stage) == "_PrefetchDataset":
        return below.prefetch(int(stage._buffer_size))
    if _kind(stage) == "_OptionsDataset":
        return below.with_options(stage.options())
    calls = getattr(stage, "_num_parallel_calls", None)
    if _kind(stage) in _BATCHES:
        return below.batch(stage._batch_size, drop_remainder=stage._drop_remainder, num_parallel_calls=calls)

    def apply(*row: Any) -> Any:  # the function as it was traced: Python may give another one today
        return tf.nest.pack_sequence_as(stage.element_spec, stage._map_func.function(*tf.nest.flatten(row)))

    return below.map(tf.autograph.experimental.do_not_convert(apply), num_parallel_calls=calls)

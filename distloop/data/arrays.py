"""Datasets of global batches, made from NumPy arrays or from a dataset of examples.

    train = make_dataset({"x": x, "label": labels}, 64, shuffle=True)

It does not know replicas or places in the data.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf

from distloop.data.info import cardinality
from distloop.distributed.devices import HOST
from distloop.log import log

Arrays: TypeAlias = np.ndarray | Mapping[str, Any] | Sequence[Any]  # one or a structure of them, [N, ...]


def are_arrays(data: Any) -> bool:
    """Returns whether data is a NumPy array, or a nested structure of arrays alone."""
    leaves = tf.nest.flatten(data)
    return bool(leaves) and all(isinstance(leaf, np.ndarray) for leaf in leaves)


def as_dataset(data: Any, batch_size: int, shuffle_seed: int | None = None) -> Any:
    """Returns arrays as a dataset of global batches; any other data as it is.

    Args:
        data: as for `Trainer.fit`; a list of arrays gives batches that are tuples.
        batch_size: examples of a global batch; the last one of an epoch may have fewer.
        shuffle_seed: of the order, which is another one each epoch; None: the order of the arrays.

    Raises:
        ValueError: if arrays differ in length.
    """
    if not are_arrays(data):
        return data
    arrays = tuple(data) if isinstance(data, list) else data
    return make_dataset(arrays, batch_size, shuffle=shuffle_seed is not None, seed=shuffle_seed or 0)


def sizes_of(data: Any, batch_size: int) -> dict[str, int]:
    """Returns the rows of arrays and the batch size, which a place in them depends on; nothing for other data."""
    return {"num_rows": len(tf.nest.flatten(data)[0]), "batch_size": batch_size} if are_arrays(data) else {}


def convert_position(position: Mapping[str, Any], num_rows: int = 0, batch_size: int = 0) -> Mapping[str, Any]:
    """Returns a place in arrays, from `Source.save_position`, in batches of another size; a warning names both.

    The order of the examples does not depend on the batch size. No example is left out: the place is the last batch
    that begins at the saved place or before it, so up to `batch_size - 1` examples are read once more.

    Args:
        position: the saved place.
        num_rows: examples of a pass.
        batch_size: examples of a global batch; 0: unknown, and the place stays as it is.
    """
    saved_size = position.get("batch_size", batch_size)
    if not batch_size or saved_size == batch_size:
        return position

    def converted(num_batches: int) -> int:
        epoch, batch = divmod(num_batches, math.ceil(num_rows / saved_size))
        return epoch * math.ceil(num_rows / batch_size) + batch * saved_size // batch_size

    batches, skipped = converted(position["batches"]), [converted(number) for number in position["skipped"]]
    log.warning(
        "The checkpoint's batches had %d examples, these have %d: going on at batch %d, at the same examples.",
        *(saved_size, batch_size, batches),
    )
    return {**position, "batches": batches, "skipped": skipped, "batch_size": batch_size}


def make_dataset(
    examples: Any,
    batch_size: int,
    *,
    shuffle: bool | int = False,
    seed: int = 0,
    cache: bool = False,
    drop_remainder: bool = False,
) -> tf.data.Dataset:
    """Returns a dataset of global batches, from NumPy arrays or from a dataset of examples.

    Arrays are never copied row by row: row numbers are shuffled, and a batch is gathered at once.

    Args:
        examples: arrays `[N, ...]` in any nested structure, or an unbatched `tf.data.Dataset`.
        batch_size: examples of a global batch.
        shuffle: True: all examples, in another order each epoch; a number: within a buffer of that many examples.
        seed: of the order.
        cache: whether the examples of a dataset stay in memory after the first pass; arrays are in memory already.
        drop_remainder: whether to leave out the odd last batch; training on it is exact, so there is no need.

    Returns:
        The dataset: cached, shuffled, batched, prefetched.

    Raises:
        ValueError: if arrays differ in length, or if `shuffle=True` is given with a dataset of unknown length.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size} was given; a batch has one row at least.")
    if isinstance(examples, tf.data.Dataset):
        dataset = examples.cache() if cache else examples
        count = cardinality(examples)
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
    do_not_convert = tf.autograph.experimental.do_not_convert  # AutoGraph would write a file for each function
    gather = do_not_convert(lambda rows: tf.nest.map_structure(lambda t: tf.gather(t, rows), tensors))
    return batches.map(gather).prefetch(tf.data.AUTOTUNE)

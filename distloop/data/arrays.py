"""NumPy arrays where data is asked for.

    dataset = as_dataset({"x": x, "label": labels}, 64, shuffle_seed=0)

It does not know replicas or places in the data.
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf

from distloop.data.make_dataset import make_dataset

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
    return make_dataset(arrays, batch_size, shuffle=shuffle_seed is not None, seed=(shuffle_seed or 0) % 2**31)

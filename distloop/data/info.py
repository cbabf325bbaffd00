"""What a dataset tells before it is read: its length, its batch size, and whether its elements are batches."""

from typing import Any

import numpy as np
import tensorflow as tf

from distloop.data.shards import static_batch_size

# What may stand behind `batch`; a function that is mapped over batches is taken to keep their rows.
_KEEP_BATCHES = frozenset(
    f"{name}Dataset"
    for name in "Map ParallelMap Prefetch Repeat Shuffle Skip Take Shard Cache Options Filter AssertCardinality".split()
)


def batch_size_told(dataset: Any) -> int | None:
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


def cardinality(data: Any) -> float | None:
    """Batches in one pass; inf if endless, None if the dataset does not know."""
    length = int(data.cardinality().numpy() if callable(getattr(data, "cardinality", None)) else data.cardinality)
    if length == tf.data.INFINITE_CARDINALITY:
        return np.inf
    return None if length == tf.data.UNKNOWN_CARDINALITY else length


def require_batched(element_spec: Any) -> None:
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

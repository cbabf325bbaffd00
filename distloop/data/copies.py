"""Copies of datasets that shuffle as the original did when it was new.

    fresh_copy(dataset)      # as dataset was before its first iterator, however often it was read since

A copy is made by editing the dataset's graph: each shuffle gets a stream of seeds that no other iterator draws from.
"""

from typing import Any

import tensorflow as tf

from distloop.data.numbered import NumberedDataset
from distloop.log import log

_IGNORE_EXTERNAL_STATE = 1  # a policy of tf.data: a Python function's state is not copied
_SEEDS_INPUT = {
    "ShuffleDatasetV3": 4,
    "ShuffleAndRepeatDatasetV2": 5,
    "RandomDatasetV2": 2,
}  # the index of the input that draws seeds
_SEED_GENERATOR = "private_seed_generator"


def fresh_copy(dataset: Any) -> Any:
    """Returns the dataset as it was before it was first read; the same object if it does not shuffle.

    Data that is no `tf.data.Dataset` is returned as it is.
    All iterators over one dataset draw their shuffle seeds from one stream, so the second one has another order. An
    iterator over a copy draws from a stream of its own. If no copy can be made, a warning says why.
    """
    if isinstance(dataset, NumberedDataset):
        return dataset.fresh()
    if not isinstance(dataset, tf.data.Dataset):
        return dataset
    try:
        serialized = tf.raw_ops.DatasetToGraphV2(
            input_dataset=dataset._variant_tensor, external_state_policy=_IGNORE_EXTERNAL_STATE
        )
        graph = tf.compat.v1.GraphDef.FromString(serialized.numpy())
        shuffles = [node for node in graph.node if node.op in _SEEDS_INPUT]
        if not shuffles:
            return dataset
        graph.node.add(name=_SEED_GENERATOR, op="DummySeedGenerator")
        for node in shuffles:
            node.input[_SEEDS_INPUT[node.op]] = _SEED_GENERATOR
        copy = tf.raw_ops.DatasetFromGraph(graph_def=graph.SerializeToString())
    except (tf.errors.OpError, ValueError) as error:  # a graph has at most 2 GB
        message = error.message if isinstance(error, tf.errors.OpError) else str(error)
        log.warning(
            "The dataset cannot be copied (%s), so it will be shuffled in another order than before.",
            (message or "").partition("\n")[0][:150],
        )
        return dataset
    return tf.data.experimental.from_variant(copy, dataset.element_spec)

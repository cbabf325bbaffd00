"""Copies of datasets that shuffle as the original did when it was new, made by editing the dataset's graph."""

import tensorflow as tf
from absl import logging

_IGNORE_EXTERNAL_STATE, _FAIL_ON_EXTERNAL_STATE = 1, 2  # tf.data's policies; 0 warns
_SEEDS_INPUT = {"ShuffleDatasetV3": 4, "ShuffleAndRepeatDatasetV2": 5}  # which input is the stream of seeds


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

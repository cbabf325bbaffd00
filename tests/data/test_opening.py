"""Opening a user's data on a worker."""

import numpy as np
import tensorflow as tf

from distloop.data.make_dataset import make_dataset
from distloop.data.numbered import NumberedDataset
from distloop.data.opening import open_data


def test_each_kind_of_data_has_its_feed():
    numbered = open_data(make_dataset(np.arange(8), 4), 1, 0)
    assert isinstance(numbered.feed, NumberedDataset) and numbered.begins_anywhere
    generated = open_data(lambda: iter([np.ones(2)]), 1, 0)
    assert generated.feed is not None and generated.begins_anywhere and not generated.takes_context
    assert not open_data(lambda: iter([np.ones(2)]), 1, 0, limit=1).begins_anywhere
    plain = open_data(tf.data.Dataset.range(8).batch(4), 1, 0, limit=1)
    assert plain.feed is None and len(plain.dataset) == 1


def test_batches_are_changed_whatever_the_data():
    for data in (make_dataset(np.arange(4.0), 4), tf.data.Dataset.range(4).batch(4)):
        opened = open_data(data, 1, 0, map_batch=lambda batch: batch * 2)
        assert next(iter(opened.dataset)).numpy().tolist() == [0, 2, 4, 6]


def test_a_function_of_a_context_is_called_with_it():
    opened = open_data(lambda context: tf.data.Dataset.range(8).batch(context.num_input_pipelines), 3, 1)
    assert opened.takes_context and next(iter(opened.dataset)).shape == [3]

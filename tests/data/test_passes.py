import numpy as np
import pytest
import tensorflow as tf

import distloop
from distloop.data.source import Passes
from distloop.distributed.strategies import make_strategy


@pytest.fixture
def passes():
    return Passes(make_strategy(distloop.Config(device="cpu", num_devices=1)), batch_size=4)


def dataset():
    return tf.data.Dataset.range(8).map(lambda x: {"x": x}).batch(4)


def test_a_dataset_that_comes_again_has_the_same_source(passes):
    data = dataset()
    assert passes.source(data) is passes.source(data)
    assert passes.source(dataset()) is not passes.source(data)


def test_only_the_latest_datasets_are_remembered(passes):
    first = dataset()
    source = passes.source(first)
    others = [dataset() for _ in range(8)]
    for data in others:
        passes.source(data)
    assert passes.source(others[-1]).data is others[-1]
    assert passes.source(first) is not source


def test_arrays_are_read_again_each_time(passes):
    arrays = {"x": np.arange(6)}
    assert passes.source(arrays) is not passes.source(arrays)


def test_endless_data_is_refused_unless_a_limit_ends_the_pass(passes):
    data = dataset().repeat()
    with pytest.raises(ValueError, match="endless.*take"):
        passes.source(data)
    assert passes.source(data, may_be_endless=True).info.is_endless

"""Tests which device updates which shard of a variable, and variables that are stored in shards."""

import numpy as np
import pytest
import tensorflow as tf

from distloop.sharding.variable_shards import JoinedVariable, Slice, has_rows, plan, unit

RNG = np.random.default_rng(0)


def test_few_variables_are_cut():
    assert plan([1000, 1000], [64, 64], 2, [0, 0]) == [[Slice(0, 1000, 0)], [Slice(0, 1000, 1)]]
    assert plan([1280, 320], [64, 64], 2, [0, 0]) == [[Slice(0, 768, 0), Slice(768, 512, 1)], [Slice(0, 320, 1)]]
    assert plan([1280, 320], [1280, 64], 2, [0, 0]) == [[Slice(0, 1280, 0)], [Slice(0, 320, 1)]]
    assert plan([640], [64], 2, [640, 0]) == [[Slice(0, 640, 1)]]
    assert plan([0], [64], 2, [0, 0]) == [[Slice(0, 0, 0)]]


def test_large_variables_are_cut_between_rows_and_aligned():
    assert has_rows((8000, 4000)) and unit((8000, 4000)) == 4000
    assert has_rows((20000, 65)) and unit((20000, 65)) == 65 * 16
    assert not any(has_rows(shape) for shape in ((), (10**6,), (10**5, 8), (3, 3, 512, 512), (900, 4000)))
    assert unit((3, 3, 512, 512)) == 64
    units = [unit((2000, 80)), 64]
    slices, _ = plan([160_000, 80_000], units, 3, [0, 0, 0])
    assert [s.size % 80 for s in slices] == [0] * len(slices) and len(slices) > 1


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_every_element_is_in_one_part(count):
    sizes = RNG.integers(0, 5000, 30).tolist()
    slices = plan(sizes, [64] * 30, count, [0] * count)
    for size, of_variable in zip(sizes, slices, strict=True):
        ends = np.cumsum([s.size for s in of_variable]).tolist()
        assert [s.start for s in of_variable] == [0, *ends[:-1]] and ends[-1] == size
        assert all(s.start % 64 == 0 for s in of_variable)
    loads = [sum(s.size for of in slices for s in of if s.device == d) for d in range(count)]
    assert max(loads) <= sum(sizes) / count + 64 + 1
    assert sum(len(of_variable) > 1 for of_variable in slices) <= count


def test_a_joined_variable_is_used_as_one_and_a_worker_has_some_shards():
    shards = [tf.Variable(tf.zeros([4])), tf.Variable(tf.zeros([2]))]
    joined = JoinedVariable("momentum", shards, (2, 3))
    joined.assign(np.arange(6).reshape(2, 3))
    assert shards[0].numpy().tolist() == [0, 1, 2, 3] and shards[1].numpy().tolist() == [4, 5]
    assert tf.identity(joined).numpy().tolist() == joined.numpy().tolist() == [[0, 1, 2], [3, 4, 5]]
    assert (joined.shape, joined.dtype) == ((2, 3), tf.float32)
    shards = [tf.Variable(tf.zeros([0])), tf.Variable(tf.zeros([2]))]
    joined = JoinedVariable("momentum", shards, (2, 3), [(4,), (2,)], lambda: [tf.range(4.0), shards[1]])
    joined.assign(np.arange(6).reshape(2, 3))
    assert shards[0].shape == [0] and shards[1].numpy().tolist() == [4, 5]
    assert joined.numpy().tolist() == [[0, 1, 2], [3, 4, 5]]

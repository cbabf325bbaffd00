"""Microbatches: what a TensorFlow loop adds up; tests/test_bits.py has what virtual replicas promise."""

import pytest
import tensorflow as tf

from distloop.optimizers.gradients import Packing, Rows
from distloop.training.microbatches import LoopSums, MicrobatchSums, SparseSegmentsError


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("is_eager", [False, True])
def test_a_loop_adds_up_gradients_and_vectors_and_joins_rows(count, is_eager):
    packing = Packing([tf.Variable([0.0, 0.0])])

    def body(carried):
        value = tf.cast(carried.index + 1, tf.float32)
        rows = tf.fill([carried.index, 2], value)  # the first microbatch has none
        segments = packing.pack([value * tf.constant([1.0, 2.0])])
        return (loop.add(carried, MicrobatchSums(segments, tf.stack([value, 1.0]), [], [[rows]])),)

    def sums():
        settings = {"loop_vars": (loop.start,), "shape_invariants": (loop.shapes,)}
        (carried,) = tf.while_loop(lambda carried: carried.index < count, body, **settings)
        total = loop.total(carried)
        return total.segments, total.vector, total.rows

    def run():
        nonlocal loop
        loop = LoopSums(packing, count, [tf.TensorSpec([None, 2])])
        return sums()

    loop = None
    (segment,), vector, ((rows,),) = run() if is_eager else tf.function(run, autograph=False)()
    total = count * (count + 1) / 2
    assert segment.numpy().tolist() == [total, 2 * total]
    assert vector.numpy().tolist() == [total, count]
    assert rows.numpy().tolist() == [[i + 1, i + 1] for i in range(count) for _ in range(i)]


def test_a_loop_for_dense_segments_is_made_again_for_sparse_ones():
    packing = Packing([tf.Variable([[0.0, 0.0]])])
    loop = LoopSums(packing, 2, [])
    rows = Rows(tf.constant([0], tf.int64), tf.ones([1, 2]))
    with pytest.raises(SparseSegmentsError):
        loop.add(loop.start, MicrobatchSums([rows], tf.ones([2]), [], [[]]))
    loop = LoopSums(packing, 2, [])
    carried = loop.start
    for _ in range(2):
        carried = loop.add(carried, MicrobatchSums([rows], tf.ones([2]), [], [[]]))
    total = loop.total(carried)
    assert total.segments[0].numbers.numpy().tolist() == [0, 0] and total.vector.numpy().tolist() == [2.0, 2.0]

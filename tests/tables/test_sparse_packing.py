"""Rows of tables: lists, their sums, and the functions of gradients that take them beside dense ones."""

import types

import numpy as np
import pytest
import tensorflow as tf

from distloop.distributed.devices import Replicas
from distloop.optimizers import gradients
from distloop.optimizers.gradients import Clipping, Rows
from distloop.tables.sparse_packing import SparsePacking
from tests.problems import mirrored

SHAPE = (7, 2)


@pytest.fixture(autouse=True)
def every_variable_is_large(monkeypatch):
    monkeypatch.setattr(gradients, "LARGEST_PACKED_BYTES", 0)


def slices(numbers, values=None, shape=SHAPE):
    values = np.arange(1.0, 1 + len(numbers) * np.prod(shape[1:])) if values is None else np.asarray(values, float)
    values = tf.constant(values.reshape([len(numbers), *shape[1:]]), tf.float32)
    return tf.IndexedSlices(values, tf.constant(numbers, tf.int32), tf.constant(shape))


def sparse(variables, replicas=1):
    state = types.SimpleNamespace(strategy=mirrored(replicas), replicas=Replicas(replicas))
    return SparsePacking(variables, state, for_rows=True)


def packing(kind=sparse, **arguments):
    return kind([tf.TensorSpec(SHAPE), tf.TensorSpec([3])], **arguments)


def dense(*numbers):
    return tf.convert_to_tensor(slices(*numbers)).numpy()


@pytest.mark.parametrize("shape", [(7,), (7, 2), (7, 2, 3)])
def test_a_sparse_gradient_comes_back_in_the_shape_of_its_table(shape):
    layout = sparse([tf.TensorSpec(shape)])
    gradient = slices([4, 1, 4], shape=shape)
    segments = layout.pack([gradient])
    assert isinstance(segments[0], Rows)
    (whole,), (kept,) = layout.unpack(segments), layout.unpack(segments, tf.constant(2.0), keeps_sparse=True)
    np.testing.assert_array_equal(whole, tf.convert_to_tensor(gradient))
    np.testing.assert_array_equal(tf.convert_to_tensor(kept), 2 * whole)


def test_a_gradient_stays_sparse_only_where_that_is_asked_for_and_pays(monkeypatch):
    gradient = [slices([4, 1]), tf.ones([3])]
    packed = [packing().pack(gradient), packing(gradients.Packing).pack(gradient)]
    packed.append(packing().pack(gradient, keeps_sparse=False))
    assert [isinstance(segments[0], Rows) for segments in packed] == [True, False, False]
    monkeypatch.setattr(gradients, "LARGEST_PACKED_BYTES", 56)  # of 7 x 2 numbers
    assert [segment.shape.as_list() for segment in packing().pack(gradient)] == [[17]]


def test_sums_of_sparse_and_dense_gradients_are_those_of_dense_ones():
    layout = packing()
    rows = layout.pack([slices([4, 1, 4]), tf.ones([3])])
    other = layout.pack([slices([4, 2]), tf.ones([3])])
    whole = layout.pack([tf.ones(SHAPE), tf.ones([3])])
    (joined, vector), (mixed, _) = layout.add(rows, other), layout.add(rows, whole)
    assert joined.numbers.numpy().tolist() == [4, 1, 4, 4, 2] and vector.numpy().tolist() == [2.0] * 3
    np.testing.assert_array_equal(layout.unpack([joined, vector])[0], dense([4, 1, 4]) + dense([4, 2]))
    np.testing.assert_array_equal(tf.reshape(mixed, SHAPE), dense([4, 1, 4]) + 1)


@pytest.mark.slow
@pytest.mark.parametrize("clipping", [dict(), dict(norm=3.0), dict(variable_norm=2.0), dict(value=0.7)], ids=str)
@pytest.mark.parametrize("bad", [0.0, np.inf])
def test_norms_clipping_and_the_diagnosis_are_those_of_the_dense_gradient(clipping, bad):
    clipping, results = Clipping(**clipping), []
    values = [[1.0, -2.0], [3.0, 4.0], [0.5, bad]]
    for layout in (packing(), packing(gradients.Packing)):
        segments, _ = layout.all_reduce(layout.pack([slices([4, 1, 4], values), tf.ones([3])]), {})
        squares = gradients.squared_norms(segments)
        norm, scale = gradients.norm_and_scale(squares, tf.constant(2.0))
        found = layout.find_nonfinite(layout.diagnosis(segments, squares).numpy())
        segments, scale, is_clipped = clipping.clip(layout, segments, norm, scale, tf.math.is_finite(norm))
        results.append([norm, is_clipped, *layout.unpack(segments, scale)])
        assert found == ([0] if bad else [])
        assert isinstance(segments[0], Rows) == isinstance(layout, SparsePacking)
    for kept, whole in zip(*results, strict=True):
        np.testing.assert_allclose(tf.cast(kept, tf.float32), tf.cast(whole, tf.float32), rtol=1e-6)

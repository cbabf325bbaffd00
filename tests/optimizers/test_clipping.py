"""Gradients are clipped after the division, by one norm, by variable or by element."""

import numpy as np
import pytest
import tensorflow as tf

from distloop.optimizers import gradients
from distloop.optimizers.clipping import Clipping
from tests.optimizers.test_gradients import random_gradients


def divide_and_clip(segments, weight, clip_norm):
    _, norm, scale = gradients.norm_and_scale(segments, tf.constant(weight))
    clipping, packing = Clipping(norm=clip_norm), gradients.Packing([])
    segments, scale, is_clipped = clipping.clip(packing, segments, norm, scale, tf.math.is_finite(norm))
    assert bool(is_clipped) == bool(clip_norm and norm > clip_norm)
    return gradients.scaled(segments, scale), norm


@pytest.mark.parametrize(
    "limit, clipped, is_clipped",
    [
        ({"value": 2.0}, ([[2.0, -2.0]], [1.0]), True),
        ({"variable_norm": 2.5}, ([[1.5, -2.0]], [1.0]), True),
        ({"value": 4.0}, ([[3.0, -4.0]], [1.0]), False),
        ({"variable_norm": 5.0}, ([[3.0, -4.0]], [1.0]), False),
    ],
)
def test_elements_or_variables_are_clipped_after_the_division(limit, clipped, is_clipped):
    packing = gradients.Packing([tf.Variable(tf.zeros([1, 2])), tf.Variable([0.0])])
    segments = packing.pack([tf.constant([[6.0, -8.0]]), tf.constant([2.0])])
    clipping = Clipping(**limit)
    for bad in (0.0, np.inf):
        sums = [segment + bad for segment in segments]
        _, norm, scale = gradients.norm_and_scale(sums, tf.constant(2.0))
        found, scale, was_clipped = clipping.clip(packing, sums, norm, scale, tf.math.is_finite(norm))
        if np.isfinite(bad):
            assert [g.numpy().tolist() for g in packing.unpack(found, scale)] == list(clipped)
            assert bool(was_clipped) == is_clipped
        else:
            assert np.isinf(found[0]).all()  # so that they can be found


@pytest.mark.parametrize("clip_norm", [0.0, 0.1, 100.0])
def test_gradients_are_divided_and_clipped_as_numpy_does_it(clip_norm):
    segments = random_gradients([tf.TensorSpec([5]), tf.TensorSpec([7])])
    found, norm = divide_and_clip(segments, 4.0, clip_norm)
    divided = [segment.numpy().astype(np.float64) / 4.0 for segment in segments]
    expected_norm = np.sqrt(sum(np.sum(part**2) for part in divided))
    factor = min(1.0, clip_norm / expected_norm) if clip_norm else 1.0
    np.testing.assert_allclose(norm, expected_norm, rtol=1e-6)  # before clipping
    for part, expected in zip(found, divided, strict=True):
        np.testing.assert_allclose(part, expected * factor, rtol=1e-6)


def test_gradients_at_the_clip_norm_are_not_touched():
    found, norm = divide_and_clip([tf.constant([6.0, 8.0])], 2.0, 5.0)
    assert float(norm) == 5.0
    np.testing.assert_array_equal(found[0], [3.0, 4.0])


@pytest.mark.parametrize("clip_norm", [0.0, 1.0])
def test_gradients_of_weight_0_become_0(clip_norm):
    found, norm = divide_and_clip([tf.constant([6.0, 8.0])], 0.0, clip_norm)
    assert float(norm) == 0.0
    np.testing.assert_array_equal(found[0], [0.0, 0.0])


def test_gradients_of_0_are_not_clipped_into_nan():
    found, norm = divide_and_clip([tf.zeros([2])], 2.0, 1.0)
    assert float(norm) == 0.0
    np.testing.assert_array_equal(found[0], [0.0, 0.0])


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("clip_norm", [0.0, 1.0])
def test_the_norm_is_not_finite_if_one_gradient_is_not(bad, clip_norm):
    _, norm = divide_and_clip([tf.ones([3]), tf.constant([1.0, bad])], 2.0, clip_norm)
    assert not np.isfinite(norm)


@pytest.mark.parametrize("dtype", [tf.bfloat16, tf.float16, tf.float64])
def test_gradients_keep_their_dtype_and_the_norm_is_float32(dtype):
    found, norm = divide_and_clip([tf.cast([300.0, 400.0], dtype)], 1.0, 5.0)
    assert found[0].dtype == dtype and norm.dtype == tf.float32
    np.testing.assert_allclose(norm, 500.0, rtol=1e-2)
    np.testing.assert_allclose(tf.cast(found[0], tf.float32), [3.0, 4.0], rtol=1e-2)

"""Whether a loss has jumped."""

import numpy as np
import pytest
import tensorflow as tf

from distloop.model.loss_spikes import LossWatch


@pytest.mark.slow
def test_noise_is_no_jump():
    watch, rng = LossWatch(1), np.random.default_rng(0)
    losses = np.exp(rng.normal(size=2000))  # heavy on the large side, up to 20 times the median
    assert losses.max() > 15
    check = tf.function(lambda loss: watch.check(loss, tf.constant([True]), 10.0))
    assert not any(check(loss) for loss in tf.constant(losses[:, np.newaxis]))


@pytest.mark.slow
@pytest.mark.parametrize("offset", [0.0, 1000.0, -1000.0])
def test_a_jump_is_seen_and_not_learned_from(offset):
    watch = LossWatch(2)
    has_weight = tf.constant([True, True])
    for i in range(150):
        assert not watch.check([offset + np.sin(i), 1.0], has_weight, 5.0)
    before = watch.statistics.numpy()
    np.testing.assert_allclose(before[0, :2], [150, offset], atol=0.1)
    np.testing.assert_allclose(before[:, 2], [0.5, 0.0], atol=0.02)
    assert watch.check([offset + 1.1 * 5 * (abs(offset) + 0.75), 1.0], has_weight, 5.0)
    assert not watch.check([np.nan, np.inf], has_weight, 5.0)
    assert not watch.check([1e9, 1e9], tf.constant([False, False]), 5.0)
    after = watch.statistics.numpy()
    np.testing.assert_array_equal(after[0], before[0])


def test_the_first_steps_are_no_jumps():
    watch = LossWatch(1)
    assert not any(watch.check([10.0**i], tf.constant([True]), 1.0) for i in range(20))

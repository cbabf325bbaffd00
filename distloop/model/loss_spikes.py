"""Loss spikes: detects a loss that is far above its moving mean.

    watch = LossWatch(2)                                          # two losses
    has_jumped = watch.check(losses, has_weight, jump=10.0)       # in a `tf.function`, once a step

It does not know what is done about a spike.
"""

import tensorflow as tf

from distloop.distributed.devices import HOST

_WINDOW_STEPS = 100  # of the moving mean and deviation
_MIN_STEPS = 20  # the statistics of fewer steps are too uncertain to compare with


class LossWatch(tf.Module):
    """Moving mean and deviation of each loss.

    Attributes:
        statistics: `[U, 3]`, float64: number of steps, mean and variance of each loss.
    """

    def __init__(self, num_losses: int):
        """Creates the statistics, of no steps yet.

        Args:
            num_losses: U.
        """
        super().__init__(name="loss_watch")
        with tf.device(HOST):
            self.statistics = tf.Variable(tf.zeros([num_losses, 3], tf.float64), trainable=False, name="statistics")

    def check(self, losses: tf.Tensor, has_weight: tf.Tensor, jump: float) -> tf.Tensor:
        """Compares the losses of a step with their statistics, and updates the statistics of the losses that fit.

        A loss has jumped if `loss - mean > jump * (deviation + |mean|)`. The deviation separates spikes from noise; the
        mean's size keeps a loss that hardly varies from jumping by a small number. Mean and variance follow the
        incremental formulas of Finch, "Incremental calculation of weighted mean and variance" (2009), with weight
        1 / 100, and 1 / n in the first hundred steps.

        Args:
            losses: `[U]`, of one step; a loss that is not finite neither jumps nor changes its statistics.
            has_weight: `[U]`, bool: whether any example had a weight; a loss without examples is ignored.
            jump: the factor in the formula.

        Returns:
            A scalar bool: whether any loss has jumped.
        """
        losses = tf.cast(losses, tf.float64)
        count, mean, variance = tf.unstack(self.statistics.read_value(), axis=1)
        counts = has_weight & tf.math.is_finite(losses)
        difference = tf.where(counts, losses - mean, 0.0)
        has_jumped = (count >= _MIN_STEPS) & (difference > jump * (tf.sqrt(variance) + tf.abs(mean)))
        weight = 1.0 / tf.minimum(count + 1, _WINDOW_STEPS)
        moved = [count + 1, mean + weight * difference, (1 - weight) * (variance + weight * difference**2)]
        learns = (counts & ~has_jumped)[:, None]
        self.statistics.assign(tf.where(learns, tf.stack(moved, 1), self.statistics))
        return tf.reduce_any(has_jumped)

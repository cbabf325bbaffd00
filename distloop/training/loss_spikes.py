"""Owns the judgement that a loss has jumped: that it left what it was for a while by far.

    watch = LossWatch(2)                                          # two losses
    has_jumped = watch.check(losses, has_weight, jump=10.0)       # in a `tf.function`, once a step

It does not know what is done about it.
"""

import tensorflow as tf

from distloop.distributed.devices import HOST

_WINDOW_STEPS = 100  # of the moving mean and deviation
_FIRST_STEPS = 20  # too few to know what is usual


class LossWatch(tf.Module):
    """Moving means and deviations of some losses.

    Attributes:
        statistics: `[U, 3]`, float64: of each loss the steps seen, the mean and the variance.
    """

    def __init__(self, num_losses: int):
        """Has seen nothing yet.

        Args:
            num_losses: U.
        """
        super().__init__(name="loss_watch")
        with tf.device(HOST):
            self.statistics = tf.Variable(tf.zeros([num_losses, 3], tf.float64), trainable=False, name="statistics")

    def check(self, losses: tf.Tensor, has_weight: tf.Tensor, jump: float) -> tf.Tensor:
        """Compares losses with what they were, and learns from those that are usual.

        A loss has jumped if it is larger than its mean by more than `jump` times the sum of its deviation and the
        mean's size: the first keeps noise apart from jumps, the second small numbers of a loss that hardly varies. Mean
        and variance move by the incremental formulas of Finch, "Incremental calculation of weighted mean and variance"
        (2009), with the weight 1 / 100, and 1 / n in the first hundred steps.

        Args:
            losses: `[U]`, of a step; those that are not finite have not jumped, and nothing is learned from them.
            has_weight: `[U]`, bool: whether any example counted in them; else they say nothing.
            jump: see above.

        Returns:
            A scalar bool: whether any jumped.
        """
        losses = tf.cast(losses, tf.float64)
        count, mean, variance = tf.unstack(self.statistics.read_value(), axis=1)
        counts = has_weight & tf.math.is_finite(losses)
        difference = tf.where(counts, losses - mean, 0.0)
        has_jumped = (count >= _FIRST_STEPS) & (difference > jump * (tf.sqrt(variance) + tf.abs(mean)))
        weight = 1.0 / tf.minimum(count + 1, _WINDOW_STEPS)
        moved = [count + 1, mean + weight * difference, (1 - weight) * (variance + weight * difference**2)]
        learns = (counts & ~has_jumped)[:, None]
        self.statistics.assign(tf.where(learns, tf.stack(moved, 1), self.statistics))
        return tf.reduce_any(has_jumped)

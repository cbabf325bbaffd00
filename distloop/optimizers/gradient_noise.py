"""The gradient noise scale: how much the gradients of microbatches differ, and so which batch size helps.

    noise = of_microbatch(segments, weight)             # [2], of each microbatch of a batch, in replica context
    trace, square = estimates(sums, weight, norm)       # of the noise summed over all microbatches

McCandlish et al. 2018, arXiv:1812.06162, appendix A.1, for R microbatches of any weights: each has the weight w and
the mean gradient g, the batch W = sum(w) and G. With N = sum(w * |g|^2), both without bias,

    trace  = (N - W * |G|^2) / (R - 1)       # of the covariance of the gradient of a weight of 1, such as an example
    square = |G|^2 - trace / W               # the squared norm of the true gradient

The simple noise scale is trace / square, each smoothed before the division: `actions.built_in.GradientNoise`.
"""

from collections.abc import Sequence

import tensorflow as tf

from distloop.optimizers.gradients import Rows, Segment

NAMES = TRACE, SQUARE = "gradient_trace", "gradient_square"  # of the tallies


def of_microbatch(segments: Sequence[Segment], weight: tf.Tensor) -> tf.Tensor:
    """Returns `weight * |gradient / weight|^2` and 1 of a microbatch, zeros if its weight is 0.

    Args:
        segments: the packed gradient of a sum over the microbatch.
        weight: of the sum, [].
    """
    squares = [2.0 * tf.nn.l2_loss(tf.cast(_values_once(segment), tf.float32)) for segment in segments]
    return tf.stack([tf.math.divide_no_nan(tf.add_n(squares), weight), tf.cast(weight > 0, tf.float32)])


def unscaled(noise: tf.Tensor | None, factor: tf.Tensor | None) -> tf.Tensor | None:
    """Returns the noise of gradients that a factor of the loss has scaled, without the factor."""
    return noise if noise is None or factor is None else noise / tf.stack([factor**2, 1.0])


def estimates(noise: tf.Tensor, weight: tf.Tensor, norm: tf.Tensor) -> list[tf.Tensor]:
    """Returns the tallies of both estimates: a total and the weight 1 each, zeros with less than two microbatches.

    Args:
        noise: the sum of `of_microbatch` over all microbatches, [2].
        weight: of the batch, [].
        norm: of its mean gradient, [].
    """
    total, microbatches = tf.unstack(noise)
    trace = tf.math.divide_no_nan(total - weight * norm**2, microbatches - 1.0)
    square = norm**2 - tf.math.divide_no_nan(trace, weight)
    is_measured = tf.cast(microbatches > 1, tf.float32)
    return [trace * is_measured, is_measured, square * is_measured, is_measured]


def _values_once(segment: Segment) -> tf.Tensor:
    """Returns the values of a segment; of a sparse one, each row of the table once."""
    if not isinstance(segment, Rows):
        return segment
    _, indices = tf.unique(segment.numbers)
    return tf.math.unsorted_segment_sum(segment.values, indices, tf.size(segment.numbers))

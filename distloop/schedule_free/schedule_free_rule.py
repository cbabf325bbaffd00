"""Schedule-free rule: how a step changes z and y, by the paper, in place of Keras's own.

    follow_paper(optimizer)      # a keras.optimizers.ScheduleFreeAdamW, before it is built

Algorithm 1 of Defazio et al. 2024 (arXiv:2405.15682), with learning rate r, warm-up over T steps, weight decay d and
gradient g at y, at step t = 1, 2, ...:

    r_t = r min(1, t / T)            v += (1 - beta_2) (g^2 - v)
    z  -= s                          s  = r_t (g / (sqrt(v / (1 - beta_2^t)) + epsilon) + d y)
    x  += c (z - x)                  c  = r_t^2 / (r_1^2 + ... + r_t^2)
    y   = (1 - beta_1) z + beta_1 x

On TensorFlow, Keras 3.15 computes x from y and the new z, not the old one. So its y is the plain mean of all z,
whatever beta_1 is. It has c = 1 / t in the warm-up, too, and weight decay moves its y alone.
"""

from typing import Any

import keras
import tensorflow as tf

from distloop.variables import tensorflow_variable


def follow_paper(optimizer: Any) -> None:
    """Replaces Keras's rule of an optimizer; that of a subclass of the user's stays.

    Raises:
        ValueError: if the learning rate changes from step to step, but for the warm-up.
    """
    if type(optimizer).update_step is not keras.optimizers.ScheduleFreeAdamW.update_step:
        return
    if callable(rate := optimizer._learning_rate):
        raise ValueError(
            f"{type(optimizer).__name__} was given {type(rate).__name__} as its learning rate, which has to stay after "
            "the warm-up: give a number and warmup_steps=."
        )

    def update_step(gradient: Any, variable: Any, learning_rate: Any) -> None:
        _update(optimizer, variable, gradient, learning_rate)

    optimizer.update_step = update_step
    optimizer._apply_weight_decay = lambda variables: None  # it is in the step


def _update(optimizer: Any, variable: Any, gradient: Any, learning_rate: Any) -> None:
    """Changes the slots z and v of a variable, and y, which is the variable."""
    weights, number = tensorflow_variable(variable), optimizer._get_variable_index(variable)
    slots = optimizer._momentums[number], optimizer._velocities[number]
    of_z, of_v = (tensorflow_variable(slot) for slot in slots)
    with tf.device(weights.device):
        y, z, gradient = tf.identity(weights), tf.identity(of_z), tf.cast(tf.convert_to_tensor(gradient), weights.dtype)
        t, beta_1, beta_2, warmup = (
            tf.cast(number, y.dtype)
            for number in (optimizer.iterations + 1, optimizer.beta_1, optimizer.beta_2, max(optimizer.warmup_steps, 1))
        )
        v = of_v + (tf.square(gradient) - of_v) * (1 - beta_2)
        direction = gradient / (tf.sqrt(v / (1 - beta_2**t)) + optimizer.epsilon)
        if optimizer.weight_decay is not None and optimizer._use_weight_decay(variable):
            direction += y * tf.cast(optimizer.weight_decay, y.dtype)
        factor = tf.minimum(t / warmup, 1)
        step = direction * (tf.cast(learning_rate, y.dtype) * factor)
        c = factor**2 / _sum_of_squares(t, warmup)
        of_v.assign(v)
        of_z.assign(z - step)
        # y of the new z and x, by y of the old ones: x itself is not needed.
        weights.assign_add((z - y) * c - step * (1 - beta_1 * (1 - c)))


def _sum_of_squares(t: tf.Tensor, warmup: tf.Tensor) -> tf.Tensor:
    """Returns the sum of min(1, i / warmup)^2 over i = 1 to t."""
    n = tf.minimum(t, warmup)
    return n * (n + 1) * (2 * n + 1) / (6 * warmup**2) + tf.maximum(t - warmup, 0)

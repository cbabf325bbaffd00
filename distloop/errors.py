"""Owns the sentence for users that a failed operation of TensorFlow carries.

require(tf.equal(rows, batch_size), 'loss_fn returned "loss" with another number of rows than its batch; ...')

"""

import tensorflow as tf

# Stands before and after the message for users in that of a failed operation; `inputs.explain` finds it.
USER_ERROR = "distloop: "


def require(condition: tf.Tensor, message: str) -> tf.Tensor:
    """Makes the step fail with a message for users if a condition does not hold, for what tracing cannot know.

    Returns:
        The condition. What must not happen after a failure depends on it as data: TensorFlow's graph optimizer may drop
        a control dependency.
    """
    with tf.control_dependencies([tf.debugging.Assert(condition, [f"{USER_ERROR}{message}{USER_ERROR}"])]):
        return tf.identity(condition)

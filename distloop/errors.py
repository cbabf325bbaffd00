"""Owns the sentence for users that a failed operation of TensorFlow carries.

require(tf.equal(rows, batch_size), 'loss_fn returned "loss" with another number of rows than its batch; ...')

"""

import tensorflow as tf

# Stands before and after the message for users in that of a failed operation; `explain_data_error` finds it.
USER_ERROR = "distloop: "

EMPTY_DATASET = "The dataset given is empty; distloop needs one batch at least: check its files or filter."


def require(condition: tf.Tensor, message: str) -> tf.Tensor:
    """Makes the step fail with a message for users if a condition does not hold, for what tracing cannot know.

    Returns:
        The condition. What must not happen after a failure depends on it as data: TensorFlow's graph optimizer may drop
        a control dependency.
    """
    with tf.control_dependencies([tf.debugging.Assert(condition, [f"{USER_ERROR}{message}{USER_ERROR}"])]):
        return tf.identity(condition)


def explain_data_error(error: tf.errors.OpError) -> ValueError | None:
    """Says in one sentence what is wrong with the data, where an error of TensorFlow's is about that."""
    message = error.message or ""
    if isinstance(error, tf.errors.OutOfRangeError):
        return ValueError(EMPTY_DATASET)
    if "`generator` yielded" in message:
        line = next(line for line in message.splitlines() if "`generator` yielded" in line)
        what = line[line.index("`generator` yielded") :].rstrip(". ").replace(". The", "; the")[:300]
        return ValueError(
            f"A batch differs from those before it: {what}; every batch has the same structure, dtypes and number "
            "of axes: correct the generator or its output_signature."
        )
    if USER_ERROR in message:
        text = message.split(USER_ERROR)[1]
        return ValueError(text.replace("\\'", "'").replace('\\"', '"'))  # TensorFlow escapes quotes
    return None

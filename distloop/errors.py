"""Errors for users: one sentence, carried through a failed operation of TensorFlow.

require(tf.equal(rows, batch_size), 'The value "loss" has another number of rows than its batch; ...')
except tf.errors.OpError as error:
raise as_user_error(error) or error
"""

import tensorflow as tf

USER_ERROR = "distloop: "  # marks the beginning and the end of the sentence in the operation's message

EMPTY_DATASET = "The dataset given is empty; distloop needs one batch at least: check its files or filter."


def require(condition: tf.Tensor, message: str) -> tf.Tensor:
    """Fails the step with a message for users if a condition does not hold that tracing cannot know.

    Returns:
        The condition. Operations that must not run after a failure take it as data, since TensorFlow's graph optimizer
        may drop a control dependency.
    """
    with tf.control_dependencies([tf.debugging.Assert(condition, [f"{USER_ERROR}{message}{USER_ERROR}"])]):
        return tf.identity(condition)


def as_user_error(error: tf.errors.OpError) -> ValueError | None:
    """Returns an error of TensorFlow as a sentence about the user's data or functions; None if it is about neither."""
    message = error.message or ""
    if isinstance(error, tf.errors.OutOfRangeError):
        return ValueError(EMPTY_DATASET)
    if "`generator` yielded" in message:
        line = next(line for line in message.splitlines() if "`generator` yielded" in line)
        difference = line[line.index("`generator` yielded") :].rstrip(". ").replace(". The", "; the")[:300]
        return ValueError(
            f"A batch differs from those before it: {difference}; every batch has the same structure, dtypes and "
            "number of axes: correct the generator or its output_signature."
        )
    if USER_ERROR in message:
        sentence = message.split(USER_ERROR)[1]
        return ValueError(sentence.replace("\\'", "'").replace('\\"', '"'))  # TensorFlow escapes quotes
    return None

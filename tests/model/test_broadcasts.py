"""Values of shape [B, B]: refused where a broadcast made them, accepted where they are meant or T happens to be B."""

import pytest
import tensorflow as tf

import distloop
from distloop.model.broadcasts import refuse_pairs
from tests.problems import refused

B = 6
POSITIONS = tf.reshape(tf.range(B, dtype=tf.float32), [B])
SIZES = pytest.mark.parametrize("size", [None, B])


def check(value_of, size=B):
    """Traces a loss with so many rows, None for any number, and checks its values."""

    def loss_fn(batch, training):
        return {"loss": value_of(batch["label"], batch["score"], batch["tokens"])}  # [B], [B, 1], [B, T]

    def trace(batch):
        refuse_pairs(loss_fn(batch, True), loss_fn, batch, True)

    shapes = {"label": [size], "score": [size, 1], "tokens": [size, B]}
    specs = {name: tf.TensorSpec(shape) for name, shape in shapes.items()}
    tf.function(trace, autograph=False).get_concrete_function(specs)


REFUSED = {
    "squared error": lambda label, score, tokens: (label - score) ** 2,
    "weighted": lambda label, score, tokens: distloop.weighted(tf.where(score > label, score - label, 0.0), label),
    "cross entropy": lambda label, score, tokens: (
        tf.nn.relu(score) - score * label + tf.math.log1p(tf.exp(-tf.abs(score)))
    ),
}
REDUCED = {
    "mean": lambda label, score, tokens: tf.reduce_mean((label - score) ** 2, -1),
    "weighted sum": lambda label, score, tokens: distloop.weighted(2 * tf.reduce_sum(tf.abs(score - label), 0), label),
    "beside a mean over tokens": lambda label, score, tokens: (
        tf.sqrt(tf.reduce_max((label - score) ** 2, 1)) + tf.reduce_mean(tokens, 1)
    ),
}
BROADCAST = ("[B, 1]", "were broadcast against each other (test_broadcasts.py:")


@SIZES
@pytest.mark.parametrize("case", [*REFUSED, *REDUCED])
def test_labels_without_the_axis_of_the_predictions_are_refused(case, size):
    if case in REFUSED:
        parts = ('loss_fn returned "loss" of shape [B, B]', *BROADCAST, "predictions[:, 0]")
    else:
        parts = ('loss_fn returned "loss" reduced from shape [B, B]', *BROADCAST)
    refused(lambda: check((REFUSED | REDUCED)[case], size), *parts)


def are_equal(score, label):
    return tf.cast(score == label, tf.float32)


ACCEPTED = {
    "mean over tokens": lambda label, score, tokens: tf.reduce_mean((tokens - score) ** 2, -1),
    "mean of pairs by an axis of its own": lambda label, score, tokens: tf.reduce_mean(
        tf.nn.relu(1.0 - (label[:, None] - label)), 1
    ),
    "mean of a product beside their number": lambda label, score, tokens: (
        tf.reduce_sum(are_equal(score, label) * tf.matmul(score, score, transpose_b=True), 1)
        / tf.reduce_sum(are_equal(score, label), 1)
    ),
    "mean of a mask of lengths": lambda label, score, tokens: tf.reduce_mean(
        tf.sequence_mask(tf.cast(label, tf.int32), B, tf.float32), 1
    ),
    "sum of one hot": lambda label, score, tokens: tf.reduce_sum(tf.one_hot(tf.cast(label, tf.int32), B), 1),
    "tokens": lambda label, score, tokens: (tokens - score) ** 2,
    "positions": lambda label, score, tokens: POSITIONS * score,
    "masked pairs": lambda label, score, tokens: (
        are_equal(label[:, None], label) * tf.matmul(score, score, transpose_b=True)
    ),
    "an axis of its own": lambda label, score, tokens: (label[None, :] - score) ** 2,
    "gathered rows": lambda label, score, tokens: (distloop.gather_rows(label)[0] - score) ** 2,
    "right": lambda label, score, tokens: (label[:, None] - score) ** 2,
    "a fixed number of rows": lambda label, score, tokens: tf.reshape(label, [B]) - score,
}


@SIZES
@pytest.mark.parametrize("case", ACCEPTED)
def test_values_of_tokens_and_pairs_that_are_meant_are_accepted(case, size):
    check(ACCEPTED[case], size)

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


@SIZES
@pytest.mark.parametrize(
    "value_of",
    [
        lambda label, score, tokens: (label - score) ** 2,
        lambda label, score, tokens: distloop.weighted(tf.where(score > label, score - label, 0.0), label),
        lambda label, score, tokens: tf.nn.relu(score) - score * label + tf.math.log1p(tf.exp(-tf.abs(score))),
    ],
    ids=["squared error", "weighted", "cross entropy"],
)
def test_labels_without_the_axis_of_the_predictions_are_refused(value_of, size):
    refused(
        lambda: check(value_of, size),
        'loss_fn returned "loss" of shape [B, B]',
        "[B, 1]",
        "were broadcast against each other (test_broadcasts.py:",
        "predictions[:, 0]",
    )


@SIZES
@pytest.mark.parametrize(
    "value_of",
    [
        lambda label, score, tokens: tf.reduce_mean((label - score) ** 2, -1),
        lambda label, score, tokens: distloop.weighted(2.0 * tf.reduce_sum(tf.abs(score - label), 0), label),
        lambda label, score, tokens: tf.sqrt(tf.reduce_max((label - score) ** 2, 1)) + tf.reduce_mean(tokens, 1),
    ],
    ids=["mean", "weighted sum", "beside a mean over tokens"],
)
def test_labels_without_the_axis_of_the_predictions_are_refused_behind_a_reduction(value_of, size):
    refused(
        lambda: check(value_of, size),
        'loss_fn returned "loss" reduced from shape [B, B]',
        "[B, 1]",
        "were broadcast against each other (test_broadcasts.py:",
    )


@SIZES
@pytest.mark.parametrize(
    "value_of",
    [
        lambda label, score, tokens: tf.reduce_mean((tokens - score) ** 2, -1),
        lambda label, score, tokens: tf.reduce_mean(tf.nn.relu(1.0 - (label[:, None] - label)), 1),
        lambda label, score, tokens: (
            tf.reduce_sum(tf.cast(score == label, tf.float32) * tf.matmul(score, score, transpose_b=True), 1)
            / tf.reduce_sum(tf.cast(score == label, tf.float32), 1)
        ),
        lambda label, score, tokens: tf.reduce_mean(tf.sequence_mask(tf.cast(label, tf.int32), B, tf.float32), 1),
        lambda label, score, tokens: tf.reduce_sum(tf.one_hot(tf.cast(label, tf.int32), B), 1),
    ],
    ids=["tokens", "pairs by an axis of its own", "a product beside their number", "a mask of lengths", "one hot"],
)
def test_reductions_of_tokens_and_of_pairs_that_are_meant_are_accepted(value_of, size):
    check(value_of, size)


@SIZES
@pytest.mark.parametrize(
    "value_of",
    [
        lambda label, score, tokens: (tokens - score) ** 2,
        lambda label, score, tokens: POSITIONS * score,
        lambda label, score, tokens: (
            tf.cast(label[:, None] == label, tf.float32) * tf.matmul(score, score, transpose_b=True)
        ),
        lambda label, score, tokens: (label[None, :] - score) ** 2,
        lambda label, score, tokens: (distloop.gather_rows(label)[0] - score) ** 2,
        lambda label, score, tokens: (label[:, None] - score) ** 2,
        lambda label, score, tokens: tf.reshape(label, [B]) - score,
    ],
    ids=[
        "tokens",
        "positions",
        "masked pairs",
        "an axis of its own",
        "gathered rows",
        "right",
        "a fixed number of rows",
    ],
)
def test_values_of_tokens_and_pairs_that_are_meant_are_accepted(value_of, size):
    check(value_of, size)

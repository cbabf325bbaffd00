"""Weighted sums: what weighs what, what takes no part, and what is refused."""

import re

import numpy as np
import pytest
import tensorflow as tf

from distloop.model import metrics
from distloop.model.metrics import LossWatch

VALUES = np.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], np.float32)  # [B, T]


def sums(value, batch_size=2, row_weights=None):
    """Weighs and returns (total, weight) as floats."""
    if row_weights is not None:
        row_weights = tf.constant(row_weights, tf.float32)
    tally = metrics.weigh("loss", value, batch_size, row_weights)
    assert tally.total.dtype == tally.weight.dtype == tf.float32
    assert tally.total.shape.rank == tally.weight.shape.rank == 0
    return float(tally.total), float(tally.weight)


TEXT, IMAGES = {"tokens": tf.zeros([4, 7], tf.int32)}, {"image": tf.zeros([4, 6, 6], tf.uint8)}


@pytest.mark.parametrize(
    ("shape", "weights", "rows", "is_per_token"),
    [
        ([4, 6], [4, 6], {"x": tf.zeros([4, 6])}, True),
        ([4, 6], None, TEXT, True),
        ([4, 6], [4], IMAGES | {"label": tf.zeros([4], tf.int64)}, False),
        ([4, 6], None, tf.zeros([4, 6]), False),
        ([4, 1], [4, 1], TEXT, False),
        ([4], [4], TEXT, True),  # a mean over the tokens of each, with their number
        ([4], None, TEXT, False),
        ([4], [4], IMAGES, False),
    ],
)
def test_a_loss_counts_tokens_where_a_text_has_a_value_or_weight_for_each(shape, weights, rows, is_per_token):
    values = tf.zeros(shape)
    value = values if weights is None else metrics.weighted(values, tf.ones(weights))
    assert metrics.is_per_token(value, rows) == is_per_token


def test_ragged_values_of_texts_count_tokens_and_unknown_ranks_do_not():
    words = tf.ragged.constant([[1, 2, 3], [4]])
    assert metrics.is_per_token(tf.cast(words, tf.float32), {"words": words})

    @tf.function
    def count(values, tokens):
        assert values.shape.rank is None
        for value in (values, metrics.Weighted(tf.ones([4, 6]), values)):
            assert not metrics.is_per_token(value, tokens)
        return values

    count.get_concrete_function(tf.TensorSpec(None), tf.TensorSpec([4, 6]))


RAGGED = tf.ragged.constant([[1.0, 2.0, 3.0], [], [4.0]])
HALF_WEIGHTS = tf.ones([1001], tf.bfloat16)
MASK = [[1, 1, 0], [1, 0, 0]]
EIGHT, MANY = np.arange(8, dtype=np.float32).reshape(2, 2, 2), (70_001.0, 70_001.0)
SUMS = {  # value, its weights or None, row weights or None, and the sums
    "values per example weigh 1 each": (tf.constant([1.0, 2.5]), None, None, (3.5, 2.0)),
    "values within examples weigh 1 each": (tf.constant(VALUES), None, None, (21.0, 6.0)),
    "NumPy values are taken": (VALUES, None, None, (21.0, 6.0)),
    "weights per example weigh values per example": (tf.constant([1.0, 3.0]), [0.5, 2.0], None, (6.5, 2.5)),
    "weights per example spread over values within": (VALUES, [1.0, 0.5], None, (6.0 + 7.5, 4.5)),
    "weights within examples weigh values within": (VALUES, np.array(MASK), None, (1.0 + 2.0 + 4.0, 3.0)),
    "weights spread over two missing axes": (EIGHT, [1.0, 3.0], None, (6.0 + 3 * 22.0, 4.0 + 12.0)),
    "row weights take padding out": (tf.constant([1.0, 2.5]), None, [1, 0], (1.0, 1.0)),
    "row weights spread over values within": (tf.constant(VALUES), None, [0, 1], (15.0, 3.0)),
    "row weights multiply with weights": (VALUES, [1.0, 0.5], [0, 1], (7.5, 1.5)),
    "row weights multiply with weights within": (VALUES, MASK, [1, 0], (3.0, 2.0)),
    "padding may be NaN": (tf.constant([1.0, np.nan]), None, [1, 0], (1.0, 1.0)),
    "padding may be infinite": (tf.constant([1.0, np.inf]), None, [1, 0], (1.0, 1.0)),
    "a row of weight 0 may be NaN": (tf.constant([np.nan, 2.0]), [0.0, 3.0], None, (6.0, 3.0)),
    "a row of weight 0 may be infinite": (tf.constant([np.inf, 2.0]), [0.0, 3.0], None, (6.0, 3.0)),
    "weights all 0 sum to 0": (tf.constant([1.0, 2.0]), [0.0, 0.0], None, (0.0, 0.0)),
    "bfloat16, which counts to 256, is summed in float32": (tf.ones([70_001], tf.bfloat16), None, None, MANY),
    "float16, which counts to 65504, is summed in float32": (tf.ones([70_001], tf.float16), None, None, MANY),
    "weights in half precision are summed in float32": (tf.ones([1001]), HALF_WEIGHTS, None, (1001.0, 1001.0)),
    "bools are counted": (tf.constant([True, False]), None, None, (1.0, 2.0)),
    "integers are summed": (tf.constant([3, 4], tf.int64), None, None, (7.0, 2.0)),
    "weights may be bools": (tf.constant([3, 4]), tf.constant([True, False]), None, (3.0, 1.0)),
    "ragged values weigh 1 each": (RAGGED, None, None, (10.0, 4.0)),
    "ragged values take weights per example": (RAGGED, [1.0, 7.0, 2.0], None, (14.0, 5.0)),
    "ragged values take ragged weights": (RAGGED, tf.ragged.constant([[1.0, 0.0, 2.0], [], [3.0]]), None, (19.0, 6.0)),
    "ragged values leave padding out": (RAGGED, None, [1, 1, 0], (6.0, 3.0)),
    "ragged values leave padding out of weights": (RAGGED, [2.0, 2.0, 9.0], [1, 1, 0], (12.0, 6.0)),
}


@pytest.mark.parametrize("case", SUMS)
def test_values_are_summed_with_their_weights(case):
    value, weights, row_weights, expected = SUMS[case]
    batch_size = value.nrows() if value is RAGGED else len(value)
    value = value if weights is None else metrics.weighted(value, weights)
    assert sums(value, int(batch_size), row_weights) == expected


def test_a_row_that_is_not_finite_shows_only_if_it_takes_part():
    assert np.isnan(sums(tf.constant([1.0, np.nan]))[0])
    values = tf.constant([1.0, np.nan])
    with tf.GradientTape() as tape:
        tape.watch(values)
        total = metrics.weigh("loss", values, 2, tf.constant([1.0, 0.0])).total
    np.testing.assert_array_equal(tape.gradient(total, values), [1.0, 0.0])


def test_a_value_that_is_not_per_example_is_refused():
    for value in (3.0, np.ones([1, 1], np.float32), np.ones([3], np.float32)):
        shape = re.escape(str(list(np.shape(value))))
        advice = "keep the batch as the first axis" if np.shape(value) == (3,) else "drop the reduce_mean"
        with pytest.raises(ValueError, match=rf'"loss" of shape {shape}; .* value per example, \[2\].*: {advice}'):
            sums(tf.constant(value))


@pytest.mark.slow
def test_a_batch_of_unknown_size_is_weighed_and_a_known_axis_is_refused():
    def weigh(values):
        @tf.function(input_signature=[tf.TensorSpec([None, 3])])
        def trace(rows):
            return metrics.weigh("accuracy", rows if values is None else values, tf.shape(rows)[0], None)

        return [float(side) for side in trace(VALUES)[:2]]

    assert weigh(None) == [21.0, 6.0]
    for shape in ([], [1], [1, 1], [3]):
        with pytest.raises(ValueError, match=r'"accuracy" of shape .*; .* one value per example, \[B\] or \[B, ...\]'):
            weigh(tf.zeros(shape))
    with pytest.raises(ValueError, match="the model fixes it at 16, batch the dataset with drop_remainder=True"):
        weigh(tf.zeros([16]))


def test_weights_of_the_wrong_rank_or_length_are_refused():
    sentence = r'"loss" of shape \[2, 3\] with weights of shape .* one weight per example'
    for weights in (2.0, *map(np.ones, ([2, 3, 1], [3], [2, 2], [1, 3]))):
        with pytest.raises(ValueError, match=sentence):
            sums(metrics.weighted(VALUES, weights))


def test_ragged_values_of_another_batch_or_two_ragged_axes_are_refused():
    with pytest.raises(ValueError, match=r'"loss" of shape .*; distloop needs one value per example'):
        sums(RAGGED, 2)
    with pytest.raises(ValueError, match='"loss" with 2 ragged axes; .*: reduce the inner ones'):
        sums(tf.ragged.constant([[[1.0], [2.0, 3.0]], [[4.0]]]))
    with pytest.raises(ValueError, match=r'"loss" of shape .* with weights of shape .*; .* one weight per example'):
        sums(metrics.weighted(RAGGED, np.ones([3, 3], np.float32)), 3)


@pytest.mark.filterwarnings("error")
def test_means_divide_totals_in_float64_and_the_mean_of_nothing_is_nan():
    tallies = [metrics.Tally(tf.constant(6.0), tf.constant(4.0)), metrics.Tally(tf.constant(1.0), tf.constant(2.0))]
    flat = metrics.flatten(tallies)
    assert flat.shape == [4] and flat.dtype == tf.float32
    assert metrics.means(["loss", "accuracy"], flat.numpy()) == {"loss": 1.5, "accuracy": 0.5}
    assert np.isnan(metrics.means(["loss"], np.zeros(2))["loss"])
    mean = metrics.means(["loss"], np.array([1.0, 3.0], np.float32))["loss"]
    assert type(mean) is float and mean == 1 / 3


def test_outputs_are_a_dict_with_a_loss_and_free_words_as_names():
    check = metrics.check_names
    check({"loss": tf.ones([2]), "auc": (1, 2), "w": metrics.weighted(1, 2)}, {"auc": object()})
    for outputs in (1.0, [1.0], None):
        with pytest.raises(ValueError, match=rf"loss_fn returned a {type(outputs).__name__}; .* a dict .*: return"):
            check(outputs, {})
    with pytest.raises(ValueError, match=r"loss_fn returned \['accuracy', 'los'\] without \"loss\"; .*: return"):
        check({"los": 1.0, "accuracy": 1.0}, {})
    for name in ("", 3):
        with pytest.raises(ValueError, match=f"under the name {name!r}; names are non-empty strings: rename it"):
            check({"loss": 1.0, name: 1.0}, {})
    for name in ("step", "time", "learning_rate"):
        with pytest.raises(ValueError, match=f"under the name {name!r}, which distloop itself reports: rename it"):
            check({"loss": 1.0, name: 1.0}, {})
    with pytest.raises(ValueError, match=r'a tuple under "f1", but ModelSpec\(metrics=...\) holds \[.auc.\]; declare'):
        check({"loss": 1.0, "f1": (1, 2)}, {"auc": object()})


def test_values_and_weights_that_are_no_real_numbers_are_refused():
    for numbers in (tf.constant([1j]), tf.constant(["a"])):
        for value in (numbers, metrics.weighted(tf.ones([1]), numbers)):
            sentence = f'returned "a" of dtype {numbers.dtype.name}; distloop sums real numbers'
            with pytest.raises(ValueError, match=sentence):
                metrics.weigh("a", value, 1, None)
    for value, kind in (({"b": tf.ones([1])}, "a dict"), (metrics.weighted(None, tf.ones([1])), "None")):
        sentence = f'^loss_fn returned {kind} under "a", which is no dense tensor: return one'
        with pytest.raises(ValueError, match=sentence):
            metrics.weigh("a", value, 1, None)


@pytest.mark.slow
def test_noise_and_the_first_steps_are_no_jumps():
    watch, rng = LossWatch(1), np.random.default_rng(0)
    losses = np.exp(rng.normal(size=2000))  # heavy on the large side, up to 20 times the median
    assert losses.max() > 15
    check = tf.function(lambda loss: watch.check(loss, tf.constant([True]), 10.0))
    assert not any(check(loss) for loss in tf.constant(losses[:, np.newaxis]))
    watch = LossWatch(1)
    assert not any(watch.check([10.0**i], tf.constant([True]), 1.0) for i in range(20))


@pytest.mark.slow
@pytest.mark.parametrize("offset", [0.0, 1000.0, -1000.0])
def test_a_jump_is_seen_and_not_learned_from(offset):
    watch, has_weight = LossWatch(2), tf.constant([True, True])
    for i in range(150):
        assert not watch.check([offset + np.sin(i), 1.0], has_weight, 5.0)
    before = watch.statistics.numpy()
    np.testing.assert_allclose(before[0, :2], [150, offset], atol=0.1)
    np.testing.assert_allclose(before[:, 2], [0.5, 0.0], atol=0.02)
    assert watch.check([offset + 1.1 * 5 * (abs(offset) + 0.75), 1.0], has_weight, 5.0)
    assert not watch.check([np.nan, np.inf], has_weight, 5.0)
    assert not watch.check([1e9, 1e9], tf.constant([False, False]), 5.0)
    np.testing.assert_array_equal(watch.statistics.numpy()[0], before[0])

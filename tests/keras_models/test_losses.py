"""Every loss of Keras as values per example: their mean is what the loss returns."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import distloop
from distloop.keras_models.losses import loss_values, resolve_loss, weigh
from distloop.model.metrics import weigh as tally
from tests.keras_models.compiled_models import LABEL, assert_same_weights, batches, compiled, copy_of, net
from tests.problems import on

RNG = np.random.default_rng(2)
ROWS = 12
LABELS = RNG.integers(0, 3, ROWS)
ONE_HOT = np.eye(3, dtype=np.float32)[LABELS]
SHARES = np.asarray(keras.ops.softmax(RNG.normal(size=(ROWS, 3)).astype(np.float32)))
NUMBERS = RNG.uniform(0.1, 2.0, size=(2, ROWS, 4)).astype(np.float32)
IMAGES = RNG.uniform(size=(2, ROWS, 3, 3, 2)).astype(np.float32)
STEPS = RNG.normal(size=(ROWS, 5, 3)).astype(np.float32)  # of a sequence
L = keras.losses
SPARSE = L.SparseCategoricalCrossentropy


def mean_of(loss, target, output, sample_weight=None):
    """Returns the mean that distloop computes of a loss."""
    loss = resolve_loss(loss, target, output)
    values, mask = loss_values(loss, target, output)
    total, weight, *_ = tally("loss", weigh("loss", values, mask, sample_weight), ROWS, None)
    return float(total / weight)


def masked(values, mask):
    tensor = tf.constant(values)
    tensor._keras_mask = tf.constant(mask)
    return tensor


@pytest.mark.parametrize(
    ("loss", "target", "output"),
    [
        (L.MeanSquaredError(), *NUMBERS),
        (L.MeanSquaredError(dtype="float64"), *NUMBERS),
        (L.MeanSquaredError(reduction=None), *NUMBERS),
        (L.MeanAbsoluteError(reduction="mean"), *NUMBERS),
        (L.MeanSquaredLogarithmicError(reduction="mean_with_sample_weight"), *NUMBERS),
        (L.Huber(delta=0.3), *NUMBERS),
        *((make(), *NUMBERS) for make in (L.MeanAbsolutePercentageError, L.LogCosh, L.Poisson, L.CosineSimilarity)),
        *((make(), *NUMBERS) for make in (L.Hinge, L.SquaredHinge)),
        (L.KLDivergence(), ONE_HOT, SHARES),
        (L.CategoricalHinge(), ONE_HOT, SHARES),
        (L.CategoricalCrossentropy(label_smoothing=0.1), ONE_HOT, SHARES),
        (L.CategoricalFocalCrossentropy(), ONE_HOT, SHARES),
        (L.CategoricalGeneralizedCrossEntropy(), LABELS, SHARES),
        (L.BinaryCrossentropy(label_smoothing=0.2), ONE_HOT, SHARES),
        (L.BinaryFocalCrossentropy(apply_class_balancing=True), ONE_HOT, SHARES),
        (L.SparseCategoricalCrossentropy(), LABELS[:, None], SHARES),
        (SPARSE(from_logits=True, ignore_class=1), LABELS, SHARES),
        (SPARSE(ignore_class=-1), LABELS - (LABELS == 2) * 3, SHARES),
        (SPARSE(ignore_class=1), np.tile(LABELS[:, None], 5), np.tile(SHARES[:, None], (5, 1))),
        (L.Dice(axis=(1, 2, 3)), *IMAGES),
        (L.Tversky(axis=(1, 2, 3), alpha=0.3), *IMAGES),
        (L.Circle(gamma=2.0, margin=0.1), LABELS, SHARES),
        (L.CTC(), RNG.integers(1, 3, size=(ROWS, 2)), STEPS),
    ],
    ids=lambda part: part.name if isinstance(part, L.Loss) else "",
)
def test_the_mean_of_the_values_is_the_loss_of_keras(loss, target, output):
    mean = mean_of(loss, target, tf.constant(output))
    loss.reduction = "sum_over_batch_size"
    assert mean == pytest.approx(float(loss(target, output)), rel=1e-5)


@pytest.mark.parametrize("name", ["mse", "binary_crossentropy", "kld", L.huber, L.MeanAbsoluteError, "crossentropy"])
def test_names_functions_and_classes_are_the_losses_of_keras(name):
    keras_loss = L.categorical_crossentropy if name == "crossentropy" else L.get(name)
    if isinstance(keras_loss, L.Loss):
        keras_loss = keras_loss.call
    expected = np.mean(keras_loss(tf.constant(ONE_HOT), tf.constant(SHARES)))
    assert mean_of(name, tf.constant(ONE_HOT), tf.constant(SHARES)) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("target", "output"), [((ROWS,), (ROWS, 1)), ((ROWS, 1), (ROWS,)), ((ROWS, 5), (ROWS, 5, 1))])
def test_an_axis_of_size_one_is_added_or_left_out_as_in_keras(target, output):
    target, output = RNG.normal(size=target).astype(np.float32), RNG.normal(size=output).astype(np.float32)
    expected = float(L.MeanSquaredError()(target, output))
    for loss in ("mse", lambda y_true, y_pred: tf.reduce_mean(tf.square(y_true - y_pred), -1)):
        assert mean_of(loss, tf.constant(target), tf.constant(output)) == pytest.approx(expected, rel=1e-5)


def test_masks_of_outputs_and_of_values_count_as_in_keras():
    labels, mask = RNG.integers(0, 3, size=(ROWS, 5)), RNG.integers(0, 2, size=(ROWS, 5)).astype(bool)
    output = masked(STEPS, mask)
    for ignored in (None, 1):
        loss = SPARSE(from_logits=True, ignore_class=ignored)
        assert mean_of(loss, labels, output) == pytest.approx(float(loss(labels, output)), rel=1e-5)
    weight = RNG.uniform(size=ROWS).astype(np.float32)  # divided by its sum over what the mask leaves
    valid = mask & (labels != 1)
    values = -np.take_along_axis(np.asarray(keras.ops.log_softmax(STEPS)), labels[..., None], -1)[..., 0]
    expected = np.sum(values * valid * weight[:, None]) / np.sum(valid * weight[:, None])
    assert mean_of(loss, labels, output, weight) == pytest.approx(expected, rel=1e-5)


class Padded(L.MeanSquaredError):
    """Leaves out targets of 0 by sample weights of its own."""

    def __call__(self, y_true, y_pred, sample_weight=None):
        return 2.0 * super().__call__(y_true, y_pred, tf.cast(y_true[:, 0] > 0.5, tf.float32))


class Whole(L.Loss):
    """Has a `__call__` of its own, which reduces."""

    def __call__(self, y_true, y_pred, sample_weight=None):
        return tf.reduce_mean(tf.square(y_true - y_pred))


def test_a_call_of_the_losss_own_is_honoured():
    loss, target = Padded(), tf.constant(NUMBERS[0])
    before = dict(vars(loss))
    for output in (tf.constant(NUMBERS[1]), masked(NUMBERS[1], LABELS > 0)):
        assert mean_of(loss, target, output) == pytest.approx(float(loss(target, output)), rel=1e-5)
    assert vars(loss) == before and type(loss) is Padded


@pytest.mark.parametrize(
    ("loss", "target", "output"),
    [
        (L.Dice(), *IMAGES),
        ("tversky", *IMAGES),
        (Whole(name="whole"), *NUMBERS),
        (L.CosineSimilarity(axis=0), *NUMBERS),
        (lambda y_true, y_pred: tf.reduce_mean(y_true), *NUMBERS),
    ],
    ids=["dice", "tversky", "whole", "cosine_similarity", "lambda"],
)
def test_a_loss_that_reduces_over_the_batch_is_refused(loss, target, output):
    with pytest.raises(ValueError, match=r"The loss .* has values of shape \(.*one value per example, \[12\] .* axis="):
        mean_of(loss, tf.constant(target), tf.constant(output))


@pytest.mark.parametrize(
    ("axes", "sentence"),
    [
        ([None], r"\[B, B\], of"),
        ([3], r"\[B, B\], of"),
        ([None, 5], "their last axis"),  # [B, T, 1] pairs rows with time steps where B is 1 or T
        ([5, 5], "their last axis"),
    ],
)
def test_a_loss_that_pairs_the_rows_is_refused(axes, sentence):
    """Keras takes such targets for this loss and means over all pairs."""
    loss = keras.losses.CategoricalGeneralizedCrossEntropy()
    trace = tf.function(lambda target, output: loss_values(loss, target, output)[0], autograph=False)
    output = tf.TensorSpec([*axes, 3])
    assert trace.get_concrete_function(tf.TensorSpec(axes, tf.int32), output).structured_outputs.shape == axes
    with pytest.raises(ValueError, match=f"^The loss 'categorical_gen.* a number for each pair of rows.*{sentence}"):
        trace.get_concrete_function(tf.TensorSpec([*axes, 1], tf.int32), output)
    of_as_many_parts = tf.function(lambda target: loss_values(keras.losses.MeanSquaredError(), target, target)[0])
    assert of_as_many_parts.get_concrete_function(tf.TensorSpec([None, None, 2])).structured_outputs.shape.rank == 2


def test_losses_that_compute_nothing_and_misfit_weights_are_refused():
    with pytest.raises(ValueError, match="The loss 'empty' has no call.*: define it in Empty"):
        mean_of(type("Empty", (L.Loss,), {})(name="empty"), *map(tf.constant, NUMBERS))
    with pytest.raises(ValueError, match="The loss '<lambda>' returns None; .* one value per example"):
        mean_of(lambda y_true, y_pred: None, *map(tf.constant, NUMBERS))
    with pytest.raises(ValueError, match=r"The sample weights have the shape \[12, 5\] .* values of the loss \[12\]"):
        mean_of("mse", *map(tf.constant, NUMBERS), np.ones([ROWS, 5], np.float32))
    with pytest.raises(ValueError, match=r"The mask of the output has the shape \[12, 4\] .* \[12\]"):
        mean_of("mse", NUMBERS[0], masked(NUMBERS[1], NUMBERS[1] > 1))


@pytest.mark.parametrize("shape", [(ROWS, 5), (ROWS, 5, 1), (ROWS, 1), (ROWS,)])
def test_sample_weights_may_have_an_axis_of_size_one_too_many(shape):
    weight = RNG.uniform(size=shape).astype(np.float32)
    spread = np.broadcast_to(weight.reshape(ROWS, -1), (ROWS, 5))
    expected = np.average(np.mean(np.square(STEPS), -1), weights=spread)
    assert mean_of("mse", np.zeros_like(STEPS), tf.constant(STEPS), weight) == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_a_circle_loss_compares_the_rows_of_all_replicas():
    model = compiled(net(3, "tanh"), keras.losses.Circle(gamma=2.0), keras.optimizers.SGD(0.01))
    twin = copy_of(model)
    data = batches(RNG.normal(size=(32, 6)).astype(np.float32), LABEL)
    trainer = distloop.Trainer(distloop.from_keras(model), on(2))
    trainer.fit(data, epochs=1)
    twin.fit(data, verbose=0)
    assert_same_weights(trainer.model, twin)

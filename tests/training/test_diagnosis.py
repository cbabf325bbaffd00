"""Why a step failed, and warnings about a traced step."""

from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf

import distloop
from distloop.training import diagnosis
from distloop.training.diagnosis import UpdateReport
from tests.problems import batches, on, train


def report(name="", loss=1.0, norm=1.0, paths=(), **scaling):
    return UpdateReport(name, {"loss": loss, "gradient_norm": norm}, list(paths), **scaling)


@pytest.mark.parametrize(
    "given, skip_nonfinite, is_loss_watched, expected",
    [
        (report(), False, False, False),
        (report(loss=np.nan), False, False, True),
        (report(norm=np.inf), False, False, True),
        (report(norm=np.inf), True, True, False),
        (report(norm=np.inf, loss_scale=8.0, overflows=3), False, False, False),  # the loss scale adapts
        (report(norm=np.inf, loss_scale=1.0, overflows=10), True, False, True),
        (report(loss=np.nan, loss_scale=8.0), False, True, True),
        (report(loss=np.nan, loss_scale=8.0), False, False, False),
    ],
)
def test_an_update_is_to_blame_if_its_numbers_made_the_step_an_error(given, skip_nonfinite, is_loss_watched, expected):
    assert given.is_to_blame(skip_nonfinite=skip_nonfinite, is_loss_watched=is_loss_watched) == expected


def test_a_sentence_names_what_is_not_finite_and_losses_that_jumped():
    explain, cause = diagnosis.explain_nonfinite, diagnosis.Cause("the cause")
    assert explain(7, report("g", np.nan, np.nan, "abcde"), cause) == (
        "Step 7 is the first that was not finite: g/loss is nan, the gradient of update 'g' of a, b, c and 2 more is "
        "not finite; the cause: lower the learning rate, set clip_norm, or skip such steps with on_nonfinite=skip."
    )
    assert "gradient_norm is inf; " in explain(7, report(norm=np.inf), cause)
    text = explain(12, report(norm=np.inf, loss_scale=1.0, overflows=10), cause)
    assert text.startswith("Step 12 is number 10 in a row that was not finite at the smallest loss scale, 1: ")
    reports = [report("a", loss=1.1), report("b", loss=50.0)]
    text = diagnosis.explain_jump(40, reports, np.array([[30, 1.0, 0.04]] * 2), 10.0)
    assert text.startswith("At step 40 b/loss jumped to 50 from 1 (mean of the steps before, deviation 0.2); ")


@pytest.mark.parametrize(
    "step, given, cause, advice",
    [
        (5, report(norm=np.nan, paths=["a"]), "so a derivative is not", "keep what they get away from 0"),
        (5, report(norm=np.inf), "not the norm of all", ""),
        (1, report(loss=np.nan), "in a first step often the data", "look at the batch"),
        (9, report(loss=np.nan), "often the weights grew too large", "lower the learning rate"),
    ],
)
def test_a_cause_is_guessed_and_the_advice_fits_it(step, given, cause, advice):
    guessed = diagnosis.guess_cause(step, given)
    found = diagnosis.explain_nonfinite(step, given, guessed).rpartition(": ")[2]
    assert cause in guessed.words and found.startswith(advice)
    assert step > 1 or "learning rate" not in found


def test_errors_that_are_not_about_xla_are_not_explained():
    def explain(message, jit_compile="pass"):
        error = tf.errors.InvalidArgumentError(None, None, message)
        return diagnosis.explain_compile_error(SimpleNamespace(jit_compile=jit_compile), error)

    about_xla = "INVALID_ARGUMENT: no such op for XLA."
    assert explain("shapes differ") is None and explain(about_xla, jit_compile="none") is None
    assert "(no such op for XLA)" in str(explain(about_xla))


@pytest.mark.slow
def test_a_model_that_xla_cannot_compile_is_explained_in_one_sentence():
    def model_fn():
        layer = keras.layers.Dense(1)
        layer.build((None, 8))

        def loss_fn(batch, training):
            digits = tf.strings.length(tf.strings.as_string(batch["label"]))  # XLA knows no strings
            return {"loss": layer(batch["x"])[:, 0] + tf.cast(digits, tf.float32)}

        return distloop.ModelSpec(layer, keras.optimizers.SGD(0.1), loss_fn)

    with pytest.raises(ValueError, match=r"^jit_compile=pass was given, but XLA cannot compile") as caught:
        train(model_fn, on(1, jit_compile=True), batches(rows=16), 1)
    assert "\n" not in str(caught.value) and str(caught.value).endswith("use jit_compile=none.")


@pytest.mark.slow
def test_float16_layers_without_a_loss_scale_are_named(caplog):
    def model_fn():
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1, dtype="mixed_float16", name="half")])
        loss_fn = lambda batch, training: {"loss": model(batch["x"], training=training)[:, 0]}  # noqa: E731
        return distloop.ModelSpec(model, keras.optimizers.SGD(0.1), loss_fn)

    train(model_fn, on(1), batches(rows=16), 1)
    assert "Layers such as half compute in float16 and the loss is not scaled" in caplog.text
    caplog.clear()
    train(model_fn, on(1, precision="mixed_float16"), batches(rows=16), 1)
    assert "float16" not in caplog.text


@pytest.mark.slow
def test_unreached_and_unsynchronized_variables_are_named(caplog):
    def model_fn():
        model = [tf.Variable(1.0, name="used"), tf.Variable(1.0, name="unused")]
        count = tf.Variable(0, trainable=False, name="count")

        def loss_fn(batch, training):
            if training:
                count.assign_add(tf.shape(batch["x"])[0])
            return {"loss": model[0] * batch["x"][:, 0]}

        return distloop.ModelSpec([*model, count], keras.optimizers.SGD(0.1), loss_fn)

    train(model_fn, on(2), batches(rows=16), 1)
    assert "The loss does not depend on 1, which stays as it is" in caplog.text
    assert "The forward pass writes 2, of dtype int32, which has no mean" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize(("is_passed_on", "seed"), [(False, 7), pytest.param(True, None, marks=pytest.mark.wide)])
def test_layers_that_compute_as_in_evaluation_and_constant_seeds_are_named(is_passed_on, seed, caplog):
    def model_fn():
        layers = [keras.layers.BatchNormalization(name="norm"), keras.layers.Dropout(0.5, name="drop")]
        model = keras.Sequential([keras.Input((8,)), *layers, keras.layers.Dense(1)], name="net")
        draws = seed or keras.random.SeedGenerator(7)

        def loss_fn(batch, training):
            noise = keras.random.normal([1], seed=draws)
            return {"loss": model(batch["x"], training=training and is_passed_on)[:, 0] + noise}

        return distloop.ModelSpec([model, draws], keras.optimizers.SGD(0.1), loss_fn)

    train(model_fn, on(2), batches(rows=16), 1)
    warned = [record.getMessage() for record in caplog.records]
    expected = ["Layers such as net/norm, drop compute in the step as in evaluation, or not at all: pass"]
    expected += ["draws the same numbers in each step and on each replica, as its seed is a constant: give keras"]
    assert len(warned) == (0 if is_passed_on else 2)
    assert all(part in line for part, line in zip(expected, warned, strict=False))

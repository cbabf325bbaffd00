"""Tests what changes a step without a subclass: batch_fn, gradient_fn, learning_rates, no_decay."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import distloop
from distloop import testing
from tests.problems import assert_close, batches, classification, loss_fn_of, mostly_wide, on, refused, weights

KERNEL, BIAS = "net/logits/kernel", "net/logits/bias"


def make(optimizer=lambda: keras.optimizers.SGD(0.1), update=False, **rules):
    """A `model_fn` with rules in its ModelSpec, or in an Update of it."""

    def model_fn():
        hidden = keras.layers.Dense(16, "tanh", name="hidden")
        logits = keras.layers.Dense(4, name="logits", bias_initializer="ones")
        model = keras.Sequential([keras.Input((8,)), hidden, logits], name="net")
        if update:
            return distloop.ModelSpec(model, updates=[distloop.Update("only", loss_fn_of(model), optimizer(), **rules)])
        return distloop.ModelSpec(model, optimizer(), loss_fn_of(model), **rules)

    return model_fn


def trained(model_fn, replicas=1, steps=6, **settings):
    trainer = distloop.Trainer(model_fn, on(replicas, **settings))
    trainer.fit(batches(), steps=steps)
    return weights(trainer)


def centered(gradients):
    """Gradient centralization (Yong et al. 2020): each column's mean is taken off."""
    return {path: g - tf.reduce_mean(g, 0, keepdims=True) if len(g.shape) > 1 else g for path, g in gradients.items()}


def nothing(gradients):
    return {path: tf.zeros_like(g) for path, g in gradients.items()}


def one_step_from_ones(model_fn):
    """Returns the weights after one step that began with ones."""
    trainer = distloop.Trainer(model_fn, on(1))
    for variable in trainer.model.trainable_variables:
        variable.assign(tf.ones(variable.shape))
    trainer.fit(batches(), steps=1)
    return weights(trainer)


def doubled(batch, training):
    return {**batch, "x": batch["x"] * 2.0}


RULES = dict(
    batch_fn=doubled, gradient_fn=centered, learning_rates={"^net/hidden/": 0.1, "kernel": 0.5}, no_decay="bias$"
)


@pytest.mark.wide
def test_every_rule_keeps_the_laws_of_replicas_and_microbatches():
    model_fn = make(lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1), **RULES)
    testing.assert_replica_law(model_fn, batches(), (1, 3), tolerance=1e-6, clip_norm=0.1)
    assert_close(trained(model_fn, 2, clip_norm=0.1, microbatches=2), trained(model_fn, clip_norm=0.1))


@pytest.mark.slow
def test_batch_fn_changes_what_training_and_evaluation_see():
    modes = set()

    def noted(batch, training):
        modes.add(training)
        return doubled(batch, training)

    trainer = distloop.Trainer(make(batch_fn=noted), on(1))
    trainer.fit(batches(), steps=3)
    twice = {name: value * 2 if name == "x" else value for name, value in classification().items()}
    plain = distloop.Trainer(make(), on(1))
    plain.fit(distloop.make_dataset(twice, 16), steps=3)
    assert_close(weights(trainer), weights(plain))
    assert trainer.evaluate(batches()) == pytest.approx(plain.evaluate(distloop.make_dataset(twice, 16)), rel=1e-5)
    assert modes == {True, False}


@pytest.mark.slow
def test_gradient_fn_sees_gradients_reduced_divided_and_clipped():
    def one_each(gradients):
        norm = tf.sqrt(tf.add_n([tf.reduce_sum(tf.square(g)) for g in gradients.values()]))
        return {path: tf.fill(g.shape, norm) for path, g in gradients.items()}

    for replicas, settings in ((1, {}), (2, {"microbatches": 2})):
        trainer = distloop.Trainer(make(gradient_fn=one_each), on(replicas, clip_norm=1e-3, **settings))
        before = weights(trainer)
        trainer.fit(batches(), steps=1)
        np.testing.assert_allclose(before[KERNEL] - weights(trainer)[KERNEL], 0.1 * 1e-3, rtol=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize("update", mostly_wide([False, True]))
def test_learning_rates_multiply_the_step_of_the_first_match(update):
    steps = {}
    for rates in (None, {"logits/k": 0.25, "logits": 0.5}):
        trainer = distloop.Trainer(make(update=update, learning_rates=rates), on(2))
        before = weights(trainer)
        trainer.fit(batches(), steps=1)
        steps[rates is None] = {path: before[path] - value for path, value in weights(trainer).items()}
    factors = {KERNEL: 0.25, BIAS: 0.5, "net/hidden/kernel": 1.0}
    for path, factor in factors.items():
        np.testing.assert_allclose(steps[False][path], factor * steps[True][path], rtol=1e-3, atol=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("own", mostly_wide([None, 0.1]))
def test_muon_decays_each_variable_by_the_weight_decay_of_its_rule(own):
    def optimizer():
        return keras.optimizers.Muon(0.1, weight_decay=own, adam_weight_decay=0.2)

    after = one_step_from_ones(make(optimizer, gradient_fn=nothing, learning_rates={"hidden": 0.5}))
    np.testing.assert_allclose(after["net/hidden/bias"], 1 - 0.1 * 0.5 * 0.2, rtol=1e-6)
    np.testing.assert_allclose(after["net/hidden/kernel"], 1 - 0.1 * 0.5 * (own or 0), rtol=1e-6)


@pytest.mark.slow
def test_what_model_fn_excludes_from_weight_decay_stays_excluded():
    def optimizer():
        made = keras.optimizers.AdamW(0.1, weight_decay=0.2)
        made.exclude_from_weight_decay(var_names=["bias"])
        return made

    after = one_step_from_ones(make(optimizer, gradient_fn=nothing, no_decay="logits/kernel"))
    for path, value in after.items():
        np.testing.assert_allclose(value, 0.98 if path == "net/hidden/kernel" else 1.0, rtol=1e-6, err_msg=path)


@pytest.mark.slow
@pytest.mark.parametrize("replicas", mostly_wide([1, 2]))
def test_weight_decay_follows_the_rate_and_leaves_out_the_excluded(replicas):
    rules = dict(gradient_fn=nothing, no_decay="bias$", learning_rates={"logits": 0.5})
    trainer = distloop.Trainer(make(lambda: keras.optimizers.SGD(0.1, weight_decay=0.2), **rules), on(replicas))
    before = weights(trainer)
    trainer.fit(batches(), steps=1)
    after = weights(trainer)
    np.testing.assert_array_equal(after[BIAS], before[BIAS])
    np.testing.assert_allclose(after[KERNEL], before[KERNEL] * (1 - 0.1 * 0.5 * 0.2), rtol=1e-6)
    np.testing.assert_allclose(after["net/hidden/kernel"], before["net/hidden/kernel"] * (1 - 0.1 * 0.2), rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("gradient_fn", "parts"),
    [
        (lambda gradients: None, ("gradient_fn returned NoneType",)),
        (lambda gradients: {KERNEL: gradients[KERNEL]}, ("gradient_fn returned", KERNEL, BIAS)),
        (lambda gradients: {p: tf.reduce_sum(g) for p, g in gradients.items()}, ("of shape []", "keep the shapes")),
    ],
)
def test_gradients_that_do_not_fit_are_refused(gradient_fn, parts):
    trainer = distloop.Trainer(make(gradient_fn=gradient_fn), on(2))
    refused(lambda: trainer.fit(batches(), steps=1), *parts)
    assert trainer.step == 0

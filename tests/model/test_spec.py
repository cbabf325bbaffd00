"""Model specifications: their checks, and the variables and rules of an update."""

import keras
import pytest
import tensorflow as tf

from distloop.model.spec import ModelSpec, Update
from tests.problems import refused


def two_layers():
    return keras.Sequential(
        [keras.Input((3,)), keras.layers.Dense(4, name="encoder"), keras.layers.Dense(2, name="head")], name="net"
    )


PATHS = ["net/encoder/kernel", "net/encoder/bias", "net/head/kernel", "net/head/bias"]


def loss_of(model):
    return lambda batch, training: {"loss": tf.reduce_sum(model(batch["x"], training=training), -1)}


def spec_of(model, optimizer=None, **more):
    return ModelSpec(model, optimizer or keras.optimizers.SGD(0.1), loss_of(model), **more)


def update(**settings):
    return Update("", lambda batch, training: {}, keras.optimizers.AdamW(0.1), **settings)


INSTEAD = {
    "clipnorm": (1.0, "clip_variable_norm=..."),
    "clipvalue": (1.0, "clip_value=..."),
    "global_clipnorm": (1.0, "clip_norm=..."),
    "use_ema": (True, "average_decay=..."),
    "gradient_accumulation_steps": (2, "microbatches=..."),
    "loss_scale_factor": (2.0, "precision"),
}


@pytest.mark.parametrize("setting", INSTEAD)
def test_a_setting_of_the_optimizer_that_belongs_to_distloop_is_refused(setting):
    value, instead = INSTEAD[setting]
    refused(lambda: spec_of(two_layers(), keras.optimizers.Adam(**{setting: value})), f"has {setting}={value}", instead)


def test_floats_schedules_and_weight_decay_belong_to_the_optimizer_and_a_plain_callable_is_refused():
    for rate in (0.1, keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.5)):
        spec_of(two_layers(), keras.optimizers.SGD(rate))
    spec_of(two_layers(), keras.optimizers.AdamW(weight_decay=0.1))
    with pytest.raises(ValueError, match="a plain callable as learning rate, .*LearningRateSchedule"):
        spec_of(two_layers(), keras.optimizers.SGD(lambda: 0.1))


@pytest.mark.skipif(not hasattr(keras.optimizers, "MultiOptimizer"), reason="new in Keras 3.15")
def test_an_optimizer_of_several_optimizers_is_refused():
    optimizer = keras.optimizers.MultiOptimizer(keras.optimizers.OptimizerMap(keras.optimizers.SGD(0.1)))
    with pytest.raises(ValueError, match="A Keras MultiOptimizer was given; .*one distloop.Update for each"):
        spec_of(two_layers(), optimizer)


def test_a_loss_scale_optimizer_and_what_is_no_optimizer_are_refused():
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())
    with pytest.raises(ValueError, match="A Keras LossScaleOptimizer was given, .*: give the optimizer inside it"):
        spec_of(two_layers(), optimizer)
    for optimizer in ("adam", keras.optimizers.SGD):
        with pytest.raises(ValueError, match="needs a keras.optimizers.Optimizer object"):
            spec_of(two_layers(), optimizer)


def test_a_spec_without_an_optimizer_or_a_loss_fn_is_refused():
    with pytest.raises(ValueError, match=r"loss_fn='mse' was given; distloop needs a function of \(batch, training\)"):
        ModelSpec(two_layers(), keras.optimizers.SGD(), "mse")
    for arguments in ({}, {"optimizer": keras.optimizers.SGD()}, {"loss_fn": lambda batch, training: {}}):
        with pytest.raises(ValueError, match="ModelSpec needs an optimizer and a loss_fn, or updates: give"):
            ModelSpec(two_layers(), **arguments)


def test_updates_and_the_arguments_of_a_single_one_are_refused():
    loss_fn = loss_of(two_layers())
    for extra, given in {"optimizer": keras.optimizers.SGD(), "loss_fn": loss_fn, "trainable": "head"}.items():
        with pytest.raises(ValueError, match=f"given updates and also {extra}; .*: leave the others out"):
            ModelSpec(None, updates=[Update("a", loss_fn, keras.optimizers.SGD())], **{extra: given})


CALLS = {  # name: what is given, and the arguments that distloop calls it with
    "loss_fn": (lambda batch: {}, "(batch, training)"),
    "predict_fn": (lambda batch, training: batch, "(batch)"),
    "batch_fn": (lambda batch, training, *, seed: batch, "(batch, training)"),
    "gradient_fn": (lambda gradients, weights: gradients, "(gradients)"),
    "step_fn": (lambda: {}, "(step)"),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_function_with_other_arguments_than_it_is_called_with_is_refused(name):
    given, called_with = CALLS[name]
    functions = {"loss_fn": lambda batch, training: {}, name: given}
    make = lambda: ModelSpec(two_layers(), keras.optimizers.SGD(0.1), **functions)  # noqa: E731
    refused(make, f"{name} takes (", f") and is called with {called_with} (", "let it take these")


def test_functions_that_can_be_called_as_they_are_pass_whatever_else_they_take():
    loss_fn = tf.function(lambda batch, training=False, *more, scale=1.0: {})
    model = two_layers()
    ModelSpec(model, keras.optimizers.SGD(0.1), loss_fn, predict_fn={"logits": model, "first": lambda *rows: rows[0]})


def test_an_update_without_variables_beside_others_is_refused():
    updates = [Update(name, loss_of(two_layers()), keras.optimizers.SGD(0.1)) for name in ("generator", "critic")]
    refused(lambda: ModelSpec(None, updates=updates), "The update 'generator' has no variables", "generator", "'.'")


def test_updates_without_names_of_their_own_or_with_a_shared_optimizer_for_other_variables_are_refused():
    def updates(names, optimizers, **rule):
        first, second = (
            Update(name, lambda batch, training: {}, optimizer, **{"variables": ".", **more})
            for name, optimizer, more in zip(names, optimizers, ({}, rule), strict=True)
        )
        return ModelSpec(None, updates=[first, second])

    for names in (["a", "a"], ["a", ""]):
        with pytest.raises(ValueError, match="each needs a name of its own"):
            updates(names, [keras.optimizers.SGD(), keras.optimizers.SGD()])
    for rule in ({"variables": "^b/"}, {"learning_rates": {"^b/": 0.1}}, {"no_decay": "bias"}):
        with pytest.raises(ValueError, match="'a' and 'b' share one optimizer, .*, or make two optimizers"):
            updates("ab", [keras.optimizers.AdamW()] * 2, **rule)


def test_the_first_pattern_that_matches_sets_the_factor_of_the_learning_rate_and_no_decay_is_for_those_that_match():
    rates = {"encoder": 0.1, "kernel": 0.5}
    assert update(learning_rates=rates).learning_rate_factors(PATHS) == [0.1, 0.1, 0.5, 1.0]
    assert update().learning_rate_factors(PATHS) == [1.0] * 4
    assert update(no_decay="bias$").are_decayed(PATHS) == [True, False, True, False]
    assert update().are_decayed(PATHS) == [True] * 4
    with pytest.raises(ValueError, match="learning_rates was given the regular expression 'decoder', .* correct it"):
        update(learning_rates={"decoder": 0.1}).learning_rate_factors(PATHS)
    with pytest.raises(ValueError, match="no_decay was given the regular expression 'norm', .* correct it"):
        update(no_decay="norm").are_decayed(PATHS)

"""Model specifications: their checks, and the variables and rules of an update."""

import keras
import pytest
import tensorflow as tf

from distloop.model.spec import ModelSpec, Update
from distloop.variables import named_variables


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


# Optimizers are plain.


@pytest.mark.parametrize(
    ("settings", "instead"),
    [
        ({"clipnorm": 1.0}, "clip_variable_norm=..."),
        ({"clipvalue": 1.0}, "clip_value=..."),
        ({"global_clipnorm": 1.0}, "clip_norm=..."),
        ({"use_ema": True}, "average_decay=..."),
        ({"gradient_accumulation_steps": 2}, "microbatches=..."),
        ({"loss_scale_factor": 2.0}, "precision"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_a_setting_of_the_optimizer_that_belongs_to_distloop_is_refused(settings, instead):
    model = two_layers()
    with pytest.raises(ValueError) as caught:
        spec_of(model, keras.optimizers.Adam(**settings))
    ((setting, value),) = settings.items()
    assert f"has {setting}={value}" in str(caught.value) and instead in str(caught.value)


def test_a_plain_callable_as_learning_rate_is_refused():
    with pytest.raises(ValueError, match="a plain callable as learning rate, .*LearningRateSchedule"):
        spec_of(two_layers(), keras.optimizers.SGD(lambda: 0.1))


@pytest.mark.parametrize(
    "rate", [0.1, keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.5)], ids=["float", "schedule"]
)
def test_floats_and_schedules_are_learning_rates(rate):
    spec_of(two_layers(), keras.optimizers.SGD(rate))


def test_weight_decay_belongs_to_the_optimizer():
    spec_of(two_layers(), keras.optimizers.AdamW(weight_decay=0.1))


@pytest.mark.skipif(not hasattr(keras.optimizers, "MultiOptimizer"), reason="new in Keras 3.15")
def test_an_optimizer_of_several_optimizers_is_refused():
    optimizer = keras.optimizers.MultiOptimizer(keras.optimizers.OptimizerMap(keras.optimizers.SGD(0.1)))
    with pytest.raises(ValueError, match="A Keras MultiOptimizer was given; .*one distloop.Update for each"):
        spec_of(two_layers(), optimizer)


def test_a_loss_scale_optimizer_is_refused():
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())
    with pytest.raises(ValueError, match="A Keras LossScaleOptimizer was given, .*: give the optimizer inside it"):
        spec_of(two_layers(), optimizer)


@pytest.mark.parametrize("optimizer", ["adam", keras.optimizers.SGD])
def test_what_is_no_optimizer_is_refused(optimizer):
    with pytest.raises(ValueError, match="needs a keras.optimizers.Optimizer object"):
        ModelSpec(two_layers(), optimizer, lambda batch, training: {})


# The spec and its updates.


def test_a_loss_fn_that_is_no_function_is_refused():
    with pytest.raises(ValueError, match=r"loss_fn='mse' was given; distloop needs a function of \(batch, training\)"):
        ModelSpec(two_layers(), keras.optimizers.SGD(), "mse")


@pytest.mark.parametrize(
    "arguments", [{}, {"optimizer": keras.optimizers.SGD()}, {"loss_fn": lambda batch, training: {}}], ids=len
)
def test_a_spec_without_an_optimizer_or_a_loss_fn_is_refused(arguments):
    with pytest.raises(ValueError, match="ModelSpec needs an optimizer and a loss_fn, or updates: give"):
        ModelSpec(two_layers(), **arguments)


@pytest.mark.parametrize("extra", ["optimizer", "loss_fn", "trainable"])
def test_updates_and_the_arguments_of_a_single_one_are_refused(extra):
    loss_fn = loss_of(two_layers())
    given = {"optimizer": keras.optimizers.SGD(), "loss_fn": loss_fn, "trainable": "head"}[extra]
    with pytest.raises(ValueError, match=f"given updates and also {extra}; .*: leave the others out"):
        ModelSpec(None, updates=[Update("a", loss_fn, keras.optimizers.SGD())], **{extra: given})


@pytest.mark.parametrize("names", [["a", "a"], ["a", ""]])
def test_updates_without_names_of_their_own_are_refused(names):
    updates = [Update(name, lambda batch, training: {}, keras.optimizers.SGD()) for name in names]
    with pytest.raises(ValueError, match="each needs a name of its own"):
        ModelSpec(two_layers(), updates=updates)


@pytest.mark.parametrize("rule", [{"variables": "^b/"}, {"learning_rates": {"^b/": 0.1}}, {"no_decay": "bias"}])
def test_updates_that_share_an_optimizer_for_other_variables_are_refused(rule):
    optimizer = keras.optimizers.AdamW()
    updates = [Update("a", lambda batch, training: {}, optimizer)]
    with pytest.raises(ValueError, match="'a' and 'b' share one optimizer, .*, or make two optimizers"):
        ModelSpec(None, updates=[*updates, Update("b", lambda batch, training: {}, optimizer, **rule)])


# What an update trains, and how.


def test_an_update_selects_variables_by_path():
    named = named_variables(two_layers())
    assert update().select_variables(named) == list(named.values())
    assert update(variables="head").select_variables(named) == [named[path] for path in PATHS[2:]]
    given = [named[PATHS[3]].value, named[PATHS[0]]]
    assert update(variables=given).select_variables(named) == [named[PATHS[3]], named[PATHS[0]]]


def test_the_first_pattern_that_matches_sets_the_factor_of_the_learning_rate():
    rates = {"encoder": 0.1, "kernel": 0.5}
    assert update(learning_rates=rates).learning_rate_factors(PATHS) == [0.1, 0.1, 0.5, 1.0]
    assert update().learning_rate_factors(PATHS) == [1.0] * 4


def test_variables_that_match_no_decay_are_not_decayed():
    assert update(no_decay="bias$").are_decayed(PATHS) == [True, False, True, False]
    assert update().are_decayed(PATHS) == [True] * 4


def test_a_pattern_that_matches_no_path_is_refused():
    with pytest.raises(ValueError, match="learning_rates was given the regular expression 'decoder', .* correct it"):
        update(learning_rates={"decoder": 0.1}).learning_rate_factors(PATHS)
    with pytest.raises(ValueError, match="no_decay was given the regular expression 'norm', .* correct it"):
        update(no_decay="norm").are_decayed(PATHS)

"""Model specifications: their checks, and the variables and rules of an update."""

import keras
import pytest
import tensorflow as tf

from distloop.model.spec import ModelSpec, Update
from tests.model.two_layers import loss_of, spec_of, two_layers
from tests.problems import refused

PATHS = ["net/encoder/kernel", "net/encoder/bias", "net/head/kernel", "net/head/bias"]


def update(**settings):
    return Update("", lambda batch, training: {}, keras.optimizers.AdamW(0.1), **settings)


def test_floats_schedules_and_weight_decay_belong_to_the_optimizer():
    for rate in (0.1, keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.5)):
        spec_of(two_layers(), keras.optimizers.SGD(rate))
    spec_of(two_layers(), keras.optimizers.AdamW(weight_decay=0.1))


@pytest.mark.skipif(not hasattr(keras.optimizers, "MultiOptimizer"), reason="new in Keras 3.15")
def test_an_optimizer_of_several_optimizers_is_refused_outside_of_compile():
    optimizer = keras.optimizers.MultiOptimizer(keras.optimizers.OptimizerMap(keras.optimizers.SGD(0.1)))
    with pytest.raises(ValueError, match="was given in a ModelSpec; .*give distloop.from_keras the model"):
        spec_of(two_layers(), optimizer)


def test_functions_that_can_be_called_as_they_are_pass():
    loss_fn = tf.function(lambda batch, training=False, *more, scale=1.0: {})
    model = two_layers()
    ModelSpec(model, keras.optimizers.SGD(0.1), loss_fn, predict_fn={"logits": model, "first": lambda *rows: rows[0]})


def test_an_update_without_variables_beside_others_is_refused():
    updates = [Update(name, loss_of(two_layers()), keras.optimizers.SGD(0.1)) for name in ("generator", "critic")]
    refused(lambda: ModelSpec(None, updates=updates), "The update 'generator' has no variables", "generator", "'.'")


def test_updates_without_own_names_or_with_a_shared_optimizer_are_refused():
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


def test_the_first_pattern_that_matches_sets_the_rate_or_the_decay():
    rates = {"encoder": 0.1, "kernel": 0.5}
    assert update(learning_rates=rates).learning_rate_factors(PATHS) == [0.1, 0.1, 0.5, 1.0]
    assert update().learning_rate_factors(PATHS) == [1.0] * 4
    assert update(no_decay="bias$").are_decayed(PATHS) == [True, False, True, False]
    assert update().are_decayed(PATHS) == [True] * 4
    with pytest.raises(ValueError, match="learning_rates was given the regular expression 'decoder', .* correct it"):
        update(learning_rates={"decoder": 0.1}).learning_rate_factors(PATHS)
    with pytest.raises(ValueError, match="no_decay was given the regular expression 'norm', .* correct it"):
        update(no_decay="norm").are_decayed(PATHS)

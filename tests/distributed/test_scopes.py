"""Programs that enter the scope of a strategy themselves, as all guides to `tf.distribute` do."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import distloop
from tests.keras_models.compiled_models import X, Y, compiled, net
from tests.problems import mostly_wide, on

DATA = {"x": X, "y": Y}


def model_fn():
    return distloop.supervised(net(), "mse", keras.optimizers.SGD(0.1))


@pytest.fixture
def other():
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


def refused(what="distloop was called within"):
    return pytest.raises(ValueError, match=rf"{what} a strategy.scope\(\), .* leave `with strategy.scope\(\):` out; ")


@pytest.mark.parametrize("replicas", mostly_wide([1, 2]))
def test_a_trainer_made_within_a_scope_is_refused(replicas, other):
    for strategy in (None, other):
        with other.scope(), refused():
            distloop.Trainer(model_fn, on(replicas), strategy=strategy)


@pytest.mark.parametrize("replicas", mostly_wide([1, 2]))
def test_a_trainer_used_within_another_scope_is_refused(replicas, other, tmp_path):
    trainer = distloop.Trainer(model_fn, on(replicas, batch_size=8))
    calls = {
        "fit": lambda: trainer.fit((X, Y), steps=1),
        "evaluate": lambda: trainer.evaluate((X, Y)),
        "predict": lambda: trainer.predict(X),
        "build": lambda: trainer.build((X, Y)),
        "audit": lambda: trainer.audit((X, Y)),
        "export": lambda: trainer.export(str(tmp_path / "model.keras")),
        "restore": lambda: trainer.restore(str(tmp_path)),
        "save": trainer.save,
    }
    for call in calls.values():
        with other.scope(), refused():
            call()
    assert trainer.step == 0


@pytest.mark.slow
def test_a_trainer_works_within_the_scope_of_its_own_strategy():
    trainer = distloop.Trainer(model_fn, on(2, batch_size=8))
    with trainer.strategy.scope():
        trainer.fit((X, Y), steps=1)
        outputs = trainer.predict(X)
    np.testing.assert_array_equal(outputs, trainer.predict(X))


def test_a_model_or_optimizer_made_within_a_scope_is_refused(other):
    with other.scope():
        models = [compiled(net())]
        optimizer = keras.optimizers.SGD()
    models.append(compiled(net(), optimizer=optimizer))
    for model in models:
        with refused(f"The model '{model.name}' was made within"):
            distloop.from_keras(model)


@pytest.mark.parametrize("replicas", mostly_wide([1, 2]))
def test_a_scope_that_model_fn_enters_is_refused(replicas, other):
    def model_fn():
        with other.scope():
            return distloop.supervised(net(), "mse", keras.optimizers.SGD(0.1))

    with refused("model_fn entered"):
        distloop.Trainer(model_fn, on(replicas))

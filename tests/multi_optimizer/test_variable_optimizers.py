"""A model compiled with a `MultiOptimizer` trains through `from_keras` as Keras's own fit does."""

import keras
import numpy as np
import pytest

import distloop
from tests.keras_models.compiled_models import X, Y, assert_same_weights, batches
from tests.problems import mostly_wide, on

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not hasattr(keras.optimizers, "MultiOptimizer"), reason="new in Keras 3.15"),
]


def multi(default, by_pattern):
    return keras.optimizers.MultiOptimizer(keras.optimizers.OptimizerMap(default, by_pattern))


def momentum():
    return keras.optimizers.SGD(0.05, momentum=0.9)


def decaying():
    schedule = keras.optimizers.schedules.ExponentialDecay(0.02, 3, 0.5, staircase=True)
    return keras.optimizers.AdamW(schedule, weight_decay=0.05)


def one_of_two():
    optimizer = keras.optimizers.AdamW(0.01, weight_decay=0.1)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    return multi(optimizer, {".*last/kernel": keras.optimizers.RMSprop(0.01), ".*unknown": momentum()})


def two_decays():
    optimizer = keras.optimizers.AdamW(0.02, weight_decay=2.0)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    return multi(optimizer, {".*last/.*": keras.optimizers.AdamW(0.02, weight_decay=5.0)})


CASES = {
    "momentum and AdamW": lambda: multi(momentum(), {".*first/.*": decaying()}),
    "one without variables": one_of_two,
    "the default alone": lambda: multi(keras.optimizers.Lion(0.003), {}),
    "two decays": two_decays,
}
RUNS = [(case, replicas) for case in CASES for replicas in (1, 2)]


def compiled(optimizer):
    keras.utils.set_random_seed(5)
    layers = [keras.layers.Dense(8, "tanh", name="first"), keras.layers.Dense(2, name="last")]
    model = keras.Sequential([keras.Input((6,)), *layers], name="net")
    model.compile(optimizer, "mse", run_eagerly=True)
    return model


def train(make, replicas, epochs=2, **settings):
    trainer = distloop.Trainer(distloop.from_keras(make), on(replicas, **settings))
    trainer.fit(batches(X[:29], Y[:29]), epochs=epochs)
    return trainer


@pytest.mark.parametrize(("case", "replicas"), mostly_wide(RUNS, RUNS[0], RUNS[3], RUNS[6]))
def test_weights_are_those_of_keras_own_fit_which_goes_on_from_them(case, replicas):
    model, twin = compiled(CASES[case]()), compiled(CASES[case]())
    trainer = train(model, replicas)
    for data in (batches(X[:24], Y[:24]), batches(X[24:29], Y[24:29])) * 2:
        twin.fit(data, epochs=1, verbose=0)
    assert_same_weights(trainer.model, twin)
    assert_same_weights(model, twin)
    assert [int(o.iterations.numpy()) for o in trainer.optimizer.optimizers] == [8] * len(trainer.optimizer.optimizers)
    for one in (model, twin):  # slots, counts and rates were given back
        one.fit(batches(X, Y), epochs=1, verbose=0)
    assert_same_weights(model, twin)
    if replicas == 1:
        assert_same_weights(train(lambda: compiled(CASES[case]()), replicas).model, trainer.model)


@pytest.mark.wide
@pytest.mark.parametrize("case", CASES)
def test_a_function_may_make_the_model_on_two_replicas(case):
    made = train(lambda: compiled(CASES[case]()), 2)
    assert_same_weights(made.model, train(compiled(CASES[case]()), 2).model)


SETTINGS = [{"microbatches": 3}, {"virtual_replicas": 4}, {"shard_optimizer": True}, {"precision": "mixed_float16"}]


@pytest.mark.parametrize("optimizer", mostly_wide([one_of_two, two_decays], two_decays))
@pytest.mark.parametrize("settings", mostly_wide(SETTINGS, SETTINGS[2]))
def test_two_devices_train_as_one_does(settings, optimizer):
    def make():
        return compiled(optimizer())

    one = train(make, 1, **{name: value for name, value in settings.items() if name != "shard_optimizer"})
    two = train(make, 2, **settings)
    for a, b in zip(one.model.get_weights(), two.model.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-2 if "precision" in settings else 1e-6)


@pytest.mark.parametrize("last", mostly_wide([2, 3]))
def test_a_run_that_stops_goes_on_bit_for_bit(last, tmp_path):
    def make():
        return compiled(multi(momentum(), {".*first/.*": decaying()}))

    for epochs in range(1, last + 1):
        resumed = train(make, 2, epochs, workdir=str(tmp_path))
    straight = train(make, 2, last)
    np.testing.assert_equal(resumed.model.get_weights(), straight.model.get_weights())
    found, expected = ([v.numpy() for v in trainer.optimizer.variables] for trainer in (resumed, straight))
    np.testing.assert_equal(found, expected)
    assert float(resumed.optimizer.learning_rate.numpy()) == pytest.approx(0.05)


def test_a_new_learning_rate_goes_before_the_saved_one(tmp_path, caplog):
    def make(of_first, of_default):
        adam, sgd = keras.optimizers.Adam, keras.optimizers.SGD
        return lambda: compiled(multi(sgd(of_default), {".*first/.*": adam(of_first)}))

    first = train(make(0.1, 0.02), 1, 1, workdir=str(tmp_path))
    first.optimizer.optimizers[1].learning_rate = 0.01  # an action may do that
    first.fit(batches(X[:29], Y[:29]), epochs=2)
    resumed = train(make(0.2, 0.02), 2, 3, workdir=str(tmp_path))
    rates = [float(optimizer.learning_rate.numpy()) for optimizer in resumed.optimizer.optimizers]
    assert rates == pytest.approx([0.2, 0.01])
    assert "optimizer/learning_rate_1 is 0.2, as model_fn says now; the checkpoint has 0.1." in caplog.text
    assert "optimizer/learning_rate_2 is" not in caplog.text


def test_another_optimizer_than_the_saved_one_is_refused_by_name(tmp_path):
    train(lambda: compiled(multi(momentum(), {})), 1, 1, workdir=str(tmp_path))
    with pytest.raises(ValueError, match="optimizer/class is MultiOptimizer there and Adam here"):
        train(lambda: compiled("adam"), 1, 2, workdir=str(tmp_path))


def test_variables_that_another_optimizer_updates_are_refused_on_resume(tmp_path):
    def make(pattern):
        return lambda: compiled(multi(momentum(), {pattern: momentum()}))

    train(make(".*first/.*"), 1, 1, workdir=str(tmp_path))
    sentence = r"first/bias, by optimizer 1 \(SGD\), is trained there alone; .* 2 \(SGD\), is trained here alone"
    with pytest.raises(ValueError, match=sentence):
        train(make(".*last/.*"), 1, 2, workdir=str(tmp_path))


def test_a_rate_of_one_that_others_have_changed_is_told_of(caplog):
    model = compiled(one_of_two())
    trainer = train(model, 1, 1)
    model.optimizer.optimizers[0].learning_rate = 1e-6
    trainer.evaluate(X, Y)
    assert "has changed (weights, learning rate or compile)" in caplog.text


REFUSED = {
    "a function": (
        lambda: keras.optimizers.MultiOptimizer(lambda variable: keras.optimizers.SGD()),
        "chooses optimizers by a function, which says too late what they are: give keras.optimizers.OptimizerMap",
    ),
    "Nadam": (lambda: multi(momentum(), {".*first.*": keras.optimizers.Nadam()}), "was given with Nadam, which does"),
    "clipping": (lambda: multi(momentum(), {"a": keras.optimizers.SGD(clipnorm=1.0)}), "has clipnorm=1.0, which Keras"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_rule_for_one_variable_is_refused(case):
    make, sentence = REFUSED[case]
    for model in (compiled(make()), lambda: compiled(make())):
        with pytest.raises(ValueError, match=sentence):
            distloop.Trainer(distloop.from_keras(model), on(1))

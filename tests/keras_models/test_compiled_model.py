"""Compiled Keras models: what is taken over from them, and what is refused."""

import contextlib

import keras
import numpy as np
import pytest

import distloop
from tests.keras_models.compiled_models import (
    X,
    Y,
    assert_same_weights,
    assert_trains_on_as_keras_does,
    batches,
    compiled,
    copy_of,
    net,
)
from tests.problems import mostly_wide, on

pytestmark = pytest.mark.slow  # half a minute or so in all; left to `make test`


def test_a_function_that_compiles_or_supervises_a_model_trains_as_fit_does():
    weights = net().get_weights()

    def make():
        model = net()
        model.set_weights(weights)
        return model

    def supervised():
        return distloop.supervised(make(), "mse", keras.optimizers.Adam(0.01), metrics=["mae"])

    twin = compiled(make())
    twin.fit(batches(X, Y), epochs=2, verbose=0)
    functions = (distloop.from_keras(lambda: compiled(make(), metrics=["mae"])), supervised)
    for replicas, model_fn in enumerate(functions, 1):
        trainer = distloop.Trainer(model_fn, on(replicas))
        numbers = trainer.fit(batches(X, Y), epochs=2)
        assert_same_weights(trainer.model, twin)
        assert "mean_absolute_error" in numbers or "mae" in numbers


def arrays_of(variables):
    return [variable.numpy() for variable in variables]


def test_the_original_model_has_what_was_trained_or_restored_when_fit_ends(tmp_path):
    model = compiled(net())
    model.optimizer.learning_rate = 0.025
    model.fit(batches(X, Y), epochs=1, verbose=0)
    trainer = distloop.Trainer(distloop.from_keras(model), on(1, workdir=str(tmp_path), checkpoint_every=4))
    assert float(trainer.optimizer.learning_rate.numpy()) == pytest.approx(0.025)
    trainer.fit(batches(X, Y), epochs=2)
    np.testing.assert_equal(model.get_weights(), trainer.model.get_weights())
    assert int(model.optimizer.iterations) == 12
    np.testing.assert_equal(arrays_of(model.optimizer.variables), arrays_of(trainer.optimizer.variables))
    assert trainer.model is not model and trainer.optimizer is not model.optimizer
    trainer.restore(str(tmp_path / "checkpoints" / "4"))
    assert int(model.optimizer.iterations) == 8
    assert_same_weights(model, trainer.model)


def raise_at(step, kind=KeyError):
    def fail(report):
        raise kind

    fail.every = step
    return fail


@pytest.mark.wide
@pytest.mark.parametrize("settings", mostly_wide([{}, {"shard_optimizer": True}, {"fails": True}]))
def test_keras_goes_on_from_a_fit_and_from_a_file_saved_after_it(settings, tmp_path):
    settings = dict(settings)
    actions = [raise_at(8)] if settings.pop("fails", False) else []
    model = compiled(net(), optimizer=keras.optimizers.Adam(0.05))
    twin = copy_of(model)
    with pytest.raises(KeyError) if actions else contextlib.nullcontext():
        distloop.Trainer(distloop.from_keras(model), on(2, **settings)).fit(batches(X, Y), epochs=4, actions=actions)
    twin.fit(batches(X, Y), epochs=2 if actions else 4, verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    for one in (twin, model, loaded):
        one.fit(batches(X, Y), epochs=2, verbose=0)
        assert_same_weights(one, twin)


def test_a_learning_rate_and_a_loss_scale_are_taken_over_and_come_back_too():
    scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.01, momentum=0.9), 64.0, dynamic_growth_steps=2)
    model = compiled(net(), optimizer=scaled)
    model.fit(batches(X, Y), epochs=1, verbose=0)
    trainer = distloop.Trainer(distloop.from_keras(model), on(1))
    optimizer = trainer.optimizer
    assert type(optimizer) is distloop.LossScaleOptimizer
    assert float(optimizer.loss_scale) == float(scaled.dynamic_scale) == 256.0
    assert optimizer.growth_steps == 2
    assert int(optimizer.iterations.numpy()) == 4
    found, expected = (each.inner_optimizer.variables for each in (optimizer, scaled))
    np.testing.assert_equal(arrays_of(found), arrays_of(expected))
    optimizer.learning_rate = 0.02
    trainer.fit(batches(X, Y), steps=11)
    assert float(scaled.inner_optimizer.learning_rate) == pytest.approx(0.02)
    assert float(scaled.dynamic_scale) == float(optimizer.loss_scale) > 256.0
    assert int(scaled.inner_optimizer.iterations) == 4 + 11


@pytest.mark.wide
def test_the_original_model_has_the_averages_and_the_trainer_the_weights():
    model = compiled(net())
    start = copy_of(model)
    trainer = distloop.Trainer(distloop.from_keras(model), on(2, average_decay=0.9))
    trainer.fit(batches(X, Y), epochs=2)
    assert model.evaluate(X, Y, verbose=0) == pytest.approx(trainer.evaluate(batches(X, Y))["loss"], rel=1e-5)
    trainer.fit(batches(X, Y), epochs=4)
    straight = distloop.Trainer(distloop.from_keras(start), on(2))
    straight.fit(batches(X, Y), epochs=4)
    assert_same_weights(trainer.model, straight.model)
    assert np.abs(model.get_weights()[0] - trainer.model.get_weights()[0]).max() > 1e-4


@pytest.mark.parametrize("kind", mostly_wide([KeyError, KeyboardInterrupt, SystemExit], KeyError, KeyboardInterrupt))
def test_the_original_model_has_its_weights_after_an_error_or_interruption(kind):
    model = compiled(keras.Sequential([keras.Input((6,)), keras.layers.BatchNormalization(), keras.layers.Dense(2)]))
    trainer = distloop.Trainer(distloop.from_keras(model), on(1))
    before = model.get_weights()
    with pytest.raises(kind):
        trainer.fit(batches(X, Y), epochs=2, actions=[raise_at(3, kind)])
    np.testing.assert_equal(model.get_weights(), trainer.model.get_weights())
    assert all(np.any(weight != old) for weight, old in zip(model.get_weights(), before, strict=True))


def test_the_lines_after_fit_agree_with_the_trainer(tmp_path):
    model = compiled(net(), metrics=["mae", keras.metrics.RootMeanSquaredError("rmse")])
    trainer = distloop.Trainer(distloop.from_keras(model), on(2))
    trainer.fit(batches(X, Y), epochs=3)
    expected, outputs = trainer.evaluate(batches(X, Y)), trainer.predict(batches(X, Y))
    model.save(tmp_path / "model.keras")
    for each in (model, trainer.model, keras.models.load_model(tmp_path / "model.keras")):
        assert each.compiled and each.evaluate(batches(X, Y), verbose=0, return_dict=True) == pytest.approx(expected)
        np.testing.assert_allclose(each.predict(X, verbose=0), outputs, rtol=1e-5, atol=1e-6)
    assert trainer.model.optimizer is trainer.optimizer


@pytest.mark.parametrize(
    "optimizer",
    mostly_wide([lambda: keras.optimizers.Adam(0.01), lambda: keras.optimizers.SGD(0.01, momentum=0.9, nesterov=True)]),
    ids=["adam", "momentum"],
)
def test_training_goes_on_where_keras_stopped_slots_included(optimizer):
    model = compiled(net(), optimizer=optimizer())
    model.fit(batches(X, Y), epochs=1, verbose=0)
    trainer = distloop.Trainer(distloop.from_keras(model), on(2))
    assert int(trainer.optimizer.iterations.numpy()) == 4
    np.testing.assert_equal(arrays_of(trainer.optimizer.variables), arrays_of(model.optimizer.variables))
    assert_trains_on_as_keras_does(trainer, model, batches(X, Y))


@pytest.mark.wide
def test_a_script_in_mixed_float16_keeps_its_precision_and_its_loss_scale():
    def make():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4, "tanh"), keras.layers.Dense(2)])
        model.compile(keras.optimizers.SGD(0.05), "mse")  # puts a loss scale around the optimizer
        return model

    keras.config.set_dtype_policy("mixed_float16")
    try:
        model = make()
    finally:
        keras.config.set_dtype_policy("float32")
    x = np.random.default_rng(0).normal(size=(24, 3)).astype(np.float32)
    data = batches(x, x[:, :2])
    for given in (model, make):
        trainer = distloop.Trainer(distloop.from_keras(given), on(2, precision="mixed_float16"))
        assert trainer.model.layers[0].compute_dtype == "float16"
        assert type(trainer.optimizer) is distloop.LossScaleOptimizer
        first = trainer.evaluate(data)["loss"]
        trainer.fit(data, steps=20)
        assert trainer.evaluate(data)["loss"] < 0.5 * first


def test_what_is_no_compiled_model_and_makes_none_is_refused():
    with pytest.raises(ValueError, match=r"is not compiled; .*: call model.compile\(...\) first"):
        distloop.from_keras(net())
    with pytest.raises(ValueError, match="is not built, so it has no weights .*: give it an input shape, or give"):
        distloop.from_keras(compiled(keras.Sequential([keras.layers.Dense(2)])))
    for given in (None, "model", 3):
        with pytest.raises(ValueError, match="from_keras was given .*; give a compiled keras.Model or a function"):
            distloop.from_keras(given)
    with pytest.raises(ValueError, match="The function given to from_keras returned 3; it returns a compiled"):
        distloop.Trainer(distloop.from_keras(lambda: 3), on(1))
    with pytest.raises(ValueError, match="is not compiled"):
        distloop.Trainer(distloop.from_keras(net), on(1))
    with pytest.raises(ValueError, match="has clipnorm=1.0"):  # which belongs to distloop
        distloop.Trainer(distloop.from_keras(compiled(net(), optimizer=keras.optimizers.SGD(clipnorm=1.0))), on(1))


def test_a_model_of_tf_keras_is_refused():
    class Legacy:
        __module__ = "tf_keras.src.engine.training"
        name = "old"

        def __call__(self, x):
            return x

    for give in (lambda: distloop.from_keras(Legacy()), distloop.from_keras(Legacy)):
        with pytest.raises(ValueError, match="The model 'old' is one of tf_keras .*: build it with `import keras`"):
            give()
    with pytest.raises(ValueError, match="The model 'old' is one of tf_keras"):
        distloop.ModelSpec({"a": Legacy()}, keras.optimizers.SGD(), lambda batch, training: {})


def test_a_model_that_cannot_be_rebuilt_is_refused():
    class Closed(keras.Model):
        def __init__(self, layer):
            super().__init__()
            self.layer = layer

        def call(self, x):
            return self.layer(x)

    model = compiled(Closed(keras.layers.Dense(2)))
    model.build((None, 6))
    sentence = r"^[^\n]*cannot be rebuilt from its config [^\n]*: give from_keras a function[^\n]*$"
    with pytest.raises(ValueError, match=sentence):
        distloop.Trainer(distloop.from_keras(model), on(1))
    model = compiled(keras.Sequential([keras.Input((6,)), keras.layers.Lambda(lambda x: x + 1), keras.layers.Dense(2)]))
    with pytest.raises(ValueError, match="whose `function` is a Python lambda\\): give from_keras a function that"):
        distloop.Trainer(distloop.from_keras(model), on(1))


STEPS = [name.format(verb) for name in ("{}_step", "make_{}_function") for verb in ("train", "test", "predict")]
METRICS, VARIABLES = ["compute_metrics", "get_metrics_result", "reset_metrics"], ["trainable_variables"]


@pytest.mark.parametrize("method", [*STEPS, *METRICS, *VARIABLES, "trainable_weights"])
def test_a_model_with_a_step_of_its_own_is_refused(method):
    sentence = f"has a {method} of its own, .*: write a model_fn that returns a ModelSpec"
    replaced = getattr(keras.Model, method)
    own = property(replaced.fget) if isinstance(replaced, property) else lambda self, *arguments: {"loss": 0.0}
    kind = type("Own", (keras.Sequential,), {method: own})
    model = compiled(kind([keras.Input((6,)), keras.layers.Dense(2)]))
    with pytest.raises(ValueError, match=sentence):
        distloop.from_keras(model)
    if not isinstance(replaced, property):
        model = compiled(net())
        setattr(model, method, lambda *arguments: {"loss": 0.0})
        with pytest.raises(ValueError, match=sentence):
            distloop.from_keras(model)


def load_other_weights(model):
    model.set_weights([weights + 1 for weights in model.get_weights()])


def set_another_rate(model):
    model.optimizer.learning_rate = 1e-6


def compile_it_again(model):
    model.compile(model.optimizer, "mae")


CHANGES = [load_other_weights, set_another_rate, compile_it_again]
TOLD = "since the Trainer copied or set it: the Trainer goes on from its copy"


@pytest.mark.parametrize("change", mostly_wide(CHANGES))
def test_what_others_changed_in_the_model_before_the_first_fit_is_told(change, caplog):
    model = compiled(net())
    trainer = distloop.Trainer(distloop.from_keras(model), on(1))
    change(model)
    trainer.fit(batches(X, Y), steps=2)
    assert TOLD in caplog.text


def test_what_others_changed_in_the_model_between_two_fits_is_told(caplog):
    model = compiled(net())
    trainer = distloop.Trainer(distloop.from_keras(model), on(1))
    for steps in (2, 4):
        trainer.fit(batches(X, Y), steps=steps)
    assert "has changed" not in caplog.text
    for change in CHANGES:
        caplog.clear()
        change(model)
        trainer.fit(batches(X, Y), steps=trainer.step + 1)
        assert TOLD in caplog.text, change.__name__
        caplog.clear()
        trainer.fit(batches(X, Y), steps=trainer.step + 1)
        assert not caplog.text, change.__name__


VERBS = {
    "evaluate": lambda trainer, directory: trainer.evaluate(X, Y),
    "predict": lambda trainer, directory: trainer.predict(X),
    "stream_predictions": lambda trainer, directory: next(trainer.stream_predictions(X)),
    "export": lambda trainer, directory: trainer.export(f"{directory}/model.npz"),
    "save": lambda trainer, directory: trainer.save(),
    "restore": lambda trainer, directory: trainer.restore(),
    "fit": lambda trainer, directory: trainer.fit(batches(X, Y), steps=3),  # once, then nothing is left to do
}


def test_each_verb_tells_once_that_others_have_changed_the_model(caplog, tmp_path):
    model = compiled(net())
    trainer = distloop.Trainer(distloop.from_keras(model), on(1, workdir=str(tmp_path)))
    trainer.fit(batches(X, Y), steps=2)
    for verb, call in VERBS.items():
        caplog.clear()
        call(trainer, tmp_path)
        assert "has changed" not in caplog.text, verb
        load_other_weights(model)
        call(trainer, tmp_path)
        call(trainer, tmp_path)
        assert caplog.text.count("the Trainer goes on from its copy") == 1, verb
        load_other_weights(model)
        call(trainer, tmp_path)
        assert caplog.text.count("the Trainer goes on from its copy") == 2, verb


def test_settings_of_compile_that_the_config_has_are_told_of(caplog):
    model = net()
    for setting, field in (("run_eagerly", "eager"), ("jit_compile", "jit_compile")):
        model.compile("sgd", "mse", **{setting: True})
        caplog.clear()
        distloop.Trainer(distloop.from_keras(model), on(1))
        assert caplog.messages == [f"{setting}=True of compile is left to the Config: set Config({field}=True) for it."]

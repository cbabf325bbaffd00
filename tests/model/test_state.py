"""What training changes: what each update trains, random streams, metrics, and what must be made inside model_fn."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from distloop.model.spec import ModelSpec, Update
from distloop.model.state import TrainState
from tests.model.two_layers import loss_of, spec_of, two_layers
from tests.problems import Lazy, mirrored

ONE = tf.distribute.get_strategy()
STRATEGIES = pytest.mark.parametrize("strategy", [ONE, mirrored(2)], ids=["none", "mirrored"])


NAMES = ["net/encoder/kernel", "net/encoder/bias", "net/head/kernel", "net/head/bias"]


def paths_of(made, name=""):
    return [made.paths[id(variable)] for variable in made.variables_of_update[name]]


@pytest.mark.slow
@STRATEGIES
def test_all_trainable_variables_are_trained_or_those_that_match(strategy):
    made = TrainState(lambda: spec_of(two_layers()), strategy)
    assert paths_of(made) == NAMES
    assert made.untrained_variables == []
    assert made.num_parameters() == 3 * 4 + 4 + 4 * 2 + 2
    assert int(made.step) == int(made.skipped_steps) == 0
    assert made.step.dtype == made.skipped_steps.dtype == tf.int64
    made = TrainState(lambda: spec_of(two_layers(), trainable="head|bias$"), strategy)
    assert paths_of(made) == NAMES[1:]
    assert [v.path for v in made.untrained_variables] == NAMES[:1]
    assert made.num_parameters() == 4 + 4 * 2 + 2


def two_updates(*variables):
    def model_fn():
        models = {"g": two_layers(), "d": two_layers()}
        given = [v(models) if callable(v) else v for v in variables]
        optimizers = [keras.optimizers.Adam(), keras.optimizers.SGD()]
        return ModelSpec(
            models,
            updates=[Update(n, loss_of(models[n]), *more) for n, *more in zip("gd", optimizers, given, strict=True)],
        )

    return model_fn


@STRATEGIES
def test_an_update_trains_the_variables_of_its_list_in_its_order(strategy):
    first = lambda models: models["g"].trainable_variables[2::-2]  # noqa: E731
    of_tensorflow = lambda models: [v.value for v in models["d"].trainable_variables]  # noqa: E731
    made = TrainState(two_updates(first, of_tensorflow), strategy)
    assert paths_of(made, "g") == ["g/net/head/kernel", "g/net/encoder/kernel"]
    assert len(paths_of(made, "d")) == 4


def frozen(*names):
    def model_fn():
        model = two_layers()
        for name in names:
            model.get_layer(name).trainable = False
        return spec_of(model)

    return model_fn


@pytest.mark.parametrize(
    "model_fn, update, expected",
    [
        (frozen("encoder"), "", NAMES[2:]),
        (two_updates("^g/", "^d/.*kernel"), "g", [f"g/{name}" for name in NAMES]),
        (two_updates("^g/", "^d/.*kernel"), "d", ["d/net/encoder/kernel", "d/net/head/kernel"]),
        (two_updates(".", "^d/"), "g", [f"{model}/{name}" for model in "gd" for name in NAMES]),
    ],
    ids=["frozen layers stay out", "all that is found", "what is found", "all"],
)
def test_an_update_trains_what_it_is_to_train(model_fn, update, expected):
    assert sorted(paths_of(TrainState(model_fn, ONE), update)) == sorted(expected)


def test_what_cannot_be_trained_is_refused():
    with pytest.raises(ValueError, match="no trainable variable for the model: give a model that has some"):
        TrainState(frozen("encoder", "head"), ONE)
    with pytest.raises(ValueError, match="""of update "g", 'stranger', is not in ModelSpec's model: put every model"""):
        TrainState(two_updates(lambda models: [keras.Variable(0.0, name="stranger")], "^d/"), ONE)
    with pytest.raises(ValueError, match='no trainable variable for update "g"'):
        TrainState(two_updates([], "^d/"), ONE)


@STRATEGIES
def test_several_optimizers_are_a_dict_by_name_built_over_what_they_train(strategy):
    made = TrainState(two_updates("^g/", "^d/.*kernel"), strategy)
    first, second = made.optimizer["g"], made.optimizer["d"]
    assert (type(first), type(second)) == (keras.optimizers.Adam, keras.optimizers.SGD)
    assert first.built and second.built and len(made.optimizer) == 2
    assert (len(first._trainable_variables), len(second._trainable_variables)) == (4, 2)
    assert isinstance(TrainState(lambda: spec_of(two_layers()), ONE).optimizer, keras.optimizers.SGD)


def test_the_average_covers_what_is_trained_and_no_statistics():
    made = TrainState(lambda: spec_of(two_layers(), trainable="head"), ONE, average_decay=0.9)
    assert [tuple(v.shape) for v in made.average.variables] == [(4, 2), (2,)]

    def model_fn():
        layers = [keras.layers.BatchNormalization(), keras.layers.Dropout(0.5), keras.layers.Dense(2)]
        return spec_of(keras.Sequential([keras.Input((3,)), *layers]))

    made = TrainState(model_fn, ONE)
    assert made.average is None
    assert [path.split("/")[-1] for path in paths_of(made)] == ["gamma", "beta", "kernel", "bias"]
    assert len(made.untrained_variables) == 3  # mean, variance, seed
    assert len(made.seeds) == 1


@STRATEGIES
def test_a_model_of_another_state_or_with_built_layers_is_refused(strategy):
    of_another_state = TrainState(lambda: spec_of(two_layers()), strategy).model
    lazy = Lazy()
    lazy(tf.zeros([1, 3]))  # builds its layers
    for model in (of_another_state, lazy):
        with pytest.raises(ValueError, match="was made outside model_fn"):
            TrainState(lambda: spec_of(model), strategy)  # noqa: B023 - called at once


@STRATEGIES
def test_a_model_that_knows_no_input_shape_is_built_from_rows(strategy):
    assert TrainState(lambda: spec_of(two_layers()), ONE).is_built
    made = TrainState(lambda: spec_of(Lazy(), keras.optimizers.Adam()), strategy)
    assert not made.is_built
    made.build({"x": tf.zeros([2, 3])})
    assert made.is_built and made.optimizer.built
    assert len(paths_of(made)) == 4
    kernels = strategy.experimental_local_results(made.model.first.kernel.value)
    assert len(kernels) == strategy.num_replicas_in_sync
    for kernel in kernels:
        np.testing.assert_array_equal(kernel.numpy(), kernels[0].numpy())


def test_lazy_models_are_built_from_rows_and_no_statistics_are_updated():
    class Normed(Lazy):
        def __init__(self):
            super().__init__()
            self.norm = keras.layers.BatchNormalization()

        def call(self, x, training=False):
            return self.norm(super().call(x), training=training)

    def model_fn():
        module = tf.Module()
        module.net = Normed()
        return ModelSpec({"m": module}, keras.optimizers.SGD(), loss_of(module.net))

    made = TrainState(model_fn, ONE)
    assert not made.is_built
    made.build({"x": tf.ones([2, 3])})
    assert len(paths_of(made)) == 6
    norm = made.model["m"].net.norm
    np.testing.assert_array_equal(norm.moving_mean.numpy(), 0.0)
    np.testing.assert_array_equal(norm.moving_variance.numpy(), 1.0)


@STRATEGIES
def test_a_model_that_seems_built_with_unbuilt_parts_is_built_from_rows(strategy):
    class HalfBuilt(Lazy):
        def build(self, shape):
            self.first.build(shape)
            self.built = True

    def model_fn():
        model = HalfBuilt()
        model.build((None, 3))
        return spec_of(model)

    made = TrainState(model_fn, strategy)
    assert made.model.built and not made.is_built
    made.build({"x": tf.zeros([2, 3])})
    expected = ["first/kernel", "first/bias", "second/kernel", "second/bias"]
    assert [path.partition("/")[2] for path in paths_of(made)] == expected


def test_layers_outside_the_model_or_never_called_are_refused():
    def outside():
        model, other = Lazy(), keras.layers.Dense(2, name="other")
        return ModelSpec(model, keras.optimizers.SGD(), lambda b, t: {"loss": tf.reduce_sum(other(model(b["x"])), -1)})

    of_a_step = "The variable '.*kernel.*' was created by a step, .* belong to ModelSpec's model"
    with pytest.raises(ValueError, match=of_a_step):
        TrainState(outside, ONE).build({"x": tf.zeros([2, 3])})

    def never_called():
        models = {"used": two_layers(), "unused": Lazy()}
        return ModelSpec(models, keras.optimizers.SGD(), loss_of(models["used"]))

    with pytest.raises(ValueError, match="are not built and nothing calls them, .*: call them, or build"):
        TrainState(never_called, ONE).build({"x": tf.zeros([2, 3])})

"""What training changes: what each update trains, random streams, metrics, and what must be made inside model_fn."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

from distloop.distributed import strategies
from distloop.model.spec import ModelSpec, Update
from distloop.model.state import TrainState
from distloop.settings.config import Config
from tests.problems import Lazy


@functools.cache
def replicas(count):
    return strategies.make_strategy(Config(device="cpu", strategy="mirrored", num_devices=count))


ONE = tf.distribute.get_strategy()
STRATEGIES = pytest.mark.parametrize("strategy", [ONE, replicas(2)], ids=["none", "mirrored"])


def two_layers():
    return keras.Sequential(
        [keras.Input((3,)), keras.layers.Dense(4, name="encoder"), keras.layers.Dense(2, name="head")], name="net"
    )


NAMES = ["net/encoder/kernel", "net/encoder/bias", "net/head/kernel", "net/head/bias"]


def loss_of(model):
    return lambda batch, training: {"loss": tf.reduce_sum(model(batch["x"], training=training), -1)}


def spec_of(model, optimizer=None, **more):
    return ModelSpec(model, optimizer or keras.optimizers.SGD(0.1), loss_of(model), **more)


def paths_of(made, name=""):
    return [made.paths[id(variable)] for variable in made.variables_of_update[name]]


# What is trained.


@pytest.mark.slow
@STRATEGIES
def test_all_trainable_variables_are_trained(strategy):
    made = TrainState(lambda: spec_of(two_layers()), strategy)
    assert paths_of(made) == NAMES
    assert made.untrained_variables == []
    assert made.num_parameters() == 3 * 4 + 4 + 4 * 2 + 2


@pytest.mark.slow
def test_a_regular_expression_picks_what_is_trained():
    made = TrainState(lambda: spec_of(two_layers(), trainable="head|bias$"), ONE)
    assert paths_of(made) == NAMES[1:]
    assert [v.path for v in made.untrained_variables] == NAMES[:1]
    assert made.num_parameters() == 4 + 4 * 2 + 2


def test_statistics_and_random_streams_are_not_trained():
    def model_fn():
        layers = [keras.layers.BatchNormalization(), keras.layers.Dropout(0.5), keras.layers.Dense(2)]
        return spec_of(keras.Sequential([keras.Input((3,)), *layers]))

    made = TrainState(model_fn, ONE)
    assert [path.split("/")[-1] for path in paths_of(made)] == ["gamma", "beta", "kernel", "bias"]
    assert len(made.untrained_variables) == 3  # mean, variance, seed
    assert len(made.seeds) == 1


def two_updates(first_variables, second_variables=None):
    def model_fn():
        models = {"g": two_layers(), "d": two_layers()}
        given = [v(models) if callable(v) else v for v in (first_variables, second_variables)]
        optimizers = [keras.optimizers.Adam(), keras.optimizers.SGD()]
        updates = [
            Update(name, loss_of(models[name]), optimizer, variables)
            for name, optimizer, variables in zip("gd", optimizers, given, strict=True)
        ]
        return ModelSpec(models, updates=updates)

    return model_fn


@STRATEGIES
def test_an_update_trains_the_variables_of_its_list(strategy):
    made = TrainState(
        two_updates(
            lambda models: models["g"].trainable_variables[:1],
            lambda models: [v.value for v in models["d"].trainable_variables],  # TensorFlow's own variables
        ),
        strategy,
    )
    assert paths_of(made, "g") == ["g/net/encoder/kernel"]
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
        (two_updates(None, "^d/"), "g", [f"{model}/{name}" for model in "gd" for name in NAMES]),
    ],
    ids=["frozen layers stay out", "all that is found", "what is found", "all, without variables"],
)
def test_an_update_trains_what_it_is_to_train(model_fn, update, expected):
    assert sorted(paths_of(TrainState(model_fn, ONE), update)) == sorted(expected)


@pytest.mark.parametrize(
    "model_fn, match",
    [
        (
            lambda: spec_of(two_layers(), trainable="decoder"),
            "'decoder' for the model is found in no .*encoder/kernel'.*: correct it",
        ),
        (frozen("encoder", "head"), "no trainable variable for the model: give a model that has some"),
        (
            two_updates(lambda models: [keras.Variable(0.0, name="stranger")], "^d/"),
            """of update "g", 'stranger', is not in ModelSpec's model: put every model""",
        ),
        (two_updates([], "^d/"), 'no trainable variable for update "g"'),
        (two_layers, "model_fn returned a Sequential; .* a ModelSpec: return distloop.ModelSpec"),
    ],
    ids=["a pattern that is not found", "nothing trainable", "a stranger", "an empty list", "no spec"],
)
def test_what_cannot_be_trained_is_refused(model_fn, match):
    with pytest.raises(ValueError, match=match):
        TrainState(model_fn, ONE)


def test_several_optimizers_stand_in_a_dict_by_name():
    made = TrainState(two_updates("^g/", "^d/"), ONE)
    assert {name: type(optimizer) for name, optimizer in made.optimizer.items()} == {
        "g": keras.optimizers.Adam,
        "d": keras.optimizers.SGD,
    }
    assert isinstance(TrainState(lambda: spec_of(two_layers()), ONE).optimizer, keras.optimizers.SGD)


@STRATEGIES
def test_optimizers_are_built_over_what_they_train(strategy):
    made = TrainState(two_updates("^g/", "^d/.*kernel"), strategy)
    assert made.optimizer["g"].built and made.optimizer["d"].built
    assert len(made.optimizer["g"]._trainable_variables) == 4
    assert len(made.optimizer["d"]._trainable_variables) == 2


def test_the_average_covers_what_is_trained():
    made = TrainState(lambda: spec_of(two_layers(), trainable="head"), ONE, average_decay=0.9)
    assert [tuple(v.shape) for v in made.average.variables] == [(4, 2), (2,)]
    assert TrainState(lambda: spec_of(two_layers()), ONE).average is None


def test_training_starts_at_step_0():
    made = TrainState(lambda: spec_of(two_layers()), replicas(2))
    assert int(made.step) == int(made.skipped_steps) == 0
    assert made.step.dtype == made.skipped_steps.dtype == tf.int64


# Made inside model_fn.


@STRATEGIES
def test_a_model_made_outside_is_refused(strategy):
    model = two_layers()
    with pytest.raises(ValueError, match="model's variable 'net/encoder/kernel' was made outside .*from_keras"):
        TrainState(lambda: spec_of(model), strategy)


@STRATEGIES
def test_an_optimizer_made_outside_is_refused(strategy):
    optimizer = keras.optimizers.Adam()
    with pytest.raises(ValueError, match="optimizer's variable '.*' was made outside model_fn, .*: make the optimizer"):
        TrainState(lambda: spec_of(two_layers(), optimizer), strategy)


def test_a_model_of_another_state_is_refused():
    first = TrainState(lambda: spec_of(two_layers()), replicas(2))
    with pytest.raises(ValueError, match="was made outside model_fn"):
        TrainState(lambda: spec_of(first.model), replicas(2))


@STRATEGIES
def test_a_lazy_models_layers_may_not_be_built_outside(strategy):
    model = Lazy()
    model(tf.zeros([1, 3]))
    with pytest.raises(ValueError, match="was made outside model_fn"):
        TrainState(lambda: spec_of(model), strategy)


# Models that are built from data.


@STRATEGIES
def test_a_model_that_knows_no_input_shape_is_built_from_rows(strategy):
    made = TrainState(lambda: spec_of(Lazy(), keras.optimizers.Adam()), strategy)
    assert not made.is_built
    made.build({"x": tf.zeros([2, 3])})
    assert made.is_built and made.optimizer.built
    assert len(paths_of(made)) == 4
    kernels = strategy.experimental_local_results(made.model.first.kernel.value)
    assert len(kernels) == strategy.num_replicas_in_sync
    for kernel in kernels:
        np.testing.assert_array_equal(kernel.numpy(), kernels[0].numpy())


def test_lazy_models_inside_a_module_or_dict_are_built_from_rows():
    def model_fn():
        module = tf.Module()
        module.net = Lazy()
        return ModelSpec({"m": module}, keras.optimizers.SGD(), loss_of(module.net))

    made = TrainState(model_fn, ONE)
    assert not made.is_built
    made.build({"x": tf.zeros([2, 3])})
    assert len(paths_of(made)) == 4


@STRATEGIES
def test_a_model_that_counts_as_built_with_parts_that_are_not_is_built_from_rows(strategy):
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
    assert [path.partition("/")[2] for path in paths_of(made)] == [
        "first/kernel",
        "first/bias",
        "second/kernel",
        "second/bias",
    ]


def test_a_layer_that_loss_fn_builds_outside_the_model_is_refused():
    def model_fn():
        model, other = Lazy(), keras.layers.Dense(2, name="other")
        return ModelSpec(model, keras.optimizers.SGD(), lambda b, t: {"loss": tf.reduce_sum(other(model(b["x"])), -1)})

    with pytest.raises(
        ValueError, match="The variable '.*kernel.*' was created by a step, .* belong to ModelSpec's model"
    ):
        TrainState(model_fn, ONE).build({"x": tf.zeros([2, 3])})


def test_a_built_model_waits_for_nothing():
    assert TrainState(lambda: spec_of(two_layers()), ONE).is_built


def test_layers_that_loss_fn_never_calls_are_refused():
    def model_fn():
        models = {"used": two_layers(), "unused": Lazy()}
        return ModelSpec(models, keras.optimizers.SGD(), loss_of(models["used"]))

    made = TrainState(model_fn, ONE)
    with pytest.raises(ValueError, match="are not built and nothing calls them, .*: call them, or build"):
        made.build({"x": tf.zeros([2, 3])})


def test_building_from_rows_updates_no_statistics():
    class Normed(Lazy):
        def __init__(self):
            super().__init__()
            self.norm = keras.layers.BatchNormalization()

        def call(self, x, training=False):
            return self.norm(super().call(x), training=training)

    made = TrainState(lambda: spec_of(Normed()), ONE)
    made.build({"x": tf.ones([2, 3])})
    np.testing.assert_array_equal(made.model.norm.moving_mean.numpy(), 0.0)
    np.testing.assert_array_equal(made.model.norm.moving_variance.numpy(), 1.0)


# Metrics.


def test_what_is_no_metric_is_refused():
    with pytest.raises(ValueError, match=r'holds a function under "f1"; it takes .*: return means'):
        spec_of(two_layers(), metrics={"f1": keras.metrics.binary_accuracy})

"""Names of variables: as Keras calls them, and alike in every process; the walk through nested models."""

import contextlib
import hashlib

import keras
import numpy as np
import pytest
import tensorflow as tf

import distloop
from distloop.variables import (
    ModelRunner,
    count_parameters,
    count_unnamed,
    digest,
    named_variables,
    portable_names,
    slot_names,
    summarize,
    top_layers,
    unwrap_model,
    walk,
)
from tests.model.two_layers import two_layers
from tests.problems import Lazy, on


def make_model(name=None):
    inputs = keras.Input((4,))
    x = keras.layers.Dense(3)(inputs)
    x = keras.layers.Dense(3, name="dense_of_mine")(x)
    x = keras.layers.BatchNormalization()(keras.layers.Dense(3)(x))
    return keras.Model(inputs, keras.layers.Dropout(0.5)(x), name=name)


NAMES = ["net/encoder/kernel", "net/encoder/bias", "net/head/kernel", "net/head/bias"]


def test_a_walk_yields_the_leaves_of_dicts_lists_and_modules():
    module = tf.Module()
    module.second, module.first = [1, {"a": 2}], 3
    found = [(path, leaf) for path, leaf in walk({"m": module}) if isinstance(leaf, int)]
    assert found == [("m/second/0", 1), ("m/second/1/a", 2), ("m/first", 3)]
    found = [path for path, leaf in walk({"m": module}, is_sorted=True) if isinstance(leaf, int)]
    assert found == ["m/first", "m/second/0", "m/second/1/a"]


def test_an_object_in_a_list_of_a_module_is_walked_once():
    layer, module = keras.layers.Dense(2), tf.Module()
    module.layers = [layer, {"again": [layer]}]
    assert [path for path, leaf in walk(module) if leaf is layer] == ["layers/0", "layers/1/again/0"]


def test_a_runner_has_the_names_and_layers_of_its_model():
    runner = ModelRunner()
    runner.model = two_layers()
    runner.modules = [runner.model.layers[:1], runner.model.layers[1:]]
    assert unwrap_model(runner) is runner.model and unwrap_model(runner.model) is runner.model
    assert list(named_variables({"m": runner})) == [f"m/{name}" for name in NAMES]
    assert list(top_layers([runner])) == [runner.model]
    assert list(top_layers([runner], in_modules=True)) == runner.model.layers


def test_a_keras_models_variables_are_named_by_their_paths():
    assert list(named_variables(two_layers())) == NAMES
    model = Lazy()
    model(tf.zeros([1, 3]))
    names = list(named_variables(model))
    assert [name.split("/", 1)[1] for name in names] == ["first/kernel", "first/bias", "second/kernel", "second/bias"]


def test_a_modules_variables_and_layers_are_named_by_attribute():
    module = tf.Module()
    module.scale = tf.Variable(1.0)
    module.table = keras.Variable(np.zeros([2, 2], np.float32))
    module.parts = [two_layers(), {"bias": tf.Variable([0.0])}]
    module.inner = tf.Module()
    module.inner.weight = tf.Variable(2.0)
    of_parts = [*(f"parts/0/{name}" for name in NAMES), "parts/1/bias"]
    assert list(named_variables(module)) == ["inner/weight", *of_parts, "scale", "table"]


def test_models_in_a_dict_or_list_are_named_by_key_or_index():
    named = named_variables({"g": two_layers(), "d": two_layers()})
    assert list(named) == [f"{key}/{name}" for key in "gd" for name in NAMES]
    assert list(named_variables([two_layers()])) == [f"0/{name}" for name in NAMES]
    model = two_layers()
    named = named_variables({"a": model, "b": model})
    assert [name.split("/")[0] for name in named] == ["a"] * 4


def test_variables_of_the_same_path_are_told_apart():
    module = keras.Layer(name="both")
    module.parts = [keras.layers.Dense(2, name="dense") for _ in range(2)]
    for layer in module.parts:
        layer.build((None, 3))
    module.built = True
    names = list(named_variables(module))
    assert names == ["dense/kernel", "dense/bias", "dense/kernel#2", "dense/bias#2"]


def test_random_streams_are_named_by_their_order():
    layers = [keras.layers.Dropout(0.5), keras.layers.Dense(1, name="out"), keras.layers.Dropout(0.5)]
    model = keras.Sequential([keras.Input((3,)), *layers], name="net")
    assert set(named_variables(model)) == {"seeds/0", "seeds/1", "net/out/kernel", "net/out/bias"}
    module = tf.Module()
    module.draws = keras.random.SeedGenerator(0)
    assert list(named_variables(module)) == ["draws"]


def test_recurrent_states_and_bidirectional_layers_have_portable_names():
    def make_model():
        layer = keras.layers.Bidirectional(keras.layers.SimpleRNN(2, stateful=True))
        return keras.Sequential([keras.Input(batch_shape=(4, 3, 5)), layer])

    first, second = make_model(), make_model()
    names = list(portable_names(first))
    assert names == list(portable_names(second))
    assert sum("forward_simple_rnn/" in name for name in names) == 4  # two kernels, a bias and a state
    assert "rnn_state" not in summarize(first) and sum(count_parameters(first).values()) == first.count_params()


def test_portable_names_are_the_same_for_a_model_made_again():
    first, second = make_model(), make_model()
    assert list(named_variables(first)) != list(named_variables(second))
    assert list(portable_names(first)) == list(portable_names(second))
    assert list(portable_names(first).values()) == list(named_variables(first).values())
    assert "dense/kernel" in portable_names(first) and "dense_1/bias" in portable_names(first)
    assert "dense_of_mine/kernel" in portable_names(first)


class Unnamed(keras.layers.Layer):
    def build(self, shape):
        self.total = self.add_weight(trainable=False)
        self.gains = [self.add_weight(shape=shape[1:]) for _ in range(2)]
        self.bias = self.add_weight(name="bias")

    def call(self, x):
        return x * self.gains[0] + self.gains[1] + self.bias


def test_weights_without_a_name_have_portable_names_in_their_order():
    first, second = (keras.Sequential([keras.Input((3,)), Unnamed(), Unnamed()], name="net") for _ in range(2))
    names = portable_names(first)
    assert list(names) == list(portable_names(second)) and list(named_variables(first)) != list(names)
    of_second = {f"net/unnamed_1/{name}" for name in ("variable", "variable_1", "variable_2", "bias")}
    assert {name for name in names if "unnamed_1" in name} == of_second
    assert names["net/unnamed/variable"] is first.layers[0].total  # created first, though Keras lists it last
    assert names["net/unnamed/variable_2"] is first.layers[0].gains[1]


def test_numbers_of_weights_without_a_name_count_within_their_layer():
    old = ["a/variable_11", "a/variable_9", "variable_7", "b/variable", "a/variable_9/kernel", "a/variable_of_mine"]
    new = ["a/variable_1", "a/variable", "variable", "b/variable", "a/variable_9/kernel", "a/variable_of_mine"]
    assert count_unnamed(old) == dict(zip(old, new, strict=True))
    assert list(count_unnamed(new).values()) == new


@pytest.mark.slow
def test_several_models_and_modules_keep_their_own_names():
    class Module(tf.Module):
        def __init__(self):
            super().__init__()
            self.weight = tf.Variable(1.0)
            self.parts = [keras.layers.Dense(1), keras.layers.Dense(1)]
            for part in self.parts:
                part.build((None, 2))

    names = portable_names({"a": make_model("net"), "b": make_model("net"), "m": Module()})
    assert "a/dense/kernel" in names and "b/dense/kernel" in names and "m/weight" in names
    assert len([name for name in names if name.startswith("m/parts/")]) == 4
    assert list(names) == list(portable_names({"a": make_model("net"), "b": make_model("net"), "m": Module()}))


def slots_of(optimizer, variables, names):
    optimizer.build(variables)
    return slot_names(optimizer, variables, names)


@pytest.mark.parametrize(
    "make_optimizer, slots",
    [
        (lambda: keras.optimizers.SGD(0.1), []),
        (lambda: keras.optimizers.SGD(0.1, momentum=0.9), ["momentum"]),
        (lambda: keras.optimizers.Adam(), ["momentum", "velocity"]),
        (lambda: keras.optimizers.Adam(amsgrad=True), ["momentum", "velocity", "velocity_hat"]),
        (lambda: keras.optimizers.RMSprop(momentum=0.5, centered=True), ["velocity", "momentum", "average_gradient"]),
        (lambda: keras.optimizers.Lion(), ["momentum"]),
    ],
)
def test_slots_are_named_by_what_they_belong_to(make_optimizer, slots):
    names = portable_names(make_model())
    trained = {name: v for name, v in names.items() if v.trainable}
    named = slots_of(make_optimizer(), list(trained.values()), list(trained))
    assert set(named) == {"iteration", "learning_rate", *(f"{slot}/{name}" for slot in slots for name in trained)}
    for slot in slots:
        for name, variable in trained.items():
            assert named[f"{slot}/{name}"].shape == variable.shape
            assert variable.path.replace("/", "_") in named[f"{slot}/{name}"].path


def test_variables_that_share_a_name_or_its_beginning_have_own_slots():
    variables = [tf.Variable([1.0], name="w"), tf.Variable([1.0, 2.0], name="w")]
    named = slots_of(keras.optimizers.SGD(0.1, momentum=0.9), variables, ["a/w", "b/w"])
    assert named["momentum/a/w"].shape == (1,) and named["momentum/b/w"].shape == (2,)
    variables = [keras.Variable([1.0], name="w"), keras.Variable([1.0, 2.0], name="w_momentum")]
    named = slots_of(keras.optimizers.Adam(0.1), variables, ["w", "w_momentum"])
    assert named["momentum/w"].shape == (1,) and named["momentum/w_momentum"].shape == (2,)
    assert named["velocity/w_momentum"].shape == (2,)


def test_slots_without_a_name_of_their_own_are_named_alike_everywhere():
    for make_optimizer, some in (
        (keras.optimizers.Adafactor, {"kernel", "kernel_1", "kernel_2", "kernel_3", "bias"}),  # rows and columns
        (keras.optimizers.Nadam, {"variable"}),
    ):
        found = []
        for _ in range(2):
            trained = {name: v for name, v in portable_names(make_model()).items() if v.trainable}
            found.append(slots_of(make_optimizer(), list(trained.values()), list(trained)))
        assert some <= found[0].keys() == found[1].keys()


def test_parameters_are_counted_by_top_level_layer():
    counts = count_parameters(make_model())
    assert list(counts.values()) == [15, 12, 12, 12]  # dropout has a seed, which is no parameter
    assert list(counts)[1] == "dense_of_mine"
    assert list(count_parameters(keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, name="a")]))) == ["a"]


def test_parameters_that_are_in_no_layer_are_the_models():
    class Net(keras.Model):
        def __init__(self):
            super().__init__(name="net")
            self.scale = self.add_weight(shape=(5,))
            self.inner = keras.layers.Dense(2, name="inner")

        def call(self, x):
            return self.inner(x)

    model = Net()
    model(tf.zeros([1, 3]))
    assert count_parameters(model) == {"inner": 8, "net": 5}


def test_parameters_of_several_models_are_counted_by_model_and_once():
    shared = tf.Variable(tf.zeros([7]))
    models = {"g": [tf.Variable(0.0), shared], "d": [shared, tf.Variable([0.0, 1.0])]}
    assert count_parameters(models) == {"g": 8, "d": 2}
    assert count_parameters([tf.Variable(0.0)]) == {"0": 1}
    module = tf.Module()
    module.w, module.layers = tf.Variable(tf.zeros([3, 2])), [tf.Variable(0.0), tf.Variable(1.0)]
    assert count_parameters(module) == {"layers": 2, "w": 6}


def test_a_summary_is_a_line_a_variable():
    layers = [keras.layers.Dense(1000, use_bias=False, name="a"), keras.layers.Dropout(0.5)]
    layers += [keras.layers.BatchNormalization(scale=False, center=False, name="b", dtype="mixed_bfloat16")]
    model = keras.Sequential([keras.Input((2,)), *layers], name="m")
    module = {"net": model, "scale": tf.Variable(tf.zeros([], "float16"))}
    assert summarize(module).splitlines() == [
        "variable                 shape     dtype    trainable  parameters",
        "net/m/a/kernel           2 x 1000  float32  yes             2,000",
        "net/m/b/moving_mean      1000      float32  no              1,000",
        "net/m/b/moving_variance  1000      float32  no              1,000",
        "scale                    scalar    float16  yes                 1",
        "4 variables                                 2,001           4,001",
    ]


def digested(value=1.0, *, mirrored=False, seed=1):
    with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope() if mirrored else contextlib.nullcontext():
        layers = [keras.layers.Dense(2, kernel_initializer="ones"), keras.layers.BatchNormalization()]
        layers += [keras.layers.Dropout(0.5, seed=seed)]
        model = keras.Sequential([keras.Input((3,)), *layers], name="net")
        model.layers[1].moving_mean.assign([value, 0.0])
    return digest(model)


def test_a_digest_counts_each_byte_and_is_the_same_in_every_process():
    assert digested() == digested() == digested(seed=2) == digested(mirrored=True)
    assert digested(np.nextafter(np.float32(1), np.float32(2))) != digested()
    assert digest({"a": tf.Variable(0.0)}) != digest({"b": tf.Variable(0.0)}) != digest({"b": tf.Variable(0)})
    known = hashlib.sha256(b"w int32[2]\n\x01\x00\x00\x00\x02\x00\x00\x00").hexdigest()
    assert digest({"w": tf.Variable([1, 2])}) == known


def test_a_summary_says_no_of_what_a_regular_expression_leaves_out():
    def model_fn():
        model = two_layers()
        loss_fn = lambda batch, training: {"loss": model(batch["x"])[:, 0] ** 2}  # noqa: E731
        return distloop.ModelSpec(model, keras.optimizers.SGD(0.1), loss_fn, trainable="head")

    trainer = distloop.Trainer(model_fn, on(1, console="quiet"))
    trainer.build({"x": np.zeros((4, 3), "float32")})
    rows = [line.split() for line in summarize(trainer.model).splitlines()]
    assert [row[0].split("/")[-2] for row in rows[1:-1] if "yes" in row] == ["head", "head"]
    assert rows[-1] == ["4", "variables", "10", "26"]

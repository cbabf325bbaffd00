"""Names of variables: as Keras calls them, and alike in every process."""

import keras
import pytest
import tensorflow as tf

from distloop.paths import named_variables, portable_names, slot_names


def make_model(name=None):
    inputs = keras.Input((4,))
    x = keras.layers.Dense(3)(inputs)
    x = keras.layers.Dense(3, name="dense_of_mine")(x)
    x = keras.layers.BatchNormalization()(keras.layers.Dense(3)(x))
    return keras.Model(inputs, keras.layers.Dropout(0.5)(x), name=name)


def test_portable_names_are_the_same_for_a_model_made_again():
    first, second = make_model(), make_model()
    assert list(named_variables(first)) != list(named_variables(second))
    assert list(portable_names(first)) == list(portable_names(second))
    assert list(portable_names(first).values()) == list(named_variables(first).values())
    assert "dense/kernel" in portable_names(first) and "dense_1/bias" in portable_names(first)
    assert "dense_of_mine/kernel" in portable_names(first)


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
    optimizer = make_optimizer()
    optimizer.build(list(trained.values()))
    named = slot_names(optimizer, list(trained.values()), list(trained))
    assert set(named) == {"iteration", "learning_rate", *(f"{slot}/{name}" for slot in slots for name in trained)}
    for slot in slots:
        for name, variable in trained.items():
            assert named[f"{slot}/{name}"].shape == variable.shape
            assert variable.path.replace("/", "_") in named[f"{slot}/{name}"].path


def test_variables_that_share_a_name_have_slots_of_their_own():
    variables = [tf.Variable([1.0], name="w"), tf.Variable([1.0, 2.0], name="w")]
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    optimizer.build(variables)
    named = slot_names(optimizer, variables, ["a/w", "b/w"])
    assert named["momentum/a/w"].shape == (1,) and named["momentum/b/w"].shape == (2,)


def test_a_name_that_begins_like_another_is_told_apart():
    variables = [keras.Variable([1.0], name="w"), keras.Variable([1.0, 2.0], name="w_momentum")]
    optimizer = keras.optimizers.Adam(0.1)
    optimizer.build(variables)
    named = slot_names(optimizer, variables, ["w", "w_momentum"])
    assert named["momentum/w"].shape == (1,) and named["momentum/w_momentum"].shape == (2,)
    assert named["velocity/w_momentum"].shape == (2,)

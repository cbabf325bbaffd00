"""Variables that ModelSpec's model lacks: refused where they train or are written, told of where they are read."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import distloop
from distloop.graph_functions import graph_function
from distloop.model.state import TrainState
from tests.problems import on, refused

ROWS = {"x": np.ones((8, 3), np.float32)}
LACKS = "ModelSpec's model lacks"
FIX = "ModelSpec([model, it], ...)"


def model_fn(make_outside, *, is_held=False, used_in="loss_fn"):
    """A network, and beside it what `make_outside` makes: its owner, and a function that one of the functions calls."""

    def make():
        net = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4, name="body")], name="net")
        owner, use = make_outside()
        users = {"loss_fn": tf.identity, "gradient_fn": tf.identity, "predict_fn": tf.identity, used_in: use}

        def loss_fn(batch, training):
            return {"loss": tf.reduce_sum(users["loss_fn"](net(batch["x"], training=training)), -1)}

        def gradient_fn(gradients):
            return {p: g + tf.reduce_sum(users["gradient_fn"](tf.zeros([1, 4]))) for p, g in gradients.items()}

        def step_fn(step):
            step.report("loss", step.sum(tf.reduce_sum(use(net(step.batch["x"])))))

        own = {"step_fn": step_fn} if used_in == "step_fn" else {"loss_fn": loss_fn, "gradient_fn": gradient_fn}
        own["predict_fn"] = lambda batch: users["predict_fn"](net(batch["x"]))
        return distloop.ModelSpec([net, owner] if is_held else net, keras.optimizers.SGD(0.1), **own)

    return make


def layer(layer):
    layer.build((None, 4))
    return layer, lambda x: layer(x, training=True)


def frozen(layer):
    layer.trainable = False
    return layer


def seed_generator():
    seed = keras.random.SeedGenerator(1)
    return seed, lambda x: x + keras.random.normal([4], seed=seed)


def module(use, **settings):
    module = tf.Module()
    module.outside = tf.Variable(1.0, name="outside", **settings)
    return module, lambda x: use(x, module.outside)


def after_a_count(x, count):
    with tf.control_dependencies([count.assign_add(1.0)]):
        return tf.identity(x)


def in_a_loop(x, count):
    def body(i):
        with tf.control_dependencies([count.assign_add(1.0)]):
            return [i + 1]

    with tf.control_dependencies(tf.while_loop(lambda i: i < 3, body, [0])):
        return tf.identity(x)


TRAINED = {
    "a layer": lambda: layer(keras.layers.Dense(4, name="head")),
    "a variable of a module": lambda: module(lambda x, v: x * v),
    "a variable in a tf.function": lambda: module(tf.function(lambda x, v: x * v)),
}
WRITTEN = {
    "a Dropout": lambda: layer(keras.layers.Dropout(0.5, name="head")),
    "a SeedGenerator": seed_generator,
    "statistics": lambda: layer(keras.layers.BatchNormalization(scale=False, center=False, name="head")),
    "a count": lambda: module(after_a_count, trainable=False),
    "a count in a loop": lambda: module(in_a_loop, trainable=False),
}
READ = {
    "a frozen layer": lambda: layer(frozen(keras.layers.Dense(4, name="teacher"))),
    "a variable that is not trained": lambda: module(lambda x, v: x * v, trainable=False),
}


def trace(make, strategy=None):
    """Traces a model's loss_fn, as a step on one replica does, and again, as for other data."""
    state = TrainState(make, strategy or tf.distribute.get_strategy())
    for _ in range(2):
        graph_function(lambda: state.spec.updates[0].loss_fn(ROWS, True)["loss"]).get_concrete_function()


@pytest.mark.parametrize("kind", TRAINED)
def test_a_trainable_variable_outside_is_refused_with_its_line(kind):
    place = "test_guards.py:"
    refused(lambda: trace(model_fn(TRAINED[kind])), LACKS, place, "neither trained nor saved", FIX, "trainable = False")


def test_a_variable_outside_is_found_among_some_that_are_only_half_made():
    half = [object.__new__(type(tf.Variable(0.0))), object.__new__(keras.Variable)]
    refused(lambda: trace(model_fn(TRAINED["a layer"])), LACKS, FIX)
    del half  # they live until here


@pytest.mark.parametrize("kind", WRITTEN)
def test_a_variable_outside_that_is_written_is_refused_with_its_line(kind):
    message = refused(lambda: trace(model_fn(WRITTEN[kind])), LACKS, "test_guards.py:", "no checkpoint", FIX)
    assert "writes" in message


@pytest.mark.parametrize("kind", READ)
def test_a_variable_outside_that_is_only_read_is_told_of_in_one_line(kind, capsys):
    trace(model_fn(READ[kind]))
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("distloop: ")]
    assert LACKS in line and ("teacher/kernel, teacher/bias" in line or "outside" in line) and FIX in line


@pytest.mark.parametrize("kind", [*TRAINED, *WRITTEN])
def test_what_the_model_holds_beside_the_network_is_not_outside(kind, capsys):
    trace(model_fn((TRAINED | WRITTEN)[kind], is_held=True))
    assert "lacks" not in capsys.readouterr().err


def test_a_lookup_table_is_no_variable(capsys):
    def table():
        values = tf.lookup.KeyValueTensorInitializer([0, 1], [1.0, 2.0])
        table = tf.lookup.StaticHashTable(values, 0.0)
        return table, lambda x: x * table.lookup(tf.constant(1))

    trace(model_fn(table))
    assert "lacks" not in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(("used_in", "replicas"), [("loss_fn", 2), ("gradient_fn", 1), ("step_fn", 2)])
def test_a_step_that_uses_a_layer_outside_is_refused_before_the_first_one(used_in, replicas):
    trainer = distloop.Trainer(model_fn(TRAINED["a layer"], used_in=used_in), on(replicas))
    refused(lambda: trainer.fit(ROWS, steps=1), LACKS, "head/kernel, head/bias", FIX)
    assert trainer.step == 0


@pytest.mark.slow
def test_a_prediction_by_a_layer_outside_is_refused():
    trainer = distloop.Trainer(model_fn(TRAINED["a layer"], used_in="predict_fn"), on(2))
    refused(lambda: trainer.predict(ROWS), LACKS, "head/kernel, head/bias", FIX)


@pytest.mark.wide
@pytest.mark.slow
def test_an_evaluation_by_a_layer_outside_is_refused_before_the_first_step():
    made = {}

    def make_outside():
        made["head"], use = TRAINED["a layer"]()
        return made["head"], use

    trainer = distloop.Trainer(model_fn(make_outside, used_in="none"), on(2))
    loss_fn = lambda batch, training: {"loss": tf.reduce_sum(made["head"](trainer.model(batch["x"])), -1)}  # noqa: E731
    evals = {"hard": distloop.Evaluation(ROWS, loss_fn=loss_fn)}
    refused(lambda: trainer.fit(ROWS, steps=1, evals=evals), "The evaluation 'hard' cannot run", LACKS, "head/kernel")
    assert trainer.step == 0

"""In what numbers: the dtype policy where models are made, weights in float32, results that nobody has to cast.

And the loss-scale optimizer alone, in loops that are written by hand; tests/test_laws.py is about steps of a Trainer.
"""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

import distloop
from distloop.distributed import strategies
from distloop.model import dtype_policy
from tests.problems import (
    Lazy,
    assert_close,
    assert_equal,
    classification,
    classifier,
    everything,
    local_values,
    mostly_wide,
    on,
    refused,
)

HALF = {"mixed_float16": tf.float16, "mixed_bfloat16": tf.bfloat16}
EACH_HALF = pytest.mark.parametrize("name", mostly_wide(HALF))

DATA = {
    "x": np.random.default_rng(0).normal(size=(24, 3)).astype(np.float32),
    "y": np.random.default_rng(1).normal(size=(24, 2)).astype(np.float32),
}


def make_trainer(name, model_class):
    """Makes a trainer, and lists the dtypes of what the model gave while training."""
    dtypes = []

    def model_fn():
        layers = [keras.Input((3,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(2)]
        model = model_class() if model_class else keras.Sequential(layers)

        def loss_fn(batch, training):
            output = model(batch["x"], training=training)
            dtypes.append(output.dtype)
            return {"loss": tf.reduce_mean(tf.square(output - tf.cast(batch["y"], output.dtype)), -1)}

        def predict_fn(batch):
            return model(batch["x"], training=False)

        optimizer = keras.optimizers.SGD(0.1, momentum=0.5)
        return distloop.ModelSpec(model, optimizer, loss_fn, predict_fn=predict_fn)

    return distloop.Trainer(model_fn, on(2, precision=name)), dtypes


@pytest.mark.parametrize("name", ["float32", *HALF])
def test_the_policy_is_put_back_afterwards_also_after_an_exception(name):
    before = keras.config.dtype_policy()
    with pytest.raises(KeyError), dtype_policy.policy(name):
        assert keras.config.dtype_policy().name == name
        layer = keras.layers.Dense(1)
        raise KeyError
    assert keras.config.dtype_policy() is before
    assert layer.dtype_policy.name == name


@pytest.mark.slow
@pytest.mark.parametrize("model_class", mostly_wide([None, Lazy]), ids=["built", "lazy"])
@EACH_HALF
def test_layers_compute_in_half_precision_and_weights_stay_float32(name, model_class):
    trainer, dtypes = make_trainer(name, model_class)
    data = distloop.make_dataset(DATA, 8)
    first = trainer.evaluate(data)["loss"]
    trainer.fit(data, steps=20)
    assert trainer.evaluate(data)["loss"] < 0.8 * first or model_class is Lazy  # which is linear
    outputs = trainer.predict(data)
    assert outputs.dtype == np.float32 and outputs.shape == (24, 2)
    assert set(dtypes) == {HALF[name]} and keras.config.dtype_policy().name == "float32"  # no policy is left behind
    assert {tf.as_dtype(v.dtype) for v in trainer.model.variables} == {tf.float32}
    (optimizer,) = trainer.state.plain_optimizers.values()
    slots = [v for v in optimizer.variables if v.path != optimizer.iterations.path]
    assert len(slots) > 1  # there is the learning rate, too
    assert {tf.as_dtype(v.dtype) for v in slots} == {tf.float32}


@pytest.mark.slow
@EACH_HALF
def test_values_that_half_precision_cannot_add_up_are_averaged_in_float32(name):
    def model_fn():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])

        def loss_fn(batch, training):
            output = model(batch["x"], training=training)[:, 0]  # half; 4096 of these numbers would add up to 256
            tenths = 0.0 * output + tf.cast(0.1, output.dtype)
            return {"loss": tenths, "ones": tf.ones_like(output), "halves": distloop.weighted(tenths, output + 0.5)}

        return distloop.ModelSpec(model, keras.optimizers.SGD(0.0), loss_fn)

    trainer = distloop.Trainer(model_fn, on(2, precision=name))
    rows = distloop.make_dataset({"x": np.zeros([4096, 3], np.float32)}, 4096)
    tenth = float(tf.cast(tf.cast(0.1, HALF[name]), tf.float32))
    for found in (trainer.evaluate(rows), trainer.fit(rows, steps=1)):
        assert (found["loss"], found["ones"], found["halves"]) == (tenth, 1.0, tenth)


# In a Trainer --------------------------------------------------------------------------------------------------------


def two_updates():
    a, b = tf.Variable(0.0, name="a"), tf.Variable(0.0, name="b")
    updates = [
        distloop.Update("first", lambda batch, training: {"loss": a * batch}, keras.optimizers.SGD(1.0), [a]),
        distloop.Update("second", lambda batch, training: {"loss": b * batch}, keras.optimizers.SGD(1.0), [b]),
    ]
    return distloop.ModelSpec([a, b], updates=updates)


@pytest.mark.parametrize(
    "name, given, scale",
    [
        ("mixed_float16", keras.optimizers.SGD, 2.0**4),
        ("mixed_float16", lambda: distloop.LossScaleOptimizer(keras.optimizers.Adam(), 64.0), 64.0),
        ("float32", lambda: distloop.LossScaleOptimizer(keras.optimizers.Adam(), 64.0), 64.0),
        pytest.param("float32", keras.optimizers.SGD, None, marks=pytest.mark.slow),
        pytest.param("mixed_bfloat16", keras.optimizers.SGD, None, marks=[pytest.mark.slow, pytest.mark.wide]),
    ],
)
def test_float16_puts_a_loss_scale_optimizer_around_the_users_own(name, given, scale):
    made = []
    model_fn = classifier(optimizer=lambda: made.append(given()) or made[0])
    trainer = distloop.Trainer(model_fn, on(2, precision=name))
    is_around = scale == 2.0**4
    assert (trainer.optimizer.inner_optimizer if is_around else trainer.optimizer) is made[0]
    assert isinstance(trainer.optimizer, distloop.LossScaleOptimizer) == (scale is not None)
    if scale is not None:
        assert float(trainer.state.loss_scale) == trainer.optimizer.loss_scale.numpy() == scale
    else:
        assert trainer.state.loss_scale is None
        assert "loss_scale" not in trainer.fit(distloop.make_dataset(classification(8), 8), steps=1)


@pytest.mark.slow
def test_the_loss_scale_and_skipped_steps_are_reported():
    rows = classification(16)
    rows["x"][8:] = np.nan
    trainer = distloop.Trainer(classifier(), on(2, precision="mixed_float16"))
    data = distloop.make_dataset(rows, 8)
    found = trainer.fit(data, steps=1)
    assert (found["loss_scale"], found["skipped_steps"]) == (2.0**4, 0.0)
    found = trainer.fit(data, steps=4)
    assert (found["loss_scale"], found["skipped_steps"]) == (2.0**2, 2.0)
    assert np.isfinite(found["loss"])


@pytest.mark.slow
def test_several_updates_have_optimizers_and_loss_scales_by_name():
    trainer = distloop.Trainer(two_updates, on(2, precision="mixed_float16"))
    assert list(trainer.optimizer) == list(trainer.state.loss_scale) == ["first", "second"]
    for name, optimizer in trainer.optimizer.items():
        assert isinstance(optimizer, distloop.LossScaleOptimizer)
        assert float(trainer.state.loss_scale[name]) == optimizer.loss_scale.numpy()
    assert all(isinstance(o, keras.optimizers.SGD) for o in distloop.Trainer(two_updates, on(2)).optimizer.values())
    found = trainer.fit(tf.data.Dataset.from_tensors(np.float32([1.0, np.inf])), steps=3)
    assert found["first/loss_scale"] == found["second/loss_scale"] == 2.0**4 / 2**3
    assert found["skipped_steps"] == 3.0 and "loss_scale" not in found


@pytest.mark.wide
@pytest.mark.slow
def test_trainers_of_different_precisions_keep_their_own_side_by_side():
    data = distloop.make_dataset(classification(40), 16)
    alone, together = (
        {name: distloop.Trainer(classifier(), on(1, precision=name)) for name in ("mixed_float16", "float32")}
        for _ in range(2)
    )
    for trainer in alone.values():
        trainer.fit(data, steps=4)
    for steps in (1, 4):
        for trainer in together.values():
            trainer.fit(data, steps=steps)
    for name, trainer in together.items():
        assert trainer.model.compute_dtype == name.removeprefix("mixed_")
        assert_equal(everything(trainer), everything(alone[name]))


@pytest.mark.wide
@pytest.mark.slow
def test_evaluating_and_predicting_do_not_touch_the_loss_scale():
    rows = classification(40)
    trainer = distloop.Trainer(classifier(batch_norm="local"), on(2, precision="mixed_float16"))
    trainer.fit(distloop.make_dataset(rows, 16), steps=3)
    before = everything(trainer)
    assert before["streak/@0"] == trainer.optimizer.growth_steps - 10 + 3
    rows["x"][5] = np.inf
    data = distloop.make_dataset(rows, 16)
    assert np.isnan(trainer.evaluate(data)["loss"])
    trainer.predict(data)
    assert_equal(everything(trainer), before)


# The loss-scale optimizer in a loop written by hand ------------------------------------------------------------------

REPLICAS = pytest.mark.parametrize("replicas", mostly_wide([2, 1]))

OPTIMIZERS = {
    "SGD": lambda: keras.optimizers.SGD(0.125),
    "momentum": lambda: keras.optimizers.SGD(0.125, momentum=0.5),
    "Adam": lambda: keras.optimizers.Adam(0.125),
}


def scaling(optimizer="SGD", **settings):
    """Makes a function that makes a loss-scale optimizer."""
    return lambda: distloop.LossScaleOptimizer(OPTIMIZERS[optimizer](), **settings)


class Loop:
    """Two variables and an optimizer in a strategy's scope, and a step whose gradients are given: `[replicas, 3]`."""

    def __init__(self, make_optimizer, replicas=1):
        self.strategy = strategies.make_strategy(on(replicas))
        with self.strategy.scope():
            self.variables = [keras.Variable([1.0, -2.0], name="a"), keras.Variable(0.5, name="b")]
            self.optimizer = make_optimizer()
            self.optimizer.build(self.variables)
        self.step = tf.function(self._step)

    def _step(self, gradients):
        def replica_step(gradients):
            mine = gradients[tf.distribute.get_replica_context().replica_id_in_sync_group]
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(self.variables[0] * mine[:2]) + self.variables[1] * mine[2]
                loss = self.optimizer.scale_loss(loss)
            self.optimizer.apply(tape.gradient(loss, self.variables), self.variables)

        self.strategy.run(replica_step, args=(tf.convert_to_tensor(gradients, tf.float32),))

    def weights(self):
        return np.append(*(v.numpy() for v in self.variables))

    def everything(self):
        """What each replica holds of weights, slots and `iterations`; not the loss scale."""
        inner = getattr(self.optimizer, "inner_optimizer", self.optimizer)
        return {
            f"{i}@{replica}": value
            for i, v in enumerate([*self.variables, *inner.variables])
            for replica, value in enumerate(local_values(self, v))
        }

    def scale(self, of="loss_scale"):
        """The loss scale, or the streak, which is the same on every replica."""
        values = [value.item() for value in local_values(self, getattr(self.optimizer, of))]
        assert len(values) == self.strategy.num_replicas_in_sync and len(set(values)) == 1, values
        return values[0]


def good(replicas=1):
    """Gradients that add up to the same for any number of replicas, without rounding."""
    rows = np.array([[1.0, -0.5, 0.25], [0.5, 2.0, -1.0], [-0.25, 0.75, 1.5], [3.0, 0.125, 0.5]], np.float32)
    return rows.reshape([replicas, -1, 3]).sum(1)


def bad(replicas=1, on_replica=0, value=np.nan, place=1):
    gradients = good(replicas)
    gradients[on_replica, place] = value
    return gradients


@pytest.mark.slow
@pytest.mark.parametrize(
    "optimizer, replicas",
    mostly_wide([("momentum", 2), ("Adam", 4), ("SGD", 1), ("Adam", 2)], ("momentum", 2), ("Adam", 4)),
)
def test_inf_on_any_replica_changes_no_bit_and_halves_every_scale(optimizer, replicas):
    loop = Loop(scaling(optimizer, initial_scale=2.0**15), replicas)
    loop.step(good(replicas))
    before = loop.everything()
    assert len(before) == replicas * {"SGD": 4, "momentum": 6, "Adam": 8}[optimizer]
    bad_steps = [bad(replicas, replicas - 1, value=1e36)]  # times 2^15 there is no such float32
    bad_steps += [bad(replicas, *of) for of in itertools.product(range(replicas), [np.inf, -np.inf, np.nan], [0, 2])]
    opposite = good(replicas)
    opposite[0, 0], opposite[-1, 0] = np.inf, -np.inf
    for count, gradients in enumerate([*bad_steps, opposite], 1):
        loop.step(gradients)
        assert_equal(loop.everything(), before)
        assert loop.scale() == max(2.0 ** (15 - count), 1.0)
    loop.step(good(replicas))
    assert loop.optimizer.iterations.numpy() == 2


@pytest.mark.slow
@REPLICAS
def test_steps_in_a_loop_within_one_function_skip_each_on_its_own(replicas):
    loop, expected = Loop(scaling("Adam"), replicas), Loop(scaling("Adam"), replicas)
    run = tf.function(lambda table: tf.while_loop(lambda i: i < 4, lambda i: (loop._step(table[i]), i + 1)[1:], [0]))
    run(tf.stack([good(replicas), bad(replicas, replicas - 1), good(replicas), bad(replicas)]))
    for _ in range(2):
        expected.step(good(replicas))
    assert_equal(loop.everything(), expected.everything())
    assert loop.scale() == 2.0**4 / 2**2


@pytest.mark.slow
def test_keras_own_loss_scale_optimizer_lets_another_overflow_into_weights():
    """Why there is one of ours: Keras asks the first replica alone, before it reduces. Where this fails, it may go."""
    loop = Loop(lambda: keras.mixed_precision.LossScaleOptimizer(keras.optimizers.SGD(0.125)), 2)
    loop.step(bad(2, on_replica=1, value=np.inf))
    assert any(np.isinf(value).any() for value in loop.everything().values())


@pytest.mark.slow
@pytest.mark.parametrize(
    "optimizer, replicas, scale",
    mostly_wide(
        [("SGD", 2, 1.0), ("SGD", 4, 2.0**24), ("momentum", 2, 2.0**15), ("Adam", 1, 2.0**24), ("Adam", 4, 2.0**15)],
        ("SGD", 4, 2.0**24),
        ("Adam", 4, 2.0**15),
    ),
)
def test_a_finite_step_is_that_of_the_plain_optimizer_on_the_sum(optimizer, replicas, scale):
    loop = Loop(scaling(optimizer, initial_scale=scale), replicas)
    plain, variables = OPTIMIZERS[optimizer](), [keras.Variable([1.0, -2.0]), keras.Variable(0.5)]
    plain.build(variables)
    for factor in (1.0, -2.0, 0.5):
        loop.step(factor * good(replicas))
        total = factor * good(1)[0]
        plain.apply([total[:2], total[2]], variables)
    found, expected = ({i: v.numpy() for i, v in enumerate(of)} for of in (loop.variables, variables))
    assert_close(found, expected)
    if optimizer == "SGD":
        assert_equal(found, expected)


@pytest.mark.slow
@REPLICAS
@pytest.mark.parametrize(
    ("settings", "steps", "expected"),
    [
        # It doubles after enough good steps, and an overflow starts the count again.
        ({"growth_steps": 3}, "+++++++", [(8, 1), (8, 2), (16, 0), (16, 1), (16, 2), (32, 0), (32, 1)]),
        ({"growth_steps": 3}, "++-+++", [(8, 1), (8, 2), (4, 0), (4, 1), (4, 2), (8, 0)]),
        # It stays between the largest and the smallest, where overflows in a row are counted below 0.
        ({"growth_steps": 1, "max_scale": 24.0}, "+++", [(16, 0), (24, 0), (24, 0)]),
        ({"min_scale": 3.0}, "-----+-", [(4, 0), (3, 0), (3, -1), (3, -2), (3, -3), (3, 1), (3, -1)]),
    ],
)
def test_the_scale_and_the_count_of_good_steps(settings, steps, expected, replicas):
    loop, found = Loop(scaling(initial_scale=8.0, **settings), replicas), []
    for step in steps:
        loop.step({"+": good, "-": bad}[step](replicas))
        found.append((loop.scale(), loop.scale("streak")))
    assert found == expected


def test_the_scale_doubles_every_10_good_steps_until_an_overflow():
    loop = Loop(scaling(initial_scale=8.0, growth_steps=15))
    scales = []
    for gradients in [*[good()] * 21, bad(), *[good()] * 27]:
        loop.step(gradients)
        scales.append(loop.scale())
    assert scales == [8.0] * 9 + [16.0] * 10 + [32.0] * 2 + [16.0] * 15 + [32.0] * 10 + [64.0] * 3


@pytest.mark.slow
def test_a_model_with_large_first_gradients_trains_from_the_first_step():
    def model_fn():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])

        def loss_fn(batch, training):
            return {"loss": 256.0 * tf.reduce_mean(model(batch["x"], training=training), -1)}  # 2^15 would overflow

        return distloop.ModelSpec(model, keras.optimizers.SGD(1e-6), loss_fn)

    trainer = distloop.Trainer(model_fn, on(1, precision="mixed_float16"))
    assert trainer.fit(distloop.make_dataset(DATA, 1), steps=10)["skipped_steps"] == 0.0


@pytest.mark.slow
@REPLICAS
def test_a_scale_that_is_not_dynamic_never_changes_and_still_skips(replicas):
    loop = Loop(scaling(initial_scale=64.0, dynamic=False, growth_steps=1), replicas)
    loop.step(good(replicas))
    before = loop.everything()
    for gradients in [bad(replicas, replicas - 1)] * 3 + [good(replicas)] * 3:
        loop.step(gradients)
        assert loop.scale() == 64.0
        if np.isnan(gradients).any():
            assert_equal(loop.everything(), before)
    assert loop.optimizer.iterations.numpy() == 4


@pytest.mark.slow
@pytest.mark.parametrize("scale", [1.0, 2.0**15])
@REPLICAS
def test_gradients_too_small_for_float16_arrive_with_the_scale(replicas, scale):
    strategy = strategies.make_strategy(on(replicas))
    with strategy.scope():
        weight = keras.Variable(0.0)
        optimizer = distloop.LossScaleOptimizer(keras.optimizers.SGD(1.0), scale)
        optimizer.build([weight])

    def replica_step():
        with tf.GradientTape() as tape:
            output = tf.cast(weight.value, tf.float16)
            loss = optimizer.scale_loss(tf.cast(output, tf.float32) * 2.0**-30)  # float16 ends at 2^-24
        optimizer.apply(tape.gradient(loss, [weight]), [weight])

    tf.function(lambda: strategy.run(replica_step))()
    assert weight.numpy() == (0.0 if scale == 1.0 else -replicas * 2.0**-30)


def test_a_loss_is_scaled_in_float32():
    optimizer = scaling(initial_scale=2.0**15)()
    loss = optimizer.scale_loss(tf.constant([4.0], tf.float16))
    assert loss.dtype == tf.float32 and loss.numpy() == [2.0**17]


def test_its_variables_and_learning_rate_are_those_of_the_inner_optimizer():
    loop = Loop(scaling("Adam"))
    optimizer, inner = loop.optimizer, loop.optimizer.inner_optimizer
    found, expected = optimizer.variables, (optimizer.loss_scale, optimizer.streak, *inner.variables)
    assert len(found) == 8 and all(a is b for a, b in zip(found, expected, strict=True))
    for gradients in (good, bad, good):
        loop.step(gradients())
    assert optimizer.iterations is inner.iterations and optimizer.iterations.numpy() == 2
    assert float(optimizer.learning_rate) == 0.125
    optimizer.learning_rate = 0.0
    assert float(inner.learning_rate) == 0.0
    before = loop.weights()
    loop.step(good())
    np.testing.assert_array_equal(loop.weights(), before)


@REPLICAS
def test_a_schedule_of_the_inner_optimizer_does_not_see_skipped_steps(replicas):
    rate = keras.optimizers.schedules.PiecewiseConstantDecay([0], [1.0, 0.25])  # 1 in the first applied step
    loop = Loop(lambda: distloop.LossScaleOptimizer(keras.optimizers.SGD(rate)), replicas)
    for gradients in (bad, good, bad):
        loop.step(gradients(replicas))
    np.testing.assert_array_equal(loop.weights(), [1.0, -2.0, 0.5] - good(1)[0])
    assert float(loop.optimizer.learning_rate) == 0.25


@pytest.mark.slow
@REPLICAS
@pytest.mark.parametrize("norm", [0.5, 100.0])
def test_the_inner_optimizer_clips_the_summed_and_unscaled_gradient(norm, replicas):
    loop = Loop(lambda: distloop.LossScaleOptimizer(keras.optimizers.SGD(1.0, global_clipnorm=norm)), replicas)
    loop.step(good(replicas))
    total = good(1)[0]
    expected = [1.0, -2.0, 0.5] - total * min(1.0, norm / np.linalg.norm(total))
    np.testing.assert_allclose(loop.weights(), expected, rtol=1e-6)


@pytest.mark.slow
@REPLICAS
def test_variables_without_a_gradient_are_left_out(replicas):
    loop = Loop(scaling("momentum"), replicas)
    loop.step(good(replicas))
    before = loop.everything()
    other = loop.variables[0].numpy()

    def replica_step():
        gradient = loop.optimizer.loss_scale * tf.ones([2])
        loop.optimizer.apply([gradient, None], loop.variables)

    tf.function(lambda: loop.strategy.run(replica_step))()
    after = loop.everything()
    slots = [f"{i}@{replica}" for i in (1, 5) for replica in range(replicas)]  # of the variable without a gradient
    assert all(before[path].tobytes() == after[path].tobytes() for path in slots)
    assert not np.array_equal(loop.variables[0].numpy(), other)
    assert loop.optimizer.iterations.numpy() == 2


def test_an_optimizer_that_is_not_built_and_no_gradient_at_all_are_refused():
    optimizer, weight = scaling()(), keras.Variable(1.0)
    assert not optimizer.built
    what_to_do = "call optimizer.build(model.trainable_variables) in the strategy's scope"
    apply = lambda gradient: optimizer.apply([gradient], [weight])  # noqa: E731
    refused(lambda: apply(tf.constant(1.0)), "This LossScaleOptimizer is not built", what_to_do)
    optimizer.build([weight])
    assert optimizer.built
    what_to_do = "compute the loss from the model's variables in the tape"
    refused(lambda: apply(None), "apply was given no gradient", what_to_do)


@pytest.mark.parametrize(
    "numbers",
    [
        {"initial_scale": 0.5},
        {"initial_scale": 2.0**25},
        {"initial_scale": -1.0, "dynamic": False},
        {"initial_scale": float("nan")},
        {"initial_scale": float("inf"), "max_scale": float("inf")},
        {"min_scale": 0.0},
        {"min_scale": 8.0, "max_scale": 4.0, "initial_scale": 8.0},
        {"growth_steps": 0},
    ],
    ids=str,
)
def test_numbers_that_contradict_each_other_are_refused(numbers):
    for name, value in numbers.items():
        if name != "dynamic":
            refused(scaling(**numbers), "LossScaleOptimizer was given", f"{name}={value}", "it needs 0 < min_scale")


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()), id="Keras"),
        pytest.param(lambda: scaling()(), id="its own"),
        pytest.param(lambda: "adam", id="a name"),
        pytest.param(lambda: keras.optimizers.Adam, id="a class"),
        pytest.param(lambda: None, id="nothing"),
    ],
)
def test_what_is_no_plain_optimizer_is_refused(make):
    parts = ["LossScaleOptimizer was given", "it takes a Keras optimizer without a loss scale"]
    refused(lambda: distloop.LossScaleOptimizer(make()), *parts)


@pytest.mark.wide
@pytest.mark.slow
def test_the_example_of_its_docstring_runs():
    strategy = strategies.make_strategy(on(2))
    BATCH_SIZE = 16
    inputs = np.random.default_rng(0).normal(size=(64, 3)).astype(np.float32)
    targets = inputs.sum(1, keepdims=True)
    rows = tf.data.Dataset.from_tensor_slices((inputs, targets)).batch(BATCH_SIZE)
    loss_fn = keras.losses.MeanSquaredError(reduction="none")

    with strategy.scope(), dtype_policy.policy("mixed_float16"):
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(1)])
        optimizer = distloop.LossScaleOptimizer(keras.optimizers.Adam(0.05))
        optimizer.build(model.trainable_variables)

    def replica_step(x, y):  # this replica's rows
        with tf.GradientTape() as tape:
            losses = loss_fn(y, model(x, training=True))  # [b], one for each row
            loss = optimizer.scale_loss(tf.reduce_sum(losses) / BATCH_SIZE)  # of the global batch
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)  # sums over the replicas

    step = tf.function(lambda x, y: strategy.run(replica_step, args=(x, y)))
    first = np.mean(loss_fn(targets, model(inputs)))
    for x, y in strategy.experimental_distribute_dataset(rows.repeat(10)):
        step(x, y)
    assert model.compute_dtype == "float16"
    assert np.mean(loss_fn(targets, model(inputs))) < 0.1 * first
    assert optimizer.iterations.numpy() == 40
    for variable in model.trainable_variables:
        np.testing.assert_array_equal(*strategy.experimental_local_results(variable.value))

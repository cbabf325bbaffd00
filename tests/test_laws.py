"""The laws: what must hold on any number of replicas, however a run is cut."""

import contextlib
import functools
import itertools
import json
import shutil

import keras
import numpy as np
import pytest
import tensorflow as tf

import distloop
from distloop.optimizers import slot_store
from distloop.settings.precision import PRECISIONS
from distloop.training import loop
from distloop.training.compiled_loop import CompiledLoop
from distloop.training.loop import Diverged
from distloop.workdir.records import OF_THE_MACHINE
from distloop.workers.preemption import StopRequests
from tests import many_rows, problems
from tests.problems import (
    assert_close,
    assert_equal,
    batches,
    classification,
    classifier,
    cross_entropy,
    every,
    everything,
    loss_fn_of,
    mostly_wide,
    on,
    refused,
    train,
    weights,
)

# replicas ---------------------------------------------------------------------------------------------------------


def adam():
    return keras.optimizers.Adam(0.01)


REPLICA_CASES = {
    # 67 rows: the last batch has 3.
    "all together": dict(is_weighted=True, l2=0.1, clip_norm=0.1, average_decay=0.9, microbatches=2),
    "smaller than the replicas": dict(size=2, rows=5),  # two rows, and one
    # One operation after another, as on one replica, TensorFlow fuses them otherwise; this model makes 1.5e-6 of that.
    "synchronized BatchNorm": dict(batch_norm="synchronized", executor="parallel", optimizer=adam),
    "an odd last batch": {},
    "weights": dict(is_weighted=True),
    "L2 terms": dict(l2=0.1),
    "clipping": dict(clip_norm=0.1),
    "Adam": dict(optimizer=adam),
    "averages": dict(average_decay=0.9),
}


@pytest.mark.slow
@pytest.mark.parametrize("replicas", mostly_wide([2, 3, 4], 3))
@pytest.mark.parametrize("case", mostly_wide(REPLICA_CASES, "all together", "smaller than the replicas"))
def test_any_number_of_replicas_trains_to_the_same_weights(case, replicas):
    found, expected = (weights_and_averages(case, count) for count in (replicas, 1))
    assert_close(found, expected)


def weights_and_averages(case, replicas):
    settings = dict(REPLICA_CASES[case])
    data = batches(settings.pop("size", 16), settings.pop("rows", 67))
    of_model = {k: settings.pop(k) for k in ("is_weighted", "l2", "batch_norm", "optimizer") if k in settings}
    trainer = train(classifier(**of_model), on(replicas, **settings), data)
    average = trainer.state.average.variables if trainer.state.average is not None else []
    return weights(trainer) | {f"average {i}": v.numpy() for i, v in enumerate(average)}


@pytest.mark.wide
def test_any_number_of_replicas_trains_large_weights_to_the_same():
    """Adam changes these in one operation."""

    def model_fn():
        hidden = [keras.layers.Dense(256, activation="tanh", use_bias=False, name=f"hidden{i}") for i in range(2)]
        assert 4 * 256 * 256 >= slot_store.MIN_FUSED_BYTES
        model = keras.Sequential([keras.Input((8,)), *hidden, keras.layers.Dense(4, name="logits")], name="net")
        return distloop.ModelSpec(model, keras.optimizers.AdamW(0.003), loss_fn_of(model))

    settings = dict(on_nonfinite="skip", average_decay=0.9, microbatches=2)
    one, two = (train(model_fn, on(replicas, **settings), batches()) for replicas in (1, 2))
    assert all("ResourceApplyAdam" in operation_types(trainer) for trainer in (one, two))
    assert_close(weights(two), weights(one))


def test_one_replica_trains_as_a_loop_written_by_hand():
    data = classification(67)
    trainer = train(classifier(is_weighted=True, l2=0.1), on(1, clip_norm=0.5), batches(), steps=10)

    keras.utils.set_random_seed(0)
    spec = classifier(is_weighted=True, l2=0.1)()
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    for step in range(10):
        start = step % 5 * 16
        rows = {key: value[start : start + 16] for key, value in data.items()}
        with tf.GradientTape() as tape:
            values = cross_entropy(rows["label"], spec.model(rows["x"], training=True))
            loss = tf.reduce_sum(values * rows["weight"]) / rows["weight"].sum() + tf.add_n(spec.model.losses)
        gradients = tape.gradient(loss, spec.model.trainable_variables)
        gradients, _ = tf.clip_by_global_norm(gradients, 0.5)
        optimizer.apply(gradients, spec.model.trainable_variables)
    assert_alike(trainer.model, spec.model)


def assert_alike(model, expected):
    for a, b in zip(model.variables, expected.variables, strict=True):
        np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=1e-5, atol=1e-6)


def test_two_updates_train_the_same_on_any_number_of_replicas():
    data = batches(10, 23)
    expected = weights(train(two_updates, on(1), data))
    assert_close(weights(train(two_updates, on(3), data)), expected)


@pytest.mark.wide
def test_the_second_update_sees_what_the_first_one_changed():
    trainer = train(two_updates, on(2), batches(10, 20), steps=1)
    a, b = (float(v.numpy()) for v in trainer.model)
    assert a == pytest.approx(-1.0)  # d(a)/da = 1, learning rate 1
    assert b == pytest.approx(1.0)  # d(b * a)/db = a, which is -1 by then


def two_updates():
    a, b = tf.Variable(0.0, name="a"), tf.Variable(0.0, name="b")

    def first(batch, training):
        return {"loss": a + 0.0 * batch["x"][:, 0]}

    def second(batch, training):
        return {"loss": b * tf.stop_gradient(a) + 0.0 * batch["x"][:, 0]}

    updates = [distloop.Update("first", first, keras.optimizers.SGD(1.0), [a])]
    updates += [distloop.Update("second", second, keras.optimizers.SGD(1.0), [b])]
    return distloop.ModelSpec([a, b], updates=updates)


def critic_and_generator():
    """Three critic steps with one Adam, each on fresh rows, and one step of the generator."""
    critic = keras.Sequential([keras.Input((8,)), keras.layers.Dense(3)], name="critic")
    generator = keras.Sequential([keras.Input((8,)), keras.layers.Dense(8, "tanh")], name="generator")

    def critic_loss(i):
        def loss_fn(batch, training):
            x = batch["x"][:, i]  # [B, 8]
            loss = tf.cast(tf.reduce_sum(critic(x) ** 2 - critic(generator(x)), 1), tf.float32)
            return {"loss": tf.where(batch["bad"] == i, np.float32(np.nan), loss)}

        return loss_fn

    def generator_loss(batch, training):
        return {"loss": tf.reduce_sum(critic(generator(batch["x"][:, 3])), 1)}

    shared = keras.optimizers.Adam(0.1)
    updates = [distloop.Update(f"critic_{i}", critic_loss(i), shared, "^critic/") for i in range(3)]
    updates.append(distloop.Update("generator", generator_loss, keras.optimizers.SGD(0.1), "^generator/"))
    return distloop.ModelSpec({"critic": critic, "generator": generator}, updates=updates)


def rows_of_four(bad=()):
    """Returns batches of 6 rows; `bad` lists (step, i): that update's loss is NaN in one row."""
    rows = {"x": np.random.default_rng(0).normal(size=(24, 4, 8)).astype(np.float32), "bad": np.full(24, -1)}
    for step, i in bad:
        rows["bad"][6 * step + 4] = i
    return distloop.make_dataset(rows, 6)


@pytest.mark.wide
def test_updates_that_share_an_optimizer_train_as_successive_steps_of_it():
    data = rows_of_four()
    trainer = train(critic_and_generator, on(2), data, steps=3)
    keras.utils.set_random_seed(0)
    spec = critic_and_generator()
    for rows in data.take(3):
        for update in spec.updates:
            variables = spec.model[update.name.partition("_")[0]].trainable_variables
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(update.loss_fn(rows, True)["loss"])
            update.optimizer.apply(tape.gradient(loss, variables), variables)
    for name, model in spec.model.items():
        assert_alike(trainer.model[name], model)
    assert trainer.optimizer["critic_0"] is trainer.optimizer["critic_2"]
    assert trainer.optimizer["critic_0"].iterations.numpy() == 9
    slots = [name for name in trainer.state.all_variables() if name.startswith("optimizer/critic")]
    assert slots and all(name.startswith("optimizer/critic_0/") for name in slots)


@pytest.mark.wide
def test_a_step_is_undone_completely_if_the_third_update_is_not_finite():
    config = on(2, on_nonfinite="skip", average_decay=0.9, precision="mixed_float16")
    trainer = distloop.Trainer(critic_and_generator, config)
    seen = after_each_step(trainer, rows_of_four(bad=[(1, 2), (2, 1)]), 4)
    for before, after in itertools.pairwise(seen[:3]):
        assert_skipped(before, after, [f"critic_{i}" for i in range(3)])
    assert int(trainer.state.skipped_steps) == 2
    assert trainer.optimizer["critic_1"].iterations.numpy() == 6
    assert not any(np.array_equal(seen[2][path], seen[3][path]) for path in seen[3] if "kernel" in path)


@pytest.mark.wide
def test_rows_of_nested_ragged_data_train_the_same():
    rows = [[1], [2, 3], [], [4, 1, 1], [2], [3, 3, 3, 3], [1, 2]]
    data = tf.data.Dataset.from_tensor_slices(
        {"text": {"tokens": tf.ragged.constant(rows)}, "y": np.arange(7, dtype=np.float32)}
    ).batch(3)

    def model_fn():
        table = keras.layers.Embedding(5, 3, name="table")
        head = keras.layers.Dense(1, name="head")
        table.build()
        head.build((None, 3))

        def loss_fn(batch, training):
            tokens = batch["text"]["tokens"]  # [B, (T)]
            features = tf.reduce_sum(tf.ragged.map_flat_values(table, tokens), axis=1)  # [B, 3]
            error = head(features)[:, 0] - batch["y"]
            per_token = tf.cast(tokens, tf.float32)
            return {"loss": tf.square(error), "token": per_token, "half": distloop.weighted(per_token, batch["y"])}

        return distloop.ModelSpec([table, head], keras.optimizers.Adam(0.05), loss_fn)

    trainer = distloop.Trainer(model_fn, on(2))
    metrics = trainer.evaluate(data)
    flat = [token for row in rows for token in row]
    assert metrics["token"] == pytest.approx(np.mean(flat), rel=1e-6)
    y = [float(i) for i, row in enumerate(rows) for _ in row]
    assert metrics["half"] == pytest.approx(np.average(flat, weights=y), rel=1e-6)
    trainer.fit(data, steps=9)
    assert_close(weights(trainer), weights(train(model_fn, on(1), data, steps=9)))


# Each pair of a precision, numbers of replicas and microbatches, and a model occurs.
HALF_PRECISION = [
    ("mixed_float16", (4, 1), "plain"),
    ("mixed_float16", (1, 3), "all together"),
    ("mixed_bfloat16", (4, 1), "all together"),
    ("mixed_bfloat16", (1, 3), "plain"),
    ("mixed_float16", (2, 3), "plain"),
    ("mixed_bfloat16", (2, 3), "all together"),
]


@pytest.mark.slow
@pytest.mark.parametrize("precision, cut, case", mostly_wide(HALF_PRECISION))
def test_half_precision_trains_to_the_same_weights_within_its_rounding(precision, cut, case):
    replicas, microbatches = cut
    # Rows are computed alike wherever they lie; what differs is into how many parts a sum over rows is cut. Each part
    # of a weight's gradient is rounded once to half precision, by 1 unit roundoff at most on either side of the
    # comparison, and the parts are added in float32. Seen, in roundoffs: 0.3 to 0.8 for kernels, 0.1 to 1.0 for biases
    # in float16, up to 1.9 in bfloat16, whose bias gradients TensorFlow's CPU kernel (BiasAddGrad) adds up in bfloat16:
    # with 64 rows instead of 16 they come to 4, with 4096 to 140.
    expected = change_in_half_precision(precision, 1, 1, case)
    found = change_in_half_precision(precision, replicas, microbatches, case)
    assert_close(found, expected, 4 * PRECISIONS[precision].roundoff)
    assert any(not np.array_equal(found[path], expected[path]) for path in expected)  # else it was no half precision


@functools.cache
def change_in_half_precision(precision, replicas, microbatches, case):
    """Returns by how much each weight changes in five steps, an odd last batch among them."""
    settings = {} if case == "plain" else dict(is_weighted=True, l2=0.1)
    model_fn = classifier(optimizer=lambda: keras.optimizers.SGD(0.1), **settings)
    trainer = distloop.Trainer(model_fn, on(replicas, precision=precision, microbatches=microbatches))
    first = weights(trainer)
    assert trainer.fit(batches(), steps=5)["skipped_steps"] == 0
    return {path: value - first[path] for path, value in weights(trainer).items()}


@pytest.mark.wide
def test_a_loss_scale_changes_nothing_that_float32_can_hold():
    def run(scale):
        def scaled():
            return distloop.LossScaleOptimizer(keras.optimizers.SGD(0.1, momentum=0.9), scale, dynamic=False)

        model_fn = classifier(optimizer=scaled if scale else None, is_weighted=True, l2=0.1)
        trainer = distloop.Trainer(model_fn, on(1, clip_norm=0.5, average_decay=0.9))
        return trainer.fit(batches(), steps=12), weights(trainer)

    plain_numbers, expected = run(None)
    numbers, found = run(2.0**24)
    assert_close(found, expected)
    assert numbers["loss_scale"] == 2.0**24 and "loss_scale" not in plain_numbers
    for name in ("loss", "accuracy", "regularization", "gradient_norm", "clipped_share"):
        assert numbers[name] == pytest.approx(plain_numbers[name], rel=1e-6)


# microbatches -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("replicas, microbatches", mostly_wide([(2, 3), (1, 2), (1, 5), (1, 16), (3, 4)], (2, 3)))
def test_any_number_of_microbatches_trains_to_the_same_weights(replicas, microbatches):
    model_fn = classifier(is_weighted=True, l2=0.1)
    data = batches()
    expected = weights(train(model_fn, on(1), data))
    assert_close(weights(train(model_fn, on(replicas, microbatches=microbatches), data)), expected)


@pytest.mark.slow
@pytest.mark.parametrize("microbatches", [4, pytest.param(1, marks=pytest.mark.wide)])
def test_a_step_has_one_reduction(microbatches):
    trainer = train(classifier(metrics=True), on(2, microbatches=microbatches, clip_norm=1.0), batches(), steps=1)
    bodies = {f.name: f for f in functions(train_graph(trainer)) if "body" in f.name}.values()
    operations = [op for f in bodies for op in f.get_operations()]
    sums = [op for op in operations if op.type == "AddN" and crosses_devices(op)]
    assert [len(sums), sum(op.type == "CollectiveReduceV2" for op in operations)] in ([1, 0], [0, 2])  # of each replica


def run_arguments(trainer):
    source = trainer._train_source
    limits = tf.constant(1, tf.int64), tf.constant(100, tf.int64), tf.constant(np.inf, tf.float64)
    return source.iterator(), source.layout, *limits


def train_graph(trainer):
    return trainer._train_loop._compiled._run.get_concrete_function(*run_arguments(trainer)).graph


def operation_types(trainer):
    """The types of operations in a trainer's loop."""
    return {op.type for function in functions(train_graph(trainer)) for op in function.get_operations()}


def functions(graph):
    return [graph._get_function(name).graph for name in graph._functions if hasattr(graph._get_function(name), "graph")]


def crosses_devices(op):
    return len({tensor.op.device for tensor in op.inputs}) > 1


# order ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "replicas, setting", [(1, "clip_norm"), (2, "clip_norm"), (2, "clip_variable_norm"), (2, "clip_value")]
)
def test_gradients_are_reduced_before_they_are_clipped(replicas, setting):
    def model_fn():
        weight = tf.Variable(0.0)
        loss_fn = lambda batch, training: {"loss": weight * batch}  # noqa: E731
        return distloop.ModelSpec({"weight": weight}, keras.optimizers.SGD(1.0), loss_fn)

    data = tf.data.Dataset.from_tensors([20.0, -16.0])  # +10 and -8 after the division by 2: together +2
    trainer = distloop.Trainer(model_fn, on(replicas, **{setting: 1.0}))
    metrics = trainer.fit(data, steps=1)
    assert metrics["clipped_share"] == 1.0
    assert float(trainer.model["weight"].numpy()) == pytest.approx(-1.0)
    assert metrics["gradient_norm"] == pytest.approx(2.0)


@pytest.mark.slow
@pytest.mark.parametrize("replicas", mostly_wide([1, 2], 2))
@pytest.mark.parametrize("precision", mostly_wide(["mixed_float16", "mixed_bfloat16"], "mixed_float16"))
def test_half_precision_gradients_are_unscaled_and_reduced_before_clipping(precision, replicas):
    dtypes = []

    def model_fn():
        layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
        layer.build((None, 1))

        def loss_fn(batch, training):
            output = layer(batch[:, tf.newaxis])[:, 0]
            dtypes.append(output.dtype)
            return {"loss": output}

        optimizer = keras.optimizers.SGD(1.0)
        if precision == "mixed_float16":  # 20 * 2^15 / 2 is more than float16 holds
            optimizer = distloop.LossScaleOptimizer(optimizer, 1024.0)
        return distloop.ModelSpec(layer, optimizer, loss_fn)

    data = tf.data.Dataset.from_tensors([20.0, -16.0])  # as above; every number on the way is exact in both
    trainer = distloop.Trainer(model_fn, on(replicas, clip_norm=1.0, precision=precision))
    metrics = trainer.fit(data, steps=1)
    assert set(dtypes) == {tf.as_dtype(precision.removeprefix("mixed_"))}
    assert trainer.model.kernel.numpy().item() == -1.0
    assert metrics["gradient_norm"] == 2.0
    assert metrics["skipped_steps"] == 0


# overflow ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value, row, cut", mostly_wide([(np.inf, 0, (1, 1)), (np.nan, 7, (2, 2))]))
def test_a_step_that_is_not_finite_anywhere_changes_nothing_anywhere(value, row, cut):
    replicas, microbatches = cut
    rows = classification(16)
    rows["x"][8 + row, 0] = value  # in the second batch
    rows["label"][8::2] = 0  # of which some would count for the AUC
    data = distloop.make_dataset(rows, 8)
    config = on(replicas, microbatches=microbatches, on_nonfinite="skip", average_decay=0.9)
    trainer = distloop.Trainer(classifier(batch_norm="local", dropout=0.5, l2=0.1, metrics=True), config)
    trainer.fit(data, steps=1)
    before = everything(trainer)
    assert trainer.fit(data, steps=2)["auc"] == 0  # that of no example
    assert trainer.step == 2 and int(trainer.state.skipped_steps) == 1
    assert_skipped(before, everything(trainer))
    trainer.fit(data, steps=3)
    assert int(trainer.state.skipped_steps) == 1
    assert all(np.isfinite(value).all() for value in everything(trainer).values())


@pytest.mark.wide
@pytest.mark.parametrize("culprit, replicas", mostly_wide([("second", 2), ("first", 1)], ("second", 2)))
def test_one_update_that_is_not_finite_takes_the_other_with_it(culprit, replicas):
    rows = classification(16)
    rows["label"][13] = -1
    data = distloop.make_dataset(rows, 8)
    trainer = distloop.Trainer(two_models(culprit), on(replicas, on_nonfinite="skip", average_decay=0.9))
    trainer.fit(data, steps=1)
    before = everything(trainer)
    metrics = trainer.fit(data, steps=2)
    assert int(trainer.state.skipped_steps) == 1
    assert_skipped(before, everything(trainer))
    assert np.isnan(metrics["first/loss"]) and np.isnan(metrics["second/loss"])  # nothing was measured in this window


def two_models(culprits, *, optimizers=lambda: (keras.optimizers.Adam(0.1), keras.optimizers.Adam(0.1))):
    """A `model_fn` with updates "first" and "second"; the culprits' losses are infinite where a label is -1."""

    def model_fn():
        models, updates = {}, []
        for key, name, optimizer in zip("ab", ("first", "second"), optimizers(), strict=True):
            layers = [keras.Input((8,)), keras.layers.BatchNormalization(), keras.layers.Dense(1)]
            models[key] = keras.Sequential(layers, name=key)

            def loss_fn(batch, training, model=models[key], is_culprit=name in culprits):
                bad = tf.where(batch["label"] == (-1 if is_culprit else -2), np.float32(np.inf), 1.0)
                return {"loss": tf.cast(model(batch["x"], training=training)[:, 0], tf.float32) * bad}

            updates.append(distloop.Update(name, loss_fn, optimizer, f"^{key}/"))
        return distloop.ModelSpec(models, updates=updates)

    return model_fn


# overflow under mixed_float16 -------------------------------------------------------------------------------------


def float16(replicas, **settings):
    return on(replicas, precision="mixed_float16", **settings)


def scaled(*scale, **settings):
    return distloop.LossScaleOptimizer(adam(), *scale, **settings)


def after_each_step(trainer, data, steps):
    """Trains in one `fit`, and gives copies after each step of all that may change: Keras metrics and the rate too."""

    def look(report):
        found = everything(trainer)
        for name, metric in trainer.state.keras_metrics.items():
            for i, variable in enumerate(metric.variables):
                values = problems.local_values(trainer, variable)
                found |= {f"metric/{name}/{i}@{replica}": value for replica, value in enumerate(values)}
        return found | {name: np.float64(v) for name, v in report.metrics.items() if "learning_rate" in name}

    return problems.looks(trainer, data, steps, 1, look)


def assert_skipped(before, after, culprits=("",)):
    """Checks that a step changed not one bit but the counts, and the loss scales of the updates that overflowed."""
    expected = dict(before)
    for path, value in before.items():
        kind, _, of = path.rpartition("@")[0].partition("/")
        if kind in ("step", "skipped_steps"):
            expected[path] = value + 1
        elif kind == "loss_scale" and of in culprits:
            expected[path] = value / 2
        elif kind == "streak" and of in culprits:
            expected[path] = np.zeros_like(value)
    assert_equal(after, expected)


def without_counts(found):
    """Leaves out counts of steps, and what follows from them."""
    counts = ("step@", "skipped_steps@", "loss_scale/", "streak/")
    return {path: value for path, value in found.items() if not path.startswith(counts)}


@pytest.mark.slow
@pytest.mark.parametrize("replicas,microbatches", mostly_wide([(2, 1), (1, 4)], (2, 1)))
def test_float16_an_overflow_in_any_row_changes_nothing_but_the_scale(replicas, microbatches):
    size = max(8, 2 * replicas * microbatches)
    kinds = [(value, row) for value in (np.nan, np.inf, 1e5) for row in range(size)]  # 1e5 is infinite in float16 alone
    rows = classification(size * (2 * len(kinds) + 1))  # good and bad batches by turns
    for i, (value, row) in enumerate(kinds):
        rows["x"][size * (2 * i + 1) + row, 0] = value

    def optimizer():  # every good step doubles the scale again, so that it never comes to the smallest
        rate = keras.optimizers.schedules.ExponentialDecay(0.01, 1, 0.9)
        return distloop.LossScaleOptimizer(keras.optimizers.Adam(rate), 2.0**12, growth_steps=1, max_scale=2.0**12)

    config = float16(replicas, microbatches=microbatches, average_decay=0.9, clip_norm=0.1)
    model_fn = classifier(optimizer=optimizer, batch_norm="local", dropout=0.5, l2=0.1, metrics=True)
    trainer = distloop.Trainer(model_fn, config)
    seen = after_each_step(trainer, distloop.make_dataset(rows, size), 2 * len(kinds) + 1)
    for before, after in zip(seen[0:-1:2], seen[1::2], strict=True):
        assert_skipped(before, after)
    for before, after in zip(seen[1::2], seen[2::2], strict=True):
        assert not any(np.array_equal(before[path], after[path]) for path in before if path.startswith("net/hidden"))
    assert int(trainer.state.skipped_steps) == len(kinds)
    assert trainer.optimizer.iterations.numpy() == len(kinds) + 1


@pytest.mark.wide
@pytest.mark.parametrize("culprits, replicas", mostly_wide([("second", 2), ("first second", 1)], ("second", 2)))
def test_float16_an_overflow_in_one_update_halves_its_scale_and_skips_both(culprits, replicas):
    rows = classification(24)
    rows["label"][13] = -1  # in the second batch
    trainer = distloop.Trainer(two_models(culprits), float16(replicas, average_decay=0.9))
    first, second, third = after_each_step(trainer, distloop.make_dataset(rows, 8), 3)
    assert_skipped(first, second, culprits.split())
    scales = {name: float(scale.numpy()) for name, scale in trainer.state.loss_scale.items()}
    assert scales == {name: 2.0**3 if name in culprits else 2.0**4 for name in ("first", "second")}
    moving = [path for path in second if "/bias" in path or "/beta" in path or path.startswith("step")]
    assert moving and not any(np.array_equal(second[path], third[path]) for path in moving)


@pytest.mark.slow
def test_float16_a_scale_that_is_too_large_falls_until_the_gradients_fit():
    trainer = distloop.Trainer(classifier(optimizer=lambda: scaled(2.0**24)), float16(1))
    seen = after_each_step(trainer, batches(rows=64), 14)
    skipped = int(trainer.state.skipped_steps)
    assert 1 < skipped < 14
    for before, after in itertools.pairwise(seen):
        if after["skipped_steps@0"] > before["skipped_steps@0"]:
            assert_skipped(before, after)
    assert trainer.state.loss_scale.numpy() == 2.0 ** (24 - skipped)
    assert trainer.optimizer.iterations.numpy() == 14 - skipped


@pytest.mark.wide
def test_float16_a_skipped_step_leaves_no_trace_in_those_that_follow():
    rows = classification(40)
    bad = {name: np.concatenate([value[:8], value[:8], value[8:]]) for name, value in rows.items()}
    bad["x"][8 + 5] = np.inf

    def run(rows, steps):
        # A scale that does not change, so that what follows is rounded alike.
        optimizer = functools.partial(scaled, 512.0, dynamic=False)
        model_fn = classifier(optimizer=optimizer, dropout=0.5, batch_norm="local", l2=0.1)
        trainer = train(model_fn, float16(2, average_decay=0.9), distloop.make_dataset(rows, 8), steps)
        assert float(trainer.state.loss_scale.numpy()) == 512.0
        return without_counts(everything(trainer))

    assert_equal(run(bad, 6), run(rows, 5))


def at_the_floor(pattern, replicas, **settings):
    """Makes a trainer whose scale starts at 4 and ends at 1, and a `fit` on a batch for each sign: "-" is all NaN."""
    rows = classification(8 * len(pattern))
    rows["x"].reshape([-1, 8, 8])[[sign == "-" for sign in pattern]] = np.nan
    optimizer = functools.partial(scaled, 4.0, min_scale=1.0)
    trainer = distloop.Trainer(classifier(optimizer=optimizer, batch_norm="local"), float16(replicas, **settings))
    return trainer, lambda: trainer.fit(distloop.make_dataset(rows, 8), steps=len(pattern))


@pytest.mark.slow
@pytest.mark.parametrize("replicas, on_nonfinite", mostly_wide([(2, "raise"), (1, "skip")], (2, "raise")))
def test_float16_ten_overflows_in_a_row_at_the_smallest_scale_are_an_error(replicas, on_nonfinite):
    trainer, fit = at_the_floor("-" * 20, replicas, on_nonfinite=on_nonfinite)
    before = everything(trainer)
    message = refused(
        fit,
        "Step 12 is number 10 in a row",  # after the two that halved the scale
        "smallest loss scale, 1:",
        "loss is nan",
        "net/hidden/kernel",
        "the batch itself holds such numbers",
        kind=Diverged,
    )
    assert "skip" not in message
    assert trainer.step == int(trainer.state.skipped_steps) == 12
    assert_equal(*map(without_counts, (everything(trainer), before)))


@pytest.mark.wide
@pytest.mark.parametrize("on_nonfinite, overflows, replicas", [("raise", 9, 2), ("skip", 0, 1)])
def test_float16_fewer_overflows_in_a_row_at_the_smallest_scale_are_none(replicas, overflows, on_nonfinite):
    trainer, fit = at_the_floor("--" + "-" * overflows, replicas, on_nonfinite=on_nonfinite)
    before = weights(trainer)
    assert np.isnan(fit()["loss"])  # nothing was measured
    assert int(trainer.state.skipped_steps) == 2 + overflows
    assert trainer.state.loss_scale.numpy() == 1.0
    assert_equal(weights(trainer), before)


@pytest.mark.slow
def test_float16_a_good_step_starts_the_count_of_overflows_again():
    trainer, fit = at_the_floor("-----------+---------+----------", 1, on_nonfinite="skip")
    with pytest.raises(FloatingPointError, match="Step 32 is number 10 in a row"):
        fit()
    assert trainer.optimizer.iterations.numpy() == 2


@pytest.mark.wide
@pytest.mark.parametrize(
    ("make_config", "optimizers", "sentence"),
    [
        # Both overflow in each step, the second at its smallest scale.
        (
            float16,
            lambda: (scaled(), scaled(4.0, min_scale=1.0)),
            "Step 12 is number 10 in a row that was not finite at the smallest loss scale, 1:",
        ),
        # Both are not finite, which is no error yet for the first.
        (on, lambda: (scaled(), adam()), "Step 1 is the first that was not finite"),
    ],
    ids=["at the smallest scale", "without a loss scale"],
)
def test_the_error_is_about_the_update_that_may_not_overflow_again(make_config, optimizers, sentence):
    rows = classification(8)
    rows["label"][:] = -1
    trainer = distloop.Trainer(two_models("first second", optimizers=optimizers), make_config(1))
    data = distloop.make_dataset(rows, 8)
    refused(lambda: trainer.fit(data, steps=20), sentence, "second", "b/dense", kind=Diverged)


# boundaries -------------------------------------------------------------------------------------------------------

CUTS = {
    "by both": dict(log_every=7, eval_every="25 %", checkpoint_every="1 s", steps_per_loop=2),
    "by steps": dict(log_every=7, eval_every=3, checkpoint_every=9, steps_per_loop=2),
    "by the clock": dict(log_every="2 s", eval_every="25 %", checkpoint_every="1 s"),
}


@pytest.mark.slow
@pytest.mark.parametrize("cut", mostly_wide(CUTS))
def test_how_a_run_is_cut_changes_no_bit(cut, monkeypatch, tmp_path):
    def run(**cut):
        trainer = distloop.Trainer(classifier(dropout=0.5, batch_norm="local", l2=0.1), on(2, average_decay=0.9, **cut))

        def action(report):
            trainer.predict(batches())

        data = batches(shuffle=True)
        trainer.fit(data, steps=11, evals={"test": batches()}, actions=[every("3 s", action)] if cut else [])
        trainer.fit(data, steps=23)
        return everything(trainer)

    monkeypatch.setattr(loop, "time", problems.seconds_of_one_loop())
    expected = run()
    if cut != "by steps":
        monkeypatch.setattr(loop, "_LOOP_SECS", 0.0)  # every loop ends after its first step
    assert_equal(run(workdir=str(tmp_path), **CUTS[cut]), expected)
    assert len(list((tmp_path / "checkpoints").iterdir())) == 3  # besides the last one: saved by the clock


def rows_of_a_run(workdir, steps=23, **settings):
    config = on(1, workdir=str(workdir), average_decay=0.9, **settings)
    data = batches(shuffle=True)
    train(classifier(dropout=0.5, metrics=True), config, data, steps, evals={"test": data})
    return problems.rows_of(workdir)


@pytest.mark.slow
@pytest.mark.parametrize("cut", mostly_wide(CUTS, "by steps"))
def test_however_a_run_is_cut_a_row_has_the_means_since_the_row_before(cut, monkeypatch, tmp_path):
    each_step = rows_of_a_run(tmp_path / "each step", log_every=1)
    assert [row["step"] for row in each_step] == list(range(1, 24))
    seen = [0, *(row["examples_seen"] for row in each_step)]
    counts = np.diff(seen)  # the weights of the means of a step; the last batch of an epoch has 3 rows
    monkeypatch.setattr(loop, "time", problems.seconds_of_one_loop())
    if cut != "by steps":
        monkeypatch.setattr(loop, "_LOOP_SECS", 0.0)
    rows = rows_of_a_run(tmp_path / "cut", **CUTS[cut])
    ends = [row["step"] for row in rows]
    assert len(rows) > 5 and ends[-1] == 23 and len({b - a for a, b in itertools.pairwise([0, *ends])}) > 1
    for name in ("loss", "accuracy"):
        of_steps = np.array([row[name] for row in each_step])
        for row, begin, end in zip(rows, [0, *ends], ends, strict=False):
            mean = np.average(of_steps[begin:end], weights=counts[begin:end])
            assert row[name] == pytest.approx(mean, rel=1e-12), (name, begin, end)
        weights_of_rows = np.diff([0, *(row["examples_seen"] for row in rows)])
        of_rows = np.average([row[name] for row in rows], weights=weights_of_rows)
        assert of_rows == pytest.approx(np.average(of_steps, weights=counts), rel=1e-12)


@pytest.mark.slow
def test_a_run_that_stops_between_two_rows_writes_the_same_rows(monkeypatch, tmp_path):
    cut = dict(log_every=7, eval_every=10, checkpoint_every="1 s", keep_checkpoints=99)
    monkeypatch.setattr(loop, "time", problems.seconds_of_one_loop())
    monkeypatch.setattr(loop, "_LOOP_SECS", 0.0)  # a checkpoint after each step
    whole = rows_of_a_run(tmp_path / "whole", 14, **cut)
    for step in (9, 12):  # with steps since the row of 7, and since the row of 10
        shutil.copytree(tmp_path / "whole", killed := tmp_path / f"killed at {step}")
        for path in (killed / "checkpoints").iterdir():
            if path.name.isdecimal() and int(path.name) > step:
                shutil.rmtree(path)
        assert rows_of_a_run(killed, 14, **cut) == whole


@pytest.mark.slow
def test_a_fit_that_was_stopped_and_is_called_again_writes_the_same_rows(monkeypatch, tmp_path):
    monkeypatch.setattr(loop, "_LOOP_SECS", 0.0)  # each loop ends after its first step
    asked, data = {"loops": 0}, batches(shuffle=True)

    def reason(_):
        asked["loops"] += 1
        return "by SIGTERM" if asked["loops"] == 9 else None

    def trainer(name):
        return distloop.Trainer(classifier(metrics=True), on(1, workdir=str(tmp_path / name), log_every=5))

    trainer("whole").fit(data, steps=13)
    monkeypatch.setattr(StopRequests, "reason", property(reason))
    stopped = trainer("stopped")
    with pytest.raises(SystemExit):
        stopped.fit(data, steps=13)
    assert 5 < stopped.step < 10
    stopped.fit(data, steps=13)
    assert problems.rows_of(tmp_path / "stopped") == problems.rows_of(tmp_path / "whole")


@pytest.mark.wide
def test_logs_that_come_late_are_those_that_come_at_once(tmp_path, monkeypatch):
    def rows(name, **arguments):
        config = on(1, workdir=str(tmp_path / name), log_every=3, checkpoint_every=20, average_decay=0.9)
        trainer = train(classifier(dropout=0.3), config, batches(shuffle=True), steps=100, **arguments)
        return everything(trainer), problems.json_lines(tmp_path / name / "metrics.jsonl")

    def look(report):
        looked_at.append(report.step)
        assert report.state.step == report.step

    loops, run_steps = [], CompiledLoop.run
    monkeypatch.setattr(CompiledLoop, "run", lambda *a, **k: (loops.append(a[2]), run_steps(*a, **k))[1])
    looked_at = []  # whoever may want to see the state at each log gets to
    at_once, expected = rows("at once", actions=[every(None, look)])
    assert looked_at == [row["step"] for row in expected] and max(loops) == 3
    loops.clear()
    late, found = rows("late")
    assert max(loops) > 3  # several logs in one loop
    assert_equal(late, at_once)
    timed = {"time", *OF_THE_MACHINE}
    of_saves = {"save_secs", "save_pause_secs"}  # in the first row after a checkpoint is whole
    for row, other in zip(found, expected, strict=True):
        assert {k: v for k, v in row.items() if k not in timed} == {k: v for k, v in other.items() if k not in timed}
        assert row.keys() - of_saves == other.keys() - of_saves
    times = [row["time"] for row in found]
    assert times == sorted(set(times))


@pytest.mark.wide
def test_float16_how_a_run_is_cut_changes_no_bit_nor_the_loss_scale():
    optimizer = functools.partial(scaled, 2.0**14, growth_steps=3)

    def run(**cut):
        model_fn = classifier(optimizer=optimizer, dropout=0.5, batch_norm="local", l2=0.1)
        trainer = distloop.Trainer(model_fn, float16(1, average_decay=0.9, **cut))
        data = batches(shuffle=True)
        trainer.fit(data, steps=23, evals={"test": batches()})
        trainer.fit(data, steps=53)
        return everything(trainer)

    expected = run()
    assert expected["skipped_steps@0"] > 0  # the scale went up until the gradients overflowed, and down again
    assert expected["loss_scale/@0"] != 2.0**14
    assert_equal(run(**CUTS["by steps"]), expected)


@pytest.mark.wide
def test_operations_one_after_another_or_side_by_side_train_the_same(monkeypatch):
    used = []
    enter = tf.experimental.function_executor_type
    monkeypatch.setattr(tf.experimental, "function_executor_type", lambda name: used.append(name) or enter(name))
    found = []
    for executor in ("serial", "parallel", "auto"):
        config = on(1, executor=executor, average_decay=0.9, clip_norm=0.5, log_every=5)
        found.append(everything(train(classifier(dropout=0.5, batch_norm="local"), config, batches(shuffle=True))))
    assert_close(found[1], found[0])  # TensorFlow fuses operations otherwise, so the last bits differ
    assert_equal(found[2], found[0])
    assert set(used) == {"SINGLE_THREADED_EXECUTOR", ""} and used[-1] == "SINGLE_THREADED_EXECUTOR"


@pytest.mark.slow
@pytest.mark.not_by_collectives("which trace once more where the largest batch is another one")
@pytest.mark.parametrize("replicas", mostly_wide([3, 1], 3))
def test_a_run_with_odd_batches_traces_its_step_once(replicas):
    traces = []
    trainer = distloop.Trainer(classifier(on_trace=traces.append), on(replicas, log_every=3, eval_every=4))
    trainer.fit(batches(), steps=17, evals={"test": batches()})
    trainer.fit(batches(), steps=30)
    assert traces.count(True) == replicas  # once for each replica's part of the graph
    assert traces.count(False) == replicas + 1  # and once alone, for its operations to be counted
    trainer.evaluate(batches(11))
    trainer.evaluate(batches())
    assert traces.count(False) == replicas + 1


# state ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_statistics_are_equal_on_every_replica_at_every_boundary():
    trainer = distloop.Trainer(classifier(batch_norm="local"), on(3))
    norm = trainer.model.layers[1]
    seen = []

    def look(report):
        for variable in (norm.moving_mean, norm.moving_variance):
            values = problems.local_values(trainer, variable)
            seen.append(values[0])
            for value in values:
                np.testing.assert_array_equal(value, values[0])

    trainer.fit(batches(), steps=8, actions=[every(2, look)])
    assert len(seen) == 8 and not np.allclose(seen[0], seen[2])


@pytest.mark.wide
def test_a_moving_mean_is_that_of_the_whole_batch_however_it_is_shared_out():
    def model_fn():
        # The layer stands first, so what it sees does not depend on weights that train.
        model = keras.Sequential([keras.Input((8,)), keras.layers.BatchNormalization(), keras.layers.Dense(1)])

        def loss_fn(batch, training):  # the weights are no matter for the statistics
            return {"loss": distloop.weighted(model(batch["x"], training=training)[:, 0], batch["weight"])}

        return distloop.ModelSpec(model, keras.optimizers.SGD(0.0), loss_fn)

    configs = on(1), on(3, microbatches=2)
    one, many = (train(model_fn, config, batches(10, 30), steps=3).model.layers[0].moving_mean for config in configs)
    np.testing.assert_allclose(many, one, rtol=1e-5, atol=1e-7)  # means of 10 rows, of parts in another order


def output_of(model):
    """Returns a `loss_fn` whose loss is the first output."""
    return lambda batch, training: {"loss": model(batch["x"], training=training)[:, 0]}


@pytest.mark.wide
def test_a_users_layer_that_drifts_is_averaged():
    class Codebook(keras.Layer):
        def build(self, shape):
            self.code = self.add_weight(shape=(shape[-1],), initializer="zeros", trainable=False)

        def call(self, x, training=False):
            if training:
                self.code.assign(0.5 * self.code + tf.reduce_sum(x, axis=0))
            return x + tf.stop_gradient(self.code) * 0.1

    def model_fn():
        model = keras.Sequential([keras.Input((8,)), Codebook(), keras.layers.Dense(1)])
        return distloop.ModelSpec(model, keras.optimizers.SGD(0.1), output_of(model))

    trainer = train(model_fn, on(2), batches(), steps=4)
    first, second = problems.local_values(trainer, trainer.model.layers[0].code)
    np.testing.assert_array_equal(first, second)
    assert np.abs(first).max() > 0


@pytest.mark.slow
def test_replicas_draw_different_dropout_masks():
    def model_fn():
        dropout = keras.layers.Dropout(0.5, seed=3)
        weight = keras.layers.Dense(1)
        dropout.build((None, 64))
        weight.build((None, 64))

        def loss_fn(batch, training):
            dropped = dropout(batch, training=training)
            return {"loss": weight(dropped)[:, 0], **{f"unit{i}": dropped[:, i] for i in range(64)}}

        return distloop.ModelSpec([dropout, weight], keras.optimizers.SGD(0.0), loss_fn)

    data = tf.data.Dataset.from_tensors(np.float32([[1] * 64, [2] * 64]))  # a row for each replica
    trainer = distloop.Trainer(model_fn, on(2))
    masks = []
    for step in (1, 2, 3):
        numbers = trainer.fit(data, steps=step)
        kept = np.array([int(numbers[f"unit{i}"]) for i in range(64)])  # bit 0: on the first replica; 1: on the second
        masks += [kept & 1, kept >> 1]
    assert len(trainer.state.seeds) == 1
    assert all(10 < mask.sum() < 54 for mask in masks)
    for one, other in itertools.combinations(masks, 2):
        assert 10 < (one != other).sum() < 54


# evaluation -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("replicas, sizes", mostly_wide([(3, [5, 1]), (1, [100])]))
def test_metrics_are_those_of_numpy_on_the_whole_set(replicas, sizes):
    rows = classification(67)
    trainer = distloop.Trainer(classifier(is_weighted=True, metrics=True), on(replicas))
    logits = trainer.model(rows["x"], training=False).numpy().astype(np.float64)
    log_likelihood = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    loss = -log_likelihood[np.arange(67), rows["label"]]
    hit = logits.argmax(1) == rows["label"]
    auc = keras.metrics.AUC(num_thresholds=50)
    auc.update_state(rows["label"] == 0, np.exp(log_likelihood)[:, 0])
    for size in sizes:
        found = trainer.evaluate(distloop.make_dataset(rows, size))
        assert found["loss"] == pytest.approx(np.average(loss, weights=rows["weight"]), rel=1e-6)
        assert found["accuracy"] == pytest.approx(np.average(hit, weights=rows["weight"]), rel=1e-6)
        assert found["auc"] == pytest.approx(float(auc.result()), rel=1e-6)


@pytest.mark.parametrize("replicas", mostly_wide([1, 2]))
def test_evaluating_and_predicting_change_nothing(replicas):
    class Restless(keras.Layer):
        """Writes and draws even when it is not trained."""

        def __init__(self):
            super().__init__()
            self.seed = keras.random.SeedGenerator(1)
            self.calls = self.add_weight(shape=(), initializer="zeros", trainable=False)

        def call(self, x):
            self.calls.assign(self.calls + 1.0)
            return x + 0.0 * keras.random.normal((1,), seed=self.seed)

    def model_fn():
        model = keras.Sequential([keras.Input((8,)), Restless(), keras.layers.Dropout(0.5), keras.layers.Dense(1)])
        predict_fn = lambda batch: model(batch["x"], training=False)  # noqa: E731
        return distloop.ModelSpec(model, keras.optimizers.Adam(0.1), output_of(model), predict_fn=predict_fn)

    trainer = train(model_fn, on(replicas, average_decay=0.9), batches(), steps=3)
    before = everything(trainer)
    trainer.evaluate(batches())
    trainer.predict(batches())
    assert_equal(everything(trainer), before)


@pytest.mark.slow
def test_evaluation_uses_the_average_and_training_does_not():
    trainer = train(classifier(), on(2, average_decay=0.999), batches(), steps=10)
    averaged = trainer.evaluate(batches(67))["loss"]
    rows = classification(67)

    def loss():
        return float(tf.reduce_mean(cross_entropy(rows["label"], trainer.model(rows["x"], training=False))))

    now = loss()
    with trainer.state.averaged():
        assert averaged == pytest.approx(loss(), rel=1e-6)
    assert loss() == now != averaged


@pytest.mark.parametrize(("replicas", "settings"), mostly_wide([(3, {"shard_optimizer": True}), (1, {}), (2, {})]))
def test_an_equal_average_is_the_mean_of_the_weights_since_its_first(replicas, settings):
    trainer = distloop.Trainer(classifier(), on(replicas, average_from="60 %", **settings))
    seen = problems.looks(trainer, batches(), 10, 1, lambda report: weights(report.state))
    with trainer.state.averaged():
        found = weights(trainer)
    assert_close(found, {name: np.mean([w[name] for w in seen[5:]], axis=0) for name in found})


class Spoiled(distloop.Action):
    """Notes the weights after each step, and stops the run after one of them."""

    every, name = 1, "spoiled"

    def __init__(self, stops_after=0):
        self.seen, self.stops_after = {}, stops_after

    def __call__(self, report):
        self.seen[report.step] = weights(report.state)
        if report.step == self.stops_after:
            raise KeyboardInterrupt


def spoiled(rows, at):
    """Returns rows of which some are infinite, so that the batches of 16 with these numbers are skipped."""
    x = np.array(rows["x"])
    x[[16 * number for number in at]] = np.inf
    return {**rows, "x": x}


def mean_of(seen, steps):
    return {name: np.mean([seen[step][name] for step in steps], axis=0) for name in seen[max(seen)]}


AVERAGES = [{"average_from": "50 %"}, {"average_decay": 0.5}]
KINDS = list(itertools.product(["skipped", "after Keras", "stopped"], AVERAGES))


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "average"), mostly_wide(KINDS, *KINDS[:1], *KINDS[2:4]))
def test_an_average_counts_the_steps_of_the_run_that_are_applied(kind, average, tmp_path):
    rows, skips = classification(16 * 12), [2, 8] if kind == "skipped" else []

    def build():
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4, name="logits")], name="net")
        model.compile(keras.optimizers.SGD(0.1), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        if kind == "after Keras":
            model.fit(rows["x"], rows["label"], epochs=3, verbose=0)
        return model

    def fit(action):
        settings = dict(on_nonfinite="skip", workdir=str(tmp_path) if kind == "stopped" else "")
        trainer = distloop.Trainer(distloop.from_keras(build()), on(1, **settings, **average))
        first = weights(trainer.state)
        data = distloop.make_dataset(spoiled(rows, skips), 16).map(lambda row: (row["x"], row["label"]))
        try:
            trainer.fit(data, steps=12, actions=[action])
        except KeyboardInterrupt:
            return fit(Spoiled())
        return trainer, {0: first, **action.seen}

    trainer, seen = fit(Spoiled())
    if kind == "stopped":
        whole = seen
        for stops_after in (3, 8):
            shutil.rmtree(tmp_path)
            trainer, _ = fit(Spoiled(stops_after))
            seen = whole
    applied = [step for step in range(1, 13) if step - 1 not in skips]
    with trainer.state.averaged():
        found = weights(trainer.state)
    if "average_from" in average:
        assert_close(found, mean_of(seen, [step for step in applied if step >= 6]))
    else:
        expected = seen[0]
        for t, step in enumerate(applied, 1):
            rate = 1 - min(0.5, (1 + t) / (10 + t))
            expected = {name: value + rate * (seen[step][name] - value) for name, value in expected.items()}
        assert_close(found, expected, 1e-5)


REPLICAS = [(1, {}), (2, {"shard_optimizer": True}), (2, {"virtual_replicas": 4})]
BEGUN = list(itertools.product(AVERAGES, REPLICAS))


@pytest.mark.slow
@pytest.mark.parametrize(("average", "cut"), mostly_wide(BEGUN, BEGUN[4]))
def test_an_average_begins_with_weights_set_before_the_first_step(average, cut):
    trainer = distloop.Trainer(classifier(), on(cut[0], **cut[1], **average))
    for variable in trainer.model.variables:
        variable.assign(variable + 1.0)
    expected = first = weights(trainer)
    with trainer.state.averaged():
        assert_equal(weights(trainer), first)
    loss = trainer.evaluate(batches())["loss"]
    seen = problems.looks(trainer, batches(), 4, 1, lambda report: weights(report.state))
    for t, after in enumerate(seen, 1):
        rate = 1 / max(1, t - 1) if "average_from" in average else 1 - min(0.5, (1 + t) / (10 + t))
        expected = {name: value + rate * (after[name] - value) for name, value in expected.items()}
    with trainer.state.averaged():
        assert_close(weights(trainer), expected, 1e-5)
    plain = distloop.Trainer(classifier(), on(1))
    for variable, value in zip(plain.model.variables, first.values(), strict=True):
        variable.assign(value)
    assert plain.evaluate(batches())["loss"] == pytest.approx(loss, rel=1e-6)


def idle(step):
    step.report("loss", 0.0)


TWICE = [(kind, average, cut) for kind in ("own", "shared") for average in AVERAGES for cut in REPLICAS]
TWICE += [("idle", average, cut) for average in AVERAGES for cut in REPLICAS[:2]]  # virtual replicas need a loss_fn
SKIPPED = [("shared", average, (1, {"on_nonfinite": "skip"})) for average in AVERAGES]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "average", "cut"), mostly_wide(TWICE + SKIPPED, *TWICE[::5], *SKIPPED))
def test_an_average_moves_once_in_a_step_of_several_updates(kind, average, cut):
    def model_fn():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")])
        first = keras.optimizers.SGD(1.0)
        optimizers = [first, first if kind != "own" else keras.optimizers.SGD(1.0)]
        updates = [distloop.Update(n, loss_fn_of(model), o, ".") for n, o in zip("ab", optimizers, strict=True)]
        if kind == "idle":
            updates[1] = distloop.Update("b", None, first, ".", step_fn=idle)
        return distloop.ModelSpec(model, updates=updates)

    def loss_fn_of(model):
        return lambda batch, training: {"loss": model(batch)[:, 0]}

    trainer = distloop.Trainer(model_fn, on(cut[0], **cut[1], **average))
    rows = np.ones((36, 1), np.float32)
    if skips := [3, 6] if "on_nonfinite" in cut[1] else []:
        rows[[4 * number for number in skips]] = np.inf
    trainer.fit(distloop.make_dataset(rows, 4), steps=8)
    size, expected, applied = (1 if kind == "idle" else 2), 0.0, [step for step in range(1, 9) if step - 1 not in skips]
    assert float(trainer.model.weights[0][0, 0]) == -size * len(applied)
    for t, step in enumerate(applied, 1):
        rate = 1 - min(0.5, (1 + t) / (10 + t))
        if "average_from" in average:
            rate = 1 / max(1, len([other for other in applied if 4 <= other <= step]))
        expected += rate * (-size * t - expected)
    with trainer.state.averaged():
        assert float(trainer.model.weights[0][0, 0]) == pytest.approx(expected, rel=1e-6)


@pytest.mark.slow
def test_an_equal_average_that_would_begin_elsewhere_is_refused_or_waits(tmp_path):
    def fit(steps, stops_after=0, average_from="50 %"):
        config = on(1, workdir=str(tmp_path), average_from=average_from)
        trainer, action = distloop.Trainer(classifier(), config), Spoiled(stops_after)
        with contextlib.suppress(KeyboardInterrupt):
            trainer.fit(batches(), steps=steps, actions=[action])
        with trainer.state.averaged():
            return weights(trainer.state), action.seen

    fit(20, stops_after=6)
    refused(lambda: fit(8), "average_from is step 4 of the run now, and was step 10 before step 6", "a step after 6")
    found, seen = fit(12, average_from="7 steps")
    assert_close(found, mean_of(seen, range(7, 13)))
    refused(lambda: fit(20, average_from="9 steps"), "step 9 of the run now, and was step 7", "or '7 steps'")
    found, seen = fit(24, average_from="75 %")
    assert_close(found, mean_of(seen, range(18, 25)))


# prediction -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("replicas, sizes", mostly_wide([(3, [5, 1]), (1, [100])]))
def test_predictions_come_in_dataset_order_each_row_once(replicas, sizes):
    rows = classification(67)

    def model_fn():
        spec = classifier()()
        predict_fn = lambda batch: {"row": batch["row"], "half": tf.cast(spec.model(batch["x"]), tf.bfloat16)}  # noqa: E731
        return distloop.ModelSpec(spec.model, spec.optimizer, spec.loss_fn, predict_fn=predict_fn)

    trainer = distloop.Trainer(model_fn, on(replicas))
    for size in sizes:
        data = distloop.make_dataset({**rows, "row": np.arange(67)}, size)
        found = trainer.predict(data)
        np.testing.assert_array_equal(found["row"], np.arange(67))
        assert found["half"].dtype == np.float32
        np.testing.assert_allclose(found["half"], trainer.model(rows["x"]).numpy(), rtol=1e-2, atol=1e-2)
        lengths = [min(size, 67 - start) for start in range(0, 67, size)]
        assert [len(part["row"]) for part in trainer.stream_predictions(data)] == lengths


# position ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("source", mostly_wide(["rows", "arrays"]))
def test_a_start_at_any_step_of_ten_million_rows_reads_as_little(source, tmp_path):
    rows = many_rows.ManyRows() if source == "rows" else {"row": np.arange(many_rows.COUNT)}

    def start(at, last_step):
        data, given = many_rows.augmented(rows)
        trainer = distloop.Trainer(classifier(), on(1, workdir=str(tmp_path / str(at))))
        trainer.fit(data, steps=last_step)
        asked = list(rows.asked) if source == "rows" else []
        if at:
            undisturbed = list(data.starting_at(at).take(3))
            for (numbers, x), expected in zip(given, undisturbed, strict=False):
                assert numbers.tobytes() == expected["row"].numpy().tobytes()
                assert x.tobytes() == expected["x"].numpy().tobytes()
        assert 2 <= len(given) <= 100 and len(asked) < 100 * 16  # also what is prefetched
        return trainer

    trainer = start(0, 2)
    for at in (1_000_000, 10) if source == "rows" else (1_000_000,):  # 1,000,000 is in the second epoch
        many_rows.save_at(trainer, at)
        place = trainer._train_source.position()
        assert place["batches"] == at and len(json.dumps(place)) < 1000
        shutil.copytree(tmp_path / "0", tmp_path / str(at))
        shutil.rmtree(tmp_path / "0" / "checkpoints" / str(at))
        if source == "rows":
            rows.asked.clear()
        start(at, at + 2)

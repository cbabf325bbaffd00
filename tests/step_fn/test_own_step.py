"""A step wholly of the user's own, without a loss_fn, under the laws: three recipes."""

import functools
import pathlib
import re

import keras
import numpy as np
import pytest
import tensorflow as tf

import distloop
from distloop.model.saved_state import ReplicasDifferError
from tests import forked
from tests.problems import assert_close, assert_equal, everything, mostly_wide, on, refused, weights

SIZE, ROWS = 3, 21


def data():
    """Batches of 8, 8 and 5 rows, each with a seed of its own and a task, on fewer or more replicas."""
    rng = np.random.default_rng(0)
    rows = {
        "seed": rng.integers(0, 2**31, (ROWS, 2)).astype(np.int32),
        "x": rng.normal(size=(ROWS, 6, SIZE)).astype(np.float32),
        "y": rng.normal(size=(ROWS, 6)).astype(np.float32),
    }
    return distloop.make_dataset(rows, 8)


def make_net():
    layer = keras.layers.Dense(1, kernel_initializer=keras.initializers.Constant(0.3), name="line")
    return keras.Sequential([keras.Input((SIZE,)), layer], name="net")


def recipe(name):
    """A recipe of the page on extending a run: a function from a model to a step_fn."""
    page = (pathlib.Path(__file__).parents[2] / "docs" / "extending.md").read_text(encoding="utf-8")
    (block,) = [block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if f"def {name}(" in block]
    names = {"tf": tf}
    exec(block.partition("\n\n\n")[0], names)
    return names[name]


RECIPES = {name: recipe(name) for name in ("evolution", "meta_learning", "reinforce")}


def model_fn(recipe, **arguments):
    def make():
        net = make_net()
        return distloop.ModelSpec(net, keras.optimizers.Adam(0.1), step_fn=recipe(net), **arguments)

    return make


def train(recipe, replicas, steps=3, **settings):
    trainer = distloop.Trainer(model_fn(recipe), on(replicas, **settings))
    return trainer, trainer.fit(data(), steps=steps)


@functools.cache
def on_one_replica(name):
    """The weights and numbers of three steps of a recipe on one replica."""
    trainer, numbers = train(RECIPES[name], 1)
    return weights(trainer), numbers


@pytest.mark.parametrize(
    ("name", "replicas"),
    mostly_wide([(n, r) for n in RECIPES for r in (2, 3)], ("evolution", 3), ("meta_learning", 2), ("reinforce", 2)),
)
def test_any_number_of_replicas_trains_to_the_same_weights(name, replicas):
    one, numbers = on_one_replica(name)
    start = {w.path: w.numpy() for w in make_net().weights}
    assert all(np.abs(w - start[path]).max() > 0.05 for path, w in one.items())
    several, same_numbers = train(RECIPES[name], replicas)
    assert_close(weights(several), one)
    reported = "loss" if name == "meta_learning" else "reward"
    assert same_numbers[reported] == pytest.approx(numbers[reported], rel=1e-5)


def test_an_evolution_step_is_that_of_numpy():
    trainer = distloop.Trainer(model_fn(RECIPES["evolution"]), on(2, clip_norm=0.0))
    before, rows = weights(trainer), next(iter(data().as_numpy_iterator()))
    trainer.optimizer.learning_rate = 0.0
    numbers = trainer.fit(data(), steps=1)
    rewards, total = [], 0.0
    for seed, x, y in zip(rows["seed"], rows["x"], rows["y"], strict=True):
        noise = [tf.random.stateless_normal(s, seed + i).numpy() for i, s in enumerate(([SIZE, 1], [1]))]
        kernel, bias = before["net/line/kernel"] + 0.1 * noise[0], before["net/line/bias"] + 0.1 * noise[1]
        rewards.append(-np.mean((x @ kernel[:, 0] + bias - y) ** 2))
        total = total - rewards[-1] * np.concatenate([noise[0].ravel(), noise[1]]) / 0.1
    assert numbers["reward"] == pytest.approx(np.mean(rewards), rel=1e-5)
    assert numbers["gradient_norm"] == pytest.approx(np.linalg.norm(total / len(rewards)), rel=1e-5)


def on_workers(name):
    return weights(train(RECIPES[name], 0)[0])


@pytest.mark.slow
@pytest.mark.parametrize("name", mostly_wide(RECIPES, "reinforce"))
def test_two_workers_train_to_the_same_weights(name):
    for found in forked.run_in_workers(on_workers, 2, name):
        assert_close(found, on_one_replica(name)[0])


@pytest.mark.parametrize("name", mostly_wide(RECIPES, "reinforce"))
def test_float16_trains_alike_and_an_overflow_changes_only_the_scale(name):
    half, _ = train(RECIPES[name], 2, precision="mixed_float16")
    assert_close(weights(half), on_one_replica(name)[0], tolerance=0.02)

    def overflowing(net):
        gradients_of = RECIPES[name](net)
        return lambda step: {path: g * np.inf for path, g in gradients_of(step).items()}

    trainer = distloop.Trainer(model_fn(overflowing), on(2, precision="mixed_float16"))
    before = everything(trainer)
    trainer.fit(data(), steps=1)
    after = everything(trainer)
    changed = {path.partition("@")[0].partition("/")[0] for path in before if np.any(before[path] != after[path])}
    assert changed <= {"loss_scale", "streak", "step", "skipped_steps"} and int(trainer.state.skipped_steps) == 1


def test_none_applies_nothing_and_numbers_and_statistics_are_kept():
    def make():
        net = keras.Sequential([keras.Input((SIZE,)), keras.layers.BatchNormalization(name="norm")], name="net")

        def step_fn(step):
            net(step.batch["x"][:, 0], training=True)
            step.report("rows", tf.cast(tf.shape(step.batch["x"])[0], tf.float32), 1.0)

        return distloop.ModelSpec(net, keras.optimizers.Adam(0.1), step_fn=step_fn)

    trainer = distloop.Trainer(make, on(2))
    before = weights(trainer)
    assert trainer.fit(data(), steps=2)["rows"] == 4.0
    after = weights(trainer)
    changed = [path for path in before if np.any(before[path] != after[path])]
    assert sorted(changed) == ["net/norm/moving_mean", "net/norm/moving_variance"]
    assert trainer.optimizer.iterations.numpy() == 0
    found = everything(trainer)
    of_second = [path for path in found if path.endswith("@1")]
    assert_equal({path: found[path[:-1] + "0"] for path in of_second}, {path: found[path] for path in of_second})


def test_variables_that_are_left_out_stay():
    def bias_only(net):
        def step_fn(step):
            step.report("loss", 1.0)
            return {"net/line/bias": step.sum(tf.ones([1]))}

        return step_fn

    trainer, _ = train(bias_only, 2)
    assert np.all(weights(trainer)["net/line/kernel"] == np.float32(0.3))
    assert weights(trainer)["net/line/bias"] < -0.2


@pytest.mark.parametrize(
    ("step_fn", "settings", "parts"),
    [
        (lambda step: {}, {}, ["reported no number"]),
        (lambda step: step.sum([1.0, True]), {}, ["step.sum was given a tensor of bool", "give numbers"]),
        (lambda step: step.report("time", 1.0), {}, ["step.report", "'time'", "which distloop itself reports"]),
        (lambda step: step.report("loss", tf.zeros([2])), {}, ["step.report", "(2,)", "two scalars"]),
        (lambda step: (step.report("loss", 1.0), {"x": 1.0})[1], {}, ["returned ['x']", "net/line/kernel"]),
        (lambda step: None, {"microbatches": 2}, ["microbatches was given", "leave microbatches out"]),
        (lambda step: None, {"virtual_replicas": 2}, ["virtual_replicas=2 was given"]),
        (
            lambda step: tf.cond(tf.ones([], bool), lambda: step.sum(1.0), lambda: 0.0),
            {"num_devices": 2},
            ["inside a tf.cond"],
        ),
    ],
)
def test_a_wrong_step_is_refused_in_a_sentence(step_fn, settings, parts):
    trainer = distloop.Trainer(model_fn(lambda net: step_fn), on(**{"replicas": 1, **settings}))
    refused(lambda: trainer.fit(data(), steps=1), *parts)


def test_what_needs_a_loss_says_so():
    trainer = distloop.Trainer(model_fn(RECIPES["evolution"]), on(1))
    for call in (lambda: trainer.evaluate(data()), lambda: trainer.fit(data(), steps=1, evals={"test": data()})):
        refused(call, "no loss_fn", "distloop.Evaluation(dataset, loss_fn=...)")
    with_metric = model_fn(RECIPES["evolution"], metrics={"auc": keras.metrics.AUC()})
    refused(with_metric, "metrics=['auc']", "no loss_fn")
    refused(model_fn(RECIPES["evolution"], batch_fn=lambda batch, training: batch), "batch_fn", "no loss_fn")
    make = lambda: distloop.Trainer(model_fn(RECIPES["evolution"]), on(1, recompute="dense"))  # noqa: E731
    refused(make, "recompute='dense'", "a step_fn and no loss_fn", "leave recompute out")
    evaluation = distloop.Evaluation(data(), loss_fn=lambda batch, training: {"error": batch["y"][:, 0]})
    numbers = trainer.fit(data(), steps=1, evals={"test": evaluation})
    assert np.isfinite(numbers["test/error"])


def apart(given, **arguments):
    """A model_fn whose step_fn or gradient_fn returns other gradients on each replica."""

    def make():
        net = make_net()

        def step_fn(step):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(net(step.batch["x"][:, 0]) ** 2)
            step.report("loss", loss, 1.0)
            return dict(zip(step.weights, tape.gradient(loss, net.trainable_variables), strict=True))

        def gradient_fn(gradients):
            replica = tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group, tf.float32)
            return {path: gradient + replica for path, gradient in gradients.items()}

        own = {"step_fn": step_fn}
        if given == "gradient_fn":
            loss_fn = lambda batch, training: {"loss": net(batch["x"][:, 0])[:, 0]}  # noqa: E731
            own = {"loss_fn": loss_fn, "gradient_fn": gradient_fn}
        return distloop.ModelSpec(net, keras.optimizers.SGD(**arguments), **own)

    return make


@pytest.mark.parametrize("given", mostly_wide(["step_fn", "gradient_fn"]))
def test_gradients_that_differ_between_replicas_end_the_run_at_a_boundary(given, tmp_path):
    warmup = distloop.make_schedule(0.1, steps=20, warmup=5)  # whose first step changes no weight
    config = on(2, workdir=str(tmp_path), checkpoint_every=1)
    trainer = distloop.Trainer(apart(given, learning_rate=warmup), config)
    parts = ["At step ", "model/net/line/kernel", "of replica 1 of worker 0 differs", "step.sum(gradients)"]
    refused(lambda: trainer.fit(data(), steps=20), *parts, kind=ReplicasDifferError)
    assert [path.name for path in (tmp_path / "checkpoints").glob("[0-9]")] == ["1"]  # when all was equal


def reporting(number):
    """A recipe that reports a function of the step without a weight, and trains by a gradient of 0."""

    def make(net):
        def step_fn(step):
            step.report("loss", number(step))
            return {path: tf.zeros_like(weight) for path, weight in step.weights.items()}

        return step_fn

    return make


REPORTS = {
    "a mean of each replica's rows": lambda step: tf.reduce_mean(step.batch["x"]),
    "opposite numbers": lambda step: (
        2.0 * tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group, tf.float32) - 1.0
    ),
}


@pytest.mark.parametrize("kind", REPORTS)
def test_a_report_without_a_weight_that_differs_ends_the_run(kind, tmp_path):
    trainer = distloop.Trainer(model_fn(reporting(REPORTS[kind])), on(2, workdir=str(tmp_path)))
    sentence = ["'loss' without a weight, and it differs between replicas", "step.report('loss', total, count)"]
    refused(lambda: trainer.fit(data(), steps=3), *sentence)
    distloop.Trainer(model_fn(reporting(REPORTS[kind])), on(1)).fit(data(), steps=3)


def test_a_report_without_a_weight_is_the_number_of_all_replicas():
    mean = lambda step: tf.math.divide(*step.sum((tf.reduce_sum(step.batch["x"]), float(SIZE))))  # noqa: E731
    numbers = [train(reporting(mean), replicas, steps=1)[1]["loss"] * replicas for replicas in (1, 3)]
    assert numbers[0] == pytest.approx(numbers[1], rel=1e-5)
    assert train(reporting(lambda step: 0.0), 3)[1]["loss"] == 0.0
    with pytest.raises(FloatingPointError, match="loss is nan"):
        train(reporting(lambda step: np.nan), 3)


@pytest.mark.parametrize("on_divergence", ["none", "rollback"])
def test_the_first_number_that_is_reported_is_watched_without_a_loss(on_divergence, tmp_path):
    def recipe(net):
        def step_fn(step):
            step.report("reward", tf.reduce_sum(step.batch["y"]), tf.cast(tf.shape(step.batch["y"])[0], tf.float32))
            return {path: tf.zeros_like(weight) for path, weight in step.weights.items()}

        return step_fn

    rows = {"y": np.ones(32, np.float32)}
    rows["y"][10] = np.nan  # in the second batch of four
    settings = {"workdir": str(tmp_path), "on_divergence": on_divergence, "checkpoint_every": 1}
    trainer = distloop.Trainer(model_fn(recipe), on(1, **settings))
    if on_divergence == "none":
        with pytest.raises(FloatingPointError, match="reward is nan"):
            trainer.fit(distloop.make_dataset(rows, 8), steps=3)
    else:
        assert trainer.fit(distloop.make_dataset(rows, 8), steps=3)["reward"] == 1.0 and trainer.step == 3


def test_a_sum_takes_counts_beside_floating_point_numbers():
    def total(step):
        numbers = [tf.ones([2]), tf.shape(step.batch["x"])[0], tf.ones([], tf.float64), tf.constant(1)]
        return tf.add_n([tf.reduce_sum(tf.cast(number, tf.float32)) for number in step.sum(numbers)])

    assert train(reporting(total), 2, steps=1)[1]["loss"] == 4 + 8 + 2 + 2  # a batch has 8 rows


def test_the_gradients_of_one_replica_need_no_sum():
    distloop.Trainer(apart("step_fn", learning_rate=0.01), on(1)).fit(data(), steps=3)

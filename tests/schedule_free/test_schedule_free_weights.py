"""Schedule-free optimizers train at y, and are evaluated, predicted, exported and returned at x of NumPy."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import distloop
from tests import forked
from tests.problems import assert_equal, classifier, everything, json_lines, mostly_wide, on, weights
from tests.problems import batches as rows_of_classes

pytestmark = pytest.mark.skipif(not hasattr(keras.optimizers, "ScheduleFreeAdamW"), reason="newer than this Keras")

RNG = np.random.default_rng(3)
X = RNG.normal(size=(37, 5)).astype(np.float32)
Y = (X @ RNG.normal(size=(5, 1)) + 0.1 * RNG.normal(size=(37, 1))).astype(np.float32)
START = RNG.normal(size=(5, 1)).astype(np.float32)
SIZE, STEPS, WARMUP = 12, 11, 6
RATE, BETA_1, BETA_2, EPSILON = 0.05, 0.9, 0.99, 1e-8


def by_numpy(steps=STEPS, beta_1=BETA_1, decay=0.0, factor=1.0, start=START):
    """Returns y and x after each step, by algorithm 1 of arXiv:2405.15682, in float64."""
    x = z = y = start.astype(np.float64)
    v, sum_of_squares = np.zeros_like(x), 0.0
    history = []
    batches = [np.arange(first, min(first + SIZE, len(X))) for first in range(0, len(X), SIZE)]
    for t in range(1, steps + 1):
        rows = batches[(t - 1) % len(batches)]
        gradient = 2 / len(rows) * X[rows].T.astype(np.float64) @ (X[rows] @ y - Y[rows])
        rate = factor * RATE * min(1.0, t / WARMUP)
        v = BETA_2 * v + (1 - BETA_2) * gradient**2
        z = z - rate * (gradient / (np.sqrt(v / (1 - BETA_2**t)) + EPSILON) + decay * y)
        sum_of_squares += rate**2
        c = rate**2 / sum_of_squares
        x = (1 - c) * x + c * z
        y = (1 - beta_1) * z + beta_1 * x
        history.append((y, x))
    return history


def loss_of(w):
    return float(np.mean((X @ w - Y) ** 2))


def regression(**settings):
    def model_fn():
        model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1, use_bias=False)], name="net")
        model.set_weights([START])
        given = {"beta_1": BETA_1, "beta_2": BETA_2, "epsilon": EPSILON, "warmup_steps": WARMUP, **settings}
        return distloop.supervised(model, "mse", keras.optimizers.ScheduleFreeAdamW(RATE, **given))

    return model_fn


def data():
    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(SIZE)


TOPOLOGIES = [
    (1, {}),
    (2, {}),
    (3, {"microbatches": 2}),
    (2, {"shard_optimizer": True}),
    (2, {"virtual_replicas": 4}),
    (1, {"steps_per_loop": 3, "jit_compile": "pass"}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("replicas", "settings"), mostly_wide(TOPOLOGIES, TOPOLOGIES[3]))
def test_evaluations_and_predictions_are_at_x(replicas, settings, tmp_path):
    expected = by_numpy()
    trainer = distloop.Trainer(regression(), on(replicas, workdir=str(tmp_path), eval_every=1, **settings))
    trainer.fit(data(), steps=STEPS, evals={"test": data()})
    evaluated = [row["test/loss"] for row in json_lines(tmp_path / "metrics.jsonl") if "test/loss" in row]
    np.testing.assert_allclose(evaluated, [loss_of(x) for _, x in expected], rtol=2e-5)
    y, x = expected[-1]
    assert abs(loss_of(y) - loss_of(x)) > 1e-3 * loss_of(x)  # else nothing is shown
    np.testing.assert_allclose(trainer.model.get_weights()[0], y, rtol=1e-5)
    np.testing.assert_allclose(trainer.predict(data()), X @ x, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(trainer.evaluate(data())["loss"], loss_of(x), rtol=2e-5)
    with trainer.state.averaged():
        np.testing.assert_allclose(trainer.model.get_weights()[0], x, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "stops"),
    mostly_wide(
        [
            ({"shard_optimizer": True}, (1, 2, 5, 7)),
            *((settings, range(1, 8)) for settings in ({}, {"shard_optimizer": True}, {"precision": "mixed_float16"})),
        ]
    ),
)
def test_looking_at_x_changes_no_bit_and_a_run_resumes_at_any_step(settings, stops, tmp_path):
    def make(**more):
        optimizer = lambda: keras.optimizers.ScheduleFreeAdamW(0.01, warmup_steps=4)  # noqa: E731
        return distloop.Trainer(classifier(optimizer=optimizer, dropout=0.2), on(2, **settings, **more))

    unseen = make()
    unseen.fit(rows_of_classes(), steps=7)
    losses = []
    for step in stops:
        trainer = make(workdir=str(tmp_path), eval_every=1)
        losses.append(trainer.fit(rows_of_classes(), steps=step, evals={"test": rows_of_classes()})["test/loss"])
        assert trainer.evaluate(rows_of_classes())["loss"] == losses[-1]
    assert_equal(everything(trainer), everything(unseen))
    restored = make()
    restored.restore(str(tmp_path))
    assert restored.evaluate(rows_of_classes())["loss"] == losses[-1] != losses[-2]


@pytest.mark.slow
def test_the_best_checkpoint_and_its_export_have_the_x_that_was_best(tmp_path):
    workdir = str(tmp_path / "run")
    trainer = distloop.Trainer(regression(), on(2, workdir=workdir, eval_every=1))
    trainer.fit(data(), steps=STEPS, evals={"test": data()}, actions=[distloop.SaveBest("test/loss")])
    losses = [loss_of(x) for _, x in by_numpy()]
    best = int(np.argmin(losses))
    trainer.restore("best")
    assert int(trainer.step) == best + 1
    np.testing.assert_allclose(trainer.evaluate(data())["loss"], losses[best], rtol=2e-5)
    trainer.export(str(tmp_path / "export"))
    trainer.export(str(tmp_path / "model.keras"))
    x = by_numpy()[best][1]
    (exported,) = tf.saved_model.load(str(tmp_path / "export")).signatures["serving_default"](tf.constant(X)).values()
    np.testing.assert_allclose(exported, X @ x, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(keras.models.load_model(tmp_path / "model.keras").get_weights()[0], x, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("is_sharded", mostly_wide([True, False]))
def test_fine_tuning_begins_at_x_from_an_export_and_at_y_from_a_run(is_sharded, tmp_path):
    trainer = distloop.Trainer(regression(), on(2, workdir=str(tmp_path / "run")))
    trainer.fit(data(), steps=STEPS)
    trainer.export(path := str(tmp_path / "x.npz"))
    y, x = by_numpy()[-1]
    for source, start in ((path, x), (str(tmp_path / "run"), y)):
        tuned = distloop.Trainer(regression(), on(2, init_from=source, shard_optimizer=is_sharded))
        tuned.fit(data(), steps=2)
        expected, evaluated = by_numpy(2, start=start)[-1]
        np.testing.assert_allclose(tuned.model.get_weights()[0], expected, rtol=1e-5)
        np.testing.assert_allclose(tuned.evaluate(data())["loss"], loss_of(evaluated), rtol=2e-5)


@pytest.mark.slow
def test_before_the_first_step_x_is_y_to_the_bit():
    trainer = distloop.Trainer(classifier(optimizer=keras.optimizers.ScheduleFreeAdamW), on(1))
    with trainer.state.averaged():
        seen = weights(trainer)
    assert_equal(seen, weights(trainer))


class SetsWeights(distloop.Action):
    """Sets the weights of the model when the run begins."""

    every, value = None, START - 2.0

    def on_start(self, report):
        report.state.model.set_weights([self.value])

    def __call__(self, report):
        pass


@pytest.mark.slow
@pytest.mark.parametrize(("replicas", "settings"), mostly_wide(TOPOLOGIES, *TOPOLOGIES[:2], *TOPOLOGIES[3:5]))
def test_a_run_begins_at_weights_that_were_set_before_its_first_step(replicas, settings):
    for start, actions in ((START + 3.0, []), (SetsWeights.value, [SetsWeights()])):
        trainer = distloop.Trainer(regression(), on(replicas, **settings))
        trainer.model.set_weights([START + 3.0])
        assert trainer.evaluate(data())["loss"] == pytest.approx(loss_of(START + 3.0), rel=2e-5)
        trainer.fit(data(), steps=3, actions=actions)
        y, x = by_numpy(3, start=start)[-1]
        np.testing.assert_allclose(trainer.model.get_weights()[0], y, rtol=1e-5)
        assert trainer.evaluate(data())["loss"] == pytest.approx(loss_of(x), rel=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("replicas", mostly_wide([2, 1]))
def test_from_keras_trains_from_x_and_returns_x(replicas):
    def build():
        model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1, use_bias=False)])
        model.set_weights([START])
        settings = {"beta_1": BETA_1, "beta_2": BETA_2, "epsilon": EPSILON, "warmup_steps": WARMUP}
        model.compile(keras.optimizers.ScheduleFreeAdamW(RATE, **settings), "mse")
        return model

    model = build()
    trainer = distloop.Trainer(distloop.from_keras(model), on(replicas))
    trainer.fit(data(), epochs=2)
    y, x = by_numpy(steps=8)[-1]
    np.testing.assert_allclose(trainer.model.get_weights()[0], y, rtol=1e-5)
    np.testing.assert_allclose(model.get_weights()[0], x, rtol=1e-5)
    loss = trainer.evaluate(data())["loss"]
    assert model.evaluate(X, Y, verbose=0) == pytest.approx(loss, rel=1e-5) == pytest.approx(loss_of(x), rel=2e-5)
    model.fit(data(), epochs=1, verbose=0)  # by Keras, whose model has its average
    again = distloop.Trainer(distloop.from_keras(model), on(replicas))
    assert again.evaluate(data())["loss"] == pytest.approx(model.evaluate(X, Y, verbose=0), rel=1e-5)
    assert int(again.optimizer.iterations.numpy()) == 12
    model.optimizer.learning_rate = 0.0
    third = distloop.Trainer(distloop.from_keras(model), on(replicas))
    third.model.set_weights([START])
    assert third.evaluate(data())["loss"] == pytest.approx(loss_of(START), rel=2e-5)
    third.fit(data(), steps=1)
    np.testing.assert_array_equal(third.model.get_weights()[0], START)
    assert third.evaluate(data())["loss"] == pytest.approx(loss_of(START), rel=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("settings", mostly_wide([{"shard_optimizer": True}, {}]))
def test_weight_decay_and_factors_of_the_learning_rate_are_in_the_step(settings):
    for more in ({"learning_rates": {"kernel": 0.5}}, {"no_decay": "kernel"}, {}):

        def model_fn(more=more):
            spec = regression(weight_decay=0.3, beta_1=0.7)()
            return distloop.ModelSpec(spec.model, spec.optimizer, spec.loss_fn, **more)

        trainer = distloop.Trainer(model_fn, on(2, **settings))
        trainer.fit(data(), steps=5)
        rate, decay = (0.5 if "learning_rates" in more else 1.0), (0.0 if "no_decay" in more else 0.3)
        y, x = by_numpy(5, 0.7, decay, rate)[-1]
        np.testing.assert_allclose(trainer.model.get_weights()[0], y, rtol=1e-5)
        np.testing.assert_allclose(trainer.evaluate(data())["loss"], loss_of(x), rtol=2e-5)


@pytest.mark.slow
def test_where_y_is_x_the_rule_is_that_of_keras():
    model, twin = (keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)]) for _ in range(2))
    twin.set_weights(model.get_weights())
    for one in (model, twin):
        one.compile(keras.optimizers.ScheduleFreeAdamW(RATE, beta_1=1.0), "mse")
        one.optimizer.build(one.trainable_variables)  # Keras's fit would begin z at 0, in a graph
    twin.fit(data(), epochs=2, verbose=0)
    distloop.Trainer(distloop.from_keras(model), on(1)).fit(data(), epochs=2)
    for a, b in zip(model.get_weights(), twin.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)


class OfMine(getattr(keras.optimizers, "ScheduleFreeAdamW", object)):
    def update_step(self, gradient, variable, learning_rate):
        z = self._momentums[self._get_variable_index(variable)]
        self.assign(z, z - learning_rate * gradient)
        self.assign(variable, z)  # x = y = z


def test_a_rule_of_the_users_stays():
    def model_fn():
        spec = regression()()
        return distloop.ModelSpec(spec.model, OfMine(0.1), spec.loss_fn)

    trainer = distloop.Trainer(model_fn, on(1))
    trainer.fit(data(), steps=1)
    first = START - 0.1 * 2 / SIZE * X[:SIZE].T @ (X[:SIZE] @ START - Y[:SIZE])
    np.testing.assert_allclose(trainer.model.get_weights()[0], first, rtol=1e-5)


def refused(model_fn, sentence, **settings):
    with pytest.raises(ValueError, match=sentence):
        distloop.Trainer(model_fn, on(1, **settings))


@pytest.mark.parametrize("setting", [{"average_decay": 0.99}, {"average_from": "75 %"}])
def test_a_second_average_is_refused(setting):
    refused(regression(), "ScheduleFreeAdamW, whose weights for evaluation are an average already: leave", **setting)


def test_what_has_no_x_is_refused():
    def without_interpolation():
        model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)])
        return distloop.supervised(model, "mse", keras.optimizers.ScheduleFreeAdamW(beta_1=0.0))

    def of_two_optimizers():
        model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)])
        loss_fn = distloop.supervised(model, "mse", keras.optimizers.SGD()).loss_fn
        optimizers = {"a": keras.optimizers.SGD(), "b": keras.optimizers.ScheduleFreeAdamW()}
        return distloop.ModelSpec(model, updates=[distloop.Update(n, loss_fn, o, ".") for n, o in optimizers.items()])

    refused(without_interpolation, r"ScheduleFreeAdamW\(beta_1=0.0\) was given, which leaves no x in y: give 0.9")
    refused(
        of_two_optimizers, "Two updates train 'kernel' by optimizers of their own, and ScheduleFreeAdamW, which one"
    )


def on_a_worker(is_sharded):
    """Returns y, x and the evaluation of a run of several workers; each computes them."""
    config = distloop.Config(device="cpu", log_every=0, shard_optimizer=is_sharded)
    trainer = distloop.Trainer(regression(), config)
    trainer.fit(data(), steps=STEPS)
    with trainer.state.averaged():
        x = np.copy(trainer.model.get_weights()[0])
    return trainer.model.get_weights()[0], x, trainer.evaluate(data())["loss"]


@pytest.mark.slow
@pytest.mark.parametrize("is_sharded", mostly_wide([False, True], True))
def test_every_worker_evaluates_at_x(is_sharded):
    for y, x, loss in forked.run_in_workers(on_a_worker, 2, is_sharded, devices_per_worker=2):
        for found, expected in zip((y, x), by_numpy()[-1], strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-5)
        assert loss == pytest.approx(loss_of(x), rel=2e-5)

"""An error saves, but only a finished step: the run goes on from there, or from the checkpoint before."""

import contextlib
import os

import keras
import numpy as np
import pytest
import tensorflow as tf

import distloop
from distloop.checkpoints.store import in_workdir
from tests.problems import (
    assert_equal,
    classification,
    classifier,
    cross_entropy,
    every,
    everything,
    json_lines,
    mostly_wide,
    on,
    weights,
)

STEPS = 12


def data(fail_at=None):
    """Batches from Python, of which one raises an error."""
    rows = classification(64)

    def batches():
        for i in range(0, 64, 8):
            if fail_at is not None and i == 8 * fail_at:
                raise OSError("the disk of the data is gone")
            yield {name: np.asarray(value)[i : i + 8] for name, value in rows.items()}

    return batches


def settings(workdir, **changes):
    return on(1, **{"workdir": str(workdir), "log_every": 2, "steps": STEPS, "checkpoint_every": 0, **changes})


def failing_at(step, error):
    """An action that fails at a step until it is told not to."""

    def act(report):
        if report.step == step and act.fails:
            raise error

    act.fails = True
    return every(1, act)


def fit(workdir, data, actions=(), **changes):
    trainer = distloop.Trainer(classifier(), settings(workdir, **changes))
    trainer.fit(data, actions=actions)
    return weights(trainer)


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("straight")
    return fit(workdir, data(), [every(1, lambda report: None)]), rows_of(workdir)


def rows_of(workdir):
    return {row["step"]: row["loss"] for row in json_lines(workdir / "metrics.jsonl") if row["step"] % 2 == 0}


KINDS = {"an error": RuntimeError("mine"), "Ctrl-C": KeyboardInterrupt()}
ERRORS = [pytest.param(step, error, id=f"{kind}-{step}") for step in (5, STEPS) for kind, error in KINDS.items()]


@pytest.mark.parametrize(("step", "error"), mostly_wide(ERRORS, ERRORS[0], ERRORS[-1]))
def test_an_action_that_fails_loses_no_step_and_no_row(tmp_path, expected, capsys, step, error):
    action = failing_at(step, error)
    with pytest.raises(type(error)):
        fit(tmp_path, data(), [action])
    assert in_workdir(str(tmp_path)).steps == [step]
    assert f"{type(error).__name__} at step {step}, checkpoint saved" in capsys.readouterr().out
    action.fails = False
    assert_equal(fit(tmp_path, data(), [action]), expected[0])
    assert rows_of(tmp_path) == expected[1]


def test_data_that_fails_in_the_middle_of_a_loop_loses_no_step(tmp_path, expected):
    with pytest.raises(Exception, match="the disk of the data is gone"):
        fit(tmp_path, data(fail_at=5))
    assert in_workdir(str(tmp_path)).steps == [5]
    assert_equal(fit(tmp_path, data()), expected[0])


def test_after_data_that_fails_tokens_are_known_and_examples_are_not(tmp_path):
    rate = distloop.make_schedule(0.1, "96 tokens")  # each example counts as one
    make = classifier(optimizer=lambda: keras.optimizers.SGD(rate))
    rows = []
    for name, fail_at in (("straight", None), ("failed", 5), ("failed", None)):
        with contextlib.suppress(OSError, ValueError):
            distloop.Trainer(make, settings(tmp_path / name)).fit(data(fail_at))
        rows.append({row["step"]: row for row in json_lines(tmp_path / name / "metrics.jsonl")})
    rates = [row["learning_rate"] for row in rows[2].values()]
    assert len(rates) > 2 and rates == [rows[0][step]["learning_rate"] for step in rows[2]]
    assert rows[0][STEPS]["examples_seen"] == 8 * STEPS and "examples_seen" not in rows[2][STEPS]


@pytest.mark.parametrize("error", [None, RuntimeError("mine")])
def test_a_step_that_is_not_finite_is_not_saved_and_the_last_save_stays(tmp_path, capsys, error):
    rows, write = classification(64), failing_at(5, error)
    rows["x"][40] = np.nan  # of step 6, which is done when a writer gets the numbers of step 5
    write.every, write.only_writes, write.fails = None, True, error is not None
    trainer = distloop.Trainer(classifier(), settings(tmp_path, checkpoint_every=4, log_every=1))
    with pytest.raises(RuntimeError if error else FloatingPointError):
        trainer.fit(distloop.make_dataset(rows, 8), actions=[write])
    assert "Nothing is saved, as a step failed after step 6; the checkpoint of step 4 stays." in capsys.readouterr().out
    with pytest.raises(ValueError, match="The last step failed, .*: call restore or fit first"):
        trainer.save()
    assert in_workdir(str(tmp_path)).steps == [4]


def test_an_error_before_the_first_step_or_that_cannot_be_saved_says_so(tmp_path, capsys, monkeypatch):
    with pytest.raises(OSError, match="gone"):
        fit(tmp_path / "a", data(fail_at=0))
    assert in_workdir(str(tmp_path / "a")).steps == []

    def no_space(*_, **__):
        raise OSError(28, "No space left on device")

    def fill(report):
        monkeypatch.setattr("distloop.checkpoints.store.write_files", no_space)
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        fit(tmp_path / "b", data(), [every(3, fill)])
    assert "RuntimeError at step 3, which could not be saved (" in capsys.readouterr().out


def test_an_error_in_an_eager_step_saves_nothing_and_one_in_its_data_does(tmp_path):
    def model_fn():
        spec = classifier()()

        def loss_fn(batch, training):
            if tf.executing_eagerly() and training and int(spec.optimizer.iterations.numpy()) == 3:
                raise RuntimeError(f"in process {os.getpid()}")
            return spec.loss_fn(batch, training)

        return distloop.ModelSpec(spec.model, spec.optimizer, loss_fn)

    with pytest.raises(RuntimeError, match="in process"):
        distloop.Trainer(model_fn, settings(tmp_path / "a", eager=True)).fit(data())
    assert in_workdir(str(tmp_path / "a")).steps == []
    with pytest.raises(Exception, match="the disk of the data is gone"):
        distloop.Trainer(model_fn, settings(tmp_path / "b", eager=True)).fit(data(fail_at=2))
    assert in_workdir(str(tmp_path / "b")).steps == [2]


class Counter(keras.layers.Layer):
    """Counts its calls, which no batch goes into."""

    def build(self, shape):
        self.calls = self.add_weight(shape=(), initializer="zeros", trainable=False, name="calls")

    def call(self, x):
        self.calls.assign_add(1.0)
        return x


class OnceFailing:
    """A model whose operation, in a place of the step, fails on a batch of some number while `fails` is true."""

    def __init__(self, place, number=5):
        self.place, self.number, self.fails, self.calls = place, number, True, lambda: 0

    def check(self, value, number, calls):
        if self.fails and np.any(number == self.number):
            raise OSError("the share did not answer")
        return value

    def maybe(self, place, value, batch):
        """Returns a tensor by an operation that may fail, if it is in this place."""
        if place != self.place:
            return value
        inputs = [tf.stop_gradient(value), batch["number"], self.calls()]  # so that the step has written
        checked = tf.numpy_function(self.check, inputs, value.dtype)
        return value + 0.0 * tf.ensure_shape(checked, value.shape)

    def __call__(self):
        head = keras.Sequential([keras.Input([8]), keras.layers.Dense(4, name="out")], name="head")
        layers = [keras.layers.BatchNormalization(name="norm"), keras.layers.Dropout(0.5, name="dropout")]
        layers = [keras.Input([8]), Counter(name="counter"), *layers, keras.layers.Dense(4, name="out")]
        body = keras.Sequential(layers, name="body")
        self.calls = lambda: tf.convert_to_tensor(body.get_layer("counter").calls)
        seen = {"moved": False}

        def first(batch, training):
            seen["batch"] = batch
            logits = self.maybe("the first update", body(batch["x"], training=training), batch)
            place = "an evaluation" if not training else "moved weights" if seen["moved"] else ""
            return {"loss": cross_entropy(batch["label"], self.maybe(place, logits, batch))}

        def second(batch, training):
            return {"loss": cross_entropy(batch["label"], self.maybe("the second update", head(batch["x"]), batch))}

        def applied(gradients):
            last = list(gradients)[-1]
            return {**gradients, last: self.maybe("an applied gradient", gradients[last], seen["batch"])}

        def with_moved_weights(step):
            with step.moved({path: 0.1 * gradient for path, gradient in step.gradients().items()}):
                seen["moved"] = True
                gradients = step.gradients()
                seen["moved"] = False
            return gradients

        updates = [
            distloop.Update("first", first, keras.optimizers.SGD(0.1), "^body/", step_fn=with_moved_weights),
            distloop.Update("second", second, keras.optimizers.Adam(0.1), "^head/", gradient_fn=applied),
        ]
        return distloop.ModelSpec({"body": body, "head": head}, updates=updates)


def numbered():
    rows = classification(64)
    return distloop.make_dataset({**rows, "number": np.arange(64) // 8}, 8)


def train_once_failing(workdir, model_fn, **changes):
    trainer = distloop.Trainer(model_fn, settings(workdir, checkpoint_every=4, average_decay=0.9, **changes))
    evals = {"test": numbered()} if model_fn.place == "an evaluation" else None
    trainer.fit(numbered(), evals=evals)
    return everything(trainer)


PLACES = ["the second update", "the first update", "moved weights", "an applied gradient", "an evaluation"]
CASES = [(place, 1) for place in PLACES] + [("the first update", 2), ("an applied gradient", 2)]


@pytest.mark.slow
@pytest.mark.parametrize(("place", "devices"), mostly_wide(CASES, ("moved weights", 1)))
def test_of_a_step_that_fails_within_nothing_is_saved(tmp_path, capsys, place, devices):
    model_fn = OnceFailing(place)
    with pytest.raises(tf.errors.OpError, match="the share did not answer"):
        train_once_failing(tmp_path / "failed", model_fn, num_devices=devices)
    assert in_workdir(str(tmp_path / "failed")).steps == ([4, 8] if place == "an evaluation" else [4])
    assert "Nothing is saved, as a step failed after step " in capsys.readouterr().out
    model_fn.fails = False
    expected = train_once_failing(tmp_path / "straight", model_fn, num_devices=devices)
    assert_equal(train_once_failing(tmp_path / "failed", model_fn, num_devices=devices), expected)


@pytest.mark.slow
@pytest.mark.parametrize("devices", mostly_wide([1, 2]))
def test_data_that_fails_leaves_random_streams_and_counts_as_they_were(tmp_path, devices):
    model_fn = OnceFailing("the data")

    def checked(batch):
        return {**batch, "x": tf.ensure_shape(model_fn.maybe("the data", batch["x"], batch), [None, 8])}

    failed, straight = (distloop.Trainer(model_fn, settings(tmp_path / name, num_devices=devices)) for name in "ab")
    model_fn.calls = lambda: 0
    with pytest.raises(tf.errors.OpError, match="the share did not answer"):
        failed.fit(numbered().map(checked))
    assert in_workdir(str(tmp_path / "a")).steps == [5]
    straight.fit(numbered(), steps=5)
    assert_equal(everything(failed), everything(straight))


@pytest.mark.slow
def test_after_an_error_within_a_step_the_same_trainer_goes_back(tmp_path, capsys):
    model_fn = OnceFailing("the second update")
    trainer = distloop.Trainer(model_fn, settings(tmp_path / "a"))
    with pytest.raises(tf.errors.OpError):
        trainer.fit(numbered())
    with pytest.raises(ValueError, match="The last step failed, .*: call restore or fit first"):
        trainer.save()
    with pytest.raises(ValueError, match="The last step failed, .*, and there is no checkpoint"):
        trainer.fit(numbered())
    trainer = distloop.Trainer(model_fn, settings(tmp_path / "b", checkpoint_every=4))
    with pytest.raises(tf.errors.OpError):
        trainer.fit(numbered())
    model_fn.fails = False
    trainer.fit(numbered())
    assert "step 4 restored from" in capsys.readouterr().out
    assert in_workdir(str(tmp_path / "b")).steps == [4, 8, 12]

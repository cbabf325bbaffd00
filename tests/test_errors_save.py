"""An error saves: whatever ends `fit` leaves a checkpoint of the last whole step, from which the run goes on."""

import os

import numpy as np
import pytest
import tensorflow as tf

import distloop
from distloop.checkpoints.store import in_workdir
from tests.problems import assert_equal, classification, classifier, every, json_lines, mostly_wide, on, weights

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
    return fit(workdir, data()), rows_of(workdir)


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


def test_a_step_that_is_not_finite_is_not_saved_and_the_checkpoint_before_it_stays(tmp_path, capsys):
    rows = classification(64)
    rows["x"][40] = np.nan  # of step 6
    with pytest.raises(FloatingPointError):
        fit(tmp_path, distloop.make_dataset(rows, 8), checkpoint_every=4)
    assert in_workdir(str(tmp_path)).steps == [4]
    assert "Nothing is saved after step 6, which failed: the last checkpoint stays." in capsys.readouterr().out


def test_an_error_before_the_first_step_and_one_that_cannot_be_saved_say_so(tmp_path, capsys, monkeypatch):
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


def test_eager_steps_save_too(tmp_path):
    def model_fn():
        spec = classifier()()

        def loss_fn(batch, training):
            if tf.executing_eagerly() and training and int(spec.optimizer.iterations.numpy()) == 3:
                raise RuntimeError(f"in process {os.getpid()}")
            return spec.loss_fn(batch, training)

        return distloop.ModelSpec(spec.model, spec.optimizer, loss_fn)

    with pytest.raises(RuntimeError, match="in process"):
        distloop.Trainer(model_fn, settings(tmp_path, eager=True)).fit(data())
    assert in_workdir(str(tmp_path)).steps == [3]

"""Several calls of `fit` in one workdir are one run; another model or other trained variables are refused."""

import functools
import signal

import keras
import numpy as np
import pytest

import distloop
from tests import forked
from tests.problems import assert_equal, batches, classifier, everything, mostly_wide, on, refused, rows_of, weights

pytestmark = pytest.mark.slow

PROGRAM = """
    import os, signal, sys
    import numpy as np
    import distloop
    from tests import problems

    workdir, replicas, when = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    config = distloop.Config(
        workdir=workdir, device="cpu", num_devices=replicas, log_every=4, checkpoint_every=3, average_decay=0.9,
    )
    distloop.prepare(config)

    def die(report):
        if str(report.step) == when:
            os.kill(os.getpid(), signal.SIGKILL)
    die.every = 1

    def numbered(rows, seed):
        return distloop.make_dataset(problems.classification(rows), 8, shuffle=True, seed=seed)

    first, second, test = numbered(67, 1), numbered(50, 3), numbered(20, 0)
    evals = {"test": distloop.Evaluation(test, every=2)}
    early = distloop.StopEarly("test/loss", mode="max", patience=9)
    trainer = distloop.Trainer(problems.classifier(dropout=0.5, batch_norm="local", metrics=True), config)
    trainer.fit(first, steps=6, evals=evals, actions=[die, distloop.SaveBest("test/loss", mode="max", restore=True)])
    if when == "between":
        os.kill(os.getpid(), signal.SIGKILL)
    numbers = trainer.fit(second, epochs=2, evals=evals, actions=[die, early])
    values = {"step": trainer.step, "seen": numbers["examples_seen"], **problems.everything(trainer)}
    np.savez(os.path.join(workdir, "end.npz"), **values)
"""


@pytest.fixture(scope="module")
def replicas(pytestconfig):
    return 2 if pytestconfig.getoption("wide") else 1


@pytest.fixture(scope="module")
def whole(tmp_path_factory, replicas):
    """The workdir of a program that was never killed."""
    workdir = tmp_path_factory.mktemp("whole")
    result = forked.run_program(workdir, PROGRAM, replicas, "")
    assert result.returncode == 0, result.stderr[-3000:]
    return workdir


@pytest.mark.parametrize("when", mostly_wide(["between 10", "2", "7", "8"]))
def test_a_program_of_two_fits_that_is_killed_ends_like_one_that_was_not(when, replicas, whole, tmp_path):
    for killed, code in (*((at, -signal.SIGKILL) for at in when.split()), ("", 0)):
        result = forked.run_program(tmp_path, PROGRAM, replicas, killed)
        assert result.returncode == code, result.stderr[-3000:]
    expected, actual = (dict(np.load(workdir / "end.npz")) for workdir in (whole, tmp_path))
    assert expected["step"] == 14 and actual["seen"] == 6 * 8 + 50 + 8
    assert_equal(actual, expected)
    assert rows_of(tmp_path) == rows_of(whole)


data = functools.partial(batches, 8, shuffle=True, seed=1)


def trainer_of(workdir, trainable=None, momentum=0.9, **settings):
    def model_fn():
        spec = classifier(dropout=0.5)()
        optimizer = keras.optimizers.SGD(0.1, momentum=momentum)
        return distloop.ModelSpec(spec.model, optimizer, spec.loss_fn, trainable=trainable)

    return distloop.Trainer(model_fn, on(1, workdir=str(workdir), **settings))


@pytest.mark.parametrize("same_trainer", [True, False])
def test_steps_and_then_epochs_are_one_run_whose_end_is_a_step(same_trainer, tmp_path):
    whole, trainer, dataset = trainer_of(tmp_path / "whole"), trainer_of(tmp_path / "parts"), data()
    whole.fit(data(), steps=18)
    trainer.fit(dataset, steps=10)
    trainer = trainer if same_trainer else trainer_of(tmp_path / "parts")
    trainer.fit(dataset if same_trainer else data(), epochs=2)
    assert trainer.step == 18  # of 9 batches an epoch
    assert_equal(everything(trainer), everything(whole))


@pytest.mark.parametrize("momentum", [0.9, 0.0])
def test_other_trained_variables_are_refused_with_what_to_do(momentum, tmp_path):
    trainer_of(tmp_path, "logits", momentum).fit(data(), steps=4)
    for steps in (4, 9):
        call = lambda steps=steps: trainer_of(tmp_path, momentum=momentum).fit(data(), steps=steps)  # noqa: E731
        refused(call, "is trained here alone", "nothing was restored", f"init_from='{tmp_path}/checkpoints/4'")


def test_data_of_a_second_fit_starts_at_its_beginning_in_a_replay_too(tmp_path, capsys):
    trainer, settings = None, dict(keep_checkpoints=9, checkpoint_every=2)
    for dataset, steps in ((data(), 4), (data(rows=50, seed=3), 7)):
        trainer = trainer or trainer_of(tmp_path, **settings)
        trainer.fit(dataset, steps=steps)
    assert trainer._train_source.batches_taken == 3
    again = trainer_of(tmp_path, **settings)
    replayed = again.replay(data(rows=50, seed=3), step=7, steps=7)
    assert not replayed.differences
    for path, value in weights(trainer).items():
        if "seed" not in path:
            np.testing.assert_array_equal(replayed.weights_after[path], value)
    sentence = "began other data at step 4, and has no checkpoint"
    refused(lambda: again.replay(data(rows=50, seed=3), step=5, steps=7), sentence)
    assert not trainer_of(tmp_path, **settings).replay(data(), step=4, steps=4).differences


def test_a_run_that_was_made_longer_is_replayed_from_before_that(tmp_path):
    for steps in (4, 7):
        trainer_of(tmp_path, checkpoint_every=3).fit(data(), steps=steps)
    assert not trainer_of(tmp_path).replay(data(), step=5, steps=7).differences


def test_a_fit_that_ends_before_the_checkpoint_says_so_and_saves_nothing(tmp_path, capsys):
    trainer = trainer_of(tmp_path)
    trainer.fit(data(), steps=4)
    trainer.fit(data(rows=50, seed=3), steps=7)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("checkpoints/*")}
    again = trainer_of(tmp_path, console="auto")
    again.fit(data(), steps=4)
    assert "Nothing to train: already at step 7, and the run ends at step 4" in capsys.readouterr().out
    assert before == {path: path.stat().st_mtime_ns for path in tmp_path.glob("checkpoints/*")}
    assert_equal(everything(again), everything(trainer))

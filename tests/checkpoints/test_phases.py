"""Training in phases: a program of several calls of `fit` goes on in the right one, wherever it was killed."""

import functools
import json
import signal

import keras
import numpy as np
import pytest

import distloop
from distloop.checkpoints import phases
from distloop.checkpoints.checkpoint import Saved
from distloop.checkpoints.phases import Phases
from distloop.settings.durations import Period
from tests import forked
from tests.problems import assert_equal, classification, classifier, everything, mostly_wide, on, rows_of, weights

pytestmark = pytest.mark.slow

PROGRAM = """
    import os, signal, sys
    import keras, numpy as np
    import distloop
    from tests import problems

    workdir, replicas, kind, when = sys.argv[1], int(sys.argv[2]), *sys.argv[3:]
    config = distloop.Config(
        workdir=workdir, device="cpu", num_devices=replicas, log_every=4, checkpoint_every=3, average_decay=0.9,
    )
    distloop.prepare(config)

    def model_fn(trainable, optimizer):
        spec = problems.classifier(dropout=0.5, batch_norm="local", metrics=True)()
        return distloop.ModelSpec(spec.model, optimizer, spec.loss_fn, metrics=spec.metrics, trainable=trainable)

    def die(report):
        if str(report.step) == when:
            os.kill(os.getpid(), signal.SIGKILL)
    die.every = 1

    def stop(report):
        if report.step == 5:
            raise distloop.StopTraining("it has seen enough")
    stop.every = 5

    def numbered(rows, seed):
        return distloop.make_dataset(problems.classification(rows), 8, shuffle=True, seed=seed)

    first, second, test = numbered(67, 1), numbered(50, 3), numbered(20, 0)
    early = distloop.StopEarly("test/loss", mode="max", patience=2)
    evals = {"test": distloop.Evaluation(test, every=2)}
    ends = [] if kind == "steps" else [stop] if kind == "stopped" else [early]
    steps = 6 if kind == "steps" else 14
    head = distloop.Trainer(lambda: model_fn("logits", keras.optimizers.Adam(0.01)), config)
    numbers = head.fit(first, steps=steps, evals=evals, actions=[*ends, die])
    if when == "between":
        os.kill(os.getpid(), signal.SIGKILL)
    ended = numbers["test/loss"]  # of the phase, whatever came after it
    if kind == "one trainer":
        tuned = head
        head.optimizer.learning_rate = 0.05
    else:
        rate = distloop.make_schedule(0.05, "100 %")
        tuned = distloop.Trainer(lambda: model_fn(None, keras.optimizers.Adam(rate)), config)
    numbers = tuned.fit(second, steps=14, evals=evals, actions=[die])
    values = {"number/ended": ended, "number/seen": numbers["examples_seen"], **problems.everything(tuned)}
    np.savez(os.path.join(workdir, "end.npz"), **values)
"""


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A function from a kind of program and a number of replicas to the workdir of one that was never killed."""

    @functools.cache
    def find(kind, replicas):
        workdir = tmp_path_factory.mktemp("whole")
        result = forked.run_program(workdir, PROGRAM, replicas, kind, "")
        assert result.returncode == 0, result.stderr[-3000:]
        return workdir

    return find


KINDS = ("one trainer", "early", "steps", "stopped")
TWICE = ("early", "between 10")  # between two phases, and again in the second one
CASES = [TWICE, *((kind, when) for kind in KINDS for when in ("2", "between", "7", "8", "10", "13"))]


@pytest.mark.parametrize("replicas", mostly_wide([1, 2], 2))
@pytest.mark.parametrize("kind, when", mostly_wide(CASES, TWICE))
def test_a_program_of_two_phases_that_is_killed_ends_bit_for_bit_like_one_that_was_not(
    kind, when, replicas, whole, tmp_path
):
    for killed, code in (*((at, -signal.SIGKILL) for at in when.split()), ("", 0)):
        result = forked.run_program(tmp_path, PROGRAM, replicas, kind, killed)
        assert result.returncode == code, result.stderr[-3000:]
    expected, actual = (dict(np.load(workdir / "end.npz")) for workdir in (whole(kind, replicas), tmp_path))
    assert_equal(actual, expected)
    assert rows_of(tmp_path) == rows_of(whole(kind, replicas))


def data(rows=67, seed=1):
    return distloop.make_dataset(classification(rows), 8, shuffle=True, seed=seed)


def trainer_of(workdir, trainable=None, rate=0.1, **settings):
    def model_fn():
        spec = classifier(dropout=0.5)()
        optimizer = keras.optimizers.SGD(rate, momentum=0.9)
        return distloop.ModelSpec(spec.model, optimizer, spec.loss_fn, trainable=trainable)

    return distloop.Trainer(model_fn, on(1, workdir=str(workdir), **{"average_decay": 0.9, **settings}))


@pytest.fixture(scope="module")
def two_phases(tmp_path_factory):
    """The workdir of a run of two phases: of the head until step 4, of all until step 7; and its second trainer."""
    workdir = tmp_path_factory.mktemp("two")
    trainer_of(workdir, "logits", keep_checkpoints=9, checkpoint_every=2).fit(data(), steps=4)
    tuned = trainer_of(workdir, rate=0.01, keep_checkpoints=9, checkpoint_every=2)
    tuned.fit(data(50, 3), steps=7)
    return workdir, tuned


def test_a_phase_of_other_variables_begins_with_the_weights_and_counts_and_an_optimizer_of_its_own(tmp_path):
    head = trainer_of(tmp_path, "logits")
    head.fit(data(), steps=4)
    ended = weights(head)
    tuned = trainer_of(tmp_path, rate=1e-9)
    tuned.fit(data(50, 3), steps=5)
    assert tuned.step == 5 and int(tuned.optimizer.iterations.numpy()) == 1
    for path, value in weights(tuned).items():
        if "seed" not in path:
            np.testing.assert_allclose(value, ended[path], atol=1e-6)
    assert len(tuned.optimizer.variables) > len(head.optimizer.variables)
    averages = [average.numpy() for _, average in tuned.state.average.pairs]
    for average, (variable, _) in zip(averages, tuned.state.average.pairs, strict=True):
        np.testing.assert_allclose(average, variable.numpy(), atol=1e-6)  # not those before, which were further behind
    assert tuned._train_source.batches_taken == 1


def test_a_fit_whose_phase_has_ended_says_so_returns_its_numbers_and_saves_nothing(two_phases, capsys):
    workdir, tuned = two_phases
    before = {path: path.stat().st_mtime_ns for path in workdir.glob("checkpoints/*")}
    head = trainer_of(workdir, "logits", console="auto")
    numbers = head.fit(data(), steps=4)
    assert "Phase 1 of this run has ended at step 4; phase 2 has begun, for a later fit" in capsys.readouterr().out
    rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    assert numbers["loss"] == next(row["loss"] for row in rows if row["step"] == 4)
    head.save()
    assert before == {path: path.stat().st_mtime_ns for path in workdir.glob("checkpoints/*")}
    assert_equal(weights(head), weights(tuned))  # the newest, to look at
    with head.state.averaged(), tuned.state.averaged():  # the average of what it trains
        assert_equal(*({n: v for n, v in weights(trainer).items() if "logits" in n} for trainer in (head, tuned)))


@pytest.mark.parametrize("is_older", [False, True])
def test_the_numbers_of_a_phase_come_back_from_notes_of_an_older_version_too(is_older, tmp_path):
    state = trainer_of(tmp_path).state
    first, second = Phases(state), Phases(state)
    first.enter(Period(4), None, 0, 0.0, 0.0)
    first.end(4, None, {"loss": 0.5})
    first.enter(Period(7), None, 4, 0.0, 0.0)
    notes = json.loads(json.dumps(first.notes()))
    (ended,) = notes["phases"]
    assert ended["reported"] == '{"loss": 0.5}'
    ended["reported"] = {"loss": 0.5} if is_older else ended["reported"]
    second.enter(Period(4), Saved("5", 5, {}, notes), 0, 0.0, 0.0)
    assert second.past["step"] == 4 and second.past["reported"] == {"loss": 0.5}


def test_other_variables_are_refused_before_the_phase_of_the_checkpoint_has_ended(tmp_path):
    def fail(report):
        raise RuntimeError("the action failed")

    fail.every = 4
    with pytest.raises(RuntimeError):
        trainer_of(tmp_path, "logits").fit(data(), steps=9, actions=[fail])
    tuned = trainer_of(tmp_path)
    with pytest.raises(ValueError, match="or let the fit that trains other variables end before this one[.]$"):
        tuned.fit(data(), steps=20)


def test_another_process_evaluates_the_checkpoints_of_all_phases(two_phases):
    workdir, tuned = two_phases
    measured = trainer_of(workdir).evaluate_checkpoints(data(20, 0), poll_secs=0.05, timeout_secs=60)
    assert [*measured] == [2, 4, 6, 7]
    assert measured[7]["loss"] == pytest.approx(tuned.evaluate(data(20, 0))["loss"], rel=1e-6)
    head = trainer_of("", "logits")
    head.restore(workdir / "checkpoints" / "2")
    assert measured[2]["loss"] == pytest.approx(head.evaluate(data(20, 0))["loss"], rel=1e-6)  # by its averages


def test_a_best_checkpoint_of_an_earlier_phase_is_restored_to_be_looked_at(tmp_path):
    best = distloop.SaveBest("loss", mode="max", restore=True)  # of the first step
    trainer_of(tmp_path, "logits", log_every=1).fit(data(), steps=3, actions=[best])
    tuned = trainer_of(tmp_path, log_every=1)
    tuned.fit(data(50, 3), steps=5, actions=[distloop.SaveBest("loss", mode="max", restore=True)])
    steps = json.loads((tmp_path / "checkpoints" / "best.json").read_text())["loss"]
    assert [tuned.step] == steps and tuned.step <= 3


@pytest.mark.parametrize("is_older", mostly_wide([True, False]))
def test_a_run_also_of_an_older_version_that_notes_no_phases_goes_on_in_the_data_of_its_second_fit(
    is_older, tmp_path, monkeypatch
):
    def program(workdir, *steps):
        trainer = trainer_of(workdir)
        trainer.fit(data(), steps=4)
        for until in steps:
            trainer.fit(second, steps=until)
        return everything(trainer)

    second = data(50, 3)
    expected = program(tmp_path / "whole", 11)
    with monkeypatch.context() as older:
        if is_older:  # by its steps, a `fit` is known to have ended
            older.setattr(phases.Phases, "notes", lambda self: {})
        program(tmp_path / "parts", 7)
    second = second.fresh()
    assert_equal(program(tmp_path / "parts", 11), expected)


def test_a_step_of_a_later_phase_is_replayed_from_a_checkpoint_of_that_phase(two_phases):
    workdir, tuned = two_phases
    trainer = trainer_of(workdir, rate=0.01)
    replayed = trainer.replay(data(50, 3), step=7, steps=7)
    assert not replayed.differences
    for path, value in weights(tuned).items():
        if "seed" not in path:
            np.testing.assert_array_equal(replayed.weights_after[path], value)
    with pytest.raises(ValueError, match="began a phase with other data, and has no checkpoint since"):
        trainer.replay(data(50, 3), step=5, steps=7)


def test_a_run_that_was_made_longer_is_replayed_across_its_phases(tmp_path):
    for steps in (4, 7):
        trainer_of(tmp_path, checkpoint_every=3).fit(data(), steps=steps)
    assert json.loads((tmp_path / "checkpoints" / "7" / "manifest.json").read_text())["notes"]["phases"]
    assert not trainer_of(tmp_path).replay(data(), step=5, steps=7).differences


def test_a_phase_of_other_variables_that_is_no_longer_than_the_one_before_trains_nothing(tmp_path, capsys):
    trainer_of(tmp_path, "logits").fit(data(), steps=4)
    tuned = trainer_of(tmp_path)
    tuned.fit(data(), steps=4)
    assert tuned.step == 4 and "Nothing to train" not in (out := capsys.readouterr().out) and "Already at step 4" in out

"""When a run exports, and which exports it keeps; tests/exports/test_export.py has the files of one."""

import os
import pathlib
import types

import pytest
import tensorflow as tf

import distloop
from distloop.exports.export_action import Export
from distloop.training.action import Report
from distloop.training.boundary import run_actions
from tests import problems
from tests.exports.export_trainers import dataset, make_trainer, serve

STATE = types.SimpleNamespace(strategy=tf.distribute.get_strategy(), spec=types.SimpleNamespace(predict_fn=len))


def write(path):
    """Stands in for `trainer.export`."""
    os.makedirs(path)
    pathlib.Path(path, "saved_model.pb").write_text("model")


def report(step, state=STATE, **metrics):
    return Report(step, 1000, metrics, state)


def run_at(action, *steps):
    for step in steps:
        run_actions([action], report(step))


def run_with(action, values):
    """Runs at steps with the values of a metric; None: there is none."""
    for step, value in values.items():
        run_actions([action], report(step, **({} if value is None else {"test/accuracy": value})))


def names_in(directory):
    return sorted(os.listdir(directory), key=lambda name: (len(name), name))


def test_the_last_exports_are_kept_and_nothing_else_is_touched(tmp_path):
    for name in ("notes", "7", "007"):
        (tmp_path / name).mkdir()  # no exports
    action = Export(write, tmp_path, every=10, keep=2)
    run_at(action, *range(5, 55, 5))
    assert names_in(tmp_path) == ["7", "40", "50", "007", "notes"]


def test_an_export_that_fails_is_logged_and_removes_no_older_one(tmp_path, caplog):
    def fail(path):
        raise OSError("disk full")

    Export(write, tmp_path, every=10, keep=1)(report(10))
    failing = Export(fail, tmp_path, every=10, keep=1)
    for step in (20, 30):
        failing(report(step))
    assert "The export of step 30 could not be written (disk full), number 2 of this run that failed" in caplog.text
    with pytest.raises(OSError, match="The last export to .* could not be written .disk full.: make room"):
        failing.on_end(report(30))
    failing.on_end(report(30))  # once
    Export(lambda path: None, tmp_path, every=10, keep=1)(report(20))  # as a dry run, which exports elsewhere
    assert os.listdir(tmp_path) == ["10"]


def test_after_a_best_export_that_failed_the_next_meets_the_last_complete(tmp_path):
    def write_unless_full(path):
        if path.endswith("20"):
            raise OSError("disk full")
        write(path)

    action = Export(write_unless_full, tmp_path, metric="test/accuracy", mode="max")
    run_with(action, {10: 0.5, 20: 0.9, 30: 0.7})
    action.on_end(report(30))  # the last one was written
    assert names_in(tmp_path) == ["10", "30"] and action.get_state()["best"] == 0.7


def test_with_a_metric_the_newest_export_is_the_best(tmp_path):
    action, goes_on = (Export(write, tmp_path, metric="test/accuracy", mode="max", keep=2) for _ in range(2))
    at_start = action.get_state()
    run_with(action, {10: 0.5, 20: None, 30: 0.4, 40: 0.7, 50: float("nan"), 60: 0.7})
    assert names_in(tmp_path) == ["10", "40"]
    goes_on.set_state(action.get_state())
    run_with(goes_on, {70: 0.6, 80: 0.8})
    assert names_in(tmp_path) == ["40", "80"]
    action.set_state(at_start)  # as a rollback to a checkpoint of before the first export does
    assert action.get_state()["best"] is None


def test_exports_of_another_run_are_named_when_the_run_starts_and_stay(tmp_path, caplog):
    for name in ("2", "15", "900"):
        write(tmp_path / name)
    action = Export(write, tmp_path, every=10, keep=1)
    action.on_start(report(5))
    assert "holds exports of later steps, up to 900, than this run's, 5" in caplog.text
    run_at(action, 10, 20)
    assert names_in(tmp_path) == ["2", "15", "20", "900"]
    assert [os.path.basename(path) for _, path, _ in action.run_files()] == ["20"]


def test_a_run_that_goes_on_removes_the_exports_that_its_state_names(tmp_path):
    write(tmp_path / "5")
    before, after = (Export(write, tmp_path, every=10, keep=2) for _ in range(2))
    run_at(before, 10, 20)
    after.set_state(before.get_state())
    run_at(after, 30)
    assert names_in(tmp_path) == ["5", "20", "30"]
    after.set_state({"best": None})  # of an older version
    assert after.written == []


def test_keras_files_are_numbered_and_a_directory_may_begin_with_a_tilde(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "models").mkdir()
    run_at(Export(lambda path: open(path, "w").close(), "~/models", every=10, keep=1, suffix=".keras"), 10, 20)
    assert os.listdir(tmp_path / "models") == ["20.keras"]


def test_mistakes_are_refused_before_the_first_step(tmp_path):
    with pytest.raises(ValueError, match="mode='best' was given to Export"):
        Export(write, tmp_path, metric="loss", mode="best")
    with pytest.raises(ValueError, match="every=5 and metric='loss': give one"):
        Export(write, tmp_path, every=5, metric="loss")
    with pytest.raises(ValueError, match="its first argument writes an export: give trainer.export"):
        Export(tmp_path, write)
    with pytest.raises(ValueError, match=r"^'\.h5' was given for an export; it is a .keras, .npz"):
        Export(write, tmp_path, suffix=".h5")
    state = types.SimpleNamespace(strategy=STATE.strategy, spec=types.SimpleNamespace(predict_fn=None))
    with pytest.raises(ValueError, match="ModelSpec has none"):
        Export(write, tmp_path).on_start(report(0, state=state))


@pytest.mark.slow
def test_a_run_exports_what_it_would_predict(tmp_path):
    trainer = make_trainer(workdir=str(tmp_path / "run"), average_decay=0.5, eval_every=2, console="quiet")
    export = distloop.Export(trainer.export, tmp_path / "models", metric="test/loss", keep=1)
    trainer.fit(dataset(), steps=2, evals={"test": dataset()}, actions=[export])
    outputs = serve(tmp_path / "models" / "2")["output"]
    tf.debugging.assert_near(outputs, trainer.predict(dataset()), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("suffix", ["", ".keras"])
def test_an_export_leaves_what_the_model_writes_as_it_was(suffix, tmp_path):
    trainer = problems.train(problems.counting_model, problems.on(2), problems.batches(8, 16), steps=2)
    before = problems.everything(trainer)
    trainer.export(tmp_path / f"model{suffix}")
    problems.assert_equal(problems.everything(trainer), before)

"""The dry run: everything once, and nothing left behind."""

import os

import pytest
import tensorflow as tf

import distloop
from distloop.diagnostics import dry_run
from distloop.training.saved_state import SavedState
from tests.problems import classification, classifier, on


def batches():
    return distloop.make_dataset(classification(), 16, shuffle=True)


def leave_the_workdir(path, replicas=1, **settings):
    return distloop.Trainer(
        classifier(), on(replicas, workdir=path / "run", fast_dev_run=True, epochs=1000, eval_every=1, **settings)
    )


@pytest.mark.slow
def test_everything_is_tried_once_and_printed(tmp_path, capsys):
    trainer = leave_the_workdir(tmp_path, 2, average_decay=0.9)
    metrics = trainer.fit(batches(), evals={"test": batches()}, actions=[distloop.SaveBest("test/accuracy")])
    printed = capsys.readouterr().out
    for part in ("step 1 trained", "restored: all", "predicted 16 rows with serving_default", "read the export back"):
        assert part in printed
    assert trainer.step == 1 and metrics["test/accuracy"] >= 0
    assert not os.listdir(tmp_path)


@pytest.mark.slow
def test_what_a_program_does_after_fit_still_works(tmp_path):
    trainer = leave_the_workdir(tmp_path)
    data = batches()
    trainer.fit(data, steps=1000)
    trainer.fit(data, steps=2000)
    trainer.save()
    trainer.restore()
    assert trainer.step == 2
    assert trainer.evaluate(data)["loss"] > 0
    assert trainer.predict(data).shape == (67, 4)  # whole: programs count its rows
    trainer.export(tmp_path / "model")
    trainer.export(tmp_path / "model.keras")
    assert not os.listdir(tmp_path)


def test_the_directory_goes_with_its_owner():
    owner = set()  # anything that can be referred to weakly
    directory = dry_run.settings(on(1, fast_dev_run=True), owner).workdir
    assert os.path.isdir(directory)
    del owner
    assert not os.path.exists(directory)


@pytest.mark.slow
def test_a_checkpoint_that_does_not_restore_everything_is_found(tmp_path, monkeypatch):
    original = SavedState.restore

    def forgetful(saved_state, values):
        weight = saved_state._state.model.trainable_variables[0]
        kept = tf.identity(weight)
        original(saved_state, values)
        weight.assign(kept)

    monkeypatch.setattr(SavedState, "restore", forgetful)
    with pytest.raises(RuntimeError, match="model/net/hidden/kernel came back from a checkpoint other"):
        leave_the_workdir(tmp_path, console="quiet").fit(batches())


@pytest.mark.slow
def test_a_model_without_predict_fn_is_not_predicted(tmp_path, capsys):
    def model_fn():
        spec = classifier()()
        return distloop.ModelSpec(spec.model, spec.optimizer, spec.loss_fn)

    settings = on(1, fast_dev_run=True, steps=5)
    distloop.Trainer(model_fn, settings).fit(batches())
    assert "ModelSpec has no predict_fn" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("has_evaluation", [False, True])
def test_a_predict_fn_that_reads_what_training_batches_lack_is_told(has_evaluation, capsys):
    def model_fn():
        spec = classifier()()
        predict_fn = lambda batch: spec.model(batch["inputs"], training=False)  # noqa: E731
        return distloop.ModelSpec(spec.model, spec.optimizer, spec.loss_fn, predict_fn=predict_fn)

    evals = {"test": batches().map(lambda rows: rows | {"inputs": rows["x"]})} if has_evaluation else {}
    distloop.Trainer(model_fn, on(1, fast_dev_run=True, steps=5)).fit(batches(), evals=evals)
    untried = (
        "not tried: serving_default and the export, as predict_fn takes no batch of fit's data (ValueError at test_dry_"
    )
    printed = capsys.readouterr().out
    assert (untried in printed) != has_evaluation and ("read the export back" in printed) == has_evaluation


def test_checkpoints_of_another_process_are_not_waited_for():
    with pytest.raises(ValueError, match="leave fast_dev_run out"):
        distloop.Trainer(classifier(), on(1, fast_dev_run=True)).evaluate_checkpoints(batches())

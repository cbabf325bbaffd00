"""What `fit` does in place of training; the dry run: everything once, and nothing left behind."""

import os

import keras
import numpy as np
import pytest
import tensorflow as tf

import distloop
from distloop.audit import tryouts
from distloop.audit.tuning import BatchTrial
from distloop.keras_models.fit_arguments import read_arguments
from distloop.model.saved_state import SavedState
from tests.keras_models import compiled_models
from tests.problems import batches, classification, classifier, mostly_wide, on

X, Y = (classification(16)[name] for name in ("x", "label"))


def weighted():
    """A model that is not built yet, for batches `(x, y, sample_weight)`."""
    model = keras.Sequential([keras.layers.Dense(4)])

    def loss_fn(batch, training):
        x, y, weight = batch
        logits = model(x, training=training)
        loss = keras.losses.sparse_categorical_crossentropy(y, logits, from_logits=True)
        return {"loss": distloop.weighted(loss, weight)}

    return distloop.ModelSpec(model, keras.optimizers.SGD(0.1), loss_fn)


def test_the_search_begins_with_the_batch_size_of_fit_and_ends_the_program(monkeypatch):
    sizes = []

    def measure(state, settings, rows, batch_size):
        sizes.append(batch_size)
        return BatchTrial(batch_size, 100.0 * batch_size, 1.0)

    monkeypatch.setattr(tryouts.tuning, "_measure", measure)
    trainer = distloop.Trainer(classifier(), on(1, autotune_batch=True, console="quiet"))
    with pytest.raises(SystemExit) as ended:
        trainer.fit(classification(16), batch_size=4, steps=1)
    assert ended.value.code == 0 and trainer.step == 0 and sizes == [4, 8]


@pytest.mark.parametrize(
    "name", mostly_wide(["audit", "memory", "autotune_batch"], "memory", "autotune_batch")
)  # and each ends the process with code 0
def test_batches_have_the_class_weights_of_fit(monkeypatch, name):
    monkeypatch.setattr(tryouts.tuning, "_MEASURED_SECS", 0.01)
    trainer = distloop.Trainer(weighted, on(1, console="quiet", **{name: True}))
    with pytest.raises(SystemExit) as ended:
        trainer.fit((X, Y), batch_size=8, class_weight={0: 2.0}, steps=1)
    assert ended.value.code == 0


@pytest.mark.parametrize(
    "make",
    [
        lambda batches: lambda: batches,
        lambda batches: lambda context: batches.shard(context.num_input_pipelines, 0),
        lambda batches: (batch for batch in batches),
    ],
)
def test_data_of_any_kind_gets_class_weights(make):
    data = make(tf.data.Dataset.from_tensor_slices((X, Y)).batch(8))
    mapped = tryouts._as_trained_on(read_arguments(data, None, {"class_weight": {1: 3.0}}), 64, 0)
    assert mapped.map_batch is None
    x, y, weights = next(iter(mapped.train()))
    assert x.shape == (8, 8)
    np.testing.assert_array_equal(weights, np.where(Y[:8] == 1, 3, 1))


def leave_the_workdir(path, replicas=1, **settings):
    settings = {"fast_dev_run": True, "epochs": 1000, "eval_every": 1, **settings}
    return distloop.Trainer(classifier(), on(replicas, workdir=path / "run", **settings))


@pytest.mark.slow
def test_everything_is_tried_once_and_printed(tmp_path, capsys):
    trainer = leave_the_workdir(tmp_path, 2, average_decay=0.9)
    evals, best = {"test": batches(shuffle=True)}, distloop.SaveBest("test/accuracy")
    metrics = trainer.fit(batches(shuffle=True), evals=evals, actions=[best])
    printed = capsys.readouterr().out
    for part in ("step 1 trained", "restored: all", "predicted 16 rows with serving_default", "read the export back"):
        assert part in printed
    assert trainer.step == 1 and metrics["test/accuracy"] >= 0
    assert not os.listdir(tmp_path)


@pytest.mark.slow
def test_what_a_program_does_after_fit_still_works(tmp_path):
    trainer = leave_the_workdir(tmp_path)
    data = batches(shuffle=True)
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


@pytest.mark.slow
def test_a_dry_run_leaves_the_model_of_the_program_as_it_is():
    model = compiled_models.compiled(compiled_models.net())
    trainer = distloop.Trainer(distloop.from_keras(model), on(1, fast_dev_run=True))
    before, is_built = model.get_weights(), model.optimizer.built
    trainer.fit((compiled_models.X, compiled_models.Y), batch_size=8)
    trainer.restore()
    np.testing.assert_equal(model.get_weights(), before)
    assert (model.optimizer.built, int(model.optimizer.iterations.numpy())) == (is_built, 0)
    assert not np.array_equal(trainer.model.get_weights()[0], before[0])


def test_the_directory_goes_with_its_owner_and_other_saves_are_not_awaited():
    owner = set()  # anything that can be referred to weakly
    directory = tryouts.dry_settings(on(1, fast_dev_run=True), owner).workdir
    assert os.path.isdir(directory)
    del owner
    assert not os.path.exists(directory)
    with pytest.raises(ValueError, match="leave fast_dev_run out"):
        distloop.Trainer(classifier(), on(1, fast_dev_run=True)).evaluate_checkpoints(batches(shuffle=True))


@pytest.mark.slow
def test_a_checkpoint_that_does_not_restore_everything_is_found(tmp_path, monkeypatch):
    original = SavedState.restore

    def forgetful(saved_state, values):
        weight = saved_state._state.model.trainable_variables[0]
        kept = tf.identity(weight)
        original(saved_state, values)
        weight.assign(kept)

    monkeypatch.setattr(SavedState, "restore", forgetful)
    with pytest.raises(RuntimeError, match="model/net/hidden/kernel came back from a checkpoint with other values"):
        leave_the_workdir(tmp_path, console="quiet").fit(batches(shuffle=True))


UNTRIED = (
    "not tried: serving_default and the export, as predict_fn takes no batch of fit's data (ValueError at test_try"
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("has_predict_fn", "has_evaluation", "told", "untold"),
    mostly_wide(
        [
            (False, False, "ModelSpec has no predict_fn", UNTRIED),
            (True, False, UNTRIED, "read the export back"),
            (True, True, "read the export back", UNTRIED),
        ],
        (False, False, "ModelSpec has no predict_fn", UNTRIED),
        (True, True, "read the export back", UNTRIED),
    ),
)
def test_a_missing_predict_fn_and_entries_that_it_lacks_are_named(has_predict_fn, has_evaluation, told, untold, capsys):
    def model_fn():
        spec = classifier()()
        predict_fn = (lambda batch: spec.model(batch["inputs"], training=False)) if has_predict_fn else None
        return distloop.ModelSpec(spec.model, spec.optimizer, spec.loss_fn, predict_fn=predict_fn)

    evals = {"test": batches(shuffle=True).map(lambda rows: rows | {"inputs": rows["x"]})} if has_evaluation else {}
    distloop.Trainer(model_fn, on(1, fast_dev_run=True, steps=5)).fit(batches(shuffle=True), evals=evals)
    printed = capsys.readouterr().out
    assert told in printed and untold not in printed

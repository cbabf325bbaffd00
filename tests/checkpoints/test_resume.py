"""Going back to a checkpoint, and runs that an action ended."""

import json
import os

import keras
import numpy as np
import pytest
import tensorflow as tf

import distloop
from distloop.monitoring.records import OF_THE_MACHINE
from tests.problems import assert_equal, classification, classifier, everything, on

BATCH_SIZE, BATCHES = 16, 5  # the last one is odd


def stream(poison=(), without=(), *, kind="nan", seed=3):
    """Batches of a shuffled dataset, some of which (by their number from 0, over all epochs) are bad or left out."""
    rows = classification(BATCH_SIZE * BATCHES - 5)
    data = distloop.make_dataset(rows, BATCH_SIZE, shuffle=True, seed=seed).repeat()
    poison, without = (tf.constant(list(numbers) or [-1], tf.int64) for numbers in (poison, without))

    def spoil(number, batch):
        x = batch["x"]
        bad = {"nan": x * np.nan, "inf": x / 0.0, "jump": x * 1e6, "row": tf.concat([x[:-1], x[-1:] * np.nan], 0)}[kind]
        return {**batch, "x": tf.where(tf.reduce_any(number == poison), bad, x)}

    data = data.enumerate().filter(lambda number, _: tf.reduce_all(number != without))
    return data.map(spoil)


def linear(**settings):
    """A model whose loss grows with its input."""

    def model_fn():
        spec = classifier(**settings)()
        hidden = spec.model.layers[0]
        hidden.activation = lambda x: x
        return spec

    return model_fn


def fit(workdir, data, *, replicas=1, steps=60, **settings):
    settings = {"average_decay": 0.9, "clip_norm": 0.5, "checkpoint_every": 10, "log_every": 7, **settings}
    config = on(replicas, workdir=str(workdir), on_divergence="rollback", **settings)
    trainer = distloop.Trainer(linear(dropout=0.3, l2=0.01), config)
    metrics = trainer.fit(data, steps=steps)
    return trainer, metrics


def incidents(workdir):
    path = workdir / "incidents.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def rows_of(workdir):
    timed = {"time", *OF_THE_MACHINE}
    rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if name not in timed} for row in rows]


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["float32", "mixed_float16"])
@pytest.mark.parametrize("kind", ["nan", "inf", "row", "jump"])
@pytest.mark.parametrize("replicas", [1, 2])
def test_a_run_with_a_poisoned_batch_ends_like_the_run_without_it(replicas, kind, precision, tmp_path):
    expected, metrics = fit(tmp_path / "without", stream(without=[33]), replicas=replicas, precision=precision)
    data = stream(poison=[33], kind=kind)
    trainer, found = fit(tmp_path / "poisoned", data, replicas=replicas, precision=precision)
    assert_equal(everything(trainer), everything(expected))
    assert found["loss"] == metrics["loss"]
    assert rows_of(tmp_path / "poisoned") == rows_of(tmp_path / "without")
    [incident] = incidents(tmp_path / "poisoned")
    assert [incident[key] for key in ("step", "batch", "left_out", "checkpoint")] == [34, 33, 33, 30]
    assert incident["action"] == "rollback" and "34" in incident["reason"]
    assert not incidents(tmp_path / "without")


def test_several_poisoned_batches_are_left_out_one_after_the_other(tmp_path):
    expected, _ = fit(tmp_path / "without", stream(without=[3, 24, 25, 41]), steps=45)
    trainer, _ = fit(tmp_path / "poisoned", stream(poison=[3, 24, 25, 41]), steps=45)
    assert_equal(everything(trainer), everything(expected))
    found = [(row["step"], row["batch"], row["checkpoint"]) for row in incidents(tmp_path / "poisoned")]
    assert found == [(4, 3, 0), (24, 24, 20), (24, 25, 20), (39, 41, 30)]


@pytest.mark.slow
def test_what_was_left_out_stays_out_when_the_run_goes_on(tmp_path):
    expected, _ = fit(tmp_path / "without", stream(without=[13]), steps=40)
    fit(tmp_path / "poisoned", stream(poison=[13]), steps=25)
    trainer, _ = fit(tmp_path / "poisoned", stream(poison=[13]), steps=40)
    assert_equal(everything(trainer), everything(expected))
    assert len(incidents(tmp_path / "poisoned")) == 1


def test_a_batch_that_spoils_the_weights_is_found_by_the_last_try(tmp_path):
    def model_fn():
        model = keras.Sequential(
            [keras.Input((1,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="ones", name="a")], name="m"
        )

        def loss_fn(batch, training):  # the gradient is x, the loss bad where the weight is above 100 or below -100
            weight = model(tf.ones([1, 1]))
            loss = tf.where(tf.abs(weight) > 100, np.nan, weight * batch["x"])
            return {"loss": loss[:, 0]}

        return distloop.ModelSpec(model, keras.optimizers.SGD(1.0), loss_fn)

    x = np.ones((40, 1), np.float32) * 0.01
    x[17] = 1e6
    data = tf.data.Dataset.from_tensor_slices({"x": x}).batch(1)

    def run(name, data):
        config = on(1, workdir=str(tmp_path / name), on_divergence="rollback", loss_jump=1e9, checkpoint_every=6)
        trainer = distloop.Trainer(model_fn, config)
        trainer.fit(data, steps=30)
        return trainer

    found = run("spoiled", data)
    expected = run("clean", tf.data.Dataset.from_tensor_slices({"x": np.delete(x, 17, 0)}).batch(1))
    assert_equal(everything(found), everything(expected))
    rows = incidents(tmp_path / "spoiled")
    assert [row["left_out"] for row in rows] == [18, 19, 17]
    assert [row["checkpoint"] for row in rows] == [18, 18, 12]  # that of step 18 has learned from the bad batch
    assert sorted(int(name) for name in os.listdir(tmp_path / "spoiled" / "checkpoints")) == [18, 24, 30]


def test_a_run_that_comes_no_further_ends_after_so_many_tries(tmp_path):
    with pytest.raises(FloatingPointError, match="Step 11 is .* The run went back 2 times"):
        fit(tmp_path, stream(poison=range(11, 100)), steps=40, max_rollbacks=2)
    assert [row["action"] for row in incidents(tmp_path)] == ["rollback", "rollback", "raise"]
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["0", "10"]


def test_a_run_that_an_action_ended_is_over(tmp_path, capsys):
    def fit(steps, stop_at=12):
        def stop(report):
            if report.step == stop_at:
                raise distloop.StopTraining("it is good enough")

        stop.every = 4
        trainer = distloop.Trainer(classifier(), on(1, workdir=str(tmp_path)))
        trainer.fit(distloop.make_dataset(classification(67), 16), steps=steps, actions=[stop])
        return trainer.step

    assert fit(40) == 12
    capsys.readouterr()
    assert fit(40, stop_at=None) == 12
    assert "this run stopped at step 12 (it is good enough)" in capsys.readouterr().out
    assert fit(44, stop_at=None) == 44
    assert fit(44, stop_at=None) == 44


def test_a_restored_run_shuffles_as_it_did(tmp_path):
    data = distloop.make_dataset(classification(67), 16, shuffle=True)

    def trainer(**settings):
        return distloop.Trainer(classifier(dropout=0.5), on(1, **settings))

    straight = trainer(workdir=str(tmp_path / "straight"))
    straight.fit(distloop.make_dataset(classification(67), 16, shuffle=True), steps=30)
    there_and_back = trainer(workdir=str(tmp_path / "back"), keep_checkpoints=9, checkpoint_every=7)
    there_and_back.fit(data, steps=21)
    there_and_back.restore(tmp_path / "back" / "checkpoints" / "14")
    assert there_and_back.step == 14
    there_and_back.fit(data, steps=30)
    assert_equal(everything(there_and_back), everything(straight))

"""Rollback: which batches a diverging run leaves out, and that it ends like a run without them."""

import functools
import json
import os

import keras
import numpy as np
import pytest
import tensorflow as tf

import distloop
from distloop.checkpoints.loading import Rollback
from tests.problems import assert_equal, classification, classifier, everything, mostly_wide, on, rows_of


def test_the_batch_that_failed_is_left_out_and_progress_counts_all_tries():
    rollback = Rollback(3)
    assert rollback.choose(step=8, batch=7, skipped={2}) == (7, {2, 7})
    assert rollback.num_tries == 0
    rollback = Rollback(1)
    assert rollback.choose(8, 7, set()) == (7, {7})
    assert rollback.choose(9, 9, {7}) == (9, {7, 9})
    assert rollback.choose(9, 10, {7, 9}) is None and rollback.num_tries == 1
    rollback = Rollback(0)
    assert rollback.choose(3, 2, set()) is None and rollback.choose(3, 2, set()) is None


def test_where_hardware_is_to_blame_tries_count_and_no_batch_is_left_out():
    rollback = Rollback(2)
    assert rollback.choose(8, 7, {2}, right=5) == (5, {2})
    assert rollback.choose(8, 7, {2}, right=5) == (5, {2})
    assert rollback.choose(8, 7, {2}, right=5) is None and rollback.num_tries == 2


def test_the_last_try_blames_the_batch_that_was_learned_from_last():
    rollback = Rollback(3)
    assert rollback.choose(8, 7, set()) == (7, {7})
    assert rollback.choose(8, 8, {7}) == (8, {7, 8})
    assert rollback.choose(8, 9, {7, 8}) == (6, {6})  # 7 and 8 are taken back
    assert rollback.choose(8, 7, {6}) is None and rollback.num_tries == 3
    rollback = Rollback(2)
    assert rollback.choose(8, 7, {6, 5}) == (7, {5, 6, 7})
    assert rollback.choose(8, 8, {5, 6, 7}) == (4, {4, 5, 6})
    rollback, batch = Rollback(2), 10**12  # at once, however far the run is
    assert rollback.choose(batch, batch, {7}) == (batch, {7, batch})
    assert rollback.choose(batch, batch, {7, batch}) == (batch - 1, {7, batch - 1})


# Runs with bad batches ----------------------------------------------------------------------------------------------

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
        spec.model.layers[0].activation = lambda x: x
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


@pytest.fixture(scope="module")
def run_without(tmp_path_factory):
    """Returns a function that trains without batch 33 and returns workdir, state and metrics; once for each setting."""

    @functools.cache
    def run(replicas, precision):
        workdir = tmp_path_factory.mktemp("without")
        trainer, metrics = fit(workdir, stream(without=[33]), replicas=replicas, precision=precision)
        return workdir, everything(trainer), metrics

    return run


@pytest.mark.wide
def test_a_second_fit_that_diverges_before_its_save_goes_back_to_its_start(tmp_path):
    def program(workdir, second):
        trainer, _ = fit(workdir, stream(seed=4), steps=12)
        trainer.fit(second, steps=30)
        return everything(trainer)

    assert_equal(program(tmp_path / "bad", stream([3])), program(tmp_path / "good", stream(without=[3])))
    assert [found["checkpoint"] for found in incidents(tmp_path / "bad")] == [12]


@pytest.mark.wide
def test_a_run_that_goes_back_to_its_start_has_each_row_once_in_its_file(tmp_path, capsys):
    def make(poison, killed_at=0):
        config = on(1, workdir=str(tmp_path), on_divergence="rollback", log_every=2, eval_first=True)
        trainer = distloop.Trainer(linear(), config)

        def die(report):
            if report.step == killed_at:
                raise SystemExit  # which saves nothing

        die.every = 1
        evals = {"test": distloop.make_dataset(classification(16), 16)}
        trainer.fit(stream(poison), steps=6, evals=evals, actions=[die] if killed_at else [])

    with pytest.raises(SystemExit):
        make([], killed_at=3)
    make([3])  # goes on from the checkpoint of step 0, and back to it
    assert [row["step"] for row in rows_of(tmp_path)] == [0, 2, 4, 6] and len(incidents(tmp_path)) == 1
    assert not (tmp_path / "metrics.jsonl.1").exists() and "starting over" not in capsys.readouterr().out


@pytest.mark.wide
@pytest.mark.parametrize(("sizes", "checkpoint", "batch"), [([(16, 4), (8, 12)], 4, 8), ([(8, 8), (16, 12)], 8, 4)])
def test_a_run_of_another_batch_size_leaves_the_failed_batch_out(tmp_path, sizes, checkpoint, batch):
    rows = classification(160)
    rows["x"][70] = np.nan
    for batch_size, steps in sizes:
        trainer, _ = fit(tmp_path, distloop.make_dataset(rows, batch_size), steps=steps)
    assert [(found["checkpoint"], found["left_out"]) for found in incidents(tmp_path)] == [(checkpoint, batch)]
    assert trainer._train_source.skipped_batches == {batch}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("replicas", "kind", "precision"),
    mostly_wide(
        [(2, "nan", "mixed_float16"), (1, "row", "float32"), (2, "inf", "float32"), (1, "jump", "mixed_float16")]
    ),
)
def test_a_run_with_a_poisoned_batch_ends_like_the_run_without_it(replicas, kind, precision, tmp_path, run_without):
    without, expected, metrics = run_without(replicas, precision)
    data = stream(poison=[33], kind=kind)
    trainer, poisoned_metrics = fit(tmp_path / "poisoned", data, replicas=replicas, precision=precision)
    assert_equal(everything(trainer), expected)
    assert poisoned_metrics["loss"] == metrics["loss"]
    assert rows_of(tmp_path / "poisoned") == rows_of(without)
    [incident] = incidents(tmp_path / "poisoned")
    assert [incident[key] for key in ("step", "batch", "left_out", "checkpoint")] == [34, 33, 33, 30]
    assert incident["action"] == "rollback" and "34" in incident["reason"]
    assert not incidents(without)


@pytest.mark.wide
@pytest.mark.parametrize(
    ("bad", "stops", "rollbacks"),
    [
        pytest.param(
            [3, 24, 25, 41], [45], [(4, 3, 0), (24, 24, 20), (24, 25, 20), (39, 41, 30)], id="one after the other"
        ),
        pytest.param([13], [25, 40], [(14, 13, 10)], id="and stay out when the run is resumed"),
    ],
)
def test_poisoned_batches_are_left_out(bad, stops, rollbacks, tmp_path):
    expected, _ = fit(tmp_path / "without", stream(without=bad), steps=stops[-1])
    for steps in stops:
        trainer, _ = fit(tmp_path / "poisoned", stream(poison=bad), steps=steps)
    assert_equal(everything(trainer), everything(expected))
    found = [(row["step"], row["batch"], row["checkpoint"]) for row in incidents(tmp_path / "poisoned")]
    assert found == rollbacks


@pytest.mark.slow
def test_a_batch_that_spoils_the_weights_is_found_by_the_last_try(tmp_path):
    def model_fn():
        layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones", name="a")
        model = keras.Sequential([keras.Input((1,)), layer], name="m")

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
        return everything(trainer)

    spoiled = run("spoiled", data)
    expected = run("clean", tf.data.Dataset.from_tensor_slices({"x": np.delete(x, 17, 0)}).batch(1))
    assert_equal(spoiled, expected)
    rows = incidents(tmp_path / "spoiled")
    assert [row["left_out"] for row in rows] == [18, 19, 17]
    assert [row["checkpoint"] for row in rows] == [18, 18, 12]  # that of step 18 has learned from the bad batch
    assert sorted(int(name) for name in os.listdir(tmp_path / "spoiled" / "checkpoints")) == [18, 24, 30]


@pytest.mark.slow
def test_a_run_that_comes_no_further_ends_after_so_many_tries(tmp_path):
    with pytest.raises(FloatingPointError, match="Step 11 is .* The run went back 2 times"):
        fit(tmp_path, stream(poison=range(11, 100)), steps=40, max_rollbacks=2)
    assert [row["action"] for row in incidents(tmp_path)] == ["rollback", "rollback", "raise"]
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["0", "10"]


@pytest.mark.wide
def test_data_by_number_leaves_the_bad_batch_out_also_after_a_resume(tmp_path):
    rows = {**classification(67), "row": np.arange(67)}
    numbers, epochs = distloop.make_dataset(rows, BATCH_SIZE, shuffle=True).order.rows(tf.constant(13, tf.int64))
    bad_row, bad_epoch = int(numbers[3]), int(epochs[3])

    def poison(example, seed):  # one row in one epoch, as the seed belongs to both
        is_bad = (example["row"] == bad_row) & (seed[0] == bad_epoch)
        x = example["x"] + 0.1 * tf.random.stateless_normal([8], seed)
        return {**example, "x": tf.where(is_bad, np.nan, x)}

    def run(name, *stops):
        for steps in stops:
            settings = {"on_divergence": "rollback", "checkpoint_every": 5}
            trainer = distloop.Trainer(classifier(), on(1, workdir=str(tmp_path / name), **settings))
            trainer.fit(distloop.make_dataset(rows, BATCH_SIZE, shuffle=True, map_fn=poison), steps=steps)
        assert trainer._train_source.skipped_batches == {13}
        return everything(trainer)

    assert_equal(run("stopped", 17, 22), run("straight", 22))

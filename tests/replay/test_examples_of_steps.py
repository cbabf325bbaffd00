"""Which examples were in a step, and in which steps an example was: as replays of these steps say."""

import json
import shutil

import keras
import numpy as np
import pytest
import tensorflow as tf

import distloop
from distloop import report
from distloop.replay.examples_of_steps import examples_in_step, steps_of_example
from tests.problems import classification, classifier, mostly_wide, on, refused

ROWS, SIZE, STEPS = 61, 16, 11


def train(workdir, data, steps=STEPS, **settings):
    config = on(1, workdir=str(workdir), log_every=1, checkpoint_every=4, keep_checkpoints=9, steps=steps, **settings)
    distloop.Trainer(classifier(), config).fit(data)
    return str(workdir)


def data(size=SIZE, rows=None, **arguments):
    return distloop.make_dataset(rows or classification(ROWS), size, **{"shuffle": True, "seed": 3, **arguments})


def replayer(workdir, **settings):
    """Returns a function that replays a step; one trainer replays all steps after the first checkpoint."""

    def make():
        config = on(1, workdir=workdir, log_every=1, console="quiet", steps=STEPS, **settings)
        return distloop.Trainer(classifier(), config)

    trainer = make()
    return lambda dataset, step: list((trainer if step > 4 else make()).replay(dataset, step=step).rows)


@pytest.mark.parametrize("arguments", mostly_wide([{}, {"shuffle": False}, {"drop_remainder": True}]))
def test_the_examples_of_a_step_are_those_of_its_replay(tmp_path, arguments, capsys):
    run = train(tmp_path, data(**arguments))
    replayed = replayer(run)
    for step in (1, 4, 5, 10):
        assert list(examples_in_step(run, step)) == replayed(data(**arguments), step)
    in_steps = {step: set(examples_in_step(run, step)) for step in range(1, STEPS + 1)}
    for row in (0, 7, 60):
        assert steps_of_example(run, row) == [step for step, rows in in_steps.items() if row in rows]
    assert report.main([run, "--rows", "3"]) == report.main([run, "--steps-of", "7"]) == 0
    first, second = ([int(word) for word in line.split()] for line in capsys.readouterr().out.splitlines()[-2:])
    assert first == list(examples_in_step(run, 3)) and second == steps_of_example(run, 7)


def test_another_batch_size_and_a_batch_that_was_left_out_are_counted(tmp_path):
    rows = classification(ROWS)
    rows["x"][7, 0] = np.nan
    train(tmp_path, data(rows=rows), steps=4, on_divergence="rollback")
    run = train(tmp_path, data(12, rows), on_divergence="rollback")
    incidents = {json.loads(line)["step"] for line in (tmp_path / "incidents.jsonl").read_text().splitlines()}
    replayed = replayer(run, on_divergence="rollback")
    for step in sorted({1, 2, 3, 4, 6, 11} - incidents):  # these are replayed as they failed
        assert list(examples_in_step(run, step)) == replayed(data(SIZE if step <= 4 else 12, rows), step)
    assert steps_of_example(run, 7) == []


def numbered():
    """A model whose `loss_fn` returns the row numbers."""
    net = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
    return distloop.ModelSpec(
        net,
        keras.optimizers.SGD(0.01),
        lambda batch, training: {"loss": net(batch["x"], training=training)[:, 0] ** 2, "row": batch["row"]},
    )


def resized(run):
    run(data_with_rows(), 6)
    run(data_with_rows(4), 11)


def resized_and_not_saved_since(run):
    resized(run)
    for step in (8, 10, 11):
        shutil.rmtree(run.workdir / "checkpoints" / str(step))


def limited(run):
    run(data_with_rows(), 7, overfit_batches=3)
    run(data_with_rows(), 13)


def on_other_data(run):
    trainer = run(data_with_rows(), 5)
    trainer.fit(distloop.make_dataset({"x": np.ones((20, 8), "float32"), "row": np.arange(20.0)}, 4), steps=12)


def going_back(run):
    rows = classification(ROWS)
    rows["x"][7, 0] = np.nan
    run(data_with_rows(x=rows["x"]), 9, on_divergence="rollback")
    for step in (4, 6, 8, 9):
        shutil.rmtree(run.workdir / "checkpoints" / str(step), ignore_errors=True)


def data_with_rows(size=SIZE, **changes):
    return data(size, {"x": classification(ROWS)["x"], "row": np.arange(ROWS, dtype="float32"), **changes})


@pytest.mark.slow
@pytest.mark.parametrize(
    "past", mostly_wide([resized, resized_and_not_saved_since, limited, on_other_data, going_back], resized, going_back)
)
def test_the_examples_are_right_whatever_the_past_of_the_run(past, tmp_path):
    def run(dataset, steps, **settings):
        keep = 1 if past in (resized, limited, on_other_data) else 9
        settings = {"log_every": 1, "checkpoint_every": 2, "keep_checkpoints": keep, **settings}
        trainer = distloop.Trainer(numbered, on(1, workdir=str(tmp_path), **settings))
        trainer.fit(dataset, steps=steps)
        return trainer

    run.workdir = tmp_path
    past(run)
    rows = distloop.read_metrics(str(tmp_path))
    for row in rows:
        assert np.mean(examples_in_step(str(tmp_path), row["step"])) == pytest.approx(row["row"], rel=1e-5), row["step"]
    steps = [row["step"] for row in rows if 13 in examples_in_step(str(tmp_path), row["step"])]
    assert steps_of_example(str(tmp_path), 13) == steps != []


def test_what_is_not_known_is_refused_in_a_sentence(tmp_path, capsys):
    run = train(tmp_path / "by number", data())
    refused(lambda: examples_in_step(run, 12), "--rows=12", "steps from 1 to 11")
    refused(lambda: steps_of_example(run, 61), "--steps-of=61", "has 61 examples", "from 0 to 60")
    plain = train(tmp_path / "plain", tf.data.Dataset.from_tensor_slices(classification(ROWS)).batch(SIZE))
    refused(lambda: examples_in_step(plain, 2), "a dataset without numbers", "--replay")
    starts = tmp_path / "by number" / "starts.jsonl"
    starts.write_text(json.dumps({**json.loads(starts.read_text()), "input": None}) + "\n")
    refused(lambda: examples_in_step(run, 2), "the steps 1 to 11", "an earlier version", "--replay")
    assert report.main([run, run, "--rows", "2"]) == 2
    assert "--rows or --steps-of was given with 2 workdirs" in capsys.readouterr().err

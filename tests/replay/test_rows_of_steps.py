"""Which examples were in a step, and in which steps an example was: as replays of these steps say."""

import json

import numpy as np
import pytest
import tensorflow as tf

import distloop
from distloop import report
from distloop.replay.examples import rows_of_step, steps_of_row
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
        assert list(rows_of_step(run, step)) == replayed(data(**arguments), step)
    in_steps = {step: set(rows_of_step(run, step)) for step in range(1, STEPS + 1)}
    for row in (0, 7, 60):
        assert steps_of_row(run, row) == [step for step, rows in in_steps.items() if row in rows]
    assert report.main([run, "--rows", "3"]) == report.main([run, "--steps-of", "7"]) == 0
    first, second = ([int(word) for word in line.split()] for line in capsys.readouterr().out.splitlines()[-2:])
    assert first == list(rows_of_step(run, 3)) and second == steps_of_row(run, 7)


def test_another_batch_size_after_a_stop_and_a_batch_that_was_left_out_are_counted(tmp_path):
    rows = classification(ROWS)
    rows["x"][7, 0] = np.nan
    train(tmp_path, data(rows=rows), steps=4, on_divergence="rollback")
    run = train(tmp_path, data(12, rows), on_divergence="rollback")
    incidents = {json.loads(line)["step"] for line in (tmp_path / "incidents.jsonl").read_text().splitlines()}
    replayed = replayer(run, on_divergence="rollback")
    for step in sorted({1, 2, 3, 4, 6, 11} - incidents):  # these are replayed as they failed
        assert list(rows_of_step(run, step)) == replayed(data(SIZE if step <= 4 else 12, rows), step)
    assert steps_of_row(run, 7) == []


def test_what_is_not_known_is_refused_in_a_sentence(tmp_path, capsys):
    run = train(tmp_path / "by number", data())
    refused(lambda: rows_of_step(run, 12), "--rows=12", "steps from 1 to 11")
    refused(lambda: steps_of_row(run, 61), "--steps-of=61", "has 61 rows", "from 0 to 60")
    plain = train(tmp_path / "plain", tf.data.Dataset.from_tensor_slices(classification(ROWS)).batch(SIZE))
    refused(lambda: rows_of_step(plain, 2), "a dataset without numbers", "--replay")
    assert report.main([run, run, "--rows", "2"]) == 2
    assert "--rows or --steps-of was given with 2 workdirs" in capsys.readouterr().err

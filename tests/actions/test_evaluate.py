"""Evaluations as actions."""

import keras
import numpy as np
import pytest

import distloop
from distloop.actions import action_state
from distloop.actions.evaluate import Evaluate
from distloop.training.action import Report
from tests.problems import on


def test_the_best_and_the_last_values_go_through_a_checkpoint():
    values = iter([0.5, 0.25, float("nan"), 0.75])
    evaluate = Evaluate("test", lambda _: {"loss": (value := next(values)), "other": value}, 1)
    at_start = action_state.states_of({"test": evaluate})
    for step in (1, 2, 3, 4):
        evaluate(Report(step, 9, {}, None))
    again = Evaluate("test", lambda _: {"loss": 0.125, "other": 1.0}, 1)
    again.set_state(action_state.states_of({"test": evaluate})["test"])
    last = [{"step": 4, "test/loss": 0.75}, {"step": 4, "test/other": 0.75}]
    assert again.rows == [{"step": 2, "test/loss": 0.25}, *last]
    again(Report(5, 9, {}, None))
    action_state.RunStates().attach([evaluate], at_start)  # as a rollback does
    assert evaluate.rows == []
    assert again.rows == [{"step": 5, "test/loss": 0.125}, {"step": 5, "test/other": 1.0}]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"every": "5 m"}, "every='5 m': give a number of steps, or a text with a unit"),
        ({"batches": -1}, "batches=-1; give a whole number"),
        ({"batches": 1.5}, "batches=1.5; give a whole number"),
        ({"loss_fn": 3}, "loss_fn=3; give a function"),
        ({"metrics": {"auc": object()}}, "metrics without a loss_fn"),
        ({"predict_fn": abs}, "predict_fn without the rows_fn that takes its outputs: give both"),
        ({"rows_fn": 3}, r"rows_fn=3; give a function of \(rows\)"),
    ],
)
def test_an_evaluation_refuses_what_it_cannot_use(wrong, message):
    with pytest.raises(ValueError, match=f"Evaluation was given {message}"):
        distloop.Evaluation([], **wrong)


@pytest.mark.slow
def test_a_failed_evaluation_saves_the_training_and_comes_first_next_time(tmp_path):
    x, y = np.zeros((16, 4), np.float32), np.arange(16) % 3

    def trainer():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return distloop.Trainer(distloop.from_keras(model), on(1, workdir=str(tmp_path), batch_size=8))

    with pytest.raises(ValueError, match="the label 9"):
        trainer().fit(x, y, steps=4, evals={"test": (x, np.full(16, 9))})
    again = trainer()
    again.fit(x, y, steps=4, evals={"test": (x, y)})
    assert again.step == 4
    assert [(row["step"], "test/loss" in row) for row in distloop.read_metrics(str(tmp_path))] == [(4, True)]


@pytest.mark.parametrize(
    ("settings", "options"),
    [({"eval_first": True}, {}), ({"eval_every": "2 h"}, {}), ({}, {"rows_fn": lambda rows: {"n": len(rows)}})],
    ids=["first", "by time", "rows"],
)
def test_data_that_is_read_once_is_refused_where_it_is_read_again(settings, options):
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    model.compile("sgd", "mse")
    x, y = np.zeros((8, 4), np.float32), np.zeros((8, 3), np.float32)
    trainer = distloop.Trainer(distloop.from_keras(model), on(1, batch_size=8, **settings))
    evaluation = distloop.Evaluation(iter([(x, y), (x, y)]), **options)
    with pytest.raises(ValueError, match="'test' cannot run: The data given is an iterator"):
        trainer.fit(x, y, steps=2, evals={"test": evaluation})
    assert trainer.step == 0

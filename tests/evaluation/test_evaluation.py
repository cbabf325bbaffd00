"""Evaluation: one pass over a dataset."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import distloop
from tests.problems import assert_equal, on, weights


def make_trainer(*, has_metric=False, **settings):
    def model_fn():
        model = keras.Sequential([keras.Input((1,)), keras.layers.BatchNormalization(), keras.layers.Dense(1)])

        def loss_fn(batch, training):
            model(batch["x"], training=True)  # writes statistics
            outputs = {"loss": tf.square(batch["x"][:, 0]), "scaled": 2.0 * batch["x"][:, 0]}
            return outputs | ({"mean": (batch["x"],)} if has_metric else {})

        metrics = {"mean": keras.metrics.Mean()} if has_metric else None
        return distloop.ModelSpec(model, keras.optimizers.SGD(0.1), loss_fn, metrics=metrics)

    return distloop.Trainer(model_fn, on(1, **settings))


def dataset(rows=5):
    x = np.arange(1, rows + 1, dtype=np.float32)[:, None]
    return tf.data.Dataset.from_tensor_slices({"x": x}).batch(2)


@pytest.mark.slow
@pytest.mark.parametrize("eager", [False, True])
def test_a_pass_divides_sums_over_all_examples_once(eager):
    trainer = make_trainer(has_metric=True, eager=eager)
    for _ in range(2):
        assert trainer.evaluate(dataset()) == {"loss": 11.0, "scaled": 6.0, "mean": 3.0}


@pytest.mark.slow
def test_a_limit_counts_batches():
    assert make_trainer(limit_eval_batches=1).evaluate(dataset()) == {"loss": 2.5, "scaled": 3.0}


@pytest.mark.slow
def test_statistics_that_the_forward_pass_writes_are_restored():
    trainer = make_trainer()
    before = weights(trainer)
    trainer.evaluate(dataset())
    assert_equal(weights(trainer), before)


@pytest.mark.slow
def test_each_dataset_has_its_schedule_limit_and_values():
    def model_fn():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])

        def loss_fn(batch, training):
            return {"loss": tf.square(model(batch["x"], training=training)[:, 0]), "x": batch["x"][:, 0]}

        return distloop.ModelSpec(
            model, keras.optimizers.SGD(0.0), loss_fn, batch_fn=lambda rows, _: {"x": 2 * rows["x"]}
        )

    def values(batch, training):
        return {"total": (batch["x"],), "auc": (batch["x"] > 5, batch["x"] / 10)}

    seen = []

    def look(report):
        seen.append((report.step, {k: v for k, v in report.metrics.items() if k.startswith(("all", "few", "own"))}))

    look.every = None
    trainer = distloop.Trainer(model_fn, on(2))
    evals = {
        "all": dataset(),
        "few": distloop.Evaluation(dataset().repeat(), every="1 epoch", batches=2),
        "own": distloop.Evaluation(
            dataset(), every=4, loss_fn=values, metrics={"total": keras.metrics.Sum(), "auc": keras.metrics.AUC()}
        ),
    }
    trainer.fit(dataset(), steps=7, evals=evals, actions=[look])
    assert [(step, sorted(numbers)) for step, numbers in seen] == [
        (3, ["few/loss", "few/x"]),
        (4, ["own/auc", "own/total"]),
        (6, ["few/loss", "few/x"]),
        (7, ["all/loss", "all/x", "few/loss", "few/x", "own/auc", "own/total"]),
    ]
    _, numbers = seen[-1]
    assert (numbers["all/x"], numbers["few/x"]) == (6.0, 5.0)  # of 1 to 5, and of 1 to 4, doubled
    assert (numbers["own/total"], numbers["own/auc"]) == (30.0, 1.0)
    trainer.fit(dataset(), steps=8, evals=evals)  # the metrics start anew


def test_a_metric_that_cannot_be_copied_is_refused():
    class Secret(keras.metrics.Mean):
        def __init__(self, weight):
            super().__init__()

    evaluation = distloop.Evaluation(dataset(), loss_fn=lambda batch, _: {}, metrics={"secret": Secret(2)})
    with pytest.raises(ValueError, match='under "secret" of an Evaluation cannot be copied .*: give it a get_config'):
        make_trainer().fit(dataset(), steps=1, evals={"test": evaluation})

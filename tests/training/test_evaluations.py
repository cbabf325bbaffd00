"""Evaluations whose values need all rows at once, on the host."""

import keras
import numpy as np
import pytest

import distloop
from distloop.actions.evaluate import Evaluation
from distloop.training.evaluations import _with_rows
from tests.problems import classification, classifier, on

ROWS = {**classification(37), "row": np.arange(37)}


@pytest.mark.slow
def test_a_function_of_all_rows_gets_them_in_order_and_reports_numbers(tmp_path):
    seen = []

    def rank(outputs):
        seen.append(outputs)
        return {"rank": np.float32(np.mean(np.argsort(outputs["row"]))), "count": len(outputs["row"])}

    trainer = distloop.Trainer(classifier(), on(2, workdir=str(tmp_path), log_every=0))
    data = distloop.make_dataset(ROWS, 8)
    predict_fn = lambda batch: {"row": batch["row"], "logits": trainer.model(batch["x"])}  # noqa: E731
    evals = {
        "all": Evaluation(data, every=2, rows_fn=rank, predict_fn=predict_fn),
        "few": Evaluation(data, every=0, batches=2, rows_fn=lambda logits: {"rows": logits.shape[0]}),
    }
    numbers = trainer.fit(data, steps=4, evals=evals)
    assert (numbers["all/rank"], numbers["all/count"], numbers["few/rows"]) == (18.0, 37, 16)
    assert numbers["all/loss"] == trainer.evaluate(data)["loss"]
    assert len(seen) == 2 and seen[1]["row"].tolist() == list(range(37)) and seen[1]["logits"].shape == (37, 4)
    logits = trainer.predict(data)
    np.testing.assert_array_equal(seen[1]["logits"], logits)
    # Limits and files.
    np.testing.assert_array_equal(trainer.predict(data.repeat(), batches=2), logits[:16])
    assert len(list(trainer.stream_predictions(data, batches=3))) == 3
    assert trainer.predict(data, path=f"{tmp_path}/predictions") is None
    np.testing.assert_array_equal(np.load(tmp_path / "predictions" / "outputs.npy"), logits)


def with_rows(means, rows_fn):
    return _with_rows(lambda _: means, lambda stop_requests: np.zeros(2), rows_fn, None)


@pytest.mark.parametrize("values", [None, 3.0, {"a": "b"}, {"a": np.zeros(2)}, {"a": [1.0]}])
def test_what_is_no_dict_of_numbers_is_refused(values):
    with pytest.raises(ValueError, match="rows_fn returned .*; it returns a dict of numbers by name, of all rows"):
        with_rows({}, lambda rows: values)


def test_a_name_that_is_reported_already_is_refused():
    with pytest.raises(ValueError, match="rows_fn returned 'loss', which loss_fn or a metric reports, too"):
        with_rows({"loss": 1.0}, lambda rows: {"loss": 2.0})
    values = with_rows({"loss": 1.0}, lambda rows: {"a": keras.ops.sum(rows), "b": True})
    assert values == {"loss": 1.0, "a": 0.0, "b": 1.0}


def test_arguments_of_rows_are_checked():
    with pytest.raises(ValueError, match="predict_fn without the rows_fn that takes its outputs: give both"):
        Evaluation(ROWS, predict_fn=lambda batch: batch)
    with pytest.raises(ValueError, match="rows_fn=3; give a function of all rows"):
        Evaluation(ROWS, rows_fn=3)

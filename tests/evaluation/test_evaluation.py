"""Evaluation: one pass over a dataset."""

import functools
import gc
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf

import distloop
from distloop.actions.evaluate import Evaluation
from distloop.actions.evaluate import with_rows as _with_rows
from tests.problems import assert_equal, classification, classifier, mostly_wide, on, refused, weights


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


def dataset():
    return tf.data.Dataset.from_tensor_slices({"x": np.float32([[1], [2], [3], [4], [5]])}).batch(2)


@pytest.mark.slow
@pytest.mark.parametrize("eager", [False, True])
def test_a_pass_divides_sums_once_and_restores_what_is_written(eager):
    trainer = make_trainer(has_metric=True, eager=eager)
    before = weights(trainer)
    for _ in range(2):
        assert trainer.evaluate(dataset()) == {"loss": 11.0, "scaled": 6.0, "mean": 3.0}
    assert_equal(weights(trainer), before)


def arrays(num_rows):
    generator = np.random.default_rng(num_rows)
    return {"x": generator.normal(size=(num_rows, 8)).astype(np.float32), "label": np.arange(num_rows) % 3}


@pytest.mark.slow
@pytest.mark.parametrize("replicas", mostly_wide([2, 1]))
def test_arrays_give_the_bits_of_a_dataset_without_a_pipeline(replicas, monkeypatch):
    trainer = distloop.Trainer(classifier(dropout=0.2), on(replicas, batch_size=8))
    given = {num_rows: arrays(num_rows) for num_rows in (1, 3, 8, 9, 40)}
    datasets = {n: tf.data.Dataset.from_tensor_slices(data).batch(8) for n, data in given.items()}
    expected = {n: (trainer.evaluate(data), trainer.predict(data)) for n, data in datasets.items()}
    monkeypatch.setattr(tf.data.Dataset, "__iter__", None)
    for num_rows, (values, outputs) in expected.items():
        assert trainer.evaluate(given[num_rows]) == values
        assert trainer.predict(given[num_rows]).tobytes() == outputs.tobytes()
        pieces = list(trainer.stream_predictions(given[num_rows]))
        assert [len(piece) for piece in pieces] == [min(8, num_rows - start) for start in range(0, num_rows, 8)]
        assert len(trainer.predict(given[num_rows], batches=1)) == min(8, num_rows)


@pytest.mark.slow
def test_a_pass_sees_arrays_that_changed_in_place_and_new_weights():
    trainer, data = distloop.Trainer(classifier(), on(1, batch_size=8)), arrays(20)
    before = trainer.evaluate(data), trainer.predict(data)
    data["x"] *= -2
    changed = trainer.evaluate(data), trainer.predict(data)
    assert changed[0] == trainer.evaluate({**data, "x": data["x"].copy()}) != before[0]
    assert not np.array_equal(changed[1], before[1])
    trainer.model.set_weights([2 * value for value in trainer.model.get_weights()])
    assert trainer.evaluate(data) != changed[0] and not np.array_equal(trainer.predict(data), changed[1])


@pytest.mark.slow
def test_arrays_that_were_evaluated_are_freed():
    trainer, data = distloop.Trainer(classifier(), on(1, batch_size=8)), arrays(20)
    trainer.evaluate(data), trainer.predict(data)
    references = [weakref.ref(array) for array in data.values()]
    del data
    gc.collect()
    assert [reference() for reference in references] == [None, None]


@pytest.mark.slow
def test_two_passes_over_arrays_take_turns():
    trainer, data = distloop.Trainer(classifier(), on(1, batch_size=8)), arrays(20)
    expected, outputs = trainer.evaluate(data), trainer.predict(data)
    pieces = []
    for piece in trainer.stream_predictions(data):
        pieces.append(piece)
        assert trainer.evaluate(data) == expected
    assert np.array_equal(np.concatenate(pieces), outputs)


@pytest.mark.slow
def test_a_limit_counts_batches():
    assert make_trainer(limit_eval_batches=1).evaluate(dataset()) == {"loss": 2.5, "scaled": 3.0}


@pytest.mark.slow
def test_each_dataset_has_its_schedule_limit_and_values():
    def model_fn():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])

        def loss_fn(batch, training):
            return {"loss": tf.square(model(batch["x"], training=training)[:, 0]), "x": batch["x"][:, 0]}

        double = lambda rows, _: {"x": 2 * rows["x"]}  # noqa: E731
        return distloop.ModelSpec(model, keras.optimizers.SGD(0.0), loss_fn, batch_fn=double)

    def values(batch, training):
        return {"total": (batch["x"],), "auc": (batch["x"] > 5, batch["x"] / 10)}

    seen = []

    def look(report):
        seen.append((report.step, {k: v for k, v in report.metrics.items() if k.startswith(("all", "few", "own"))}))

    look.every = None
    trainer = distloop.Trainer(model_fn, on(2))
    metrics = {"total": keras.metrics.Sum(), "auc": keras.metrics.AUC()}
    evals = {
        "all": dataset(),
        "few": Evaluation(dataset().repeat(), every="1 epoch", batches=2),
        "own": Evaluation(dataset(), every=4, loss_fn=values, metrics=metrics),
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


@pytest.mark.slow
def test_data_for_which_loss_fn_returns_other_values_is_refused():
    def loss_fn(model, batch, training):
        loss = tf.square(model(batch["x"], training=training)[:, 0])
        return {"loss": loss, "masked" if "mask" in batch else "plain": loss}

    def model_fn():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        return distloop.ModelSpec(model, keras.optimizers.SGD(0.0), functools.partial(loss_fn, model))

    masked = dataset().map(lambda rows: {**rows, "mask": rows["x"]})
    trainer = distloop.Trainer(model_fn, on(1))
    assert sorted(trainer.evaluate(dataset())) == ["loss", "plain"]
    sentence = "loss_fn returned ['loss', 'masked'], and ['loss', 'plain'] before"
    refused(lambda: trainer.evaluate(masked), sentence)
    evals = {"val": dataset(), "masked": masked}
    refused(lambda: distloop.Trainer(model_fn, on(1)).fit(dataset(), steps=4, evals=evals), sentence)


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
    with pytest.raises(ValueError, match="rows_fn returned .*; give a dict of numbers by name, of all rows"):
        with_rows({}, lambda rows: values)


def test_a_name_that_is_reported_already_is_refused():
    with pytest.raises(ValueError, match="rows_fn returned 'loss', which loss_fn or a metric reports, too"):
        with_rows({"loss": 1.0}, lambda rows: {"loss": 2.0})
    values = with_rows({"loss": 1.0}, lambda rows: {"a": keras.ops.sum(rows), "b": True})
    assert values == {"loss": 1.0, "a": 0.0, "b": 1.0}


def batches():
    yield from ({name: rows[i : i + 8] for name, rows in ROWS.items()} for i in range(0, 32, 8))


MISTAKES = {
    "no label": ({"x": ROWS["x"]}, "The key 'label' was looked up"),
    "tuple": ((ROWS["x"], ROWS["label"]), "a tuple of 2 entries"),
    "shape": ({**ROWS, "x": ROWS["x"][:, :5]}, "expected axis -1 of input shape to have value 8"),
    "text": ({**ROWS, "x": ROWS["x"].astype(str)}, "A text reached a calculation"),
    "loss_fn": (Evaluation(ROWS, loss_fn=lambda batch, training: {"q": batch["nope"]}), "The key 'nope'"),
    "mean": (Evaluation(ROWS, loss_fn=lambda batch, training: {"q": tf.reduce_mean(batch["x"])}), "shape []"),
    "value": (Evaluation(ROWS, loss_fn=lambda batch, training: {"q": float(batch["x"][0, 0])}), "asked for its value"),
    "arguments of a metric": (
        Evaluation(ROWS, loss_fn=lambda batch, training: {"auc": (batch["x"],)}, metrics={"auc": keras.metrics.AUC()}),
        "y_pred",
    ),
    "predict_fn": (Evaluation(ROWS, rows_fn=lambda rows: {}, predict_fn=lambda batch: batch["nope"]), "The key 'nope'"),
    "empty": (lambda: tf.data.Dataset.from_tensor_slices(ROWS).batch(8).filter(lambda batch: False), "empty"),
    "read once": (lambda: Evaluation(batches(), every=1), "give the function that makes it"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_in_an_evaluation_is_said_before_the_first_step(case):
    data, part = MISTAKES[case]
    data = data() if case in ("empty", "read once") else data
    trainer = distloop.Trainer(classifier(), on(2, batch_size=8))
    refused(lambda: trainer.fit(ROWS, steps=4, evals={"hard": data}), "The evaluation 'hard' cannot run", part)
    assert trainer.step == 0


def test_an_evaluation_is_traced_once_and_a_generator_serves_one():
    traced = []
    trainer = distloop.Trainer(classifier(on_trace=traced.append), on(1, batch_size=8))
    numbers = trainer.fit(ROWS, steps=2, evals={"test": ROWS})
    assert traced.count(False) <= 2  # one of them for the forward pass that is shown
    count = len(traced)
    assert trainer.evaluate(ROWS) == {name: numbers[f"test/{name}"] for name in ("loss", "accuracy")}
    assert len(traced) == count
    assert "once/loss" in trainer.fit(ROWS, steps=4, evals={"once": batches()})

"""Batches and numbers that a run cannot train on, which show while it runs: an error of one sentence, weights kept."""

import re

import keras
import numpy as np
import pytest
import tensorflow as tf

import distloop
from distloop.training.loop import Diverged
from tests.problems import assert_equal, classification, classifier, mostly_wide, on, refused, weights

RNG = np.random.default_rng(0)


ROWS = {"x": RNG.normal(size=(12, 3)).astype(np.float32), "y": RNG.normal(size=(12, 2)).astype(np.float32)}


REPLICAS = pytest.mark.parametrize("replicas", [1, pytest.param(2, marks=pytest.mark.slow)])


def dataset(rows=ROWS, batch_size=4):
    return distloop.make_dataset(rows, batch_size)


def net():
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, name="out")], name="net")


def squares(model, batch, training=False):
    return tf.square(model(batch["x"], training=training) - batch["y"])  # [B, 2]


def loss_of(model, batch, training=False):
    return tf.reduce_mean(squares(model, batch, training), -1)  # [B]


def make_trainer(returned=None, replicas=1, settings=None):
    """Makes a trainer whose loss_fn returns `returned(model, batch)`."""

    def model_fn():
        model = net()

        def loss_fn(batch, training):
            return returned(model, batch) if returned else {"loss": loss_of(model, batch, training)}

        predict_fn = lambda batch: model(batch["x"], training=False)  # noqa: E731
        return distloop.ModelSpec(model, keras.optimizers.SGD(0.1), loss_fn, predict_fn=predict_fn)

    return distloop.Trainer(model_fn, on(replicas, **(settings or {})))


def assert_fails(verb, data, *parts, steps=0, trains=False, **made):
    """Checks that a method fails after so many steps at most, leaving the weights as they are unless it `trains`."""
    trainer = make_trainer(**made)
    before = weights(trainer)
    calls = {
        "fit": lambda: trainer.fit(data, steps=5),
        "evals": lambda: trainer.fit(dataset(), steps=1, evals={"a": data}),
    }
    refused(calls.get(verb) or (lambda: getattr(trainer, verb)(data)), *parts)
    assert trainer.step <= steps
    if not trains:
        assert_equal(weights(trainer), before)


@pytest.mark.slow
@REPLICAS
def test_a_value_per_part_of_an_example_that_was_flattened(replicas):
    def returned(model, batch):  # [2 * B], known while running only
        return {"loss": loss_of(model, batch), "error": tf.reshape(squares(model, batch), [-1])}

    assert_fails(
        "fit", dataset(), 'The value "error"', "one value per example", steps=1, replicas=replicas, returned=returned
    )


def generated(*batches):
    signature = {"x": tf.TensorSpec([None, 3]), "y": tf.TensorSpec([None, 2])}
    return tf.data.Dataset.from_generator(lambda: iter(batches), output_signature=signature)


def batch_of(rows, **changes):
    return {**{name: array[:rows] for name, array in ROWS.items()}, **changes}


CHANGES = {
    "structure": {name: ROWS[name] for name in "x"},
    "dtype": batch_of(4, y=np.array([["a", "b"]] * 4)),
    "rank": batch_of(4, y=ROWS["y"][:4, 0]),
}


@pytest.mark.slow
@pytest.mark.parametrize("change", mostly_wide(CHANGES))
@pytest.mark.parametrize(
    ("verb", "place", "replicas"),
    mostly_wide(
        [("fit", 0, 1), ("fit", 0, 2), ("fit", 2, 1), ("evaluate", 2, 1), ("predict", 2, 2)],
        ("fit", 0, 2),
        ("fit", 2, 1),
        ("predict", 2, 2),
    ),
)
def test_a_generator_that_changes_its_batches(verb, place, replicas, change):
    assert_fails(
        verb,
        generated(*[batch_of(4)] * place, CHANGES[change]),
        "A batch differs from those before it",
        "same structure, dtypes and number of axes",
        "correct the generator or its output_signature",
        replicas=replicas,
        steps=place if verb == "fit" else 0,
        trains=verb == "fit" and place > 0,
    )


@pytest.mark.slow
@REPLICAS
@pytest.mark.parametrize("place", [0, 2])
def test_data_that_fails_on_the_way_leaves_counts_of_what_was_applied(place, replicas):
    expected = make_trainer(replicas=replicas)
    if place:
        expected.fit(dataset(batch_of(4)), steps=place)
    trainer = make_trainer(replicas=replicas)
    with pytest.raises(ValueError, match="A batch differs"):
        trainer.fit(generated(*[batch_of(4)] * place, CHANGES["rank"]), steps=5)
    assert_equal(weights(trainer), weights(expected))
    assert trainer.step == int(trainer.optimizer.iterations.numpy()) == place


OTHER_ROWS = "A batch's entries differ in their number of rows"


@pytest.mark.slow
@REPLICAS
@pytest.mark.parametrize("verb", ["fit", "evaluate"])
def test_entries_with_different_numbers_of_rows(verb, replicas):
    data = generated(batch_of(4, y=ROWS["y"][:3]))
    assert_fails(verb, data, OTHER_ROWS, "batch them together", replicas=replicas)


@pytest.mark.slow
def test_entries_with_different_numbers_of_rows_that_broadcast():
    data = tf.data.Dataset.from_tensor_slices(ROWS).batch(4).map(lambda batch: {**batch, "y": batch["y"][:1]})
    assert_fails("fit", data, OTHER_ROWS)


@pytest.mark.slow
def test_an_evaluation_that_turns_out_to_be_empty():
    data = dataset().filter(lambda batch: False)
    assert_fails("evals", data, "dataset", "empty", "one batch", steps=1, trains=True)


def rows_with(bad, row=9):
    """Returns rows of which one, in the third batch of four, is not finite."""
    x = ROWS["x"].copy()
    x[row, 1] = bad
    return {**ROWS, "x": x}


@pytest.mark.slow
@REPLICAS
@pytest.mark.parametrize("bad", mostly_wide([np.nan, np.inf]))
def test_a_loss_that_is_not_finite(bad, replicas):
    expected = make_trainer(replicas=replicas)
    expected.fit(dataset(), steps=2)
    trainer = make_trainer(replicas=replicas)
    parts = ["3", "in x, first in row 1, row 9 of the data", "no setting of the training helps"]
    message = refused(lambda: trainer.fit(dataset(rows_with(bad)), steps=6), *parts, kind=Diverged)
    assert re.search(r"\bStep 3\b", message) and "loss is " in message and "net/out/kernel" in message
    assert trainer.step == 3
    assert_equal(weights(trainer), weights(expected))


@pytest.mark.slow
@pytest.mark.parametrize("bad", mostly_wide([np.nan, np.inf]))
def test_a_loss_that_is_not_finite_is_skipped_if_asked_for(bad):
    trainer = make_trainer(settings={"on_nonfinite": "skip"})
    numbers = trainer.fit(dataset(rows_with(bad)), steps=5)
    assert trainer.step == 5
    assert int(trainer.state.skipped_steps) == numbers["skipped_steps"] == 1
    assert int(trainer.optimizer.iterations.numpy()) == 4
    assert np.isfinite(numbers["loss"]) and all(np.isfinite(value).all() for value in weights(trainer).values())


@pytest.mark.slow
def test_a_metric_that_is_not_finite_is_no_reason_to_stop():
    trainer = make_trainer(
        lambda model, batch: {"loss": loss_of(model, batch), "ratio": tf.math.log(batch["y"][:, 0] * 0.0 - 1.0)},
    )
    numbers = trainer.fit(dataset(), steps=3)
    assert trainer.step == 3 and np.isnan(numbers["ratio"]) and np.isfinite(numbers["loss"])


@pytest.mark.slow
@REPLICAS
def test_a_gradient_that_is_not_finite_though_the_loss_is(replicas):
    trainer = make_trainer(
        lambda model, batch: {"loss": tf.reduce_sum(tf.sqrt(0.0 * model(batch["x"])), -1)}, replicas=replicas
    )
    before = weights(trainer)
    message = refused(lambda: trainer.fit(dataset(), steps=3), "Step 1", kind=Diverged)
    assert "gradient of net/out/kernel" in message and "the loss is finite, so a derivative is not" in message
    assert_equal(weights(trainer), before)


@pytest.mark.slow
@pytest.mark.parametrize("is_ragged", [True, False])
@pytest.mark.parametrize("settings", [dict(num_devices=2), dict(microbatches=2)])
def test_a_term_of_activations_beside_a_weighted_loss_is_refused_in_shards(settings, is_ragged):
    def model_fn():
        hidden = keras.layers.Dense(2, activity_regularizer="l1", name="hidden")
        model = keras.Sequential([keras.Input((3,)), hidden])

        def loss_fn(batch, training):
            values = loss_of(model, batch, training)
            if is_ragged:  # which counts by the elements of a shard
                return {"loss": tf.RaggedTensor.from_row_lengths(values, tf.ones_like(values, tf.int64))}
            return {"loss": distloop.weighted(values, batch["y"][:, 0] ** 2)}

        return distloop.ModelSpec(model, keras.optimizers.SGD(0.1), loss_fn)

    parts = ["'hidden'", "activity regularizer or an add_loss", "in 2 shards", "value per example"]
    trainer = distloop.Trainer(model_fn, on(1, **settings))
    refused(lambda: trainer.fit(dataset(), steps=1), *parts)


@pytest.mark.slow
@pytest.mark.parametrize("label", [7, -1])
def test_labels_that_are_no_number_of_a_class_are_named(label):
    rows = classification(8)
    rows["label"] = np.where(np.arange(8) == 3, label, rows["label"])
    sentence = f"A batch holds the label {label}, and the cross entropy has 4 classes, 0 to 3: number labels from 0"
    trainer = distloop.Trainer(classifier(), on(1, batch_size=8))
    refused(lambda: trainer.fit(rows, steps=1), sentence)
    refused(lambda: trainer.evaluate(rows), sentence)

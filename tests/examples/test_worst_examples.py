"""The rows of an evaluation with the largest loss."""

import types

import keras
import numpy as np
import pytest
import tensorflow as tf

import distloop
from distloop.training.action import Report
from tests import problems


def show(action, loss_fn):
    spec = types.SimpleNamespace(updates=[types.SimpleNamespace(loss_fn=loss_fn)])
    averaged = lambda: tf.name_scope("averaged")  # noqa: E731
    state = types.SimpleNamespace(spec=spec, model="model", averaged=averaged, untrained_variables=())
    ((name, media),) = action(Report(1, 1, {}, state)).items()
    return name, media


def shown_losses(data, loss_fn=lambda batch, training: {"loss": batch}, **settings):
    """Returns the losses in the table of the worst rows."""
    _, media = show(distloop.WorstExamples("test", data, **settings), loss_fn)
    return [line.split(" | ")[0] for line in media.text.splitlines()[2:]]


def test_the_rows_with_the_largest_loss_are_shown_with_their_numbers():
    images = np.arange(5, dtype=np.float32).reshape(5, 1, 1, 1) * np.ones([1, 4, 4, 1], np.float32)
    data = {"image": images, "label": np.array([0, 10, 20, 30, 40])}
    action = distloop.WorstExamples("test", data, most=2, batch_size=3)

    def loss_fn(batch, training):
        losses = tf.constant([1.0, 5.0, 2.0, 7.0, 0.0])
        values = tf.gather(losses, batch["label"] // 10)[:, None] * [1.0, 100.0]  # [B, 2]
        return {"loss": distloop.weighted(values, tf.ones_like(values) * [1.0, 0.0])}

    name, media = show(action, loss_fn)
    assert name == "test/worst_examples" and np.array_equal(media.array[:, 0, 0, 0], [3, 1])
    assert media.captions == ["loss 7  label 30", "loss 5  label 10"]


def test_texts_are_a_table():
    data = tf.data.Dataset.from_tensors((["a|b", "longest", "c"], [0, 1, 1]))
    action = distloop.WorstExamples("test", data, most=2)
    _, media = show(action, lambda batch, training: {"loss": tf.strings.length(batch[0])})
    assert media.text.splitlines()[2:] == ["7 | longest | 1 1", "3 | a\\|b | 1 0"]


@pytest.mark.parametrize("tokens", [False, True])
def test_rows_of_weight_0_are_left_out_and_nan_is_the_worst(tokens):
    data = {"loss": np.array([1.0, 9.0, np.nan, 3.0, np.nan, 8.0], "f"), "weight": np.array([1, 0, 1, 1, 0, 0], "f")}

    def loss_fn(batch, training):
        values, weights = batch["loss"], batch["weight"]
        if tokens:  # [B, 2], where the second token never counts
            values, weights = tf.stack([values, values * np.nan], 1), tf.stack([weights, 0 * weights], 1)
        return {"loss": distloop.weighted(values, weights)}

    assert shown_losses(data, loss_fn, most=3, batch_size=3) == ["nan", "3", "1"]


def test_ragged_rows_of_weight_0_are_left_out():
    data = tf.data.Dataset.from_tensors(tf.constant([1.0, 2.0, 3.0]))
    loss = distloop.weighted(tf.ragged.constant([[1.0, 2.0], [9.0], [3.0]]), [1.0, 0.0, 1.0])
    assert shown_losses(data, lambda batch, training: {"loss": loss}, most=3) == ["3", "1.5"]


def test_data_that_cannot_be_read_again_is_refused_if_it_has_to_be():
    rows = [np.array([1.0, 2.0])] * 2
    with pytest.raises(ValueError, match="give the function that makes it"):
        distloop.WorstExamples("test", iter(rows), every=1)
    for data in iter(rows), lambda: iter(rows):
        assert shown_losses(data) == ["2", "2", "1", "1"]


def test_arrays_that_change_in_place_are_shown_as_they_are():
    rows = np.array([1.0, 2.0])
    action = distloop.WorstExamples("test", rows)
    rows[0] = 5
    _, media = show(action, lambda batch, training: {"loss": batch})
    assert [line.split(" | ")[0] for line in media.text.splitlines()[2:]] == ["5", "2"]


@pytest.mark.parametrize("arguments", [["test"], [np.zeros(3)]])
def test_the_name_and_the_data_are_both_needed(arguments):
    with pytest.raises(ValueError, match=r"WorstExamples\('test', test, every=500\)"):
        distloop.WorstExamples(*arguments)


@pytest.mark.wide
@pytest.mark.slow
def test_a_loss_that_draws_numbers_leaves_the_replicas_streams_alone():
    def model_fn():  # its loss draws in evaluations, too
        spec = problems.classifier()()
        noise = keras.random.SeedGenerator(7)
        spec.model.noise = noise

        def loss_fn(batch, training):
            outputs = spec.updates[0].loss_fn(batch, training)
            return {"loss": outputs["loss"] * (1 + keras.random.uniform((), seed=noise))}

        return distloop.ModelSpec(spec.model, keras.optimizers.SGD(0.1), loss_fn)

    data = distloop.make_dataset(problems.classification(16), 8)
    trainers = []
    for actions in ([], [distloop.WorstExamples("test", data, every=2)]):
        trainers.append(distloop.Trainer(model_fn, problems.on(2)))
        trainers[-1].fit(data, steps=4, actions=actions)
    problems.assert_equal(*map(problems.everything, trainers))

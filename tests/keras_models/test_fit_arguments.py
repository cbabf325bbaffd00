"""Arguments of Keras's `fit`: what they ask for, the numbers that Keras gets with them, and sentences about others."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import distloop
from distloop.data.source import Source
from distloop.keras_models.fit_arguments import read_arguments
from distloop.run.fit_call import batches_per_epoch
from tests.data.python_batches import ONE, endless, taken, three
from tests.keras_models.compiled_models import (
    LABEL,
    ONE_HOT,
    SAMPLE_WEIGHT,
    X,
    assert_same_weights,
    batches,
    compiled,
    copy_of,
    net,
)
from tests.problems import classification, classifier, on, refused

ARRAYS = (X, LABEL)
CLASS_WEIGHT = {0: 0.25, 2: 4.0}


def weights_of(*batch, class_weight=CLASS_WEIGHT):
    weigh = read_arguments(batch, None, {"class_weight": class_weight}).map_batch
    return weigh(*map(tf.constant, batch))[2].numpy()


def test_validation_data_goes_before_a_split_and_other_data_stays():
    data, evals = batches(*ARRAYS), {"test": ARRAYS}
    read = read_arguments(data, evals, {})
    assert read.train is data and read.evals == evals and read.map_batch is None
    assert read_arguments(data, None, {"class_weight": None, "batch_size": None, "validation_data": None}).evals == {}
    read = read_arguments(ARRAYS, None, {"validation_split": 0.5, "validation_data": (X[:4], LABEL[:4].tolist())})
    assert len(read.train[0]) == 32 and len(read.evals["val"][1]) == 4


def test_the_same_arguments_ask_for_the_same_data():
    def read(train, *labels, batch_size=8):
        return read_arguments(train, None, {"batch_size": batch_size, "validation_split": 0.5}, *labels)

    asked_for = read(ARRAYS).asked_for
    for same in (ARRAYS, (X, LABEL), [X, LABEL]):
        assert read(same).is_asked_for(asked_for)
    assert read(X, LABEL).is_asked_for(asked_for)
    assert not read(ARRAYS, batch_size=4).is_asked_for(asked_for)
    for other in ((X, LABEL.copy()), (LABEL, X), X):
        assert not read(other).is_asked_for(asked_for)
    assert not read_arguments(ARRAYS, None, {}).is_asked_for(())
    weights = {"class_weight": {0: 1.0}}
    asked_for = read_arguments(ARRAYS, None, weights).asked_for
    assert read_arguments(ARRAYS, None, weights).is_asked_for(asked_for)
    weights["class_weight"][0] = 2.0  # in the same dict
    assert not read_arguments(ARRAYS, None, weights).is_asked_for(asked_for)


@pytest.mark.slow
def test_a_run_on_arrays_is_the_same_however_it_is_cut_into_calls_of_fit():
    weights, rows = [], classification(24)
    for cuts in ([2], [1, 2]):
        trainer = distloop.Trainer(classifier(), on(1, batch_size=8, seed=1))
        for epochs in cuts:
            trainer.fit(dict(rows), epochs=epochs)
        weights.append(trainer.model.get_weights())
    np.testing.assert_equal(*weights)


@pytest.mark.parametrize(("part", "expected"), [(0.25, 24), (0.3, 22), (0.5, 16), (0.001, 31)])
def test_the_last_part_of_arrays_validates(part, expected):
    read = read_arguments([X, LABEL], None, {"validation_split": part})
    assert len(read.train[0]) == len(read.train[1]) == expected
    np.testing.assert_array_equal(read.evals["val"][1], LABEL[expected:])


def test_class_weights_are_those_of_keras():
    expected = [CLASS_WEIGHT.get(label, 1.0) for label in LABEL]
    for labels in (LABEL, LABEL[:, None].astype(np.float32), ONE_HOT):
        np.testing.assert_array_equal(weights_of(X, labels), expected)
    np.testing.assert_allclose(weights_of(X, LABEL, SAMPLE_WEIGHT), SAMPLE_WEIGHT * expected)
    columns = weights_of(X, LABEL, np.ones([32, 3], np.float32))
    np.testing.assert_array_equal(columns, np.array(expected)[:, None] * np.ones([1, 3]))


@pytest.mark.parametrize("labels", [LABEL, LABEL[:, None].astype(np.float32), LABEL.tolist()], ids=range(3))
def test_a_class_weight_of_a_class_that_no_label_is_is_told_of(labels, caplog):
    read_arguments((X, labels), None, {"class_weight": CLASS_WEIGHT | {7: 2.0, -1: 1.0}})
    (record,) = caplog.records
    assert "class_weight has weights for the classes -1, 7, which no label is: " in record.getMessage()
    caplog.clear()
    read_arguments((X, labels), None, {"class_weight": CLASS_WEIGHT})
    assert not caplog.records


def test_a_class_weight_without_a_column_in_one_hot_labels_is_refused():
    weigh = read_arguments(batches(X, ONE_HOT), None, {"class_weight": {0: 1.0, 7: 2.0}}).map_batch
    refused(lambda: weigh(X, tf.constant(ONE_HOT)), "class 7", "one-hot of 3 classes, 0 to 2")


@pytest.mark.slow
def test_an_epoch_with_class_weights_trains_as_keras_does():
    # Keras divides by the number of rows, unless the loss divides by the sum of the weights, as distloop does.
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="mean_with_sample_weight")
    model = compiled(net(3), loss)
    twin = copy_of(model)
    twin.fit(*ARRAYS, batch_size=8, class_weight=CLASS_WEIGHT, shuffle=False, verbose=0)
    trainer = distloop.Trainer(distloop.from_keras(model), on(2))
    trainer.fit(batches(*ARRAYS), epochs=1, class_weight=CLASS_WEIGHT)
    assert_same_weights(trainer.model, twin)


@pytest.mark.slow
def test_fit_takes_them_together():
    model = compiled(net(3), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    trainer = distloop.Trainer(distloop.from_keras(model), on(1))
    arguments = {"batch_size": 6, "validation_split": 0.25, "class_weight": CLASS_WEIGHT}
    numbers = trainer.fit(ARRAYS, epochs=2, **arguments)
    assert trainer.step == 8 and "val/loss" in numbers
    assert numbers["val/loss"] == pytest.approx(trainer.evaluate((X[24:], LABEL[24:]))["loss"])
    trainer.fit(ARRAYS, epochs=3, **arguments)  # goes on in the same data
    assert trainer.step == 12


def test_an_epoch_has_the_steps_that_it_is_given():
    source = Source(endless, ONE, steps_per_epoch=3, map_batch=lambda batch: {"x": batch["x"] + 5})
    assert batches_per_epoch(source) == 3
    assert taken(source, 4) == [5, 6, 7, 8]
    assert source.first_rows()["x"].numpy().tolist() == [5, 5]


MEANT = {"step": "steps", "epoch": "epochs", "class_weights": "class_weight", "validation_datas": "validation_data"}
MEANT |= dict.fromkeys(["validation", "val_data", "val", "eval", "test_data"], "evals, .*")


@pytest.mark.parametrize("name", MEANT)
def test_other_and_misspelt_names_of_arguments_are_recognized(name):
    sentence = rf"^fit was given {name}=\.\.\., which is no argument of fit: did you mean {MEANT[name]}.*\?$"
    with pytest.raises(ValueError, match=sentence):
        read_arguments(ARRAYS, None, {name: ARRAYS})


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("callbacks", "actions=[distloop.from_callback(callback)]"),
        ("verbose", "Config(console="),
        ("x", "as in fit(x, y, epochs=2)"),
        ("colour", "it takes steps, epochs"),
    ],
)
def test_arguments_that_fit_does_not_have_are_refused_with_what_to_give(name, part):
    refused(lambda: read_arguments(ARRAYS, None, {name: 1}), f"fit was given {name}=...", part)


@pytest.mark.parametrize(
    ("train", "arguments", "part"),
    [
        (batches(X), {"batch_size": 8}, "has batches of its own"),
        ((X, object()), {"batch_size": 8}, "is not of arrays alone: give arrays or lists of numbers"),
        (ARRAYS, {"batch_size": 0}, "batch_size=0; it takes a whole number"),
        (ARRAYS, {"steps_per_epoch": 1.5}, "steps_per_epoch=1.5; it takes a whole number"),
        (batches(X), {"validation_split": 0.1}, "only arrays can be split"),
        (three, {"validation_split": 0.1}, "only arrays can be split"),
        (ARRAYS, {"validation_split": 1.5}, "a fraction between 0 and 1"),
        (ARRAYS, {"class_weight": [1.0, 2.0]}, "it takes a dict, class -> weight"),
    ],
)
def test_what_the_data_does_not_allow_is_refused(train, arguments, part):
    refused(lambda: read_arguments(train, None, arguments), part)


def test_evaluations_are_a_dict_by_name_and_two_of_one_name_are_refused():
    refused(lambda: read_arguments(ARRAYS, [object()], {}), "give a dict of datasets by name")
    arguments = {"validation_data": ARRAYS}
    refused(lambda: read_arguments(ARRAYS, {"val": ARRAYS}, arguments), "evals with the name 'val'", "give either")


@pytest.mark.parametrize(
    ("batch", "part"),
    [
        (({"x": X},), "no (x, y) or (x, y, sample_weight)"),
        ((X, {"a": LABEL}), "with one tensor y"),
        ((X, np.zeros([32, 4, 3])), "labels of shape (32, 4, 3)"),
    ],
)
def test_class_weights_need_one_label_a_row(batch, part):
    tensors = tf.nest.map_structure(tf.constant, batch)
    refused(lambda: read_arguments(batch, None, {"class_weight": {0: 1.0}}).map_batch(*tensors), part)

"""Prediction: outputs in order, checks of what predict_fn returned, and which function of it is called."""

import types

import keras
import numpy as np
import pytest
import tensorflow as tf

import distloop
from distloop.evaluation.prediction import DEFAULT_SIGNATURE, Predictor, check_outputs
from tests.problems import on


def make_trainer():
    def model_fn():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        loss_fn = lambda batch, training: {"loss": model(batch["x"])[:, 0]}  # noqa: E731
        double = lambda batch: {"y": 2.0 * batch["x"][:, 0]}  # noqa: E731
        return distloop.ModelSpec(model, keras.optimizers.SGD(0.1), loss_fn, predict_fn=double)

    return distloop.Trainer(model_fn, on(1))


def test_outputs_come_in_order_a_batch_at_a_time_or_joined():
    trainer = make_trainer()
    data = tf.data.Dataset.from_tensor_slices({"x": np.arange(5, dtype=np.float32)[:, None]}).batch(2)
    parts = [part["y"].tolist() for part in trainer.stream_predictions(data)]
    assert parts == [[0.0, 2.0], [4.0, 6.0], [8.0]]
    assert trainer.predict(data)["y"].tolist() == [0.0, 2.0, 4.0, 6.0, 8.0]


def test_half_precision_is_cast_unless_it_is_kept():
    outputs = {"a": tf.ones([3, 2], tf.float16), "b": tf.ones([3], tf.int32)}
    assert [t.dtype for t in tf.nest.flatten(check_outputs(outputs, 3))] == [tf.float32, tf.int32]
    assert check_outputs(outputs, 3, keep_dtypes=True)["a"].dtype == tf.float16


@pytest.mark.parametrize("output", [tf.constant(1.0), tf.ones([2, 4])])
def test_outputs_without_a_row_for_each_row_of_input_are_refused(output):
    with pytest.raises(ValueError, match=r"one row of output per row of input, \[3, ...\]"):
        check_outputs(output, 3)


def test_ragged_outputs_pass():
    check_outputs(tf.ragged.constant([[1], [], [2, 3]]), 3)


def predictor(predict_fn):
    return Predictor(types.SimpleNamespace(spec=types.SimpleNamespace(predict_fn=predict_fn)))


def test_without_a_name_the_first_function_is_called():
    several = predictor({"classify": abs, "embed": abs})
    assert [several._find(name) for name in (None, DEFAULT_SIGNATURE, "embed")] == ["classify", "classify", "embed"]


def test_a_function_of_that_name_goes_before_the_first():
    assert predictor({"embed": abs, DEFAULT_SIGNATURE: abs})._find(DEFAULT_SIGNATURE) == DEFAULT_SIGNATURE


def test_an_unknown_name_is_refused_with_those_that_there_are():
    with pytest.raises(ValueError, match=r"signature='other'.*\['classify', 'embed'\]"):
        predictor({"classify": abs, "embed": abs})._find("other")
    with pytest.raises(ValueError, match="just one predict_fn: leave signature out"):
        predictor(abs)._find("other")


def test_a_spec_without_predict_fn_is_told_what_to_give():
    with pytest.raises(ValueError, match="ModelSpec has no predict_fn; give"):
        predictor(None)._find(None)

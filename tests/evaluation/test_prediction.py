"""Prediction: checks of what predict_fn returned, which function of it is called, and files of outputs."""

import types

import pytest
import tensorflow as tf

from distloop.evaluation.prediction import DEFAULT_SIGNATURE, Predictor, check_outputs


def test_half_precision_is_cast_unless_it_is_kept():
    outputs = {"a": tf.ones([3, 2], tf.float16), "b": tf.ones([3], tf.int32)}
    assert [t.dtype for t in tf.nest.flatten(check_outputs(outputs, 3))] == [tf.float32, tf.int32]
    assert check_outputs(outputs, 3, keep_dtypes=True)["a"].dtype == tf.float16


@pytest.mark.parametrize("output", [tf.constant(1.0), tf.ones([2, 4])])
def test_outputs_without_a_row_for_each_row_of_input_are_refused(output):
    with pytest.raises(ValueError, match=r"one row of output per row of input, \[3, ...\]"):
        check_outputs(output, 3)
    check_outputs(tf.ragged.constant([[1], [], [2, 3]]), 3)


def predictor(predict_fn):
    return Predictor(types.SimpleNamespace(spec=types.SimpleNamespace(predict_fn=predict_fn)))


def test_without_a_name_the_first_function_or_the_default_is_called():
    several = predictor({"classify": abs, "embed": abs})
    assert [several._find(name) for name in (None, DEFAULT_SIGNATURE, "embed")] == ["classify", "classify", "embed"]
    assert predictor({"embed": abs, DEFAULT_SIGNATURE: abs})._find(DEFAULT_SIGNATURE) == DEFAULT_SIGNATURE


def test_an_unknown_name_is_refused_with_those_that_there_are():
    with pytest.raises(ValueError, match=r"signature='other'.*\['classify', 'embed'\]"):
        predictor({"classify": abs, "embed": abs})._find("other")
    with pytest.raises(ValueError, match="leave signature out, or give"):
        predictor(abs)._find("other")
    with pytest.raises(ValueError, match="ModelSpec has no predict_fn; give"):
        predictor(None)._find(None)

"""Which function of `predict_fn` is called; what it predicts is tested with the exports."""

import types

import pytest

from distloop.training.prediction import DEFAULT_SIGNATURE, Predictor


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

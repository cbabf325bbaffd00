"""Functions of distloop's own that TensorFlow traces without a warning."""

import pathlib
import re

import pytest
import tensorflow as tf

import distloop
from distloop.graph_functions import graph_function

PACKAGE = pathlib.Path(distloop.__file__).parent


@pytest.mark.parametrize(("make", "is_warned_of"), [(tf.function, True), (graph_function, False)])
def test_tensorflow_does_not_warn_of_a_function_that_each_of_many_trainers_traces(make, is_warned_of, monkeypatch):
    warnings = []
    monkeypatch.setattr(tf.get_logger(), "warning", lambda text, *_: warnings.append(text))
    one = tf.constant(1)
    code = "lambda: one + 1"  # in each case code of its own, of which TensorFlow counts the traces
    make_one = eval(f"lambda: {code}", {"one": one})
    assert [int(make(make_one())()) for _ in range(6)] == [2] * 6
    assert ("retracing" in "".join(warnings)) == is_warned_of


def test_no_module_makes_another_tensorflow_function():
    calls = re.compile(r"^[^`#\n]*(?:(?<!`)tf\.function\(|@tf\.function\b)", re.M)
    made = [path.name for path in sorted(PACKAGE.rglob("*.py")) if calls.search(without_docstrings(path.read_text()))]
    assert made == ["graph_functions.py"]


def without_docstrings(source):
    return re.sub(r'""".*?"""', "", source, flags=re.S)

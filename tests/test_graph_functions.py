"""Functions of distloop's own that TensorFlow traces without a warning."""

import pathlib
import re
import time

import numpy as np
import pytest
import tensorflow as tf

import distloop
from distloop.graph_functions import TimeLimit, graph_clock, graph_function

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


@pytest.mark.parametrize(("passed_secs", "is_ahead"), [(0.5, True), (1.5, False), (-3600.0, False), (3600.0, False)])
def test_a_time_limit_is_over_when_its_time_is_or_the_clock_was_set(passed_secs, is_ahead, monkeypatch):
    now = [1.7e9]
    monkeypatch.setattr(tf, "timestamp", lambda: tf.constant(now[0], tf.float64))
    limit = TimeLimit(tf.constant(1.0, tf.float64))
    now[0] += passed_secs
    assert bool(limit.is_ahead()) == is_ahead


@pytest.mark.parametrize("secs", [0.0, -100.0])
def test_a_time_limit_of_nothing_is_over_at_once_and_one_without_end_never(secs):
    assert not TimeLimit(tf.constant(secs, tf.float64)).is_ahead()
    assert TimeLimit(tf.constant(np.inf, tf.float64)).is_ahead()


def test_times_in_a_graph_are_those_of_the_monotonic_clock():
    began_at, clock = time.monotonic(), graph_clock()
    times = [tf.timestamp().numpy() for _ in range(3)]
    found = clock(times)
    assert np.allclose(np.diff(found), np.diff(times), atol=1e-5)
    assert began_at <= found[0] and found[-1] <= time.monotonic()


@pytest.mark.parametrize("change_secs", [-3600.0, 3600.0])
def test_times_in_a_graph_stay_in_order_where_the_clock_is_set_between_them(change_secs):
    began_at, clock = time.monotonic(), graph_clock()
    now = time.time()
    found = clock([now, now + 0.1, now + 0.2 + change_secs, now + 0.3 + change_secs])
    assert (np.diff(found) >= 0).all() and began_at <= found[0] and found[-1] <= time.monotonic()

"""Media and numbers computed from the state."""

import contextlib
import types

import numpy as np
import pytest

from distloop.actions.action import Report
from distloop.actions.summary import Summary
from distloop.monitoring.media import Text


def show(result):
    return call(lambda state: result)


def call(fn):
    streams = types.SimpleNamespace(preserved=contextlib.nullcontext)
    return Summary("shown", fn)(Report(10, 100, {}, types.SimpleNamespace(random_streams=streams, step=5)))


def test_a_result_is_shown_under_the_name():
    text = Text("a")
    assert show(text) == {"shown": text}
    assert show(np.float32(0.5)) == {"shown": 0.5}


def test_each_entry_of_a_dict_has_the_name_before_its_own():
    text = Text("a")
    assert show({"note": text, "norm": 2}) == {"shown/note": text, "shown/norm": 2.0}


def test_the_function_takes_the_state():
    assert call(lambda state: state.step) == {"shown": 5.0}


def test_a_result_that_cannot_be_shown_is_refused():
    with pytest.raises(ValueError, match=r"'shown'\) returned a ndarray as 'shown'; it returns numbers, or media"):
        show(np.zeros([3]))

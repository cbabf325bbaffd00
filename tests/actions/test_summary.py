"""Media and numbers computed from the state."""

import contextlib
import types

import numpy as np
import pytest

from distloop.actions.summary import Summary
from distloop.monitoring.media import Text
from distloop.training.action import Report
from distloop.training.boundary import run_actions


def test_a_result_is_shown_under_the_name_and_refused_if_it_cannot_be():
    streams, text = types.SimpleNamespace(preserved=contextlib.nullcontext), Text("a")
    report = Report(10, 100, {}, types.SimpleNamespace(random_streams=streams, step=5))
    for result, shown in [
        (text, {"shown": text}),
        (np.float32(0.5), {"shown": 0.5}),
        ({"note": text, "norm": 2}, {"shown/note": text, "shown/norm": 2.0}),
    ]:
        assert Summary("shown", lambda state, result=result: result)(report) == shown
    assert Summary("shown", lambda state: state.step)(report) == {"shown": 5.0}
    with pytest.raises(ValueError, match=r"The action 'shown' returned array.* under 'shown', which is no number"):
        run_actions([Summary("shown", lambda state: np.zeros([3]), every=1)], report)

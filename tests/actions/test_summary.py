"""Media and numbers computed from the state."""

import types

import numpy as np
import pytest
import tensorflow as tf

import distloop
from distloop.actions.summary import Summary
from distloop.monitoring.media import Text
from distloop.training.action import Report
from distloop.training.boundary import run_actions
from tests import problems


def test_a_result_is_shown_under_the_name_and_refused_if_it_cannot_be():
    text = Text("a")
    report = Report(10, 100, {}, types.SimpleNamespace(untrained_variables=(), step=5))
    for result, shown in [
        (text, {"shown": text}),
        (np.float32(0.5), {"shown": 0.5}),
        ({"note": text, "norm": 2}, {"shown/note": text, "shown/norm": 2.0}),
    ]:
        assert Summary("shown", lambda state, result=result: result)(report) == shown
    assert Summary("shown", lambda state: state.step)(report) == {"shown": 5.0}
    with pytest.raises(ValueError, match=r"The action 'shown' returned array.* under 'shown', which is no number"):
        run_actions([Summary("shown", lambda state: np.zeros([3]), every=1)], report)


LOOKS = {
    "summary": lambda data: Summary("mean", lambda state: tf.reduce_mean(state.model(data["x"])), every=1),
    "worst": lambda data: distloop.WorstExamples("test", data, every=1),
    "layers": lambda data: distloop.ActivationHistograms(data, every=1),
}


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("look", LOOKS)
def test_what_the_model_writes_while_an_action_looks_at_it_is_put_back(look, replicas):
    data = problems.classification(16)
    trainers = []
    for actions in ([], [LOOKS[look](data)]):
        trainers.append(distloop.Trainer(problems.counting_model, problems.on(replicas, batch_size=8)))
        trainers[-1].fit(data, steps=4, actions=actions)
    problems.assert_equal(*map(problems.everything, trainers))

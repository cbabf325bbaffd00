"""`when_better`: any action, called where a metric is better than ever, also after a stop."""

import math

import pytest

import distloop
from distloop.actions.save import when_better
from distloop.training.action import Report
from tests.problems import classification, classifier, on, refused

VALUES = {1: 0.5, 2: 0.4, 3: math.nan, 4: 0.7, 5: 0.7, 6: 0.9}


class Noting(distloop.Action):
    """Notes its calls, which a checkpoint holds."""

    every = 0

    def __init__(self):
        self.steps, self.hooks = [], []

    def __call__(self, report):
        self.steps.append(report.step)
        return {"noted": float(len(self.steps))}

    def on_start(self, report):
        self.hooks.append("start")

    def on_end(self, report):
        self.hooks.append("end")

    def end_boundary(self, report):
        self.hooks.append(report.step)

    def get_state(self):
        return self.steps

    def set_state(self, state):
        self.steps = list(state)


@pytest.mark.parametrize(("mode", "steps"), [("max", [1, 4, 6]), ("min", [1, 2])])
def test_an_action_is_called_where_the_metric_is_better_than_ever(mode, steps):
    action = Noting()
    gate = when_better("score", action, mode=mode)
    for step, value in VALUES.items():
        result = gate(Report(step, 10, {"score": value}, state=None))
        gate.end_boundary(Report(step, 10, {"score": value}, state=None))
        assert result == ({"noted": float(len(action.steps))} if step in steps else None)
    assert action.steps == action.hooks == steps


def test_the_best_value_and_the_actions_state_survive_a_stop(tmp_path):
    def measure(report):
        return {"score": VALUES[report.step]}

    measure.every = 1

    def fit(steps):
        action = Noting()
        actions = [measure, distloop.when_better("score", action, mode="max")]
        data = distloop.make_dataset(classification(33), 8)
        distloop.Trainer(classifier(), on(1, workdir=str(tmp_path))).fit(data, steps=steps, actions=actions)
        return action

    assert fit(4).steps == [1, 4]
    second = fit(6)
    assert second.steps == [1, 4, 6] and second.hooks == ["start", 6, "end"]


def test_a_plain_function_may_be_gated_and_a_wrong_use_is_refused():
    seen = []
    gate = when_better("test/accuracy", lambda report: seen.append(report.step))
    gate(Report(3, 10, {"test/accuracy": 0.5}, state=None))
    gate(Report(4, 10, {"loss": 0.5}, state=None))
    assert seen == [3]
    refused(lambda: when_better("score", print), "'score'", "does not say what is better", "mode='max'")
    refused(lambda: when_better("test/loss", 3), "when_better was given 3", "give a callable")
    refused(lambda: when_better("", print), "when_better was given ''")

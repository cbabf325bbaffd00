"""Evaluations as actions."""

from distloop.actions.action import Report
from distloop.actions.evaluate import Evaluate


def test_evaluate_reports_under_its_name():
    evaluate = Evaluate("test", lambda: {"loss": 0.5, "auc": 0.9}, every=20)
    assert evaluate.every == 20
    assert evaluate(Report(10, 100, {}, state=None)) == {"test/loss": 0.5, "test/auc": 0.9}

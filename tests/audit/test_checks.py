"""Checks of data, code and gradients, for probes of which only the answer is there; test_audit.py has real ones."""

from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf

from distloop.audit import checks
from distloop.audit.checks import Audit, Finding
from distloop.audit.probe import CallTrace, TwoSteps
from distloop.audit.tracing import VariableCreated


def findings(check, **observations):
    """Returns kind and name of what a check finds in a probe's observations."""
    return [(finding.what, finding.name) for finding in check(SimpleNamespace(**observations))]


def test_passes_in_the_same_order_are_fine():
    assert findings(checks.data_order, passes=[["a", "b"], ["a", "b"]]) == []


@pytest.mark.parametrize(("second", "batch"), [(["a", "c"], 1), (["b", "a"], 0), (["a"], 1), (["a", "b", "c"], 3)])
def test_the_first_batch_of_another_order_is_named(second, batch):
    assert findings(checks.data_order, passes=[["a", "b"], second]) == [("data in another order", f"batch {batch}")]


@pytest.mark.parametrize(("name", "hint"), [("kernel", "in model_fn"), ("seed_generator_state", "SeedGenerator")])
def test_a_variable_that_loss_fn_creates_is_named(name, hint):
    created = VariableCreated(name)
    (finding,) = checks.created_variables(SimpleNamespace(trace=CallTrace([], None, set(), created)))
    assert finding.what == "variable made in a step" and name in finding.name and hint in finding.hint
    assert not [*checks.created_variables(SimpleNamespace(trace=CallTrace([], None, set())))]


def test_foreign_variables_are_named_three_at_most():
    written = [(SimpleNamespace(name=f"v{i}:0"), True) for i in range(5)]
    read = [(SimpleNamespace(name="w:0"), False)]
    assert findings(checks.foreign_variables, foreign_variables=written + read) == [
        ("state in no checkpoint", "v0, v1, v2 and 2 more"),
        ("state in no checkpoint", "w"),
    ]


def calls_of(*constants):
    calls = []
    for constant in constants:
        with tf.Graph().as_default() as graph:
            tf.constant(1.0) * tf.constant(constant)
        calls.append(graph.get_operations())
    return CallTrace(calls, None, set())


def test_a_constant_that_changes_between_traces_is_found():
    (finding,) = checks.python_values(SimpleNamespace(trace=calls_of(2.0, 3.0, 4.0)))
    assert finding.what == "Python value that changes" and "test_checks.py" in finding.name
    assert not [*checks.python_values(SimpleNamespace(trace=calls_of(2.0, 2.0, 3.0)))]  # replica 1 may differ


@pytest.mark.parametrize(
    ("one", "other", "is_found"),
    [([0.5], [0.5], True), ([0.5], [0.6], False), ([7], [7], False), ([1] * 16, [1] * 16, True)],
)
def test_equal_draws_are_found_unless_chance_may_explain_them(one, other, is_found, monkeypatch):
    monkeypatch.setattr(checks.step_operations, "describe", lambda op, layers: op)
    drawn = [("Normal", tf.constant(one), tf.constant(other))]
    expected = [("identical random numbers", "Normal")] if is_found else []
    assert findings(checks.identical_draws, draws=drawn, layers=[]) == expected


def test_gradients_that_are_missing_or_stay_zero_are_found():
    zero, one = np.zeros(2), np.ones(2)
    before = {"a": zero, "b": one, "c": zero, "d": None}
    after = {"a": zero, "b": zero, "c": one, "d": None}
    assert findings(checks.gradients, two_steps=TwoSteps(before, after, [])) == [
        ("zero gradient", "a"),
        ("no gradient", "d"),
    ]


def test_an_audit_prints_a_line_for_each_kind_of_finding_and_for_what_was_not_checked():
    findings = [Finding("no gradient", f"net/kernel{i}", "use it in the loss") for i in range(52)]
    other = Finding("no gradient", "net/bias", "leave it out")
    assert str(Audit((*findings, other), ("the rest",))).splitlines() == [
        "no gradient: net/kernel0, net/kernel1, net/kernel2 and 49 more: use it in the loss.",
        "no gradient: net/bias: leave it out.",
        "not checked: the rest.",
    ]
    assert str(findings[0]) == "no gradient: net/kernel0: use it in the loss."
    assert str(Audit(())) == "nothing found."

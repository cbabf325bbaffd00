"""Details of the audit's checks, for probes of which only the answer is there; test_audit.py has bugs in models."""

from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf

from distloop.audit import audit, checks
from distloop.audit.checks import Audit, Finding
from distloop.audit.probe import Measurement
from distloop.audit.tracing import as_replica, compiled, hold_draws


def findings(check, **observations):
    """Returns kind and name of what a check finds in a probe's observations."""
    return [(finding.what, finding.name) for finding in check(SimpleNamespace(**observations))]


@pytest.mark.parametrize(("second", "batch"), [(["a", "c"], 1), (["a"], 1), (["a", "b", "c"], 3)])
def test_the_first_batch_of_another_order_is_named(second, batch):
    assert findings(checks.data_order, passes=[["a", "b"], second]) == [("data in another order", f"batch {batch}")]


@pytest.mark.parametrize(
    ("one", "other", "is_found"),
    [([0.5], [0.5], True), ([0.5], [0.6], False), ([7], [7], False), ([1] * 16, [1] * 16, True)],
)
def test_equal_draws_are_found_unless_chance_may_explain_them(one, other, is_found, monkeypatch):
    monkeypatch.setattr(checks.step_operations, "describe", lambda op, layers: "Normal")
    drawn = [(tf.Graph().create_op("NoOp", []), tf.constant(one), tf.constant(other))]
    expected = [("identical random numbers", "Normal")] if is_found else []
    assert findings(checks.identical_draws, draws=drawn, layers=[]) == expected


def test_an_audit_prints_a_line_for_each_finding_and_what_was_not_checked():
    findings = [Finding("no gradient", f"net/kernel{i}", "use it in the loss") for i in range(52)]
    other = Finding("no gradient", "net/bias", "leave it out")
    assert str(Audit((*findings, other), ("the rest",))).splitlines() == [
        "no gradient: net/kernel0, net/kernel1, net/kernel2 and 49 more: use it in the loss.",
        "no gradient: net/bias: leave it out.",
        "not checked: the rest.",
    ]
    assert str(findings[0]) == "no gradient: net/kernel0: use it in the loss."
    assert str(Audit(())) == "nothing found."


WHOLE = Measurement({"kernel": np.array([1.0, 2.0]), "bias": None}, {"loss": 2.5}, 4.0, {})
HALVES = [  # by their weights, 1 and 3, the mean is the whole
    Measurement({"kernel": np.array([kernel, 2.0]), "bias": None}, {"loss": weight}, weight, {})
    for kernel, weight in ((3.0, 1.0), (1 / 3, 3.0))
]


def compare(whole, halves=HALVES):
    probe = SimpleNamespace(tolerance=1e-3, layers=[], state=SimpleNamespace(virtual_replicas=0))
    probe.compare_operations = lambda update, training: []
    return [*audit._values_and_gradients(probe, SimpleNamespace(name=""), whole, halves, True)]


def test_a_gradient_that_differs_is_named_unless_others_are_far_larger():
    (finding,) = compare(WHOLE._replace(gradients={**WHOLE.gradients, "kernel": np.array([1.0, 3.0])}))
    assert finding.name == "kernel" and "the gradient of kernel differs between 1 and 2 replicas" in finding.hint
    large = {"kernel": np.array([1.0, 2.0]), "large": np.array([1e6])}
    parts = [half._replace(gradients={"kernel": np.array([0.9, 2.0]), "large": np.array([1e6])}) for half in HALVES]
    assert compare(WHOLE._replace(gradients=large), parts) == []


def test_two_calls_have_the_same_operations_though_the_first_one_captures():
    captured, calls = tf.Variable(2.0), []

    def trace(x):
        for _ in range(2):
            with as_replica(0, 2, set()) as operations:
                x = x * captured + tf.random.stateless_normal([], [1, 2])
            calls.append([op.type for op in operations])
        return x

    compiled(trace, tf.constant(1.0))
    assert calls[0] == calls[1] and "Mul" in calls[0]


def test_random_floats_are_held_also_outside_of_called_functions():
    def draw(kind, are_left):
        draws = {
            "float": lambda: tf.random.stateless_normal([2], [1, 2]),
            "whole": lambda: tf.cast(tf.random.stateless_uniform([2], [1, 2], 0, 9, tf.int32), tf.float32),
            "called": lambda: tf.function(lambda: tf.random.stateless_normal([2], [1, 2]))(),
        }

        def trace(x):
            with as_replica(0, 2, set()) as operations:
                result = x * draws[kind]()
            assert hold_draws(operations) == are_left
            return result

        return compiled(trace, tf.constant(2.0))(tf.constant(2.0)).numpy().tolist()

    assert draw("float", False) == [pytest.approx(1.8)] * 2
    assert draw("whole", True) != [pytest.approx(1.8)] * 2 != draw("called", True)

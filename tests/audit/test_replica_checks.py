"""Checks of the replica law, for probes of which only the answer is there; test_audit.py has real ones."""

from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf

from distloop.audit import audit
from distloop.audit.probe import Measurement, TwoSteps

UPDATE = SimpleNamespace(name="")
WHOLE = Measurement({"kernel": np.array([1.0, 2.0]), "bias": None}, {"loss": 2.5}, 4.0, {})
HALVES = [
    Measurement({"kernel": np.array([3.0, 2.0]), "bias": None}, {"loss": 1.0}, 1.0, {}),
    Measurement({"kernel": np.array([1 / 3, 2.0]), "bias": None}, {"loss": 3.0}, 3.0, {}),
]  # by their weights, 1 and 3, the mean is the whole


def probe(operations=(), **observations):
    return SimpleNamespace(
        tolerance=1e-3,
        layers=[],
        state=SimpleNamespace(virtual_replicas=0),
        compare_operations=lambda update, training: list(operations),
        **observations,
    )


def compare(whole=WHOLE, halves=HALVES, **observations):
    return [*audit._values_and_gradients(probe(**observations), UPDATE, whole, halves, True)]


def test_means_by_weight_that_equal_the_whole_are_fine():
    assert compare() == []


def test_a_value_that_differs_is_named_with_both_numbers():
    (finding,) = compare(WHOLE._replace(values={"loss": 2.0}))
    assert finding.what == "depends on the number of replicas" and finding.name == "loss"
    assert finding.hint.startswith("loss is 2 on 1 and 2.5 on 2 replicas: take no mean")


def test_a_gradient_that_differs_is_named_unless_it_is_small_beside_the_others():
    (finding,) = compare(WHOLE._replace(gradients={**WHOLE.gradients, "kernel": np.array([1.0, 3.0])}))
    assert finding.name == "kernel" and "the gradient of kernel differs between 1 and 2 replicas" in finding.hint
    large = {"kernel": np.array([1.0, 2.0]), "large": np.array([1e6])}
    parts = [half._replace(gradients={"kernel": np.array([0.9, 2.0]), "large": np.array([1e6])}) for half in HALVES]
    assert compare(WHOLE._replace(gradients=large), parts) == []


def test_the_first_operation_whose_rows_differ_is_named(monkeypatch):
    monkeypatch.setattr(audit.step_operations, "describe", lambda op, layers: op.name)

    def operation(name, *inputs):
        return SimpleNamespace(name=name, inputs=[op.outputs[0] for op in inputs], outputs=[object()])

    matmul = operation("matmul")
    mean, later = operation("mean", matmul), operation("later", matmul)
    rows, other = tf.constant([1.0, 2.0]), [tf.constant([1.0]), tf.constant([3.0])]
    operations = [(matmul, rows, [rows[:1], rows[1:]]), (mean, rows, other), (later, rows, other)]
    (finding,) = compare(WHOLE._replace(values={"loss": 2.0}), operations=operations)
    assert finding.name == "loss, by mean"


@pytest.mark.parametrize(
    ("whole", "halves", "what"),
    [
        (np.array(2.5), [np.array(1.0), np.array(3.0)], None),  # the mean over 1 and 3 rows
        (np.array(3.0), [np.array(1.0), np.array(3.0)], "statistics of one replica"),  # the largest
        (np.array(4), [np.array(4), np.array(4)], None),
        (np.array(4), [np.array(1), np.array(3)], "replicas apart"),  # a whole number is not averaged
    ],
)
def test_statistics_are_the_mean_over_the_replicas(whole, halves, what):
    batches = [tf.zeros([1, 2]), tf.zeros([3, 2])]
    written = [half._replace(written={"norm/mean": value}) for half, value in zip(HALVES, halves, strict=True)]
    whole = WHOLE._replace(written={"norm/mean": whole})
    findings = [*audit._written_statistics(probe(halves=batches), whole, written)]
    assert [(finding.what, finding.name) for finding in findings] == ([(what, "norm/mean")] if what else [])


def test_variables_that_differ_between_replicas_are_named():
    (finding,) = audit.drift(probe(two_steps=TwoSteps({}, {}, ["counter/count"])))
    assert (finding.what, finding.name) == ("replicas apart", "counter/count")


@pytest.mark.parametrize(
    ("collectives", "is_random", "part"),
    [(set(), False, None), ({"all_gather"}, True, "all_gather"), (set(), True, "random numbers")],
)
def test_what_cannot_be_compared_is_said(collectives, is_random, part):
    reason = audit._incomparable(collectives, is_random)
    assert reason is None if part is None else part in reason

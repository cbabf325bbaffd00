"""How much of the machine a run uses."""

from distloop.actions import memory_use
from distloop.actions.action import Report
from distloop.actions.utilization import Utilization


def test_the_memory_is_asked_for_once_a_second_and_at_the_end(monkeypatch):
    levels = iter(range(1, 10))
    monkeypatch.setattr(memory_use, "peaks", lambda: {"host_memory_gb": next(levels)})
    measure = Utilization()
    peaks = [
        measure(Report(step, 40, {}, state=None, time=when))["host_memory_gb"]
        for step, when in ((10, 5.0), (20, 5.9), (30, 6.1), (40, 6.2))
    ]
    assert peaks == [1, 1, 2, 3]


def test_operations_per_second_follow_from_the_examples_per_second():
    report = Report(10, 100, {"examples_per_sec": 50.0}, state=None)
    metrics = Utilization(flops_per_example=4e6, peak_flops=1e9)(report)
    assert metrics["model_flops_per_sec"] == 2e8 and metrics["model_flops_utilization"] == 0.2
    assert "model_flops_utilization" not in Utilization(4e6)(report)
    assert "model_flops_per_sec" not in Utilization()(report)

"""The load of each stage's device; tests/distributed/test_pipeline.py reads a real profile."""

import types

from distloop.actions import memory_use
from distloop.actions.action import Report
from distloop.actions.pipeline_usage import PipelineUsage


def test_nothing_is_known_of_cpus_before_there_is_a_profile():
    usage = PipelineUsage(["CPU:0", "CPU:1"], types.SimpleNamespace(is_written=False, directory=""))
    assert usage(Report(10, 100, {}, None)) == {}


def test_gpus_report_their_peak_memory_at_each_log(monkeypatch):
    monkeypatch.setattr(memory_use, "device_peak_gb", {"GPU:0": 1.5, "GPU:1": 2.5}.get)
    usage = PipelineUsage(["GPU:0", "GPU:1"], types.SimpleNamespace(is_written=False, directory=""))
    for step in (10, 20):
        expected = {"stage_0/device_memory_gb": 1.5, "stage_1/device_memory_gb": 2.5}
        assert usage(Report(step, 100, {}, None)) == expected

"""The peak memory of a separate process, and the available memory."""

import os
import types

import pytest
import tensorflow as tf

from distloop.monitoring import memory
from tests import forked


@pytest.mark.slow
def test_the_peak_includes_memory_that_was_freed(tmp_path):
    program = """
import numpy as np
from distloop.monitoring import memory
from tests import forked
print(memory.peaks()["host_memory_gb"])
taken = np.ones(2_000_000_000, np.uint8)
del taken
print(memory.peaks()["host_memory_gb"])
"""
    (tmp_path / "program.py").write_text(program)
    process = forked.run([str(tmp_path / "program.py")], env=os.environ, timeout=120)
    before, after = map(float, process.stdout.split())
    assert before < 1.0 and 2.0 < after < 3.0


def test_only_accelerators_have_device_memory(monkeypatch):
    assert set(memory.peaks()) == {"host_memory_gb"}
    devices = [tf.config.LogicalDevice(f"/device:{name}", name[:3]) for name in ("CPU:0", "GPU:0", "GPU:1")]
    monkeypatch.setattr(tf.config, "list_logical_devices", lambda: devices)
    held = {"GPU:0": 3_000_000_000, "GPU:1": 5_000_000_000}
    monkeypatch.setattr(tf.config.experimental, "get_memory_info", lambda name: {"peak": held[name], "current": 0})
    assert memory.peaks()["device_memory_gb"] == 5.0


def test_available_memory_is_positive_and_at_most_all():
    total_gb = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    assert 0 < memory.available_gb() <= total_gb


@pytest.mark.parametrize(("printed", "expected"), [("81559\n40960\n", 40960 * 2**20 / 1e9), ("No devices\n", None)])
def test_the_memory_of_the_smallest_gpu_is_read_from_its_tool(monkeypatch, printed, expected):
    monkeypatch.setattr(memory.subprocess, "run", lambda *args, **kwargs: types.SimpleNamespace(stdout=printed))
    assert memory.gpu_memory_gb() == expected


def test_without_the_tool_the_memory_of_gpus_is_unknown(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert memory.gpu_memory_gb() is None

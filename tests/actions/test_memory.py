"""The memory that variables hold and a process takes, and the action that notes it."""

import os
import types

import keras
import pytest
import tensorflow as tf

import distloop
from distloop.actions import memory
from distloop.actions.action import Report
from distloop.actions.memory import MemoryUse, held_by_device
from distloop.model.state import TrainState
from distloop.monitoring import ledger
from tests import forked


def make_state(average_decay=0.0):
    def model_fn():
        model = keras.Sequential(
            [keras.Input((2,), dtype="int32"), keras.layers.Embedding(1000, 4, name="items"), keras.layers.Dense(3)],
            name="net",
        )
        return distloop.ModelSpec(model, keras.optimizers.SGD(momentum=0.9), lambda batch, training: {"loss": batch})

    return TrainState(model_fn, tf.distribute.get_strategy(), average_decay)


def test_weights_tables_slots_and_averages_are_told_apart():
    (held,) = held_by_device(make_state(0.9)).values()
    assert set(held) == set(ledger.HELD)
    dense, table = 4 * (4 * 3 + 3), 4 * 1000 * 4
    assert 0 <= held.pop("optimizer slots") - (dense + table) <= 12  # the rate and the count of steps
    assert held == {"weights": dense, "embedding tables": table, "averages of weights": dense + table}


def test_variables_count_where_they_are_placed():
    state = make_state()
    slot = state.optimizer.variables[-1]
    before = held_by_device(state)
    with tf.device("CPU:1"):
        slot._value = tf.Variable(tf.zeros(slot.shape))
    size = 4 * slot.value.shape.num_elements()
    after = held_by_device(state)
    assert after["CPU:1"] == {"optimizer slots": size}
    assert after["CPU:0"]["optimizer slots"] == before["CPU:0"]["optimizer slots"] - size


@pytest.mark.slow
def test_the_peak_includes_memory_that_was_freed(tmp_path):
    program = """
import numpy as np
from distloop.actions import memory
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


def test_what_is_held_is_noted_before_the_first_step_and_what_was_taken_at_the_end(tmp_path, monkeypatch):
    workdir, held = str(tmp_path), {"GPU:0": {"weights": 5}}
    of_device = {"weights": 4, "averages of weights": 4, "activations": 3}
    estimated = {"GPU:0": of_device, "GPU:1": of_device}  # with other settings
    ledger.write_memory(workdir, ledger.Memory(estimated, {"GPU:0": 6}))
    monkeypatch.setattr(memory, "device_peak_gb", lambda device: 3.0)
    monkeypatch.setattr(memory, "held_by_device", lambda state: {device: dict(of) for device, of in held.items()})
    note, report = MemoryUse(workdir), Report(10, 30, {}, None)
    note.on_start(report)
    assert ledger.read_memory(workdir) == ledger.Memory({"GPU:0": {"weights": 5, "activations": 3}}, {"GPU:0": 6})
    note.on_end(report)
    assert ledger.read_memory(workdir).taken == {"GPU:0": 3 * 10**9}
    monkeypatch.setattr(memory, "device_peak_gb", lambda device: 2.0)  # of another process
    note.on_end(report)
    assert ledger.read_memory(workdir).taken == {"GPU:0": 3 * 10**9}


def test_on_cpus_the_growth_of_the_process_counts_and_a_second_fit_keeps_what_the_first_took(tmp_path, monkeypatch):
    peaks = iter([1.0, 1.5, 1.5, 1.5])
    monkeypatch.setattr(memory, "held_by_device", lambda state: {"CPU:0": {"weights": 5}})
    monkeypatch.setattr(memory, "peaks", lambda: {"host_memory_gb": next(peaks)})
    for _ in range(2):
        note, report = MemoryUse(str(tmp_path)), Report(1, 1, {}, None)
        note.on_start(report)
        note.on_end(report)
        assert ledger.read_memory(str(tmp_path)).taken == {"host": 5 * 10**8}


def test_available_memory_is_positive_and_at_most_all():
    total_gb = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    assert 0 < memory.available_gb() <= total_gb


@pytest.mark.parametrize(("printed", "expected"), [("81559\n40960\n", 40960 * 2**20 / 1e9), ("No devices\n", None)])
def test_the_memory_of_the_smallest_gpu_is_read_from_its_tool(monkeypatch, printed, expected):
    monkeypatch.setenv("PATH", "")
    assert memory.gpu_memory_gb() is None  # without the tool
    monkeypatch.setattr(memory.subprocess, "run", lambda *args, **kwargs: types.SimpleNamespace(stdout=printed))
    assert memory.gpu_memory_gb() == expected

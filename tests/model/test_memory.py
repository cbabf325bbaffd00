"""The memory that variables hold and a process takes, and the action that notes it."""

import os

import keras
import pytest
import tensorflow as tf

import distloop
from distloop.actions.built_in import MemoryUse
from distloop.model import memory
from distloop.model.memory import held_by_device
from distloop.model.state import TrainState
from distloop.training.action import Report
from distloop.workdir import ledger
from tests import forked
from tests.problems import mirrored


def make_state(average_decay=0.0, strategy=None):
    def model_fn():
        model = keras.Sequential(
            [keras.Input((2,), dtype="int32"), keras.layers.Embedding(1000, 4, name="items"), keras.layers.Dense(3)],
            name="net",
        )
        return distloop.ModelSpec(model, keras.optimizers.SGD(momentum=0.9), lambda batch, training: {"loss": batch})

    return TrainState(model_fn, strategy or tf.distribute.get_strategy(), average_decay)


def test_weights_tables_slots_and_averages_are_told_apart():
    (held,) = held_by_device(make_state(0.9)).values()
    assert set(held) == set(ledger.HELD)
    dense, table = 4 * (4 * 3 + 3), 4 * 1000 * 4
    assert 0 <= held.pop("optimizer slots") - (dense + table) <= 12  # the rate and the count of steps
    assert held == {"weights": dense, "embedding tables": table, "averages of weights": dense + table}


def test_every_replica_holds_its_slots():
    held = held_by_device(make_state(strategy=mirrored(2)))
    assert held["CPU:0"]["optimizer slots"] == held["CPU:1"]["optimizer slots"] > 0


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
from distloop.model import memory
from tests import forked
print(memory.peaks()["host_memory_gb"])
taken = np.ones(2_000_000_000, np.uint8)
del taken
print(memory.peaks()["host_memory_gb"])
"""
    (tmp_path / "program.py").write_text(program)
    process = forked.run([str(tmp_path / "program.py")], env=os.environ)
    before, after = map(float, process.stdout.split())
    assert before < 1.0 and 2.0 < after < 3.0


def test_only_accelerators_have_device_memory(monkeypatch):
    assert set(memory.peaks()) == {"host_memory_gb"}
    devices = [tf.config.LogicalDevice(f"/device:{name}", name[:3]) for name in ("CPU:0", "GPU:0", "GPU:1")]
    monkeypatch.setattr(tf.config, "list_logical_devices", lambda: devices)
    held = {"GPU:0": 3_000_000_000, "GPU:1": 5_000_000_000}
    monkeypatch.setattr(tf.config.experimental, "get_memory_info", lambda name: {"peak": held[name], "current": 0})
    assert memory.peaks()["device_memory_gb"] == 5.0


def test_what_is_held_is_noted_before_the_first_step_with_the_estimate(tmp_path, monkeypatch):
    workdir, held = str(tmp_path), {"GPU:0": {"weights": 5}}
    of_device = {"weights": 4, "averages of weights": 4, "activations": 3}
    ledger.write_memory(workdir, {"GPU:0": of_device, "GPU:1": of_device})  # with other settings
    monkeypatch.setattr(memory, "held_by_device", lambda state: {device: dict(of) for device, of in held.items()})
    MemoryUse(workdir).on_start(Report(10, 30, {}, None))
    assert ledger.read_memory(workdir) == {"GPU:0": {"weights": 5, "activations": 3}}

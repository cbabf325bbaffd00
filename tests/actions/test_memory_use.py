"""The action that notes a run's memory."""

from distloop.actions.action import Report
from distloop.actions.memory_use import MemoryUse
from distloop.monitoring import memory, memory_file


def test_the_first_log_and_the_last_are_noted_and_an_estimate_stays(tmp_path, monkeypatch):
    workdir, held = str(tmp_path), {"GPU:0": {"weights": 5}}
    memory_file.write(
        workdir, memory_file.Memory({"GPU:0": {"weights": 4, "activations": 3}, "GPU:1": {"weights": 4}}, {})
    )
    peak = {"GPU:0": 1.0}
    monkeypatch.setattr(memory, "device_peak_gb", lambda device: peak[device])
    note = MemoryUse(workdir, lambda state: held)
    found = []
    for step, peak["GPU:0"] in ((10, 1.0), (20, 2.0), (30, 3.0)):
        assert note(Report(step, 30, {}, None)) == {}
        found.append(memory_file.read(workdir))
    assert [content.taken["GPU:0"] for content in found] == [10**9, 10**9, 3 * 10**9]
    assert found[-1].devices == {"GPU:0": {"weights": 5, "activations": 3}}


def test_on_cpus_the_growth_of_the_process_counts(tmp_path, monkeypatch):
    peaks = iter([1.0, 1.5])
    monkeypatch.setattr(memory, "peaks", lambda: {"host_memory_gb": next(peaks)})
    note = MemoryUse(str(tmp_path), lambda state: {"CPU:0": {"weights": 5}, "CPU:1": {"weights": 5}})
    note(Report(1, 1, {}, None))
    assert memory_file.read(str(tmp_path)).taken == {"host": 5 * 10**8}

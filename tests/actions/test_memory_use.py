"""The action that notes a run's memory."""

from distloop.actions.action import Report
from distloop.actions.memory_use import MemoryUse
from distloop.monitoring import memory, memory_file


def test_what_is_held_is_noted_before_the_first_step_and_what_was_taken_at_the_end(tmp_path, monkeypatch):
    workdir, held = str(tmp_path), {"GPU:0": {"weights": 5}}
    of_device = {"weights": 4, "averages of weights": 4, "activations": 3}
    estimated = {"GPU:0": of_device, "GPU:1": of_device}  # with other settings
    memory_file.write(workdir, memory_file.Memory(estimated, {"GPU:0": 6}))
    monkeypatch.setattr(memory, "device_peak_gb", lambda device: 3.0)
    note, report = MemoryUse(workdir, lambda state: held), Report(10, 30, {}, None)
    note.on_start(report)
    assert memory_file.read(workdir) == memory_file.Memory({"GPU:0": {"weights": 5, "activations": 3}}, {"GPU:0": 6})
    note.on_end(report)
    assert memory_file.read(workdir).taken == {"GPU:0": 3 * 10**9}
    monkeypatch.setattr(memory, "device_peak_gb", lambda device: 2.0)  # of another process
    note.on_end(report)
    assert memory_file.read(workdir).taken == {"GPU:0": 3 * 10**9}


def test_a_second_fit_of_a_process_keeps_how_much_the_first_took(tmp_path, monkeypatch):
    peaks = iter([1.0, 1.5, 1.5, 1.5])
    monkeypatch.setattr(memory, "peaks", lambda: {"host_memory_gb": next(peaks)})
    for _ in range(2):
        note, report = MemoryUse(str(tmp_path), lambda state: {"CPU:0": {"weights": 5}}), Report(1, 1, {}, None)
        note.on_start(report)
        note.on_end(report)
        assert memory_file.read(str(tmp_path)).taken == {"host": 5 * 10**8}


def test_on_cpus_the_growth_of_the_process_counts(tmp_path, monkeypatch):
    peaks = iter([1.0, 1.5])
    monkeypatch.setattr(memory, "peaks", lambda: {"host_memory_gb": next(peaks)})
    note, report = MemoryUse(str(tmp_path), lambda state: {"CPU:0": {"weights": 5}}), Report(1, 1, {}, None)
    note.on_start(report)
    note.on_end(report)
    assert memory_file.read(str(tmp_path)).taken == {"host": 5 * 10**8}

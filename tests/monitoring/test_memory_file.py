"""The file about a run's memory."""

from distloop.monitoring.memory_file import FILE, Memory, measured, read, taken_on, write


def test_what_is_written_is_read(tmp_path):
    memory = Memory({"GPU:0": {"weights": 5}}, {"GPU:0": 7})
    write(str(tmp_path), memory)
    assert read(str(tmp_path)) == memory


def test_what_was_taken_is_known_of_gpus_and_of_the_host_of_cpus():
    assert measured(["CPU:0", "CPU:1"]) == ["host"] and measured(["GPU:0", "GPU:1"]) == ["GPU:0", "GPU:1"]
    memory = Memory({}, {"host": 7, "GPU:0": 8})
    assert taken_on(None, ["CPU:0"]) == {}
    assert taken_on(memory, ["CPU:0", "CPU:1"]) == {"host": 7}
    assert taken_on(memory, ["GPU:0", "GPU:1"]) == {"GPU:0": 8}


def test_a_missing_or_damaged_file_tells_nothing(tmp_path):
    assert read(str(tmp_path)) is None
    for text in (
        "{",
        '{"devices": 3, "taken": {}}',
        '{"devices": {}}',
        '{"devices": {"GPU:0": {"weights": "x"}}, "taken": {}}',
    ):
        (tmp_path / FILE).write_text(text)
        assert read(str(tmp_path)) is None

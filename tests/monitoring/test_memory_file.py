"""The file about a run's memory."""

from distloop.monitoring.memory_file import FILE, Memory, read, write


def test_what_is_written_is_read(tmp_path):
    memory = Memory({"GPU:0": {"weights": 5}}, {"GPU:0": 7})
    write(str(tmp_path), memory)
    assert read(str(tmp_path)) == memory


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

"""Rows of metrics.jsonl."""

import json
import os
import time

import numpy as np
import pytest

from distloop.actions.write import JsonWriter
from distloop.workdir import records
from distloop.workdir.records import parse_row


def read_rows(path):
    def refuse(constant):
        raise ValueError(f"{constant} is no JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def test_rows_of_an_earlier_run_are_kept_aside(tmp_path):
    for run in range(3):
        writer = JsonWriter(str(tmp_path / "m.jsonl"), start=0)
        writer.write(run, {"loss": 1.0})
        writer.close()
    rows = {name: [row["step"] for row in read_rows(tmp_path / name)] for name in sorted(os.listdir(tmp_path))}
    assert rows == {"m.jsonl": [2], "m.jsonl.1": [0], "m.jsonl.2": [1]}


def test_each_write_is_a_row_with_step_and_time_that_strict_parsers_read(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr("distloop.actions.write.sync", synced.append)
    writer = JsonWriter(str(tmp_path / "run" / "metrics.jsonl"))
    assert synced == [str(tmp_path / "run")]  # so the name of the file is on the disk
    before = time.time()
    writer.write(np.int64(5), {"loss": np.float32(0.5), "test/accuracy": 1})
    writer.write(10, {"a": float("nan"), "b": float("inf"), "c": -float("inf"), "d": np.float32("nan"), "e": 1.0})
    writer.close()
    first, second = read_rows(tmp_path / "run" / "metrics.jsonl")
    assert before <= first.pop("time") <= second.pop("time") <= time.time()
    assert first == {"step": 5, "loss": 0.5, "test/accuracy": 1.0}
    assert second == {"step": 10, "a": None, "b": None, "c": None, "d": None, "e": 1.0}


def test_a_bad_path_is_an_os_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        JsonWriter(str(tmp_path / "file" / "metrics.jsonl"))
    with pytest.raises(IsADirectoryError):
        JsonWriter(str(tmp_path))


class Disk:
    """A file on a disk that takes some bytes more and then is full."""

    def __init__(self, file, space):
        self._file, self.space = file, space

    def write(self, data):
        if not self.space:
            raise OSError(28, "No space left on device")
        written = self._file.write(data[: self.space])
        self.space -= written
        return written

    def __getattr__(self, name):
        return getattr(self._file, name)


def test_after_a_full_disk_new_rows_replace_the_half_row_it_took(tmp_path):
    path = tmp_path / "metrics.jsonl"
    writer = JsonWriter(str(path))
    writer.write(1, {"loss": 1.0})
    writer.flush()
    whole = path.read_bytes()
    writer._file = disk = Disk(writer._file, space=10)
    writer.write(2, {"loss": 2.0})
    with pytest.raises(OSError, match="No space"):
        writer.flush()
    assert path.read_bytes().startswith(whole)
    writer.discard(2)
    disk.space = 10_000
    for step in (2, 3):
        writer.write(step, {"loss": 2.0})
    writer.close()
    assert [row["step"] for row in read_rows(path)] == [1, 2, 3]


def test_a_run_that_goes_on_from_step_0_keeps_its_file_without_later_rows(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for again, kept in [(False, [0]), (True, [])]:
        path.write_text('{"step": 0, "loss": 1.0}\n{"step": 2, "loss": 0.5}\n')
        JsonWriter(str(path), 0, is_written_again=again, goes_on=True).close()
        assert [row["step"] for row in read_rows(path)] == kept and os.listdir(tmp_path) == ["metrics.jsonl"]


@pytest.mark.parametrize("after", [0.5, 2, 30, 99, 100, 150])
@pytest.mark.parametrize("end", ["", '{"step": 101, "lo', '{"step": 101}', "\n\n", "x" * 500])
def test_rows_after_the_start_are_cut_off_at_the_end_of_the_file(after, end, tmp_path, monkeypatch):
    monkeypatch.setattr(records, "_BLOCK_BYTES", 64)
    path = tmp_path / "metrics.jsonl"
    lines = ['{"step": 1, "half"\n', *(f'{{"step": {step}, "loss": {step / 7}}}\n' for step in range(1, 101))]
    path.write_text("".join(lines) + end)
    JsonWriter(str(path), start=after).close()
    kept = "".join(lines[: int(min(after, 100)) + 1]) if after >= 1 else ""
    assert path.read_text() == kept


def test_going_on_reads_the_end_of_a_long_file_only(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f'{{"step": {step}, "loss": 0.5}}\n' for step in range(50_000)))
    parsed = []
    monkeypatch.setattr(records, "parse_row", lambda line: parsed.append(line) or parse_row(line))
    JsonWriter(str(path), start=49_990).close()
    assert len(parsed) == 10 and path.read_text().endswith('{"step": 49990, "loss": 0.5}\n')


@pytest.mark.parametrize("block_bytes", [1, 30, 1000])
def test_the_rows_between_two_steps_are_read_from_the_end(block_bytes, tmp_path, monkeypatch):
    monkeypatch.setattr(records, "_BLOCK_BYTES", block_bytes)
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"".join(b'{"step": %d, "time": 1.0, "loss": %d}\n' % (n, n) for n in range(9)) + b'{"step": 9')
    for after, until in ((-1, 8), (3, 5), (3, 100), (8, 8), (5, 3)):
        rows = records.rows_between(str(path), after, until)
        assert [row["step"] for row in rows] == [n for n in range(9) if after < n <= until]
    assert records.rows_between(str(tmp_path / "none"), 0, 9) == []

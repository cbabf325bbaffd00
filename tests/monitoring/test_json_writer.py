"""Rows of metrics.jsonl."""

import json
import os
import time

import numpy as np
import pytest

from distloop.monitoring.json_writer import JsonWriter


def read_rows(path):
    def refuse(constant):
        raise ValueError(f"{constant} is no JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


# metrics.jsonl.


def test_rows_of_an_earlier_run_are_kept_aside(tmp_path):
    for run in range(3):
        writer = JsonWriter(str(tmp_path / "m.jsonl"), start=0)
        writer.write(run, {"loss": 1.0})
        writer.close()
    rows = {name: [row["step"] for row in read_rows(tmp_path / name)] for name in sorted(os.listdir(tmp_path))}
    assert rows == {"m.jsonl": [2], "m.jsonl.1": [0], "m.jsonl.2": [1]}


def test_each_write_is_one_row_with_step_and_time(tmp_path):
    writer = JsonWriter(str(tmp_path / "run" / "metrics.jsonl"))
    before = time.time()
    writer.write(np.int64(5), {"loss": np.float32(0.5), "test/accuracy": 1})
    writer.write(10, {"loss": 0.25})
    writer.close()
    first, second = read_rows(tmp_path / "run" / "metrics.jsonl")
    assert before <= first.pop("time") <= second.pop("time") <= time.time()
    assert first == {"step": 5, "loss": 0.5, "test/accuracy": 1.0}
    assert second == {"step": 10, "loss": 0.25}


def test_rows_of_an_earlier_run_stay(tmp_path):
    for step in (1, 2):
        writer = JsonWriter(str(tmp_path / "metrics.jsonl"))
        writer.write(step, {})
        writer.close()
    assert [row["step"] for row in read_rows(tmp_path / "metrics.jsonl")] == [1, 2]


def test_a_row_can_be_read_before_the_file_is_closed(tmp_path):
    writer = JsonWriter(str(tmp_path / "metrics.jsonl"))
    writer.write(1, {"loss": 1.0})
    writer.flush()
    assert len(read_rows(tmp_path / "metrics.jsonl")) == 1
    writer.close()


def test_nan_and_inf_are_null_so_that_strict_parsers_read_the_row(tmp_path):
    writer = JsonWriter(str(tmp_path / "metrics.jsonl"))
    writer.write(1, {"a": float("nan"), "b": float("inf"), "c": -float("inf"), "d": np.float32("nan"), "e": 1.0})
    writer.close()
    (row,) = read_rows(tmp_path / "metrics.jsonl")
    assert [row[name] for name in "abcde"] == [None, None, None, None, 1.0]


def test_half_a_row_of_a_killed_run_does_not_spoil_the_next_one(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "lo')
    writer = JsonWriter(str(path))
    writer.write(2, {"loss": 1.0})
    writer.close()
    lines = path.read_text().splitlines()
    assert lines[:2] == ['{"step": 1}', '{"step": 2, "lo']
    assert json.loads(lines[2])["loss"] == 1.0


def test_a_bad_path_is_an_os_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        JsonWriter(str(tmp_path / "file" / "metrics.jsonl"))
    with pytest.raises(IsADirectoryError):
        JsonWriter(str(tmp_path))

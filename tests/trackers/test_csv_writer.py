"""A CSV file of rows: whole at any time, each row once over kills, and with columns that come later."""

import contextlib
import csv
import os

import pytest

import distloop
from distloop.actions.write import JsonWriter
from distloop.monitoring.deliveries import Deliveries
from distloop.trackers import csv_writer
from tests import forked
from tests.problems import mostly_wide


def read(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def deliver(path, rows, workdir="", start=0):
    with Deliveries([distloop.CsvWriter(path)], str(workdir)).open(start, {}) as opened:
        for step, numbers in rows:
            if workdir:
                with contextlib.closing(JsonWriter(f"{workdir}/metrics.jsonl", step - 1, goes_on=True)) as json_writer:
                    json_writer.write(step, numbers)
            opened.write(step, numbers, 1e9 + step)


def test_a_name_that_comes_later_is_a_column_that_earlier_rows_leave_empty(tmp_path):
    path = tmp_path / "tables" / "rows.csv"
    deliver(path, [(1, {"loss": 0.5}), (2, {"loss": 0.25, "a, b": 1.0}), (3, {"a, b": float("nan")})])
    assert path.read_text().splitlines() == [
        'step,time,loss,"a, b"',
        "1,1000000001.0,0.5,",
        "2,1000000002.0,0.25,1.0",
        "3,1000000003.0,,nan",
    ]
    assert os.listdir(path.parent) == ["rows.csv"]


def test_a_column_that_could_not_be_added_is_added_with_the_next_try(tmp_path, monkeypatch):
    writer, numbers = distloop.CsvWriter(path := tmp_path / "rows.csv"), {"loss": 0.5, "accuracy": 1.0}
    writer.open({}, None)
    writer.write(1, {"loss": 0.5}, 1e9)
    with monkeypatch.context() as patch, pytest.raises(OSError):
        patch.setattr(csv_writer, "replacing", lambda path: open(tmp_path / "gone" / "rows.csv"))
        writer.write(2, numbers, 1e9)
    writer.write(2, numbers, 1e9)
    assert [(row["step"], row["accuracy"]) for row in read(path)] == [("1", ""), ("2", "1.0")]


def test_a_resumed_run_goes_on_in_its_file_and_a_new_one_keeps_the_earlier(tmp_path):
    path, workdir = tmp_path / "rows.csv", tmp_path / "run"
    workdir.mkdir()
    deliver(path, [(1, {"loss": 0.5}), (2, {"loss": 0.5})], workdir)
    with open(path, "a") as file:
        file.write("3,10")  # half a row
    deliver(path, [(2, {"loss": 0.1}), (3, {"loss": 0.3})], workdir)
    assert [(row["step"], row["loss"]) for row in read(path)] == [("1", "0.5"), ("2", "0.5"), ("3", "0.3")]
    deliver(path, [(1, {"loss": 7.0})])
    assert [row["loss"] for row in read(path)] == ["7.0"] and len(read(f"{path}.1")) == 3


PROGRAM = """
import os, signal, sys, threading, time
import distloop
from distloop.actions.write import JsonWriter
from distloop.monitoring.deliveries import Deliveries
workdir, secs = sys.argv[1:]
path = workdir + "/rows.csv"
for attempt in range(1000):
    if not (process := os.fork()):
        with Deliveries([distloop.CsvWriter(path)], workdir).open(0, {}) as opened:
            threading.Timer(float(secs) * attempt, os.kill, (os.getpid(), signal.SIGKILL)).start()
            json_writer = JsonWriter(workdir + "/metrics.jsonl", 0, goes_on=True)
            for step in range(1, 301):  # from the beginning, as if no checkpoint had been there
                for file in (json_writer, opened):
                    file.write(step, {"loss": step / 7, f"column {step // 50}": 1.0}, 1e9)
                    file.flush()
        os._exit(0)
    if os.waitpid(process, 0)[1] == 0:
        break
print(attempt)
"""


@pytest.mark.slow
@pytest.mark.parametrize("secs", mostly_wide(["0.01", "0.002"]))
def test_every_row_is_there_once_however_often_the_process_is_killed(secs, tmp_path):
    result = forked.run_program(tmp_path, PROGRAM, secs)
    assert result.returncode == 0 and int(result.stdout) > 3, result.stderr
    rows = read(tmp_path / "rows.csv")
    assert [(int(row["step"]), float(row["loss"])) for row in rows] == [(step, step / 7) for step in range(1, 301)]
    assert list(rows[0])[-1] == "column 6" and [row["column 1"] for row in rows].count("1.0") == 50


@pytest.mark.parametrize("content", [b"", b"step,ti", b"step,time,loss\r\n"])
def test_a_file_without_a_row_begins_with_the_first(content, tmp_path):
    path = tmp_path / "rows.csv"
    path.write_bytes(content)
    writer = distloop.CsvWriter(path)
    writer.open({}, str(path))
    assert writer.last_step == -1
    writer.write(1, {"loss": 0.5}, 2.0)
    writer.open({}, str(path))
    with open(path, "a") as file:
        file.write("2,1000")  # on a disk that became full
    writer.write(2, {"loss": 0.25}, 2.0)
    assert path.read_bytes() == b"step,time,loss\r\n1,2.0,0.5\r\n2,2.0,0.25\r\n"

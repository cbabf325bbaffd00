"""Rows of a run's files: written, read again, damaged."""

import json
import math
import os

import pytest

import distloop
from distloop.actions.write import JsonWriter
from distloop.workdir import records
from tests.problems import full_disk


def write_metrics(directory, *rows):
    writer = JsonWriter(str(directory / "metrics.jsonl"))
    for step, metrics in rows:
        writer.write(step, metrics)
    writer.close()


def test_metrics_are_read_as_they_were_written(tmp_path):
    write_metrics(tmp_path, (5, {"loss": 0.5, "test/accuracy": 1}), (10, {"loss": 0.25}))
    first, second = distloop.read_metrics(tmp_path)
    assert first.pop("time") <= second.pop("time")
    assert (first, second) == ({"step": 5, "loss": 0.5, "test/accuracy": 1.0}, {"step": 10, "loss": 0.25})
    assert type(first["step"]) is int and type(first["test/accuracy"]) is float


def test_values_that_were_not_finite_are_nan_and_home_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write_metrics(tmp_path, (1, {"a": math.nan, "b": math.inf, "c": 2.0}))
    (row,) = distloop.read_metrics("~")
    assert math.isnan(row["a"]) and math.isnan(row["b"]) and row["c"] == 2.0


@pytest.fixture
def metrics(tmp_path):
    return tmp_path / "metrics.jsonl"


@pytest.mark.parametrize("torn", ['{"step": 3, "ti', '{"step": 3, "loss": 1.', "{", "\x00\x00", "\ufffd"])
def test_half_a_row_is_left_out_at_the_end_and_inside(tmp_path, metrics, torn):
    write_metrics(tmp_path, (1, {"loss": 1.0}), (2, {"loss": 0.5}))
    metrics.write_text(metrics.read_text() + torn)
    assert [row["step"] for row in distloop.read_metrics(tmp_path)] == [1, 2]
    write_metrics(tmp_path, (3, {"loss": 0.25}))  # sets the half row apart
    assert [row["step"] for row in distloop.read_metrics(tmp_path)] == [1, 2, 3]


NO_ROWS = [b"[]", b"3", b'"step"', b"{}", b'{"step": null}', b'{"step": -1}', b'{"loss": 1.0}', b"", b'{"step": 4']
NO_ROWS += [b'"loss": 2.0}', b'{"step": 5}, {"step": 6}', b'"b": 2}, {"step": 10}']
NO_ROWS += [b'{"step": 1, "loss": ' + b"[" * n + b"]" * n + b"}" for n in (150, 100_000)]  # too deep to be printed
ODD_ROWS = [b'{"step": 7, "of": {"a": [1]}}', b'{"step": 8, "text": "{["}', b'{"step": 9, "loss": null}']
ODD_ROWS += [b'{"step": 1, "reason": "' + b"[" * 500 + b'"}']  # brackets in a text are no levels
ODD_LINES = [*NO_ROWS, *ODD_ROWS]


@pytest.mark.parametrize(
    "odd", [*([line] for line in ODD_LINES), ODD_LINES, ODD_LINES[::-1], [b'{"step": 1', b'"b": 2}, {"step": 10}']]
)
def test_lines_that_are_no_rows_are_left_out(odd, tmp_path, metrics):
    lines = [b'{"step": 1, "loss": 0.5}', *odd, b'{"step": 2, "loss": 0.25}']
    metrics.write_bytes(b"\n".join(lines))
    rows = [json.loads(line) for line in lines if line not in NO_ROWS and line != b'{"step": 1']
    assert records.read_rows(str(metrics)) == rows


def test_the_rows_of_a_long_file_share_their_names(tmp_path, metrics):
    metrics.write_bytes(b"\n".join(b'{"step": %d, "loss": 0.5}' % step for step in range(5_000)))
    rows = distloop.read_metrics(tmp_path)
    assert [row["step"] for row in rows] == list(range(5_000))
    assert len({id(name) for row in rows for name in row}) == 2


def test_a_row_can_be_read_while_the_run_is_training(tmp_path, metrics):
    writer = JsonWriter(str(metrics), start=0)
    assert distloop.read_metrics(tmp_path) == []
    writer.write(1, {"loss": 1.0})
    writer.flush()
    assert [row["step"] for row in distloop.read_metrics(tmp_path)] == [1]
    writer.close()


def test_what_holds_no_metrics_is_refused(tmp_path, metrics):
    with pytest.raises(ValueError, match="holds no metrics.jsonl: give the workdir of one run that has begun"):
        distloop.read_metrics(tmp_path)
    metrics.touch()
    for given in (tmp_path / "nope", metrics, ""):
        with pytest.raises(ValueError, match="There is no directory '.*': give the workdir of a run."):
            distloop.read_metrics(given)
    metrics.unlink()
    metrics.mkdir()
    with pytest.raises(ValueError, match=r"cannot be read \(Is a directory\): give a workdir that you may read."):
        distloop.read_metrics(tmp_path)


def test_an_appended_row_has_a_time_and_keeps_its_values(tmp_path):
    path = str(tmp_path / "incidents.jsonl")
    records.append_row(path, {"step": 3, "reason": "The loss jumped.", "batch": None})
    records.append_row(path, {"step": 4})
    first, second = records.read_rows(path)
    assert 0 < first.pop("time") <= second.pop("time")
    assert (first, second) == ({"step": 3, "reason": "The loss jumped.", "batch": None}, {"step": 4})


def test_a_row_after_the_half_row_of_a_full_disk_or_a_kill_is_read(tmp_path):
    path = tmp_path / "starts.jsonl"
    records.append_row(str(path), {"step": 1})
    with full_disk(path.stat().st_size + 20), pytest.raises(OSError):
        records.append_row(str(path), {"step": 2, "reason": "x" * 50})
    assert path.stat().st_size > 20 and not path.read_bytes().endswith(b"\n"), "half a row is there"
    for step in (3, 4):
        records.append_row(str(path), {"step": step})
    assert [row["step"] for row in records.read_rows(str(path))] == [1, 3, 4]
    assert records.last_row(str(path))["step"] == 4
    path.write_bytes(b"{")  # nothing but half a row
    records.append_row(str(path), {"step": 5})
    assert [row["step"] for row in records.read_rows(str(path))] == [5]


ODD = [b"", b"\x00\x00", b"\xff\xfe{", b'{"step": 1', b"null", b"[1]", b'"step"', b"[" * 5_000, b"[" * 150 + b"]" * 150]
ODD += [b'{"step": {}}', b'{"step": 1e999}', b'{"step": ' + b"9" * 5_000 + b"}", b'{"steps": 1}', b'{"step": null}']


@pytest.mark.parametrize("content", ODD, ids=range(len(ODD)))
def test_a_file_that_holds_something_else_is_named_and_does_without(tmp_path, content):
    path, warnings = tmp_path / "some.json", []
    path.write_bytes(content)
    instead = dict(instead="it begins at step 0", warn=warnings.append)
    assert records.read_json(str(path), lambda value: int(value["step"]), **instead) is None
    (warning,) = warnings
    assert str(path) in warning and warning.endswith(": it begins at step 0.") and "\n" not in warning


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo])
def test_a_fifo_or_directory_in_place_of_a_file_is_named_at_once(make, tmp_path):
    path, warnings = str(tmp_path / "starts.jsonl"), []
    assert records.read_rows_if_any(path, instead="", warn=pytest.fail) == []
    (tmp_path / "file").touch()
    for nothing in (path, str(tmp_path / "file" / "none.json")):
        assert records.read_json(nothing, instead="", warn=pytest.fail) is None
    make(path)
    with pytest.raises(OSError):
        records.append_row(path, {"step": 1})
    assert records.read_json(path, instead="it is unknown", warn=warnings.append) is None
    assert "starts.jsonl' cannot be read" in warnings.pop()
    assert records.read_rows_if_any(path, instead="it is unknown", warn=warnings.append) == []
    if make is os.mkdir:
        assert warnings == [f"{path!r} cannot be read (Is a directory): it is unknown."]
    else:
        assert records.read_rows(path) == []

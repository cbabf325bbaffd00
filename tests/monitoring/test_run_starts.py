"""When the processes of a run began, and the hours of its devices."""

import json
import math

import pytest

from distloop.monitoring import run_starts
from distloop.monitoring.records import append_row


def test_a_start_holds_its_devices_and_the_time_of_the_last_row_before_it(tmp_path):
    assert run_starts.read_starts(str(tmp_path)) == []
    run_starts.note_start(str(tmp_path), step=0, devices=2, kind="CPU")
    append_row(str(tmp_path / "metrics.jsonl"), {"step": 10, "time": 5.0})
    append_row(str(tmp_path / "metrics.jsonl"), {"step": 20, "time": 7.0})
    with open(tmp_path / "metrics.jsonl", "ab") as file:
        file.write(b'{"step": 30, "ti')  # of a killed process
    run_starts.note_start(str(tmp_path), step=10, devices=8, kind="GPU")
    first, second = run_starts.read_starts(str(tmp_path))
    assert (first["step"], first["devices"], first["kind"], first["last_row_time"]) == (0, 2, "CPU", None)
    assert (second["step"], second["devices"], second["kind"], second["last_row_time"]) == (10, 8, "GPU", 7.0)
    assert json.dumps(second)


def test_the_age_of_a_process_is_noted_at_its_first_start(tmp_path, monkeypatch):
    monkeypatch.setattr(run_starts, "_noted", set())
    run_starts.note_start(str(tmp_path), step=0, devices=2, kind="CPU")
    run_starts.note_start(str(tmp_path), 1.5, step=10, devices=2, kind="CPU")
    first, second = run_starts.read_starts(str(tmp_path))
    assert 0 < first["process_secs"] < 3600 and first["restore_secs"] is None
    assert second["process_secs"] is None and second["restore_secs"] == 1.5


@pytest.mark.parametrize(
    ("starts", "last_time", "hours"),
    [
        ([], 10.0, None),
        ([(0, 2, None)], 3600.0, 2.0),
        ([(0, 2, None)], math.nan, 0.0),
        ([(0, 2, None), (7200, 4, 3600)], 9000.0, 2.0 + 2.0),  # with a pause of an hour
        ([(0, 2, None), (100, 2, None), (200, 1, 100)], 200.0, 0.0),  # killed before their first row
    ],
)
def test_device_hours_end_with_the_last_row_of_each_start(starts, last_time, hours):
    names = ("time", "devices", "last_row_time")
    assert run_starts.device_hours([dict(zip(names, s, strict=True)) for s in starts], last_time) == hours

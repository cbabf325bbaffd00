"""The ledger of a run: each second of its starts is accounted for once, and the hours of its devices are known."""

import itertools
import math
import time

import pytest

from distloop.workdir import ledger
from distloop.workdir.records import append_row


def start(time, step, **facts):
    return {"time": time, "step": step, "devices": 1, **facts}


def progress(time, reached, **secs):
    return {"time": time, "step": reached, "secs": {"start-up": 2.0, **secs}}


def account(starts, now):
    """Returns the seconds of several starts, of which each notes what those before it have cost."""
    before = {}
    for start, following in itertools.pairwise(starts):
        before = ledger.account({**start, "before": before}, following.get("progress"), following)
    return ledger.account({**starts[-1], "before": before}, now)


# Process from 90, training from 100, 40 steps noted at 150, killed at 153; a new process begins at 158, restores step
# 30 in 2 s and trains from 165 to step 50, noted at 205.
STARTS = [
    start(100.0, 0, process_secs=10.0),
    start(165.0, 30, process_secs=7.0, restore_secs=2.0, progress=progress(150.0, 40, step=40.0, saving=4.0)),
]
NOW = progress(205.0, 50, step=30.0, saving=3.0, other=1.0)


def test_each_second_of_a_run_that_fell_is_accounted_for_once():
    seconds = account(STARTS, NOW)
    assert seconds == pytest.approx(
        {
            "starting": 10.0 + 5.0,
            "restoring": 2.0,
            "tracing": 6.0 + 6.0,
            "steps": 30.0 + 30.0,
            "steps done twice": 10.0,
            "saving": 4.0 + 3.0,
            "waiting": 8.0,
            "other": 1.0,
        }
    )
    assert sum(seconds.values()) == pytest.approx(205.0 - 90.0)
    assert ledger.goodput(seconds) == pytest.approx(60 / 115)


def test_a_start_that_saved_and_left_or_has_no_log_has_done_no_step_twice():
    seconds = account([STARTS[0], {**STARTS[1], "step": 40}], {**NOW, "step": 60})
    assert seconds["waiting"] == 8.0 and "steps done twice" not in seconds
    seconds = account([STARTS[0], start(165.0, 0, process_secs=7.0)], NOW)
    assert seconds["waiting"] == 158.0 - 100.0 and seconds["steps"] == 30.0 and "steps done twice" not in seconds


def test_what_an_earlier_start_noted_is_no_work_of_a_start_that_failed():
    third = start(180.0, 30, process_secs=5.0, progress=STARTS[1]["progress"])
    seconds = account([*STARTS, third], progress(205.0, 50, step=20.0))
    assert seconds["steps done twice"] == 10.0 and seconds["steps"] == 30.0 + 20.0
    assert seconds["waiting"] == 8.0 + 10.0 and sum(seconds.values()) == pytest.approx(205.0 - 90.0)


def test_the_row_of_the_last_start_has_the_cost_of_all_before_it(tmp_path, monkeypatch):
    for i in range(4):
        monkeypatch.setattr(ledger, "unix_time", lambda i=i: 220.0 + 20 * i)
        ledger.record_progress(str(tmp_path), **progress(205.0 + 20 * i, 50 + i, step=30.0, saving=3.0))
        ledger.record_start(str(tmp_path), restore_secs=2.0, step=48 + i, devices=1, kind="CPU")
    starts, last = ledger.read_starts(str(tmp_path)), ledger.last_start(str(tmp_path))
    assert len(starts) == 4 and last == starts[-1]
    now = progress(290.0, 60, step=5.0)
    assert ledger.account(last, now) == pytest.approx(account(starts, now))


def test_a_start_of_an_earlier_version_and_no_start_at_all_are_read(tmp_path):
    assert ledger.last_start(str(tmp_path)) == ledger.account({}, None) == {} and math.isnan(ledger.goodput({}))
    seconds = ledger.account({"time": 100.0, "step": 0}, progress(110.0, 5, step=8.0))
    assert seconds == {"tracing": 2.0, "steps": 8.0}


def test_what_was_noted_is_read_and_anything_else_is_nothing(tmp_path):
    noted = {"time": 1.0, "step": 2, "secs": {"step": 3.0}}
    assert ledger.read_progress(str(tmp_path)) is None
    ledger.record_progress(str(tmp_path), **noted)
    assert ledger.read_progress(str(tmp_path)) == noted
    (tmp_path / ledger.PROGRESS).write_text("[1")
    assert ledger.read_progress(str(tmp_path)) is None


def test_a_start_holds_its_devices_and_the_age_of_its_process(tmp_path, monkeypatch):
    monkeypatch.setattr(ledger, "_recorded", set())
    assert ledger.read_starts(str(tmp_path)) == []
    ledger.record_start(str(tmp_path), step=0, devices=2, kind="CPU")
    for step in (10, 20):
        append_row(str(tmp_path / "metrics.jsonl"), {"step": step, "time": step / 4})
    with open(tmp_path / "metrics.jsonl", "ab") as file:
        file.write(b'{"step": 30, "ti')  # of a killed process
    ledger.record_start(str(tmp_path), restore_secs=1.5, step=10, devices=8, kind="GPU")
    first, second = ledger.read_starts(str(tmp_path))
    names = ("step", "devices", "kind", "last_row_time", "restore_secs")
    assert [first[name] for name in names] == [0, 2, "CPU", None, None]
    assert [second[name] for name in names] == [10, 8, "GPU", 5.0, 1.5]
    limit = time.monotonic()  # the time since the machine started, on Linux
    assert 0 < first["process_secs"] < limit and second["process_secs"] is None


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
    assert ledger.device_hours([dict(zip(names, s, strict=True)) for s in starts], last_time) == hours


def test_memory_is_read_as_written_and_a_damaged_file_holds_nothing(tmp_path):
    assert ledger.read_memory(str(tmp_path)) is None
    memory = {"GPU:0": {"weights": 5}}
    ledger.write_memory(str(tmp_path), memory)
    assert ledger.read_memory(str(tmp_path)) == memory
    for text in ["{", '{"devices": 3}', '{"taken": {}}', '{"devices": {"GPU:0": {"weights": "x"}}}']:
        (tmp_path / ledger.MEMORY).write_text(text)
        assert ledger.read_memory(str(tmp_path)) is None

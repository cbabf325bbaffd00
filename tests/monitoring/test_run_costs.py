"""The costs of a run, from its rows and starts."""

import pytest

from distloop.monitoring import run_costs
from distloop.monitoring.run_files import load_all
from tests.problems import write_run

ROWS = [
    {"step": 100, "time": 1012.0, "steps_per_sec": 10.0},
    {"step": 200, "time": 1030.0, "steps_per_sec": 10.0, "save_pause_secs": 0.5, "save_secs": 4.0},
    {"step": 300, "time": 1050.0, "steps_per_sec": 5.0, "save_pause_secs": 0.1, "save_secs": 2.0},
    {"step": 400, "time": 2026.0, "steps_per_sec": 5.0, "copy_pause_secs": 0.2},
]


def measure(tmp_path, *starts):
    write_run(tmp_path / "run", ROWS, starts=starts)
    (run,) = load_all([str(tmp_path)])
    return run_costs.measure(run)


def test_costs_are_medians(tmp_path):
    first = {"step": 0, "time": 1000.0, "process_secs": 5.0, "restore_secs": None}
    second = {"step": 300, "time": 2000.0, "process_secs": 9.0, "restore_secs": 3.0}
    no_row = {"step": 400, "time": 3000.0, "process_secs": 500.0, "restore_secs": 4.0}
    costs = measure(tmp_path, first, second, no_row)
    assert costs["step_secs"] == (pytest.approx(0.15), 400)
    assert costs["save_pause_secs"] == (pytest.approx(0.3), 2) and costs["save_secs"] == (3.0, 2)
    assert costs["restore_secs"] == (3.5, 2) and costs["copy_secs"] == (0.2, 1)
    # 5 s until the start is noted and 2 s until the first step; 9 - 3 s and 6 s.
    assert costs["start_secs"] == (pytest.approx(9.5), 2)


def test_what_was_not_recorded_is_left_out(tmp_path):
    assert set(measure(tmp_path, {"step": 0, "time": 1000.0})) == {
        "step_secs",
        "save_pause_secs",
        "save_secs",
        "copy_secs",
    }

"""Runs for other programs."""

import json
import math

from distloop.monitoring import run_exports
from distloop.monitoring.run_files import Run


def make_run(rows):
    return Run("a", "runs/a", rows, [], {"seed": 1}, 100, None, 0.0, [])


def test_json_holds_what_a_run_has_read_and_no_nan():
    run = make_run([{"step": 100, "time": 1.0, "loss": math.nan, "examples_seen": 640.0, "epochs_seen": 2.5}])
    (only,) = json.loads(json.dumps(run_exports.as_json([run]), allow_nan=False))["runs"]
    assert only["seen"] == {"examples_seen": 640.0, "epochs_seen": 2.5}
    assert only["metrics"]["loss"]["last"] is None and only["steps_per_sec"] is None


def test_a_table_has_a_column_for_each_name(tmp_path):
    runs = [make_run([{"step": 1, "time": 1.0, "loss": 0.5}]), make_run([{"step": 2, "time": 2.0, "accuracy": 1.0}])]
    run_exports.write_csv(runs, str(tmp_path / "rows.csv"))
    lines = (tmp_path / "rows.csv").read_text().splitlines()
    assert lines == ["run,step,time,loss,accuracy", "a,1,1.0,0.5,", "a,2,2.0,,1.0"]

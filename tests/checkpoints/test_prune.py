"""What nothing needs of a run, and how the report removes it."""

import os

import pytest
import tensorflow as tf

from distloop import report
from distloop.checkpoints import prune
from distloop.checkpoints.store import in_workdir
from distloop.monitoring.run_lock import RunLock
from tests.problems import write_run


@pytest.fixture
def run(tmp_path):
    """The workdir of a run with checkpoints, one of them the best and one cut short, and an export."""
    path = write_run(tmp_path / "digits", [{"step": 40, "loss": 1.0}])
    checkpoints = in_workdir(str(path), keep=10)
    for step in (10, 20, 30, 40):
        checkpoints.save(step, {"x": tf.zeros([100])}, {"until": 40, "stop_reason": None}, {"test/loss": [10]})
    checkpoints.wait()
    directory = path / "checkpoints"
    os.rename(directory / "30", directory / "50.abandoned")
    (directory / "60.999999999-0123abcd.tmp").mkdir()
    (path / "export" / "9").mkdir(parents=True)
    (path / "export" / "9" / "saved_model.pb").write_bytes(b"12345")
    return path


def names(workdir, keep=1):
    return {os.path.relpath(found.path, workdir): found for found in prune.find(str(workdir), keep)}


def test_the_newest_and_the_best_checkpoints_and_exports_stay(run):
    found = names(run)
    assert list(found) == ["checkpoints/20", "checkpoints/50.abandoned", "checkpoints/60.999999999-0123abcd.tmp"]
    assert found["checkpoints/20"].num_bytes > 400
    assert list(names(run, keep=2)) == ["checkpoints/50.abandoned", "checkpoints/60.999999999-0123abcd.tmp"]


def test_a_damaged_newest_checkpoint_does_not_count_as_the_newest(run):
    os.remove(run / "checkpoints" / "40" / "manifest.json")
    assert "checkpoints/20" not in names(run) and "checkpoints/40" not in names(run)


def test_the_report_removes_it_once_somebody_has_agreed(run, monkeypatch, capsys):
    command = [str(run), "--prune"]
    monkeypatch.setattr("sys.stdin.isatty", lambda: False, raising=False)
    assert report.main(command) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["path", "size", "why"] and lines[1].startswith("digits/checkpoints/20 ")
    assert lines[1].endswith("older than the newest, and not the best")
    assert lines[-1].startswith("Nothing was removed: give --yes to remove 3 paths, ") and len(names(run)) == 3
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda question: "n" if question.startswith("Remove 3 paths") else "")
    assert report.main(command) == 0 and len(names(run)) == 3
    assert report.main([*command, "--yes"]) == 0 and not names(run)
    assert sorted(os.listdir(run / "checkpoints")) == ["10", "40", "best.json"]
    assert in_workdir(str(run)).load_newest().step == 40
    assert report.main(command) == 0 and capsys.readouterr().out.endswith("There is nothing to remove.\n")
    assert not os.path.exists(run / "run.lock")


def test_a_run_that_trains_is_left_alone_and_the_newest_checkpoint_cannot_be_asked_for(run, capsys):
    with RunLock(str(run)):
        assert report.main([str(run), "--prune", "--yes"]) == 2
    assert "digits is left as it is: " in capsys.readouterr().err and len(names(run)) == 3
    assert report.main([str(run), "--prune", "--keep=0"]) == 2
    assert "--keep=0 was given; the newest checkpoint always stays" in capsys.readouterr().err

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
    """The workdir of a run with checkpoints, one of them the best and one cut short, and exports."""
    path = write_run(tmp_path / "digits", [{"step": 40, "loss": 1.0}])
    checkpoints = in_workdir(str(path), keep=10)
    for step in (10, 20, 30, 40):
        checkpoints.save(step, {"x": tf.zeros([100])}, {"until": 40, "stop_reason": None}, {"test/loss": [10]})
    checkpoints.wait()
    directory = path / "checkpoints"
    os.rename(directory / "30", directory / "50.abandoned")
    (directory / "60.999999999-0123abcd.tmp").mkdir()
    for name in ("9", "11", "latest"):
        (path / "export" / name).mkdir(parents=True)
        (path / "export" / name / "saved_model.pb").write_bytes(b"12345")
    for name in ("7.keras", "8.keras"):
        (path / "export" / name).write_bytes(b"12")
    return path


def names(workdir, keep=1):
    return {os.path.relpath(found.path, workdir): found for found in prune.find(str(workdir), keep)}


def save_with(run, actions):
    """Saves a newest checkpoint with these states of actions."""
    checkpoints = in_workdir(str(run), keep=10)
    checkpoints.save(70, {"x": tf.zeros([1])}, {"until": 40, "stop_reason": None, "actions": actions})
    checkpoints.wait()


def test_the_newest_and_the_best_checkpoints_and_the_last_exports_stay(run):
    found = names(run)
    assert list(found) == [
        "checkpoints/20",
        "checkpoints/50.abandoned",
        "checkpoints/60.999999999-0123abcd.tmp",
        "export/7.keras",
        "export/9",
    ]
    assert found["export/9"].num_bytes == 5 and found["export/7.keras"].num_bytes == 2
    assert found["checkpoints/20"].num_bytes > 400
    assert list(names(run, keep=2)) == ["checkpoints/50.abandoned", "checkpoints/60.999999999-0123abcd.tmp"]


def test_files_of_arrays_are_exports_where_the_newest_checkpoint_names_their_directory(run):
    for path in ("export/7.npz", "export/8.npz", "samples/7.npz", "samples/8.npz"):
        (run / path).parent.mkdir(exist_ok=True)
        (run / path).write_bytes(b"12")
    assert not any(name.endswith(".npz") for name in names(run))
    save_with(run, {f"Export({run}/export)": {"best": 0.1}, "StopEarly(test/loss)": {"best": 0.1}})
    assert [name for name in names(run) if name.endswith(".npz")] == ["export/7.npz"]


def test_a_damaged_newest_checkpoint_does_not_count_as_the_newest(run):
    os.remove(run / "checkpoints" / "40" / "manifest.json")
    assert "checkpoints/20" not in names(run) and "checkpoints/40" not in names(run)


def test_the_report_removes_it_once_somebody_has_agreed(run, monkeypatch, capsys):
    command = [str(run), "--prune"]
    monkeypatch.setattr("sys.stdin.isatty", lambda: False, raising=False)
    assert report.main(command) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["path", "size", "why"] and lines[5].startswith("digits/export/9 ")
    assert lines[1].endswith("older than the newest, and not the best")
    assert lines[-1].startswith("Nothing was removed: give --yes to remove 5 paths, ") and len(names(run)) == 5
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda question: "n" if question.startswith("Remove 5 paths") else "")
    assert report.main(command) == 0 and len(names(run)) == 5
    assert report.main([*command, "--yes"]) == 0 and not names(run)
    assert sorted(os.listdir(run / "checkpoints")) == ["10", "40", "best.json"]
    assert in_workdir(str(run)).load_newest().step == 40
    assert report.main(command) == 0 and capsys.readouterr().out.endswith("There is nothing to remove.\n")
    assert not os.path.exists(run / "run.lock")


def test_a_run_that_trains_is_left_alone_and_the_newest_checkpoint_cannot_be_asked_for(run, capsys):
    with RunLock(str(run)):
        assert report.main([str(run), "--prune", "--yes"]) == 2
    assert "digits is left as it is: " in capsys.readouterr().err and len(names(run)) == 5
    assert report.main([str(run), "--prune", "--keep=0"]) == 2
    assert "--keep=0 was given; the newest checkpoint always stays" in capsys.readouterr().err


def test_exports_that_the_run_did_not_write_stay(run):
    for step in (1, 2, 3):
        (run / "export" / str(step)).mkdir()
        (run / "export" / str(step) / "saved_model.pb").touch()
    save_with(run, {f"Export({run}/export)": {"best": None, "written": [2, 3]}})
    assert [name for name in names(run) if name.startswith("export/")] == ["export/2"]

"""The workdir of a run: a path with the time, its lock for all workers, and the name of the run in it."""

import dataclasses
import json
import os
import pathlib
import re
import shutil
import types
from unittest import mock

import pytest

from distloop import atomic_files
from distloop.monitoring import directory, records, run_lock
from distloop.settings import flags
from distloop.settings.config import Config
from tests.monitoring.test_run_lock import holder_of, write_lock

ALONE = types.SimpleNamespace(is_chief=True, broadcast=lambda value: value)  # the only worker


def begin(config, steps=0):
    """Resolves the workdir and leaves the files of a run of 500 steps there that came so far."""
    resolved = directory.resolve_workdir(config, ALONE)
    flags.write(resolved, resolved.workdir)
    workdir = pathlib.Path(resolved.workdir)
    if steps:
        (workdir / "metrics.jsonl").write_text(json.dumps({"step": steps, "time": 1.0, "loss": 0.5}) + "\n")
        manifest = {"step": steps, "notes": {"until": 500, "stop_reason": None}}
        (workdir / "checkpoints" / str(steps)).mkdir(parents=True)
        (workdir / "checkpoints" / str(steps) / "manifest.json").write_text(json.dumps(manifest))
    return workdir


@pytest.fixture
def config(tmp_path, monkeypatch):
    """The config of a run; a second passes with each look at the clock."""
    seconds = iter(range(60))
    monkeypatch.setattr(directory.time, "strftime", lambda form: f"20261123-1845{next(seconds):02}")
    return Config(workdir=str(tmp_path / "digits-{time}"), steps=500)


def test_a_run_gets_a_directory_with_its_date_and_time(tmp_path):
    config = Config(workdir=str(tmp_path / "{time}" / "digits"), steps=5)
    workdir = directory.resolve_workdir(config, ALONE).workdir
    assert re.fullmatch(r"\d{8}-\d{6}/digits", os.path.relpath(workdir, tmp_path))
    assert not os.listdir(tmp_path)  # nothing is written yet
    assert directory.resolve_workdir(Config(workdir="runs/a"), ALONE).workdir == os.path.abspath("runs/a")


def test_the_same_command_goes_on_with_its_unfinished_run(config):
    first = begin(config)
    assert begin(config, steps=200) == first  # it had no row yet
    assert begin(config) == first
    with run_lock.RunLock(str(first)):
        assert begin(config) != first  # another process trains it
    assert begin(dataclasses.replace(config, seed=1)) != first  # another command


@pytest.mark.parametrize(
    ("steps", "change", "has_ended"),
    [
        pytest.param(500, lambda run: None, True, id="it has ended"),
        pytest.param(500, lambda run: shutil.rmtree(run / "checkpoints"), True, id="its checkpoints were deleted"),
        pytest.param(
            200,
            lambda run: records.append_row(str(run / "metrics.jsonl"), {"step": 500}),
            False,
            id="it has not its last checkpoint",
        ),
        pytest.param(
            500,
            lambda run: records.append_row(str(run / "incidents.jsonl"), {"step": 500, "action": "raise"}),
            False,
            id="it diverged at its end",
        ),
    ],
)
def test_the_same_command_begins_anew_when_its_run_has_ended(steps, change, has_ended, config):
    change(first := begin(config, steps))
    assert (begin(config) != first) is has_ended


def test_runs_and_trainers_of_one_second_have_their_own(config, monkeypatch):
    times = iter(["180000", *["180000", "180001"], *["180000", "180001", "180002"]])
    monkeypatch.setattr(directory.time, "strftime", lambda form: f"20261123-{next(times)}")
    workdirs = [str(begin(dataclasses.replace(config, seed=1)))]
    workdirs += [directory.resolve_workdir(config, ALONE).workdir for _ in range(2)]  # neither has trained
    assert [workdir[-6:] for workdir in workdirs] == ["180000", "180001", "180002"]


def test_a_start_reads_no_more_than_the_ends_of_earlier_runs(config, monkeypatch):
    begin(config, steps=500)
    unfinished = begin(config, steps=200)
    monkeypatch.setattr(records, "read_rows", pytest.fail)
    assert begin(config) == unfinished


@pytest.fixture
def workdir(tmp_path):
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


def claim(path):
    return directory.claim_run(Config(workdir=str(path)))


def test_a_run_keeps_its_name_over_starts_and_when_it_is_moved_and_a_copy_is_another_run(workdir, caplog):
    run = claim(workdir)
    assert len(run) == 12 and claim(workdir) == run
    copy = shutil.copytree(workdir, workdir.parent / "copy")
    assert claim(copy) not in ("", run) and "copy' is a copy of another run's" in caplog.text
    moved = workdir.rename(workdir.parent / "moved")
    assert claim(moved) == run
    shutil.copytree(moved, workdir)  # in the place of the original
    assert claim(workdir) != run == claim(moved)


def test_where_inodes_do_not_last_as_they_do_on_a_disk_a_directory_is_known_by_its_path(workdir, monkeypatch):
    assert atomic_files._has_lasting_inodes(str(workdir))
    monkeypatch.setattr(atomic_files, "_has_lasting_inodes", lambda path: False)
    run = claim(workdir)
    content = (workdir / directory.RUN_FILE).read_text()
    shutil.rmtree(workdir)
    (workdir.parent / "other").mkdir()  # which has the inode now, or another one
    workdir.mkdir()
    (workdir / directory.RUN_FILE).write_text(content)
    assert claim(workdir) == run


def test_a_run_in_a_bucket_is_known_by_its_url_on_any_machine(tmp_path, monkeypatch):
    def run_file(machine, url):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / machine))
        local = pathlib.Path(Config(workdir=url).local_workdir)
        local.mkdir(parents=True)
        return local / directory.RUN_FILE

    file = run_file("one", "s3://bucket/run")
    run = claim("s3://bucket/run")
    for url, is_same in (("s3://bucket/run", True), ("s3://bucket/copy", False)):
        shutil.copy(file, run_file("two", url))
        assert (claim(url) == run) is is_same


@pytest.mark.parametrize("content", ["", "[]", '{"run": 1}', "[" * 2000])
def test_a_damaged_file_is_named_and_made_again(workdir, caplog, content):
    (workdir / directory.RUN_FILE).write_text(content)
    run = claim(workdir)
    assert run and directory.RUN_FILE in caplog.text
    assert json.loads((workdir / directory.RUN_FILE).read_text())["run"] == run


def test_where_nothing_can_be_written_there_is_no_name(workdir, monkeypatch):
    monkeypatch.setattr(directory, "replacing", mock.Mock(side_effect=PermissionError))
    assert claim(workdir) == ""


def directory_with(path, is_chief=True, gather=lambda truth: [truth]):
    """Returns the workdir of a worker, which meets the others by a function."""
    return directory.directory_of(Config(workdir=str(path)), types.SimpleNamespace(is_chief=is_chief, gather=gather))


@pytest.mark.parametrize("is_chief", [True, False])
def test_the_chief_alone_takes_the_lock_and_every_worker_is_refused_with_it(is_chief, tmp_path):
    with directory_with(tmp_path, is_chief) as lock:
        assert os.listdir(tmp_path) == ["run.lock"] * is_chief and lock is None
    assert os.listdir(tmp_path) == []
    truths = []
    write_lock(tmp_path)
    says = "is being written to by process" if is_chief else "cannot be used; another worker says why"
    with (
        pytest.raises(ValueError, match=says),
        directory_with(tmp_path, is_chief, lambda truth: truths.append(truth) or [True, False]),
    ):
        pass
    assert truths == [is_chief] and holder_of(tmp_path)["token"] == "another"


def test_without_a_workdir_nothing_is_locked():
    with (lock := directory_with("", gather=lambda truth: pytest.fail("gathered"))):
        lock.verify()


def test_the_lock_is_held_until_nothing_is_written_any_more_or_a_worker_fails_while_all_meet(tmp_path):
    held = []

    def finish():
        held.append((tmp_path / "run.lock").exists())
        raise OSError("the last save failed")

    def fail(truth):
        raise RuntimeError("a worker is gone")

    lock = directory_with(tmp_path)
    lock.finish = finish
    with pytest.raises(OSError, match="the last save failed"), lock:
        pass
    with pytest.raises(KeyboardInterrupt), lock:
        raise KeyboardInterrupt
    assert held == [True, True] and os.listdir(tmp_path) == []
    with pytest.raises(RuntimeError, match="gone"), directory_with(tmp_path, gather=fail):
        pass
    assert os.listdir(tmp_path) == []

"""The workdir of a run: a path with the time, which the same command finds again, and the name of the run in it."""

import dataclasses
import json
import os
import re
import shutil

import pytest

from distloop import atomic_files
from distloop.monitoring import directory, records, run_lock
from distloop.settings import flags
from distloop.settings.config import Config


class One:
    """A single worker, which exchanges nothing."""

    is_chief = True

    def broadcast(self, value):
        return value


def begin(config, steps=0, until=500):
    """Resolves the workdir and leaves the files of a run there that came so far."""
    resolved = directory.resolve_workdir(config, One())
    flags.write(resolved, resolved.workdir)
    if steps:
        with open(os.path.join(resolved.workdir, "metrics.jsonl"), "w") as file:
            file.write(json.dumps({"step": steps, "time": 1.0, "loss": 0.5}) + "\n")
        checkpoint = os.path.join(resolved.workdir, "checkpoints", str(steps))
        os.makedirs(checkpoint, exist_ok=True)
        with open(os.path.join(checkpoint, "manifest.json"), "w") as file:
            json.dump({"step": steps, "notes": {"until": until, "stop_reason": None}}, file)
    return resolved.workdir


@pytest.fixture
def clock(monkeypatch):
    """A second passes with each look."""
    seconds = iter(range(60))
    monkeypatch.setattr(directory.time, "strftime", lambda form: f"20261123-1845{next(seconds):02}")


@pytest.fixture
def config(tmp_path, clock):
    return Config(workdir=str(tmp_path / "digits-{time}"), steps=500)


def test_a_run_gets_a_directory_with_its_date_and_time(tmp_path):
    config = Config(workdir=str(tmp_path / "{time}" / "digits"), steps=5)
    workdir = directory.resolve_workdir(config, One()).workdir
    assert re.fullmatch(r"\d{8}-\d{6}/digits", os.path.relpath(workdir, tmp_path))
    assert not os.listdir(tmp_path)  # nothing is written yet


def test_the_same_command_goes_on_with_its_unfinished_run(config):
    first = begin(config)
    assert begin(config, steps=200) == first  # it had no row yet
    assert begin(config) == first
    assert begin(dataclasses.replace(config, seed=1)) != first  # another command
    assert begin(config, steps=500) == first
    assert begin(config) != first  # it has ended


def test_a_run_without_its_last_checkpoint_has_not_ended(config):
    first = begin(config, steps=200)
    with open(os.path.join(first, "metrics.jsonl"), "a") as file:
        file.write(json.dumps({"step": 500, "time": 2.0, "loss": 0.25}) + "\n")
    assert begin(config) == first


def test_a_run_whose_checkpoints_were_deleted_has_ended(config):
    first = begin(config, steps=500)
    shutil.rmtree(os.path.join(first, "checkpoints"))
    assert begin(config) != first


def test_a_run_that_another_process_trains_is_left_alone(config):
    first = begin(config, steps=200)
    with run_lock.RunLock(first):
        assert begin(config) != first


def test_runs_and_trainers_of_one_second_have_their_own(config, monkeypatch):
    times = iter(["180000", *["180000", "180001"], *["180000", "180001", "180002"]])
    monkeypatch.setattr(directory.time, "strftime", lambda form: f"20261123-{next(times)}")
    workdirs = [begin(dataclasses.replace(config, seed=1))]
    workdirs += [directory.resolve_workdir(config, One()).workdir for _ in range(2)]  # neither has trained
    assert [workdir[-6:] for workdir in workdirs] == ["180000", "180001", "180002"]


def test_a_workdir_without_the_time_stays():
    assert directory.resolve_workdir(Config(workdir="runs/a"), One()).workdir == os.path.abspath("runs/a")


def test_a_start_reads_no_more_than_the_ends_of_earlier_runs(config, monkeypatch):
    begin(config, steps=500)
    unfinished = begin(config, steps=200)
    monkeypatch.setattr(records, "read_rows", pytest.fail)
    assert begin(config) == unfinished


def test_a_run_that_diverged_at_its_end_goes_on(config):
    workdir = begin(config, steps=500)
    records.append_row(os.path.join(workdir, "incidents.jsonl"), {"step": 500, "action": "raise"})
    assert begin(config) == workdir


@pytest.fixture
def workdir(tmp_path):
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


def claim(path):
    return directory.claim_run(Config(workdir=str(path)))


def test_a_run_keeps_its_name_over_starts_and_when_it_is_moved(workdir):
    run = claim(workdir)
    assert len(run) == 12 and claim(workdir) == run
    moved = workdir.rename(workdir.parent / "moved")
    assert claim(moved) == run


def test_a_copy_of_a_workdir_is_another_run(workdir, caplog):
    run = claim(workdir)
    copy = shutil.copytree(workdir, workdir.parent / "copy")
    assert claim(copy) not in ("", run) and "copy' is a copy of another run's" in caplog.text
    assert claim(workdir) == run


def test_a_copy_that_takes_the_place_of_its_workdir_is_another_run(workdir):
    run = claim(workdir)
    original = workdir.rename(workdir.parent / "original")
    shutil.copytree(original, workdir)
    assert claim(workdir) != run == claim(original)


def test_where_inodes_do_not_last_a_directory_is_known_by_its_path(workdir, monkeypatch):
    monkeypatch.setattr(atomic_files, "_has_lasting_inodes", lambda path: False)
    run = claim(workdir)
    content = (workdir / directory.RUN_FILE).read_text()
    shutil.rmtree(workdir)
    (workdir.parent / "other").mkdir()  # which has the inode now, or another one
    workdir.mkdir()
    (workdir / directory.RUN_FILE).write_text(content)
    assert claim(workdir) == run


def test_a_directory_of_a_disk_has_lasting_inodes(workdir):
    assert atomic_files._has_lasting_inodes(str(workdir))


def test_a_run_in_a_bucket_is_known_by_its_url_on_any_machine(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "one"))
    config = Config(workdir="memory://bucket/run")
    os.makedirs(config.local_workdir)
    run, content = directory.claim_run(config), open(os.path.join(config.local_workdir, directory.RUN_FILE)).read()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "two"))
    for url, is_same in (("memory://bucket/run", True), ("memory://bucket/copy", False)):
        config = Config(workdir=url)
        os.makedirs(config.local_workdir)
        with open(os.path.join(config.local_workdir, directory.RUN_FILE), "w") as file:
            file.write(content)
        assert (directory.claim_run(config) == run) is is_same


@pytest.mark.parametrize("content", ["", "[]", '{"run": 1}', "[" * 2000])
def test_a_damaged_file_is_named_and_made_again(workdir, caplog, content):
    (workdir / directory.RUN_FILE).write_text(content)
    run = claim(workdir)
    assert run and directory.RUN_FILE in caplog.text
    assert json.loads((workdir / directory.RUN_FILE).read_text())["run"] == run


def test_where_nothing_can_be_written_there_is_no_name(workdir, monkeypatch):
    def replacing(*_, **__):
        raise PermissionError

    monkeypatch.setattr(directory, "replacing", replacing)
    assert claim(workdir) == ""

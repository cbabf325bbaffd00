"""The workdir of a run: its path, its lock for all workers, and the name of the run in it."""

import json
import os
import pathlib
import shutil
import types
from unittest import mock

import pytest

from distloop import atomic_files
from distloop.monitoring import directory
from distloop.settings.config import Config
from tests.monitoring.test_run_lock import holder_of, write_lock


def test_a_path_is_that_of_the_directory_in_which_the_program_began():
    config = directory.with_absolute_paths(Config(workdir="runs/a", init_from="s3://bucket/run"))
    assert config.workdir == os.path.abspath("runs/a") and config.init_from == "s3://bucket/run"


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

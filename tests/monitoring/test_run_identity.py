"""The name of a run: kept over starts and moves, made anew in a copy, and where nothing can be written empty."""

import json
import os
import shutil

import pytest

from distloop import Config
from distloop.monitoring import run_identity


@pytest.fixture
def workdir(tmp_path):
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


def claim(path):
    return run_identity.claim(Config(workdir=str(path)))


def test_a_run_keeps_its_name_over_starts_and_when_it_is_moved(workdir):
    assert run_identity.read(str(workdir)) == ""
    run = claim(workdir)
    assert len(run) == 12 and claim(workdir) == run == run_identity.read(str(workdir))
    moved = workdir.rename(workdir.parent / "moved")
    assert claim(moved) == run


def test_a_copy_of_a_workdir_is_another_run(workdir, caplog):
    run = claim(workdir)
    copy = shutil.copytree(workdir, workdir.parent / "copy")
    assert run_identity.read(str(copy)) == ""
    assert claim(copy) not in ("", run) and "copy' is a copy of another run's" in caplog.text
    assert claim(workdir) == run


def test_a_copy_that_takes_the_place_of_its_workdir_is_another_run(workdir):
    run = claim(workdir)
    original = workdir.rename(workdir.parent / "original")
    shutil.copytree(original, workdir)
    assert claim(workdir) != run == claim(original)


def test_where_inodes_do_not_last_a_directory_is_known_by_its_path(workdir, monkeypatch):
    monkeypatch.setattr(run_identity, "_has_lasting_inodes", lambda path: False)
    run = claim(workdir)
    content = (workdir / run_identity.FILE).read_text()
    shutil.rmtree(workdir)
    (workdir.parent / "other").mkdir()  # which has the inode now, or another one
    workdir.mkdir()
    (workdir / run_identity.FILE).write_text(content)
    assert claim(workdir) == run


def test_a_directory_of_a_disk_has_lasting_inodes(workdir):
    assert run_identity._has_lasting_inodes(str(workdir))


def test_a_run_in_a_bucket_is_known_by_its_url_on_any_machine(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "one"))
    config = Config(workdir="memory://bucket/run")
    os.makedirs(config.local_workdir)
    run, content = run_identity.claim(config), open(os.path.join(config.local_workdir, run_identity.FILE)).read()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "two"))
    for url, is_same in (("memory://bucket/run", True), ("memory://bucket/copy", False)):
        config = Config(workdir=url)
        os.makedirs(config.local_workdir)
        with open(os.path.join(config.local_workdir, run_identity.FILE), "w") as file:
            file.write(content)
        assert (run_identity.claim(config) == run) is is_same


@pytest.mark.parametrize("content", ["", "[]", '{"run": 1}', "[" * 2000])
def test_a_damaged_file_is_named_and_made_again(workdir, caplog, content):
    (workdir / run_identity.FILE).write_text(content)
    run = claim(workdir)
    assert run and run_identity.FILE in caplog.text
    assert json.loads((workdir / run_identity.FILE).read_text())["run"] == run


def test_where_nothing_can_be_written_there_is_no_name(workdir, monkeypatch):
    def replacing(*_, **__):
        raise PermissionError

    monkeypatch.setattr(run_identity, "replacing", replacing)
    assert claim(workdir) == ""

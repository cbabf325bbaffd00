"""The staging directory against the bucket: the newest goes on, and nothing that was not uploaded is deleted."""

import os
import pathlib
import shutil
import time

import pytest
import tensorflow as tf

from distloop.bucket.bucket_workdir import Workdir
from distloop.bucket.remote_directory import RemoteDirectory
from distloop.bucket.tree import STATE
from distloop.checkpoints.store import Checkpoints
from distloop.settings.config import Config
from distloop.workdir.run_lock import LockLost, Pace
from tests.bucket.unreliable import sealed_steps
from tests.campaigns.crash_matrix.buckets import Alone


@pytest.fixture
def move_to(tmp_path, monkeypatch):
    """Returns a function after which this process is on another machine."""
    return lambda machine: monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / machine))


@pytest.fixture
def url(tmp_path, monkeypatch, move_to):
    monkeypatch.setattr(RemoteDirectory, "pace", Pace(10.0, 0.05, 0.01, 0.01))
    move_to("one")
    return f"file://{tmp_path}/bucket/run"


def root_of(url):
    return pathlib.Path(Config(workdir=url).local_workdir)


def steps_in(root):
    return Checkpoints(f"{root}/checkpoints").steps


def sealed(url):
    return sealed_steps(RemoteDirectory(url).list())


def save(url, step):
    store = Checkpoints(f"{root_of(url)}/checkpoints")
    store.save(step, {"x": tf.constant(step)}, {})
    store.wait()


def opened(url, workers=None):
    return Workdir(Config(workdir=url, console="quiet"), workers or Alone())


def run(url, *steps):
    """Saves checkpoints in a workdir; returns the steps that were there before."""
    with opened(url):
        before = steps_in(root_of(url))
        for step in steps:
            save(url, step)
    return before


def read(url):
    """Returns the steps of what `restore` reads, without a lock."""
    with opened(url).reading(f"{url}/") as local:
        return steps_in(local)


def test_a_start_that_ends_before_all_workers_agree_gives_the_bucket_back(url):
    class Gone(Alone):
        def gather(self, value):
            raise RuntimeError("a worker is gone")

    with pytest.raises(RuntimeError, match="a worker is gone"), opened(url, Gone()):
        pass
    assert run(url, 1) == [] and run(url) == [1]


def test_a_bucket_that_looks_empty_is_refused_and_nothing_is_deleted(url, tmp_path):
    run(url, 2, 4)
    os.rename(tmp_path / "bucket", tmp_path / "unmounted")
    for act in (run, read):
        with pytest.raises(ValueError, match="has the run up to step 4: check that the share is mounted"):
            act(url)
    assert steps_in(root_of(url)) == [2, 4]
    shutil.rmtree(tmp_path / "bucket")
    os.rename(tmp_path / "unmounted", tmp_path / "bucket")
    assert run(url, 6) == [2, 4]


def test_a_run_whose_bucket_was_emptied_is_uploaded_or_begins_anew(url, tmp_path):
    run(url, 2, 4)
    shutil.rmtree(root_of(url) / "checkpoints")
    assert run(url) == [2, 4]  # filled from the bucket
    shutil.rmtree(tmp_path / "bucket")
    (root_of(url) / STATE).unlink()
    assert run(url) == sealed(url) == [2, 4]
    shutil.rmtree(tmp_path / "bucket")
    shutil.rmtree(root_of(url))
    assert run(url) == []


def test_a_run_goes_on_from_what_the_disk_has_on_this_machine_alone(url, move_to):
    run(url, 2, 4)
    save(url, 8)  # of a process that was killed before the upload
    move_to("other")
    assert run(url) == [2, 4]  # which has only begun
    move_to("one")
    assert read(url) == run(url) == sealed(url) == [2, 4, 8]


def test_where_another_machine_has_gone_on_the_rest_is_kept_aside(url, move_to, capsys):
    run(url, 2, 4)
    root = root_of(url)
    save(url, 8)
    move_to("other")
    run(url, 6)
    move_to("one")
    assert read(url) == [6] and run(url) == [2, 4, 6] and steps_in(f"{root}.aside") == [2, 4, 8]
    assert f"{root}.aside keeps the checkpoint of step 8, after step 6 of the bucket" in capsys.readouterr().out
    move_to("other")
    run(url, 10)
    move_to("one")
    run(url)
    assert sorted(os.listdir(root.parent)) == [root.name, f"{root.name}.aside"]


def test_a_bucket_with_fewer_steps_of_another_run_deletes_nothing(url, tmp_path):
    run(f"{url}/other", 4)
    run(url, 6)
    place = tmp_path / "bucket" / "run"
    shutil.rmtree(place / "checkpoints")
    shutil.copytree(place / "other" / "checkpoints", place / "checkpoints")
    assert run(url) == [4] and steps_in(f"{root_of(url)}.aside") == [6]


def test_a_staging_directory_that_others_may_write_to_is_not_believed(url):
    run(url, 2)
    os.chmod(root_of(url), 0o777)
    for act in (run, read):
        with pytest.raises(ValueError, match="others may write to it: remove it, or give XDG_CACHE_HOME a directory"):
            act(url)
    shutil.rmtree(root_of(url))
    assert run(url) == [2] and os.stat(root_of(url)).st_mode & 0o777 == 0o700


def test_a_run_that_was_copied_within_a_bucket_goes_on_by_itself(url, tmp_path):
    run(url, 2, 4)
    shutil.copytree(tmp_path / "bucket" / "run", tmp_path / "bucket" / "copied")
    copied = f"file://{tmp_path}/bucket/copied"
    assert run(copied, 6) == [2, 4] and run(url, 8) == [2, 4]
    assert sealed(copied) == [2, 4, 6]


def test_a_bucket_that_was_put_back_takes_nothing_from_the_disk(url, tmp_path):
    run(url, 2)
    shutil.copytree(tmp_path / "bucket", tmp_path / "backup")
    run(url, 4, 6, 8, 10)
    shutil.rmtree(tmp_path / "bucket")
    os.rename(tmp_path / "backup", tmp_path / "bucket")
    assert read(url) == run(url) == [6, 8, 10]


def test_a_staging_state_that_names_files_of_others_deletes_none(url, tmp_path):
    run(url, 2)
    (tmp_path / "bucket/mine").write_text("precious")
    (root_of(url) / STATE).write_text('{"uploaded": {"../mine": [8, 1]}, "manifests": []}')
    run(url, 4)
    assert (tmp_path / "bucket/mine").read_text() == "precious"


@pytest.mark.parametrize("state", ["", "[[", '{"uploaded": {"metrics.jsonl": 7}, "manifests": null}', "[" * 10**5])
def test_a_staging_state_that_holds_something_else_costs_an_upload_alone(state, url):
    run(url, 2)
    (root_of(url) / STATE).write_text(state)
    assert run(url, 4) == [2] and sealed(url) == [2, 4]


@pytest.mark.parametrize("name", ["lr=[0.1]", "a b#c?d%41", "back\\slash", "*"])
def test_a_workdir_and_its_files_may_have_any_name(name, url, tmp_path, move_to):
    for system in ("file", "memory"):
        url = f"{system}://{tmp_path}/{name}/run"
        move_to("one")
        run(url, 2)
        with opened(url):
            (root_of(url) / name).write_text("x")
        move_to("another")
        assert run(url) == [2] and (root_of(url) / name).exists()


def test_a_run_whose_bucket_another_process_has_taken_over_writes_no_more(url, monkeypatch):
    monkeypatch.setattr(RemoteDirectory, "pace", Pace(0.01, 0.05, 0.01, 0.01))
    workdir = opened(url)
    with workdir:
        workdir.verify()
        another = b'{"token": "another", "host": "node-b", "machine": "", "process": 7, "start": "", "since": 0}'
        deadline = time.monotonic() + 300
        with pytest.raises(LockLost, match="was taken over by process 7 on node-b"):
            while time.monotonic() < deadline:
                RemoteDirectory(url).write("run.lock", another)  # again, where this one has renewed its own meanwhile
                time.sleep(0.01)
                workdir.verify()

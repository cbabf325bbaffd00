"""The workdir of a run: its path, and its lock for all workers."""

import os

import pytest
import tensorflow as tf

from distloop.distributed.collectives import Workers
from distloop.settings.config import Config
from distloop.workdir import directory
from tests.workdir.test_run_lock import holder_of, write_lock


def test_a_path_is_that_of_the_directory_in_which_the_program_began():
    config = directory.with_absolute_paths(Config(workdir="runs/a", init_from="s3://bucket/run"))
    assert config.workdir == os.path.abspath("runs/a") and config.init_from == "s3://bucket/run"


def directory_with(path, gather=None):
    """Returns the workdir of a worker that is alone, or meets the others by a function."""
    one = Workers(tf.distribute.get_strategy())
    one.gather = gather or one.gather
    return directory.directory_of(Config(workdir=str(path)), one)


def test_the_chief_takes_the_lock_or_is_refused(tmp_path):
    with directory_with(tmp_path) as lock:
        assert os.listdir(tmp_path) == ["run.lock"] and lock is None
    assert os.listdir(tmp_path) == []
    write_lock(tmp_path)
    with pytest.raises(ValueError, match="is being written to by process"), directory_with(tmp_path):
        pass
    assert holder_of(tmp_path)["token"] == "another"


def test_without_a_workdir_nothing_is_locked():
    with (lock := directory_with("", gather=lambda truth: pytest.fail("gathered"))):
        lock.verify()


def test_the_lock_is_released_after_an_error_and_where_a_worker_fails(tmp_path):
    def fail(truth):
        raise RuntimeError("a worker is gone")

    with pytest.raises(KeyboardInterrupt), directory_with(tmp_path):
        raise KeyboardInterrupt
    assert os.listdir(tmp_path) == []
    with pytest.raises(RuntimeError, match="gone"), directory_with(tmp_path, gather=fail):
        pass
    assert os.listdir(tmp_path) == []

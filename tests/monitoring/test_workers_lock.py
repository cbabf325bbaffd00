"""The lock of a run of several workers: all are refused with the chief, and it is held until nothing is written."""

import os

import pytest

from distloop.monitoring.directory import Directory
from distloop.monitoring.run_lock import LockLost
from distloop.monitoring.workers_lock import WorkersLock
from tests.monitoring.test_run_lock import holder_of, write_lock


@pytest.mark.parametrize("is_chief", [True, False])
def test_every_worker_of_a_run_is_refused_with_its_chief(is_chief, tmp_path):
    truths = []
    lock = WorkersLock(str(tmp_path), is_chief, lambda truth: truths.append(truth) or [True, False])
    write_lock(tmp_path)
    with pytest.raises(ValueError, match="is being written to by process" if is_chief else "The chief may not write"):
        with lock:
            pass
    assert truths == [is_chief] and holder_of(tmp_path)["token"] == "another"


@pytest.mark.parametrize("is_chief", [True, False])
def test_the_chief_alone_takes_the_lock(is_chief, tmp_path):
    with WorkersLock(str(tmp_path), is_chief, lambda truth: [truth]) as lock:
        assert os.listdir(tmp_path) == ["run.lock"] * is_chief and lock is None
    assert os.listdir(tmp_path) == []


def test_a_worker_that_fails_while_all_meet_releases_the_lock(tmp_path):
    def fail(truth):
        raise RuntimeError("a worker is gone")

    with pytest.raises(RuntimeError, match="gone"), WorkersLock(str(tmp_path), True, fail):
        pass
    assert os.listdir(tmp_path) == []


def test_without_a_workdir_nothing_is_locked_and_nothing_gathered():
    lock = WorkersLock("", True, lambda truth: pytest.fail("gathered"))
    with lock:
        lock.verify()


def test_the_lock_is_held_until_nothing_is_written_any_more(tmp_path):
    held = []

    def finish():
        held.append((tmp_path / "run.lock").exists())
        raise OSError("the last save failed")

    lock = WorkersLock(str(tmp_path), True, lambda truth: [truth])
    lock.finish = finish
    with pytest.raises(OSError, match="the last save failed"), lock:
        pass
    with pytest.raises(KeyboardInterrupt), lock:
        raise KeyboardInterrupt
    assert held == [True, True] and os.listdir(tmp_path) == []


def test_what_else_a_run_needs_to_write_is_verified_with_the_lock(tmp_path):
    class Lost(Directory):
        def verify(self):
            raise LockLost("the bucket is another run's")

    lock = WorkersLock(str(tmp_path), True, lambda truth: [truth], outer=Lost())
    with lock, pytest.raises(LockLost, match="another run's"):
        lock.verify()

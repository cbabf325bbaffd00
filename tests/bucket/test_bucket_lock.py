"""The lock of a bucket: who is refused, who takes it over, and how a process notices that it has lost it."""

import json
import os
import shutil
import time

import pytest

from distloop.bucket.remote_directory import RemoteDirectory
from distloop.workdir import run_lock
from distloop.workdir.run_lock import LockLost, Pace, RunLock


@pytest.fixture
def directory(tmp_path, monkeypatch):
    monkeypatch.setattr(RemoteDirectory, "pace", Pace(0.01, 0.1, 0.01, 0.01))
    return RemoteDirectory(f"file://{tmp_path}/run")


def lock_of(directory):
    return RunLock(directory.url, directory=directory)


def write(directory, beats=0, **fields):
    """Writes the lock of a process of another host, as such a process does: by a temporary file of its own."""
    holder = {"token": "another", "host": "node-b", "machine": "b", "process": 7, "start": "1", "since": 0.0}
    RemoteDirectory(directory.url).write(run_lock.FILE, json.dumps({**holder, "beats": beats, **fields}).encode())


def test_a_process_of_this_host_is_refused_in_a_sentence_unless_it_is_dead(directory, capsys):
    here = {"host": run_lock.socket.gethostname(), "machine": run_lock._machine(), "process": os.getppid()}
    write(directory, **here, start=run_lock.start_ticks(os.getppid()))
    with pytest.raises(ValueError, match=f"run' is being written to by process {os.getppid()} on .*: wait until that"):
        lock_of(directory).__enter__()
    write(directory, **here, start="1")
    with lock_of(directory) as held:
        held.verify()
    assert directory.list() == {} and capsys.readouterr().out == ""


def test_the_lock_of_another_host_is_taken_when_it_shows_no_sign_of_life(directory, monkeypatch, capsys):
    write(directory)
    with lock_of(directory):
        assert "is locked by process 7 on node-b, since" in capsys.readouterr().out
    write(directory)
    monkeypatch.setattr(run_lock.time, "sleep", lambda secs: write(directory, beats=1))
    with pytest.raises(ValueError, match="is being written to by process 7 on node-b"):
        lock_of(directory).__enter__()


def test_a_removed_lock_is_written_again_and_who_lost_it_writes_no_more(directory):
    with lock_of(directory) as held:
        directory.delete(run_lock.FILE)
        held.verify()
        assert run_lock.FILE in directory.list()
        write(directory)
        deadline = time.monotonic() + 300
        with pytest.raises(LockLost, match="was taken over by process 7 on node-b"):
            while time.monotonic() < deadline:
                held.verify()
                write(directory)  # over a sign of life that was on its way
                time.sleep(0.005)
    assert run_lock.FILE in directory.list()


def test_a_directory_that_another_path_leads_to_has_one_lock(directory, tmp_path):
    with lock_of(directory):
        (tmp_path / "link").symlink_to(tmp_path / "run")
        with pytest.raises(ValueError, match="link' is being written to by another fit of this process, since"):
            lock_of(RemoteDirectory(f"file://{tmp_path}/link")).__enter__()


def test_who_failed_after_the_lock_was_written_may_take_it_again(directory, monkeypatch):
    create = directory.create
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(directory, "create", lambda *content: create(*content) and 1 / 0)
        lock_of(directory).__enter__()
    with lock_of(directory):
        pass


def test_a_copy_that_is_still_locked_is_refused(directory, tmp_path):
    copied = RemoteDirectory(f"file://{tmp_path}/copied")
    with lock_of(directory):
        shutil.copytree(tmp_path / "run", tmp_path / "copied")
        with pytest.raises(ValueError, match="copied' is being written to by another fit of this process"):
            lock_of(copied).__enter__()
    with lock_of(copied):  # the process has it no more
        pass

"""The lease of a bucket: who is refused, who takes it over, and how a process notices that it has lost it."""

import json
import os
import shutil
import time

import pytest

from distloop.bucket import lease
from distloop.bucket.directory import RemoteDirectory
from distloop.bucket.lease import Lease
from distloop.monitoring import run_lock
from distloop.monitoring.run_lock import LockLost


@pytest.fixture
def directory(tmp_path, monkeypatch):
    monkeypatch.setattr(lease, "_POLL_SECS", 0.01)
    monkeypatch.setattr(lease, "_SETTLE_SECS", 0.01)
    monkeypatch.setattr(lease, "LEASE_SECS", 0.1)
    return RemoteDirectory(f"file://{tmp_path}/run")


def write(directory, beats=0, **fields):
    """Writes the lease of a process of another host."""
    holder = {"token": "another", "host": "node-b", "machine": "b", "process": 7, "start": "1", "since": 0.0}
    directory.write(lease.FILE, json.dumps({**holder, "beats": beats, **fields}).encode())


def test_a_second_process_is_refused_in_a_sentence_that_names_the_first(directory):
    here = {"host": run_lock.socket.gethostname(), "machine": run_lock._machine(), "process": os.getppid()}
    write(directory, **here, start=run_lock.start_ticks(os.getppid()))
    with pytest.raises(ValueError, match=f"run' is being written to by process {os.getppid()} on .*: wait until that"):
        Lease(directory).take()


def test_the_lease_of_a_dead_process_of_this_host_is_taken_at_once(directory, capsys):
    here = {"host": run_lock.socket.gethostname(), "machine": run_lock._machine(), "process": os.getppid()}
    write(directory, **here, start="1")
    held = Lease(directory)
    held.take()
    held.check()
    held.release()
    assert directory.list() == {} and capsys.readouterr().out == ""


def test_the_lease_of_another_host_is_taken_when_it_shows_no_sign_of_life(directory, capsys):
    write(directory)
    held = Lease(directory)
    held.take()
    held.release()
    assert "is locked by process 7 on node-b, since" in capsys.readouterr().out


def test_a_process_of_another_host_that_is_alive_is_noticed_by_its_next_sign_of_life(directory, monkeypatch):
    write(directory)
    monkeypatch.setattr(lease.time, "sleep", lambda secs: write(directory, beats=1))
    with pytest.raises(ValueError, match="is being written to by process 7 on node-b"):
        Lease(directory).take()


def test_who_was_taken_over_writes_no_more(directory, monkeypatch):
    monkeypatch.setattr(lease, "BEAT_SECS", 0.01)
    held = Lease(directory)
    held.take()
    held.verify()
    write(directory)
    deadline = time.monotonic() + 10
    with pytest.raises(LockLost, match="was taken over by process 7 on node-b"):
        while time.monotonic() < deadline:
            held.verify()
            write(directory)  # over a sign of life that was on its way
            time.sleep(0.005)
    held.release()
    assert lease.FILE in directory.list()


def test_a_lease_that_somebody_has_removed_is_written_again(directory):
    held = Lease(directory)
    held.take()
    directory.delete(lease.FILE)
    held.check()
    assert lease.FILE in directory.list()
    held.release()


def test_the_lease_of_a_run_that_was_copied_is_free_when_it_shows_no_sign_of_life(directory, tmp_path):
    original, copied = Lease(directory), Lease(RemoteDirectory(f"file://{tmp_path}/copied"))
    original.take()
    shutil.copytree(tmp_path / "run", tmp_path / "copied")
    copied.take()
    original.check()
    copied.release()
    original.release()


def test_a_directory_that_another_path_leads_to_has_one_lease(directory, tmp_path, monkeypatch):
    monkeypatch.setattr(lease, "BEAT_SECS", 0.01)
    held = Lease(directory)
    held.take()
    (tmp_path / "link").symlink_to(tmp_path / "run")
    with pytest.raises(ValueError, match="link' is being written to by another process"):
        Lease(RemoteDirectory(f"file://{tmp_path}/link")).take()
    held.release()


def test_who_failed_after_the_lease_was_written_may_take_it_again(directory, monkeypatch):
    create = directory.create
    monkeypatch.setattr(directory, "create", lambda *content: create(*content) and 1 / 0)
    with pytest.raises(ZeroDivisionError):
        Lease(directory).take()
    monkeypatch.setattr(directory, "create", create)
    held = Lease(directory)
    held.take()
    held.release()

"""What a launcher and its workers tell each other."""

import os

import pytest

from distloop.launcher.inbox import Inbox
from distloop.workers import messages


@pytest.fixture
def launcher():
    launcher = Inbox()
    yield launcher
    launcher.close()


def enter(monkeypatch, launcher, worker=1, pipe=None):
    membership = messages.Membership(2, "ab", 1, 3, "worker 1 failed", worker, pipe or launcher.pipe)
    monkeypatch.setenv(*next(iter(membership.variables().items())))


def test_without_a_launcher_nothing_is_told(monkeypatch):
    monkeypatch.delenv("DISTLOOP_MEMBERSHIP", raising=False)
    assert messages.find_membership() is None
    messages.send(leaves=True)


def test_a_worker_knows_its_membership_and_its_notes_arrive(launcher, monkeypatch):
    enter(monkeypatch, launcher)
    membership = messages.find_membership()
    assert (membership.number, membership.cause, membership.is_elastic) == (2, "worker 1 failed", True)
    launcher.read()
    assert (launcher.step, launcher.began_at, launcher.leaving) == (None, None, set()) and launcher.start_secs == 0
    membership.send(sizes=[1, 2])  # as a worker does that cannot run with so many
    launcher.read()
    assert launcher.sizes == (1, 2) and launcher.step is None and launcher.began_at is None
    membership.send(begins=20, sizes=[1, 2])
    messages.send(leaves=True)
    launcher.read()
    assert (launcher.step, launcher.sizes, launcher.leaving) == (20, (1, 2), {1}) and launcher.began_at is not None
    first = launcher.start_secs
    assert 0 < first < 60
    membership.send(ends=True)
    launcher.read()
    assert launcher.began_at is None and launcher.step == 20
    membership.send(begins=30)  # a second call of fit
    launcher.read()
    assert launcher.step == 30 and launcher.start_secs == first


def test_half_a_note_waits_for_its_rest(launcher):
    os.write(launcher.write_end, b'{"worker": 2, "lea')
    launcher.read()
    assert launcher.leaving == set()
    os.write(launcher.write_end, b'ves": true}\n')
    launcher.read()
    assert launcher.leaving == {2}


def test_a_process_without_the_pipe_writes_to_no_other_file(launcher, monkeypatch, tmp_path):
    with open(tmp_path / "file", "wb") as file:
        enter(monkeypatch, launcher, pipe=(file.fileno(), launcher.pipe[1]))
        messages.send(leaves=True)
    assert (tmp_path / "file").read_bytes() == b""
    enter(monkeypatch, launcher, pipe=(1_000_000, launcher.pipe[1]))
    messages.send(leaves=True)

"""What a launcher and its workers tell each other."""

import math
import os
import pathlib
import select
import subprocess
import sys
import time
import types

import pytest

from distloop.distributed import notes

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture
def launcher():
    launcher = notes.Notes()
    yield launcher
    launcher.close()


def enter(monkeypatch, launcher, worker=1, pipe=None):
    membership = notes.Membership(2, "ab", 1, 3, "worker 1 fell", worker, pipe or launcher.pipe)
    monkeypatch.setenv(*next(iter(membership.variables().items())))


def test_without_a_launcher_nothing_is_told(monkeypatch):
    monkeypatch.delenv("DISTLOOP_MEMBERSHIP", raising=False)
    assert notes.find_membership() is None
    notes.tell(leaves=True)


def test_a_worker_knows_its_membership_and_its_notes_arrive(launcher, monkeypatch):
    enter(monkeypatch, launcher)
    membership = notes.find_membership()
    assert (membership.number, membership.cause, membership.is_elastic) == (2, "worker 1 fell", True)
    launcher.read()
    assert (launcher.step, launcher.began_at, launcher.leavers) == (None, None, set()) and launcher.start_secs == 0
    membership.tell(begins=20, sizes=[1, 2])
    notes.tell(leaves=True)
    launcher.read()
    assert (launcher.step, launcher.sizes, launcher.leavers) == (20, (1, 2), {1}) and launcher.began_at is not None
    first = launcher.start_secs
    assert 0 < first < 60
    membership.tell(ends=True)
    launcher.read()
    assert launcher.began_at is None and launcher.step == 20
    membership.tell(begins=30)  # a second call of fit
    launcher.read()
    assert launcher.step == 30 and launcher.start_secs == first


def test_names_of_modules_arrive_whole_and_in_notes_that_a_pipe_keeps_together(launcher, monkeypatch):
    enter(monkeypatch, launcher)
    told, names = (
        [],
        [f"package_{i}.a_module_with_a_long_name_{i}.and_one_in_it_with_a_longer_name_{i}" for i in range(400)],
    )
    launcher.on_modules = told.append
    written, write = [], os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: written.append(len(data)) or write(descriptor, data))
    notes.find_membership().tell_modules(names)
    launcher.read()
    assert told == [names] and max(written) <= select.PIPE_BUF


def test_half_a_note_waits_for_its_rest(launcher):
    os.write(launcher.write_end, b'{"worker": 2, "lea')
    launcher.read()
    assert launcher.leavers == set()
    os.write(launcher.write_end, b'ves": true}\n')
    launcher.read()
    assert launcher.leavers == {2}


def test_a_process_without_the_pipe_writes_to_no_other_file(launcher, monkeypatch, tmp_path):
    with open(tmp_path / "file", "wb") as file:
        enter(monkeypatch, launcher, pipe=(file.fileno(), launcher.pipe[1]))
        notes.tell(leaves=True)
    assert (tmp_path / "file").read_bytes() == b""
    enter(monkeypatch, launcher, pipe=(1_000_000, launcher.pipe[1]))
    notes.tell(leaves=True)


def test_a_worker_that_cannot_run_with_so_many_tells_the_numbers_that_can(launcher, monkeypatch):
    enter(monkeypatch, launcher)
    notes.find_membership().tell(sizes=[1, 2])
    launcher.read()
    assert launcher.sizes == (1, 2) and launcher.step is None and launcher.began_at is None


def test_another_thread_of_the_launcher_tells_when_workers_are_to_be_stopped_and_that_is_read_once(launcher):
    launcher.tell()
    launcher.read()
    assert launcher.take_stop_at() == math.inf
    now = time.monotonic()
    launcher.tell(stop_secs=70)
    launcher.tell(stop_secs=10)
    launcher.read()
    assert now + 10 <= launcher.take_stop_at() < now + 30 and launcher.take_stop_at() == math.inf


def test_modules_of_the_program_are_not_told(tmp_path):
    (tmp_path / "own.py").write_text("")
    (tmp_path / "stray.py").write_text("import sys; sys.modules['stray'] = 5")
    names = ["own", "stray", "__main__", "json", "absl", "distloop.distributed.notes"]
    code = "import own, stray, json, absl; from distloop.distributed import notes; told = notes.installed_modules()"
    result = subprocess.run(
        [sys.executable, "-c", f"{code}; print([name in told for name in {names}])"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert result.stdout == "[False, False, False, True, True, True]\n", result.stderr


def test_neither_are_those_of_an_installed_program(monkeypatch):
    assert "json.decoder" in notes.installed_modules()
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", types.SimpleNamespace(name="json.tool"), raising=False)
    assert "json.decoder" not in notes.installed_modules() and "subprocess" in notes.installed_modules()

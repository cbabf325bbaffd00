"""What happens when the disk that a run saves to no longer answers."""

import re
import subprocess
import sys
import textwrap
import threading
import time

import pytest

import distloop
from distloop import atomic_files
from distloop.workdir import directory
from distloop.workdir.directory import EXIT_CODE, DiskWatch
from tests.problems import classification, classifier, on


class Ended(list):
    """Reasons with which processes would have ended."""

    def wait(self, count=1):
        deadline = time.monotonic() + 300
        while len(self) < count and time.monotonic() < deadline:
            time.sleep(0.01)
        return len(self) == count


@pytest.fixture
def ended(monkeypatch):
    """Returns the reasons with which the process would have ended."""
    reasons = Ended()
    monkeypatch.setattr(DiskWatch, "_end", lambda self, reason: reasons.append(reason))
    return reasons


def test_a_save_that_hangs_ends_the_process_with_a_reason_for_the_others(tmp_path):
    program = f"""
        import time
        from distloop.workdir.directory import DiskWatch
        watch = DiskWatch({str(tmp_path)!r}, 0.2, lambda reason: print("told", reason, flush=True))
        with watch.over("saving the checkpoint of step 5"):
            time.sleep(60)
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=900)
    reason = f"nothing in {str(tmp_path)!r} has changed for 0.6 seconds while saving the checkpoint of step 5"
    assert result.returncode == EXIT_CODE == 74, result
    assert result.stdout == f"told {reason}: the disk does not answer\n"
    assert result.stderr.splitlines() == [
        f"distloop: {reason.replace('0.6', '0.2')}. Does the disk answer? After 0.6 seconds this process ends.",
        f"distloop: {reason}: the disk does not answer. This process ends.",
    ]


def test_files_that_grow_are_progress_however_long_the_save_takes(tmp_path, ended):
    with DiskWatch(str(tmp_path), 0.2, ended.append).over("saving"):
        for i in range(20):
            (tmp_path / "variables.data").write_bytes(b"x" * i)
            time.sleep(0.05)
        assert not ended
        assert ended.wait()


def test_a_disk_on_which_not_even_sizes_can_be_read_does_not_answer(tmp_path, ended, monkeypatch):
    answers = threading.Event()
    monkeypatch.setattr(directory, "_size", lambda _: answers.wait(300))
    with DiskWatch(str(tmp_path), 0.1, ended.append).over("saving"):
        assert ended.wait()
        answers.set()


def test_a_process_that_was_suspended_gets_its_time(tmp_path, ended, monkeypatch):
    class Looks(threading.Event):
        number = 0

        def wait(self, timeout=None):  # looks that each took hours, as the process was suspended
            assert timeout == 60
            self.number += 1
            return self.number > 25

    monkeypatch.setattr(DiskWatch, "_measure", lambda *_: None)
    looks = Looks()
    DiskWatch(str(tmp_path), 600, ended.append)._watch("saving", looks)
    assert looks.number == 26 and not ended


@pytest.mark.slow
def test_fit_watches_the_disk_in_the_main_thread_and_in_the_one_that_saves(tmp_path, ended, monkeypatch):
    sync = atomic_files.sync

    def hanging_sync(path):
        if threading.current_thread().name == "distloop-checkpoint":
            assert ended.wait(2)
        sync(path)

    monkeypatch.setattr(atomic_files, "sync", hanging_sync)
    monkeypatch.setattr("distloop.actions.write.Write.flush", lambda _: ended.wait(1))
    trainer = distloop.Trainer(classifier(), on(1, workdir=str(tmp_path), hang_timeout=0.05))
    trainer.fit(distloop.make_dataset(classification(8), 8), steps=1)
    for action in ("saving", "saving the checkpoint of step 1"):
        pattern = f"nothing in .* has changed for 0.15 seconds while {action}: .*"
        assert any(re.fullmatch(pattern, reason) for reason in ended), ended


def test_without_a_hang_timeout_nothing_is_watched(tmp_path):
    before = threading.active_count()
    with DiskWatch(str(tmp_path), 0, print).over("saving"):
        assert threading.active_count() == before

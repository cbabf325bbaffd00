"""Handing metrics to writers: buffering of rows, media, and disks that fail."""

import threading
import time
from dataclasses import replace

import numpy as np
import pytest
import tensorflow as tf

from distloop.actions.write import Write
from distloop.monitoring.media import Histogram, Text
from distloop.monitoring.tensorboard import SummaryWriter
from distloop.training.action import Report
from distloop.training.boundary import run_actions
from tests.problems import report


def test_every_writer_gets_the_step_and_all_numbers_at_every_boundary():
    class Writer:
        def __init__(self):
            self.rows = []

        def write(self, step, metrics, when):
            self.rows.append((step, metrics))

    def evaluate(report):
        return {"test/loss": 0.25}

    evaluate.every = 10
    writers = [Writer(), Writer()]
    run_actions([evaluate, Write(writers)], report(step=10, loss=0.5))
    assert [w.rows for w in writers] == [[(10, {"loss": 0.5, "test/loss": 0.25})]] * 2


class File:
    """A writer to a file, which may fail at a step."""

    path = "file"

    def __init__(self, fails_at=None, error=None):
        self.rows, self.flushed, self.discarded, self.is_closed = [], [], [], False
        self._fails_at, self._error, self.has_failed = fails_at, error, threading.Event()

    def write(self, step, metrics, when):
        if step == self._fails_at:
            self.has_failed.set()
            raise self._error
        self.rows.append(step)

    def flush(self):
        self.flushed = self.rows.copy()

    def discard(self, step):
        self.rows = self.flushed.copy()
        self.discarded.append(step)

    def close(self):
        self.is_closed = True


def test_files_get_rows_together_after_a_while_at_a_flush_and_in_the_end(monkeypatch):
    monkeypatch.setattr("distloop.actions.write._BUFFER_SECS", 0.5)
    file = File()
    with Write([file]) as write:
        for first in (1, 11):  # the second time, too
            for step in range(first, first + 10):
                write(report(step))
            assert file.rows == list(range(1, first))
            give_up = time.monotonic() + 300
            while file.flushed != list(range(1, first + 10)) and time.monotonic() < give_up:
                time.sleep(0.01)
            assert file.flushed == list(range(1, first + 10))
        write(report(21))
        write.flush()
        assert file.flushed == list(range(1, 22)) and not file.is_closed
        write(report(22))
    assert file.rows == list(range(1, 23)) and file.is_closed


def test_arrays_that_change_after_they_were_shown_are_written_as_they_were(tmp_path):
    shown, buffer = [], np.zeros(4)

    class Summaries(SummaryWriter):
        def show(self, step, media, when=None):
            shown.append({name: tf.make_ndarray(item.encode()[0]).sum() for name, item in media.items()})

    with Write([Summaries(str(tmp_path), [])]) as write:
        for step in (1, 2):
            buffer[:] = step
            write(replace(report(step), media={"buffer": Histogram(buffer)}))
            buffer[:] = -1
    edges = [np.histogram_bin_edges(np.full(4, step), 30) for step in (1.0, 2.0)]
    assert shown == [{"buffer": pytest.approx(e[:-1].sum() + e[1:].sum() + 4)} for e in edges]


def test_no_row_is_lost_or_twice_there_while_another_thread_writes(monkeypatch):
    monkeypatch.setattr("distloop.actions.write._BUFFER_SECS", 0.001)
    file = File()
    with Write([file]) as write:
        for step in range(1, 2001):
            write(report(step))
            if step % 50 == 0:
                time.sleep(0.0007)
    assert file.rows == list(range(1, 2001))


def test_a_row_that_a_thread_writes_while_media_are_encoded_is_not_lost(monkeypatch):
    def replace_slowly(report, **changes):
        write.flush()  # by the timer, for another row
        return replace(report, **changes)

    monkeypatch.setattr("distloop.actions.write.replace", replace_slowly)
    file = File()
    with Write([file]) as write:
        for step in (1, 2):
            write(replace(report(step), media={"text": Text("a")}))
    assert file.rows == [1, 2]


def test_an_error_of_the_timer_loses_no_other_row(monkeypatch):
    monkeypatch.setattr("distloop.actions.write._BUFFER_SECS", 0.1)
    file, other = File(fails_at=2, error=ValueError("wrong")), File()
    with pytest.raises(ValueError, match="wrong"), Write([file, other]) as write:
        for step in (1, 2, 3):
            write(report(step))
        assert file.has_failed.wait(300)
    assert file.rows == [1, 3] and other.rows == [1, 2, 3] and file.is_closed and other.is_closed


@pytest.mark.parametrize("where", ["in the end", "at a flush", "by the timer"])
def test_an_error_in_a_row_is_raised_in_the_main_thread(where, monkeypatch):
    monkeypatch.setattr("distloop.actions.write._BUFFER_SECS", 0.001 if where == "by the timer" else 60)
    file = File(fails_at=2, error=ValueError("wrong"))
    with pytest.raises(ValueError, match="wrong"), Write([file]) as write:
        write(report(1))
        write(report(2))
        if where == "at a flush":
            write.flush()
        elif where == "by the timer":
            assert file.has_failed.wait(300)
            for step in range(3, 1000):  # the timer has yet to hand the error over
                write(report(step))
                time.sleep(0.01)
        assert where == "in the end"
    assert file.is_closed and 2 not in file.rows


def test_a_disk_that_fails_for_a_while_loses_no_row_and_is_logged_once(caplog, monkeypatch):
    monkeypatch.setattr("distloop.actions.write._BUFFER_SECS", 60)
    file, other = File(fails_at=2, error=OSError(28, "No space left on device")), File()
    with caplog.at_level("WARNING", "distloop"), Write([file, other]) as write:
        for step in (1, 2, 3, 4):
            write(report(step))
            write.flush()
        assert (file.flushed, file.discarded, other.flushed) == ([1], [2, 2, 2], [1, 2, 3, 4])
        file._fails_at = None
        write(report(5))
        write.flush()
        assert file.flushed == [1, 2, 3, 4, 5]
    assert [record.getMessage() for record in caplog.records] == [
        "file cannot be written (No space left on device): the run goes on, and its rows are kept until they can be "
        "written.",
        "file can be written again.",
    ]


def test_rows_that_could_never_be_written_are_counted_in_the_end(caplog, monkeypatch):
    monkeypatch.setattr("distloop.actions.write._MAX_ROWS", 3)
    file = File(fails_at=5, error=OSError(28, "No space left on device"))
    with caplog.at_level("ERROR", "distloop"), Write([file]) as write:
        for step in range(1, 6):
            write(report(step))
    assert "file lacks 3 rows, which could not be written." in caplog.text and file.is_closed


def test_a_process_that_lost_its_workdir_writes_no_row():
    def verify():
        raise RuntimeError("another process writes here")

    file = File()
    with pytest.raises(RuntimeError, match="another process"), Write([file], verify) as write:
        write(report(1))
    assert file.rows == [] and file.is_closed


def test_an_error_of_the_console_is_raised():
    class Broken:
        def write(self, step, metrics, when):
            raise BrokenPipeError("gone")

        def close(self):
            pass

    with pytest.raises(BrokenPipeError), Write([Broken()]) as write:
        write(Report(1, 3, {}, None))

"""One writer gets media before their row, has an id before it begins, and may be down when a run resumes."""

import threading

import pytest

from distloop.monitoring import delivery
from distloop.monitoring.deliveries import Deliveries
from distloop.monitoring.media import PRCurve, Text
from tests.monitoring.test_deliveries import Gallery, Rows, deliver


def test_media_come_before_their_row_and_those_that_fail_hold_up_nothing(capsys):
    writer, plain = Gallery(fails_at=[3]), Rows("plain")
    with Deliveries([writer, plain], "").open(0, {}) as opened:
        for step, name in [(1, "note"), (2, "bad"), (3, "note"), (4, "note")]:
            opened.write(step, {}, 0.0)
            opened.show(step, {name: Text("x"), "curve": PRCurve([0, 1], [0.1, 0.9])}, 0.0)
            opened.flush()
    assert writer.steps == plain.steps == [1, 2, 3, 4]
    assert [(step, before) for step, before, _ in writer.media] == [(1, 0), (3, 2), (4, 3)]
    assert writer.media[0][2] == {"note": (".md", b"x")}  # a curve has no file
    errors = capsys.readouterr().err
    assert "Gallery did not take bad of step 2 (ValueError: too large): media that fail are left out." in errors


def test_a_writer_that_is_down_when_a_run_resumes_is_opened_later(tmp_path, capsys):
    class Down(Rows):
        def open(self, settings, run_id):
            super().open(settings, run_id)
            if len(self.opened) < 3:
                raise ConnectionError("no route")
            return run_id

    deliver([Rows()], [1, 2], tmp_path)
    writer = Down("Rows")
    deliver([writer], [3, 4, 5], tmp_path, start=2)
    assert writer.steps == [3, 4, 5] and [run_id for _, run_id in writer.opened] == ["the run"] * 3
    errors = capsys.readouterr().err
    assert "Rows cannot be opened (ConnectionError: no route): the run goes on" in errors
    assert errors.count("no route") == 1 and "Rows takes rows again." in errors


def test_a_run_that_a_writer_has_not_begun_has_an_id_before_it_does(tmp_path):
    class Named(Rows):
        def new_run_id(self):
            return "new"

    class Killed(Named):
        def open(self, settings, run_id):
            raise RuntimeError("killed")

    with pytest.raises(ValueError, match="cannot be opened"):
        deliver([Killed("x")], [1], tmp_path)
    deliver([writer := Named("x")], [1], tmp_path)
    assert writer.opened[0][1] == "new"


def test_a_copied_workdir_begins_a_run_of_its_own_at_each_writer(tmp_path, caplog):
    for run, run_id in (("a", None), ("a", "the run"), ("b", None), ("b", "the run")):
        with Deliveries([writer := Rows()], str(tmp_path), run).open(0, {}):
            pass
        assert writer.opened[0][1] == run_id
    assert caplog.text.count("is of a copied workdir: Rows begin") == 1


def test_a_writer_that_does_not_open_holds_up_no_run_and_gets_its_rows_once_it_has(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(delivery, "_OPEN_SECS", 0.1)
    may_open = threading.Event()

    class Slow(Rows):
        def open(self, settings, run_id):
            may_open.wait(60)
            return super().open(settings, run_id)

    with Deliveries([writer := Slow()], str(tmp_path)).open(0, {}) as opened:
        opened.write(1, {}, 0.0)
        opened.flush()
        assert writer.steps == []
        may_open.set()
    assert writer.steps == [1]
    assert caplog.text.count("Slow is not open after 0.1 seconds") == 1

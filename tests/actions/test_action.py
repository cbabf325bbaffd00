"""What happens between loops: who is due, what flows from one action to the next, and when a run is stopped."""

import dataclasses
import math
import time
from dataclasses import replace

import numpy as np
import pytest
import tensorflow as tf

from distloop.actions.action import Evaluate, Report, SaveBest, StopEarly, StopTraining, Utilization, Write, run
from distloop.monitoring import memory
from distloop.monitoring.media import Histogram
from distloop.monitoring.tensorboard import SummaryWriter


def report(step=10, until=100, **metrics):
    return Report(step, until, metrics, state=None)


def action(every, returned=None, seen=None):
    """Makes an action that notes the reports it gets."""

    def act(report):
        if seen is not None:
            seen.append(report)
        if isinstance(returned, Exception):
            raise returned
        return returned

    act.every = every
    return act


# Who is due.


def test_only_actions_that_are_due_are_called():
    seen = []
    run([action(5, seen=seen), action(3, seen=seen), action(0, seen=seen)], report(step=10))
    assert len(seen) == 1


@pytest.mark.parametrize("every", [0, 7, 1000, None])
def test_every_action_is_called_at_the_end(every):
    seen = []
    run([action(every, seen=seen)], report(step=100))
    assert len(seen) == 1


def test_an_action_without_a_period_is_called_at_every_boundary():
    seen = []
    for step in (1, 2, 7):
        run([action(None, seen=seen)], report(step=step))
    assert [r.step for r in seen] == [1, 2, 7]


# What flows.


def test_numbers_join_the_report_of_the_next_action():
    seen = []
    metrics, reason = run(
        [action(1, {"a": 1.0}, seen), action(1, None, seen), action(1, {"b": 2.0}, seen)], report(loss=0.5)
    )
    assert [dict(r.metrics) for r in seen] == [{"loss": 0.5}, {"loss": 0.5, "a": 1.0}, {"loss": 0.5, "a": 1.0}]
    assert metrics == {"loss": 0.5, "a": 1.0, "b": 2.0}
    assert reason is None


def test_a_later_number_of_the_same_name_wins():
    metrics, _ = run([action(1, {"a": 1.0}), action(1, {"a": 2.0})], report())
    assert metrics == {"a": 2.0}


def test_an_action_cannot_change_the_report_of_another():
    def scribble(report):
        report.metrics["loss"] = 7.0

    scribble.every = 1
    seen = []
    metrics, _ = run([scribble, action(1, seen=seen)], report(loss=0.5))
    assert metrics == seen[0].metrics == {"loss": 0.5}


def test_a_report_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        report().step = 3


def test_an_action_sees_the_step_the_end_and_the_state():
    seen = []
    run([action(1, seen=seen)], Report(4, 9, {}, state="state"))
    assert (seen[0].step, seen[0].until, seen[0].state) == (4, 9, "state")


# Stopping.


def test_stopping_gives_the_reason_and_still_calls_those_after_it_as_at_the_end():
    seen = []
    metrics, reason = run(
        [action(1, {"a": 1.0}), action(1, StopTraining("enough")), action(0, {"b": 2.0}, seen)], report(step=10)
    )
    assert reason == "enough"
    assert metrics == {"a": 1.0, "b": 2.0}
    assert len(seen) == 1


def test_the_first_reason_to_stop_counts():
    _, reason = run([action(1, StopTraining("first")), action(1, StopTraining("second"))], report())
    assert reason == "first"


def test_another_exception_is_not_caught():
    with pytest.raises(ZeroDivisionError):
        run([action(1, ZeroDivisionError())], report())


# Evaluate and Write.


def test_evaluate_reports_under_its_name():
    evaluate = Evaluate("test", lambda: {"loss": 0.5, "auc": 0.9}, every=20)
    assert evaluate.every == 20
    assert evaluate(report()) == {"test/loss": 0.5, "test/auc": 0.9}


def test_write_hands_the_step_and_all_numbers_to_every_writer_at_every_boundary():
    class Writer:
        def __init__(self):
            self.rows = []

        def write(self, step, metrics, when):
            self.rows.append((step, metrics))

    writers = [Writer(), Writer()]
    run([action(10, {"test/loss": 0.25}), Write(writers)], report(step=10, loss=0.5))
    assert [w.rows for w in writers] == [[(10, {"loss": 0.5, "test/loss": 0.25})]] * 2


class File:
    """A writer of files, which may fail at a step."""

    path = "file"

    def __init__(self, fails_at=None, error=None):
        self.rows, self.flushed, self.is_closed = [], [], False
        self._fails_at, self._error = fails_at, error

    def write(self, step, metrics, when):
        if step == self._fails_at:
            raise self._error
        self.rows.append(step)

    def flush(self):
        self.flushed = self.rows.copy()

    def close(self):
        self.is_closed = True


def test_files_get_rows_together_after_a_while_at_a_flush_and_in_the_end(monkeypatch):
    monkeypatch.setattr("distloop.actions.action._MOST_SECS", 0.5)
    file = File()
    with Write([file]) as write:
        for first in (1, 11):  # the second time, too
            for step in range(first, first + 10):
                write(report(step))
            assert file.rows == list(range(1, first))
            give_up = time.monotonic() + 10
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
        def show(self, step, displays, when=None):
            shown.append({name: tf.make_ndarray(display.encode()[0]).sum() for name, display in displays.items()})

    with Write([Summaries(str(tmp_path), [])]) as write:
        for step in (1, 2):
            buffer[:] = step
            write(replace(report(step), displays={"buffer": Histogram(buffer)}))
            buffer[:] = -1
    edges = [np.histogram_bin_edges(np.full(4, step), 30) for step in (1.0, 2.0)]
    assert shown == [{"buffer": pytest.approx(e[:-1].sum() + e[1:].sum() + 4)} for e in edges]


def test_no_row_is_lost_or_twice_there_while_another_thread_writes(monkeypatch):
    monkeypatch.setattr("distloop.actions.action._MOST_SECS", 0.001)
    file = File()
    with Write([file]) as write:
        for step in range(1, 2001):
            write(report(step))
            if step % 50 == 0:
                time.sleep(0.0007)
    assert file.rows == list(range(1, 2001))


@pytest.mark.parametrize("found", ["in the end", "at a flush", "by the timer"])
def test_what_is_wrong_with_a_row_is_raised_where_somebody_sees_it(found, monkeypatch):
    monkeypatch.setattr("distloop.actions.action._MOST_SECS", 0.001 if found == "by the timer" else 60)
    file = File(fails_at=2, error=ValueError("wrong"))
    with pytest.raises(ValueError, match="wrong"), Write([file]) as write:
        write(report(1))
        write(report(2))
        if found == "at a flush":
            write.flush()
        elif found == "by the timer":
            time.sleep(0.2)
            write(report(3))
        assert found == "in the end"
    assert file.is_closed and 2 not in file.rows


def test_a_disk_that_fails_ends_all_files_and_no_more(caplog):
    files = [File(), File(fails_at=2, error=OSError(28, "No space left on device")), File()]
    with caplog.at_level("ERROR", "absl"), Write(files) as write:
        for step in (1, 2, 3):
            write(report(step))
    assert [file.rows for file in files] == [[1, 2], [1], [1]] and all(file.is_closed for file in files)
    (record,) = caplog.records
    assert "file cannot be written (No space left on device): the run goes on" in record.getMessage()


# StopEarly.


def stopped_at(values, *arguments, **settings):
    """Returns at which value `StopEarly("m", ...)` stops, or None."""
    stop = StopEarly("m", *arguments, **settings)
    for place, value in enumerate(values):
        try:
            stop(report(m=value))
        except StopTraining:
            return place
    return None


def test_it_stops_after_as_many_measurements_without_a_better_one_as_its_patience():
    assert stopped_at([3.0, 2.0, 2.5, 2.5, 2.5, 2.5]) == 4
    assert stopped_at([3.0, 2.0, 2.5, 2.5, 2.5, 2.5], 1) == 2


def test_a_better_measurement_starts_the_waiting_again():
    assert stopped_at([3.0, 4.0, 2.0, 4.0, 1.0, 4.0], 2) is None


def test_an_equal_measurement_is_no_better():
    assert stopped_at([1.0, 1.0, 1.0], 2) == 2


def test_larger_is_better_if_so_said():
    assert stopped_at([1.0, 2.0, 3.0, 4.0], 1, mode="max") is None
    assert stopped_at([4.0, 3.0], 1, mode="max") == 1


def test_a_gain_up_to_min_delta_is_no_better():
    assert stopped_at([1.0, 0.95, 0.9], 2, min_delta=0.2) == 2
    assert stopped_at([1.0, 0.7, 0.4], 1, min_delta=0.2) is None
    assert stopped_at([1.0, 1.1, 1.15], 2, mode="max", min_delta=0.2) == 2


def test_nan_is_never_better():
    assert stopped_at([math.nan, math.nan], 2) == 1
    assert stopped_at([1.0, math.nan, math.nan], 2) == 2


def test_boundaries_without_a_measurement_do_not_count():
    stop = StopEarly("m", 1)
    stop(report(m=1.0))
    for _ in range(5):
        stop(report(loss=2.0))
    with pytest.raises(StopTraining):
        stop(report(m=1.0))


@pytest.mark.parametrize(
    ("values", "mode", "best"),
    [
        ([2.0, 3.0], "min", "2"),
        ([-2.0, -1.0], "min", "-2"),
        ([4.0, 3.0], "max", "4"),
        ([-4.0, -5.0], "max", "-4"),
    ],
)
def test_the_reason_names_the_metric_and_its_best_value(values, mode, best):
    stop = StopEarly("m", 1, mode=mode)
    stop(report(m=values[0]))
    with pytest.raises(StopTraining, match=f"^m was no better than {best} for 1 measurement"):
        stop(report(m=values[1]))


def test_it_is_asked_whenever_anything_is_due():
    assert StopEarly("m").every is None


@pytest.mark.parametrize("make", [StopEarly, SaveBest])
def test_an_unknown_metric_is_refused_at_the_first_evaluation(make):
    evaluate = Evaluate("test", lambda: {"loss": 1.0}, every=10)
    now_and_then = action(10, {})
    for wrong, others in (("tst/loss", [evaluate]), ("test/los", [evaluate, now_and_then])):
        to_do = [*others, make(wrong)]
        run(to_do, report(step=5, loss=1.0))
        with pytest.raises(ValueError, match=f"{make.__name__} was given the metric '{wrong}'; .*'loss', 'test/loss'"):
            run(to_do, report(step=10, loss=1.0))


@pytest.mark.parametrize("make", [StopEarly, SaveBest])
def test_a_metric_that_may_still_come_is_waited_for_and_missed_in_the_end_without_losing_the_run(make, caplog):
    to_do = [Evaluate("test", lambda: {"loss": 1.0}, every=10), action(10, {}), make("score")]
    run(to_do, report(step=10, loss=1.0))
    run(to_do, report(step=20, loss=1.0))
    assert not caplog.text
    run(to_do, report(step=100, loss=1.0))
    assert f"{make.__name__} was given the metric 'score'; there are ['loss', 'test/loss']: name one" in caplog.text


def test_a_run_that_another_action_stops_between_two_measurements_just_ends():
    evaluate, stop_early = Evaluate("test", lambda: {"loss": 1.0}, every=10), StopEarly("test/loss")
    run([evaluate, stop_early], report(step=10))
    _, reason = run([evaluate, action(5, StopTraining("enough")), stop_early], report(step=15, loss=1.0))
    assert reason == "enough"


def test_an_unknown_mode_is_refused():
    with pytest.raises(ValueError, match="mode='biggest' was given to StopEarly; say 'min' .* 'max'"):
        StopEarly("m", mode="biggest")


def test_no_patience_is_refused():
    with pytest.raises(ValueError, match="patience=0 was given to StopEarly; it waits for 1 measurement at least"):
        StopEarly("m", 0)


def test_the_memory_is_asked_for_once_a_second_and_at_the_end(monkeypatch):
    levels = iter(range(1, 10))
    monkeypatch.setattr(memory, "peaks", lambda: {"host_memory_gb": next(levels)})
    measure = Utilization()
    found = [
        measure(Report(step, 40, {}, state=None, time=when))["host_memory_gb"]
        for step, when in ((10, 5.0), (20, 5.9), (30, 6.1), (40, 6.2))
    ]
    assert found == [1, 1, 2, 3]

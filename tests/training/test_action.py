"""The contract of an action: which actions are due, what they pass on, defaults, and how a run is stopped."""

import dataclasses
import math

import keras
import numpy as np
import pytest
import tensorflow as tf

import distloop
from distloop.actions.evaluate import Evaluate
from distloop.actions.save import SaveBest
from distloop.actions.stop_early import StopEarly
from distloop.monitoring.media import Text
from distloop.settings.durations import Plan
from distloop.training.action import (
    Action,
    Report,
    Saves,
    StopTraining,
    check_actions,
    member,
    phase_of,
)
from distloop.training.boundary import StopPoint, run_actions, started
from distloop.workers.preemption import Interrupted
from tests.problems import every, refused, report


def action(every, returned=None, seen=None):
    """Returns an action that records its reports, and returns or raises this."""

    def act(report):
        if seen is not None:
            seen.append(report)
        if isinstance(returned, BaseException):
            raise returned
        return returned

    act.every = every
    return act


# Which actions are due.


@pytest.mark.parametrize(("every", "due"), [(5, True), (3, False), (0, False), (None, True)])
def test_an_action_is_due_at_multiples_of_its_period_or_at_each_boundary(every, due):
    for step, is_called in ((10, due), (100, True)):
        seen = []
        run_actions([action(every, seen=seen)], report(step))
        assert bool(seen) is is_called


# What actions pass on.


def test_numbers_join_the_report_of_the_next_action():
    seen = []
    returned = ({"a": 1.0}, None, {"b": 2.0})
    metrics, reason = run_actions([action(1, value, seen) for value in returned], report(loss=0.5))
    assert [dict(r.metrics) for r in seen] == [{"loss": 0.5}, {"loss": 0.5, "a": 1.0}, {"loss": 0.5, "a": 1.0}]
    assert metrics == {"loss": 0.5, "a": 1.0, "b": 2.0} and reason is None


def test_numbers_of_all_kinds_become_floats_and_media_stay():
    text = Text("a")
    returned = {"a": tf.constant(1.5), "b": np.int64(2), "c": True, "d": keras.Variable(3.0), "e": text}
    seen = []
    metrics, _ = run_actions([action(1, returned), action(1, False), action(1, seen=seen)], report())
    assert metrics == {"a": 1.5, "b": 2.0, "c": 1.0, "d": 3.0} and {*map(type, metrics.values())} == {float}
    assert seen[0].media == {"e": text} and seen[0].metrics == metrics


@pytest.mark.parametrize(
    ("returned", "sentence"),
    [
        ([1.0], r"returned \[1.0\]; it returns a dict of numbers and media by name, or None"),
        ({"step": 1.0}, "returned a number under the name 'step'; .* each row has a 'step' and a 'time' of its own"),
        ({"time": 1.0}, "returned a number under the name 'time'; names are non-empty strings"),
        ({"": 1.0}, "returned a number under the name ''; names are non-empty strings"),
        ({3: 1.0}, "returned a number under the name 3; names are non-empty strings"),
        ({"a": "1.0"}, "returned '1.0' under 'a', which is no number: return a scalar, or media"),
        ({"a": np.zeros((2, 2))}, r"returned array\(\[\[0., 0.\], \[0., 0.\]\]\) under 'a', which is no number"),
        ({"a": 10**5000}, "returned a number of more than 4,300 digits under 'a', which is no number"),
    ],
)
def test_an_action_that_returns_what_no_row_can_hold_is_named(returned, sentence):
    with pytest.raises(ValueError, match=f"^The action 'act' {sentence}"):
        run_actions([action(1, returned)], report())


def test_an_action_sees_the_state_and_cannot_change_another_ones_report():
    def scribble(report):
        report.metrics["loss"] = 7.0

    scribble.every = 1
    seen = []
    metrics, _ = run_actions([scribble, action(1, seen=seen)], Report(4, 9, {"loss": 0.5}, state="state"))
    assert metrics == seen[0].metrics == {"loss": 0.5}
    assert (seen[0].step, seen[0].until, seen[0].state) == (4, 9, "state")
    with pytest.raises(dataclasses.FrozenInstanceError):
        seen[0].step = 3


# Stopping.


def test_a_stop_calls_what_is_due_at_the_end_before_the_run_is_written():
    log = []

    def note(name, every, returned=None):
        def act(report):
            log.append((name, report.step >= report.until, report.stop_reason, sorted(report.metrics)))
            return noted(report)

        noted, act.every = action(every, returned), every
        return act

    actions = [note("test", 0, {"test": 1.0}), note("val", 5, {"val": 1.0}), note("stop", None, StopTraining("enough"))]
    actions += [note("often", 5), note("export", 0, StopTraining("no more")), StopPoint(), note("write", None)]
    metrics, reason = run_actions([*actions, note("save", 1000)], report(step=10))
    assert (metrics, reason) == ({"val": 1.0, "test": 1.0}, "enough")
    assert log == [
        ("val", False, None, []),
        ("stop", False, None, ["val"]),
        ("often", False, "enough", ["val"]),
        ("test", True, "enough", ["val"]),
        ("export", True, "enough", ["test", "val"]),
        ("write", True, "enough", ["test", "val"]),
        ("save", True, "enough", ["test", "val"]),
    ]


@pytest.mark.parametrize("evaluates_at", [0, 20])
def test_what_a_stop_has_measured_is_compared_where_it_was_waited_for(evaluates_at):
    evaluate = Evaluate("test", lambda _: {"loss": 1.0}, every=evaluates_at)
    save_best, better = SaveBest("test/loss"), []
    ends = []
    called = action(None, seen=better)
    called.end_boundary = lambda report: ends.append(report.step)
    when = distloop.when_better("test/loss", called)
    run_actions([evaluate, save_best, when, action(5, StopTraining("enough"))], report(step=15, loss=1.0))
    assert save_best.best == [(1.0, 15)] and [r.metrics["test/loss"] for r in better] == [1.0] and ends == [15]


def test_an_action_that_is_called_again_may_return_another_value():
    values = iter((3.0, 2.0))
    best = every(None, lambda report: {"best": next(values)})
    best.required_metric = "test/loss"
    evaluate = Evaluate("test", lambda _: {"loss": 1.0}, every=20)
    actions = [evaluate, best, action(5, StopTraining("enough"))]
    assert run_actions(actions, report(step=15))[0] == {"best": 2.0, "test/loss": 1.0}


def test_an_action_that_returns_another_value_of_a_number_is_refused():
    same, other = ([action(1, {"loss": loss, "nan": math.nan, "mine": 1.0})] for loss in (0.5, 0.25))
    assert {"loss": 0.5, "mine": 1.0}.items() <= run_actions(same, report(loss=0.5, nan=math.nan))[0].items()
    refused(lambda: run_actions(other, report(loss=0.5)), "The action 'act' returned 'loss', which the row has already")


# Optional members.


class Recorder(Action):
    """Records what it is asked, beside the default of each optional member."""

    def __init__(self, log, every=None):
        self._log, self.every = log, every

    def __call__(self, report):
        self._log.append("call")

    def end_boundary(self, report):
        self._log.append(dict(report.metrics))


def test_a_plain_function_has_the_protocols_defaults_unless_it_has_its_own():
    function = action(3)
    assert phase_of(function) == "act" and phase_of(Recorder([])) == "Recorder"  # their names
    assert member(function, "only_writes") is member(function, "has_fixed_metrics") is False
    assert member(function, "get_state")() is None
    assert member(function, "end_boundary")(report()) is member(function, "set_saves")(None) is None
    evaluate = Evaluate("test", lambda _: {}, every=3)
    assert member(evaluate, "phase") == "evaluation" and member(evaluate, "only_writes") is False


def test_a_boundary_ends_after_all_actions_and_only_for_those_due():
    log = []
    run_actions([Recorder(log), Recorder(log, every=7), action(1, {"a": 1.0})], report(step=10))
    assert log == ["call", {"a": 1.0}]


def test_a_boundary_is_saved_once_with_the_best_steps_of_all_metrics():
    saved = []
    saves = Saves(lambda report, kept: saved.append((report.step, dict(kept.best_steps))))
    saves.keep("loss", [4])
    saves.keep("accuracy", [2, 6])
    for step in (6, 6, 7):
        saves.save(report(step))
    assert saved == [(step, {"loss": [4], "accuracy": [2, 6]}) for step in (6, 7)]


def test_what_more_is_to_be_kept_of_a_saved_step_is_kept():
    saved = []
    saves = Saves(lambda report, kept: saved.append((report.step, dict(kept.best_steps), kept.stays)))
    saves.save(report(6))
    saves.keep("loss", [6])
    saves.save(report(6), stays=True)
    saves.save(report(6))
    saves.save(report(7))
    assert saved == [(6, {}, False), (6, {"loss": [6]}, True), (7, {"loss": [6]}, False)]


# The life of an action.


class Life(Action):
    """Records the hooks that are called; one of them may fail."""

    every = None

    def __init__(self, log, name, fails=""):
        self._log, self.name, self._fails = log, name, fails

    def _note(self, hook):
        self._log.append(f"{self.name} {hook}")
        if hook == self._fails:
            raise OSError(f"{hook} failed")

    def __call__(self, report):
        self._note("call")

    def on_start(self, report):
        self._note("start")

    def on_end(self, report):
        self._note(f"end at {report.step}")

    def on_error(self, error):
        self._note(f"error {type(error).__name__}")


def live(*actions, **arguments):
    with started(actions, report, **arguments):
        run_actions(actions, report(), plan=Plan(**arguments))


def test_an_action_is_started_and_ended_and_a_plain_function_needs_neither():
    log = []
    live(Life(log, "a"), action(1), Life(log, "b"))
    assert log == ["a start", "b start", "a call", "b call", "b end at 10", "a end at 10"]


@pytest.mark.parametrize("error", [ZeroDivisionError(), KeyboardInterrupt(), Interrupted("by SIGTERM")])
def test_an_action_is_ended_after_an_error_and_hears_of_an_unexpected_one(error):
    log = []
    with pytest.raises(type(error)):
        live(Life(log, "a"), action(1, error))
    heard = ["a error ZeroDivisionError"] if isinstance(error, ZeroDivisionError) else []
    assert log == ["a start", "a call", *heard, "a end at 10"]


def test_all_that_were_started_are_ended_whichever_hook_fails(caplog):
    log = []
    with pytest.raises(OSError, match="start failed"):
        live(Life(log, "a"), Life(log, "b", fails="start"), Life(log, "c"))
    assert log == ["a start", "b start", "b error OSError", "b end at 10", "a error OSError", "a end at 10"]
    failing = Life(log, "a", fails="error ZeroDivisionError"), Life(log, "b", fails="end at 10")
    with pytest.raises(ZeroDivisionError):  # and not what a hook made of it
        live(*failing, action(1, ZeroDivisionError()))
    assert log[-4:] == ["b error ZeroDivisionError", "b end at 10", "a error ZeroDivisionError", "a end at 10"]
    assert "failed when the run had failed: OSError: end at 10 failed" in caplog.text
    with pytest.raises(OSError, match="end at 10 failed"):
        live(Life(log, "a", fails="end at 10"))


def test_the_chief_alone_calls_the_chiefs_actions_which_return_nothing():
    log = []
    for_chief = Life(log, "chief")
    for_chief.chief_only = True
    live(for_chief, Life(log, "all"), is_chief=False)
    assert log == ["all start", "all call", "all end at 10"]
    live(for_chief)
    assert "chief call" in log
    numbers = action(1, {"mine": 1.0})
    numbers.chief_only = True
    with pytest.raises(ValueError, match=r"is chief_only and returned \['mine'\], which other workers would not have"):
        run_actions([numbers], report())


# Metrics that an action requires.


each_watcher = pytest.mark.parametrize("make", [StopEarly, SaveBest])
EVALUATE = Evaluate("test", lambda _: {"loss": 1.0}, every=10)


@each_watcher
def test_an_unknown_metric_is_refused_at_the_first_evaluation(make):
    actions = [EVALUATE, make("test/los", mode="min")]
    run_actions(actions, report(step=5, loss=1.0))
    with pytest.raises(ValueError, match=f"{make.__name__} was given the metric 'test/los'; .*'loss', 'test/loss'"):
        run_actions(actions, report(step=10, loss=1.0))


@each_watcher
@pytest.mark.parametrize("metric", ["score", "test/score"])
def test_a_metric_that_may_still_come_is_awaited_and_missed_at_the_end(make, metric, caplog):
    actions = [EVALUATE, action(10, {}), make(metric, mode="min")]
    for step in (10, 20):
        run_actions(actions, report(step, loss=1.0))
    assert not caplog.text
    run_actions(actions, report(step=100, loss=1.0))
    assert f"{make.__name__} was given the metric '{metric}'; there are ['loss', 'test/loss']: name one" in caplog.text


def test_a_run_that_an_action_stops_between_measurements_just_ends():
    stop_early = StopEarly("test/loss")
    run_actions([EVALUATE, stop_early], report(step=10))
    _, reason = run_actions([EVALUATE, action(5, StopTraining("enough")), stop_early], report(step=15, loss=1.0))
    assert reason == "enough"


def test_an_action_or_a_hook_with_other_arguments_is_refused():
    def act():
        pass

    act.every = 1
    refused(lambda: check_actions([act]), "The action 'act' takes () and is called with (report)")
    right = action(1)
    right.on_end = lambda: None
    refused(lambda: check_actions([right]), "on_end of the action 'act' takes () and is called with (report)")

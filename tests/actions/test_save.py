"""Which steps are saved: periodically, and where a metric is best; tests/checkpoints/test_store.py has the files."""

import functools
import math

import pytest

from distloop.actions.action_state import RunStates
from distloop.actions.save import Save, SaveBest, SaveCosts
from distloop.actions.stop_early import StopEarly
from distloop.monitoring.timing import SaveTimes
from distloop.settings.durations import Plan
from distloop.training.action import Report, Saves
from distloop.training.boundary import run_actions


def noted_saves():
    """Returns what saves, and the list of the saved steps, each with those that are kept for their score."""
    saved = []
    return Saves(lambda report, kept: saved.append((report.step, kept.best_steps["score"]))), saved


def save_steps(rows, every=100, **settings):
    """Runs `SaveBest("score", ...)` and `Save` over rows of step and score; returns saved steps and the kept ones."""
    saves, saved = noted_saves()
    best = SaveBest("score", **{"mode": "min", **settings})
    best.set_saves(saves)
    for step, score in rows:
        numbers = {"loss": 1.0} | ({"score": score} if score else {})
        run_actions([best, Save(saves, every, Plan())], Report(step, 1000, numbers, None))
    return saved


ROWS = [(2, 0.5), (4, 0.7), (6, 0.3)]


@pytest.mark.parametrize(
    ("rows", "settings", "saved"),
    [
        (ROWS, {}, [(2, [2]), (6, [6])]),
        (ROWS, {"mode": "max"}, [(2, [2]), (4, [4])]),
        (ROWS, {"keep": 2}, [(2, [2]), (4, [2, 4]), (6, [6, 2])]),  # the best first
        ([(2, 0.5), (4, 0.3), (6, 0.7)], {"every": 4}, [(2, [2]), (4, [4])]),  # best and due: saved once
        ([(2, 0.5), (4, None), (6, math.nan)], {}, [(2, [2])]),
        ([(2, 0.5), (4, 0.5)], {}, [(2, [2])]),  # an equal value keeps the earlier step
    ],
)
def test_a_step_that_is_best_so_far_is_saved(rows, settings, saved):
    assert save_steps(rows, **settings) == saved


def test_the_checkpoint_holds_what_later_actions_did_at_the_boundary():
    log = []

    def count(report):
        log.append("later action")

    count.every = 1
    best = SaveBest("score", mode="min")
    best.set_saves(Saves(lambda report, kept: log.append("save")))
    run_actions([best, count], Report(2, 10, {"score": 0.5}, None))
    assert log == ["later action", "save"]


def test_without_a_workdir_a_line_says_that_no_best_checkpoint_is_kept(caplog):
    best = SaveBest("score", mode="min")
    best.set_saves(None)
    run_actions([best], Report(2, 10, {"score": 0.5}, None))
    assert best.best == [(0.5, 2)]
    assert "SaveBest(score) needs a workdir" in caplog.text and "Nothing is kept" in caplog.text


@pytest.mark.parametrize("action", [SaveBest("test/loss", restore=True), StopEarly("test/loss", restore_best=True)])
def test_without_a_workdir_there_is_no_best_one_to_restore(action):
    with pytest.raises(ValueError, match=r"needs a workdir for its checkpoints: give Config\(workdir=...\)"):
        action.set_saves(None)


def test_stop_early_keeps_the_best_beside_those_of_save_best():
    saves, saved = noted_saves()
    stop = StopEarly("score", mode="min", patience=2, restore_best=True)
    actions = [SaveBest("score", mode="min", keep=2), stop]
    for action in actions:
        action.set_saves(saves)
    for step, score in [(2, 0.5), (4, 0.3), (6, 0.4), (8, 0.6)]:
        _, reason = run_actions(actions, Report(step, 1000, {"score": score}, None))
    assert saved == [(2, [2]), (4, [4, 2]), (6, [4, 6])] and "no better than 0.3" in reason
    again = StopEarly("score", mode="min", restore_best=True)
    again.set_state(stop.get_state())
    assert again.get_state() == stop.get_state()


@pytest.mark.parametrize("keep", [1, 2])
def test_the_best_of_a_metric_is_known_to_whatever_action_keeps_it_next(keep):
    stop = functools.partial(StopEarly, "score", mode="min", patience=9, restore_best=True)
    best = functools.partial(SaveBest, "score", mode="min", keep=keep)
    for first, second in ((stop, best), (best, stop)):
        states, found = RunStates(), None
        for make, step, score in ((first, 2, 0.3), (second, 4, 0.5), (first, 6, 0.4)):
            states.attach([action := make()], None if found is None else states.read())
            action(Report(step, 1000, {"score": score}, None))
            found = getattr(action, "_save_best", action).best
            assert found[0] == (0.3, 2)


@pytest.mark.parametrize(
    ("arguments", "settings", "words"),
    [
        (["loss"], {"mode": "most"}, "mode='most' was given to SaveBest"),
        (["loss"], {"keep": 0}, "SaveBest was given keep=0"),
        (["test/accuracy", "max"], {}, "SaveBest was given 'test/accuracy', 'max'; it takes the metric's name, and"),
    ],
)
def test_a_rule_that_makes_no_sense_is_refused(arguments, settings, words):
    with pytest.raises(ValueError, match=words):
        SaveBest(*arguments, **settings)


def test_what_a_save_took_is_reported_in_the_first_row_after_it():
    times, rows = SaveTimes(), []
    action = SaveCosts(times)
    for news in ({"save_pause": 0.5}, {"write": 2.0}, {}):
        times.record(**news)
        rows.append(run_actions([action], Report(2, 1000, {}, None))[0])
    assert rows == [{}, {"save_pause_secs": 0.5, "save_secs": 2.5}, {}]

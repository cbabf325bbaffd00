"""When a metric that does not improve ends a run."""

import functools
import math
import os

import pytest

import distloop
from distloop.actions.save import SaveBest
from distloop.actions.stop_early import StopEarly, SyncStop
from distloop.distributed import collectives
from distloop.distributed.collectives import Vote
from distloop.monitoring.timing import Clock
from distloop.settings.durations import Plan
from distloop.training.action import Report, StopTraining
from distloop.training.boundary import run_actions
from tests import problems
from tests.problems import report

NAN = math.nan


@pytest.mark.parametrize(
    ("values", "patience", "settings", "stops"),
    [
        ([3.0, 2.0, 2.5, 2.5, 2.5, 2.5], 3, {}, [4]),
        ([3.0, 2.0, 2.5, 2.5, 2.5, 2.5], 1, {}, [2, 3, 4, 5]),
        ([3.0, 4.0, 2.0, 4.0, 1.0, 4.0], 2, {}, []),  # an improvement resets the patience
        ([1.0, 1.0, 1.0], 2, {}, [2]),  # an equal measurement is no improvement
        ([1.0, 2.0, 2.0, 2.0, 2.0], 2, {}, [2, 4]),  # a run that goes on after the stop waits anew
        ([1.0, None, None, None, None, None, 1.0], 1, {}, [6]),  # boundaries without a measurement do not count
        ([1.0, 2.0, 3.0, 4.0], 1, {"mode": "max"}, []),
        ([4.0, 3.0], 1, {"mode": "max"}, [1]),
        ([1.0, 0.95, 0.9], 2, {"min_delta": 0.2}, [2]),
        ([1.0, 0.7, 0.4], 1, {"min_delta": 0.2}, []),
        ([1.0, 1.1, 1.15], 2, {"mode": "max", "min_delta": 0.2}, [2]),
        ([NAN, NAN], 2, {}, [1]),
        ([1.0, NAN, NAN], 2, {}, [2]),
    ],
)
def test_it_stops_after_patience_measurements_without_improvement(values, patience, settings, stops):
    early, found = StopEarly("m", **{"mode": "min", "patience": patience, **settings}), []
    for i, value in enumerate(values):
        try:
            early(report(loss=2.0) if value is None else report(m=value))
        except StopTraining as stop:
            assert f" for {patience} measurement" in stop.reason
            found.append(i)
    assert found == stops


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
    stop = StopEarly("m", mode=mode, patience=1)
    stop(report(m=values[0]))
    with pytest.raises(StopTraining, match=f"^m was no better than {best} for 1 measurement"):
        stop(report(m=values[1]))


@pytest.mark.parametrize(
    ("arguments", "settings", "message"),
    [
        (["m"], {"mode": "biggest"}, "mode='biggest' was given to StopEarly; say 'min' .* 'max'"),
        (["loss"], {"patience": 0}, "StopEarly was given patience=0; give a whole number, 1 or more"),
        (["val/reward"], {}, "StopEarly was given the metric 'val/reward'.*give mode='min' or mode='max'"),
        (["val/auc", "max"], {}, r"was given 'val/auc', 'max'; .*StopEarly\('test/accuracy', patience=5"),
        ([3], {}, "StopEarly was given 3; it takes the metric's name"),
    ],
)
def test_a_rule_that_makes_no_sense_is_refused(arguments, settings, message):
    with pytest.raises(ValueError, match=message):
        StopEarly(*arguments, **settings)


@pytest.mark.slow
def test_a_run_that_it_ends_has_what_is_due_at_the_end_in_its_last_row(tmp_path):
    data = distloop.make_dataset(problems.classification(16), 8)
    evals = {"val": distloop.Evaluation(data, every=2), "test": distloop.Evaluation(data, every=0)}
    for exports in (True, False):  # the second run ends where the first one did
        trainer = distloop.Trainer(problems.classifier(), problems.on(1, workdir=str(tmp_path / "run"), log_every=2))
        actions = [distloop.Export(trainer.export, tmp_path / "exports", suffix=".keras")] if exports else []
        actions.append(StopEarly("val/loss", patience=1, min_delta=9.0))
        trainer.fit(data, steps=100, evals=evals, actions=actions)
        assert trainer.step == 4
    *_, row = distloop.read_metrics(tmp_path / "run")
    assert row["step"] == 4 and row["test/loss"] == row["val/loss"]
    assert os.listdir(tmp_path / "exports") == ["4.keras"]


def test_the_metrics_name_says_what_is_better():
    for make in (StopEarly, SaveBest):
        assert make("test/accuracy").mode == make("val/auc").mode == "max"
        assert make("test/loss").mode == make("val_mean_squared_error").mode == "min"
        assert make("test/accuracy", mode="min").mode == "min"


def action(every, stops=False, name="", called=None):
    def act(report):
        if called is not None:
            called.append(name)
        if stops:
            raise StopTraining("enough")

    act.every = every
    return act


def answering(monkeypatch, *votes):
    """Lets the workers answer with these votes, the chief first; returns a list that gets the votes of this worker."""
    sent = []
    monkeypatch.setattr(collectives, "exchange", lambda _, vote: (sent.append(vote), list(votes))[1])
    return sent


@pytest.mark.parametrize(
    ("users", "stops", "reason", "sent"),
    [
        (action(5), [False, False, True], "an action on worker 2 ended the run", [False]),
        (action(5, stops=True), [True, False], "enough", [True]),
        (action(None), [False, False], None, [False]),
        (action(7), [True, True], None, []),  # no action is due, so nothing is exchanged
    ],
)
def test_a_stop_on_one_worker_ends_the_run_on_all(monkeypatch, users, stops, reason, sent):
    found = answering(monkeypatch, *(Vote(has_ended=stop) for stop in stops))
    assert run_actions([users, SyncStop(None, [users], Plan())], report(), clock := Clock())[1] == reason
    assert "waiting for other workers" in clock.seconds()
    assert [vote.has_ended for vote in found] == sent


def test_workers_call_the_same_actions_in_the_same_order(monkeypatch):
    """A worker that ends the run and one that hears of it: what exchanges values between workers would hang else."""
    calls = []
    for stops_here in (True, False):
        note = functools.partial(action, called=(called := []))
        users = [note(0, name="first"), action(5, stops_here), note(7, name="second"), note(5, name="third")]
        sent = answering(monkeypatch, Vote(has_ended=True), Vote())
        run_actions([*users, SyncStop(None, users, Plan()), note(1000, name="save")], Report(10, 100, {}, None))
        assert len(sent) == 1
        calls.append(called)
    assert calls[0] == calls[1] == ["third", "first", "second", "save"]

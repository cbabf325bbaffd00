"""When a metric that does not improve ends a run."""

import contextlib
import math
import os

import pytest

import distloop
from distloop.actions.action import Report, StopTraining, run
from distloop.actions.stop_early import StopEarly, SyncStop
from distloop.settings.durations import Plan
from tests import problems


def report(step=10, until=100, **metrics):
    return Report(step, until, metrics, state=None)


NAN = math.nan


@pytest.mark.parametrize(
    ("values", "patience", "settings", "stop"),
    [
        ([3.0, 2.0, 2.5, 2.5, 2.5, 2.5], 3, {}, 4),
        ([3.0, 2.0, 2.5, 2.5, 2.5, 2.5], 1, {}, 2),
        ([3.0, 4.0, 2.0, 4.0, 1.0, 4.0], 2, {}, None),  # an improvement resets the patience
        ([1.0, 1.0, 1.0], 2, {}, 2),  # an equal measurement is no improvement
        ([1.0, 2.0, 3.0, 4.0], 1, {"mode": "max"}, None),
        ([4.0, 3.0], 1, {"mode": "max"}, 1),
        ([1.0, 0.95, 0.9], 2, {"min_delta": 0.2}, 2),
        ([1.0, 0.7, 0.4], 1, {"min_delta": 0.2}, None),
        ([1.0, 1.1, 1.15], 2, {"mode": "max", "min_delta": 0.2}, 2),
        ([NAN, NAN], 2, {}, 1),
        ([1.0, NAN, NAN], 2, {}, 2),
    ],
)
def test_it_stops_after_patience_measurements_without_improvement(values, patience, settings, stop):
    early, stops = StopEarly("m", **{"mode": "min", "patience": patience, **settings}), []
    for i, value in enumerate(values):
        try:
            early(report(m=value))
        except StopTraining:
            stops.append(i)
    assert stops[:1] == [stop] * (stop is not None)


def test_boundaries_without_a_measurement_do_not_count():
    stop = StopEarly("m", mode="min", patience=1)
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
    stop = StopEarly("m", mode=mode, patience=1)
    stop(report(m=values[0]))
    with pytest.raises(StopTraining, match=f"^m was no better than {best} for 1 measurement"):
        stop(report(m=values[1]))


@pytest.mark.parametrize(
    ("arguments", "settings", "message"),
    [
        (["m"], {"mode": "biggest"}, "mode='biggest' was given to StopEarly; say 'min' .* 'max'"),
        (["loss"], {"patience": 0}, "patience=0 was given to StopEarly; it waits for 1 measurement at least"),
        (["val/reward"], {}, "StopEarly was given the metric 'val/reward'.*give mode='min' or mode='max'"),
        (["val/auc", "max"], {}, r"was given 'val/auc', 'max'; .*StopEarly\('test/accuracy', patience=5"),
        ([3], {}, "StopEarly was given 3; it takes the metric's name"),
    ],
)
def test_a_rule_that_makes_no_sense_is_refused(arguments, settings, message):
    with pytest.raises(ValueError, match=message):
        StopEarly(*arguments, **settings)


@pytest.mark.slow
def test_a_run_that_it_ends_has_what_is_due_at_the_end_alone_in_its_row_and_its_checkpoint(tmp_path):
    def trainer():
        return distloop.Trainer(problems.classifier(), problems.on(1, workdir=str(tmp_path / "run"), log_every=2))

    data, early = (
        distloop.make_dataset(problems.classification(16), 8),
        StopEarly("val/loss", patience=1, min_delta=9.0),
    )
    trained = trainer()
    export = distloop.Export(trained.export, tmp_path / "exports", suffix=".keras")
    evals = {"val": distloop.Evaluation(data, every=2), "test": distloop.Evaluation(data, every=0)}
    trained.fit(data, steps=100, evals=evals, actions=[export, early])
    *_, row = distloop.read_metrics(tmp_path / "run")
    assert row["step"] == 4 and row["test/loss"] == row["val/loss"]
    assert os.listdir(tmp_path / "exports") == ["4.keras"]
    again = trainer()
    again.fit(data, steps=100, evals=evals, actions=[StopEarly("val/loss", patience=1, min_delta=9.0)])
    assert again.step == 4


def test_the_metrics_name_says_what_is_better():
    assert StopEarly("test/accuracy").mode == StopEarly("val/auc").mode == "max"
    assert StopEarly("test/loss").mode == StopEarly("val_mean_squared_error").mode == "min"
    assert StopEarly("test/accuracy", mode="min").mode == "min"


def test_a_run_that_goes_on_after_the_stop_waits_anew():
    stop = StopEarly("loss", patience=2)
    for value, ends in [(1.0, False), (2.0, False), (2.0, True), (2.0, False), (2.0, True)]:
        with pytest.raises(StopTraining, match="no better than 1 for 2") if ends else contextlib.nullcontext():
            stop(report(loss=value))


@pytest.mark.slow
def test_one_object_stops_each_of_two_runs_by_its_own_best():
    def measured(values):
        def measure(report):
            return {"m": values[min(report.step, len(values)) - 1]}

        measure.every = 1
        return measure

    stop, ends = StopEarly("m", mode="min", patience=2), []
    data = distloop.make_dataset(problems.classification(16), 8)
    for values in ([2.0, 1.0, 1.0], [9.0, 8.0, 7.0, 6.0, 6.0]):
        trainer = distloop.Trainer(problems.classifier(), problems.on(1, log_every=1))
        trainer.fit(data, steps=20, actions=[measured(values), stop])
        ends.append(trainer.step)
    assert ends == [4, 6]


def action(every, stops=False):
    def act(report):
        if stops:
            raise StopTraining("enough")

    act.every = every
    return act


def reason_to_stop(actions, stops):
    """Returns why `run` stops at step 10 if the workers exchange `stops`, and what this worker sent."""
    sent = []

    def gather(value):
        sent.append(value)
        return stops

    return run([*actions, SyncStop(gather, actions, Plan())], Report(10, 100, {}, None))[1], sent


@pytest.mark.parametrize(
    ("users", "stops", "reason", "sent"),
    [
        (action(5), [0, 0, 1], "an action on worker 2 ended the run", [False]),
        (action(5, stops=True), [1, 0], "enough", [True]),
        (action(None), [0, 0], None, [False]),
        (action(7), [1, 1], None, []),  # no action is due, so nothing is exchanged
    ],
)
def test_a_stop_on_one_worker_ends_the_run_on_all(users, stops, reason, sent):
    assert reason_to_stop([users], stops) == (reason, sent)


def test_workers_call_the_same_actions_in_the_same_order():
    """A worker that ends the run and one that hears of it: what exchanges values between workers would hang else."""
    calls = []
    for stops_here in (True, False):
        called = []

        def note(name, every, called=called):
            def act(report):
                called.append(name)

            act.every = every
            return act

        users = [note("first", 0), action(5, stops=stops_here), note("second", 7), note("third", 5)]
        sync_stop = SyncStop(lambda value, called=called: called.append("gather") or [1, 0], users, Plan())
        run([*users, sync_stop, note("save", 1000)], Report(10, 100, {}, None))
        calls.append(called)
    assert calls[0] == calls[1] == ["third", "gather", "first", "second", "save"]

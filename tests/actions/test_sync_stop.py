"""Ending a run on all workers when an action ends it on one; tests/test_workers.py does so with processes."""

from distloop.actions.action import Report, StopTraining, run
from distloop.actions.schedule import Plan
from distloop.actions.stop_early import SyncStop


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


def test_a_stop_on_another_worker_ends_the_run_here():
    assert reason_to_stop([action(5)], [0, 0, 1]) == ("an action on worker 2 ended the run", [False])


def test_a_stop_here_keeps_its_own_reason():
    assert reason_to_stop([action(5, stops=True)], [1, 0]) == ("enough", [True])


def test_the_run_goes_on_if_no_worker_stops():
    assert reason_to_stop([action(None)], [0, 0]) == (None, [False])


def test_workers_exchange_nothing_where_no_action_is_due():
    assert reason_to_stop([action(7)], [1, 1]) == (None, [])


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

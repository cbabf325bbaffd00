"""Each invariant of the nemesis's checker holds for a log that is right, and fails for one that is wrong."""

import json
import socket

import pytest

from distloop.workers.star import Star
from tests.campaigns.nemesis import checker, faults, report
from tests.campaigns.nemesis.schedule import Life, Plan, Strike
from tests.campaigns.nemesis.setting import BATCH_SIZE, ROWS, STEPS, Setting

ALONE = Setting("alone", 1)
LIVES = (Life((Strike(faults.KillWorker(0)),)), Life(()))


class Story:
    """Writes the log of a round, as the program and the harness do."""

    def __init__(self):
        self.events = []
        self._life, self._time = -1, 0.0

    def write(self, event, *, worker=0, **values):
        self._time += 1.0
        defaults = {"time": self._time, "event": event, "life": str(self._life), "process": f"p{self._life}"}
        self.events.append({**defaults, "worker": worker, **values})

    def begin(self, step):
        self._life += 1
        self.write("start", command=0)
        self.write("going on", step=step, digest=f"d{step}" if step else "d0")

    def train(self, first, last, **changes):
        for step in range(first, last + 1):
            begin = (step - 1) * BATCH_SIZE % ROWS
            ids = list(range(begin, begin + BATCH_SIZE))
            self.write("step", **{"step": step, "ids": ids, "digest": f"d{step}", "share": 0.0} | changes)

    def strike(self, fault):
        self.write("strike", fault=fault, is_deadly=fault not in [kind.__name__ for kind in faults.HARMLESS])

    def end(self, code, *, secs=1.0, leftovers=()):
        at = self._time + secs
        self.write("end", command=0, code=code, at=at, gone_at=at, leftovers=list(leftovers))

    def finish(self, steps=None):
        self.write("finished", step=STEPS, digest=f"d{STEPS}")
        self.end(0)
        rows = [json.dumps({"step": step, "loss": step / 2}) for step in steps or range(1, STEPS + 1)]
        self.write("remains", files=[])
        self.write("rows", rows=rows)
        return self.events


def undisturbed():
    story = Story()
    story.begin(0)
    story.train(1, STEPS)
    return story.finish()


def killed(went_on_from=5, *, saved=5, fault="KillWorker", code=137, **end):
    """A run that was killed at step 7 and went on."""
    story = Story()
    story.begin(0)
    story.train(1, 7)
    story.write("saved", step=saved)
    story.strike(fault)
    story.end(code, **end)
    story.begin(went_on_from)
    story.train(went_on_from + 1, STEPS)
    return story.finish()


def broken(events, *, lives=LIVES, setting=ALONE, outputs=None):
    """Returns the invariants that the events break."""
    plan = Plan(1, 0, setting, lives)
    violations = checker.check(plan, events, outputs or {0: "", 1: ""}, undisturbed())
    return sorted({violation.invariant for violation in violations}), str(violations)


def test_a_run_that_was_killed_and_went_on_breaks_nothing():
    assert broken(killed()) == ([], "[]")
    assert checker.losses(killed())[0] == checker.Loss("KillWorker", 1.0, 2)


@pytest.mark.parametrize("change", [{"digest": "other"}, {"ids": [1, 1, 2, 3, 4, 5, 6, 7]}])
def test_a_step_with_other_weights_or_another_batch_breaks_i1(change):
    events = killed()
    next(event for event in events if event["event"] == "step" and event["step"] == 20).update(change)
    assert broken(events)[0] == ["I1"]


def test_other_weights_than_were_saved_and_untrained_steps_break_i1():
    events = killed()
    assert broken([e for e in events if (e["event"], e.get("step")) != ("step", 20)])[0] == ["I1"]
    [event for event in events if event["event"] == "going on"][1]["digest"] = "other"
    assert broken(events)[0] == ["I1"]


def test_a_run_that_never_ends_breaks_i1():
    events = killed()
    end = next(i for i, event in enumerate(events) if event["event"] == "end")
    assert broken(events[: end + 1], lives=LIVES[:1])[0] == ["I1"]


def test_a_row_that_is_missing_twice_late_or_half_breaks_i1():
    for steps in ([1, *range(1, STEPS + 1)], [*range(1, 9), *range(10, STEPS + 1)], range(STEPS, 0, -1)):
        events = killed()
        events[-1]["rows"] = [json.dumps({"step": step, "loss": step / 2}) for step in steps]
        assert broken(events)[0] == ["I1"]
    events = killed()
    events[-1]["rows"][3] = '{"step": 4, "lo'
    assert broken(events)[0] == ["I1"]


def test_going_on_from_before_a_save_breaks_i2():
    assert broken(killed(4))[0] == ["I2"]
    assert broken(killed(0))[0] == ["I2"]


def test_a_run_that_was_left_goes_on_from_that_very_step():
    events = killed(5, fault="Terminate", code=75)
    strike = next(i for i, event in enumerate(events) if event["event"] == "strike")
    events.insert(strike + 1, {**events[strike], "event": "left", "step": 7})
    assert broken(events, lives=(Life((Strike(faults.Terminate(0, True)),)), Life(())))[0] == ["I2"]


@pytest.mark.parametrize(("went_on_from", "invariants"), [(3, []), (2, ["I2"])])
def test_a_damaged_checkpoint_excuses_the_loss_of_its_own_steps_only(went_on_from, invariants):
    events = killed(went_on_from)
    end = next(i for i, event in enumerate(events) if event["event"] == "end")
    events.insert(end + 1, {**events[end], "event": "damaged", "step": 5, "whole": [3]})
    assert broken(events)[0] == invariants


def test_two_processes_that_train_at_once_break_i3():
    events = killed()
    step = next(event for event in events if event["event"] == "step")
    last = max(event["time"] for event in events)
    events.insert(-3, {**step, "step": 6, "digest": "d6", "ids": list(range(40, 48)), "time": last})
    assert "I3" in broken(events)[0]


@pytest.mark.parametrize(
    "wrong",
    [{"code": 0}, {"code": 1}, {"code": None}, {"secs": 41.0}],
)
def test_a_wrong_code_or_a_late_end_breaks_i4(wrong):
    assert broken(killed(**wrong))[0] == ["I4"]


def test_an_end_without_a_failure_breaks_i4():
    events = [event for event in killed() if event["event"] != "strike"]
    assert broken(events)[0] == ["I4"]


def test_a_failure_that_nobody_names_breaks_i4():
    setting = Setting("launcher", 1)
    assert broken(killed(), setting=setting)[0] == ["I4"]
    named = {0: "distloop.launch: worker 0 failed, by signal 9 (Killed).", 1: ""}
    assert broken(killed(), setting=setting, outputs=named)[0] == []


@pytest.mark.parametrize(
    ("event", "values"),
    [
        ("child ended", {"is_gone": False}),
        ("second", {"code": None, "secs": 90.0, "output": ""}),
        ("second", {"code": 1, "secs": 9.0, "output": "Traceback: no idea"}),
    ],
)
def test_a_child_that_lives_on_or_a_start_without_a_reason_breaks_i4(event, values):
    events = killed()
    events.insert(1, {**events[0], "event": event, **values})
    assert broken(events)[0] == ["I4"]


def test_a_second_start_may_say_that_its_port_is_taken():
    with socket.create_server(("", 0)) as taken, pytest.raises(ValueError, match="cannot be used") as refused:
        Star([f"localhost:{taken.getsockname()[1]}"], 0, "", {}, print)
    events = killed()
    events.insert(1, {**events[0], "event": "second", "code": 1, "secs": 9.0, "output": str(refused.value)})
    assert broken(events)[0] == []


def test_processes_and_files_that_are_left_break_i5():
    assert broken(killed(leftovers=["python (S)"]))[0] == ["I5"]
    events = killed()
    events[-2]["files"] = ["checkpoints/5.17.tmp"]
    assert broken(events)[0] == ["I5"]


@pytest.mark.parametrize(("leftovers", "invariants"), [(["python (S)"], []), (["python (S)", "python (S)"], ["I5"])])
def test_a_killed_process_leaves_its_child_where_no_launcher_ends_it(leftovers, invariants):
    setting = Setting("alone", 1, child_of=0)
    assert broken(killed(leftovers=leftovers), setting=setting)[0] == invariants
    with_launcher = Setting("launcher", 1, child_of=0)
    output = {0: "worker 0 failed, by signal 9", 1: ""}
    assert broken(killed(leftovers=leftovers), setting=with_launcher, outputs=output)[0] == ["I5"]


def test_before_all_trained_hosts_may_wait_for_one_that_will_not_come():
    setting = Setting("hosts", 2)
    events = [event for event in killed(code=75, secs=80.0) if event["event"] != "saved"]
    strike = next(event for event in events if event["event"] == "strike")
    end = {"event": "end", "command": 1, "code": 1, "at": 0, "gone_at": strike["time"], "leftovers": []}
    events.append({**strike, **end})
    life = [event for event in events if event["life"] == "0"]
    plan = Plan(1, 0, setting, (Life((Strike(faults.Terminate(0, True)),)), Life(())))
    assert list(checker.check_ends(plan, life, {0: ""})) == []  # the second worker has not begun to train
    life.insert(0, {**life[1], "worker": 1})
    assert {violation.invariant for violation in checker.check_ends(plan, life, {0: ""})} == {"I4"}


def test_the_report_bounds_the_failure_rate_and_counts_what_faults_cost():
    lost = [checker.Loss("KillWorker", secs, steps) for secs, steps in ((1.0, 2), (3.0, None), (2.0, 4))]
    lines = report.summarize([([], lost)] * 10)
    bound = "with 95 % confidence fewer than 30.0% of rounds fail (3 / 10)"
    assert lines[0] == f"0 of 10 rounds broke an invariant; {bound}."
    assert lines[-1] == "| KillWorker | 30 | 2.0 | 3.0 | 3.0 | 4 |"
    first, second, *_ = report.summarize([([checker.Violation("I2", "lost")], [])])
    assert (first, second) == ("1 of 1 rounds broke an invariant.", "I2: 1 violations")

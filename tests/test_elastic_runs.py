"""The law `elastic run`: falls and returns of workers change nothing; more: `python -m tests.nemesis --elastic`."""

import json
import random
import signal

import pytest

from tests.nemesis import checker, faults, rounds
from tests.nemesis.__main__ import read_outputs
from tests.nemesis.schedule import Life, Plan, Strike
from tests.nemesis.setting import Setting


@pytest.mark.slow
def test_whichever_workers_fall_or_come_every_example_counts_once_and_the_weights_are_those_of_one_process(tmp_path):
    generator = random.Random(0)
    setting = Setting("elastic", 2, checkpoint_every=4)
    falls = [((1,), signal.SIGKILL, 7), ((0,), signal.SIGTERM, 25)]  # without a word; announced
    strikes = [
        Strike(faults.Fall(workers, number, "training", 0.0), after_steps=step + generator.randrange(5))
        for workers, number, step in falls
    ]
    plan = Plan(0, 0, setting, (Life(tuple(strikes)),))
    alone = rounds.run_undisturbed(Setting("elastic", 1), str(tmp_path / "alone"))
    two = rounds.run_undisturbed(setting.reference, str(tmp_path / "two"))
    events = rounds.run_round(plan, str(tmp_path / "elastic"))
    outputs = read_outputs(str(tmp_path / "elastic"), 1)
    assert checker.check(plan, events, outputs, two) == []
    for run in (events, two):
        assert {e["step"]: e["digest"] for e in of_chief(run)} == {e["step"]: e["digest"] for e in of_chief(alone)}
    kill, leave = checker.losses(events)
    assert leave.steps == 0 and kill.steps < 4
    with open(tmp_path / "elastic" / "disk" / "run" / "incidents.jsonl") as file:
        changes = [json.loads(line) for line in file]
    assert [change["membership"] for change in changes] == list(range(2, len(changes) + 2))
    assert {change["workers"] for change in changes} == {1, 2} and all(change["traced_secs"] > 0 for change in changes)
    reasons = [change["reason"] for change in changes]
    assert "worker 1 failed first, by signal 9 (Killed)" in reasons and "worker 0 was asked to leave" in reasons


def of_chief(events):
    return [e for e in events if e["event"] == "step" and e["worker"] == 0]

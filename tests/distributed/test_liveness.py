"""Who failed, as a function of a table and a time: no process, socket, thread or sleep."""

import json

import pytest

from distloop.distributed import liveness
from distloop.distributed.liveness import (
    GATHERING,
    JOINING,
    TRAINING,
    Beat,
    Liveness,
    Progress,
    Timeouts,
    Verdict,
    describe_facts,
)

NOW = 1000.0


def beat(**fields):
    return Beat("alive", TRAINING, 7, "", NOW)._replace(**fields)


def table(*beats, **fields):
    """Returns the table of worker 0 of three; `beats` are of workers 1 and 2, None if never heard."""
    known = {i: one for i, one in enumerate(beats, start=1) if one is not None}
    return Liveness(("a:1", "b:2", "c:3"), 0, known, has_met=True)._replace(**fields)


def judge(table, now=NOW, *, phase=TRAINING, since=NOW, timeouts=(0.0, 0.0)):
    return liveness.judge(table, Progress(7, phase, since), Timeouts(*timeouts), now)


def test_workers_that_are_heard_go_on():
    assert judge(table(beat(), beat()), timeouts=(600, 300)) is None


def test_a_failure_is_named_with_its_error():
    failed = beat(state="failed", error="RuntimeError: boom", phase="saving")
    assert judge(table(beat(), failed)) == Verdict("worker 2 failed at step 7 (saving): RuntimeError: boom")


def test_a_failure_counts_before_the_end_of_those_that_followed_it():
    ended, failed = beat(state="ended", error="it says", is_hang=True), beat(state="failed", error="boom")
    assert judge(table(ended, failed)).reason == "worker 2 failed at step 7 (training): boom"
    assert judge(table(ended, beat())) == Verdict("it says", is_hang=True)


def test_a_worker_that_closes_its_connection_is_gone_unless_it_left():
    assert judge(table(beat(), beat()).lose(1)).reason == (
        "the process of worker 1 (b:2) is gone without a word, last heard at step 7 (training): was it killed, or "
        "out of memory? Its own output may tell"
    )
    assert judge(table(beat(state="left"), beat()).lose(1)) is None


def test_before_all_have_met_a_worker_that_is_gone_may_come_again():
    meeting = table(beat(), beat(), has_met=False).lose(1)
    assert judge(meeting) is None and meeting.find_missing(NOW) == [1]
    assert meeting.receive(1, beat()).find_missing(NOW) == [] and meeting.find_missing(NOW + 4) == [1, 2]
    assert table(beat(state="failed", error="boom"), has_met=False).lose(1).beats[1].error == "boom"


@pytest.mark.parametrize(
    ("silent_secs", "limit_secs", "is_hang"), [(601, 600, True), (599, 600, False), (1e5, 0, False)]
)
def test_silence_beyond_the_hang_timeout_is_a_hang(silent_secs, limit_secs, is_hang):
    now = NOW + silent_secs
    verdict = judge(table(beat(), beat(received_at=now)), now, since=now, timeouts=(limit_secs, 0))
    assert verdict == (
        Verdict("worker 1 (b:2) has been silent for 601 seconds, last heard at step 7 (training)", True)
        if is_hang
        else None
    )


def test_silence_while_this_process_was_suspended_does_not_count():
    now = NOW + 1000
    assert judge(table(beat(), beat(), awake_since=now - 1), now, since=now, timeouts=(600, 0)) is None


@pytest.mark.parametrize("phase", [TRAINING, GATHERING])
def test_standing_still_for_the_hang_timeout_is_a_hang(phase):
    others = table(beat(), beat(phase="saving"))
    assert judge(others, phase=phase, since=NOW - 59, timeouts=(60, 0)) is None
    assert judge(others, phase=phase, since=NOW - 1e5, timeouts=(0, 0)) is None
    assert judge(others, phase=phase, since=NOW - 61, timeouts=(60, 1)) == Verdict(
        f"no step has ended for hang_timeout=60 seconds; worker 0 is at step 7 ({phase}), worker 1 (b:2) is at step 7 "
        "(training); worker 2 (c:3) is at step 7 (saving)",
        is_hang=True,
    )


def test_joining_has_a_timeout_of_its_own():
    others = table(beat(), beat())
    assert judge(others, phase=JOINING, since=NOW - 61, timeouts=(60, 0)) is None
    verdict = judge(others, phase=JOINING, since=NOW - 61, timeouts=(1000, 60))
    assert verdict.reason.startswith("TensorFlow has not joined the workers for start_timeout=60 seconds, though they ")
    assert verdict.reason.endswith("): are the TCP ports of all open?") and verdict.is_hang


def test_a_worker_that_left_is_a_failure_only_if_this_one_stands_still():
    others = table(beat(state="left"), beat())
    assert judge(others, phase=GATHERING, since=NOW - 9) is None
    assert judge(others, phase=GATHERING, since=NOW - 11) == Verdict(
        "worker 1 (b:2) left at step 7 (training), before the run was over"
    )


@pytest.mark.parametrize(
    ("step", "phase", "advances"),
    [(7, TRAINING, False), (8, TRAINING, True), (7, GATHERING, True), (7, "evaluating", True)],
)
def test_a_new_step_or_phase_is_progress_and_so_is_any_work_alone(step, phase, advances):
    progress = Progress(7, TRAINING, NOW).advance(step, phase, NOW + 5)
    assert progress.since == (NOW + 5 if advances else NOW)
    assert Progress(7, "evaluating", NOW).advance(7, "evaluating", NOW + 5).since == NOW + 5


def told(chief, index=1, now=NOW):
    """Returns the table of another worker after a message of the chief, at a time on a clock of its own."""
    worker = Liveness(chief.addresses, index, has_met=True).receive(0, beat(received_at=5.0))
    return worker.learn(json.loads(json.dumps(chief.tell(now))), 5.0)


def test_the_other_workers_judge_by_what_the_chief_tells():
    assert sorted(told(table(beat(), beat())).beats) == [0, 2]
    failed = told(table(beat(), beat(state="failed", error="boom")))
    assert judge(failed, 5.0, since=5.0).reason == "worker 2 failed at step 7 (training): boom"
    silent = told(table(beat(received_at=NOW + 70), beat()), now=NOW + 70)
    assert judge(silent, 5.0, since=5.0, timeouts=(60, 0)).reason.startswith(
        "worker 2 (c:3) has been silent for 70 sec"
    )
    dead = Liveness(("a:1", "b:2"), 1, {0: beat()}, has_met=True).lose(0)
    assert judge(dead).reason.startswith("the process of worker 0 (a:1) is gone without a word")


def test_of_many_workers_the_chief_tells_of_those_that_are_furthest_behind():
    beats = {i: beat(phase=GATHERING, step=8) for i in range(1, 1000)}
    beats |= {500: beat(step=9), 700: beat(phase="between two loops", step=8), 900: beat(state="left", step=9)}
    chief = Liveness(tuple(f"h{i}:1" for i in range(1000)), 0, beats, has_met=True)
    assert chief.furthest_behind() == [1, 2, 3, 4, 5, 500, 700, 900] and chief.heard == range(1, 1000)
    assert len(json.dumps(chief.tell(NOW))) < 1500 and "worker 700 (h700:1) is at step 8" in chief.describe_others(NOW)


def test_workers_are_named_with_their_addresses():
    assert table().name([1, 2]) == "workers 1 (b:2), 2 (c:3)" and table().name([2]) == "worker 2 (c:3)"


@pytest.mark.parametrize(
    "wrong",
    [{"step": "1"}, {"step": 2**64}, {"step": True}, {"step": -1}, {"state": 1}, {"state": "x"}, {"phase": 1}, None],
)
def test_what_is_no_heartbeat_raises(wrong):
    good = {"state": "alive", "step": 7, "phase": "a\rb" * 1000, "error": "\x1b[2J"}
    read = liveness.read_beat(good, NOW)
    assert len(read.phase) <= 60 and read.phase.isprintable() and read.error == r"\x1b[2J"
    with pytest.raises((ValueError, TypeError, LookupError, AttributeError)):
        liveness.read_beat({} if wrong is None else {**good, **wrong}, NOW)


@pytest.mark.parametrize(
    ("mine", "theirs", "sentence"),
    [
        ({"x": "1"}, {"x": "2"}, "x is 1 on worker 0 and 2 on worker 2; start all"),
        ({"x": "1"}, {"x": "1", "y": "2"}, "y is None on worker 0 and 2 on worker 2; start all"),
        ({"x": "1"}, {}, "x is 1 on worker 0 and None on worker 2; start all"),
        ({"--token": "a"}, {"--token": "b"}, r"--token is *** on worker 0 and another *** on worker 2; start all"),
        ({"x": "1"}, {"x": "1"}, None),
    ],
)
def test_a_setting_that_differs_is_named_with_both_values(mine, theirs, sentence):
    here, there = (describe_facts(facts, "secret", {"--token"}) for facts in (mine, theirs))
    difference = there.find_difference(here.digests)
    assert (difference is None) == (sentence is None)
    if difference is not None:
        text = here.explain_difference(2, *difference)
        assert text.startswith(f"Workers were started differently: {sentence}")

"""Who failed, as a function of a table and a time: no process, socket, thread or sleep."""

import pytest

from distloop.distributed import liveness
from distloop.distributed.liveness import GATHERING, JOINING, TRAINING, Beat, Facts, Progress, Table, Timeouts, Verdict

NOW = 1000.0


def facts(**values):
    """Returns settings; the digest of each is the value in parentheses."""
    digests = {name: f"({value})" for name, value in values.items()}
    return Facts(str(sorted(digests.items())), digests, values)


def beat(index, **fields):
    """Returns a heartbeat of a worker that hears all others of three and has met them."""
    heard = {str(i): f"run{i}" for i in range(3) if i != index}
    known = Beat(f"run{index}", "alive", TRAINING, 7, "", True, heard, facts(x="1"), NOW)
    return known._replace(**fields)


def table(*beats, **fields):
    """Returns the table of worker 0 of three; `beats` are of workers 1 and 2, None if never heard."""
    known = {i: one for i, one in enumerate(beats, start=1) if one is not None}
    return Table(("a:1", "b:2", "c:3"), 0, "run0", facts(x="1"), known).replace(has_met=True).replace(**fields)


def judge(table, now=NOW, *, phase=TRAINING, since=NOW, timeouts=(0.0, 0.0)):
    return liveness.judge(table, Progress(7, phase, since), Timeouts(*timeouts), now)


def test_workers_that_are_heard_go_on():
    assert judge(table(beat(1), beat(2)), timeouts=(600, 300)) is None


def test_a_failure_is_named_with_its_error():
    failed = beat(2, state="failed", error="RuntimeError: boom", phase="saving")
    assert judge(table(beat(1), failed)) == Verdict("worker 2 failed at step 7 (saving): RuntimeError: boom")


def test_a_failure_counts_before_the_end_of_those_that_followed_it():
    ended, failed = beat(1, state="ended", error="it says"), beat(2, state="failed", error="boom")
    assert judge(table(ended, failed)).reason == "worker 2 failed at step 7 (training): boom"
    assert judge(table(ended, beat(2))) == Verdict("it says", is_hang=True)


@pytest.mark.parametrize(
    ("silent_secs", "is_refused", "is_gone"), [(0.9, True, False), (1.1, True, True), (99, False, False)]
)
def test_a_process_is_gone_if_its_host_refuses_datagrams_for_a_while(silent_secs, is_refused, is_gone):
    verdict = judge(table(beat(1), beat(2), refused=frozenset([1] if is_refused else [])), NOW + silent_secs)
    assert (verdict is not None) == is_gone
    if is_gone:
        assert verdict.reason == (
            "the process of worker 1 (b:2) is gone without a word, last heard at step 7 (training): was it killed, or "
            "out of memory? Its own output may tell"
        )


def test_a_worker_that_left_is_not_gone():
    assert judge(table(beat(1, state="left"), beat(2), refused=frozenset([1])), NOW + 5) is None


def test_a_heartbeat_takes_back_that_a_host_refused():
    later = table(beat(1), beat(2), refused=frozenset([1])).receive(1, beat(1, received_at=NOW + 1))
    assert later.refused == frozenset() and later.beats[1].received_at == NOW + 1


@pytest.mark.parametrize(
    ("silent_secs", "limit_secs", "is_hang"), [(601, 600, True), (599, 600, False), (1e5, 0, False)]
)
def test_silence_beyond_the_hang_timeout_is_a_hang(silent_secs, limit_secs, is_hang):
    now = NOW + silent_secs
    verdict = judge(table(beat(1), beat(2, received_at=now)), now, since=now, timeouts=(limit_secs, 0))
    assert verdict == (
        Verdict("worker 1 (b:2) has been silent for 601 seconds, last heard at step 7 (training)", True)
        if is_hang
        else None
    )


def test_silence_while_this_process_was_suspended_does_not_count():
    now = NOW + 1000
    assert judge(table(beat(1), beat(2), awake_since=now - 1), now, since=now, timeouts=(600, 0)) is None


def test_a_worker_that_was_started_again_is_named_once_it_is_silent():
    again = table(beat(1), beat(2)).receive(1, beat(1, run="another", has_met=False))
    assert again.beats[1].run == "run1" and judge(again, NOW + 1) is None
    now = NOW + 4
    assert judge(again, now).reason == (
        "worker 1 (b:2) has been silent for 4 seconds, last heard at step 7 (training), and was started again"
    )


@pytest.mark.parametrize("phase", [TRAINING, GATHERING])
def test_standing_still_for_the_hang_timeout_is_a_hang(phase):
    others = table(beat(1), beat(2, phase="saving"))
    assert judge(others, phase=phase, since=NOW - 59, timeouts=(60, 0)) is None
    assert judge(others, phase=phase, since=NOW - 1e5, timeouts=(0, 0)) is None
    assert judge(others, phase=phase, since=NOW - 61, timeouts=(60, 1)) == Verdict(
        f"no step has ended for hang_timeout=60 seconds; worker 0 is at step 7 ({phase}), worker 1 (b:2) is at step 7 "
        "(training); worker 2 (c:3) is at step 7 (saving)",
        is_hang=True,
    )


def test_joining_has_a_timeout_of_its_own():
    others = table(beat(1), beat(2))
    assert judge(others, phase=JOINING, since=NOW - 61, timeouts=(60, 0)) is None
    verdict = judge(others, phase=JOINING, since=NOW - 61, timeouts=(1000, 60))
    assert verdict.reason.startswith("TensorFlow has not joined the workers for start_timeout=60 seconds, though they ")
    assert verdict.reason.endswith("): are their TCP ports open, too?") and verdict.is_hang


def test_a_worker_that_left_is_a_failure_only_if_this_one_stands_still():
    others = table(beat(1, state="left"), beat(2))
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


def test_a_long_evaluation_is_progress():
    progress = Progress(7, "evaluating", NOW)
    assert progress.advance(7, "evaluating", NOW + 5).since == NOW + 5


def test_workers_that_hear_each_other_have_met():
    assert liveness.find_unmet(table(beat(1), beat(2)), NOW) == []


@pytest.mark.parametrize(
    "second",
    [
        None,  # never heard
        beat(2, received_at=NOW - 4),  # not heard any more
        beat(2, heard={}),
        beat(2, heard={"0": "run0"}),  # does not hear worker 1
        beat(2, heard={"0": "old", "1": "run1"}),  # hears an earlier run
    ],
)
def test_workers_that_do_not_hear_all_others_are_waited_for(second):
    assert liveness.find_unmet(table(beat(1), second), NOW)[-1] == 2


def test_a_worker_with_other_facts_is_met_once_one_of_them_is_known():
    other = facts(w="0", x="2")
    later = table(beat(1), beat(2, facts=other._replace(values={}), heard={}))
    assert liveness.find_unmet(later, NOW) == [2]
    liveness.check_facts(later, 2)
    later = later.receive(2, beat(2, facts=Facts("", {}, {"x": "2"}), heard={}))
    assert liveness.find_unmet(later, NOW) == []
    with pytest.raises(ValueError, match="started differently: x is 1 on worker 0 and 2 on worker 2; start all with"):
        liveness.check_facts(later, 2)


def test_a_fact_that_one_worker_lacks_is_a_difference():
    with pytest.raises(ValueError, match="y is None on worker 0 and 3 on worker 1"):
        liveness.check_facts(table(beat(1, facts=facts(x="1", y="3")), beat(2)), 1)
    lacking = Facts("other", {"x": ""}, {"x": "None"})
    with pytest.raises(ValueError, match="x is 1 on worker 0 and None on worker 1"):
        liveness.check_facts(table(beat(1, facts=lacking), beat(2)), 1)


def test_secret_facts_that_differ_are_named_alone():
    secret = Facts("other", {"x": "(2)"}, {"x": "***"})
    with pytest.raises(ValueError, match=r"x is \*\*\* on worker 0 and another \*\*\* on worker 1"):
        hidden = facts(x="1")._replace(values={"x": "***"})
        liveness.check_facts(table(beat(1, facts=secret), beat(2), facts=hidden), 1)


@pytest.mark.parametrize(
    ("second", "problem"),
    [(None, "did not come within 9 seconds"), (beat(2, heard={}), "did not hear all others within 9 seconds")],
)
def test_the_error_names_workers_that_did_not_meet(second, problem):
    error = liveness.explain_unmet(table(beat(1), second), 9, ["no name", "no way"], NOW)
    assert error.startswith(f"worker 2 (c:3) {problem} (no name; no way), and worker 0 waits no longer: look at their ")


def test_several_workers_are_named_together():
    assert liveness.explain_unmet(table(), 9, [], NOW).startswith(
        "workers 1 (b:2), 2 (c:3) did not come within 9 seconds"
    )


def test_a_second_process_with_the_index_of_this_worker_is_noticed():
    echo = table(beat(1), beat(2)).greet(0, "run0", NOW)
    assert not echo.has_duplicate(NOW)
    twice = echo.greet(0, "another", NOW)
    assert twice.has_duplicate(NOW + 1) and not twice.has_duplicate(NOW + 4)


def test_messages_name_the_run_that_is_heard_and_a_claim_only_after_silence():
    known = table(None, beat(2))
    assert known.run_of(1, NOW) == ""
    claimed = known.greet(1, "run1", NOW).greet(2, "forged", NOW).greet(7, "x", NOW)
    assert (claimed.run_of(1, NOW), claimed.run_of(2, NOW), claimed.run_of(2, NOW + 4)) == ("run1", "run2", "forged")
    assert sorted(claimed.beats) == [2] and sorted(claimed.runs) == [1, 2]


def test_what_others_wait_for_is_news_until_all_have_met():
    before = table(None, beat(2), has_met=False)
    assert before.receive(1, beat(1)).has_news_since(before) and before.greet(1, "x", NOW).has_news_since(before)
    assert not before.receive(2, beat(2, step=8)).has_news_since(before)
    assert before.receive(2, beat(2, heard={"1": "again"})).has_news_since(before)
    met = table(beat(1), beat(2))
    assert not met.greet(1, "x", NOW).has_news_since(met)


@pytest.mark.parametrize("index", [-1, 3, 10**30])
def test_heartbeats_of_unknown_workers_are_ignored(index):
    before = table(beat(1), beat(2))
    assert before.receive(index, beat(1, state="failed")) == before


def test_facts_and_who_is_heard_add_up_over_heartbeats():
    later = table(beat(1), beat(2)).receive(1, beat(1, heard={"2": "again"}, facts=Facts("", {"y": "(3)"}, {}), step=8))
    facts_later = Facts(facts(x="1").digest, {"x": "(1)", "y": "(3)"}, {"x": "1"})
    assert (later.beats[1].facts, later.beats[1].step) == (facts_later, 8)
    assert later.beats[1].heard == {"0": "run0", "2": "again"}
    assert table(beat(1, run="a"), beat(2), has_met=False).receive(1, beat(1, heard={})).beats[1].heard == {}


def test_facts_are_sent_until_all_have_met():
    assert table(beat(1), beat(2)).have_all_met()
    assert not table(beat(1), beat(2, has_met=False)).have_all_met()
    assert not table(beat(1), beat(2), has_met=False).have_all_met()
    assert not table(beat(1)).have_all_met()


def test_a_worker_at_its_end_waits_for_those_that_are_heard_and_still_run():
    assert liveness.find_running(table(beat(1), beat(2)), NOW) == [1, 2]
    assert liveness.find_running(table(beat(1, state="left"), beat(2, state="ended")), NOW) == []
    assert liveness.find_running(table(beat(1, received_at=NOW - 4), beat(2)), NOW) == [2]  # dead or cut off
    assert liveness.find_running(table(beat(1, received_at=NOW - 2), beat(2), refused=frozenset([1])), NOW) == [2]

"""Who failed, as a function of heartbeats and a time: no process, socket, thread or sleep."""

import pytest

from distloop.workers import liveness
from distloop.workers.liveness import GATHERING, JOINING, TRAINING, Beat, Verdict, explain_difference, read_beat

NOW = 1000.0


def beat(i=1, **fields):
    return Beat(f"worker {i} ({'abc'[i]}:{i + 1})", "alive", TRAINING, 7, "", NOW, NOW)._replace(**fields)


def judge(*beats, now=NOW, hang=0.0, join=0.0):
    """Returns the verdict about workers 0, 1, 2; of the first, which is the chief, a good heartbeat is added."""
    return liveness.find_failure(dict(enumerate([beat(0, received_at=now, progress_at=now), *beats])), hang, join, now)


FAILED = beat(2, state="failed", error="RuntimeError: boom", phase="saving")
GONE, LEFT = beat(1, state="gone"), beat(1, state="left")


@pytest.mark.parametrize(
    ("one", "two", "reason"),
    [
        pytest.param(beat(1), beat(2), None, id="all are heard"),
        pytest.param(beat(1), FAILED, "worker 2 failed at step 7 (saving): RuntimeError: boom", id="an error"),
        pytest.param(GONE, FAILED, "worker 2 failed at step 7 (saving): RuntimeError: boom", id="before what followed"),
        pytest.param(
            GONE,
            beat(2),
            "the process of worker 1 (b:2) is gone without a word, last heard at step 7 (training): was it killed, or "
            "out of memory? Its own output may tell",
            id="a closed connection",
        ),
        pytest.param(LEFT, beat(2, phase=GATHERING, progress_at=NOW - 9), None, id="one that left is not missed yet"),
        pytest.param(
            LEFT,
            beat(2, phase=GATHERING, progress_at=NOW - 11),
            "worker 1 (b:2) left at step 7 (training), before the run was over",
            id="one that left while another one stands still",
        ),
    ],
)
def test_who_failed_is_named(one, two, reason):
    assert judge(one, two, hang=600, join=300) == (reason and Verdict(reason))


def test_a_worker_is_heard_for_some_seconds_unless_it_is_gone():
    assert not GONE.is_heard(NOW) and beat(1).is_heard(NOW + 2) and not beat(1).is_heard(NOW + 4)


@pytest.mark.parametrize(
    ("silent_secs", "limit_secs", "is_hang"), [(601, 600, True), (599, 600, False), (1e5, 0, False)]
)
def test_silence_beyond_the_hang_timeout_is_a_hang(silent_secs, limit_secs, is_hang):
    now = NOW + silent_secs
    verdict = judge(beat(1), beat(2, received_at=now, progress_at=now), now=now, hang=limit_secs)
    silent = Verdict("worker 1 (b:2) has been silent for 601 seconds, last heard at step 7 (training)", True)
    assert verdict == (silent if is_hang else None)


@pytest.mark.parametrize("phase", [TRAINING, GATHERING])
def test_standing_still_for_the_hang_timeout_is_a_hang(phase):
    saving = beat(2, phase="saving")
    assert judge(beat(1, phase=phase, progress_at=NOW - 59), saving, hang=60) is None
    assert judge(beat(1, phase=phase, progress_at=NOW - 1e5), saving) is None
    assert judge(beat(1, phase=phase, progress_at=NOW - 61), saving, hang=60, join=1) == Verdict(
        "no step has ended for hang_timeout=60 seconds; worker 0 (a:1) is at step 7 (training); "
        f"worker 1 (b:2) is at step 7 ({phase}); worker 2 (c:3) is at step 7 (saving)",
        is_hang=True,
    )


def test_joining_has_a_timeout_of_its_own():
    joining = beat(1, phase=JOINING, progress_at=NOW - 61)
    assert judge(joining, beat(2), hang=60) is None
    verdict = judge(joining, beat(2), hang=1000, join=60)
    assert verdict.reason.startswith("TensorFlow has not joined the workers for start_timeout=60 seconds, though they ")
    assert verdict.reason.endswith("): are the TCP ports of all open?") and verdict.is_hang


@pytest.mark.parametrize(
    ("step", "phase", "secs", "advances"),
    [
        (7, TRAINING, 0.5, False),
        (8, TRAINING, 0.5, True),
        (7, GATHERING, 0.5, True),
        (7, "evaluating", 0.5, True),
        (7, TRAINING, 5, True),  # it was suspended, or out of reach
    ],
)
def test_a_new_step_or_phase_is_progress_and_so_is_any_work_alone(step, phase, secs, advances):
    message = {"state": "alive", "phase": phase, "step": step, "error": ""}
    before = beat(progress_at=NOW - 5)
    after = read_beat("worker 1 (b:2)", message, NOW + secs, before)
    assert after.received_at == NOW + secs and after.progress_at == (NOW + secs if advances else NOW - 5)
    alone = beat(phase="evaluating", progress_at=NOW - 5)
    assert read_beat("", {**message, "phase": "evaluating", "step": 7}, NOW, alone).still_secs == 0
    assert read_beat("", message, NOW).still_secs == 0  # of the chief, as the others hear it


def test_of_many_workers_those_that_are_furthest_behind_are_described():
    beats = {i: Beat(f"worker {i} (h{i}:1)", "alive", GATHERING, 8, "", NOW, NOW) for i in range(1, 1000)}
    beats[500] = beats[500]._replace(phase=TRAINING, step=9)
    beats[700] = beats[700]._replace(phase="between two loops")
    beats[900] = beats[900]._replace(state="left", phase=TRAINING, step=9)
    parts = liveness.describe_all(beats, NOW).split("; ")
    assert [int(part.split()[1]) for part in parts] == [1, 2, 3, 4, 5, 500, 700, 900]
    assert "worker 700 (h700:1) is at step 8 (between two loops)" in parts


@pytest.mark.parametrize(
    "wrong",
    [{"step": "1"}, {"step": 2**64}, {"step": True}, {"step": -1}, {"state": 1}, {"state": "x"}, {"phase": 1}, None],
)
def test_what_is_no_heartbeat_raises(wrong):
    good = {"state": "alive", "step": 7, "phase": "a\rb" * 1000, "error": "\x1b[2J"}
    read = read_beat("", good, NOW)
    assert len(read.phase) <= 60 and read.phase.isprintable() and read.error == r"\x1b[2J"
    with pytest.raises((ValueError, TypeError, LookupError, AttributeError)):
        read_beat("", {} if wrong is None else {**good, **wrong}, NOW)


@pytest.mark.parametrize(
    ("mine", "theirs", "difference"),
    [
        ({"x": "1"}, {"x": "2"}, "x is 1 on worker 0 and 2 on worker 2"),
        ({"x": "1"}, {"x": "1", "y": "2"}, "y is None on worker 0 and 2 on worker 2"),
        ({"x": "1"}, {}, "x is 1 on worker 0 and None on worker 2"),
    ],
)
def test_a_setting_that_differs_is_named_with_both_values(mine, theirs, difference):
    sentence = explain_difference(mine, theirs, 2)
    assert sentence.startswith(f"Workers were started differently: {difference}; start all")
    assert explain_difference(mine, mine, 2) == ""

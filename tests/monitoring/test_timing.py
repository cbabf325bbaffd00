"""A run's time: phases, the bottleneck, the hint."""

import pytest

from distloop.monitoring import timing
from distloop.monitoring.timing import Clock, bottleneck, show_secs
from distloop.workdir import records
from distloop.workdir.records import unix_time


@pytest.fixture
def now(monkeypatch):
    """Replaces the clock; now[0] is the time in seconds."""
    now = [1000.0]
    monkeypatch.setattr("distloop.monitoring.timing.time.monotonic", lambda: now[0])
    return now


def spend(clock, now, name, secs):
    with clock.phase(name):
        now[0] += secs


def test_each_second_belongs_to_one_phase(now):
    clock = Clock()
    now[0] += 3.0
    assert clock.loop(1003.0, 1013.0, 4.0) == 0.0
    now[0] = 1013.0
    spend(clock, now, "evaluation", 2.0)
    spend(clock, now, "mine", 1.0)
    spend(clock, now, "other", 2.0)
    now[0] += 0.5
    assert clock.loop(now[0], now[0] + 10.0, 0.0) == 5.5
    now[0] += 10.0
    spend(clock, now, "saving", 1.0)
    found = clock.seconds()
    assert found == {
        "start-up": 3.0, "input": 4.0, "step": 16.0, "evaluation": 2.0, "saving": 1.0, "logging": 0.0, "mine": 1.0,
        "other": 2.5,
    }  # fmt: skip
    assert sum(found.values()) == now[0] - 1000.0


def test_a_phase_before_the_first_loop_counts_also_if_it_fails(now):
    clock = Clock()
    now[0] += 1.0
    spend(clock, now, "evaluation", 2.0)
    with pytest.raises(KeyError), clock.phase("saving"):
        now[0] += 2.0
        raise KeyError
    clock.loop(now[0], now[0], 0.0)
    seconds = clock.seconds()
    assert seconds["start-up"] == 1.0 and seconds["evaluation"] == seconds["saving"] == 2.0


def test_a_clock_set_back_adds_no_negative_time(now):
    clock = Clock()
    clock.loop(999.0, 998.0, 1.0)
    assert clock.loop(997.0, 999.0, 5.0) == 0.0
    assert min(clock.seconds().values()) >= 0.0 and clock.seconds()["input"] == 2.0


def test_the_largest_share_of_the_time_is_the_bottleneck():
    for waited, host, expected in [
        (0.1, 0.1, ("step", 0.81)),
        (0.7, 0.1, ("input", 0.63)),
        (0.7, 0.6, ("host", 0.6)),
        (1.0, 0.4, ("input", 0.6)),
        (0.0, 1.0, ("host", 1.0)),
    ]:
        which, share = bottleneck({"input_wait": waited, "host_share": host})
        assert (which, pytest.approx(share)) == expected


@pytest.mark.parametrize(
    ("secs", "waited_secs", "has_hint"),
    [
        pytest.param(60.0, 30.0, True, id="a slow input"),
        pytest.param(60.0, 6.0, False, id="mostly trains"),
        pytest.param(9.0, 9.0, False, id="short"),
    ],
)
def test_a_slow_input_has_a_hint(now, secs, waited_secs, has_hint):
    clock = Clock()
    clock.loop(1000.0, 1000.0 + secs, waited_secs)
    now[0] += secs
    assert (clock.advice() is not None) is has_hint
    if has_hint:
        assert clock.advice().startswith("50 % of the time after start-up went by waiting for data: try cache()")
        assert clock.advice("more workers").endswith("by waiting for data: try more workers.")


@pytest.mark.parametrize(
    ("phase", "secs", "words"),
    [
        ("evaluation", [20.0] * 3, "most of it in evaluation: try a larger eval_every"),
        ("saving", [20.0] * 3, "most of it in saving: try a larger checkpoint_every"),
        ("logging", [20.0] * 3, "most of it in logging: try a larger log_every"),
        ("Histogram", [20.0] * 3, "most of it in Histogram: try a larger `every` of Histogram"),
        ("other", [20.0] * 3, "between two loops: try a larger steps_per_loop"),
        pytest.param("evaluation", [60.0, 0.1, 0.1], None, id="the first evaluation traces"),
    ],
)
def test_slow_host_work_has_a_hint(now, phase, secs, words):
    clock = Clock()
    for spent in secs:
        clock.loop(now[0], now[0] + 10.0, 0.0)
        now[0] += 10.0
        spend(clock, now, phase, spent)
    advice = clock.advice()
    assert (" after start-up went by between two loops" in advice and words in advice) if words else advice is None


def test_durations_have_hours_minutes_and_seconds():
    assert [show_secs(secs) for secs in (0.4, 61.0, 36_000.0)] == ["0:00:00", "0:01:01", "10:00:00"]


def test_the_time_of_rows_goes_on_where_the_clock_is_set_back(monkeypatch):
    unix, seconds = [1e9], [50.0]
    monkeypatch.setattr(records, "_unix_at_zero", -float("inf"))
    monkeypatch.setattr(timing.time, "time", lambda: unix[0])
    monkeypatch.setattr(timing.time, "monotonic", lambda: seconds[0])
    found = [unix_time()]
    for unix[0], seconds[0] in ((1e9 + 2, 52.0), (1e9 - 3600, 55.0), (1e9 + 90, 60.0)):
        found.append(unix_time())
    assert [when - 1e9 for when in found] == [0.0, 2.0, 5.0, 90.0]
    assert unix_time(58.0) - 1e9 == 88.0

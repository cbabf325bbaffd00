"""What the launchers of several hosts decide, and launchers with programs that do not train."""

import os
import subprocess
import sys
import textwrap

import pytest

from distloop.launcher import hosts
from distloop.launcher.elastic import Settings
from distloop.launcher.meeting import Host, Member, Record, Report, View

SETTINGS = Settings(1, 3, 3, 10, 600)
ENDED = Report(7, 0, False, False, False, "", False, 0.0, 20, (), ())
SAVED = ENDED._replace(code=75)
FELL = ENDED._replace(code=137, is_crash=True, has_fallen=True, cause="worker 1 failed", fell_at=50.0)
FOLLOWED = ENDED._replace(code=76, is_crash=True, cause="worker 0 ended, because another one had failed")


def view_of(reports=(), silent=(), left=(), alive="abc", members="ab", ports=(4000,), **fields):
    """Returns what is seen of membership 7 with hosts a and b, and of host c; without `members` there is none."""
    all_hosts = {name: Host(name, float(ord(name)), "10.0.0.1", ports) for name in "abc"}
    for name, report in dict(reports).items():
        all_hosts[name] = all_hosts[name]._replace(report=report, has_left=name in left)
    record = Record(7, tuple(Member(name, "10.0.0.1", (4000,)) for name in members), launch="ab", **fields)
    secs = {name: dict(silent).get(name, 0.0) for name in all_hosts}
    return View(all_hosts, secs, frozenset(alive), 7 if members else 0, record if members else None)


def test_a_membership_has_ended_once_each_host_has_reported_or_is_silent():
    assert not hosts.has_ended(view_of())
    assert not hosts.has_ended(view_of({"a": SAVED}))
    assert hosts.has_ended(view_of({"a": SAVED, "b": SAVED}))
    assert hosts.has_ended(view_of({"a": FOLLOWED}, silent={"b": 5.0}))  # another one has failed: 4 s are enough
    assert not hosts.has_ended(view_of(silent={"a": 5.0, "b": 5.0})) and hosts.has_ended(
        view_of(silent=dict(a=31, b=31))
    )
    assert not hosts.has_ended(view_of({"a": SAVED, "b": SAVED._replace(number=6)}))  # of the one before
    assert hosts.has_ended(view_of(members=""))


def test_the_first_host_that_is_left_of_the_membership_decides():
    assert hosts.leader(view_of(members="ba")) == "b"
    assert hosts.leader(view_of({"b": SAVED}, left="b", members="ba")) == "a"
    assert hosts.leader(view_of({"b": FOLLOWED}, silent={"a": 5.0})) == "b"
    assert hosts.leader(view_of(silent={"a": 31, "b": 31})) == "c"
    assert hosts.leader(view_of(members="")) == "a"  # it came first
    assert hosts.leader(view_of(members="", alive="bc")) == "b"


def test_hosts_with_places_are_available_in_the_order_of_the_membership():
    names = lambda view: [host.name for host in hosts.available(view)]  # noqa: E731
    assert names(view_of(members="ba")) == ["b", "a", "c"]
    assert names(view_of(silent={"a": 5.0})) == ["b", "c"]
    assert names(view_of(alive="ab")) == ["a", "b"] and names(view_of(ports=())) == []


def test_workers_end_where_those_of_other_hosts_have_ended():
    stops = lambda view, number=7: hosts.stops(view, number, "a", 10.0)  # noqa: E731
    assert stops(view_of({"a": SAVED})) == {}
    assert stops(view_of({"b": FELL})) == {"the workers on b have ended": 15.0}
    assert stops(view_of({"b": SAVED})) == {"the workers on b have ended": 70.0}  # they may be saving
    assert stops(view_of(silent={"b": 29.0})) == {} and stops(view_of(silent={"b": 31.0})) == {"host b is gone": 0.0}
    assert stops(view_of(), number=6) == {"the other hosts went on without this one": 0.0}  # this launcher is late
    assert stops(view_of(), number=8) == {}


@pytest.mark.parametrize(
    ("reports", "left", "code", "cause"),
    [
        ({"a": ENDED, "b": ENDED}, "", 0, ""),
        ({"a": SAVED, "b": SAVED}, "", 75, ""),  # max_secs, for example
        ({"a": FOLLOWED, "b": FELL}, "", None, "worker 1 failed"),
        ({"a": FOLLOWED}, "", None, "host b is gone"),
        ({"a": SAVED, "b": SAVED._replace(is_last=True)}, "b", None, "host b was asked to leave"),
        ({"a": FOLLOWED, "b": SAVED._replace(is_last=True, code=137)}, "b", None, "host b was asked to leave"),
        ({"a": SAVED, "b": SAVED._replace(leavers=(1,))}, "", None, "worker 1 was asked to leave"),
        ({"a": SAVED._replace(has_left_for_more=True), "b": SAVED}, "", None, "there are places for more"),
        ({"a": FOLLOWED, "b": FOLLOWED}, "", None, FOLLOWED.cause),
    ],
)
def test_what_follows_from_the_ends_on_all_hosts(reports, left, code, cause):
    plan, draft = hosts.follow(view_of(reports, left=left), SETTINGS)
    assert (draft.number, draft.launch, draft.code, draft.cause) == (8, "ab", code, cause)
    assert plan.step == 20 and draft.restarts == int("failed" in cause or "gone" in cause)


def test_crashes_and_numbers_of_workers_are_known_to_whoever_decides_next():
    view = view_of({"a": FOLLOWED, "b": FELL}, step=20, restarts=2, sizes=(1, 2))
    plan, draft = hosts.follow(view, SETTINGS)
    assert (draft.step, draft.restarts, draft.sizes) == (20, 3, (1, 2)) and plan.allowed == [1, 2]
    assert hosts.follow(view_of({"a": FELL}, step=20, restarts=3), SETTINGS)[1].code == 137


def test_the_cause_of_a_change_that_nobody_noted_is_told_again():
    reports = {"a": FOLLOWED._replace(step=None), "b": FELL._replace(step=None)}
    assert (
        hosts.follow(view_of(reports, cause="host c is gone"), SETTINGS)[1].cause
        == "host c is gone; then worker 1 failed"
    )


@pytest.mark.parametrize("fields", [{"alive": "c"}, {"code": 1}])
def test_a_command_that_is_given_again_begins_anew_with_a_higher_number_and_the_same_name(fields):
    plan, draft = hosts.follow(view_of({"a": FELL, "b": FELL}, step=20, restarts=3, **fields), SETTINGS)
    assert draft == Record(8, launch="ab") and plan.step == -1


def next_record(view, *nows, settings=SETTINGS):
    """Returns the record that a launcher proposes at the last of several times; None: it waits."""
    launcher = hosts.Launcher(settings, places=1, address="10.0.0.9", start=None, signals=None)
    return [launcher._next(view, now) for now in nows][-1]


def sizes_of(record):
    return [(member.name, len(member.ports)) for member in record.members]


def test_the_next_membership_has_as_many_workers_as_the_run_can_have_the_first_hosts_first():
    view = view_of({"a": FOLLOWED, "b": FELL}, members="ba", ports=(4000, 4001), sizes=(1, 3))
    assert sizes_of(next_record(view, 0.0)) == [("b", 2), ("a", 1)]
    assert sizes_of(next_record(view_of({"a": FOLLOWED}, silent={"b": 5.0}), 0.0)) == [("a", 1), ("c", 1)]
    record = next_record(view, 0.0)
    assert len(record.secret) == 32 and record.secret != next_record(view, 0.0).secret


def test_a_run_begins_at_once_with_all_workers_and_with_fewer_when_nobody_came_for_a_time():
    assert sizes_of(next_record(view_of(members=""), 0.0)) == [("a", 1), ("b", 1), ("c", 1)]
    fewer = view_of(members="", alive="ab")
    assert next_record(fewer, 0.0, 9.0) is None and sizes_of(next_record(fewer, 0.0, 10.0)) == [("a", 1), ("b", 1)]


def test_a_host_whose_worker_fell_is_waited_for_a_moment():
    view = view_of({"a": FOLLOWED, "b": FELL})
    hosts_seen = {**view.hosts, "b": view.hosts["b"]._replace(ports=())}
    view = view._replace(hosts=hosts_seen)
    assert next_record(view, 0.0, 1.9) is None
    assert sizes_of(next_record(view, 0.0, 2.0)) == [("a", 1), ("c", 1)]


def test_with_too_few_places_for_too_long_the_run_ends():
    settings = SETTINGS._replace(least=3, wait_secs=60)
    view = view_of({"a": FOLLOWED}, silent={"b": 5.0})
    assert next_record(view, 0.0, 59.0, settings=settings) is None
    assert next_record(view, 0.0, 60.0, settings=settings).code == 75


ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


@pytest.fixture
def start(tmp_path):
    """Returns a function that starts a launcher of a program, as on another host."""
    launchers = []

    def start(program, *flags):
        (tmp_path / "program.py").write_text(textwrap.dedent(program))
        command = [sys.executable, "-m", "distloop.launch", *flags, "--workers_per_host=1", "--address=127.0.0.1"]
        command += [str(tmp_path / "program.py"), "--workdir", str(tmp_path / "run")]
        environment = {**os.environ, "PYTHONPATH": ROOT}
        launchers.append(subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True))
        return launchers[-1]

    yield start
    for launcher in launchers:
        launcher.kill()
        launcher.communicate()


def end_of(launcher):
    _, lines = launcher.communicate(timeout=60)
    return launcher.returncode, lines


@pytest.mark.slow
def test_the_workers_of_all_hosts_are_one_cluster_and_all_launchers_end_alike(start, tmp_path):
    program = f"""
        import json, os, time
        config = json.loads(os.environ["TF_CONFIG"])
        with open(f"{tmp_path}/{{config['task']['index']}}", "w") as file:
            json.dump([config["cluster"], os.environ["DISTLOOP_SECRET"]], file)
    """
    launchers = [start(program, "--workers=2") for _ in range(2)]
    assert [end_of(launcher)[0] for launcher in launchers] == [0, 0]
    assert (tmp_path / "0").read_text() == (tmp_path / "1").read_text() and not (tmp_path / "2").exists()
    assert sorted(os.listdir(tmp_path / "run" / "membership")) == ["000001.membership", "000002.membership"]


@pytest.mark.slow
def test_an_error_before_any_step_ends_the_launchers_of_all_hosts(start):
    program = "import os, sys, time; sys.exit(3) if '\"index\": 1' in os.environ['TF_CONFIG'] else time.sleep(60)"
    launchers = [start(program, "--workers=1:2", "--grace_secs=0") for _ in range(2)]
    ends = [end_of(launcher) for launcher in launchers]
    assert [code for code, _ in ends] == [3, 3]
    assert "worker 1 failed, with exit code 3" in ends[0][1] + ends[1][1]


@pytest.mark.slow
def test_below_the_least_number_the_run_waits_for_hosts_and_the_wait_has_a_limit(start):
    code, lines = end_of(start("", "--workers=2:3", "--wait_secs=0"))
    assert code == 75 and "for 0 s there were places for 1 worker, and 2 are needed: the run ends" in lines


@pytest.mark.slow
def test_a_host_that_is_asked_to_leave_before_it_has_workers_leaves(start, tmp_path):
    launcher = start("", "--workers=2:3")
    assert "meets the others in" in launcher.stderr.readline()
    launcher.terminate()
    code, lines = end_of(launcher)
    assert code == 75 and "SIGTERM, this host leaves." in lines

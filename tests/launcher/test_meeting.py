"""The files by which launchers of several hosts agree; see also test_hosts.py."""

import os
import stat

import pytest

from distloop.launcher import meeting
from distloop.launcher.meeting import Host, Meeting, Member, Record, Report

REPORT = Report(3, 75, False, True, False, "", False, 12.5, 20, (1, 2), (0,))


class Clock:
    now = 100.0

    def monotonic(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(meeting, "time", clock)
    return clock


def join(directory, name, **fields):
    host = Host(name, 0.0, "10.0.0.1", (4000,), **fields)
    return Meeting(str(directory), name, lambda: host, lambda view: None)


def look(observer, clock, secs=0.5):
    clock.now += secs
    return observer._look()


def test_of_two_launchers_that_propose_one_number_one_is_first_and_both_read_its_record(tmp_path, clock):
    a, b = join(tmp_path, "a"), join(tmp_path, "b")
    records = [Record(1, (Member(name, "10.0.0.1", (4000, 4001)),), secret="s" * 32, sizes=(1, 2)) for name in "ab"]
    assert [a.propose(records[0]), b.propose(records[1])] == [True, False]
    assert look(a, clock).record == look(b, clock).record == records[0]


def test_a_late_launcher_of_an_old_membership_writes_nothing(tmp_path, clock):
    late, other = join(tmp_path, "late"), join(tmp_path, "other")
    stale = look(late, clock)  # then it is suspended
    for number in (1, 2):
        assert other.propose(Record(number, launch="first"))
    before = {name: (tmp_path / name).read_bytes() for name in os.listdir(tmp_path)}
    assert not late.propose(Record(stale.number + 1, launch="late"))
    assert {name: (tmp_path / name).read_bytes() for name in os.listdir(tmp_path)} == before


def test_a_record_whose_writer_was_killed_is_passed_over_and_its_number_is_used_up(tmp_path, clock):
    a = join(tmp_path, "a")
    assert a.propose(Record(1, launch="ab"))
    (tmp_path / "000002.membership").write_text('[2, [["a", "10.0.')
    view = look(a, clock)
    assert (view.number, view.record) == (2, Record(1, launch="ab"))
    assert not a.propose(Record(2)) and a.propose(Record(3))
    assert look(a, clock).record == Record(3)


def test_a_host_that_stops_announcing_is_silent_and_one_that_never_changed_was_never_alive(tmp_path, clock):
    old, a, b = join(tmp_path, "old"), join(tmp_path, "a"), join(tmp_path, "b")
    for _ in range(10):
        b.announce()
        view = look(a, clock)
    assert view.alive == {"a", "b"} and set(view.hosts) == {"a", "b", "old"}
    assert view.silent_secs["b"] == 0 and view.silent_secs["old"] == 5.0
    for _ in range(8):
        view = look(a, clock)
    assert view.silent_secs["b"] == 4.0 and "b" in view.alive
    old.announce()
    assert look(a, clock).alive == {"a", "b", "old"}


def test_the_time_in_which_the_observer_stood_still_does_not_count(tmp_path, clock):
    a = join(tmp_path, "a")
    join(tmp_path, "b")
    look(a, clock)
    assert look(a, clock, secs=3600).silent_secs["b"] <= 1.5


def test_a_host_announces_what_it_is_and_how_its_workers_ended(tmp_path, clock):
    join(tmp_path, "b", has_left=True, report=REPORT)
    assert look(join(tmp_path, "a"), clock).hosts["b"] == Host("b", 0.0, "10.0.0.1", (4000,), True, REPORT)


def test_workers_are_numbered_over_all_members():
    record = Record(1, (Member("a", "10.0.0.1", (4000, 4001)), Member("b", "[fd00::2]", (5000,))))
    assert record.addresses == ["10.0.0.1:4000", "10.0.0.1:4001", "[fd00::2]:5000"]
    assert [list(record.workers_of(name)) for name in "abc"] == [[0, 1], [2], []]


def test_only_the_newest_records_are_kept_and_nobody_else_can_read_them(tmp_path, clock):
    a = join(tmp_path, "a")
    for number in range(1, 20):
        assert a.propose(Record(number))
    names = sorted(name for name in os.listdir(tmp_path) if name.endswith(".membership"))
    assert names == [f"{number:06}.membership" for number in range(9, 20)]
    assert {stat.S_IMODE(os.stat(tmp_path / name).st_mode) for name in os.listdir(tmp_path)} == {0o600}


def test_a_launcher_removes_its_file_unless_its_report_is_still_to_be_read(tmp_path):
    with join(tmp_path, "a"), join(tmp_path, "b", has_left=True):
        pass
    assert os.listdir(tmp_path) == ["b.host"]


def test_a_directory_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="the hosts cannot meet in .*: give a directory that all hosts share"):
        join(tmp_path / "file" / "membership", "a")

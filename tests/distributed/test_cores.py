"""Which cores a process may use, and how they are dealt out."""

import os

from distloop.distributed import cores


def test_there_are_as_many_as_the_system_says():
    assert cores.count() == len(os.sched_getaffinity(0))


def test_shares_are_whole_physical_cores(monkeypatch, tmp_path):
    for core in range(8):  # two packages, in each two physical cores with two threads, numbered as Linux does
        for name, number in (("physical_package_id", core // 2 % 2), ("core_id", core % 2)):
            (tmp_path / f"{core}.{name}").write_text(f"{number}\n")
    monkeypatch.setattr(cores, "_TOPOLOGY", str(tmp_path / "{core}.{name}"))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    assert cores.shares(2) == [[0, 4, 1, 5], [2, 6, 3, 7]]
    assert cores.shares(4) == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert cores.shares(2, 1) == [[0], [4]]


def test_without_a_topology_shares_go_by_number(monkeypatch):
    monkeypatch.setattr(cores, "_TOPOLOGY", "/nowhere/{core}/{name}")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(5)))
    assert cores.shares(2) == [[0, 1], [2, 3]] and cores.shares(6) == [[]] * 6


def test_a_system_that_binds_nothing_has_empty_shares(monkeypatch):
    monkeypatch.delattr(os, "sched_setaffinity")
    assert cores.shares(2) == [[], []]

"""Cores that a process may use, and how they are split between processes."""

import os

from distloop.distributed import cores


def test_the_count_is_the_number_of_cores_allowed():
    assert cores.count() == len(os.sched_getaffinity(0))


def test_parts_are_whole_physical_cores(monkeypatch, tmp_path):
    for core in range(8):  # two packages, in each two physical cores with two threads, numbered as Linux does
        for name, number in (("physical_package_id", core // 2 % 2), ("core_id", core % 2)):
            (tmp_path / f"{core}.{name}").write_text(f"{number}\n")
    monkeypatch.setattr(cores, "_TOPOLOGY", str(tmp_path / "{core}.{name}"))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    assert cores.split(2) == [[0, 4, 1, 5], [2, 6, 3, 7]]
    assert cores.split(4) == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert cores.split(2, 1) == [[0], [4]]


def test_without_a_topology_parts_go_by_number(monkeypatch):
    monkeypatch.setattr(cores, "_TOPOLOGY", "/nowhere/{core}/{name}")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(5)))
    assert cores.split(2) == [[0, 1], [2, 3]] and cores.split(6) == [[]] * 6


def test_parts_are_empty_if_the_system_cannot_bind(monkeypatch):
    monkeypatch.delattr(os, "sched_setaffinity")
    assert cores.split(2) == [[], []]

"""Cores and free ports of this machine."""

import os
import random
import socket

from distloop.launcher import machine
from distloop.workers import environment


def test_parts_are_whole_physical_cores_or_without_a_topology_go_by_number(monkeypatch, tmp_path):
    assert environment.count_cores() == len(os.sched_getaffinity(0))
    for core in range(8):  # two packages, in each two physical cores with two threads, numbered as Linux does
        for name, number in (("physical_package_id", core // 2 % 2), ("core_id", core % 2)):
            (tmp_path / f"{core}.{name}").write_text(f"{number}\n")
    monkeypatch.setattr(machine, "_TOPOLOGY", str(tmp_path / "{core}.{name}"))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    assert machine.split_cores(2) == [[0, 4, 1, 5], [2, 6, 3, 7]]
    assert machine.split_cores(4) == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert machine.split_cores(2, 1) == [[0], [4]]
    monkeypatch.setattr(machine, "_TOPOLOGY", "/nowhere/{core}/{name}")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(5)))
    assert machine.split_cores(2) == [[0, 1], [2, 3]] and machine.split_cores(6) == [[]] * 6
    monkeypatch.delattr(os, "sched_setaffinity")  # the system cannot bind
    assert machine.split_cores(2) == [[], []]


def test_ports_are_free_each_once_and_below_those_that_the_system_picks():
    chosen = machine.choose_ports(20)
    assert len(set(chosen)) == 20 and all(10_000 <= port < 32_768 for port in chosen)
    assert machine.choose_ports(20) != chosen and all(map(machine.is_free, chosen))
    with socket.create_server(("127.0.0.1", chosen[0])):
        assert not machine.is_free(chosen[0])


def test_programs_with_one_seed_choose_different_ports():
    chosen = []
    for _ in range(2):
        random.seed(0)
        chosen.append(machine.choose_ports(3))
    assert chosen[0] != chosen[1]

"""The sockets between workers: which hosts are heard, and where names lead that change or are wrong."""

import contextlib
import os
import socket
import threading

import pytest

from distloop.distributed import datagrams
from distloop.distributed.datagrams import Datagrams


@pytest.fixture
def ports():
    """Returns two free ports below the range from which the system picks ports."""
    free = []
    for port in range(27_000 - os.getpid() % 1000 * 11, 10_000, -1):
        with socket.socket() as tcp, socket.socket(type=socket.SOCK_DGRAM) as udp, contextlib.suppress(OSError):
            tcp.bind(("", port)), udp.bind(("", port))
            free.append(port)
        if len(free) == 2:
            return free


@pytest.fixture
def names(monkeypatch):
    """Returns the addresses of hosts, which a test changes; nothing is looked up in a thread."""
    table = {}

    def look_up(host, port, *, type, flags=0):
        if flags or host not in table:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, type, 17, "", (number, port or 0)) for number in table[host]]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.setattr(threading.Thread, "start", lambda self: None)
    return table


def listen(number, port):
    """Returns a socket that receives at one of this machine's addresses."""
    receiver = socket.socket(type=socket.SOCK_DGRAM)
    receiver.bind((number, port))
    receiver.settimeout(5)
    return receiver


@pytest.mark.parametrize(
    ("hosts", "bound"),
    [
        (["127.0.0.1", "127.0.0.1"], "127.0.0.1"),
        (["127.0.0.2", "[::1]"], "127.0.0.2"),
        (["localhost", "127.0.0.1"], None),
        (["127.0.0.1", "10.0.0.2"], "::" if socket.has_dualstack_ipv6() else "0.0.0.0"),
    ],
)
def test_a_run_on_one_machine_listens_to_that_machine_alone(hosts, bound, ports):
    workers = Datagrams([f"{host}:{port}" for host, port in zip(hosts, ports, strict=True)], 0, lambda i: False)
    number = workers._bound.getsockname()[0]
    assert number == bound if bound else datagrams.is_loopback(number)


def test_only_hosts_of_workers_are_listed(names, ports):
    names |= {"a": ["10.0.0.1"], "b": ["10.0.0.2", "10.1.0.2"]}
    workers = Datagrams([f"a:{ports[0]}", f"b:{ports[1]}"], 0, lambda i: False)
    workers._look_up_unknown()
    sources = ["10.0.0.1", "10.0.0.2", "10.1.0.2", "::ffff:10.0.0.2", "10.0.0.3", "127.0.0.1", "::1", "fe80::1%eth0"]
    assert [workers.is_listed(source) for source in sources] == [True] * 4 + [False] * 4
    names["a"] = ["127.0.1.1"]  # as Debian has it for the machine itself
    workers._look_up("a")
    assert workers.is_listed("127.0.0.1")


def test_a_silent_worker_that_came_back_under_another_address_is_looked_up_again(names, ports):
    names |= {"a": ["127.0.0.1"], "b": ["127.0.0.2"]}
    silent = set()
    workers = Datagrams([f"a:{ports[0]}", f"b:{ports[1]}"], 0, silent.__contains__)
    workers._look_up_unknown()
    names["b"] = ["127.0.0.3"]
    with listen("127.0.0.2", ports[1]) as before, listen("127.0.0.3", ports[1]) as after:
        workers._look_up_unknown()  # it is heard, so nothing is asked
        workers.send({1: b"first"})
        assert before.recv(99) == b"first"
        silent.add(1)
        workers._look_up_unknown()
        workers.send({1: b"second"})
        assert after.recv(99) == b"second" and workers.is_listed("127.0.0.3")


def test_a_silent_host_of_several_addresses_is_tried_at_the_next_one(names, ports):
    names |= {"a": ["127.0.0.1"], "b": ["127.0.0.2", "127.0.0.3"]}
    workers = Datagrams([f"a:{ports[0]}", f"b:{ports[1]}"], 0, lambda i: True)
    with listen("127.0.0.2", ports[1]) as one, listen("127.0.0.3", ports[1]) as other:
        for receiver in (one, other, one):
            workers._look_up_unknown()
            workers.send({1: b"x"})
            assert receiver.recv(99) == b"x"


def test_names_that_lead_nowhere_are_reported_until_they_do(names, ports):
    names["a"] = ["127.0.0.1"]
    workers = Datagrams([f"a:{ports[0]}", f"b:{ports[1]}"], 0, lambda i: False)
    workers._look_up_unknown()
    assert workers.send({1: b"x"}) == set() and workers.problems == {1: "Name or service not known"}
    names["b"] = ["127.0.0.2"]
    workers._look_up_unknown()
    workers.send({1: b"x"})
    assert workers.problems == {}


def test_a_name_that_is_no_name_is_reported(monkeypatch, ports):
    monkeypatch.setattr(threading.Thread, "start", lambda self: None)
    monkeypatch.setattr(datagrams, "split_address", lambda address: (address, ports[0]))
    workers = Datagrams(["127.0.0.1", "x" * 64 + "."], 0, lambda i: False)
    workers._look_up_unknown()
    assert "label" in workers.problems[1]


def test_a_datagram_that_is_too_long_is_reported(ports):
    workers = Datagrams([f"127.0.0.1:{port}" for port in ports], 0, lambda i: False)
    workers.send({1: b"x" * 70_000})
    assert workers.problems == {1: "Message too long"}


def test_a_port_on_which_no_process_listens_is_reported(ports):
    workers = Datagrams([f"127.0.0.1:{port}" for port in ports], 0, lambda i: False)
    assert workers.send({1: b"x"}) == set() and workers.send({1: b"x"}) == {1}


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no IPv6 here")
def test_addresses_of_ipv6_work(ports):
    addresses = [f"[::1]:{port}" for port in ports]
    try:
        workers = [Datagrams(addresses, i, lambda i: False) for i in range(2)]
    except ValueError:
        pytest.skip("no ::1 here")
    workers[0].send({1: b"x"})
    assert workers[1].receive() == (b"x", "::1") and workers[1].is_listed("::1")

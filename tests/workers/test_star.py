"""Connections between workers: what a stranger, a recorder or a process that is suspended can do."""

import concurrent.futures
import contextlib
import json
import queue
import socket
import sys
import threading
import time

import pytest

from distloop.launcher.machine import choose_ports
from distloop.workers import star
from distloop.workers.liveness import shorten
from distloop.workers.star import Connection, Star, Stranger

SECRET = "0123456789abcdef"


@pytest.fixture
def ports():
    return choose_ports(3)


@pytest.fixture
def addresses(ports):
    return [f"127.0.0.1:{port}" for port in ports]


@pytest.fixture
def make():
    """Returns a function that makes a star and the queue of what it receives; closes their ports after the test."""
    stars = []

    def make(addresses, index, secret=SECRET):
        events = queue.Queue()
        stars.append(Star(addresses, index, secret, {"hello": index}, lambda i, message: events.put((i, message))))
        return stars[-1], events

    yield make
    for one in stars:
        one.close_port()


def test_no_other_thread_of_python_runs_while_a_message_is_signed(monkeypatch):
    """Python may end only between two messages: its end takes OpenSSL down, under a thread that signs."""
    connection, is_over, turns = connect(SECRET, SECRET)[0], threading.Event(), []

    def wait_for_turns():
        while not is_over.is_set():
            turns.append(1)
            time.sleep(0)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)  # seconds: a thread hands over only when it waits
    try:
        waiting = threading.Thread(target=wait_for_turns)
        waiting.start()
        for _ in range(20):
            time.sleep(0.001)
            before = len(turns)
            for _ in range(500):
                connection._sign(b"a message", True)
            assert len(turns) == before
    finally:
        sys.setswitchinterval(interval)
        is_over.set()
        waiting.join()


def call(port, *messages, secret=SECRET):
    """Returns a connection to a chief, which has sent it these messages."""
    side = Connection(socket.create_connection(("127.0.0.1", port)), secret, False)
    for message in messages:
        side.send(message)
    return side


def receive_to_the_end(side):
    """Returns what arrives until the other side closes."""
    received = []
    with pytest.raises((EOFError, OSError)):
        while True:
            received.append(side.receive())
    return received


def sockets():
    """Returns two sockets that are connected."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        return one, listener.accept()[0]


def connect(*secrets):
    """Returns a connection as the chief has it, and as another worker has it."""
    with concurrent.futures.ThreadPoolExecutor() as threads:
        return tuple(threads.map(Connection, sockets(), secrets, [True, False]))


def lines_of(connection, *messages):
    """Returns the lines of messages that a connection would send next."""
    texts = [json.dumps(message).encode() for message in messages]
    return [connection._sign(text, connection._is_chief) + text + b"\n" for text in texts]


@pytest.mark.parametrize("secret", [SECRET, ""])
def test_messages_arrive_in_order_in_both_directions(secret):
    chief, worker = connect(secret, secret)
    for sender, receiver in ((chief, worker), (worker, chief)):
        for i in range(3):
            sender.send({"i": i})
        assert [receiver.receive() for _ in range(3)] == [{"i": i} for i in range(3)]
    worker.close()
    assert receive_to_the_end(chief) == []


@pytest.mark.parametrize("kind", ["unsigned", "altered", "twice", "skipped", "reflected", "of another connection"])
def test_what_is_not_the_next_message_of_the_other_side_does_not_count(kind):
    chief, worker = connect(SECRET, SECRET)
    another = connect(SECRET, SECRET)[1]
    first, second = lines_of(worker, {"state": "alive"}, {"state": "left"})
    sent = {
        "unsigned": [b'{"state": "failed"}\n'],
        "altered": [first.replace(b"alive", b"failed")],
        "twice": [first, first],
        "skipped": [second],
        "reflected": lines_of(chief, {"state": "failed"}),
        "of another connection": lines_of(another, {"state": "failed"}),
    }[kind]
    worker.socket.sendall(b"".join(sent))
    with pytest.raises(Stranger, match="not signed with the DISTLOOP_SECRET of this worker"):
        for _ in sent:
            chief.receive()


@pytest.mark.parametrize("secrets", [(SECRET, SECRET + "!"), (SECRET, ""), ("", SECRET)])
def test_the_secrets_have_to_be_the_same(secrets):
    chief, worker = connect(*secrets)
    for sender, receiver in ((chief, worker), (worker, chief)):
        sender.send({"state": "failed"})
        with pytest.raises(Stranger, match="not signed with the DISTLOOP_SECRET"):
            receiver.receive()


def test_a_process_that_reads_nothing_delays_nobody():
    chief, worker = connect(SECRET, SECRET)
    began = time.monotonic()
    for i in range(200):
        chief.send({"i": i, "x": "x" * 100_000})
    assert time.monotonic() - began < 60 and 0 < len(chief._waiting) <= 101_000
    assert [worker.receive()["i"] for _ in range(5)] == list(range(5))


def read(events):
    return events.get(timeout=300)


def send_until(sender, message, events):
    """Sends a message until it arrives, as heartbeats do."""
    while events.empty():
        sender.send(message)
        time.sleep(0.02)
    return read(events)


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_workers_and_the_chief_hear_each_other_and_notice_a_close(host, ports, make):
    addresses = [f"{host}:{port}" for port in ports]
    try:
        worker, heard = make(addresses, 2)  # the worker may come first
    except ValueError:
        pytest.skip("no ::1 here")
    chief, events = make(addresses, 0)
    assert read(events) == (2, {"hello": 2})
    assert send_until(worker, {"state": "alive"}, events) == (2, {"state": "alive"})
    assert send_until(chief, {"has_met": True}, heard) == (0, {"has_met": True})
    chief.close_port()
    worker.close_port()
    for port in ports:
        socket.create_server(("", port)).close()  # as TensorFlow
    while not events.empty():
        events.get()
    worker._connections[0].close()
    assert read(events) == (2, None)


def test_only_a_chief_that_knows_the_secret_gets_what_a_worker_begins_with(ports, addresses, make):
    with socket.create_server(("127.0.0.1", ports[0])) as listener:
        worker, _ = make(addresses, 1)
        stranger = Connection(listener.accept()[0], "another", True)
        stranger.send({"worker": 0})
        assert stranger._file.read().partition(b"{")[2] == b'"worker":1}\n'  # and nothing after it
        assert "not signed with the DISTLOOP_SECRET" in worker.causes["127.0.0.1"]
        chief = Connection(listener.accept()[0], SECRET, True)
        chief.send({"worker": 0})
        assert [chief.receive(), chief.receive()] == [{"worker": 1}, {"hello": 1}]
        chief.close()


@pytest.mark.parametrize(
    "first", [b"GET / HTTP/1.1\r\n\r\n" * 9, b"\xff" * 60_000, b"distloop " + b"0" * 32 + b"\nx\n"]
)
def test_other_programs_are_named_and_change_nothing(first, ports, addresses, make):
    chief, events = make(addresses, 0)
    with socket.create_connection(("127.0.0.1", ports[0])) as stranger, contextlib.suppress(OSError):
        stranger.sendall(first)
        while stranger.recv(1000):
            pass
    assert events.empty() and "connections of 127.0.0.1 do not count: they are" in chief.causes["127.0.0.1"]
    worker, _ = make(addresses, 1)
    send_until(worker, {"worker": 1}, events)
    assert chief.causes == {}


def greet(port):
    """Returns a connection of a stranger, which sends a greeting and nothing more."""
    stranger = socket.create_connection(("127.0.0.1", port), timeout=20)
    stranger.sendall(f"distloop {'0' * 32}\n".encode())
    return stranger


def read_to_the_end(stranger):
    """Returns once the other side has closed."""
    with contextlib.suppress(ConnectionResetError):
        while stranger.recv(1000):
            pass


def test_who_greets_and_says_nothing_more_is_let_go(ports, addresses, make, monkeypatch):
    monkeypatch.setattr(star, "_GREET_SECS", 0.2)
    _, events = make(addresses, 0)
    with greet(ports[0]) as stranger:
        read_to_the_end(stranger)
    worker, _ = make(addresses, 1)
    send_until(worker, {"state": "alive"}, events)
    with pytest.raises(queue.Empty):  # a worker may be silent for longer
        while True:
            assert events.get(timeout=0.5)[1] is not None


def test_strangers_are_few_at_a_time_and_none_once_the_port_is_closed(ports, addresses, make, monkeypatch):
    monkeypatch.setattr(star, "_MAX_STRANGERS", 3)
    chief, events = make(addresses, 0)
    strangers = [greet(ports[0]) for _ in range(9)]
    for stranger in strangers[:6]:
        read_to_the_end(stranger)
    worker, _ = make(addresses, 1)
    send_until(worker, {"state": "alive"}, events)
    chief.close_port()
    for stranger in strangers[6:]:
        read_to_the_end(stranger)
    assert send_until(worker, {"state": "alive"}, events) == (1, {"state": "alive"})


@pytest.mark.parametrize("worker", [None, True, 1.0, "1", -1, 0, 3, 10**30, [1]])
def test_who_is_no_worker_of_the_run_changes_nothing(worker, ports, addresses, make):
    _, events = make(addresses, 0, "")
    side = call(ports[0], {"worker": worker}, {"state": "failed"}, secret="")
    assert receive_to_the_end(side) == [{"worker": 0}] and events.empty()


def test_a_second_process_with_a_workers_index_is_named_and_ignored(ports, addresses, make):
    chief, events = make(addresses, 0)
    first, _ = make(addresses, 1)
    send_until(first, {"worker": 1}, events)
    receive_to_the_end(call(ports[0], {"worker": 1}, {"state": "failed"}))
    assert (1, {"state": "failed"}) not in list(events.queue)
    assert "two say that they are worker 1: give each its own task index in TF_CONFIG" in chief.causes["127.0.0.1"]
    first._connections[0].close()  # as at its end; then one that is started again counts
    while read(events) != (1, None):
        pass
    again = call(ports[0], {"worker": 1}, {"state": "alive"})
    while read(events)[1] != {"state": "alive"}:
        pass
    again.close()


def test_without_a_secret_only_hosts_of_workers_count(ports, addresses, make, monkeypatch):
    chief, events = make(addresses, 0, "")
    monkeypatch.setattr(star, "_is_host", lambda number, host: False)
    receive_to_the_end(call(ports[0], {"worker": 1}, {"state": "failed"}, secret=""))
    assert events.empty() and "no worker has this address" in chief.causes["127.0.0.1"]


def test_a_host_has_all_addresses_of_its_name(monkeypatch):
    names = {"b": ["10.0.0.2", "10.1.0.2"], "a": ["127.0.1.1"]}  # as Debian has it for the machine itself
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda host, port, type: [(2, type, 6, "", (number, 0)) for number in names[host]]
    )
    sources = ["10.0.0.2", "10.1.0.2", "10.0.0.3", "127.0.0.1", "::1", "fe80::1%eth0"]
    assert [star._is_host(source, "b") for source in sources] == [True] * 2 + [False] * 4
    assert star._is_host("127.0.0.1", "a") and not star._is_host("10.0.0.2", "a")


def test_a_port_that_is_taken_is_refused(ports, addresses, make):
    with socket.create_server(("127.0.0.1", ports[1])), pytest.raises(ValueError) as error:
        make(addresses, 1)
    assert str(error.value) == (
        f"Port {ports[1]} of worker 1 (127.0.0.1:{ports[1]}) cannot be used (Address already in use): is another run "
        "there? Give other ports, or end it."
    )


def test_a_name_that_leads_nowhere_is_reported_until_it_does(ports, addresses, make, monkeypatch):
    names, look_up = {}, socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *a, **named: look_up(names.get(host, host), *a, **named))
    worker, _ = make([f"no.such.host.invalid:{ports[0]}", addresses[1]], 1)
    give_up = time.monotonic() + 300
    while not worker.causes and time.monotonic() < give_up:
        time.sleep(0.02)
    assert worker.causes["no.such.host.invalid"].startswith("worker 0: ")
    names["no.such.host.invalid"] = "127.0.0.1"
    _, events = make(addresses[:2], 0)
    send_until(worker, {"worker": 1}, events)


def test_texts_are_escaped_and_cut():
    assert shorten("\x1b[2J\nERROR: \u202eall" + "x" * 500, 60).startswith(r"\x1b[2J\nERROR: \u202eallxxx")
    assert len(shorten("ä" * 100, 60).encode()) <= 60 and shorten("ä" * 30, 60) == "ä" * 30

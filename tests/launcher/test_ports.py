"""Free ports; that a launcher refuses those that are taken: test_launch.py."""

import socket

import pytest

from distloop.launcher import ports


def test_ports_are_free_each_once_and_below_those_that_the_system_picks():
    chosen = ports.choose(20)
    assert len(set(chosen)) == 20 and all(10_000 <= port < 32_768 for port in chosen)
    assert ports.choose(20) != chosen and all(map(ports.is_free, chosen))


@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_DGRAM])
def test_a_port_on_which_somebody_listens_is_not_free(kind):
    (port,) = ports.choose(1)
    with socket.socket(type=kind) as taken:
        taken.bind(("127.0.0.1", port))
        if kind == socket.SOCK_STREAM:
            taken.listen()
        assert not ports.is_free(port)

"""Free ports; that a launcher refuses those that are taken: test_launch.py."""

import socket

from distloop.launcher import ports


def test_ports_are_free_each_once_and_below_those_that_the_system_picks():
    chosen = ports.choose(20)
    assert len(set(chosen)) == 20 and all(10_000 <= port < 32_768 for port in chosen)
    assert ports.choose(20) != chosen and all(map(ports.is_free, chosen))


def test_a_port_on_which_somebody_listens_is_not_free():
    (port,) = ports.choose(1)
    with socket.create_server(("127.0.0.1", port)):
        assert not ports.is_free(port)

"""Ports: finds TCP ports that are free on this host, for TensorFlow and for heartbeats."""

import itertools
import random
import socket


def choose(count: int) -> list[int]:
    """Returns random free ports.

    They are below the range from which the system picks ports: TensorFlow listens seconds from now, and until then such
    a port may go to any connection, even to that of a worker that tries to reach it.
    """
    return list(itertools.islice(filter(is_free, random.sample(range(10_000, 32_768), 5_000)), count))


def is_free(port: int) -> bool:
    """Returns whether nobody listens on a port, on any address of this host."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as TensorFlow: closed connections do not count
        try:
            probe.bind(("", port))  # on every address, as TensorFlow does
        except OSError:
            return False
        return True

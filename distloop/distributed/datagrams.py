"""Datagrams: the UDP sockets between workers, and where the names of the hosts lead; no messages, no decisions.

    datagrams = Datagrams(["10.0.0.1:4000", "10.0.0.2:4000"], index=0, is_silent=lambda i: False)
    refused = datagrams.send({1: b"..."})       # workers on whose port no process listened last time
    data, source = datagrams.receive()          # source: "10.0.0.2"

Names are looked up in a thread of their own, as that may take long; again every few seconds for a worker that is
silent, which may have come back under another address. IPv4 and IPv6 both work. Where all addresses are of this
machine, the socket receives from this machine only.
"""

import ipaddress
import os
import socket
import stat
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from distloop.distributed.environment import split_address

_RECEIVE_SECS = 0.25
_RESOLVE_SECS = 5.0


class Datagrams:
    """The UDP sockets of a worker: one bound to its port, and one connected to each of its neighbors.

    Attributes:
        problems: why nothing can be sent to a worker, by its index; as in `Name or service not known`.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        index: int,
        is_silent: Callable[[int], bool],
        neighbors: Collection[int] | None = None,
    ):
        """Opens the port of worker `index`.

        Args:
            addresses: `host:port` of every worker.
            index: of this worker.
            is_silent: returns True for a worker whose name is to be looked up again.
            neighbors: the workers that are sent to; None: all others.

        Raises:
            ValueError: if an address is none, or the port is taken.
        """
        places = [split_address(address) for address in addresses]
        self.problems: dict[int, str] = {}
        heard = range(len(places)) if neighbors is None else (index, *neighbors)
        self._places = {i: places[i] for i in heard}
        self._index, self._is_silent = index, is_silent
        self._answers: dict[str, list[tuple[int, Any]]] = {}  # by host: families and addresses, the one to use first
        self._connected: dict[int, tuple[tuple[int, Any], socket.socket]] = {}
        self._port = places[index][1]
        try:
            self._bound = _bind(places, index)
        except OSError as error:
            raise ValueError(
                f"Port {self._port} of worker {index} ({addresses[index]}) cannot be used ({error.strerror}): is "
                "another run there? Give other ports, or end it."
            ) from None
        self._bound.settimeout(_RECEIVE_SECS)
        for host in {host for host, _ in self._places.values()}:
            self._look_up(host, only_numbers=not is_loopback(host))
        if any(host not in self._answers for host, _ in self._places.values()):
            threading.Thread(target=self._look_up_forever, name="distloop-names", daemon=True).start()
        os.register_at_fork(after_in_child=self._release)

    def receive(self) -> tuple[bytes, str]:
        """Returns the next datagram and the host that sent it; raises TimeoutError if none comes soon."""
        data, source = self._bound.recvfrom(65_536)
        return data, source[0]

    def is_listed(self, source: str) -> bool:
        """Returns True if a host that sent a datagram is that of a worker."""
        hosts = {_number(place[0]) for answers in list(self._answers.values()) for _, place in answers}
        # Linux answers 127.0.1.1, to which Debian leads a machine's own name, from 127.0.0.1.
        return _number(source) in hosts or (_number(source).is_loopback and any(host.is_loopback for host in hosts))

    def send(self, datagrams: Mapping[int, bytes]) -> set[int]:
        """Sends datagrams, by the worker each is for; returns the workers on whose port no process listened before."""
        refused = set()
        for i, data in datagrams.items():
            try:
                if (connection := self._connect(i)) is not None:
                    connection.send(data)
                    self.problems.pop(i, None)
            except ConnectionRefusedError:  # the host's answer to the datagram before this one
                refused.add(i)
            except OSError as error:  # out of reach: the silence of the worker counts
                self.problems[i] = error.strerror or str(error)
        return refused

    def _connect(self, i: int) -> socket.socket | None:
        """Returns the socket connected to a worker; None as long as its name leads nowhere."""
        host, port = self._places[i]
        if host not in self._answers:
            return None
        family, place = target = self._answers[host][0]
        if i not in self._connected or self._connected[i][0] != target:
            connection = socket.socket(family, socket.SOCK_DGRAM)
            connection.setblocking(False)
            connection.connect((place[0], port, *place[2:]))
            self._connected[i] = target, connection
        return self._connected[i][1]

    def _look_up_forever(self) -> None:
        while True:
            self._look_up_unknown()
            time.sleep(_RESOLVE_SECS)

    def _look_up_unknown(self) -> None:
        """Looks up the hosts that have no address yet or are silent."""
        for host in {host for i, (host, _) in self._places.items() if self._is_unknown(i, host)}:
            self._look_up(host)

    def _is_unknown(self, i: int, host: str) -> bool:
        return host not in self._answers or (i != self._index and self._is_silent(i))

    def _look_up(self, host: str, *, only_numbers: bool = False) -> None:
        """Looks up a host; if nothing has changed, its next address is tried."""
        flags = socket.AI_NUMERICHOST if only_numbers else 0
        try:
            lines = socket.getaddrinfo(host, None, type=socket.SOCK_DGRAM, flags=flags)
        except (OSError, UnicodeError) as error:
            problem = getattr(error, "strerror", None) or str(error)
            if not only_numbers:
                self.problems |= {i: problem for i, place in self._places.items() if place[0] == host}
            return
        answers = [(int(family), place) for family, _, _, _, place in lines]
        before = self._answers.get(host, [])
        self._answers[host] = before[1:] + before[:1] if set(before) == set(answers) else answers

    def _release(self) -> None:
        """Closes, in a forked process, all sockets on this worker's port, TensorFlow's too.

        They would keep the port of a dead worker taken. /dev/null takes the place of each, so that TensorFlow's copy in
        the fork does not close another file.
        """
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        for number in map(int, os.listdir("/dev/fd")):
            try:
                if not stat.S_ISSOCK(os.fstat(number).st_mode):
                    continue
                with socket.socket(fileno=os.dup(number)) as copy:
                    is_on_port = copy.family in (socket.AF_INET, socket.AF_INET6)
                    is_on_port = is_on_port and copy.getsockname()[1] == self._port
                if is_on_port:
                    os.dup2(null, number, inheritable=False)
            except OSError:  # closed meanwhile, or a socket of another kind
                continue
        os.close(null)


def is_loopback(host: str) -> bool:
    """Returns True if a host is this machine for every machine: `localhost`, `127.0.0.1`, `::1`."""
    try:
        return host == "localhost" or _number(host).is_loopback
    except ValueError:
        return False


def _number(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Returns an address as a number, IPv4 within IPv6 as IPv4."""
    number = ipaddress.ip_address(host.partition("%")[0])
    return getattr(number, "ipv4_mapped", None) or number


def _bind(places: Sequence[tuple[str, int]], index: int) -> socket.socket:
    """Returns a socket bound to the port of a worker, on the loopback interface alone if all workers are there."""
    host, port = places[index]
    with _open(socket.SOCK_STREAM) as probe:  # TensorFlow would notice too late that the TCP port is taken
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("", port))
    if not all(is_loopback(host) for host, _ in places):
        bound = _open(socket.SOCK_DGRAM)
        bound.bind(("", port))
        return bound
    family, kind, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    bound = socket.socket(family, kind)
    bound.bind(place)
    return bound


def _open(kind: socket.SocketKind) -> socket.socket:
    """Returns a socket of IPv4 and IPv6 together where the system has both."""
    if not socket.has_dualstack_ipv6():
        return socket.socket(socket.AF_INET, kind)
    dual = socket.socket(socket.AF_INET6, kind)
    dual.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    return dual

"""Star: a TCP connection from each worker to the chief, with signed messages.

    star = Star(addresses, index=0, secret="a text that the workers share", hello={"step": 0}, receive=print)
    star.send({"state": "alive"})       # to every worker that is connected
    star.close_port()                   # all are connected, and TensorFlow takes the port

The chief listens on its port until all workers are connected; the connections last when TensorFlow listens there. Both
sides begin with a random number, and the key of a connection is made of the two and of the secret. Each message is
signed with the key, its direction and its number: what was recorded, or written without the secret, never counts. Where
there is no secret anybody can sign, and only connections from the hosts of the workers count.
"""

import contextlib
import hmac
import ipaddress
import itertools
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from distloop.workers.environment import split_address

_MAX_BYTES = 2**20  # of a message
_GREET_SECS = 5.0  # that a connection and its first message may take, and for which a worker may be silent here
_MAX_STRANGERS = 64  # connections at a time that have signed no message yet; the oldest ones are closed
_CONNECT_AGAIN_SECS = 0.05
_UNREACHABLE_MS = 86_400_000  # TCP ends a connection after so long without an answer; `liveness` does so earlier
_SIGNATURE_BYTES = 64  # SHA-256 in hexadecimal digits


class Stranger(ValueError):
    """The connections of a host do not count; the message says why."""


class Connection:
    """One connection, whose messages are signed lines of JSON.

    Attributes:
        heard_at: when a message came last, on the monotonic clock.
        socket: of this side.
    """

    def __init__(self, connected: socket.socket, secret: str, is_chief: bool):
        """Exchanges greetings; raises `Stranger` or an OSError if the other side does not."""
        connected.settimeout(_GREET_SECS)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNREACHABLE_MS)
        self.heard_at = -1e9
        self.socket, self._file, self._is_chief = connected, connected.makefile("rb"), is_chief
        own = f"distloop {os.urandom(16).hex()}\n".encode()
        connected.sendall(own)
        other = self._file.readline(len(own))
        if len(other) != len(own) or not other.startswith(b"distloop "):
            raise Stranger("they are of another program")
        connected.settimeout(None)
        self._key = hmac.new(secret.encode(), own + other if is_chief else other + own, "sha256").digest()
        self._numbers = {True: itertools.count(), False: itertools.count()}  # of the messages of the chief, and to it
        self._waiting, self._sending = b"", threading.Lock()

    def send(self, message: Mapping[str, Any]) -> None:
        """Sends a message without waiting for the other side; leaves it out if the one before still waits."""
        with self._sending, contextlib.suppress(OSError):  # `receive` notices why
            if not self._waiting:
                text = json.dumps(message, separators=(",", ":")).encode()
                self._waiting = self._sign(text, self._is_chief) + text + b"\n"
            self._waiting = self._waiting[self.socket.send(self._waiting, socket.MSG_DONTWAIT) :]

    def receive(self) -> dict[str, Any]:
        """Waits for the next message.

        Raises:
            Stranger: if it is not of a worker of this run.
            OSError, EOFError: if there is no connection any more.
        """
        line = self._file.readline(_MAX_BYTES)
        if not line.endswith(b"\n"):
            raise EOFError
        text = line[_SIGNATURE_BYTES:-1]
        if not hmac.compare_digest(line[:_SIGNATURE_BYTES], self._sign(text, not self._is_chief)):
            raise Stranger("they are not signed with the DISTLOOP_SECRET of this worker")
        self.heard_at = time.monotonic()
        message: dict[str, Any] = json.loads(text)
        return message

    def close(self) -> None:
        """Ends the connection."""
        _shut_down(self.socket)  # wakes a thread that waits for a message
        self._file.close()
        self.socket.close()

    def _sign(self, text: bytes, is_of_chief: bool) -> bytes:
        """Returns the signature of the next message in a direction.

        It is computed with Python's lock held, which `hmac.digest` lets go of: a process that ends meanwhile takes
        OpenSSL down under the thread that signs, and ends by a segmentation fault.
        """
        content = f"{is_of_chief} {next(self._numbers[is_of_chief])} ".encode() + text
        return hmac.new(self._key, content, "sha256").hexdigest().encode()


class Star:
    """The connections of this worker: of the chief those to all others, of another worker that to the chief.

    Attributes:
        causes: why workers may not be connected, as sentences by host.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        index: int,
        secret: str,
        hello: Mapping[str, Any],
        receive: Callable[[int, dict[str, Any] | None], None],
    ):
        """Opens the port of worker `index`; all but the chief only keep it from others, and connect.

        Args:
            addresses: `host:port` of every worker, the chief first.
            index: of this worker.
            secret: the same on all workers; "": none.
            hello: what the chief gets first, once it has signed a message.
            receive: called in a thread with a worker and a message of it; with None once its connection is closed.

        Raises:
            ValueError: if an address is none, or the port is taken.
        """
        self.causes: dict[str, str] = {}
        self._hosts = [split_address(address) for address in addresses]  # with their ports
        self._index, self._secret, self._hello, self._receive = index, secret, hello, receive
        self._connections: dict[int, Connection] = {}
        self._strangers: list[socket.socket] = []  # the oldest first
        self._identifying = threading.Lock()
        has_both, port = socket.has_dualstack_ipv6(), self._hosts[index][1]
        family, backlog = socket.AF_INET6 if has_both else socket.AF_INET, len(addresses) + 64
        try:  # on every interface, as TensorFlow, which would notice too late that the port is taken
            self._listener = socket.create_server(("", port), family=family, backlog=backlog, dualstack_ipv6=has_both)
        except OSError as error:
            raise ValueError(
                f"Port {port} of worker {index} ({addresses[index]}) cannot be used "
                f"({str(error.strerror).partition(' (while')[0]}): is another run there? Give other ports, or end it."
            ) from None
        self._is_open = True
        target = self._connect_forever if index else self._accept_forever
        threading.Thread(target=target, name="distloop-star", daemon=True).start()

    def send(self, message: Mapping[str, Any]) -> None:
        """Sends a message to each worker that is connected; any thread may call it."""
        for connection in list(self._connections.values()):
            connection.send(message)

    def close_port(self) -> None:
        """Closes the listening port, and the connections that have signed no message; those of workers stay open."""
        self._is_open = False
        _shut_down(self._listener)  # wakes the thread that accepts
        self._listener.close()
        self._let_strangers_go(0)

    def _let_strangers_go(self, most: int) -> None:
        """Ends the oldest connections that have signed no message, if there are more than so many."""
        while len(strangers := list(self._strangers)) > most:
            _shut_down(strangers[0])
            self._forget_stranger(strangers[0])

    def _forget_stranger(self, connected: socket.socket) -> None:
        with contextlib.suppress(ValueError):  # it is none any more
            self._strangers.remove(connected)

    def _accept_forever(self) -> None:
        with contextlib.suppress(OSError):  # it was closed
            while self._is_open:
                connected, (host, *_) = self._listener.accept()
                self._strangers.append(connected)
                self._let_strangers_go(_MAX_STRANGERS)
                arguments = connected, host.removeprefix("::ffff:")  # IPv4 within IPv6
                threading.Thread(target=self._serve, args=arguments, name="distloop-star", daemon=True).start()

    def _connect_forever(self) -> None:
        """Connects to the chief once it listens; its name is looked up each time."""
        host, port = self._hosts[0]
        while self._is_open:
            try:
                connected = socket.create_connection((host, port), timeout=_GREET_SECS)
                if connected.getsockname() != connected.getpeername():  # else the system had picked this very port
                    self._serve(connected, host)
            except ConnectionRefusedError:  # it has not started
                pass
            except (OSError, UnicodeError) as error:
                self.causes[host] = f"worker 0: {getattr(error, 'strerror', None) or error}"
            time.sleep(_CONNECT_AGAIN_SECS)

    def _serve(self, connected: socket.socket, host: str) -> None:
        """Hands on the messages of a connection as long as it lasts."""
        connection, worker, timer = None, None, threading.Timer(_GREET_SECS, _shut_down, [connected])
        timer.daemon = True
        timer.start()
        try:
            connection = Connection(connected, self._secret, self._index == 0)
            connection.send({"worker": self._index})  # shows whether the secrets are the same
            message = connection.receive()
            if self._index:
                connection.send(self._hello)
            worker = self._identify(connection, message["worker"], host)
            timer.cancel()
            self._forget_stranger(connected)
            self.causes.pop(host, None)
            while True:
                self._receive(worker, connection.receive())
        except Stranger as error:
            if host in self.causes or len(self.causes) < 3:
                self.causes[host] = f"connections of {host} do not count: {error}"
        except Exception:  # it has ended, or wrote what no worker writes
            pass
        timer.cancel()
        self._forget_stranger(connected)
        (connection or connected).close()
        if worker is not None and self._connections.get(worker) is connection:
            del self._connections[worker]
            self._receive(worker, None)

    def _identify(self, connection: Connection, worker: Any, host: str) -> int:
        """Returns the worker that a connection says to be, and keeps the connection; raises `Stranger` otherwise."""
        others = range(1, len(self._hosts)) if self._index == 0 else (0,)
        if not self._is_open or type(worker) is not int or worker not in others:
            raise Stranger("they are of no worker of this run")
        if self._index == 0 and not self._secret and not _is_host(host, self._hosts[worker][0]):
            raise Stranger("no worker has this address; with a DISTLOOP_SECRET on all, addresses do not matter")
        with self._identifying:
            before = self._connections.get(worker)
            if before is not None and time.monotonic() - before.heard_at < _GREET_SECS:
                raise Stranger(f"two say that they are worker {worker}: give each its own task index in TF_CONFIG")
            self._connections[worker] = connection
        if before is not None:
            before.close()
        return worker


def _shut_down(connected: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connected.shutdown(socket.SHUT_RDWR)


def _is_host(number: str, host: str) -> bool:
    """Returns whether the source of a connection is an address of a host."""
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    source, *addresses = (ipaddress.ip_address(n.partition("%")[0]) for n in [number, *(str(f[4][0]) for f in found)])
    # Linux answers 127.0.1.1, to which Debian leads a machine's own name, from 127.0.0.1.
    return source in addresses or (source.is_loopback and any(address.is_loopback for address in addresses))

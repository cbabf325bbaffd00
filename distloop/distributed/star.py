"""Star: a TCP connection from each worker to the chief, with signed messages.

    star = Star(["10.0.0.1:4000", "10.0.0.2:4000"], index=0, secret="a text that the workers share", receive=print)
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
import json
import os
import socket
import stat
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from distloop.distributed.environment import split_address
from distloop.log import printable

HIDDEN = "***"  # in place of a secret value

_MAX_BYTES = 2**20  # of a message, and of those that wait for a process that is suspended
_GREET_SECS = 5.0  # that a connection and its greeting may take, and for which a worker may be silent here
_CONNECT_AGAIN_SECS = 0.05
_UNREACHABLE_MS = 86_400_000  # TCP ends a connection after so long without an answer; `liveness` does so earlier
_SIGNATURE_BYTES = 64  # SHA-256 in hexadecimal digits


class Stranger(ValueError):
    """The connections of a host do not count; the message says why."""


class Connection:
    """One connection, whose messages are signed lines of JSON.

    Attributes:
        host: of the other side, as a number.
        heard_at: when a message came last, on the monotonic clock.
    """

    def __init__(self, connected: socket.socket, secret: str, is_chief: bool):
        """Exchanges greetings; raises `Stranger` or an OSError if the other side does not."""
        connected.settimeout(_GREET_SECS)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNREACHABLE_MS)
        self.host, self.heard_at = connected.getpeername()[0], -1e9
        self._socket, self._file, self._is_chief = connected, connected.makefile("rb"), is_chief
        own = f"distloop {os.urandom(16).hex()}\n".encode()
        connected.sendall(own)
        other = self._file.readline(len(own))
        if len(other) != len(own) or not other.startswith(b"distloop "):
            raise Stranger("they are of another program")
        connected.settimeout(None)
        self._key = hmac.digest(secret.encode(), own + other if is_chief else other + own, "sha256")
        self._numbers = {True: 0, False: 0}  # of the messages of the chief, and of those to it
        self._waiting, self._sending = b"", threading.Lock()

    def send(self, message: Mapping[str, Any]) -> None:
        """Sends a message without waiting for the other side; leaves it out if much waits already."""
        with self._sending, contextlib.suppress(OSError):  # `receive` notices why
            if len(self._waiting) < _MAX_BYTES:
                text = json.dumps(message, separators=(",", ":")).encode()
                self._waiting += self._sign(text, self._is_chief) + text + b"\n"
            self._waiting = self._waiting[self._socket.send(self._waiting, socket.MSG_DONTWAIT) :]

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

    def fileno(self) -> int:
        """Returns the number of its file."""
        return self._socket.fileno()

    def close(self) -> None:
        """Ends the connection."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes a thread that waits for a message
        self._file.close()
        self._socket.close()

    def _sign(self, text: bytes, is_of_chief: bool) -> bytes:
        """Returns the signature of the next message in a direction."""
        self._numbers[is_of_chief] += 1
        content = f"{is_of_chief} {self._numbers[is_of_chief]} ".encode() + text
        return hmac.digest(self._key, content, "sha256").hex().encode()


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
        receive: Callable[[int, dict[str, Any] | None], None],
        introduction: Mapping[str, Any] | None = None,
    ):
        """Opens the port of worker `index`; all but the chief only keep it from others, and connect.

        Args:
            addresses: `host:port` of every worker, the chief first.
            index: of this worker.
            secret: the same on all workers; "": none.
            receive: called in a thread with a worker and a message of it; with None once it has closed its connection.
            introduction: what another worker than the chief sends first.

        Raises:
            ValueError: if an address is none, or the port is taken.
        """
        self.causes: dict[str, str] = {}
        self._places = [split_address(address) for address in addresses]
        self._index, self._secret, self._receive = index, secret, receive
        self._introduction = {"worker": index, **(introduction or {})} if index else {}
        self._connections: dict[int, Connection] = {}
        self._identifying = threading.Lock()
        try:
            self._listener = _listen(self._places, index)
        except OSError as error:
            raise ValueError(
                f"Port {self._places[index][1]} of worker {index} ({addresses[index]}) cannot be used "
                f"({str(error.strerror).partition(' (while')[0]}): is another run there? Give other ports, or end it."
            ) from None
        self._is_open = True
        os.register_at_fork(after_in_child=self._release)
        target = self._connect_forever if index else self._accept_forever
        threading.Thread(target=target, name="distloop-star", daemon=True).start()

    def send(self, message: Mapping[str, Any]) -> None:
        """Sends a message to each worker that is connected; any thread may call it."""
        for connection in list(self._connections.values()):
            connection.send(message)

    def close_port(self) -> None:
        """Closes the listening port; the connections stay open."""
        self._is_open = False
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listener.close()

    def _accept_forever(self) -> None:
        with contextlib.suppress(OSError):  # it was closed
            while self._is_open:
                connected, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=[connected], name="distloop-star", daemon=True).start()

    def _connect_forever(self) -> None:
        """Connects to the chief once it listens; its name is looked up each time."""
        host, port = self._places[0]
        while self._is_open:
            try:
                connected = socket.create_connection((host, port), timeout=_GREET_SECS)
                if connected.getsockname() != connected.getpeername():  # else the system had picked this very port
                    self._serve(connected)
            except ConnectionRefusedError:  # it has not started
                pass
            except (OSError, UnicodeError) as error:
                self.causes[host] = f"worker 0: {getattr(error, 'strerror', None) or error}"
            time.sleep(_CONNECT_AGAIN_SECS)

    def _serve(self, connected: socket.socket) -> None:
        """Hands on the messages of a connection as long as it lasts."""
        host, connection, worker, is_closed = "", None, None, True
        try:
            host = connected.getpeername()[0]
            connection = Connection(connected, self._secret, self._index == 0)
            connection.send(self._introduction)  # both see by it whether their secrets are the same
            if self._index:
                worker, self._connections[0] = 0, connection
            while True:
                message = connection.receive()
                if worker is None:
                    worker = self._identify(connection, message["worker"])
                if message:
                    self.causes.pop(host, None)
                    self.causes.pop(self._places[0][0], None)
                    self._receive(worker, message)
        except Stranger as error:
            if host in self.causes or len(self.causes) < 3:
                self.causes[host] = f"connections of {host} do not count: {error}"
        except OSError as error:  # out of reach is not closed: the silence of the worker counts
            is_closed = isinstance(error, ConnectionError)
        except Exception:  # it has ended, or wrote what no worker writes
            pass
        if connection is None:
            connected.close()
        else:
            connection.close()
        if worker is not None and self._connections.get(worker) is connection:
            del self._connections[worker]
            if is_closed:
                self._receive(worker, None)

    def _identify(self, connection: Connection, worker: Any) -> int:
        """Takes a connection for that of a worker.

        Raises:
            Stranger: if it is not.
        """
        if not self._is_open or type(worker) is not int or not 0 < worker < len(self._places):
            raise Stranger("they are of no worker of this run")
        if not self._secret and not _is_host(connection.host, self._places[worker][0]):
            raise Stranger("no worker has this address; with a DISTLOOP_SECRET on all, addresses do not matter")
        with self._identifying:
            before = self._connections.get(worker)
            if before is not None and time.monotonic() - before.heard_at < _GREET_SECS:
                refusal = f"Another process says that it is worker {worker}, too: give each its own task index in "
                connection.send({"refusal": f"{refusal}TF_CONFIG, and the same addresses."})
                raise Stranger(f"two are of worker {worker}")
            self._connections[worker] = connection
        if before is not None:
            before.close()
        return worker

    def _release(self) -> None:
        """Closes, in a forked process, the connections and all sockets on this worker's port, TensorFlow's too.

        They would hide that the worker has died, and keep its port taken. /dev/null takes the place of each, so that
        TensorFlow's copy in the fork does not close another file.
        """
        port, connected = self._places[self._index][1], {c.fileno() for c in self._connections.values()}
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        for number in map(int, os.listdir("/dev/fd")):
            with contextlib.suppress(OSError):  # closed meanwhile, or a socket of another kind
                if stat.S_ISSOCK(os.fstat(number).st_mode):
                    with socket.socket(fileno=os.dup(number)) as copy:
                        is_inet = copy.family in (socket.AF_INET, socket.AF_INET6)
                        is_own = number in connected or (is_inet and copy.getsockname()[1] == port)
                    if is_own:
                        os.dup2(null, number, inheritable=False)
        os.close(null)


class Facts(NamedTuple):
    """Settings that must be the same on all workers, by name."""

    digests: dict[str, str]  # can be compared by those who know the secret
    values: dict[str, str]  # as they may be shown


def describe_facts(facts: Mapping[str, str], secret: str, secret_names: Collection[str] = ()) -> Facts:
    """Returns settings as they are sent: digests, and values cut to fit; a secret value appears nowhere.

    Without a secret of the workers a digest has no key, and who reads it can try all short values: a secret value is
    then not compared.

    Args:
        facts: settings that must be the same on all workers, by name.
        secret: of the workers; "": none.
        secret_names: the settings that are compared and never shown.
    """
    described = Facts({}, {})
    for name, value in facts.items():
        compared = value if secret or name not in secret_names else HIDDEN
        text = repr((name, compared)).encode(errors="backslashreplace")
        digest = hmac.digest(b"distloop" + secret.encode(), text, "sha256").hex()[:16]
        cut = shorten(value, 160)
        described.digests[name] = digest
        described.values[name] = HIDDEN if name in secret_names else cut if cut == value else f"{cut} ({digest})"
    return described


def shorten(text: str, max_bytes: int) -> str:
    """Returns a text in one line without control characters, cut to a length in UTF-8."""
    text = printable(text[: max_bytes + 1], keep="")
    data = text.encode(errors="backslashreplace")
    return text if len(data) <= max_bytes else f"{data[: max_bytes - 3].decode(errors='ignore')}..."


def _is_host(number: str, host: str) -> bool:
    """Returns True if the source of a connection is an address of a host."""
    numbers = {_number(str(line[4][0])) for line in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    # Linux answers 127.0.1.1, to which Debian leads a machine's own name, from 127.0.0.1.
    return _number(number) in numbers or (_number(number).is_loopback and any(n.is_loopback for n in numbers))


def _is_loopback(host: str) -> bool:
    """Returns True if a host is this machine for every machine: `localhost`, `127.0.0.1`, `::1`."""
    try:
        return host == "localhost" or _number(host).is_loopback
    except ValueError:
        return False


def _number(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Returns an address as a number, IPv4 within IPv6 as IPv4."""
    number = ipaddress.ip_address(host.partition("%")[0])
    return getattr(number, "ipv4_mapped", None) or number


def _listen(places: Sequence[tuple[str, int]], index: int) -> socket.socket:
    """Returns a socket on the port of a worker, on the loopback interface alone if all workers are there."""
    host, port = places[index]
    has_both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if has_both else socket.AF_INET
    # On every interface, as TensorFlow, which would notice too late that the port is taken.
    listener = socket.create_server(("", port), family=family, dualstack_ipv6=has_both, backlog=len(places) + 64)
    if not all(_is_loopback(host) for host, _ in places):
        return listener
    listener.close()
    family, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    return socket.create_server(place[:2], family=family, backlog=len(places) + 64)

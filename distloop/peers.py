"""Owns what workers tell each other beside the computation: that they are there, how far they are, that they failed.

    peers = Peers(["10.0.0.1:4000", "10.0.0.2:4000"], index=0, facts={"TensorFlow": "2.21.0"})
    peers.meet(timeout_secs=300)            # until every worker was heard of
    peers.watch(hang_timeout_secs=600)      # from now on the process ends when another one fails or falls silent
    peers.phase = "training"

Each worker sends a datagram to every other one twice a second, to the UDP port of the same number as the TCP port that
TensorFlow talks on. So it works where TensorFlow waits for ever: before the cluster is up, inside a collective that
nobody ends, and after the chief is gone. It does not know TensorFlow.
"""

import atexit
import contextlib
import faulthandler
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

EXIT_CODE = 76  # EX_PROTOCOL of sysexits.h, "remote error": another worker was the first to fail

_SEND_SECS = 0.5
_SILENT_SECS = 3.0  # six datagrams lost: worth a word once something is wrong
_LAST_WORDS_SECS = 1.0  # for others to hear, and for the one that failed to end first


class Peers:
    """The other workers, as far as they were heard of.

    Attributes:
        phase: what this worker is doing, in a word or two.
        step: gives the global step that it has come to.
    """

    def __init__(self, addresses: Sequence[str], index: int, facts: Mapping[str, str]):
        """Opens the port and begins to send.

        Args:
            addresses: `host:port` of every worker, the chief first.
            index: which of them this one is.
            facts: what must be the same on all of them, by name.

        Raises:
            ValueError: if the port is taken.
        """
        self._addresses = list(addresses)
        self._index = index
        self._facts = dict(facts)
        self.phase = "starting"
        self.step: Callable[[], int] = lambda: 0
        self._state = "alive"
        self._error = ""
        self._heard: dict[int, dict[str, Any]] = {}  # the last datagram of each other worker, and when it came
        self._resolved: dict[int, tuple[str, int]] = {}
        self._hang_timeout_secs = 0.0
        self._is_watching = False
        port = int(addresses[index].rpartition(":")[2])
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        try:
            self._socket.bind(("", port))
        except OSError as error:
            raise ValueError(
                f"Port {port} of worker {index} ({addresses[index]}) cannot be used ({error.strerror}): is another run "
                "there? Give other ports, or end it."
            ) from None
        self._socket.settimeout(_SEND_SECS / 2)
        for target in (self._send_for_ever, self._listen):
            threading.Thread(target=target, name="distloop-peers", daemon=True).start()

    def meet(self, timeout_secs: float) -> None:
        """Waits until every worker was heard of, and checks that all were started alike.

        Raises:
            ValueError: if some did not come, or were started with other facts.
        """
        deadline, next_word = time.monotonic() + timeout_secs, time.monotonic() + 5
        while missing := [i for i in self._others() if not self._is_met(i) and not self._answers(i, deadline)]:
            if time.monotonic() >= deadline:
                raise ValueError(
                    f"{self._list(missing)} did not come within {timeout_secs:g} seconds, and worker {self._index} "
                    "waits no longer: look at their output, and whether their addresses can be reached from here, or "
                    "set a longer start_timeout."
                )
            if time.monotonic() >= next_word:
                print(f"distloop: waiting for {self._list(missing)}.", file=sys.stderr, flush=True)
                next_word += 30
            time.sleep(0.05)
        for _ in range(3):  # the last that others hear for a while: TensorFlow joins the cluster without a pause
            self._send()
            time.sleep(0.05)
        for i, heard in sorted(self._heard.items()):
            theirs = heard.get("facts") or self._facts
            for name in sorted({*self._facts, *theirs}):
                mine, other = self._facts.get(name), theirs.get(name)
                if mine != other:
                    raise ValueError(
                        f"Workers were started differently: {name} is {mine} on worker {self._index} and {other} on "
                        f"worker {i}; start all with the same command."
                    )

    def watch(self, hang_timeout_secs: float) -> None:
        """Ends this process from now on when another one fails or falls silent, and tells others if this one fails.

        Args:
            hang_timeout_secs: how long a worker may be silent, or training stand still; 0: for ever.
        """
        self._hang_timeout_secs = hang_timeout_secs
        self._is_watching = True
        before = sys.excepthook

        def tell(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            if _is_of_the_cluster(error):
                self._blame(error)
            self.fail(f"{kind.__name__}: {error}")
            before(kind, error, trace)

        sys.excepthook = tell
        atexit.register(self._leave)
        threading.Thread(target=self._watch, name="distloop-watchdog", daemon=True).start()

    def fail(self, error: str) -> None:
        """Tells the others that this worker failed."""
        self._state, self._error = "failed", _in_short(error)
        self._is_watching = False
        for _ in range(3):
            self._send()
            time.sleep(0.05)

    def _leave(self) -> None:
        """Waits at the end until all have come there: TensorFlow takes one that leaves early for one that died."""
        if self._state != "alive":
            return
        self._state, self.phase = "left", "leaving"
        self._is_watching = False
        self._send()
        deadline = time.monotonic() + (self._hang_timeout_secs or 600)
        while time.monotonic() < deadline:
            here = [i for i in self._others() if self._silent_secs(i) < _SILENT_SECS]
            if all(self._heard[i]["state"] != "alive" for i in here):
                break
            time.sleep(0.05)
        for _ in range(3):
            self._send()

    def _watch(self) -> None:
        """Ends the process when it must."""
        since, last = time.monotonic(), (-1, "")
        while True:
            time.sleep(_SEND_SECS / 2)
            if not self._is_watching:
                return
            for i, heard in sorted(self._heard.items()):
                if heard["state"] == "failed":
                    self._end(f"worker {i} failed at step {heard['step']} ({heard['phase']}): {heard['error']}")
            limit = self._hang_timeout_secs
            if not limit:
                continue
            for i in sorted(self._heard):
                if self._heard[i]["state"] == "alive" and self._silent_secs(i) > limit:
                    self._end(f"{self._describe(i)}, longer than hang_timeout={limit:g}", with_stacks=True)
            now = (self.step(), self.phase)
            if now != last or self.phase != "training":
                since, last = time.monotonic(), now
            elif time.monotonic() - since > limit:
                told = "; ".join(self._describe(i) for i in self._others())
                self._end(
                    f"no step has ended for hang_timeout={limit:g} seconds; worker {self._index} is at step {now[0]}, "
                    f"{told}",
                    with_stacks=True,
                )

    def _blame(self, error: BaseException) -> None:
        """Ends the process for an error of TensorFlow's that another worker is behind, once it is known which."""
        deadline = time.monotonic() + 2 * _SILENT_SECS
        while time.monotonic() < deadline:
            failed = [i for i, heard in self._heard.items() if heard["state"] == "failed"]
            if failed or any(self._silent_secs(i) > _SILENT_SECS for i in self._others()):
                break
            time.sleep(0.1)
        else:
            return
        self._is_watching = False
        if failed:
            heard = self._heard[failed[0]]
            self._end(f"worker {failed[0]} failed at step {heard['step']} ({heard['phase']}): {heard['error']}")
        silent = [i for i in self._others() if self._silent_secs(i) > _SILENT_SECS]
        self._end(f"{'; '.join(map(self._describe, silent))}; nothing can go on without it ({_in_short(str(error))})")

    def _end(self, reason: str, *, with_stacks: bool = False) -> None:
        """Leaves at once: the main thread may hang in a collective that nobody ends."""
        where = f"worker {self._index} (step {self.step()}, {self.phase})"
        print(f"distloop: {reason}. So {where} ends, too.", file=sys.stderr, flush=True)
        if with_stacks:
            faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
        self._state, self._error = "ended", reason
        time.sleep(_LAST_WORDS_SECS)  # the one that failed is to be the first that ends
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(EXIT_CODE)

    def _send_for_ever(self) -> None:
        while True:
            self._send()
            time.sleep(_SEND_SECS)

    def _send(self) -> None:
        message: dict[str, Any] = {"worker": self._index, "state": self._state, "phase": self.phase}
        with contextlib.suppress(Exception):  # the step is read while another thread computes it
            message["step"] = self.step()
        if self._error:
            message["error"] = self._error
        if not self._is_watching:
            message |= {"facts": self._facts, "has_heard_all": len(self._heard) == len(self._addresses) - 1}
        data = json.dumps(message).encode()
        for i in self._others():
            with contextlib.suppress(OSError):  # has no name yet, is not up, or gone: silence is what tells
                if i not in self._resolved:
                    host, _, port = self._addresses[i].rpartition(":")
                    self._resolved[i] = (socket.gethostbyname(host), int(port))
                self._socket.sendto(data, self._resolved[i])

    def _listen(self) -> None:
        while True:
            try:
                message = json.loads(self._socket.recv(65536))
                i = message["worker"]
                if i in self._others():
                    known = {"step": 0, "error": "", **self._heard.get(i, {})}
                    self._heard[i] = {**known, **message, "when": time.monotonic()}
            except (OSError, ValueError, KeyError, TypeError):
                continue  # nothing came, or nothing of ours

    def _others(self) -> list[int]:
        return [i for i in range(len(self._addresses)) if i != self._index]

    def _silent_secs(self, i: int) -> float:
        return time.monotonic() - self._heard[i]["when"] if i in self._heard else 0.0

    def _is_met(self, i: int) -> bool:
        """Says whether a worker was heard of and has itself heard of all."""
        return bool(self._heard.get(i, {}).get("has_heard_all"))

    def _answers(self, i: int, deadline: float) -> bool:
        """Asks TensorFlow's own port, at the end of the wait: a network may let TCP through alone."""
        if time.monotonic() < deadline:
            return False
        host, _, port = self._addresses[i].rpartition(":")
        with contextlib.suppress(OSError), socket.create_connection((host, int(port)), timeout=2):
            return True
        return False

    def _describe(self, i: int) -> str:
        if i not in self._heard:
            return f"worker {i} ({self._addresses[i]}) was never heard of"
        heard = self._heard[i]
        silent = self._silent_secs(i)
        was = f"has been silent for {silent:.0f} seconds, last heard" if silent > _SILENT_SECS else "is"
        return f"worker {i} ({self._addresses[i]}) {was} at step {heard['step']} ({heard['phase']})"

    def _list(self, workers: Sequence[int]) -> str:
        names = ", ".join(f"{i} ({self._addresses[i]})" for i in workers)
        return f"worker{'s' if len(workers) > 1 else ''} {names}"


def _in_short(error: str) -> str:
    """Gives the first line of an error, or the most of it."""
    line = (error.strip().splitlines() or [""])[0]
    return (line if len(line) <= 500 else f"{line[:500]}...").rstrip(" .")


def _is_of_the_cluster(error: BaseException) -> bool:
    """Says whether an error is what TensorFlow raises where another worker is gone."""
    name = type(error).__name__
    return name in ("UnavailableError", "AbortedError", "CancelledError", "DeadlineExceededError") or (
        name == "InternalError" and "ollective" in str(error)
    )

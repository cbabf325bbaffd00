"""Owns what workers tell each other beside the computation: that they are there, how far they are, that they failed.

    peers = Peers(["10.0.0.1:4000", "10.0.0.2:4000"], index=0, facts={"TensorFlow": "2.21.0"})
    peers.meet(timeout_secs=300)            # until every worker was heard of, and hears all
    peers.watch(hang_timeout_secs=600)      # from now on the process ends when another one fails or falls silent
    peers.phase = TRAINING

Each worker sends a datagram to every other one twice a second, to the UDP port of the same number as the TCP port that
TensorFlow talks on. So it works where TensorFlow waits for ever: before the cluster is up, inside a collective that
nobody ends, and after the chief is gone. It does not know TensorFlow.
"""

import atexit
import contextlib
import hashlib
import json
import os
import re
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, NamedTuple, NoReturn

EXIT_CODE = 76  # EX_PROTOCOL of sysexits.h, "remote error": another worker was the first to fail

# The phases in which a worker needs all the others, and should not stand still.
JOINING, TRAINING, GATHERING = "joining", "training", "waiting for all"

_SEND_SECS = 0.5
_SILENT_SECS = 3.0  # six datagrams lost: worth a word once something is wrong
_GONE_SECS = 1.5  # three lost, and its host says that nobody listens there any more
_LEFT_SECS = 10.0  # what one that left had ended may take so much longer here
_LAST_WORDS_SECS = 1.0  # for others to hear, and for the one that failed to end first
_SAVE_SECS = 60.0  # for a checkpoint that is being written


class _Report(NamedTuple):
    """The last that was heard of a worker."""

    run: str  # another one after a restart
    state: str  # alive; failed; ended, as another one failed; left
    phase: str
    step: int
    error: str
    has_met: bool
    heard: dict[str, str]  # the runs that it hears, by worker; empty when all have met
    facts: dict[str, str]  # likewise
    when: float  # on the monotonic clock


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
        self._others = [i for i in range(len(addresses)) if i != index]
        self._facts = {name: _clipped(value) for name, value in facts.items()}
        self.phase = "starting"
        self.step: Callable[[], int] = lambda: 0
        self._last_step = 0  # read by the thread that sends: where a device hangs, reading it may hang, too
        self._run = os.urandom(4).hex()
        self._pid = os.getpid()  # a fork is another process
        self._state, self._error = "alive", ""
        self._has_met = False
        self._heard: dict[int, _Report] = {}
        self._refused: set[int] = set()  # at whose address nobody listened since they were last heard
        self._started_again: set[int] = set()
        self._has_double = False
        self._links: dict[int, socket.socket] = {}
        self._awake_since = -1e9  # before that this process was stopped, and could not hear
        self._is_watching = False
        self._ending = threading.Lock()  # taken once, for good
        self._socket = self._open(addresses[index])
        for target in (self._send_for_ever, self._listen):
            threading.Thread(target=target, name="distloop-peers", daemon=True).start()

    def _open(self, address: str) -> socket.socket:
        """Opens the UDP port, and sees whether TensorFlow can have the TCP port: it would find out too late."""
        port = int(address.rpartition(":")[2])
        found = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        try:
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(("", port))
            found.bind(("", port))
        except OSError as error:
            raise ValueError(
                f"Port {port} of worker {self._index} ({address}) cannot be used ({error.strerror}): is another run "
                "there? Give other ports, or end it."
            ) from None
        found.settimeout(_SEND_SECS / 2)
        return found

    def meet(self, timeout_secs: float) -> None:
        """Waits until every worker was heard of and hears all, and checks that they were started alike.

        Raises:
            ValueError: if some did not come, or were started with other facts.
        """
        deadline, next_word = time.monotonic() + timeout_secs, time.monotonic() + 5
        while missing := [i for i in self._others if not self._is_met(i)]:
            if self._has_double:
                raise ValueError(
                    f"Another process says that it is worker {self._index}, too: give each its own task index in "
                    "TF_CONFIG, and the same addresses."
                )
            for i, heard in dict(self._heard).items():
                if heard.state == "failed" and heard.heard.get(str(self._index)) == self._run:
                    self._compare_facts(i)
                    self._end(self._failed())
            if time.monotonic() >= deadline:
                raise ValueError(self._missing(timeout_secs))
            if time.monotonic() >= next_word:
                print(f"distloop: waiting for {self._list(missing)}.", file=sys.stderr, flush=True)
                next_word += 30
            time.sleep(0.05)
        self._has_met = True
        self._send_now()
        for i in self._others:
            self._compare_facts(i)

    def _compare_facts(self, i: int) -> None:
        theirs = self._heard[i].facts
        for name in sorted({*self._facts, *theirs}):
            mine, other = self._facts.get(name), theirs.get(name)
            if mine != other:
                raise ValueError(
                    f"Workers were started differently: {name} is {mine} on worker {self._index} and {other} on worker "
                    f"{i}; start all with the same command."
                )

    def watch(self, hang_timeout_secs: float, join_timeout_secs: float = 0.0) -> None:
        """Ends this process from now on when another one fails or falls silent, and tells others if this one fails.

        Args:
            hang_timeout_secs: how long a worker may be silent, or training stand still; 0: for ever.
            join_timeout_secs: how long the phase JOINING may take; 0: for ever.
        """
        self._hang_timeout_secs, self._join_timeout_secs = hang_timeout_secs, join_timeout_secs
        self._is_watching = True
        before = sys.excepthook

        def tell(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            if os.getpid() == self._pid:
                if _is_of_the_cluster(error):
                    self._blame()
                self.fail(f"{kind.__name__}: {error}")
            before(kind, error, trace)

        sys.excepthook = self._tell = tell
        atexit.register(self._leave)
        threading.Thread(target=self._watch, name="distloop-watchdog", daemon=True).start()

    def fail(self, error: str) -> None:
        """Tells the others that this worker failed; what failed first counts."""
        self._read_step()
        if self._state == "alive":
            self._state, self._error = "failed", _in_short(error)
        self._is_watching = False
        self._send_now()

    def _leave(self) -> None:
        """Waits at the end until all have come there: TensorFlow takes one that leaves early for one that died."""
        if os.getpid() != self._pid:
            return
        if self._state == "ended":
            self._ending.acquire()  # for ever: another thread ends the process
        if sys.excepthook is not self._tell and (error := getattr(sys, "last_value", None)) is not None:
            self.fail(f"{type(error).__name__}: {error}")  # another hook took it
        if self._state != "alive":
            return
        self._read_step()
        self._state, self._is_watching = "left", False
        self._send_now()
        deadline = time.monotonic() + (self._hang_timeout_secs or 600)
        while time.monotonic() < deadline:
            here = [i for i in self._others if self._silent_secs(i) < _SILENT_SECS and not self._is_gone(i)]
            if all(self._heard[i].state != "alive" for i in here):
                break
            time.sleep(0.05)
        self._send_now()

    def _watch(self) -> None:
        """Ends the process when it must."""
        now = since = time.monotonic()  # since: when this worker last came further
        last = (-1, "")
        while True:
            time.sleep(_SEND_SECS / 2)
            before, now = now, time.monotonic()
            if now - before > _SILENT_SECS:
                self._awake_since = since = now
            if not self._is_watching:
                return
            limit = self._hang_timeout_secs
            if reason := self._failed():
                self._end(reason)
            if reason := self._hanging(limit):
                self._end(reason, with_stacks=True)
            here = (self._last_step, self.phase)
            if here != last or self.phase not in (JOINING, TRAINING, GATHERING):
                since, last = now, here
            left = [i for i, heard in sorted(self._heard.items()) if heard.state == "left"]
            if left and now - since > _LEFT_SECS:
                self._end(f"{self._describe(left[0])}, before the run was over")
            told = "; ".join(self._describe(i) for i in self._others)
            if self.phase == JOINING and 0 < self._join_timeout_secs < now - since:
                self._end(
                    f"TensorFlow has not joined the workers for start_timeout={self._join_timeout_secs:g} seconds, "
                    f"though they hear each other ({told}): are their TCP ports open, too?",
                    with_stacks=True,
                )
            elif self.phase != JOINING and 0 < limit < now - since:
                self._end(
                    f"no step has ended for hang_timeout={limit:g} seconds; worker {self._index} is at step {here[0]} "
                    f"({here[1]}), {told}",
                    with_stacks=True,
                )

    def _failed(self) -> str:
        """Says which worker failed, or died, if one did."""
        found = sorted(self._heard.items())
        for i, heard in found:
            if heard.state == "failed":
                return f"worker {i} failed at step {heard.step} ({heard.phase}): {heard.error}"
        for i, heard in found:
            if heard.state == "alive" and self._is_gone(i):
                return (
                    f"the process of worker {i} ({self._addresses[i]}) is gone without a word, last heard at step "
                    f"{heard.step} ({heard.phase}): was it killed, or out of memory? Its own output may tell"
                )
            if heard.state == "alive" and self._silent_secs(i) > _SILENT_SECS and i in self._started_again:
                return f"{self._describe(i)}, and was started again"
        return ""

    def _hanging(self, limit_secs: float) -> str:
        """Says which worker is silent for too long (0: none ever is), or what made another one end."""
        found = sorted(self._heard.items())
        for _, heard in found:
            if heard.state == "ended":
                return heard.error
        for i, heard in found:
            if heard.state == "alive" and 0 < limit_secs < self._silent_secs(i):
                return self._describe(i)
        return ""

    def _blame(self) -> None:
        """Ends the process for an error of TensorFlow's that another worker is behind, once it is known which."""
        deadline = time.monotonic() + 2 * _SILENT_SECS
        while time.monotonic() < deadline:
            if reason := self._failed() or self._hanging(_SILENT_SECS):
                self._end(reason)
            time.sleep(0.1)
        told = "; ".join(self._describe(i) for i in self._others)
        print(f"distloop: this error of TensorFlow's is about the other workers: {told}.", file=sys.stderr, flush=True)

    def _end(self, reason: str, *, with_stacks: bool = False) -> NoReturn:
        """Leaves at once: the main thread may hang in a collective that nobody ends."""
        self._ending.acquire()  # whoever comes second waits for the end
        try:
            where = f"worker {self._index} (step {self._last_step}, {self.phase})"
            self._state, self._error = "ended", reason
            self._send_now()
            line = f"distloop: {reason}{'' if reason.endswith('?') else '.'} So {where} ends, too."
            with contextlib.suppress(OSError):  # nobody reads any more
                print(line, *([_stacks(), line] if with_stacks else []), sep="\n", file=sys.stderr, flush=True)
            deadline = time.monotonic() + _SAVE_SECS
            time.sleep(_LAST_WORDS_SECS)  # the one that failed is to be the first that ends
            for thread in threading.enumerate():
                if thread.name.startswith("distloop-") and not thread.daemon:  # a checkpoint is being written
                    thread.join(max(0.0, deadline - time.monotonic()))
            # Where a thread hangs while it prints, flushing hangs, too.
            threading.Timer(1.0, os._exit, [EXIT_CODE]).start()
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(EXIT_CODE)

    def _send_now(self) -> None:
        """Sends at once, and again, as datagrams may be lost."""
        for _ in range(3):
            self._send()
            time.sleep(0.05)

    def _send_for_ever(self) -> None:
        while True:
            self._read_step()
            self._send()
            time.sleep(_SEND_SECS)

    def _read_step(self) -> None:
        with contextlib.suppress(Exception):  # the main thread may be changing what it is read from
            self._last_step = self.step()

    def _send(self) -> None:
        heard = dict(self._heard)
        message = {
            "worker": self._index,
            "run": self._run,
            "state": self._state,
            "phase": self.phase,
            "step": self._last_step,
            "error": self._error,
            "has_met": self._has_met,
        }
        if not (self._has_met and len(heard) == len(self._others) and all(h.has_met for h in heard.values())):
            message |= {"facts": self._facts, "heard": {str(i): h.run for i, h in heard.items()}}
        data = json.dumps(message).encode()
        for i in self._others:
            try:
                if i not in self._links:
                    host, _, port = self._addresses[i].rpartition(":")
                    link = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
                    link.connect((socket.gethostbyname(host), int(port)))
                    self._links[i] = link
                self._links[i].send(data)
            except ConnectionRefusedError:  # about the one before: no process has that port
                self._refused.add(i)
            except OSError:
                continue  # has no name yet, or cannot be reached: silence is what tells

    def _listen(self) -> None:
        while True:
            try:
                i, report = _parse(self._socket.recv(65536))
            except Exception:  # nothing came, or nothing of ours
                continue
            if i == self._index:
                self._has_double |= report.run != self._run
            elif i in self._others and self._has_met and self._heard[i].run != report.run:
                self._started_again.add(i)
            elif i in self._others:
                known = self._heard.get(i)
                if known is not None and known.run == report.run and not report.heard:  # sent at first only
                    report = report._replace(facts=known.facts, heard=known.heard)
                self._heard[i] = report
                self._refused.discard(i)

    def _is_met(self, i: int) -> bool:
        """Says whether a worker was heard of and has itself heard of all; of this one, if it is to be refused."""
        if i not in self._heard or self._silent_secs(i) > _SILENT_SECS:
            return False
        runs = {str(j): heard.run for j, heard in dict(self._heard).items() if j != i} | {str(self._index): self._run}
        theirs = self._heard[i]
        if theirs.facts != self._facts:
            return theirs.heard.get(str(self._index)) == self._run
        return len(runs) == len(self._others) and all(theirs.heard.get(j) == run for j, run in runs.items())

    def _missing(self, timeout_secs: float) -> str:
        silent = [i for i in self._others if i not in self._heard or self._silent_secs(i) > _SILENT_SECS]
        if silent:
            what = f"{self._list(silent)} did not come within {timeout_secs:g} seconds"
        else:
            deaf = [i for i in self._others if not self._is_met(i)]
            what = f"{self._list(deaf)} did not hear all others within {timeout_secs:g} seconds"
        return (
            f"{what}, and worker {self._index} waits no longer: look at their output, and whether each can reach the "
            "addresses of all by UDP and TCP, or set a longer start_timeout."
        )

    def _silent_secs(self, i: int) -> float:
        when = self._heard[i].when if i in self._heard else 0.0
        return time.monotonic() - max(when, self._awake_since)

    def _is_gone(self, i: int) -> bool:
        """Says whether the process of a worker has ended: its machine answers, but not the process."""
        return i in self._refused and self._silent_secs(i) > _GONE_SECS

    def _describe(self, i: int) -> str:
        heard = self._heard[i]
        silent = self._silent_secs(i)
        was = f"has been silent for {silent:.0f} seconds, last heard" if silent > _SILENT_SECS else "is"
        was = "left" if heard.state == "left" else was
        return f"worker {i} ({self._addresses[i]}) {was} at step {heard.step} ({heard.phase})"

    def _list(self, workers: Sequence[int]) -> str:
        names = ", ".join(f"{i} ({self._addresses[i]})" for i in workers)
        return f"worker{'s' if len(workers) > 1 else ''} {names}"


def _parse(data: bytes) -> tuple[int, _Report]:
    """Reads a datagram; raises whatever it likes where that is none of ours."""
    m: dict[str, Any] = json.loads(data)
    texts = [m["run"], m["state"], m["phase"], m["error"]]
    if type(m["worker"]) is not int or type(m["step"]) is not int or not all(isinstance(text, str) for text in texts):
        raise ValueError
    heard, facts = ({str(k): str(v) for k, v in m.get(name, {}).items()} for name in ("heard", "facts"))
    run, state, phase, error = texts
    return m["worker"], _Report(run, state, phase, m["step"], error, bool(m["has_met"]), heard, facts, time.monotonic())


def _stacks() -> str:
    """Tells what every thread but ours is doing; the main one last."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    found = []
    for ident, frame in sorted(sys._current_frames().items(), key=lambda pair: pair[0] == main):
        if not names.get(ident, "").startswith("distloop-"):
            found.append(f"Thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}")
    return "\n".join(found)


def _clipped(text: str) -> str:
    """Cuts a long text, so that a datagram holds all; different ones stay different."""
    return text if len(text) <= 200 else f"{text[:200]}... ({hashlib.sha256(text.encode()).hexdigest()[:8]})"


def _in_short(error: str) -> str:
    """Gives the first line of an error, or the most of it."""
    line = (error.strip().splitlines() or [""])[0]
    line = re.sub(r"\{\{\w+ [^}]*\}\} ?", "", line)  # where in the graph, as TensorFlow says it
    return (line if len(line) <= 500 else f"{line[:500]}...").rstrip(" .:")


def _is_of_the_cluster(error: BaseException | None) -> bool:
    """Says whether an error is, or comes from, what TensorFlow raises where another worker is gone."""
    for _ in range(20):  # an error may be its own cause
        if error is None:
            return False
        name = type(error).__name__
        is_lost = name in ("UnavailableError", "AbortedError", "CancelledError", "DeadlineExceededError")
        if is_lost or (hasattr(error, "error_code") and re.search("ollective|GRPC|RecvBuf", str(error))):
            return True
        error = error.__cause__ or error.__context__
    return False

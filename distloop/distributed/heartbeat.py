"""Heartbeats between workers: where each is, and the end of this process when another worker fails.

    heartbeat = Heartbeat(["10.0.0.1:4000", "10.0.0.2:4000"], index=0, facts={"TensorFlow": "2.21.0"})
    heartbeat.meet(timeout_secs=300)            # until every worker hears every other one
    heartbeat.watch(hang_timeout_secs=600)      # from now on this process ends when another one fails or falls silent
    heartbeat.phase = TRAINING

Each worker sends a UDP datagram to every other one twice a second, to the port of the same number as the TCP port that
TensorFlow uses. So heartbeats work where TensorFlow waits forever: before the workers have joined, inside a collective
that never completes, and after the chief is gone. `liveness` decides who failed. It does not know TensorFlow.
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
from typing import Any, NoReturn

from distloop.distributed import liveness, output
from distloop.distributed.liveness import Beat, Progress, Table, Timeouts

EXIT_CODE = 76  # EX_PROTOCOL of sysexits.h, "remote error": another worker was the first to fail

_SEND_SECS = 0.5
_LAST_MESSAGE_SECS = 1.0  # for other workers to hear why this one ends, and for the one that failed to end first
_SAVE_SECS = 60.0  # for a checkpoint that is being written
_LEAVE_SECS = 600.0  # that a worker waits for the others at the end of its program, without a hang_timeout


class Heartbeat:
    """Sends this worker's heartbeat and receives those of the others, in threads of its own.

    Attributes:
        phase: what this worker is doing, in a word or two.
        step: returns its global step.
    """

    def __init__(self, addresses: Sequence[str], index: int, facts: Mapping[str, str]):
        """Opens the port and starts to send.

        Args:
            addresses: `host:port` of every worker, the chief first.
            index: of this worker.
            facts: settings that must be the same on all workers, by name.

        Raises:
            ValueError: if the port is taken.
        """
        self.phase = "starting"
        self.step: Callable[[], int] = lambda: 0
        self._last_step = 0  # read by the sending thread: if a device hangs, reading the step may hang, too
        self._table = Table(tuple(addresses), index, os.urandom(4).hex(), {k: _clip(v) for k, v in facts.items()})
        self._table_lock = threading.Lock()  # held to replace the table
        self._pid = os.getpid()  # a fork is another process
        self._state, self._error = "alive", ""
        self._timeouts = Timeouts()
        self._is_watching = False
        self._ending = threading.Lock()  # taken once, forever
        self._sockets = _Sockets(addresses, index)
        for target in (self._send_forever, self._receive_forever):
            threading.Thread(target=target, name="distloop-heartbeat", daemon=True).start()

    def meet(self, timeout_secs: float) -> None:
        """Waits until every worker hears every other one, and checks that they were started alike.

        Raises:
            ValueError: if a worker did not come, or was started with other facts.
        """
        deadline, next_line = time.monotonic() + timeout_secs, time.monotonic() + 5
        while unmet := liveness.find_unmet(self._table, time.monotonic()):
            table, now = self._table, time.monotonic()
            if table.has_duplicate:
                raise ValueError(
                    f"Another process says that it is worker {table.index}, too: give each its own task index in "
                    "TF_CONFIG, and the same addresses."
                )
            for i in liveness.find_failed_at_start(table):
                liveness.check_facts(table, i)
                self._end(liveness.find_failure(table, now))
            if now >= deadline:
                raise ValueError(liveness.explain_unmet(table, timeout_secs, now))
            if now >= next_line:
                output.say(f"distloop: waiting for {table.name(unmet)}.", 0.1)
                next_line += 30
            time.sleep(0.05)
        with self._table_lock:
            self._table = self._table.replace(has_met=True)
        self._send_repeatedly()
        for i in self._table.others:
            liveness.check_facts(self._table, i)

    def watch(self, hang_timeout_secs: float, join_timeout_secs: float = 0.0) -> None:
        """Starts to end this process when another worker fails or falls silent, and to report an error of this one.

        Args:
            hang_timeout_secs: how long a worker may be silent, or training stand still; 0: without limit.
            join_timeout_secs: how long the phase JOINING may take; 0: without limit.
        """
        self._timeouts = Timeouts(hang_timeout_secs, join_timeout_secs)
        self._is_watching = True
        original_hook = sys.excepthook

        def report_error(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            if os.getpid() == self._pid:
                if _is_collective_error(error):
                    self._end_for_lost_worker()
                self.fail(f"{kind.__name__}: {error}")
            original_hook(kind, error, trace)

        sys.excepthook = self._report_error = report_error
        atexit.register(self._leave)
        threading.Thread(target=self._watch, name="distloop-watchdog", daemon=True).start()

    def fail(self, error: str) -> None:
        """Reports to the other workers that this one failed; only the first error counts."""
        self._read_step()
        if self._state == "alive":
            self._state, self._error = "failed", _shorten_error(error)
        self._is_watching = False
        self._send_repeatedly()

    def _leave(self) -> None:
        """Waits at exit until all workers are there: TensorFlow takes a worker that leaves early for a dead one."""
        if os.getpid() != self._pid:
            return
        if self._state == "ended":
            self._ending.acquire()  # forever: another thread ends the process
        if sys.excepthook is not self._report_error and (error := getattr(sys, "last_value", None)) is not None:
            self.fail(f"{type(error).__name__}: {error}")  # another hook handled it
        if self._state != "alive":
            return
        self._read_step()
        self._state, self._is_watching = "left", False
        self._send_repeatedly()
        deadline = time.monotonic() + (self._timeouts.hang_secs or _LEAVE_SECS)
        while liveness.find_running(self._table, time.monotonic()) and time.monotonic() < deadline:
            time.sleep(0.05)
        self._send_repeatedly()

    def _watch(self) -> None:
        """Ends the process when `liveness` says so."""
        now = time.monotonic()
        progress = Progress(-1, "", now)
        while True:
            time.sleep(_SEND_SECS / 2)
            last, now = now, time.monotonic()
            if now - last > liveness.SILENT_SECS:  # this process was suspended
                progress = progress._replace(since=now)
                with self._table_lock:
                    self._table = self._table.replace(awake_since=now)
            if not self._is_watching:
                return
            progress = progress.advance(self._last_step, self.phase, now)
            if verdict := liveness.judge(self._table, progress, self._timeouts, now):
                self._end(verdict.reason, with_stacks=verdict.is_hang)

    def _end_for_lost_worker(self) -> None:
        """Ends the process after an error of TensorFlow's collectives, once it is known which worker caused it."""
        deadline = time.monotonic() + 2 * liveness.SILENT_SECS
        while time.monotonic() < deadline:
            table, now = self._table, time.monotonic()
            reason = liveness.find_failure(table, now) or liveness.find_silence(table, liveness.SILENT_SECS, now)
            if reason:
                self._end(reason)
            time.sleep(0.1)
        others = self._table.describe_others(time.monotonic())
        output.say(f"distloop: this error of TensorFlow's is about the other workers: {others}.")

    def _end(self, reason: str, *, with_stacks: bool = False) -> NoReturn:
        """Ends the process at once: the main thread may hang in a collective that never completes."""
        self._ending.acquire()  # a second thread waits here for the end
        try:
            place = f"worker {self._table.index} (step {self._last_step}, {self.phase})"
            self._state, self._error = "ended", reason
            self._send_repeatedly()
            line = f"distloop: {reason}{'' if reason.endswith('?') else '.'} So {place} ends, too."
            output.say("\n".join([line, *([_stacks(), line] if with_stacks else [])]))
            deadline = time.monotonic() + _SAVE_SECS
            time.sleep(_LAST_MESSAGE_SECS)
            for thread in threading.enumerate():
                if thread.name.startswith("distloop-") and not thread.daemon:  # a checkpoint is being written
                    thread.join(max(0.0, deadline - time.monotonic()))
            threading.Timer(1.0, os._exit, [EXIT_CODE]).start()  # flushing waits for a reader
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(EXIT_CODE)

    def _read_step(self) -> None:
        with contextlib.suppress(Exception):  # the main thread may be changing the variable
            self._last_step = self.step()

    def _send_forever(self) -> None:
        while True:
            self._read_step()
            self._send()
            time.sleep(_SEND_SECS)

    def _send_repeatedly(self) -> None:
        """Sends three heartbeats at once, as datagrams may be lost."""
        for _ in range(3):
            self._send()
            time.sleep(0.05)

    def _send(self) -> None:
        table = self._table
        message = {
            "worker": table.index,
            "run": table.run,
            "state": self._state,
            "phase": self.phase,
            "step": self._last_step,
            "error": self._error,
            "has_met": table.has_met,
        }
        if not table.have_all_met():
            message |= {"facts": dict(table.facts), "heard": {str(i): beat.run for i, beat in table.beats.items()}}
        if refused := self._sockets.send(json.dumps(message).encode()):
            with self._table_lock:
                self._table = self._table.replace(refused=self._table.refused | refused)

    def _receive_forever(self) -> None:
        while True:
            try:
                i, beat = _parse(self._sockets.receive())
            except Exception:  # no datagram, or one of another program
                continue
            with self._table_lock:
                self._table = self._table.receive(i, beat)


class _Sockets:
    """The UDP sockets of a worker: one bound to its port, and one connected to each other worker."""

    def __init__(self, addresses: Sequence[str], index: int):
        self._addresses = {i: address for i, address in enumerate(addresses) if i != index}
        self._connected: dict[int, socket.socket] = {}
        port = int(addresses[index].rpartition(":")[2])
        self._bound = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        try:
            with socket.socket() as probe:  # TensorFlow would notice too late that the TCP port is taken
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(("", port))
            self._bound.bind(("", port))
        except OSError as error:
            raise ValueError(
                f"Port {port} of worker {index} ({addresses[index]}) cannot be used ({error.strerror}): is another run "
                "there? Give other ports, or end it."
            ) from None
        self._bound.settimeout(_SEND_SECS / 2)

    def receive(self) -> bytes:
        """Returns the next datagram; raises TimeoutError if none comes soon."""
        return self._bound.recv(65536)

    def send(self, data: bytes) -> set[int]:
        """Sends a datagram to each other worker; returns the workers on whose port no process listened last time."""
        refused = set()
        for i, address in self._addresses.items():
            try:
                if i not in self._connected:
                    host, _, port = address.rpartition(":")
                    connection = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
                    connection.connect((socket.gethostbyname(host), int(port)))
                    self._connected[i] = connection
                self._connected[i].send(data)
            except ConnectionRefusedError:  # the host's answer to the datagram before this one
                refused.add(i)
            except OSError:  # no name yet, or out of reach: the silence of the worker counts
                continue
        return refused


def _parse(data: bytes) -> tuple[int, Beat]:
    """Returns the worker index and the heartbeat in a datagram; raises any error if another program sent it."""
    m: dict[str, Any] = json.loads(data)
    texts = [m["run"], m["state"], m["phase"], m["error"]]
    if type(m["worker"]) is not int or type(m["step"]) is not int or not all(isinstance(text, str) for text in texts):
        raise ValueError
    heard, facts = ({str(k): str(v) for k, v in m.get(name, {}).items()} for name in ("heard", "facts"))
    run, state, phase, error = texts
    return m["worker"], Beat(run, state, phase, m["step"], error, bool(m["has_met"]), heard, facts, time.monotonic())


def _stacks() -> str:
    """Returns the stacks of all threads but distloop's, the main thread last."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    stacks = []
    for ident, frame in sorted(sys._current_frames().items(), key=lambda pair: pair[0] == main):
        if not names.get(ident, "").startswith("distloop-"):
            stacks.append(f"Thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}")
    return "\n".join(stacks)


def _clip(text: str) -> str:
    """Returns the text, cut to fit into a datagram; a hash keeps long texts different."""
    return text if len(text) <= 200 else f"{text[:200]}... ({hashlib.sha256(text.encode()).hexdigest()[:8]})"


def _shorten_error(error: str) -> str:
    """Returns the first line of an error, at most 500 characters, without TensorFlow's names of graph nodes."""
    line = (error.strip().splitlines() or [""])[0]
    line = re.sub(r"\{\{\w+ [^}]*\}\} ?", "", line)
    return (line if len(line) <= 500 else f"{line[:500]}...").rstrip(" .:")


def _is_collective_error(error: BaseException | None) -> bool:
    """Returns True if an error, or one of its causes, is what TensorFlow raises when another worker is gone."""
    for _ in range(20):  # an error may be its own cause
        if error is None:
            return False
        name = type(error).__name__
        is_lost = name in ("UnavailableError", "AbortedError", "CancelledError", "DeadlineExceededError")
        if is_lost or (hasattr(error, "error_code") and re.search("ollective|GRPC|RecvBuf", str(error))):
            return True
        error = error.__cause__ or error.__context__
    return False

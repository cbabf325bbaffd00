"""Heartbeats between workers: exchanges steps and phases, and ends this process when another worker fails.

    heartbeat = Heartbeat(["10.0.0.1:4000", "10.0.0.2:4000"], index=0, facts={"TensorFlow": "2.21.0"})
    heartbeat.meet(timeout_secs=300)            # until all workers are there
    heartbeat.watch(hang_timeout_secs=600)      # from now on this process ends when another one fails or falls silent
    heartbeat.phase = TRAINING

Twice a second each worker sends a message to the chief, and the chief one to each worker, over TCP (`star`); `liveness`
decides who failed. This works where TensorFlow waits for ever: before the workers have joined, and inside a collective
that never completes. TensorFlow's own coordination service is not used: it ends processes by itself and names nobody.
"""

import atexit
import contextlib
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from types import TracebackType
from typing import Any, NoReturn

from distloop.distributed import liveness, output
from distloop.distributed.liveness import Liveness, Progress, Timeouts, describe_facts, shorten
from distloop.distributed.star import Star

EXIT_CODE = 76  # EX_PROTOCOL of sysexits.h, "remote error": another worker was the first to fail

_GRAPH_ERROR = "Graph execution error:"  # the first line of TensorFlow's errors in a function
_SEND_SECS = 0.5
_MEET_SECS = 0.05  # from one message to the next until all have met; longer with more than 50 workers
_LAST_MESSAGE_SECS = 1.0  # for the worker that failed to end first
_GONE_MESSAGE_SECS = 0.2  # for other workers to hear why this one ends, where one has ended already
_SAVE_SECS = 60.0  # for a checkpoint that is being written
_LEAVE_SECS = 600.0  # that a worker waits for the others at the end of its program, without a hang_timeout


class Heartbeat:
    """Sends this worker's heartbeat and receives those of the others, in threads of its own.

    Attributes:
        phase: what this worker is doing, in a word or two.
        step: returns its global step.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        index: int,
        facts: Mapping[str, str],
        *,
        secret: str = "",
        secret_names: Collection[str] = (),
    ):
        """Opens the port and starts to send.

        Args:
            addresses: `host:port` of every worker, the chief first.
            index: of this worker.
            facts: settings that must be the same on all workers, by name.
            secret: signs all messages, the same on all workers; "": none, and any process on their hosts is trusted.
            secret_names: facts that are compared and never shown.

        Raises:
            ValueError: if the port is taken.
        """
        self.phase = "starting"
        self.step: Callable[[], int] = lambda: 0
        self._last_step = 0  # read by the sending thread: if a device hangs, reading the step may hang, too
        self._facts = describe_facts(facts, secret, secret_names)
        self._differences: dict[int, str] = {}  # on the chief: workers with other facts, each with a sentence
        self._refusal = ""  # the reason why the run cannot begin, the same on all workers
        self._missing = ""  # the workers that the chief waits for, in words
        self._is_over = False  # all workers have come to the end of their programs
        self._table = Liveness(tuple(addresses), index)
        self._table_lock = threading.RLock()  # held to replace the table
        self._pid = os.getpid()  # a fork is another process
        self._state, self._error, self._is_hang = "alive", "", False
        self._timeouts = Timeouts()
        self._ending = threading.Lock()  # taken once, forever
        self._star = Star(addresses, index, secret, self._facts, self._receive)
        threading.Thread(target=self._send_forever, name="distloop-heartbeat", daemon=True).start()

    def meet(self, timeout_secs: float) -> None:
        """Waits until every worker is there, and checks that they were started alike.

        Raises:
            ValueError: if a worker did not come, or was started with other facts.
        """
        deadline, next_line = time.monotonic() + timeout_secs, time.monotonic() + 5
        while not self._table.has_met:
            table, now = self._table, time.monotonic()
            missing = table.find_missing(now)
            if table.worker == 0 and not missing:  # all can hear it
                self._refusal = next((sentence for _, sentence in sorted(self._differences.items())), "")
            if self._refusal:
                self._send()
                raise ValueError(self._refusal)
            if verdict := liveness.find_failure(table):
                self._end(verdict.reason)
            if table.worker == 0 and not missing:
                self._begin()
                self._send()
                continue
            names = table.name(missing) or self._missing or "all others"
            causes = "; ".join(self._star.causes.values())
            if now >= deadline:
                raise ValueError(
                    f"{names} did not come within {timeout_secs:g} seconds{f' ({causes})' if causes else ''}, and "
                    f"worker {table.worker} waits no longer: look at their output, and whether each can reach the "
                    "addresses of all by TCP, or set a longer start_timeout."
                )
            if now >= next_line:
                output.say(f"distloop: waiting for {names}{f'; {causes}' if causes else ''}.", 0.1)
                next_line += 30
            time.sleep(0.05)

    def _begin(self) -> None:
        """Closes the port for TensorFlow, if all workers are there still."""
        with self._table_lock:
            if self._table.find_missing(time.monotonic()):
                return
            self._star.close_port()
            self._table = self._table._replace(has_met=True)

    def watch(self, hang_timeout_secs: float, join_timeout_secs: float = 0.0) -> None:
        """Starts to end this process when another worker fails or falls silent, and to report an error of this one.

        Args:
            hang_timeout_secs: how long a worker may be silent, or training stand still; 0: without limit.
            join_timeout_secs: how long the phase JOINING may take; 0: without limit.
        """
        self._timeouts = Timeouts(hang_timeout_secs, join_timeout_secs)
        original_hook = sys.excepthook

        def report_error(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            if os.getpid() == self._pid:
                if is_collective_error(error):
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
        self._send()

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
        self._state = "left"
        self._send()
        deadline = time.monotonic() + (self._timeouts.hang_secs or _LEAVE_SECS)
        while self._has_to_stay() and time.monotonic() < deadline:
            time.sleep(0.05)
        self._is_over = True
        self._send()

    def _has_to_stay(self) -> bool:
        """Returns whether a worker runs that can be heard: the chief decides, the others wait for its word."""
        table, now = self._table, time.monotonic()
        states = [table.beats[i].state for i in table.heard if not table.is_silent(i, now)]
        return "alive" in states or (table.worker > 0 and "left" in states and not self._is_over)

    def _watch(self) -> None:
        """Ends the process when `liveness` says so."""
        now = time.monotonic()
        progress = Progress(-1, "", now)
        while True:
            time.sleep(_SEND_SECS / 5)
            last, now = now, time.monotonic()
            if now - last > liveness.SILENT_SECS:  # this process was suspended
                progress = progress._replace(since=now)
                with self._table_lock:
                    self._table = self._table._replace(awake_since=now)
            if self._state != "alive":
                return
            progress = progress.advance(self._last_step, self.phase, now)
            if verdict := liveness.judge(self._table, progress, self._timeouts, now):
                self._end(verdict.reason, with_stacks=verdict.is_hang)

    def _end_for_lost_worker(self) -> None:
        """Ends the process after an error of TensorFlow's collectives, once it is known which worker caused it."""
        deadline = time.monotonic() + 2 * liveness.SILENT_SECS
        while time.monotonic() < deadline:
            table, now = self._table, time.monotonic()
            verdict = liveness.find_failure(table)
            if reason := verdict.reason if verdict else liveness.find_silence(table, liveness.SILENT_SECS, now):
                self._end(reason)
            time.sleep(0.1)
        others = self._table.describe_others(time.monotonic())
        output.say(f"distloop: this error of TensorFlow's is about the other workers: {others}.")

    def _end(self, reason: str, *, with_stacks: bool = False) -> NoReturn:
        """Ends the process at once: the main thread may hang in a collective that never completes."""
        self._ending.acquire()  # a second thread waits here for the end
        try:
            place = f"worker {self._table.worker} (step {self._last_step}, {self.phase})"
            self._state, self._error, self._is_hang = "ended", reason, with_stacks
            self._send()
            line = f"distloop: {reason}{'' if reason.endswith('?') else '.'} So {place} ends, too."
            output.say("\n".join([line, *([_stacks(), line] if with_stacks else [])]))
            deadline = time.monotonic() + _SAVE_SECS
            time.sleep(_GONE_MESSAGE_SECS if self._table.closed else _LAST_MESSAGE_SECS)
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
        meet_secs = _MEET_SECS * max(1.0, len(self._table.addresses) / 50)
        while True:
            self._read_step()
            self._send()
            time.sleep(_SEND_SECS if self._table.has_met else min(_SEND_SECS, meet_secs))

    def _send(self) -> None:
        table, now = self._table, time.monotonic()
        message: dict[str, Any] = {"state": self._state, "phase": self.phase, "step": self._last_step}
        message |= {"error": self._error, "is_hang": self._is_hang}
        if table.worker == 0:
            message |= {"others": table.tell(now), "has_met": table.has_met, "is_over": self._is_over}
            message |= {"missing": table.name(table.find_missing(now))[:200], "refusal": self._refusal}
        self._star.send(message)

    def _receive(self, i: int, message: dict[str, Any] | None) -> None:
        """Takes a message of worker `i`; None: it has closed its connection."""
        now = time.monotonic()
        with self._table_lock:
            if message is None:
                self._table = self._table.lose(i)
            elif "state" in message:
                self._table = self._table.receive(i, liveness.read_beat(message, now))
            if message is None or self._table.worker == 0:
                if message and "difference" in message:
                    self._differences.pop(i, None)  # of a process that was there before
                    if message["difference"]:
                        self._differences[i] = self._facts.explain_difference(i, *message["difference"])
                return
            self._refusal = shorten(message.get("refusal", ""), 1000)
            self._missing = shorten(message.get("missing", ""), 200)
            self._is_over |= bool(message.get("is_over"))
            self._table = self._table.learn(message.get("others", {}), now)
            if message.get("has_met") and not self._table.has_met:
                self._begin()


def _stacks() -> str:
    """Returns the stacks of all threads but distloop's, the main thread last."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    stacks = []
    for ident, frame in sorted(sys._current_frames().items(), key=lambda pair: pair[0] == main):
        if not names.get(ident, "").startswith("distloop-"):
            stacks.append(f"Thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}")
    return "\n".join(stacks)


def _shorten_error(error: str) -> str:
    """Returns the first line of an error, at most 400 bytes, without what TensorFlow says of the graph's nodes."""
    line, *others = error.strip().splitlines() or [""]
    if line.endswith(_GRAPH_ERROR):  # the error comes after the node and the lines that made it
        line = next((other for other in others if not re.match(r"\s|$|Detected at|File |<stack", other)), line)
    return shorten(re.sub(r"\{\{\w+ [^}]*\}\} ?", "", line).rstrip(" .:"), 400)


def is_collective_error(error: BaseException | None) -> bool:
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

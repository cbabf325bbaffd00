"""Heartbeats between workers: where each is, and the end of this process when another worker fails.

    heartbeat = Heartbeat(["10.0.0.1:4000", "10.0.0.2:4000"], index=0, facts={"TensorFlow": "2.21.0"})
    heartbeat.meet(timeout_secs=300)            # until all workers are there
    heartbeat.watch(hang_timeout_secs=600)      # from now on this process ends when another one fails or falls silent
    heartbeat.phase = TRAINING

Twice a second each worker sends a UDP datagram to its `neighbors`, up to 8 workers to all others, to the port of the
same number as the TCP port that TensorFlow uses. So heartbeats work where TensorFlow waits forever: before the workers
have joined, inside a collective that never completes, and after the chief is gone. `messages` writes and signs,
`datagrams` carries, and `liveness` decides who failed. It does not know TensorFlow.
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
from typing import NoReturn

from distloop.distributed import liveness, output
from distloop.distributed.datagrams import Datagrams
from distloop.distributed.liveness import Beat, Progress, Table, Timeouts
from distloop.distributed.messages import Messages, NotCounted, shorten

EXIT_CODE = 76  # EX_PROTOCOL of sysexits.h, "remote error": another worker was the first to fail

_GRAPH_ERROR = "Graph execution error:"  # the first line of TensorFlow's errors in a function
_SEND_SECS = 0.5
_MEET_SECS = 0.1  # from one heartbeat to the next until all have met
_NEWS_SECS = 0.05  # from one heartbeat to the next while workers meet
_LAST_MESSAGE_SECS = 1.0  # for other workers to hear why this one ends, and for the one that failed to end first
_GONE_MESSAGE_SECS = 0.2  # for the same where one has ended already
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
        self._messages = Messages(index, secret)
        digests = self._messages.describe_facts(facts, secret_names)
        self._table = Table(tuple(addresses), index, self._messages.run, digests)
        self._table_lock = threading.Lock()  # held to replace the table
        self._pid = os.getpid()  # a fork is another process
        self._state, self._error, self._is_hang = "alive", "", False
        self._timeouts = Timeouts()
        self._is_watching = False
        self._ending = threading.Lock()  # taken once, forever
        self._has_news = threading.Event()  # that others wait for
        self._strangers: dict[str, str] = {}  # by host, why its datagrams do not count
        heard = self._table.neighbors
        self._datagrams = Datagrams(addresses, index, lambda i: self._table.is_silent(i, time.monotonic()), heard)
        for target in (self._send_forever, self._receive_forever):
            threading.Thread(target=target, name="distloop-heartbeat", daemon=True).start()

    def meet(self, timeout_secs: float) -> None:
        """Waits until every worker hears all its neighbors, and checks that they were started alike.

        Raises:
            ValueError: if a worker did not come, or was started with other facts.
        """
        deadline, next_line = time.monotonic() + timeout_secs, time.monotonic() + 5
        while unmet := liveness.find_unmet(self._table, time.monotonic()):
            table, now = self._table, time.monotonic()
            ended = liveness.find_ended(table)
            if failure := liveness.find_reported_failure(table) or (ended.error if ended else ""):
                self._check_facts()
                self._end(failure)
            self._rise(lambda table: liveness.rise(table, time.monotonic()))
            if now >= deadline:
                raise ValueError(liveness.explain_unmet(table, timeout_secs, self._find_causes(unmet), now))
            if now >= next_line:
                if table.has_duplicate(now):  # for seconds: a recorded datagram does not end this process
                    raise ValueError(
                        f"Another process says that it is worker {table.index}, too: give each its own task index in "
                        "TF_CONFIG, and the same addresses."
                    )
                causes = "".join(f"; {cause}" for cause in self._find_causes(unmet))
                output.say(f"distloop: waiting for {liveness.name_missing(table, now)}{causes}.", 0.1)
                next_line += 30
            time.sleep(0.05)
        with self._table_lock:
            self._table = liveness.end_meeting(self._table)
        self._send_repeatedly()
        self._check_facts()

    def _check_facts(self) -> None:
        for i in sorted(self._table.beats):
            liveness.check_facts(self._table, i)

    def _find_causes(self, unmet: Sequence[int]) -> list[str]:
        """Returns what may keep workers from being heard."""
        problems, strangers = dict(self._datagrams.problems), dict(self._strangers)  # other threads change them
        causes = [f"worker {i}: {problems[i]}" for i in unmet if i in problems]
        return causes + [f"datagrams of {host} do not count: {why}" for host, why in strangers.items()]

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
        self._rise(lambda table: table.replace(level=0))
        self._state, self._is_watching = "left", False
        self._send_repeatedly()
        deadline = time.monotonic() + (self._timeouts.hang_secs or _LEAVE_SECS)
        while self._table.level < self._table.top_level and time.monotonic() < deadline:
            time.sleep(0.05)
            self._rise(lambda table: table.replace(level=liveness.level_at_end(table, time.monotonic())))
        self._send_repeatedly()

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
            self._state, self._error, self._is_hang = "ended", reason, with_stacks
            self._send_repeatedly()
            line = f"distloop: {reason}{'' if reason.endswith('?') else '.'} So {place} ends, too."
            output.say("\n".join([line, *([_stacks(), line] if with_stacks else [])]))
            deadline = time.monotonic() + _SAVE_SECS
            time.sleep(_GONE_MESSAGE_SECS if self._table.refused else _LAST_MESSAGE_SECS)
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

    def _rise(self, change: Callable[[Table], Table]) -> None:
        """Changes the table; neighbors hear of a new level at once."""
        with self._table_lock:
            before, self._table = self._table, change(self._table)
        if self._table.level != before.level:
            self._has_news.set()

    def _send_forever(self) -> None:
        while True:
            self._read_step()
            self._send()
            if self._has_news.wait(_SEND_SECS if self._table.has_met else _MEET_SECS):
                time.sleep(_NEWS_SECS)
            self._has_news.clear()

    def _send_repeatedly(self) -> None:
        """Sends three heartbeats at once, as datagrams may be lost."""
        for _ in range(3):
            self._send()
            time.sleep(0.05)

    def _send(self) -> None:
        state, table, now = self._state, self._table, time.monotonic()  # the table last: its level is set first
        beat = Beat(
            *(table.run, state, self.phase, self._last_step, self._error, table.has_met, {}, table.facts, now),
            *(table.level, "" if table.has_met else liveness.name_missing(table, now), self._is_hang),
        )
        if refused := self._datagrams.send(self._messages.write(beat, table, now)):
            with self._table_lock:
                self._table = self._table.replace(refused=self._table.refused | refused)

    def _receive_forever(self) -> None:
        while True:
            source = ""
            try:
                data, source = self._datagrams.receive()
                self._receive(data, source)
            except NotCounted as error:
                if source in self._strangers or len(self._strangers) < 3:
                    self._strangers[source] = str(error)
            except Exception:  # no datagram, or one of another program
                continue

    def _receive(self, data: bytes, source: str) -> None:
        if not self._messages.is_signed and not self._datagrams.is_listed(source):
            raise NotCounted("no worker has this address; with a DISTLOOP_SECRET on all, addresses do not matter")
        now = time.monotonic()
        letter = self._messages.read(data, now)
        self._strangers.pop(source, None)  # its name was looked up since
        with self._table_lock:
            before = self._table
            if letter.beat is None:
                self._table = before.greet(letter.worker, letter.run, now)
            else:
                self._table = before.receive(letter.worker, letter.beat)
            has_news = self._table.has_news_since(before)
        if has_news:
            self._has_news.set()


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

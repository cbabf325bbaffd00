"""Heartbeats between workers: exchanges steps and phases, and ends this process when another worker fails.

    heartbeat = Heartbeat(["10.0.0.1:4000", "10.0.0.2:4000"], index=0, facts={"TensorFlow": "2.21.0"})
    heartbeat.meet(start_timeout=300, hang_timeout=600)     # until all workers are there
    heartbeat.phase = TRAINING                              # this process ends when another one fails or falls silent

Twice a second each worker sends a message to the chief, and the chief one to each worker, over TCP (`star`). The chief
decides who failed (`liveness`) and sends it to all; the others decide only whether the chief is gone or silent. This
works where TensorFlow waits for ever: before the workers have joined, and inside a collective that never completes.
TensorFlow's own coordination service is not used: it ends processes by itself and names nobody.
"""

import atexit
import contextlib
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, NoReturn

from distloop.log import reason_of, say_soon
from distloop.workers import liveness
from distloop.workers.liveness import Beat, explain_difference, find_failure, read_beat, shorten
from distloop.workers.star import Star

EXIT_CODE = 76  # EX_PROTOCOL of sysexits.h, "remote error": another worker was the first to fail

_SEND_SECS = 0.5
_LAST_MESSAGE_SECS = 0.5  # for the others to hear why, and for the worker that failed to end first
_SAVE_SECS = 60.0  # for a checkpoint that is being written
_END_SECS = 10.0  # at exit, for a thread that reads the step: on a busy machine it takes a while
_LEAVE_SECS = 600.0  # that a worker waits for the others at the end of its program, without a hang_timeout


class Heartbeat:
    """Sends this worker's heartbeat and receives those of the others, in threads of its own.

    Attributes:
        phase: what this worker is doing, in a word or two.
        step: returns its global step.
    """

    def __init__(self, addresses: Sequence[str], index: int, facts: Mapping[str, str], *, secret: str = ""):
        """Opens the port and starts to send.

        Args:
            addresses: `host:port` of every worker, the chief first.
            index: of this worker.
            facts: settings that must be the same on all workers, by name; without secrets, as they are sent.
            secret: signs all messages, the same on all workers; "": none, and any process on their hosts is trusted.

        Raises:
            ValueError: if the port is taken.
        """
        self.phase = "starting"
        self.step: Callable[[], int] = lambda: 0
        self._last_step = 0  # read in a thread of its own: if a device hangs, reading the step may hang, too
        self._index, self._names = index, [f"{i} ({address})" for i, address in enumerate(addresses)]
        self._facts = facts
        self._differences: dict[int, str] = {}  # on the chief: a sentence for each worker with other facts
        self._beats: dict[int, Beat] = {}  # of the workers that are heard, on the chief its own, too
        # What the chief reports to all: whether they have met, and have come to the end of their programs; for whom it
        # waits; why the run cannot begin; why it has to end.
        self._status: dict[str, Any] = {"has_met": False, "is_over": False, "is_hang": False}
        self._status |= {"missing": "", "refusal": "", "reason": ""}
        self._state, self._error = "alive", ""
        self._timeouts = 0.0, 0.0  # hang_timeout and start_timeout, once all have met
        self._lock = threading.RLock()  # held while beats are received or checked
        self._is_ending = False
        self._pid = os.getpid()  # a fork is another process
        hello = self._message() | ({"facts": dict(facts)} if index else {})
        with self._lock:  # the first message may come before the assignment
            self._star = Star(addresses, index, secret, hello, self._receive)
        self._has_ended, targets = threading.Event(), (self._read_steps, self._watch)
        self._threads = [threading.Thread(target=t, name="distloop-heartbeat", daemon=True) for t in targets]
        for thread in self._threads:
            thread.start()
        atexit.register(self._end_threads)  # after `_leave`, which is registered later

    def meet(self, start_timeout: float, hang_timeout: float = 0.0) -> None:
        """Waits until every worker is there, and checks that they were started alike.

        From then on an error of this worker is reported to the others.

        Args:
            start_timeout: seconds to wait, and then for the phase JOINING.
            hang_timeout: seconds for which a worker may be silent, or training stand still; 0: without limit.

        Raises:
            ValueError: if a worker did not come, or was started with other facts.
        """
        deadline, next_line = time.monotonic() + start_timeout, time.monotonic() + 5
        while not self._status["has_met"]:
            if refusal := self._status["refusal"]:
                raise ValueError(refusal)
            now, missing = time.monotonic(), self._status["missing"] or "all others"
            causes = "; ".join(self._star.causes.values())
            if now >= deadline:
                raise ValueError(
                    f"{missing} did not come within {start_timeout:g} seconds{f' ({causes})' if causes else ''}, and "
                    f"worker {self._index} waits no longer: look at their output, and whether each can reach the "
                    "addresses of all by TCP, or set a longer start_timeout."
                )
            if now >= next_line:
                say_soon(f"waiting for {missing}{f'; {causes}' if causes else ''}.", 0.1)
                next_line += 30
            time.sleep(0.05)
        self._timeouts = hang_timeout, start_timeout
        original_hook = sys.excepthook

        def report_error(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            if os.getpid() == self._pid:
                if is_collective_error(error):
                    self._wait_for_verdict()
                self.fail(f"{kind.__name__}: {error}")
            original_hook(kind, error, trace)

        sys.excepthook = self._report_error = report_error
        atexit.register(self._leave)

    def fail(self, error: str) -> None:
        """Reports to the other workers that this one failed; only the first error counts."""
        self._read_step()
        self._finish("failed", shorten(reason_of(error), 400))

    def _finish(self, state: str, error: str) -> None:
        with self._lock:
            if self._state == "alive":
                self._state, self._error = state, error
            self._update_status(time.monotonic())
            self._star.send(self._message())

    def _leave(self) -> None:
        """Waits at exit until all workers are there: TensorFlow takes a worker that leaves early for a dead one."""
        if os.getpid() != self._pid:
            return
        while self._is_ending:  # another thread ends the process
            time.sleep(1)
        if sys.excepthook is not self._report_error and (error := getattr(sys, "last_value", None)) is not None:
            self.fail(f"{type(error).__name__}: {error}")  # another hook handled it
        if self._state != "alive":
            return
        self._read_step()
        self._finish("left", "")
        deadline = time.monotonic() + (self._timeouts[0] or _LEAVE_SECS)
        # The chief decides; the others wait for its word as long as they hear it.
        while not self._status["is_over"] and self._beats[0].is_heard(now := time.monotonic()) and now < deadline:
            time.sleep(0.05)
        self._star.send(self._message())

    def _end_threads(self) -> None:
        """Ends the threads at exit: one that reads the step would call TensorFlow while the process takes it down."""
        self._has_ended.set()
        for thread in self._threads:
            thread.join(_END_SECS)

    def _wait_for_verdict(self) -> None:
        """Waits after an error of TensorFlow's collectives: once it is known who failed, the process ends."""
        time.sleep(4 * liveness.SILENT_SECS)  # after a cut of 4 s, TCP sends the end of a connection 6 s late
        with self._lock:
            workers = liveness.describe_all(self._beats, time.monotonic())
        say_soon(f"this error of TensorFlow's is about the other workers; {workers}.")

    def _read_steps(self) -> None:
        while not self._has_ended.wait(_SEND_SECS / 5):
            self._read_step()

    def _read_step(self) -> None:
        with contextlib.suppress(Exception):  # the main thread may be changing the variable
            self._last_step = self.step()

    def _watch(self) -> None:
        """Sends heartbeats, and ends the process once it is known that another worker failed."""
        checked_at = sent_at = time.monotonic()
        while not self._has_ended.wait(_SEND_SECS / 5):
            now = time.monotonic()
            with self._lock:
                if now - checked_at > liveness.SILENT_SECS:  # this process was suspended, and could not hear
                    self._beats = {i: b._replace(received_at=now, progress_at=now) for i, b in self._beats.items()}
                if self._update_status(now) or now >= sent_at + _SEND_SECS:
                    self._star.send(self._message())
                    sent_at = now
                reason, is_hang = self._status["reason"], self._status["is_hang"]
            if reason and self._state == "alive":
                self._end(reason, with_stacks=is_hang)
            checked_at = now

    def _update_status(self, now: float) -> bool:
        """Updates what the chief reports to all by the last heartbeats; returns whether that has changed."""
        status, before = self._status, dict(self._status)
        if status["refusal"]:
            return False
        if self._index == 0:
            self._keep_beat(0, self._message(), now)
        if not status["reason"] and (verdict := find_failure(self._beats, *self._timeouts, now)):
            status |= {"reason": verdict.reason, "is_hang": verdict.is_hang}
        elif self._index == 0 and not status["has_met"]:
            heard = {i for i, beat in self._beats.items() if beat.is_heard(now)}
            missing = [name for i, name in enumerate(self._names) if i not in heard]
            names = f"worker{'s' * (len(missing) > 1)} {', '.join(missing)}" if missing else ""
            status["missing"] = shorten(names, 200)
            if not missing:
                status["refusal"] = next((text for _, text in sorted(self._differences.items()) if text), "")
            if not (missing or status["refusal"]):
                self._star.close_port()  # for TensorFlow
                status["has_met"] = True
        elif self._index == 0:
            status["is_over"] = not any(beat.state == "alive" and beat.is_heard(now) for beat in self._beats.values())
        return status != before

    def _message(self) -> dict[str, Any]:
        beat = {"state": self._state, "phase": self.phase, "step": self._last_step, "error": self._error}
        return {**beat, **({} if self._index else {"status": self._status})}

    def _keep_beat(self, i: int, message: Mapping[str, Any], now: float) -> None:
        before = None if self._index else self._beats.get(i)  # the chief alone checks who stands still
        self._beats[i] = read_beat(f"worker {self._names[i]}", message, now, before)

    def _receive(self, i: int, message: dict[str, Any] | None) -> None:
        """Takes a message of worker `i`; None: it has closed its connection."""
        with self._lock:
            if message is not None:
                self._keep_beat(i, message, time.monotonic())
                if self._index:
                    self._hear(message["status"])
                elif "facts" in message:
                    self._differences[i] = explain_difference(self._facts, message["facts"], i)
            elif i in self._beats and self._beats[i].state == "alive":
                if self._status["has_met"]:
                    self._beats[i] = self._beats[i]._replace(state="gone")
                else:  # it may come back
                    del self._beats[i]

    def _hear(self, status: Mapping[str, Any]) -> None:
        """Takes what the chief reports; texts are escaped and cut, before anything prints them."""
        if status["has_met"]:
            self._star.close_port()  # for TensorFlow
        for name, value in self._status.items():
            self._status[name] = shorten(status[name], 2000) if isinstance(value, str) else bool(status[name])

    def _end(self, reason: str, *, with_stacks: bool) -> NoReturn:
        """Ends the process at once: the main thread may hang in a collective that never completes."""
        self._is_ending = True
        try:
            self._finish("failed", shorten(reason, 400))
            here = f"worker {self._index} (step {self._last_step}, {self.phase})"
            line = f"{reason}{'' if reason.endswith('?') else '.'} So {here} ends, too."
            say_soon("\n".join([line, *([_stacks(), f"distloop: {line}"] if with_stacks else [])]))
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


def _stacks() -> str:
    """Returns the stacks of all threads but distloop's, the main thread last."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    stacks = []
    for ident, frame in sorted(sys._current_frames().items(), key=lambda pair: pair[0] == main):
        if not names.get(ident, "").startswith("distloop-"):
            stacks.append(f"Thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}")
    return "\n".join(stacks)


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

"""Local processes: starts workers together, prints their output, stops all when one fails; without TensorFlow.

    signals = processes.Signals()
    with processes.Guard() as guard:
        group = [processes.Process(i, command, environment, cores=[], guard=guard) for i in range(2)]
        outcome = processes.Group(group, signals, 10, inbox, leaves_at).wait()

It does not know flags, hosts or TF_CONFIG.
"""

import contextlib
import functools
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing import connection
from typing import Any, NamedTuple

from distloop.launcher import consoles
from distloop.launcher.inbox import Inbox
from distloop.workers.heartbeat import EXIT_CODE as FOLLOWER_EXIT_CODE
from distloop.workers.preemption import EXIT_CODE as SAVED_EXIT_CODE

FOLLOW_SECS = 60  # beyond the grace time, for the others when one saved and left: they may be writing a checkpoint
FAIL_SECS = 5  # beyond the grace time, for the worker that failed when another one has ended because of it
_REST_SECS = 2.0  # that the end of a process waits for its last lines
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_LOST_SIGNALS = (signal.SIGHUP, signal.SIGPIPE)  # the terminal is closed, or nobody reads the output any more

# Kills the process groups of the workers at the end of its input, which comes however the launcher ends. It runs as
# another program in a session of its own: neither Ctrl-C nor `pkill -f distloop.launch` ends it with the launcher.
_GUARD = """
import os, signal, sys
for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN)
groups = set()
for line in sys.stdin:
    (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
for group in groups:
    try:
        os.killpg(group, signal.SIGKILL)
    except OSError:
        pass
"""


def log(text: str) -> None:
    """Writes a line of the launcher to stderr."""
    consoles.write(2, f"distloop.launch: {text}\n".encode())


_children: dict[int, "subprocess.Popen[bytes]"] = {}  # that run, by process number


def _reap() -> None:
    """Removes ended children, also those that the launcher inherited as process 1 of a container."""
    with contextlib.suppress(ChildProcessError):  # no child is left
        while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            if (child := _children.get(ended.si_pid)) is None:
                os.waitpid(ended.si_pid, 0)
            elif child.poll() is not None:  # else another thread is about to
                del _children[ended.si_pid]


def wait(sources: Sequence[Any], secs: float) -> list[Any]:
    """Returns the files that can be read, once there is one; [] after `secs`, which may be infinite."""
    return connection.wait(sources, None if secs == math.inf else max(0.0, secs))


class Signals:
    """The signals to this process, as a pipe: Python writes the number of each signal to it."""

    def __init__(self) -> None:
        """Catches the signals that stop the launcher, for the rest of the process."""
        self._pipe, wakeup = os.pipe()
        for end in (self._pipe, wakeup):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
        for number in (*_STOP_SIGNALS, *_LOST_SIGNALS, signal.SIGCHLD):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
                signal.signal(number, lambda *_: None)

    def fileno(self) -> int:
        """Returns the descriptor to wait for."""
        return self._pipe

    def read(self) -> list[signal.Signals]:
        """Returns the signals that came since the last call, after removing children that have ended."""
        numbers: list[signal.Signals] = []
        with contextlib.suppress(BlockingIOError):
            numbers += map(signal.Signals, os.read(self._pipe, 1024))
        if signal.SIGCHLD in numbers:
            _reap()
        return [number for number in numbers if number != signal.SIGCHLD]

    def wait(self, secs: float) -> signal.Signals | None:
        """Returns the first signal that stops the launcher; None if none comes within `secs`."""
        deadline = time.monotonic() + secs
        while (remaining_secs := deadline - time.monotonic()) > 0:
            wait([self], remaining_secs)
            if numbers := self.read():
                return numbers[0]
        return None


class Guard:
    """A process that kills the workers when the launcher has ended, or on exit from the context.

    Attributes:
        pipe: where a worker writes a plus sign and its process group, as the first thing that it does.
    """

    def __enter__(self) -> "Guard":
        read_end, self.pipe = os.pipe()
        command, quiet = [sys.executable, "-I", "-S", "-c", _GUARD], subprocess.DEVNULL
        self._process = subprocess.Popen(command, stdin=read_end, stdout=quiet, stderr=quiet, start_new_session=True)
        _children[self._process.pid] = self._process
        os.close(read_end)
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.pipe)
        self._process.wait()

    def remove(self, group: int) -> None:
        """Removes a process group that has ended."""
        with contextlib.suppress(OSError):  # if the guard has died, SIGPIPE ends the run
            os.write(self.pipe, b"-%d\n" % group)


class Process:
    """A worker in a session of its own: its children end with it, and Ctrl-C reaches it through the launcher only."""

    def __init__(
        self,
        index: int,
        command: list[str],
        environment: dict[str, str],
        *,
        cores: Sequence[int],
        guard: Guard,
        descriptors: Sequence[int] = (),
        write: Callable[[int, bytes], None] = consoles.write,
    ):
        """Starts the process.

        Args:
            index: of the worker, shown in front of its lines.
            command: program and arguments.
            environment: all its environment variables.
            cores: cores on which it may run; empty: any.
            guard: kills it if the launcher ends.
            descriptors: that it inherits.
            write: shows a line of its stdout (1) or stderr (2).
        """
        self.index, self._guard = index, guard
        self.code: int | None = None  # as in a shell, 128 + n for signal n; None while it runs
        self.how = ""  # it ended, as in `with exit code 1`
        self.is_shown = True  # what it prints
        self.was_signalled = False  # or killed, by the launcher

        def set_up() -> None:  # in the new process, before the program; safe: takes no lock that a thread may hold
            os.write(guard.pipe, b"+%d\n" % os.getpid())  # first: a launcher that dies now leaves no process behind
            if cores:
                os.sched_setaffinity(0, cores)

        self._process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            pass_fds=descriptors,
            preexec_fn=set_up,
        )
        _children[self._process.pid] = self._process
        pipes = ((1, self._process.stdout), (2, self._process.stderr))
        prefix = f"[worker {index}] ".encode()

        def show(number: int, line: bytes) -> None:
            if self.is_shown:
                write(number, line)

        self._showing = [
            consoles.show_lines(pipe, prefix, functools.partial(show, number)) for number, pipe in pipes if pipe
        ]

    def signal_once(self, number: int) -> None:
        """Sends the first signal only, and not to the worker's children, which it may need to save."""
        if not self.was_signalled:
            self._process.send_signal(number)
        self.was_signalled = True

    def kill(self) -> None:
        """Kills the process and its children."""
        self.was_signalled = True
        self._kill_group()

    def _kill_group(self) -> None:
        with contextlib.suppress(OSError):  # none is left
            os.killpg(self._process.pid, signal.SIGKILL)

    def has_ended(self) -> bool:
        """Returns True if the process has ended; then kills its children, and shows its last lines."""
        code = self._process.poll()
        if code is not None:
            self.code = code if code >= 0 else 128 - code
            self.how = f"with exit code {code}" if code >= 0 else f"by signal {-code} ({signal.strsignal(-code)})"
            self._kill_group()
            self._guard.remove(self._process.pid)
            for thread in self._showing:  # a process that has escaped may hold the pipe
                thread.join(_REST_SECS)
            self.is_shown = False
        return code is not None


class GroupEnd(NamedTuple):
    """How a group of processes ended."""

    code: int  # of the worker that failed first, else 75 or 76 if one ended so, else 0; 128 + n if killed for signal n
    is_crash: bool  # a worker failed, and nobody asked it to end
    is_last: bool = False  # the launcher got a signal to end
    failed: Sequence[int] = ()  # indices of the workers that failed by themselves, and not because another one had
    cause: str = ""  # which worker failed first, and how
    has_left_for_more: bool = False  # the launcher asked the processes to leave, as there are slots for more
    lost_at: float = 0.0  # when the first one ended; Unix, seconds
    leaving: Sequence[int] = ()  # indices of the workers that somebody else than the launcher asked to leave


class Group:
    """Processes that run together: the first failure stops the others, and signals are passed on."""

    def __init__(
        self,
        processes: Sequence[Process],
        signals: Signals,
        grace_secs: float,
        inbox: Inbox,
        leaves_at: Callable[[], float],
    ):
        """Takes processes that are running.

        Args:
            processes: which these are.
            signals: to the launcher.
            grace_secs: time from SIGTERM to SIGKILL for processes that are stopped.
            inbox: with the messages of the processes, read as they come.
            leaves_at: returns when they are to save and leave; asked again after each message.
        """
        self._processes, self._signals, self._grace_secs = processes, signals, grace_secs
        self._inbox, self._leaves_at = inbox, leaves_at
        self._failed: list[Process] = []  # by themselves, not because another one had
        self._lost_at = 0.0
        self._next_signal_kills = False  # SIGINT or SIGTERM has come once
        self._was_signalled = False  # the launcher, by any signal
        self._ends_are_expected = False  # a signal has come, or a worker saved and left: no end is a crash any more
        self._has_left_for_more = False
        self._second_signal = 0
        self._first_failed: Process | None = None
        self._follower: Process | None = None  # the first one that ended because another one had failed
        self._cause = ""  # which worker failed first, and how
        self._verdict = ""  # why the workers were stopped
        self._stop_at = self._kill_at = math.inf

    def wait(self) -> GroupEnd:
        """Returns how the processes ended, once all have."""
        while running := self._running():
            self._handle_events(running)
            self._handle_deadlines()
        self._handle_signals()
        if self._follower and not self._first_failed:  # no other one failed
            self._blame(self._follower, [])
        if self._verdict:
            log(self._verdict)
        leaving = [process for process in self._processes if process.index in self._inbox.leaving]
        code = self._first_failed.code if self._first_failed else max(process.code or 0 for process in self._processes)
        if self._was_signalled and self._inbox.step is None and code in [128 + number for number in _STOP_SIGNALS]:
            code = SAVED_EXIT_CODE  # they were starting, and had nothing to save yet
        return GroupEnd(
            128 + self._second_signal if self._second_signal else code or 0,
            is_crash=bool(self._first_failed) and not self._ends_are_expected,
            is_last=self._was_signalled,
            failed=[i for i, process in enumerate(self._processes) if process in self._failed],
            cause=self._cause,
            has_left_for_more=self._has_left_for_more,
            lost_at=self._lost_at,
            leaving=[self._processes.index(process) for process in leaving if not process.was_signalled],
        )

    def _running(self) -> list[Process]:
        return [process for process in self._processes if process.code is None]

    def _handle_events(self, running: Sequence[Process]) -> None:
        """Waits for a signal, a message or a deadline; records the processes that ended."""
        deadline = min(self._stop_at, self._kill_at, self._leave_at())
        wait([self._signals, self._inbox], deadline - time.monotonic())
        self._inbox.read()
        self._handle_signals()
        ended = [process for process in running if process.has_ended()]  # all, before one stops the others
        for process in sorted(ended, key=lambda process: process.code == FOLLOWER_EXIT_CODE):  # who failed comes first
            self._handle_end(process)

    def _leave_at(self) -> float:
        is_ending = self._ends_are_expected or self._first_failed or self._follower
        return math.inf if is_ending else self._leaves_at()

    def _handle_deadlines(self) -> None:
        if time.monotonic() >= self._leave_at():
            self._ends_are_expected = self._has_left_for_more = True
            log("there are slots for more workers, these are asked to save and leave.")
            for process in self._running():
                process.signal_once(signal.SIGTERM)
        if time.monotonic() >= self._stop_at:
            if self._follower and not self._first_failed:
                self._failed += self._running()  # the others have noticed that these hang
                for process in self._running():
                    process.is_shown = False
                self._blame(self._follower, self._running())
            elif not self._first_failed:
                self._ends_are_expected = True  # the ends that follow are no crashes
            self._stop()
        if time.monotonic() >= self._kill_at:
            self._kill_at = math.inf
            for process in self._running():
                process.kill()

    def _handle_signals(self) -> None:
        """Passes on the first signal, kills at the second."""
        for number in self._signals.read():
            if number in _STOP_SIGNALS and self._next_signal_kills and self._running():
                self._second_signal = number
                log(f"{number.name} again, the workers are killed.")
                for process in self._running():
                    process.kill()
            elif number in _STOP_SIGNALS or (number in _LOST_SIGNALS and not self._ends_are_expected):
                self._next_signal_kills = number in _STOP_SIGNALS
                self._ends_are_expected = self._was_signalled = True
                log(f"{number.name}, the workers are asked to end; again to kill them.")
                for process in self._running():
                    process.signal_once(number if number in _STOP_SIGNALS else signal.SIGTERM)

    def _handle_end(self, process: Process) -> None:
        """Shows how a process ended, and stops the others if it failed."""
        others = self._running()
        self._lost_at = self._lost_at or time.time()
        if process.code not in (0, SAVED_EXIT_CODE, FOLLOWER_EXIT_CODE) and not process.was_signalled:
            self._failed.append(process)
        is_failure = process.code not in (0, SAVED_EXIT_CODE) and self._first_failed is None
        is_crash = is_failure and not self._ends_are_expected
        is_follower = is_crash and process.code == FOLLOWER_EXIT_CODE and bool(others)  # the failed one still runs
        if is_failure and not is_follower:
            self._first_failed = process
        if is_crash and not is_follower:
            for other in others:  # their lines from now on follow from the crash
                other.is_shown = False
        if process.code or self._first_failed or self._ends_are_expected:
            log(f"worker {process.index} ended {process.how}.")
        if is_follower:
            self._follower = self._follower or process
            self._stop_at = min(self._stop_at, time.monotonic() + FAIL_SECS + self._grace_secs)
        elif is_crash:
            self._blame(process, others)
        elif process.code and not self._verdict:
            self._ends_are_expected = True
            self._stop_at = min(self._stop_at, time.monotonic() + FOLLOW_SECS + self._grace_secs)

    def _blame(self, process: Process, others: Sequence[Process]) -> None:
        """Takes a process for the first one that failed, and stops the others."""
        self._first_failed = process
        first = " first" if len(self._processes) > 1 else ""
        failure = f"failed{first}, {process.how}"
        if process.code == FOLLOWER_EXIT_CODE:
            failure = f"ended{first}, because another one had failed or fallen silent"
        self._cause = f"worker {process.index} {failure}"
        self._verdict = f"{self._cause}{'; the others were stopped' if others else ''}."
        self._stop()

    def _stop(self) -> None:
        self._stop_at, self._kill_at = math.inf, min(self._kill_at, time.monotonic() + self._grace_secs)
        for process in self._running():
            process.signal_once(signal.SIGTERM)

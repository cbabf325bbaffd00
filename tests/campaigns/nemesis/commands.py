"""Commands as a scheduler starts them: each in a container that knows which processes it has left behind.

    program = ["-m", "tests.campaigns.nemesis.program", "--workdir=/tmp/run"]
    command = Command(program, environment, output=Output("/tmp/out"))
    command.kill(command.main, signal.SIGTERM)
    ended = command.wait(timeout_secs=30)           # Ended(code, at, gone_at, leftovers); None: it has not ended

The container is a process that adopts its orphans; it ends when none is left, or names those that stay. It can give
its command the process number 1, and a network and host names of its own.
"""

import contextlib
import multiprocessing
import os
import select
import signal
import threading
import time
from typing import NamedTuple

from tests import forked
from tests.campaigns.nemesis import kernel

LINGER_SECS = 5.0  # in which processes end that nobody waits for, such as the launcher's guard

_FORKS = multiprocessing.get_context("forkserver")


class Ended(NamedTuple):
    """How a command ended.

    Attributes:
        code: as in a shell, 128 + n for signal n.
        at: time on the monotonic clock.
        gone_at: when the last of its processes had ended.
        leftovers: names of processes that were there `LINGER_SECS` later.
    """

    code: int
    at: float
    gone_at: float
    leftovers: list[str]


class Output:
    """Copies what a command prints into a file, unless it is paused: then nobody reads the pipe."""

    def __init__(self, path):
        self.path, self.pipe = path, f"{path}.pipe"
        os.mkfifo(self.pipe)
        self._descriptor = os.open(self.pipe, os.O_RDWR | os.O_NONBLOCK)  # also to write: never at its end
        self._file = open(path, "wb", buffering=0)
        self.is_paused = threading.Event()
        self._is_closed = False
        self._thread = threading.Thread(target=self._copy, daemon=True)
        self._thread.start()

    def close(self):
        """Copies the rest."""
        self._is_closed = True
        self._thread.join()
        os.close(self._descriptor)
        self._file.close()
        os.remove(self.pipe)

    def text(self):
        with open(self.path, errors="replace") as file:
            return file.read()

    def _copy(self):
        while True:
            is_last = self._is_closed
            if not self.is_paused.is_set() or is_last:
                while select.select([self._descriptor], [], [], 0)[0]:
                    self._file.write(os.read(self._descriptor, 65536))
            if is_last:
                return
            time.sleep(0.02)


class Command:
    """A running command and its descendants."""

    def __init__(self, arguments, environment, output, *, host=None, is_first_process=False):
        """Starts it.

        Args:
            arguments: as after `python`: `-m`, a module, and what the module takes.
            environment: all environment variables.
            output: takes what it and its descendants print.
            host: network and names; None: those of this process.
            is_first_process: whether it gets the process number 1.
        """
        self._events, remote = _FORKS.Pipe()
        settings = (list(arguments), dict(environment), output.pipe, host and host.place(), is_first_process, remote)
        self._container = _FORKS.Process(target=_contain, args=settings)
        self._container.start()
        remote.close()
        self.started_at = time.monotonic()
        self.main = self._events.recv()
        self._ended = None

    def wait(self, timeout_secs):
        """Returns how the command ended, all its processes included; None if it has not within a time."""
        if self._ended is None and self._events.poll(timeout_secs):
            self._ended = self._events.recv()
            self._container.join()
        return self._ended

    def has_process(self, pid):
        return pid in kernel.descendants_of(self._container.pid)

    def find(self, number):
        """Returns the process that has a number in its own namespace; None if it has ended."""
        pids = kernel.descendants_of(self._container.pid)
        return next((pid for pid in pids if kernel.number_within(pid) == number), None)

    def end(self):
        """Kills whatever is left."""
        for _ in range(20):
            for pid in kernel.descendants_of(self._container.pid):
                _kill(pid)
            if self.wait(0.5) is not None:
                return
        self._container.kill()


def _kill(pid):
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _contain(arguments, environment, output, place, is_first_process, events):
    """Runs a command in a child of this process, and sends its number and how it ended."""
    kernel.adopt_orphans()
    os.setsid()
    if place is not None:
        kernel.join_network(place.network)
        kernel.mount_over(place.names, "/etc/hosts")
    if is_first_process:
        kernel.number_processes_anew()
    pid = os.fork()
    if pid == 0:
        os.setsid()
        descriptor = os.open(output, os.O_WRONLY)
        for number in (1, 2):
            os.dup2(descriptor, number)
        os.closerange(3, 1024)
        forked.end_as(lambda: forked.become(arguments, environment))
    events.send(pid)
    code = at = gone_at = None
    while not events.poll(0):  # at its end when the harness has ended
        try:
            child, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            gone_at = time.monotonic()
            break
        if child == pid:
            code, at = os.waitstatus_to_exitcode(status), time.monotonic()
        elif child == 0:
            if at is not None and time.monotonic() > at + LINGER_SECS:
                break
            time.sleep(0.01)
    leftovers = [f"{kernel.name_of(pid)} ({kernel.state_of(pid)})" for pid in kernel.descendants_of(os.getpid())]
    for left in kernel.descendants_of(os.getpid()):
        _kill(left)
    if at is not None:
        events.send(Ended(code if code >= 0 else 128 - code, at, gone_at or time.monotonic(), leftovers))

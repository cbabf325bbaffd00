"""Child processes of the launcher, from their start until they are reaped; without TensorFlow.

    child = start(command, environment, cores, guard_pipe, descriptors=[])
    wait([child.stdout, child.stderr], secs=1.0)
    reap()                  # after SIGCHLD; child.returncode stays
    end_with(parent)        # it ends when that process does

It does not know what they do.
"""

import contextlib
import math
import os
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from multiprocessing import connection
from typing import Any

from distloop.atomic_files import start_ticks

_CHECK_SECS = 0.5


def end_with(parent: int, grace_secs: float = 5.0) -> None:
    """Sends this process SIGTERM when its caller has ended, however that ended, and SIGKILL after `grace_secs`.

    There may be others between the two, such as a shell or a fork server, and they may end before.

    Args:
        parent: the number of the caller.
        grace_secs: from SIGTERM to SIGKILL.

    Raises:
        ValueError: if there is no such process.
    """
    start = start_ticks(parent)
    if start is None:
        raise ValueError(f"parent={parent} is no process of this machine: give the caller's number, or leave it out.")

    def watch() -> None:
        while start_ticks(parent) == start:
            time.sleep(_CHECK_SECS)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(grace_secs)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="distloop-parent", daemon=True).start()


_children: dict[int, "subprocess.Popen[bytes]"] = {}  # of the launcher, by process number


def register(child: "subprocess.Popen[bytes]") -> None:
    """Notes a child, so that how it ended is kept when it is reaped."""
    _children[child.pid] = child


def reap() -> None:
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


def start(
    command: list[str],
    environment: dict[str, str],
    cores: Sequence[int],
    guard_pipe: int,
    descriptors: Sequence[int],
) -> "subprocess.Popen[bytes]":
    """Starts a process in a session of its own, which the guard kills when this one ends.

    Args:
        command: program and arguments.
        environment: all its environment variables.
        cores: cores on which it may run; empty: any.
        guard_pipe: of `processes.Guard`, where it writes its process group.
        descriptors: that it inherits, besides its output.

    Returns:
        The process, whose `stdout` and `stderr` are pipes.
    """

    def set_up() -> None:  # in the new process, before the program; safe: takes no lock that a thread may hold
        os.write(guard_pipe, b"+%d\n" % os.getpid())  # first: a launcher that dies now leaves no process behind
        if cores:
            os.sched_setaffinity(0, cores)

    child = subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        pass_fds=descriptors,
        preexec_fn=set_up,
    )
    register(child)
    return child

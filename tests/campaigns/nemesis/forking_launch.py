"""`python -m distloop.launch`, with workers that are forks of the launcher: TensorFlow is then imported already.

    python -m tests.campaigns.nemesis.forking_launch --workers=2 -m tests.campaigns.nemesis.program --workdir=/tmp/run

Each worker is a process in a session of its own with its own pipes, as `subprocess.Popen` would start it; importing
TensorFlow in each would cost six seconds of a processor.
"""

import contextlib
import os
import signal
import subprocess
import sys
import types

from distloop import launch
from distloop.launcher import elastic, processes
from tests import forked

_OF_PYTHON = {signal.SIGINT: signal.default_int_handler, signal.SIGPIPE: signal.SIG_IGN}  # of a new interpreter


class _Fork(subprocess.Popen):
    """A process that runs a Python program without a new interpreter."""

    def _execute_child(self, *arguments):
        command, _, preexec_fn, _, inherited, _, env, *_ = arguments
        p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite = arguments[10:16]
        self.pid = os.fork()
        if self.pid == 0:
            for number, descriptor in enumerate((p2cread, c2pwrite, errwrite)):
                os.dup2(descriptor, number)
            os.setsid()
            _reset_signals()
            if preexec_fn is not None:
                preexec_fn()
            for descriptor in {*range(3, 1024)}.difference(inherited):  # of the launcher's, as the pipe to its guard
                with contextlib.suppress(OSError):
                    os.close(descriptor)
            forked.end_as(lambda: forked.become(command[1:], env))
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)


def _reset_signals():
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, _OF_PYTHON.get(number, signal.SIG_DFL))


def _popen(command, **settings):
    """Forks the program; starts anything else, such as the launcher's guard, as usual."""
    is_program = command[1] == "-m" or command[1].endswith(".py")
    return (_Fork if is_program else subprocess.Popen)(command, **settings)


if __name__ == "__main__":
    elastic._FIRST_PAUSE_SECS = float(os.environ.get("NEMESIS_PAUSE_SECS", 1))
    processes.subprocess = types.SimpleNamespace(**vars(subprocess) | {"Popen": _popen})
    sys.exit(launch.main())

"""Standby: a process that has imported TensorFlow and waits; workers that start again are forks of it.

    standby = Standby(program, environment, signals)    # in the launcher; no process yet
    standby.start(modules)                              # once a worker has told what it has imported
    child = standby.fork(variables, cores, guard_pipe, {1: stdout, 2: stderr})     # None: start a process instead

The process imports what the worker had, but not the program's own modules, and starts nothing of TensorFlow: it has no
other threads, no devices and no ports. A fork of it shares its memory, is a child of the launcher in a session of its
own, and runs the program as `python` does. Linux only. The launcher imports this module without TensorFlow.
"""

import array
import contextlib
import ctypes
import gc
import importlib
import io
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
import types
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, NamedTuple

from distloop.launcher import children, processes

_READY_SECS = 60.0  # that the launcher waits for the imports
_ANSWER_SECS = 10.0  # and for a fork
_SET_DEATH_SIGNAL, _SET_CHILD_SUBREAPER = 1, 36  # of prctl(2)
_MESSAGE_BYTES = 2**16
_MAX_DESCRIPTORS = 16


class Standby:
    """The standby process of a launcher, and its forks."""

    def __init__(self, program: Sequence[str], environment: Mapping[str, str], signals: processes.Signals):
        """Starts nothing.

        Args:
            program: arguments for Python, as of the workers.
            environment: all environment variables of the process; those of a worker are given to `fork`.
            signals: to the launcher; one that comes ends a wait for the imports.
        """
        self._program, self._environment, self._signals = list(program), dict(environment), signals
        self._control: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._is_ready = self._is_given_up = False

    @property
    def is_wanted(self) -> bool:
        """Whether there is no process yet, and there could be one."""
        can_be = sys.platform == "linux" and not self._is_given_up and _can_run(self._program)
        return self._control is None and can_be

    def start(self, modules: Sequence[str]) -> None:
        """Starts the process, which imports these modules."""
        if not self.is_wanted or not _prctl(_SET_CHILD_SUBREAPER, 1):
            return
        self._control, other = socket.socketpair()
        self._control.settimeout(_ANSWER_SECS)
        numbers = [str(other.fileno()), str(os.getpid())]
        command = [sys.executable, "-m", "distloop.launcher.standby", *numbers, *self._program]
        self._process = subprocess.Popen(
            command,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,  # the first workers have shown what the imports print
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            pass_fds=[other.fileno()],
        )
        children.register(self._process)
        other.close()
        self._is_ready = False
        with contextlib.suppress(OSError):  # it has ended already
            _send(self._control, modules)

    def fork(
        self, environment: Mapping[str, str], cores: Sequence[int], guard_pipe: int, descriptors: Mapping[int, int]
    ) -> children.Child | None:
        """Returns a new worker; None if there is no standby process.

        Args:
            environment: all environment variables of the worker.
            cores: as of `processes.Process`.
            guard_pipe: where the worker writes its process group.
            descriptors: by their number in the worker; 1 and 2 are its output.
        """
        if self._control is None:
            return None
        go_read_end, go_write_end = os.pipe()  # where the worker waits until its launcher knows it
        try:
            if not self._is_ready and not self._wait_for_imports():
                return None
            request = {"environment": dict(environment), "cores": list(cores), "numbers": list(descriptors)}
            _send(self._control, request, [guard_pipe, go_read_end, *descriptors.values()])
            if pid := _receive(self._control)[0]:
                os.write(go_write_end, b"+")
                return children.Child(pid)
        except TimeoutError:
            end = "does not answer"
        except (OSError, EOFError):
            end = "has ended"
        else:
            end = "cannot fork"
        finally:
            os.close(go_read_end)
            os.close(go_write_end)
        self._is_given_up = not self._is_ready  # another one would not come so far either
        self.close()
        processes.log(f"the standby process {end}, workers start without it.")
        return None

    def _wait_for_imports(self) -> bool:
        """Returns whether the process is ready; False if a signal came first.

        Raises:
            OSError: if it does not come so far.
            EOFError: if it has ended.
        """
        assert self._control is not None
        ends_at = time.monotonic() + _READY_SECS
        while (secs := ends_at - time.monotonic()) > 0 and not self._signals.have_come():
            if self._control in children.wait([self._control, self._signals], secs):
                self._is_ready = bool(_receive(self._control)[0])
                return True
        if secs <= 0:
            raise TimeoutError
        return False

    def close(self) -> None:
        """Ends the process; its forks stay."""
        if self._control is not None and self._process is not None:
            self._control.close()
            self._process.kill()
        self._control = None


def _can_run(program: Sequence[str]) -> bool:
    """Returns whether a fork can run a program: a module or a file, and no directory or archive."""
    return program[0] == "-m" or (program[0].endswith(".py") and os.path.isfile(program[0]))


def _prctl(option: int, value: int) -> bool:
    with contextlib.suppress(OSError, AttributeError):  # no libc that is loaded by name
        return ctypes.CDLL(None).prctl(option, value, 0, 0, 0) == 0
    return False


def _send(control: socket.socket, message: Any, descriptors: Sequence[int] = ()) -> None:
    data = json.dumps(message).encode() + b"\n"
    # Without SIGPIPE, at which the launcher ends the run; `socket.send_fds` does not pass flags on.
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]
    sent = control.sendmsg([data], rights, socket.MSG_NOSIGNAL)
    control.sendall(data[sent:], socket.MSG_NOSIGNAL)


def _receive(control: socket.socket) -> tuple[Any, list[int]]:
    """Returns the next message and the descriptors that come with it.

    Raises:
        EOFError: if the other process has ended.
    """
    data, descriptors, *_ = socket.recv_fds(control, _MESSAGE_BYTES, _MAX_DESCRIPTORS)
    while not data.endswith(b"\n"):
        if not (more := control.recv(_MESSAGE_BYTES)):
            raise EOFError
        data += more
    return json.loads(data), descriptors


# The rest runs in the standby process and its forks.


class _Worker(NamedTuple):
    """What a fork is to become."""

    environment: dict[str, str]
    cores: list[int]
    numbers: list[int]  # of its descriptors
    descriptors: list[int]  # that came: the guard's, the launcher's word to go on, then one for each number


def main() -> None:
    """Imports, then waits; returns in a fork that has run its program."""
    number, launcher, *program = sys.argv[1:]
    _prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)  # once the launcher ends
    if os.getppid() != int(launcher):  # it has ended already
        os._exit(0)
    control, before = socket.socket(fileno=int(number)), dict(os.environ)
    try:
        _import(_receive(control)[0])
        imported = {name: value for name, value in os.environ.items() if before.get(name) != value}
        _send(control, True)
        worker = _wait(control)
    except (OSError, EOFError):  # the launcher has ended
        os._exit(0)
    _become(worker, control, imported)
    _show_as(program)
    _run(program)


def _import(modules: Sequence[str]) -> None:
    """Imports modules, and ends the process if one of them has started threads, which a fork would lack."""
    for name in modules:
        with contextlib.suppress(Exception):  # the program imports it again
            importlib.import_module(name)
    if not (pid := os.fork()):  # threads of OpenBLAS, which NumPy has, end before a fork, and start again when needed
        os._exit(0)
    os.waitpid(pid, 0)
    if len(os.listdir("/proc/self/task")) > 1:
        os._exit(1)
    gc.collect()
    gc.freeze()  # what is imported stays; collections would write to its memory, which the forks share


def _wait(control: socket.socket) -> _Worker:
    """Forks at each request; returns in the forks only.

    Raises:
        EOFError: once the launcher has ended.
    """
    while True:
        request, descriptors = _receive(control)
        read_end, write_end = os.pipe()
        if not (parent := os.fork()):
            with contextlib.suppress(OSError):
                if not (pid := os.fork()):
                    for end in (read_end, write_end):
                        os.close(end)
                    return _Worker(**request, descriptors=descriptors)
                os.write(write_end, b"%d" % pid)
            os._exit(0)  # so that the launcher becomes the parent of the worker
        for descriptor in (write_end, *descriptors):
            os.close(descriptor)
        os.waitpid(parent, 0)
        _send(control, int(os.read(read_end, 32) or 0))
        os.close(read_end)


def _become(worker: _Worker, control: socket.socket, imported: dict[str, str]) -> None:
    """Gives this fork what a new process gets from the launcher; `imported` are variables that the imports have set."""
    os.setsid()
    guard_pipe, go, *descriptors = worker.descriptors
    os.write(guard_pipe, b"+%d\n" % os.getpid())
    if not os.read(go, 1):  # the launcher has ended, or has started another process instead
        os._exit(0)
    control.close()
    for number, descriptor in zip(worker.numbers, descriptors, strict=True):
        os.dup2(descriptor, number)
    for descriptor in worker.descriptors:
        os.close(descriptor)
    if worker.cores:
        os.sched_setaffinity(0, worker.cores)
    os.environ.clear()
    os.environ.update(worker.environment | imported)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # Python's own generator has another seed in each fork already


def _show_as(program: Sequence[str]) -> None:
    """Writes a command line over that of this process, for `ps` and `pkill`."""
    with contextlib.suppress(OSError, ValueError, IndexError), open("/proc/self/stat", encoding="utf-8") as file:
        begin, end = map(int, file.read().rpartition(")")[2].split()[45:47])
        line = b"\0".join(map(os.fsencode, [sys.executable, *program])) + b"\0"
        if 0 < len(line) <= end - begin:
            ctypes.memmove(begin, line.ljust(end - begin, b"\0"), end - begin)


def _run(program: Sequence[str]) -> None:
    """Runs a program as `python` does."""
    is_module = program[0] == "-m"
    sys.argv = list(program[1:] if is_module else program)
    sys.orig_argv = [sys.executable, *program]
    show = sys.excepthook
    sys.excepthook = lambda kind, error, trace: show(kind, error.with_traceback(inner := _inner(trace)), inner)
    if is_module:
        runpy.run_module(program[1], run_name="__main__", alter_sys=True)
        return
    path = os.path.abspath(program[0])
    if not getattr(sys.flags, "safe_path", False):  # Python 3.11
        sys.path[0] = os.path.dirname(os.path.realpath(path))
    module = types.ModuleType("__main__")
    module.__file__, module.__dict__["__builtins__"] = path, __builtins__
    sys.modules["__main__"] = module
    with io.open_code(path) as file:
        code = compile(file.read(), path, "exec")
    exec(code, vars(module))


def _inner(trace: TracebackType | None) -> TracebackType | None:
    """Returns the part of a traceback that begins in the program."""
    inner, place = trace, trace
    while place is not None:
        is_here = place.tb_frame.f_code.co_filename == __file__
        place = place.tb_next
        inner = place if is_here else inner
    return inner


if __name__ == "__main__":
    main()

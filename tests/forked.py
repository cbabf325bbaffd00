"""Python programs in processes with TensorFlow loaded: forks of a server that imported it once.

    result = run([path, *arguments], env=environment)
    result = launch(["--workers=2", path, *arguments], env=environment)
    program = Program([path, *arguments], stdout=path_of_log, stderr=path_of_log, env=environment)

TensorFlow takes as long to import as these programs take to run. It has no threads and no devices before its first
operation, so a fork behaves like a new process: it has its own signals, exit codes and hooks. Only Python's steps after
`atexit` are left out; tests of a process's end start a real one. TensorFlow optimizes graphs there if it does here.
"""

import atexit
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import types
import unittest.mock
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import tensorflow as tf

from distloop import testing

HANG_SECS = 3600.0  # no test waits for so long, not on a busy machine either
_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["tensorflow", "keras", "distloop.trainer"])


class Program:
    """A running program, with methods of `subprocess.Popen`."""

    def __init__(self, arguments: Sequence[str], *, stdout: str, stderr: str, env: Mapping[str, str]):
        """Starts the program.

        Args:
            arguments: as after `python`: a path, or `-m` and a module's name; then the program's own. The import path
                is that of this process.
            stdout: path of a file, which is overwritten.
            stderr: likewise; may be the same file.
            env: all environment variables.
        """
        for path in {str(stdout), str(stderr)}:
            open(path, "w").close()
        is_off = tf.config.optimizer.get_experimental_options()["disable_meta_optimizer"]
        task = [str(argument) for argument in arguments], str(stdout), str(stderr), dict(env), is_off
        self._process = _FORKS.Process(target=_become, args=task)
        self._process.start()
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self._process.exitcode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def run(arguments: Sequence[str], *, env: Mapping[str, str], timeout: float = HANG_SECS) -> subprocess.CompletedProcess:
    """Runs a program to its end and returns what `subprocess.run` does; arguments are those of `Program`."""
    with tempfile.TemporaryDirectory() as logs:
        stdout, stderr = (os.path.join(logs, name) for name in ("stdout", "stderr"))
        program = Program(arguments, stdout=stdout, stderr=stderr, env=env)
        try:
            code = program.wait(timeout)
        finally:
            program.kill()  # if it has not ended
        texts = [open(path).read() for path in (stdout, stderr)]
    return subprocess.CompletedProcess(arguments, code, *texts)


def run_program(workdir: Any, program: str, *arguments: str) -> subprocess.CompletedProcess:
    """Writes the text of a program into a workdir, and runs it with the workdir and some arguments."""
    os.makedirs(workdir, exist_ok=True)
    path = os.path.join(workdir, "program.py")
    with open(path, "w", encoding="utf-8") as file:
        file.write(textwrap.dedent(program))
    return run([path, workdir, *arguments], env=os.environ)


def launch(
    arguments: Sequence[str], *, env: Mapping[str, str], timeout: float = HANG_SECS
) -> subprocess.CompletedProcess:
    """Runs `python -m distloop.launch` with these arguments; the launcher and its workers are forks, too."""
    return run(["-m", "tests.campaigns.nemesis.forking_launch", *arguments], env=env, timeout=timeout)


def run_in_workers(fn: Callable, workers: int, *arguments, **settings) -> list:
    """Does what `distloop.testing.run_in_workers` does, in forks."""
    with unittest.mock.patch.object(testing, "subprocess", types.SimpleNamespace(run=_run_forks)):
        return testing.run_in_workers(fn, workers, *arguments, **{"timeout_secs": HANG_SECS, **settings})


def run_on_devices(fn: Callable, devices: int, *arguments, **settings) -> Any:
    """Does what `distloop.testing.run_on_devices` does, in a fork."""
    with unittest.mock.patch.object(testing, "subprocess", types.SimpleNamespace(run=_run_forks)):
        return testing.run_on_devices(fn, devices, *arguments, **{"timeout_secs": HANG_SECS, **settings})


def _run_forks(command, *, env, timeout, **_):
    if command[1:3] == ["-m", "distloop.launch"]:
        return launch(command[3:], env=env, timeout=timeout)
    return run(command[1:], env=env, timeout=timeout)


def _become(arguments: list[str], stdout: str, stderr: str, env: dict[str, str], is_off: bool) -> None:
    """Runs the program in this process, with its output in files, and graphs as they are if `is_off`."""
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": is_off})
    for path, number in ((stdout, 1), (stderr, 2)):
        file = os.open(path, os.O_WRONLY | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    become(arguments, env)


def become(arguments: Sequence[str], env: Mapping[str, str]) -> None:
    """Runs a program in this process as `python` would, but for its last exit code; see `end_as`."""
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", buffering=1, closefd=False)
    os.environ.clear()
    os.environ.update(env)
    multiprocessing.set_start_method(None, force=True)  # a new process's, whose locks need no file of this one's
    try:
        if arguments[0] == "-m":
            sys.argv = list(arguments[1:])
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, os.path.dirname(arguments[0]))
            sys.argv = list(arguments)
            runpy.run_path(arguments[0], run_name="__main__")
    except Exception as error:  # as the interpreter does, without this frame, and not as multiprocessing would
        program = error.with_traceback(error.__traceback__.tb_next)
        sys.excepthook(type(program), program, program.__traceback__)
        sys.exit(1)
    finally:
        threading._shutdown()  # waits for threads
        atexit._run_exitfuncs()
        sys.stdout.flush()


def end_as(run: Callable[[], None]) -> NoReturn:
    """Calls a function and ends this process, a plain fork, with the exit code of its `SystemExit`."""
    code = 1
    try:
        run()
        code = 0
    except SystemExit as stopped:
        code = stopped.code if isinstance(stopped.code, int) else int(stopped.code is not None)
    finally:
        os._exit(code)

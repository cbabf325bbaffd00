"""Owns starting workers: one process each on this machine, what is seen of them, how they end; without TensorFlow.

    python -m distloop.launch --workers=2 -m experiments.digits --steps=500
    python -m distloop.launch --workers=2 --devices_per_worker=2 path/to/script.py --flag=...
    python -m distloop.launch --hosts=a,b --host_index=0 -m experiments.digits      # on b: --host_index=1

Everything from `-m` or the path on is the program's, of which it knows nothing. Each worker gets its TF_CONFIG; its
lines are shown behind `[worker 0]`. A worker that crashes stops the others, and within `--max_restarts` all start again
from what they saved. The exit code is that of the worker that failed first (128 + n for signal n), else 75 if one saved
and left, else 0. A worker that ends with 76 was not the first: another one failed or fell silent, maybe on another
host. The first Ctrl-C or SIGTERM is passed on and the launcher waits; the second kills.

On several hosts each launcher restarts its own workers, which need not fall together: a crash breaks the workers of the
other hosts, too, and workers wait for each other when they start.
"""

import argparse
import contextlib
import glob
import importlib.util
import itertools
import json
import math
import os
import random
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import IO, Any, NoReturn, TextIO

from distloop.distributed import cores
from distloop.distributed.heartbeat import EXIT_CODE as FOLLOWER_EXIT_CODE
from distloop.distributed.preemption import EXIT_CODE

FIRST_PORT = 12345  # of each host, with --hosts

# name -> type, default, minimum, help
_NUMBERS: dict[str, tuple[Callable[[str], float], float | None, int, str]] = {
    "workers": (int, 1, 1, "workers on this machine; 1"),
    "devices_per_worker": (int, None, 1, "devices of each, as --num_devices for the program"),
    "cores_per_worker": (int, None, 0, "cores of each, on which it alone runs; 0: any; all / workers without GPUs"),
    "max_restarts": (int, 0, 0, "how often all workers may start again when one has crashed; 0"),
    "grace_secs": (float, 10.0, 0, "seconds from SIGTERM to SIGKILL for workers that are stopped; 10"),
    "host_index": (int, None, 0, "which of --hosts this machine is, from 0; else Kubernetes' JOB_COMPLETION_INDEX"),
    "port": (int, None, 1, f"of the first worker on each of --hosts, the next ones follow; {FIRST_PORT}"),
}

_FOLLOW_SECS = 60  # beyond the grace time, for the others when one saved and left: they may be writing a checkpoint
_FAIL_SECS = 5  # beyond the grace time, for the one that failed when another one has ended for it
_PROGRESS_SECS = 10  # how often a line is shown that carriage returns write again and again
_ASKING = (signal.SIGINT, signal.SIGTERM)
_GONE = (signal.SIGHUP, signal.SIGPIPE)  # the terminal is closed, or nobody reads the output any more

# At the end of its input, which comes however the launcher ends, it kills the workers' process groups. A program and a
# session of its own: neither Ctrl-C nor `pkill -f distloop.launch` ends it with the launcher.
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


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the launcher; returns its exit code, 2 where nothing could be started."""
    try:
        launch = _Launch(_parse(sys.argv[1:] if arguments is None else arguments))
    except ValueError as error:
        print(f"distloop.launch: {error}", file=sys.stderr)
        return 2
    with launch:
        return launch.run()


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}; --help tells what each flag takes.")


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Returns the flags by name, and `program`: what Python is called with."""
    usage = "%(prog)s [flags] (-m module | script.py) [the program's flags]"
    parser = _Parser(prog="python -m distloop.launch", usage=usage, description=__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    for name, (kind, default, _, text) in _NUMBERS.items():
        parser.add_argument(f"--{name}", metavar="N", type=kind, default=default, help=text)
    parser.add_argument("--hosts", metavar="A,B", help="every machine; the same command on each, but for --host_index")
    count = 0
    while count < len(arguments) and arguments[count].startswith("-") and arguments[count] != "-m":
        count += 1 if "=" in arguments[count] or arguments[count] in ("-h", "--help") else 2
    options, unknown = parser.parse_known_args(arguments[:count])
    if unknown:
        raise ValueError(
            f"{unknown[0]} is no flag of the launcher: give its own flags (--help lists them) before the program, and "
            "the program's after it."
        )
    for name, (_, _, minimum, _) in _NUMBERS.items():
        value = getattr(options, name)
        if value is not None and not minimum <= value < math.inf:
            raise ValueError(f"{name}={value} is not allowed: give {minimum} or more, or leave it out.")
    options.program = list(arguments[count:])
    _check_program(options.program)
    _check_hosts(options)
    return options


def _check_program(program: list[str]) -> None:
    if not program or program == ["-m"]:
        raise ValueError("no program was given: end the command with a script or -m and a module, then its flags.")
    if program[0] != "-m" and not os.path.exists(program[0]):
        raise ValueError(f"there is no file {program[0]!r}: give the path of a script, or -m and a module.")
    # Of a.b only a is looked for: the rest would import it.
    if program[0] == "-m" and not importlib.util.find_spec(program[1].partition(".")[0] or "?"):
        raise ValueError(f"there is no module {program[1]!r} here: give one that `python -m` finds, or a script.")


def _check_hosts(options: argparse.Namespace) -> None:
    """Checks what is said about hosts; makes `hosts` a list, and `first_index` that of the first worker here."""
    for name in () if options.hosts else ("host_index", "port"):
        if getattr(options, name) is not None:
            raise ValueError(f"--{name} was given without --hosts, which it is about: give both or none.")
    hosts = [host.strip() for host in options.hosts.split(",")] if options.hosts else []
    if len(set(hosts)) < len(hosts) or not all(re.fullmatch(r"[\w.-]+", host) for host in hosts):
        raise ValueError(f"hosts={options.hosts} is not allowed: give names or IPv4 addresses, each once, no ports.")
    index = os.environ.get("JOB_COMPLETION_INDEX", "")  # of an indexed Job of Kubernetes
    if hosts and options.host_index is None and index.isdigit():
        options.host_index = int(index)
    if hosts and (options.host_index is None or options.host_index >= len(hosts)):
        raise ValueError(
            f"host_index={options.host_index} is not allowed with {len(hosts)} hosts: give each host its own, from 0 "
            f"to {len(hosts) - 1}."
        )
    options.port = options.port or FIRST_PORT
    if options.port + options.workers > 2**16:
        raise ValueError(
            f"port={options.port} leaves no room for {options.workers} workers: give a lower one, ports end at 65535."
        )
    options.hosts, options.first_index = hosts, (options.host_index or 0) * options.workers
    for i in range(options.workers if hosts else 0):
        if not _is_free(options.port + i):
            raise ValueError(
                f"port {options.port + i} is taken on this host, but worker {options.first_index + i} is to have it: "
                "give another --port, the same on every host, or end what listens there."
            )


def _find_addresses(options: argparse.Namespace) -> list[str]:
    """Returns the address of every worker; on this machine alone they are new each time."""
    if options.hosts:
        return [f"{host}:{options.port + i}" for host in options.hosts for i in range(options.workers)]
    # Not among the ports that the system hands out: until TensorFlow listens, seconds from now, such a one may go to
    # any connection, even to that of a worker that tries to reach it.
    ports = filter(_is_free, random.sample(range(10_000, 32_768), 5_000))
    return [f"127.0.0.1:{port}" for port in itertools.islice(ports, options.workers)]


def _find_gpus(options: argparse.Namespace) -> list[list[str]]:
    """Returns the GPUs of each worker here, for CUDA_VISIBLE_DEVICES; empty lists if there are none to be seen.

    No GPU was at hand: what CUDA does with it is untested.
    """
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is None:
        gpus = [str(i) for i in range(len(glob.glob("/dev/nvidia[0-9]*")))]
    else:  # CUDA sees those before the first that is none, such as -1
        gpus = list(itertools.takewhile(re.compile(r"\w").match, map(str.strip, given.split(","))))
    count = options.devices_per_worker or len(gpus) // options.workers
    if gpus and not 0 < count * options.workers <= len(gpus):
        raise ValueError(
            f"{len(gpus)} GPUs are too few for workers={options.workers} with {max(count, 1)} each: ask for fewer, or "
            "set CUDA_VISIBLE_DEVICES=-1 to run on CPUs."
        )
    return [gpus[i * count : (i + 1) * count] for i in range(options.workers)]


def _share_cores(options: argparse.Namespace, *, has_gpus: bool) -> list[list[int]]:
    """Returns the cores of each worker here, on which it alone runs; empty lists: on any.

    Workers wake each other, upon which Linux often puts both on one core: small steps of two workers took 1.5 times
    as long. Where there are GPUs, the system knows better which cores are near.
    """
    workers, size = options.workers, options.cores_per_worker
    if size and size * workers > cores.count():
        raise ValueError(
            f"cores_per_worker={size} is too much for workers={workers} on {cores.count()} cores: give "
            f"{cores.count() // workers} or less; 0 shares all cores."
        )
    if size == 0 or (size is None and (has_gpus or workers == 1)):
        return [[]] * workers
    return cores.shares(workers, size)


def _threads(workers: int, own: Sequence[int]) -> dict[str, str]:
    """Returns what tells TensorFlow how many threads a worker may have, of several here; else each takes all cores.

    With one thread between operations, a `tf.py_function` that calls a `tf.function` waits for itself.
    """
    if workers == 1 and not own:
        return {}
    count = len(own) or cores.count() // workers
    return {"TF_NUM_INTRAOP_THREADS": str(max(1, count)), "TF_NUM_INTEROP_THREADS": str(max(2, count))}


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as TensorFlow: connections that ended don't count
        try:
            probe.bind(("", port))  # on every address, as TensorFlow does
            with socket.socket(type=socket.SOCK_DGRAM) as datagrams:
                datagrams.bind(("", port))  # as the workers do, to hear each other
        except OSError:
            return False
        return True


def _show(target: TextIO, text: bytes) -> None:
    try:
        target.buffer.write(text)
        target.buffer.flush()
    except OSError:  # one of _GONE has come with it, and ends the run
        os.dup2(os.open(os.devnull, os.O_WRONLY), target.fileno())


def _tell(text: str) -> None:
    _show(sys.stderr, f"distloop.launch: {text}\n".encode())


class _Stream:
    """One pipe from a worker, shown in whole lines."""

    def __init__(self, pipe: IO[bytes], prefix: bytes, target: TextIO):
        os.set_blocking(pipe.fileno(), False)
        self._pipe, self._prefix, self._target = pipe, prefix, target
        self._rest = b""
        self._shown_at = time.monotonic()
        self.is_open = self.is_shown = True

    def fileno(self) -> int:  # what `select` asks for
        return self._pipe.fileno()

    def read(self) -> None:
        """Shows the lines that are there by now."""
        try:
            chunk = os.read(self.fileno(), 2**20)  # more than a pipe holds
        except BlockingIOError:
            return
        self.is_open = bool(chunk)
        *lines, rest = (self._rest + chunk).split(b"\n")
        begin = rest.rfind(b"\r", 0, -1) + 1  # what stands before is written over
        if begin and time.monotonic() > self._shown_at + _PROGRESS_SECS:
            lines.append(rest[:begin])
        self._rest = rest[begin:]
        self._show(lines)

    def finish(self) -> None:
        """Shows all that is there, a line without an end too, and nothing from then on."""
        if self.is_open:
            self.read()
        self._show([self._rest] if self._rest else [])
        self.is_shown = False

    def close(self) -> None:
        self.finish()
        self._pipe.close()
        self.is_open = False

    def _show(self, lines: list[bytes]) -> None:
        if lines and self.is_shown:
            self._shown_at = time.monotonic()
            ends = [line.rstrip(b"\r").rpartition(b"\r")[2] for line in lines]  # what a terminal would end up with
            _show(self._target, b"".join(self._prefix + end + b"\n" for end in ends))


class _Worker:
    """One process, in a session of its own: its children end with it, and Ctrl-C reaches it through the launcher."""

    def __init__(self, index: int, command: list[str], environment: dict[str, str], own: Sequence[int], guard: int):
        self.index, self._guard = index, guard
        self.code: int | None = None  # as a shell gives it: 128 + n for signal n
        self._is_asked = False

        def enter() -> None:  # the new process, before the program; safe, as there are no threads
            os.write(guard, b"+%d\n" % os.getpid())  # the guard knows it from the first
            if own:
                os.sched_setaffinity(0, own)

        self._process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=enter,
        )
        assert self._process.stdout and self._process.stderr
        prefix = f"[worker {index}] ".encode()
        self.streams = [
            _Stream(self._process.stdout, prefix, sys.stdout),
            _Stream(self._process.stderr, prefix, sys.stderr),
        ]

    def ask(self, number: int) -> None:
        """Sends a signal, once; not to the worker's children, which it may need to save."""
        if not self._is_asked:
            self._process.send_signal(number)
        self._is_asked = True

    def kill(self) -> None:
        with contextlib.suppress(OSError):  # there is nobody left
            os.killpg(self._process.pid, signal.SIGKILL)

    def has_ended(self) -> bool:
        """Says whether the process has ended; then so do its children."""
        code = self._process.poll()
        if code is not None:
            self.code = code if code >= 0 else 128 - code
            self.kill()
            with contextlib.suppress(OSError):  # without the guard, SIGPIPE ends the run
                os.write(self._guard, b"-%d\n" % self._process.pid)
        return code is not None

    def how_it_ended(self) -> str:
        code = self._process.returncode
        return f"with exit code {code}" if code >= 0 else f"by signal {-code} ({signal.strsignal(-code)})"


class _Launch:
    """The workers of this machine until they have ended for good; while entered, it holds the signals and the guard."""

    def __init__(self, options: argparse.Namespace):
        self._options = options
        self._addresses, self._gpus = _find_addresses(options), _find_gpus(options)
        self._cores = _share_cores(options, has_gpus=any(self._gpus))
        self._workers: list[_Worker] = []
        self._is_asked = False  # by SIGINT or SIGTERM
        self._is_leaving = False  # by any signal, or as a worker saved and left: from now on no end is a crash
        self._killer = 0  # the second signal
        self._failed: _Worker | None = None  # the first one
        self._follower: _Worker | None = None  # the first one that ended because another had failed
        self._verdict = ""  # why the workers were stopped
        self._stop_at = self._kill_at = math.inf

    def __enter__(self) -> "_Launch":
        self._signals, wakeup = os.pipe()  # Python writes the number of each signal to it, and `select` wakes up
        for end in (self._signals, wakeup):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
        for number in (*_ASKING, *_GONE, signal.SIGCHLD):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup
                signal.signal(number, lambda *_: None)
        read_end, self._guard = os.pipe()
        command, quiet = [sys.executable, "-I", "-S", "-c", _GUARD], subprocess.DEVNULL
        self._guarding = subprocess.Popen(command, stdin=read_end, stdout=quiet, stderr=quiet, start_new_session=True)
        os.close(read_end)
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._running():  # none, unless something unforeseen was raised
            worker.kill()
        os.close(self._guard)
        self._guarding.wait()

    def run(self) -> int:
        """Runs the workers until they have ended for good; returns the exit code."""
        for restart in itertools.count(1):
            self._start()
            self._wait()
            if self._killer:
                return 128 + self._killer
            if not self._failed:
                return max(worker.code or 0 for worker in self._workers)  # 0, EXIT_CODE or FOLLOWER_EXIT_CODE
            if self._is_leaving or restart > self._options.max_restarts:
                return self._failed.code or 0
            _tell(f"all workers start again (restart {restart} of {self._options.max_restarts}).")
            self._addresses = _find_addresses(self._options)
        raise AssertionError

    def _start(self) -> None:
        self._workers, self._failed, self._follower, self._verdict = [], None, None, ""
        self._stop_at = self._kill_at = math.inf
        count = self._options.devices_per_worker
        command = [sys.executable, *self._options.program, *([f"--num_devices={count}"] if count else [])]
        for i, (gpus, own) in enumerate(zip(self._gpus, self._cores, strict=True), start=self._options.first_index):
            config = {"cluster": {"worker": self._addresses}, "task": {"type": "worker", "index": i}}
            threads = _threads(self._options.workers, own)
            environment = {**threads, **os.environ, "TF_CONFIG": json.dumps(config), "PYTHONUNBUFFERED": "1"}
            environment.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # else ten lines each of what goes well; errors stay
            if gpus:
                environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
            self._workers.append(_Worker(i, command, environment, own, self._guard))

    def _wait(self) -> None:
        """Waits until every worker has ended."""
        while running := self._running():
            streams = [stream for worker in running for stream in worker.streams if stream.is_open]
            next_secs = min(self._stop_at, self._kill_at) - time.monotonic()
            timeout = None if next_secs == math.inf else max(0.0, next_secs)
            waited_for: list[Any] = [self._signals, *streams]
            ready = select.select(waited_for, [], [], timeout)[0]
            self._heed_signals()
            for worker in running:  # before the output, which may take long to show: what ended first is to be seen
                if worker.has_ended():
                    self._note_end(worker)
            for stream in streams:
                if stream in ready and stream.is_open:
                    stream.read()
            if time.monotonic() >= self._stop_at:
                if self._follower and not self._failed:
                    self._hush(self._running())
                    self._judge(self._follower, self._running())
                self._stop()
            if time.monotonic() >= self._kill_at:
                self._kill_at = math.inf
                for worker in self._running():
                    worker.kill()
        self._heed_signals()
        if self._follower and not self._failed:  # no other one failed
            self._judge(self._follower, [])
        if self._verdict:
            _tell(self._verdict)

    def _running(self) -> list[_Worker]:
        return [worker for worker in self._workers if worker.code is None]

    def _heed_signals(self) -> None:
        """Passes on the first signal, kills at the second."""
        numbers = b""
        with contextlib.suppress(BlockingIOError):
            numbers = os.read(self._signals, 1024)
        for number in map(signal.Signals, numbers):
            if number in _ASKING and self._is_asked and self._running():
                self._killer = number
                _tell(f"{number.name} again, the workers are killed.")
                for worker in self._running():
                    worker.kill()
            elif number in _ASKING or (number in _GONE and not self._is_leaving):
                self._is_asked, self._is_leaving = number in _ASKING, True
                _tell(f"{number.name}, the workers are asked to end; again to kill them.")
                for worker in self._running():
                    worker.ask(number if number in _ASKING else signal.SIGTERM)

    def _note_end(self, worker: _Worker) -> None:
        """Shows how a worker ended, and does what follows from it."""
        others = self._running()
        is_failure = worker.code not in (0, EXIT_CODE) and self._failed is None
        is_crash = is_failure and not self._is_leaving
        is_follower = is_crash and worker.code == FOLLOWER_EXIT_CODE and bool(others)  # who failed is still to end
        if is_failure and not is_follower:
            self._failed = worker
        if is_crash and not is_follower:
            self._hush(others)
        for stream in worker.streams:
            stream.close()
        if worker.code or self._failed or self._is_leaving:
            _tell(f"worker {worker.index} ended {worker.how_it_ended()}.")
        if is_follower:
            self._follower = self._follower or worker
            self._stop_at = min(self._stop_at, time.monotonic() + _FAIL_SECS + self._options.grace_secs)
        elif is_crash:
            self._judge(worker, others)
        elif worker.code and not self._verdict:
            self._is_leaving = True
            self._stop_at = min(self._stop_at, time.monotonic() + _FOLLOW_SECS + self._options.grace_secs)

    def _hush(self, workers: Sequence[_Worker]) -> None:
        for stream in (stream for worker in workers for stream in worker.streams):
            stream.finish()  # what they say from now on follows from the crash

    def _judge(self, worker: _Worker, others: Sequence[_Worker]) -> None:
        """Takes a worker for the first one that failed, and stops the others."""
        self._failed = worker
        first = " first" if len(self._workers) > 1 else ""
        what = f"failed{first}, {worker.how_it_ended()}"
        if worker.code == FOLLOWER_EXIT_CODE:
            what = f"ended{first}, because another one had failed or fallen silent"
        self._verdict = f"worker {worker.index} {what}{'; the others were stopped' if others else ''}."
        self._stop()

    def _stop(self) -> None:
        self._stop_at, self._kill_at = math.inf, time.monotonic() + self._options.grace_secs
        for worker in self._running():
            worker.ask(signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())

"""Reads rows in worker processes, with the examples that a `RowReader` of this process returns.

    reader = RowReader(source, map_fn, "Photos")
    pieces = RowProcesses(reader, count=8).read(rows, seeds)

A worker process needs no TensorFlow. Examples come through memory without a name, of which nothing is left however a
process ends; `concurrent.futures` would leave its workers and named memory behind where the run is killed.
"""

import concurrent.futures
import contextlib
import dataclasses
import itertools
import mmap
import multiprocessing
import os
import pickle
import queue
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
import weakref
from multiprocessing import reduction, spawn
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np

from distloop.data.python_rows import ReadRows, RowReader
from distloop.log import shown
from distloop.processes.pickling import from_pickle, names_program, to_pickle

_GRACE_SECS = 2.0  # for the exit of a process
_IDLE_SECS = 120.0  # after which a process ends; the next task starts it again
_PROGRAM = ("init_main_from_name", "init_main_from_path")  # of `spawn`, which imports the program by them
_GONE = (EOFError, ConnectionError)  # the process at the other end


class RowProcesses:
    """Reads rows in worker processes, each of which has a copy of the source and of the function that changes rows.

    The rows of a batch are divided among the processes. A process starts when it has something to read, and ends with
    this object, or with the process that has it, even if that is killed.
    """

    def __init__(self, reader: RowReader, count: int, *, is_fetched_here: bool = False):
        """Pickles the reader; starts nothing.

        Args:
            reader: of the rows.
            count: of the processes.
            is_fetched_here: whether this process reads the rows, as those of arrays, which are not copied, and the
                worker processes change them.

        Raises:
            ValueError: if the reader cannot be pickled, or a worker process would run the program again.
        """
        self._reader, self._is_fetched_here = reader, is_fetched_here
        pickled = to_pickle(dataclasses.replace(reader, source=None) if is_fetched_here else reader, count)
        self._count, self._idle = count, queue.LifoQueue[_RowProcess]()
        processes = [_RowProcess(pickled, reader.name, count) for _ in range(count)]
        for process in processes:
            self._idle.put(process)
        self._threads = concurrent.futures.ThreadPoolExecutor(count, "distloop-rows")  # each waits for one process
        weakref.finalize(self, _end, processes)

    def read(self, rows: np.ndarray, seeds: np.ndarray) -> list[ReadRows]:
        """Returns the examples of some rows in pieces; the arguments and errors are those of `RowReader.read`.

        Raises:
            RuntimeError: if a process has ended.
        """
        count = max(min(self._count, len(rows)), 1)
        return list(self._threads.map(self._read, np.array_split(rows, count), np.array_split(seeds, count)))

    def _read(self, rows: np.ndarray, seeds: np.ndarray) -> ReadRows:
        began_at = time.perf_counter()
        task = _Task(rows, seeds, self._reader.fetch(rows) if self._is_fetched_here else None)
        reading = time.perf_counter() - began_at if self._is_fetched_here else 0.0
        process = self._idle.get()
        try:
            read = process.read(task)
            return read._replace(reading=read.reading + reading)
        finally:
            self._idle.put(process)


class _Task(NamedTuple):
    """What a worker process is asked for.

    Attributes:
        rows: int64 [b].
        seeds: of the examples, int64 [b, 2].
        examples: to change; None: the process reads them.
    """

    rows: np.ndarray
    seeds: np.ndarray
    examples: list[Any] | None


class _Reply(NamedTuple):
    """What a worker process answers.

    Attributes:
        examples: pickled, without the values of arrays.
        sizes: of the arrays whose values are in the memory, one after the other, in bytes.
        memory_size: of a new memory, whose file descriptor follows; 0: it is the one before.
        error: a sentence in place of examples; empty: there is none.
        trace: of the error, as text.
        secs: of reading, map_fn and writing to the memory.
    """

    examples: bytes = b""
    sizes: tuple[int, ...] = ()
    memory_size: int = 0
    error: str = ""
    trace: str = ""
    secs: tuple[float, float, float] = (0.0, 0.0, 0.0)


class _RowProcess:
    """A worker process, as the process that started it sees it; one thread at a time asks it for rows."""

    def __init__(self, pickled: bytes, name: str, count: int):
        """Stores a pickled `RowReader`, the name of its source and how many such processes there are, for errors."""
        self._pickled, self._name, self._count = pickled, name, count
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Any = None
        self._memory: mmap.mmap | None = None

    def read(self, task: _Task) -> ReadRows:
        """Returns the examples of a task.

        Raises:
            ValueError: if a row cannot be read or changed.
            RuntimeError: if the process has ended.
        """
        try:
            while (reply := self._ask(task)) is None:
                self._reset()
            if reply.memory_size:
                file = reduction.recv_handle(self._connection)
                self._memory = mmap.mmap(file, reply.memory_size)
                os.close(file)
        except _GONE:
            raise RuntimeError(self._of_its_end(task.rows)) from None
        if reply.error:
            raise ValueError(reply.error) from RuntimeError(f"In a worker process:\n{reply.trace}")
        began_at = time.perf_counter()
        values = memoryview(self._memory[: sum(reply.sizes)] if self._memory else b"")  # a copy
        ends = list(itertools.accumulate(reply.sizes))
        buffers = [values[end - size : end] for end, size in zip(ends, reply.sizes, strict=True)]
        reading, map_fn, copying = reply.secs
        examples: list[Any] = pickle.loads(reply.examples, buffers=buffers)
        return ReadRows(examples, reading, map_fn, copying + time.perf_counter() - began_at)

    def _ask(self, task: _Task) -> _Reply | None:
        """Returns the reply to a task; None: the process had nothing to do for long, and has left."""
        if self._process is None:
            self._start()
        with contextlib.suppress(BrokenPipeError):  # its last reply says why
            self._connection.send(task)
        reply: _Reply | None = self._connection.recv()
        return reply

    def _reset(self) -> int:
        """Returns the exit code of the process, and forgets it."""
        self.close()
        code = self.wait()
        self._process = self._connection = self._memory = None
        return code

    def close(self) -> None:
        """Lets the process end."""
        if self._connection is not None:
            self._connection.close()

    def wait(self) -> int:
        """Returns the exit code of the process, which was closed or has ended; minus the signal that ended it."""
        if self._process is None:
            return 0
        try:
            return self._process.wait(_GRACE_SECS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

    def _start(self) -> None:
        self._connection, other = multiprocessing.Pipe()
        with other:
            program = f"import sys; sys.path[:] = {sys.path}; from {__name__} import serve"
            self._process = subprocess.Popen(
                [sys.executable, "-c", f"{program}; serve({other.fileno()}, {_IDLE_SECS})"],
                env={**os.environ, "CUDA_VISIBLE_DEVICES": "-1"},  # GPUs belong to the run
                pass_fds=[other.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # the run alone gets what is typed, and then ends its processes
            )
        settings = spawn.get_preparation_data("distloop-rows")
        left_out = {"authkey"} if names_program(self._pickled) else {"authkey", *_PROGRAM}
        self._connection.send({name: value for name, value in settings.items() if name not in left_out})
        self._connection.send_bytes(self._pickled)

    def _of_its_end(self, rows: np.ndarray) -> str:
        """Returns how the process ended, as a sentence; the next task starts another one."""
        code = self._reset()
        how = f"was killed by signal {-code} ({signal.strsignal(-code)})" if code < 0 else f"ended with code {code}"
        remedy = "where memory was short, give fewer processes" if code == -signal.SIGKILL else "see its lines above"
        return (
            f"A worker process of make_dataset(processes={self._count}) {how} while it read the rows "
            f"{shown(rows.tolist())} of the {self._name} given: {remedy}, and run the same command again."
        )


def _end(processes: list[_RowProcess]) -> None:
    for process in processes:
        process.close()
    for process in processes:
        process.wait()


def serve(file: int, idle_secs: float) -> None:
    """Reads rows in a worker process until there is nothing to do, or the other end of a connection is closed.

    Args:
        file: descriptor of the connection.
        idle_secs: for which it waits for a task.
    """
    for number in (signal.SIGINT, signal.SIGTERM):  # which a scheduler sends to all processes of a run
        signal.signal(number, lambda *_: None)
    threading.Thread(target=_end_with_run, args=(file,), daemon=True).start()
    connection = Connection(file)
    reader, memory = None, _Memory()
    try:
        spawn.prepare(connection.recv())
        pickled = connection.recv_bytes()
        while connection.poll(idle_secs):
            task: _Task = connection.recv()
            try:
                reader = reader or from_pickle(pickled)
                times = [time.perf_counter()]
                examples = reader.fetch(task.rows) if task.examples is None else task.examples
                times.append(time.perf_counter())
                examples = reader.changed(task.rows, examples, task.seeds)
                times.append(time.perf_counter())
                reply = memory.fill(examples)
                times.append(time.perf_counter())
                reading, map_fn, copying = (end - start for start, end in itertools.pairwise(times))
                reply = reply._replace(secs=(reading, map_fn, copying))
            except Exception as error:
                reply = _Reply(error=str(error), trace=traceback.format_exc())
            connection.send(reply)
            if reply.memory_size:
                reduction.send_handle(connection, memory.file, os.getppid())
                os.close(memory.file)
        connection.send(None)
    except _GONE:
        pass


class _Memory:
    """Memory that a worker process writes and the process that started it reads; it grows as examples do.

    Attributes:
        file: the descriptor of the newest memory.
    """

    def __init__(self) -> None:
        self.file, self._size = -1, 0
        self._memory: mmap.mmap | None = None

    def fill(self, examples: list[Any]) -> _Reply:
        """Writes the values of arrays, and returns the reply with what describes them."""
        buffers: list[pickle.PickleBuffer] = []
        pickled = pickle.dumps(examples, 5, buffer_callback=buffers.append)
        values = [buffer.raw() for buffer in buffers]
        sizes = tuple(value.nbytes for value in values)
        has_grown = sum(sizes) > self._size
        if has_grown:
            self._size = 1 << (sum(sizes) - 1).bit_length()
            self.file = os.memfd_create("distloop-rows")
            os.ftruncate(self.file, self._size)
            self._memory = mmap.mmap(self.file, self._size)
        for value, end in zip(values, itertools.accumulate(sizes), strict=True):
            if self._memory is not None:
                self._memory[end - value.nbytes : end] = value
        return _Reply(pickled, sizes, self._size if has_grown else 0)


def _end_with_run(file: int) -> None:
    """Ends the worker process when the other end of its connection is closed, even while a row is read."""
    poll = select.poll()
    poll.register(file, 0)  # the end alone
    poll.poll()
    os._exit(0)

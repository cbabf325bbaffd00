"""Things that are made at their first use, whichever threads ask for them, and the gate of threads that read ahead."""

import ast
import concurrent.futures
import os
import threading
import time

import pytest

from distloop import threads, urls
from distloop.data import iterators, rows
from distloop.distributed import strategies
from distloop.launcher import consoles
from distloop.threads import Gate, once
from tests.imports import MODULES, tree_of


def asked_at_once(ask, count=8):
    """Returns what threads get that ask at the same time; an error of one is raised."""
    barrier = threading.Barrier(count)

    def wait_and_ask():
        barrier.wait()
        return ask()

    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        return [asked.result() for asked in [pool.submit(wait_and_ask) for _ in range(count)]]


def slowly(make):
    """Returns a function that other threads reach, too, before it returns."""

    def made(*arguments, **options):
        time.sleep(0.2)
        return make(*arguments, **options)

    return made


def test_threads_that_ask_at_once_get_one_thing():
    calls = []
    make = once(slowly(lambda name: calls.append(name) or object()))
    assert len(set(asked_at_once(lambda: make("a")))) == 1 and calls == ["a"]
    assert make("b") is not make("a") and calls == ["a", "b"]


def test_an_error_is_of_the_caller_and_the_next_one_tries_again():
    answers = [ValueError("no"), 3]

    @once
    def make():
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    with pytest.raises(ValueError, match="no"):
        make()
    assert make() == make() == 3


def test_a_function_may_ask_for_what_it_makes_of_another_argument():
    @once
    def factorial(n):
        return n * factorial(n - 1) if n else 1

    assert factorial(20) == 2432902008176640000


class SlowConsole(consoles.LineConsole):
    """The first one is made first, and takes long to write its first line."""

    made = 0

    def __init__(self, descriptor):
        SlowConsole.made += 1
        self.is_first = SlowConsole.made == 1
        time.sleep(0.1 if self.is_first else 0.3)
        super().__init__(descriptor)

    def _write(self, text):
        time.sleep(1.0 if self.is_first else 0.0)
        self.is_first = False
        super()._write(text)


def test_threads_that_write_their_first_lines_at_once_write_them_in_order(monkeypatch):
    read_end, write_end = os.pipe()
    monkeypatch.setattr(consoles, "LineConsole", SlowConsole)
    threads = iter(range(8))

    def write_lines():
        thread = next(threads)
        for i in range(20):
            consoles.write(write_end, b"%d %d\n" % (thread, i))
            time.sleep(0.02)

    asked_at_once(write_lines)
    with os.fdopen(read_end, "rb") as shown:
        lines = [shown.readline().split() for _ in range(160)]
    os.close(write_end)
    for thread in range(8):
        assert [int(i) for which, i in lines if int(which) == thread] == list(range(20))


@pytest.mark.parametrize(
    ("module", "maker", "ask"),
    [
        (urls.tempfile, "mkdtemp", lambda: urls.local_directory("memory://asked/at/once")),
        (rows.concurrent.futures, "ThreadPoolExecutor", lambda: rows._threads()),
        (iterators, "_Deletions", lambda: iterators._deletions()),
        (
            strategies.tensorflow_internals,
            "own_collective_keys",
            lambda: strategies._make_mirrored(("CPU:1",), True, False),
        ),
    ],
    ids=["directory", "threads", "deletions", "strategy"],
)
def test_what_a_process_needs_once_is_made_once(module, maker, ask, monkeypatch):
    for name in ("_directory_of_process", "_threads", "_deletions", "_make_mirrored"):
        for owner in (urls, rows, iterators, strategies):
            if hasattr(owner, name):
                monkeypatch.setattr(owner, name, once(getattr(owner, name).__wrapped__.__wrapped__))
    monkeypatch.setattr(module, maker, slowly(getattr(module, maker)))
    assert len(set(asked_at_once(ask))) == 1


# What `functools.cache` keeps of a whole module may be made twice by threads that ask at once: here it does no harm.
PURE = {"audit.gpu_kernels.registered", "mixtures.orders.arrange", "distributed.devices._nvml_gpus"}


def test_only_values_are_kept_by_a_cache_without_a_lock():
    kept = set()
    for module, path in MODULES.items():
        for node in tree_of(path).body:
            decorators = getattr(node, "decorator_list", [])
            kept |= {f"{module}.{node.name}" for d in decorators if "cache" in ast.unparse(d)}
    assert kept == PURE


class Reader:
    """A thread that reads ahead; `read` lists its items, and `is_inside` is true while one is made."""

    def __init__(self, gate, secs=0.05, count=10**6):
        self.read, self.num_made, self.is_inside, self.is_closed, self.error = [], 0, False, False, None
        self.secs, self.count = secs, count
        self.thread = threading.Thread(target=self.run, args=[gate], daemon=True)
        self.thread.start()

    def items(self):
        try:
            for number in range(self.count):
                self.is_inside = True
                time.sleep(self.secs)
                self.num_made += 1
                self.is_inside = False
                yield number
        finally:
            self.is_closed = True

    def run(self, gate):
        try:
            for number in gate.through(self.items()):
                self.read.append(number)
        except RuntimeError as error:
            self.error = error

    def wait_for(self, count):
        deadline = time.monotonic() + 300
        while len(self.read) < count:
            assert time.monotonic() < deadline
            time.sleep(0.001)

    def is_at_rest(self):
        count = self.num_made
        time.sleep(4 * self.secs)
        return not self.is_inside and self.num_made == count


def gate_of(owner, is_kept):
    gate = Gate()
    gate.keep_readings(owner, is_kept)
    return gate


def test_what_is_kept_goes_on_with_the_next_call_and_ends_with_its_owner():
    owner = Reader.__new__(Reader)
    gate = gate_of(owner, is_kept=True)
    for count in (2, 5, 8):
        with gate:
            reader = reader if count > 2 else Reader(gate)  # noqa: F821
            reader.wait_for(count)
        assert reader.is_at_rest() and not reader.is_closed
    assert reader.read == list(range(len(reader.read)))
    del owner
    reader.thread.join(300)
    assert reader.is_closed and "has ended" in str(reader.error)


def test_what_is_not_kept_ends_with_the_last_of_the_calls():
    gate = gate_of(test_what_is_not_kept_ends_with_the_last_of_the_calls, is_kept=False)
    with gate:
        with gate:
            reader = Reader(gate)
            reader.wait_for(1)
        reader.wait_for(4)
    assert reader.is_closed and reader.is_at_rest()
    reader.thread.join(300)
    assert "has ended" in str(reader.error)


def test_readers_pass_one_at_a_time_and_one_that_ends_holds_up_none():
    gate = Gate()
    first, second = Reader(gate), Reader(gate, count=2)
    with gate:
        second.thread.join(300)
        assert second.read == [0, 1] and second.is_closed and second.error is None
        seen = [first.is_inside and second.is_inside for _ in range(100)]
        first.wait_for(5)
    assert not any(seen)


def test_an_error_of_the_reader_leaves_the_gate_open_for_others():
    gate = Gate()

    def broken():
        yield 1
        raise OSError("disk is gone")

    with pytest.raises(OSError, match="disk is gone"):
        list(gate.through(broken()))
    with gate:
        assert list(gate.through(iter("ab"))) == ["a", "b"]


def test_a_call_does_not_wait_for_ever_and_the_reader_then_stops():
    begun, released, gate = threading.Event(), threading.Event(), gate_of(Gate, is_kept=False)

    def items():
        begun.set()
        released.wait(300)
        yield from range(9)

    def read():
        with pytest.raises(RuntimeError, match="has ended"):
            got.extend(gate.through(items()))
        got.append("ended")

    got = []
    with gate:
        thread = threading.Thread(target=read)
        thread.start()
        begun.wait(300)
    assert thread.is_alive() and not released.is_set()
    released.set()
    thread.join(60)
    assert got[-1:] == ["ended"] and len(got) <= 2


def test_a_decorated_function_is_a_call():
    gate = gate_of(Gate, is_kept=True)
    with gate:
        reader = Reader(gate)
        reader.wait_for(1)
    count = len(reader.read)
    gate(lambda: reader.wait_for(count + 2))()
    assert reader.is_at_rest()
    gate.end()


def test_the_end_of_a_call_waits_for_what_another_thread_closes(monkeypatch):
    monkeypatch.setattr(threads, "_SHUT_SECS", 60)
    gate, closing, closed = Gate(), threading.Event(), threading.Event()

    def read():
        try:
            yield from range(9)
        finally:
            closing.set()
            time.sleep(0.2)  # as the workers of a PyDataset, which make their batches to the end
            closed.set()

    with gate:
        batches = gate.through(read())
        next(batches)
        threading.Thread(target=batches.close).start()
        closing.wait()
    assert closed.is_set()

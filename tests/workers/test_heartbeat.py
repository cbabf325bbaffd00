"""Heartbeats between real processes, without TensorFlow and with a faster clock; test_liveness.py has the decisions."""

import atexit
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from distloop.launcher.machine import choose_ports
from distloop.workers import heartbeat
from distloop.workers.heartbeat import EXIT_CODE

pytestmark = pytest.mark.slow

ROOT = pathlib.Path(__file__).resolve().parents[2]
SECS = 45  # what a test waits for at most; what is not noticed takes 60

# Every program begins with this. `start` meets and watches; `train` takes 50 steps a second.
PRELUDE = """
import os, signal, socket, subprocess, sys, threading, time
from distloop.workers import heartbeat, liveness
from distloop.workers.heartbeat import Heartbeat
from distloop.workers.liveness import GATHERING, JOINING, TRAINING

heartbeat._SEND_SECS, liveness.SILENT_SECS = 0.1, 1.0
liveness.LEFT_SECS, heartbeat._LAST_MESSAGE_SECS = 1.0, 0.4

index, addresses = int(sys.argv[1]), sys.argv[2].split(",")
step = 0

def start(facts=None, *, timeout=240, hang=0, secret="0123456789abcdef"):
    them = Heartbeat(addresses, index, facts or {}, secret=secret)
    them.step = lambda: step
    try:
        them.meet(timeout, hang)
    except ValueError as error:
        them.fail(str(error))
        raise
    print("met", flush=True)
    return them

def train(them, steps=3000):
    global step
    them.phase = TRAINING
    for step in range(1, steps + 1):
        time.sleep(0.02)
"""


class Worker:
    """A process and its output."""

    def __init__(self, command, path):
        self.path = path
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": ""}
        with open(path, "w") as file:
            self.process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment)

    @property
    def text(self):
        return self.path.read_text()

    def wait_for(self, text):
        deadline = time.monotonic() + SECS
        while text not in self.text:
            assert time.monotonic() < deadline and self.process.poll() is None, self.text
            time.sleep(0.02)

    def end(self):
        """Returns the exit code of the process once it has ended."""
        return self.process.wait(SECS)


@pytest.fixture
def ports():
    return choose_ports(3)


@pytest.fixture
def run(tmp_path, ports):
    """Returns a function that starts one worker a program; kills all workers after the test."""
    workers = []

    def run(*programs, addresses=None):
        addresses = addresses or [f"127.0.0.1:{port}" for port in ports[: len(programs)]]
        started = []
        for index, program in enumerate(programs):
            if program is None:
                continue
            path = tmp_path / f"worker{index}-{len(workers)}.py"
            path.write_text(PRELUDE + textwrap.dedent(program))
            command = [sys.executable, str(path), str(index), ",".join(addresses)]
            started.append(Worker(command, path.with_suffix(".txt")))
            workers.append(started[-1])
        return started

    yield run
    for worker in workers:
        worker.process.kill()
        worker.process.wait()


def codes(workers):
    return [worker.end() for worker in workers]


WAITS = "them = start()\ntrain(them)"


def test_workers_meet_though_one_is_late(run):
    workers = run(*[f"time.sleep({secs})\nstart({{'a': '1'}})\nprint('end')" for secs in (0, 0.1, 1.5)])
    assert codes(workers) == [0, 0, 0]
    assert [worker.text for worker in workers] == ["met\nend\n"] * 3


def test_a_message_that_comes_before_the_heartbeat_is_made_counts(run):
    slow = """
        class Slow(heartbeat.Star):
            def __init__(self, *arguments):
                super().__init__(*arguments)
                deadline = time.monotonic() + 300
                while not self._connections and time.monotonic() < deadline:
                    time.sleep(0.01)
                time.sleep(0.5)  # five messages

        heartbeat.Star = Slow
        start()
    """
    workers = run("start()", slow)
    assert codes(workers) == [0, 0], workers[1].text


@pytest.mark.parametrize("end", ["", "them.fail('boom')", "sys.exit(3)"])
def test_a_process_that_ends_has_no_thread_that_reads_the_step_or_sends(end, run):
    program = """
        atexit.register(lambda: print({t.name for t in threading.enumerate()} & {"distloop-heartbeat"}, flush=True))
        them = start()
    """
    (worker,) = run("import atexit\n" + textwrap.dedent(program) + end)
    worker.end()
    assert worker.text.splitlines()[-1] == "set()"


def test_a_worker_that_does_not_come_is_named_in_time(run, ports):
    began = time.monotonic()
    workers = run("start(timeout=1)", "start(timeout=60)", None)
    assert codes(workers) == [1, EXIT_CODE] and time.monotonic() - began < SECS
    why = f"worker 2 (127.0.0.1:{ports[2]}) did not come within 1 seconds, and worker 0 waits no longer: look at their "
    assert f"ValueError: {why}" in workers[0].text
    assert workers[1].text.startswith(f"distloop: worker 0 failed at step 0 (starting): {why}")


def test_missing_workers_are_printed_while_waiting(run, ports):
    (worker,) = run("heartbeat.time.sleep, sleep = lambda s: sleep(s / 10), time.sleep\nstart(timeout=5.5)", None)
    worker.end()
    assert worker.text.startswith(f"distloop: waiting for worker 1 (127.0.0.1:{ports[1]}).\n")


def test_heartbeats_without_the_secret_do_not_count_and_are_named(run):
    workers = run("start(timeout=2)", "start(timeout=1, secret='')")
    assert codes(workers) == [1, 1]
    for worker in workers:
        assert "connections of 127.0.0.1 do not count: they are not signed with the DISTLOOP_SECRET" in worker.text


def test_other_facts_are_refused_on_every_worker(run):
    same = "start({'--batch_size': '16', 'x': '1'})"
    workers = run(same, f"time.sleep(1.5)\n{same}", "start({'--batch_size': '32'})")
    assert codes(workers) == [1, 1, 1]
    for worker in workers:
        assert worker.text.splitlines()[-1] == (
            "ValueError: Workers were started differently: --batch_size is 16 on worker 0 and 32 on worker 2; start "
            "all with the same command."
        )


FAILS = """
them = start()
train(them, 10)
{}
"""


@pytest.mark.parametrize(
    ("failure", "error", "code"),
    [
        ("raise RuntimeError('boom\\nmore.')", "RuntimeError: boom", 1),
        ("raise KeyboardInterrupt", "KeyboardInterrupt", -signal.SIGINT),
        ("sys.excepthook = sys.__excepthook__\n1 / 0", "ZeroDivisionError: division by zero", 1),
    ],
)
def test_other_workers_end_after_a_failure(failure, error, code, run):
    waits_longer = f"heartbeat._LAST_MESSAGE_SECS = 5.0  # a busy machine ends a process late\n{WAITS}"
    workers = run(waits_longer, FAILS.format(failure), WAITS)
    workers[1].wait_for("met")
    began = time.monotonic()
    assert workers[1].end() == code and workers[0].process.poll() is None  # it ends first
    assert codes(workers) == [EXIT_CODE, code, EXIT_CODE] and time.monotonic() - began < SECS
    for index in (0, 2):
        (line,) = workers[index].text.splitlines()[1:]  # and no traceback
        assert line.startswith(f"distloop: worker 1 failed at step 10 (training): {error}. So worker {index} (step ")
        assert line.endswith(", training) ends, too.")
    assert "Traceback" in workers[1].text and "ends, too" not in workers[1].text


@pytest.mark.parametrize(
    ("before", "printed"),
    [
        pytest.param("print('a line\\nand a half', end='')", "a line\nand a half", id="lines printed before it"),
        pytest.param(
            "sys.stdout = os.fdopen(os.pipe()[1], 'w')\n"
            "threading.Thread(target=lambda: print('x' * 10**6, flush=True), daemon=True).start()",
            "",
            id="not a thread that hangs while it prints",
        ),
        pytest.param(
            "write = lambda: (time.sleep(3), print('written', flush=True))\n"
            "threading.Thread(target=write, name='distloop-checkpoint').start()",
            r"written\n\Z",
            id="a checkpoint that is being written",
        ),
    ],
)
def test_the_end_waits_for(before, printed, run):
    (worker, _) = run(f"them = start()\n{before}\ntrain(them)", FAILS.format("1 / 0"))
    assert worker.end() == EXIT_CODE and re.search(printed, worker.text)


def test_a_failure_between_meeting_and_training_is_reported(run, tmp_path):
    path = repr(str(tmp_path / "is joining"))
    joins = f"them = start(timeout=60)\nthem.phase = JOINING\nopen({path}, 'w').close()\ntime.sleep(60)"
    workers = run(joins, f"start()\nwhile not os.path.exists({path}): time.sleep(0.01)\nraise ValueError('boom')")
    assert codes(workers) == [EXIT_CODE, 1]
    assert "worker 1 failed at step 0 (starting): ValueError: boom. So worker 0 (step 0, joining)" in workers[0].text


def test_errors_in_a_fork_are_not_reported(run):
    program = """
        them = start()
        if os.fork() == 0:
            raise RuntimeError("in the fork")
        os.wait()
        train(them, 75)
        print("end")
    """
    workers = run(program, "them = start()\ntrain(them, 100)\nprint('end')")
    assert codes(workers) == [0, 0]
    assert workers[1].text == "met\nend\n" and "in the fork" in workers[0].text


def test_a_killed_worker_is_noticed_at_once_though_a_process_of_it_lives(run, ports):
    program = (
        "them = start()\nlistener = socket.create_server(('', int(addresses[index].split(':')[1])))\n"
        "subprocess.Popen(['sleep', '25'], close_fds=False)\n"  # files are closed there on exec alone
        "train(them, 10)\nthem.phase = 'x'\ntime.sleep(0.5)\nprint('go', flush=True)\ntime.sleep(60)"
    )
    workers = run(program, program)
    for worker in workers:
        worker.wait_for("go")
    workers[1].process.kill()
    began = time.monotonic()
    assert workers[0].end() == EXIT_CODE and time.monotonic() - began < 20  # with hang_timeout=0, and no need of it
    assert workers[0].text.splitlines()[2:] == [
        f"distloop: the process of worker 1 (127.0.0.1:{ports[1]}) is gone without a word, last heard at step 10 (x): "
        "was it killed, or out of memory? Its own output may tell. So worker 0 (step 10, x) ends, too."
    ]
    socket.create_server(("", ports[1])).close()


def test_a_silent_worker_is_noticed_within_the_hang_timeout(run, ports):
    workers = run(*["them = start(hang=2)\ntrain(them)"] * 3)
    for worker in workers:
        worker.wait_for("met")
    time.sleep(1)
    workers[1].process.send_signal(signal.SIGSTOP)
    began = time.monotonic()
    assert codes(workers[::2]) == [EXIT_CODE] * 2
    assert 1.5 < time.monotonic() - began < SECS
    for index in (0, 2):
        _, first, *stack, last = workers[index].text.splitlines()
        assert first == last  # in sight from both ends
        silent = rf"distloop: worker 1 \(127.0.0.1:{ports[1]}\) has been silent for \d+ seconds, last heard "
        assert re.match(silent, last)
        assert f" (training). So worker {index} (step " in last
        assert "Thread MainThread:" in stack and "    time.sleep(0.02)" in stack
        assert "_listen" not in workers[index].text
    workers[1].process.send_signal(signal.SIGCONT)
    assert workers[1].end() == EXIT_CODE  # it hears what they said, or that they are gone


def test_a_suspended_worker_blames_nobody_when_it_resumes(run):
    workers = run("them = start(hang=4)\ntrain(them, 100)", "them = start()\ntrain(them, 400)")
    for worker in workers:
        worker.wait_for("met")
    workers[0].process.send_signal(signal.SIGSTOP)
    time.sleep(5)
    workers[0].process.send_signal(signal.SIGCONT)
    assert codes(workers) == [0, 0], workers[0].text


def test_a_worker_that_leaves_while_others_need_it_is_noticed(run, ports):
    program = "them = start()\ntrain(them, 10)\n"
    workers = run(program + "them.phase = GATHERING\ntime.sleep(60)", program + "sys.exit(3)")
    assert codes(workers) == [EXIT_CODE, 3]
    assert workers[0].text.splitlines()[1] == (
        f"distloop: worker 1 (127.0.0.1:{ports[1]}) left at step 10 (training), before the run was over. So worker 0 "
        "(step 10, waiting for all) ends, too."
    )


def test_a_worker_at_its_end_waits_for_the_others_but_not_for_ever(run):
    began = time.monotonic()
    workers = run("start()\nprint('done', flush=True)", "them = start()\nthem.phase = 'exporting'\ntime.sleep(2)")
    workers[0].wait_for("done")
    assert codes(workers) == [0, 0] and time.monotonic() - began > 2
    began = time.monotonic()
    workers = run("start(hang=2)", "start()\ntime.sleep(60)")
    assert workers[0].end() == 0 and time.monotonic() - began < SECS


LOST = """
class UnavailableError(Exception): pass
them = start()
raise UnavailableError("socket closed\\n\\tmore")
"""


def test_an_error_of_the_collectives_names_the_lost_worker(run):
    workers = run(LOST, "them = start()\ntime.sleep(0.5)\nos._exit(9)")
    assert codes(workers) == [EXIT_CODE, 9]
    (line,) = workers[0].text.splitlines()[1:]
    assert line.startswith("distloop: the process of worker 1 (")


def test_an_error_of_the_collectives_without_a_lost_worker_is_raised(run, ports):
    workers = run(LOST, "them = start()\nthem.phase = 'x'\ntime.sleep(60)")
    assert codes(workers) == [1, EXIT_CODE]
    assert workers[0].text.splitlines()[1] == (
        f"distloop: this error of TensorFlow's is about the other workers; worker 0 (127.0.0.1:{ports[0]}) is at step "
        f"0 (starting); worker 1 (127.0.0.1:{ports[1]}) is at step 0 (x)."
    )
    assert "Traceback" in workers[0].text
    assert "worker 0 failed at step 0 (starting): UnavailableError: socket closed. So" in workers[1].text


class UnavailableError(Exception):
    """Has the name of TensorFlow's error."""


def test_an_error_while_a_collective_error_is_handled_is_one_too():
    first, second, third = UnavailableError("socket closed"), OSError("no such file"), OSError()
    second.__context__ = first
    assert heartbeat.is_collective_error(second) and not heartbeat.is_collective_error(OSError("no such file"))
    third.__cause__ = third
    assert not heartbeat.is_collective_error(third)


def test_a_killed_worker_is_named_by_all_others_and_all_leave_together(run):
    addresses = [f"127.0.0.1:{port}" for port in choose_ports(10)]
    workers = run(*["them = start()\ntrain(them)"] * 9, "start()\nprint('left', flush=True)", addresses=addresses)
    for worker in workers:
        worker.wait_for("met")
    workers[9].wait_for("left")
    time.sleep(0.5)
    assert workers[9].process.poll() is None  # it waits for the others
    workers[5].process.kill()
    began = time.monotonic()
    others = workers[:5] + workers[6:9]
    assert codes(others) == [EXIT_CODE] * 8 and time.monotonic() - began < SECS
    for worker in others:
        (line,) = worker.text.splitlines()[1:]  # and no stacks
        assert line.startswith(f"distloop: the process of worker 5 ({addresses[5]}) is gone without a word")
    assert workers[9].end() == 0


def test_at_its_end_a_process_waits_for_a_thread_that_reads_the_step():
    begun = threading.Event()

    def slow_step():  # as a read of a variable on a busy machine
        begun.set()
        time.sleep(1.5)
        return 0

    them = heartbeat.Heartbeat([f"127.0.0.1:{port}" for port in choose_ports(2)], 0, {})
    them.step = slow_step
    assert begun.wait(300)
    atexit.unregister(them._end_threads)
    them._end_threads()
    assert not any(thread.is_alive() for thread in them._threads)
    them._star.close_port()

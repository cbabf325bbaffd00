"""Children of the launcher: what they get, and how they end; see also test_processes.py."""

import fcntl
import os
import resource
import select
import shlex
import subprocess
import sys
import types

import pytest

from distloop.launcher import processes
from distloop.workers import preemption


@pytest.mark.slow
def test_a_child_has_its_descriptors_alone_and_writes_its_group_first():
    (guard_end, guard), (_, more) = pipes = [os.pipe() for _ in range(2)]
    program = "import os; os.write(1, b'out'); os.write(2, b'err'); print(sorted(os.listdir('/proc/self/fd')))"
    lines = []
    child = processes.Process(
        *(0, [sys.executable, "-c", program], {}),
        cores=[],
        guard=types.SimpleNamespace(pipe=guard, remove=lambda group: None),
        descriptors=[more],
        write=lambda *line: lines.append(line),
    )
    child._process.wait(300)
    assert child.has_ended() and child.code == 0
    last = sorted(["0", "1", "2", str(more), "3" if more != 3 else "4"])
    assert os.read(guard_end, 1000) == b"+%d\n" % child._process.pid
    assert sorted(lines) == [(1, f"[worker 0] out{last}\n".encode()), (2, b"[worker 0] err\n")]
    for end in sum(pipes, ()):
        os.close(end)


def test_descriptors_above_1023_are_waited_for():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    read_end, write_end = os.pipe()
    high = fcntl.fcntl(read_end, fcntl.F_DUPFD, 1500)
    assert processes.wait([high], 0.0) == []
    os.write(write_end, b"x")
    assert processes.wait([high], 5.0) == [high]
    for descriptor in (read_end, write_end, high):
        os.close(descriptor)


def test_a_process_that_ends_with_another_refuses_a_number_of_none():
    with pytest.raises(ValueError, match=r"parent=99999999 is no process of this machine: give the caller's number"):
        preemption.end_with(99999999)


_ENDS_WITH = """
import sys, time
from distloop.workers import preemption
preemption.end_with(int(sys.argv[1]), 0.0)
print("watches", flush=True)
time.sleep(60)
"""


@pytest.mark.slow
@pytest.mark.parametrize("between", ["", "(%s) & wait $!", "(%s) & read line"])
def test_a_process_ends_with_its_caller_whatever_is_between(between):
    caller = subprocess.Popen(["sleep", "60"])
    command = shlex.join([sys.executable, "-c", _ENDS_WITH, str(caller.pid)])
    shell = ["sh", "-c", between % command if between else command]
    with subprocess.Popen(shell, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as started:
        assert select.select([started.stdout], [], [], 10.0)[0], "it has not begun"
        assert started.stdout.readline() == "watches\n"
        started.stdin.close()  # the last shell ends before its caller
        assert not select.select([started.stdout], [], [], 1.0)[0]  # its child goes on
        caller.kill()  # and stays as a zombie
        assert started.stdout.read() == ""  # the child has ended
    caller.wait()

"""Children of the launcher: what they get, and how they end; see also test_processes.py."""

import fcntl
import os
import resource
import sys

import pytest

from distloop.launcher import children


@pytest.mark.slow
def test_a_child_has_its_descriptors_alone_and_writes_its_group_first():
    pipes = [os.pipe() for _ in range(4)]
    program = "import os; os.write(1, b'out'); os.write(2, b'err'); print(sorted(os.listdir('/proc/self/fd')))"
    guard, out, err, more = (write_end for _, write_end in pipes)
    child = children.start([sys.executable, "-c", program], {}, [], guard, {1: out, 2: err, more: more})
    assert child.wait(30) == 0
    texts = [os.read(read_end, 1000).decode() for read_end, _ in pipes[:3]]
    last = sorted(["0", "1", "2", str(more), "3" if more != 3 else "4"])
    assert texts == [f"+{child.pid}\n", f"out{last}\n", "err"]
    for end in sum(pipes, ()):
        os.close(end)


def test_descriptors_above_1023_are_waited_for():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    read_end, write_end = os.pipe()
    high = fcntl.fcntl(read_end, fcntl.F_DUPFD, 1500)
    assert children.wait([high], 0.0) == []
    os.write(write_end, b"x")
    assert children.wait([high], 5.0) == [high]
    for descriptor in (read_end, write_end, high):
        os.close(descriptor)


def test_a_process_that_ends_with_its_parent_refuses_another_parent():
    with pytest.raises(ValueError, match=r"parent=1 is not the process that started this one: give its number"):
        children.end_with(1)

"""Calls of Linux that Python 3.10 lacks, and what this machine allows."""

import ctypes
import functools
import os
import re
import subprocess
import tempfile

_NEW_MOUNTS, _NEW_PROCESSES, _NEW_NETWORK = 0x20000, 0x20000000, 0x40000000
_BIND, _PRIVATE = 4096, (1 << 18) | 16384
_SUBREAPER = 36

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result):
    if result != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def adopt_orphans():
    """From now on a descendant whose parent ends becomes a child of this process."""
    _check(_libc.prctl(_SUBREAPER, 1, 0, 0, 0))


def number_processes_anew():
    """The next child of this process has the number 1."""
    _check(_libc.unshare(_NEW_PROCESSES))


def join_network(name):
    """Moves this thread into a network namespace of `ip netns`."""
    with open(f"/run/netns/{name}") as namespace:
        _check(_libc.setns(namespace.fileno(), _NEW_NETWORK))


def mount_over(source, target):
    """Lets this process alone see a file under another's path."""
    _check(_libc.unshare(_NEW_MOUNTS))
    _check(_libc.mount(b"none", b"/", None, _PRIVATE, None))
    _check(_libc.mount(source.encode(), target.encode(), None, _BIND, None))


def children_of(pid):
    """Returns the processes whose parent is `pid`, zombies included."""
    try:
        tasks = os.listdir(f"/proc/{pid}/task")
    except OSError:  # it has ended
        return []
    return [int(child) for task in tasks for child in _read(pid, f"task/{task}/children").split()]


def descendants_of(pid):
    return [process for child in children_of(pid) for process in (child, *descendants_of(child))]


def number_within(pid):
    """Returns the number of a process in its own namespace; None if it has ended."""
    numbers = re.search(r"^NSpid:(.*)$", _read(pid, "status"), re.M)
    return int(numbers[1].split()[-1]) if numbers else None


def state_of(pid):
    """Returns the letter of a process's state; "X" if it is gone."""
    return (_read(pid, "stat").rpartition(")")[2].split() or ["X"])[0]


def name_of(pid):
    return _read(pid, "comm").strip() or "?"


def _read(pid, name):
    """Returns what Linux says of a process; nothing if it has ended."""
    try:
        with open(f"/proc/{pid}/{name}") as file:
            return file.read()
    except OSError:
        return ""


@functools.cache
def can_mount():
    """Returns whether this machine allows a small disk of memory."""
    with tempfile.TemporaryDirectory() as path:
        if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", path], capture_output=True).returncode:
            return False
        subprocess.run(["umount", path], check=True)
    return True


@functools.cache
def can_make_networks():
    """Returns whether this machine allows network namespaces and TUN devices."""
    name = f"nemesis-{os.getpid()}-try"
    try:
        made = subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode == 0
    except FileNotFoundError:
        return False
    if made:
        subprocess.run(["ip", "netns", "del", name], check=True)
    return made and os.path.exists("/dev/net/tun")


@functools.cache
def can_number_processes():
    """Returns whether this machine allows process namespaces."""
    pid = os.fork()
    if pid == 0:
        try:
            number_processes_anew()
        except OSError:
            os._exit(1)
        os._exit(0)
    return os.waitpid(pid, 0)[1] == 0

"""Hosts on a network of this process's own: it carries every packet, so it can lose and delay them, one way too.

    with Network("round-1", count=2, directory="/tmp/names") as network:
        network.rules[0, 1] = Rule(loss=0.3)        # from host 0 to host 1
        network.hosts[1].place()                    # where a command finds it

Each host is a network namespace with one TUN device. Its commands see the hosts' names in a file that is mounted over
/etc/hosts. `tc netem` is not needed, which many kernels of containers lack.
"""

import fcntl
import heapq
import os
import random
import select
import struct
import subprocess
import threading
import time
from typing import NamedTuple

from tests.campaigns.nemesis import kernel

_SET_INTERFACE, _IP_PACKETS = 0x400454CA, 0x0001 | 0x1000


class Rule(NamedTuple):
    """What happens to the packets from one host to another."""

    loss: float = 0.0  # the part that is lost
    delay_secs: float = 0.0


class Place(NamedTuple):
    """What a process has to join to be on a host."""

    network: str  # of `ip netns`
    names: str  # path of the file to see as /etc/hosts


class Host:
    """One host."""

    def __init__(self, prefix, index, directory):
        self.name, self.address = f"host{index}", f"10.77.0.{index + 1}"
        self._network, self._names = f"{prefix}-{index}", os.path.join(directory, f"hosts{index}")
        _run("ip", "netns", "add", self._network)
        opening = threading.Thread(target=self._open)  # a thread of its own, which stays in the namespace
        opening.start()
        opening.join()
        for command in ("link set lo up", f"addr add {self.address}/24 dev tun0", "link set tun0 up"):
            _run("ip", "-n", self._network, *command.split())

    def place(self):
        return Place(self._network, self._names)

    def resolve(self, addresses):
        """Sets the addresses of names, as this host's commands see them."""
        with open(self._names, "w") as file:
            file.writelines(f"{address} {name}\n" for name, address in {"localhost": "127.0.0.1", **addresses}.items())

    def _open(self):
        kernel.join_network(self._network)
        self.device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(self.device, _SET_INTERFACE, struct.pack("16sH14s", b"tun0", _IP_PACKETS, b""))

    def close(self):
        os.close(self.device)
        _run("ip", "netns", "del", self._network)


class Network:
    """Hosts, and a thread that carries their packets."""

    def __init__(self, prefix, count, directory, seed=0):
        self.hosts = [Host(prefix, index, directory) for index in range(count)]
        self.rules = {}  # (from, to) -> Rule
        self._random = random.Random(seed)
        self._is_open = True
        self._thread = threading.Thread(target=self._carry, daemon=True)
        self.resolve_rightly()

    def resolve_rightly(self):
        for host in self.hosts:
            host.resolve({other.name: other.address for other in self.hosts})

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._is_open = False
        self._thread.join()
        for host in self.hosts:
            host.close()

    def _carry(self):
        addresses = {bytes(map(int, host.address.split("."))): i for i, host in enumerate(self.hosts)}
        indices = {host.device: i for i, host in enumerate(self.hosts)}
        late, count = [], 0  # (due, number, host, packet)
        while self._is_open:
            timeout = min(0.1, max(0.0, late[0][0] - time.monotonic())) if late else 0.1
            for device in select.select(list(indices), [], [], timeout)[0]:
                packet = os.read(device, 65536)
                target, source = addresses.get(packet[16:20]), indices[device]
                rule = self.rules.get((source, target), Rule())
                if target is None or self._random.random() < rule.loss:
                    continue
                count += 1
                heapq.heappush(late, (time.monotonic() + rule.delay_secs, count, target, packet))
            while late and late[0][0] <= time.monotonic():
                _, _, target, packet = heapq.heappop(late)
                try:
                    os.write(self.hosts[target].device, packet)
                except OSError:  # its queue is full
                    continue


def _run(*command):
    subprocess.run(command, check=True, capture_output=True)

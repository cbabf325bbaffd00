"""Free ports of this machine, its cores as groups of whole physical ones, and the tasks of its Slurm step.

    machine.choose_ports(2)                 # [17432, 30121]
    machine.split_cores(2)                  # [[0, 8, 1, 9, ...], [4, 12, 5, 13, ...]]
    machine.read_slurm_cluster()            # the tasks' addresses, and the index of this one

It does not know which workers get them. `workers.environment` asks for the cluster in a Slurm step of several tasks.
"""

import contextlib
import itertools
import os
import random
import re
import socket

from distloop.workers.environment import Cluster

_TOPOLOGY = "/sys/devices/system/cpu/cpu{core}/topology/{name}"  # Linux


def has_other_tasks() -> bool:
    """Returns whether a scheduler has started this command several times, as tasks of Slurm or pods of Kubernetes."""
    return "JOB_COMPLETION_INDEX" in os.environ or int(os.environ.get("SLURM_STEP_NUM_TASKS", "1")) > 1


def choose_ports(count: int) -> list[int]:
    """Returns random free ports of this host.

    They are below the range from which the system picks ports: TensorFlow listens seconds from now, and until then such
    a port may go to any connection, even to that of a worker that tries to reach it. Programs
    that start at once with one seed choose different ports.
    """
    return list(itertools.islice(filter(is_free, random.SystemRandom().sample(range(10_000, 32_768), 5_000)), count))


def is_free(port: int) -> bool:
    """Returns whether nobody listens on a port, on any address of this host."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as TensorFlow: closed connections do not count
        try:
            probe.bind(("", port))  # on every address, as TensorFlow does
        except OSError:
            return False
        return True


def split_cores(groups: int, size: int | None = None) -> list[list[int]]:
    """Returns the cores of each group, neighbours together; cores left over belong to no group.

    Args:
        groups: number of groups.
        size: cores in each group; None: as many as possible.

    Returns:
        Core numbers by group; empty lists if the system cannot bind a process to cores.
    """
    if not hasattr(os, "sched_setaffinity"):
        return [[]] * groups
    cores = sorted(os.sched_getaffinity(0), key=_core_position)
    size = len(cores) // groups if size is None else size
    return [cores[i * size : (i + 1) * size] for i in range(groups)]


def _core_position(core: int) -> tuple[int, ...]:
    """Returns the position of a core: package, physical core, thread."""
    position = []
    for name in ("physical_package_id", "core_id"):
        with contextlib.suppress(OSError), open(_TOPOLOGY.format(core=core, name=name)) as file:
            position.append(int(file.read()))
    return (*position, core)


def read_slurm_cluster() -> Cluster:
    """Returns the cluster of the tasks of this Slurm step, in Slurm's order.

    TensorFlow's own resolver sorts hosts as text (n10 before n9) and requires GPUs.

    Raises:
        ValueError: if the variables do not say which task runs where.
    """
    hosts = _expand_hosts(os.environ.get("SLURM_STEP_NODELIST", ""))
    runs = re.findall(r"(\d+)(?:\(x(\d+)\))?", os.environ.get("SLURM_STEP_TASKS_PER_NODE", ""))  # 2(x3),1
    counts = [int(count) for count, times in runs for _ in range(int(times or 1))]
    nodes = [(node, i) for node, count in enumerate(counts) for i in range(count)]  # by task
    if os.environ.get("SLURM_DISTRIBUTION", "").startswith("cyclic"):
        nodes.sort(key=lambda pair: pair[::-1])
    names = ("STEP_NUM_TASKS", "PROCID", "NODEID", "LOCALID")
    count, index, node, local = (int(os.environ.get(f"SLURM_{name}", "-1")) for name in names)
    is_known = len(hosts) == len(counts) and 0 <= index < len(nodes) == count and nodes[index] == (node, local)
    if not is_known or os.environ.get("SLURMD_NODENAME", hosts[node]) != hosts[node]:
        values = {name: os.environ.get(f"SLURM_{name}") for name in (*names, "STEP_NODELIST", "STEP_TASKS_PER_NODE")}
        raise ValueError(
            f"{', '.join(f'SLURM_{name}={value}' for name, value in values.items())} do not say which task runs "
            "where: start all tasks by one srun --distribution=block, or set TF_CONFIG."
        )
    ports = _slurm_ports(max(counts))
    return Cluster(tuple(f"{hosts[node]}:{ports[i]}" for node, i in nodes), index)


def _slurm_ports(count: int) -> list[int]:
    """Returns `count` ports, the same on all nodes of this Slurm step, and others than those of other steps.

    They are those that Slurm reserved, or else a block that job and step choose, below the range from which the system
    picks ports. Jobs next to each other are far apart (multiplicative hashing by the golden ratio: Knuth, The Art of
    Computer Programming 3, 6.4), so that each may have many steps; with one task a node, jobs 22,768 apart collide.
    """
    reserved = [int(port) for port in _expand_numbers(os.environ.get("SLURM_STEP_RESV_PORTS", ""))]
    if len(reserved) >= count:
        return reserved[:count]
    size = 2 ** (count - 1).bit_length()
    blocks = 22_768 // size
    job, step = (int(os.environ.get(f"SLURM_{name}", "0")) for name in ("JOB_ID", "STEP_ID"))
    first = 10_000 + (job * (round(0.618034 * blocks) | 1) + step) % blocks * size
    return list(range(first, first + count))


def _expand_hosts(text: str) -> list[str]:
    """Returns the hosts of a Slurm node list: `n[08-10,12]-ib,m1` has five."""
    hosts: list[str] = []
    for item in re.findall(r"(?:\[[^]]*\]|[^,[])+", text):
        pieces = re.findall(r"\[[^]]*\]|[^[]+", item)
        hosts += map("".join, itertools.product(*(_expand_numbers(p) if p[0] == "[" else [p] for p in pieces)))
    return hosts


def _expand_numbers(text: str) -> list[str]:
    ends = re.findall(r"(\d+)(?:-(\d+))?", text)
    return [str(n).zfill(len(first)) for first, last in ends for n in range(int(first), int(last or first) + 1)]

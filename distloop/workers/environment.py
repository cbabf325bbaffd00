"""The workers of a run, read from TF_CONFIG or the variables of a Slurm step; cores and free ports of this machine.

    cluster = environment.find_cluster()        # None: this process is alone
    cluster.addresses, cluster.index            # ("n8:10000", "n9:10001"), 0
    secret = environment.find_secret()          # "" without DISTLOOP_SECRET
    environment.split_cores(2)                  # [[0, 8, 1, 9, ...], [4, 12, 5, 13, ...]]: whole physical cores

It does not know what the workers do, nor whether they can be reached.
"""

import contextlib
import dataclasses
import ipaddress
import itertools
import json
import os
import random
import re
import socket
from typing import Any

_MIN_SECRET_CHARS = 16
_TOPOLOGY = "/sys/devices/system/cpu/cpu{core}/topology/{name}"  # Linux


@dataclasses.dataclass(frozen=True)
class Cluster:
    """The processes that take part in a run."""

    addresses: tuple[str, ...]  # host:port of each worker, the chief first
    index: int  # of this worker

    def bypass_proxies(self) -> None:
        """Makes gRPC, which TensorFlow uses, connect to the workers themselves where the environment names a proxy.

        A proxy would not reach 127.0.0.1, and would see the values; gRPC reads the variable at each connection.
        """
        others = os.environ.get("no_grpc_proxy") or os.environ.get("no_proxy") or os.environ.get("NO_PROXY", "")
        hosts = [split_address(address)[0] for address in self.addresses]
        os.environ["no_grpc_proxy"] = ",".join(dict.fromkeys([*filter(None, others.split(",")), *hosts]))


def find_secret() -> str:
    """Returns what the workers share to sign their messages, from DISTLOOP_SECRET; "" if it is not set.

    Raises:
        ValueError: if it is so short that it could be guessed.
    """
    secret = os.environ.get("DISTLOOP_SECRET", "")
    if 0 < len(secret) < _MIN_SECRET_CHARS:
        raise ValueError(
            f"DISTLOOP_SECRET has {len(secret)} characters, which can be guessed: set it to {_MIN_SECRET_CHARS} random "
            "ones or more, the same on all workers, as openssl rand -hex 16 prints them, or unset it."
        )
    return secret


def split_address(address: str) -> tuple[str, int]:
    """Returns host and port of `host:port`; an address of IPv6 stands in brackets, as in `[::1]:4000`.

    Raises:
        ValueError: if it is neither.
    """
    match = re.fullmatch(r"(?:\[([\da-fA-F:.]+)\]|([\w.-]+)):(\d+)", address)
    host, port = (match[1] or match[2], int(match[3])) if match else ("", 0)
    try:
        is_name = bool(host.encode("idna")) if match and match[2] else bool(host and ipaddress.IPv6Address(host))
    except ValueError:  # a label of the name is empty or too long, or the number is none
        is_name = False
    if not is_name or not 0 < port < 2**16:
        hint = ", with IPv6 in brackets, as in [::1]:4000" if address.count(":") > 1 else ""
        raise ValueError(f"{address!r} is no host:port{hint}")
    return host, port


def has_other_tasks() -> bool:
    """Returns whether a scheduler has started this command several times, as tasks of Slurm or pods of Kubernetes."""
    return "JOB_COMPLETION_INDEX" in os.environ or int(os.environ.get("SLURM_STEP_NUM_TASKS", "1")) > 1


def find_cluster() -> Cluster | None:
    """Returns the cluster that TF_CONFIG or a Slurm step of several tasks describes; None for a process on its own.

    Raises:
        ValueError: if they describe no cluster that this process can join.
    """
    if text := os.environ.get("TF_CONFIG"):
        try:
            return _read_tf_config(json.loads(text))
        except (ValueError, TypeError, AttributeError) as error:
            raise ValueError(
                f"TF_CONFIG={text[:200]!r} was given, which is no cluster that distloop can join ({error}): it looks "
                'like {"cluster": {"worker": ["host:port", ...]}, "task": {"type": "worker", "index": 0}}; '
                "distloop.launch makes it."
            ) from None
    return _read_slurm_step() if int(os.environ.get("SLURM_STEP_NUM_TASKS", "1")) > 1 else None


def _read_tf_config(tf_config: Any) -> Cluster | None:
    """Returns the cluster of a parsed TF_CONFIG; raises ValueError, TypeError or AttributeError if it is malformed."""
    if not isinstance(tf_config, dict) or "sparseCluster" in tf_config:  # a TFJob with enableDynamicWorker writes it
        raise ValueError("it has to name every worker")
    jobs, task = tf_config.get("cluster") or {}, tf_config.get("task") or {}
    kind, index = task.get("type", "worker"), task.get("index")
    if unknown := sorted({*jobs, kind} - {"chief", "worker", "evaluator"}):
        raise ValueError(f"distloop knows the jobs chief and worker, not {' and '.join(unknown)}")
    if kind == "evaluator":
        raise ValueError("the workers evaluate: leave the evaluator out")
    chiefs, workers = jobs.get("chief", []), jobs.get("worker", [])
    for address in [*chiefs, *workers]:
        split_address(str(address))
    if len(chiefs) + len(workers) < 2:
        return None
    if index is None or not 0 <= int(index) < len(jobs.get(kind, [])):
        raise ValueError(f"there is no {kind} {index}")
    return Cluster((*chiefs, *workers), int(index) + (len(chiefs) if kind == "worker" else 0))


def _read_slurm_step() -> Cluster:
    """Returns the cluster of the tasks of this Slurm step, in Slurm's order.

    TensorFlow's own resolver sorts hosts as text (n10 before n9) and requires GPUs.
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
    ports = _choose_slurm_ports(max(counts))
    return Cluster(tuple(f"{hosts[node]}:{ports[i]}" for node, i in nodes), index)


def _choose_slurm_ports(count: int) -> list[int]:
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


def check_gpus_of_tasks(num_visible_gpus: int) -> None:
    """Checks that the tasks of a Slurm step on this node do not share GPUs, which NCCL does not allow.

    Raises:
        ValueError: if they do.
    """
    tasks = len(os.environ.get("SLURM_GTIDS", "").split(","))
    gpus_on_node = int(os.environ.get("SLURM_GPUS_ON_NODE", num_visible_gpus * tasks))
    if num_visible_gpus * tasks > gpus_on_node and "TF_CONFIG" not in os.environ:
        raise ValueError(
            f"{tasks} tasks on this node see {num_visible_gpus} GPUs each, but there are {gpus_on_node}: start one "
            "task a node, which takes all of them, or give each task its own by srun --gpus-per-task=1."
        )


def count_cores() -> int:
    """Returns the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


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

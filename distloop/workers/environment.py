"""The workers of a run, read from TF_CONFIG or the variables of a Slurm step, and the cores of this process.

    cluster = environment.find_cluster()        # None: this process is alone
    cluster.addresses, cluster.index            # ("n8:10000", "n9:10001"), 0
    secret = environment.find_secret()          # "" without DISTLOOP_SECRET

It does not know what the workers do, nor whether they can be reached.
"""

import dataclasses
import ipaddress
import json
import os
import re
from typing import Any

from distloop.installed import import_part

_MIN_SECRET_CHARS = 16


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
    if int(os.environ.get("SLURM_STEP_NUM_TASKS", "1")) <= 1:
        return None
    cluster: Cluster = import_part("launcher.machine", "SLURM_STEP_NUM_TASKS").read_slurm_cluster()
    return cluster


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

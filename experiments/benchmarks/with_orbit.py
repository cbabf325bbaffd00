"""Orbit: its environment, created on first use, and the process that trains."""

import json
import os

from experiments.benchmarks import other_process

PACKAGES = ["tf-models-official", "tf_keras"]  # Orbit's imports besides TensorFlow and absl
PORTS = 101  # offset of Orbit's ports from distloop's, on several workers
VARIABLES = {"TF_USE_LEGACY_KERAS": "1"}


def make_environment() -> None:
    """Creates the environment if it is missing.

    Raises:
        RuntimeError: if the packages cannot be installed or imported.
    """
    other_process.make_environment("orbit", PACKAGES, "orbit", VARIABLES, "--no-deps")


def command(workload: str, replicas: int, workdir: str) -> list[str]:
    python = other_process.python_of("orbit")
    return [python, "-m", "experiments.benchmarks.orbit_process", workload, str(replicas), workdir]


def _shifted_cluster() -> dict[str, str]:
    """Returns the TF_CONFIG of Orbit's process on each worker: the same hosts, other ports."""
    if "TF_CONFIG" not in os.environ:
        return {}
    config = json.loads(os.environ["TF_CONFIG"])
    addresses = [address.rpartition(":") for address in config["cluster"]["worker"]]
    config["cluster"]["worker"] = [f"{host}:{int(port) + PORTS}" for host, _, port in addresses]
    return {"TF_CONFIG": json.dumps(config)}


def make(workload: str, replicas: int, workdir: str) -> other_process.OtherProcess:
    """Returns `Controller.train`, one call at a time, in a process of its own."""
    return other_process.OtherProcess(command(workload, replicas, workdir), {**VARIABLES, **_shifted_cluster()})

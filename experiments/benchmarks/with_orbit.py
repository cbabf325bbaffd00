"""Orbit: its environment, created on first use, and the process that trains."""

import json
import os
import pathlib
import subprocess
import sys
import sysconfig
import venv

from experiments.benchmarks.turns import System

ROOT = pathlib.Path(__file__).resolve().parents[2]
ENVIRONMENT = ROOT / ".venv-orbit"
PACKAGES = ["tf-models-official", "tf_keras"]  # Orbit's imports besides TensorFlow and absl


PYTHON = str(ENVIRONMENT / "bin" / "python")
PORTS = 101  # offset of Orbit's ports from distloop's, on several workers
VARIABLES = {"TF_USE_LEGACY_KERAS": "1"}


def make_environment() -> None:
    """Creates the environment if it is missing; it uses the TensorFlow of this process.

    Raises:
        RuntimeError: if the packages cannot be installed or imported.
    """
    ready = ENVIRONMENT / "ready"
    if ready.exists():
        return
    venv.create(ENVIRONMENT, clear=True)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", PYTHON]
    _run([*pip, "install", "--quiet", "--no-deps", *PACKAGES])
    packages = pathlib.Path(sysconfig.get_path("purelib", vars={"base": str(ENVIRONMENT)}))
    (packages / "tensorflow.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    _run([PYTHON, "-c", "import orbit"])
    ready.touch()


def _run(command: list[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **VARIABLES})
    if result.returncode:
        raise RuntimeError(f"its environment cannot be created: {result.stderr.strip().splitlines()[-1]}")


def command(workload: str, replicas: int, workdir: str) -> list[str]:
    return [PYTHON, "-m", "experiments.benchmarks.orbit_process", workload, str(replicas), workdir]


def _shifted_cluster() -> dict[str, str]:
    """Returns the TF_CONFIG of Orbit's process on each worker: the same hosts, other ports."""
    if "TF_CONFIG" not in os.environ:
        return {}
    config = json.loads(os.environ["TF_CONFIG"])
    addresses = [address.rpartition(":") for address in config["cluster"]["worker"]]
    config["cluster"]["worker"] = [f"{host}:{int(port) + PORTS}" for host, _, port in addresses]
    return {"TF_CONFIG": json.dumps(config)}


class Train(System):
    """`Controller.train`, one call at a time, in a separate process that takes the times."""

    def __init__(self, workload: str, replicas: int, workdir: str):
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            command(workload, replicas, workdir),
            stdin=pipe,
            stdout=pipe,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd=ROOT,
            env={**os.environ, **VARIABLES, **_shifted_cluster()},
        )

    def call(self, steps: int) -> float:
        print(steps, file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"Orbit ended with code {self._process.wait()}")
        return float(answer)

    steps_secs = call

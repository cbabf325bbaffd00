"""A system that trains in a process of its own, as it needs other packages than this environment has.

The process reads a number of steps a line, trains, and answers with the seconds that they took.
"""

import importlib.util
import os
import pathlib
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Mapping, Sequence

from experiments.benchmarks.turns import System

ROOT = pathlib.Path(__file__).resolve().parents[2]


def environment_of(name: str) -> pathlib.Path:
    return ROOT / f".venv-{name}"


def python_of(name: str) -> str:
    path = environment_of(name) / "bin" / "python"
    return str(path) if path.exists() else sys.executable


def make_environment(
    name: str, packages: Sequence[str], module: str, variables: Mapping[str, str], *options: str
) -> None:
    """Creates a virtual environment, unless there is one or this one has the module; it uses TensorFlow of this one.

    Args:
        name: of the environment.
        packages: to be installed.
        module: to be imported, to see whether they work.
        variables: of the environment of its processes.
        options: of `pip install`.

    Raises:
        RuntimeError: if the packages cannot be installed or imported.
    """
    environment = environment_of(name)
    ready = environment / "ready"
    if ready.exists() or importlib.util.find_spec(module):
        return
    venv.create(environment, clear=True)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python_of(name)]
    _run([*pip, "install", "--quiet", *options, *packages], variables)
    own = pathlib.Path(sysconfig.get_path("purelib", vars={"base": str(environment)}))
    (own / "tensorflow.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    _run([python_of(name), "-c", f"import {module}"], variables)
    ready.touch()


def _run(command: list[str], variables: Mapping[str, str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **variables})
    if result.returncode:
        raise RuntimeError(f"its environment cannot be created: {result.stderr.strip().splitlines()[-1]}")


class OtherProcess(System):
    """Trains in another process, one call at a time; the process takes the times."""

    def __init__(self, command: Sequence[str], variables: Mapping[str, str], least: int = 1):
        """Starts the process.

        Args:
            command: of the process.
            variables: of its environment, besides those of this one.
            least: it trains for multiples of this many steps.
        """
        self.least, pipe = least, subprocess.PIPE
        self._process = subprocess.Popen(
            command,
            stdin=pipe,
            stdout=pipe,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd=ROOT,
            env={**os.environ, **variables},
        )

    def call(self, steps: int) -> float:
        print(steps, file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"{self._process.args} ended with code {self._process.wait()}")
        return float(answer)

    steps_secs = call

"""Fresh processes for each cell, and for each start-up that is timed."""

import json
import os
import subprocess
import sys
import tempfile
import time

from experiments.benchmarks import other_process, with_orbit

WITHOUT_GPU = {"CUDA_VISIBLE_DEVICES": "-1"}
ONE_THREAD = {"TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "1"}
CELL_SECS = 600  # time limit of a cell


def run_cell(spec: dict, workers: int = 0) -> dict:
    """Measures a cell in a new process, or in several workers with one core and one thread each.

    Args:
        spec: the cell.
        workers: how many; 0: a single process without the launcher.

    Returns:
        The results, or `failed`: the reason why there are none.
    """
    launcher = ["-m", "distloop.launch", f"--workers={workers}", "--cores_per_worker=1"] if workers else []
    hidden = {} if spec.get("settings", {}).get("device") == "gpu" else WITHOUT_GPU
    environment = {**os.environ, **hidden, **(ONE_THREAD if workers else {})}
    with tempfile.TemporaryDirectory() as directory:
        path = os.path.join(directory, "result.json")
        command = [sys.executable, *launcher, "-m", "experiments.benchmarks.cell", json.dumps(spec), path]
        with tempfile.TemporaryFile("w+") as said:
            try:
                subprocess.run(
                    command,
                    stdout=said,
                    stderr=said,
                    cwd=other_process.ROOT,
                    env=environment,
                    timeout=CELL_SECS,
                    check=True,
                )
            except subprocess.SubprocessError as error:
                said.seek(0)
                print(said.read()[-3000:], file=sys.stderr)
                code = getattr(error, "returncode", None)
                return {"failed": f"no result after {CELL_SECS} s" if code is None else f"exit code {code}"}
        with open(path, encoding="utf-8") as file:
            return json.load(file)


def start(spec: dict, system: str) -> tuple[float, float] | None:
    """Starts a process that trains one step of a system.

    Args:
        spec: the cell.
        system: name of the system.

    Returns:
        Seconds until the step is done, and peak memory in MB; None if the process failed.
    """
    with tempfile.TemporaryDirectory() as directory:
        text, result = json.dumps({**spec, "systems": [system]}), os.path.join(directory, "result.json")
        command = [sys.executable, "-m", "experiments.benchmarks.cell", text, result]
        environment = {**os.environ, **WITHOUT_GPU}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)  # a user's second start finds compiled modules
        if system == "orbit":
            command = with_orbit.command(spec["workload"], spec["replicas"], directory)
            environment |= with_orbit.VARIABLES
        begun = time.perf_counter()
        pipe = subprocess.PIPE
        process = subprocess.Popen(
            command,
            stdin=pipe,
            stdout=pipe,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd=other_process.ROOT,
            env=environment,
        )
        process.stdin.write("1\n")  # Orbit's process reads the number of steps
        process.stdin.close()
        answer = process.stdout.readline()
        secs = time.perf_counter() - begun
        _, process.returncode, usage = os.wait4(process.pid, 0)
    return (secs, usage.ru_maxrss / 1024) if answer and not process.returncode else None

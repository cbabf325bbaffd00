"""What preemptions cost: an elastic run beside one that starts all workers again, on one machine.

    python -m experiments.benchmarks.preemptions [--workers=4 --steps=1600 --seed=0]

Four workers train `experiments.digits` for 1,600 steps with a checkpoint each 400. At four seeded steps one of them is
preempted: two get SIGTERM, as a machine that goes announces it, and two SIGKILL. The elastic run goes on with all, or
those that are left, and saves each two seconds. The other one does neither: its launcher starts all workers again after
a crash, and this program types the command again where the run was saved and left.

Wasted steps are those that were trained twice. Seconds are those from a signal to the next row of ten steps.
"""

import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time

from absl import app, flags

from experiments.benchmarks import page

SAVED = 75  # the exit code of a run that was saved and left: the same command goes on

WORKERS = flags.DEFINE_integer("workers", 4, "Workers, one device each.", lower_bound=2)
STEPS = flags.DEFINE_integer("steps", 1600, "Steps of a run.", lower_bound=100)
SEED = flags.DEFINE_integer("seed", 0, "Of the preemptions.")
RUNS = flags.DEFINE_list("runs", ["elastic", "all start again"], "Which runs.")
PREEMPTIONS = flags.DEFINE_integer("preemptions", 4, "How many; every second one is announced.", lower_bound=0)


def command(is_elastic: bool, workdir: str) -> list[str]:
    workers, steps = WORKERS.value, STEPS.value
    launcher = [f"--workers=1:{workers}"] if is_elastic else [f"--workers={workers}", "--max_restarts=99"]
    every = "2 s" if is_elastic else str(steps // 4)
    settings = [f"--workdir={workdir}", f"--steps={steps}", f"--checkpoint_every={every}", "--log_every=10"]
    settings += ["--device=cpu", "--num_devices=1", "--eval_every=0", "--console=quiet"]
    return [sys.executable, "-m", "distloop.launch", *launcher, "-m", "experiments.digits", *settings]


def draw_preemptions() -> list[tuple[int, int]]:
    """Returns steps and signals: each step in a part of the run of its own, so that the run has come on in between."""
    generator, count = random.Random(SEED.value), PREEMPTIONS.value
    part = STEPS.value // (count + 1)
    steps = [part // 2 + i * part + generator.randrange(part) for i in range(count)]
    return [(step, (signal.SIGKILL, signal.SIGTERM)[i % 2]) for i, step in enumerate(steps)]


def find_workers(launcher: int, argument: bytes = b"experiments.digits") -> list[int]:
    """Returns the processes of the workers that a launcher has started."""
    with open(f"/proc/{launcher}/task/{launcher}/children", encoding="ascii") as file:
        children = [int(child) for child in file.read().split()]
    found = []
    for child in children:
        try:
            with open(f"/proc/{child}/cmdline", "rb") as file:
                command = file.read()
        except OSError:  # it has ended
            continue
        found += [child] if argument in command else []
    return found


def read_rows(workdir: str, name: str) -> list[dict]:
    """Returns the whole rows of a file that may still be missing."""
    try:
        with open(os.path.join(workdir, name), encoding="utf-8") as file:
            return [json.loads(line) for line in file if line.endswith("\n")]
    except FileNotFoundError:
        return []


def run(is_elastic: bool, workdir: str, log: str) -> list[str]:
    """Returns a row of the table: what a run cost under the preemptions."""
    generator, planned, waits, struck_at = random.Random(SEED.value), draw_preemptions(), [], 0.0
    with open(log, "w", encoding="utf-8") as output:
        process = subprocess.Popen(command(is_elastic, workdir), stdout=output, stderr=output)
        while process.poll() in (None, SAVED):
            if process.poll() == SAVED:
                process = subprocess.Popen(command(is_elastic, workdir), stdout=output, stderr=output)
            time.sleep(0.05)
            rows, starts = read_rows(workdir, "metrics.jsonl"), read_rows(workdir, "starts.jsonl")
            row = rows[-1] if rows else {"time": 0.0}
            is_training = bool(starts) and row["time"] > max(starts[-1]["time"], struck_at)
            if is_training and struck_at and starts[-1]["time"] > struck_at:
                waits.append(row["time"] - struck_at)
                struck_at = 0.0
            if is_training and not struck_at and planned and row["step"] >= planned[0][0]:
                workers = find_workers(process.pid)
                if workers:
                    os.kill(generator.choice(workers), planned.pop(0)[1])
                    struck_at = time.time()
    if process.returncode:
        raise SystemExit(f"The launcher ended with code {process.returncode}: {log} tells why.")
    command_of_report = [sys.executable, "-m", "distloop.report", "--json", workdir]
    (found,) = json.loads(subprocess.run(command_of_report, capture_output=True, check=True).stdout)["runs"]
    starts, seconds = found["starts"], found["time_spent"]
    wasted = sum(
        max(0, after["progress"]["step"] - after["step"])
        for before, after in itertools.pairwise(starts)
        if after["progress"] and after["progress"]["time"] > before["time"]
    )
    return [
        "elastic" if is_elastic else "all start again",
        str(wasted),
        ", ".join(f"{secs:.0f}" for secs in waits),
        f"{sum(seconds.values()):.0f}",
        str(len(starts)),
        f"{found['goodput']:.2f}",
        json.dumps({name: round(secs) for name, secs in seconds.items() if secs >= 1}),
    ]


def main(_) -> None:
    with tempfile.TemporaryDirectory() as directory:
        rows = []
        for name in RUNS.value:
            path = os.path.join(directory, name)
            rows.append(run(name == "elastic", path, f"{path}.log"))
    print(page.table(["run", "wasted steps", "seconds to the next row", "seconds", "starts", "goodput", "of it"], rows))


if __name__ == "__main__":
    app.run(main)

"""How long an elastic run stands still when a worker is killed, by phase.

    python -m experiments.benchmarks.recovery [--workloads=tiny,lm --counts=2,3]

The launcher starts `--workers=1:N` of a workload with a checkpoint a second. Once they train, the last one is killed,
whose place is there again a second later. Seconds are those from the end of the first worker to the first step.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time

from absl import app, flags

from experiments.benchmarks import page, preemptions

SETTLE_SECS = 20  # from the first row to the fall
CHANGE_SECS = 120  # within which the next step is expected

NAMES = flags.DEFINE_list("workloads", ["tiny", "lm"], "Names of workloads.")
COUNTS = flags.DEFINE_list("counts", ["2", "3"], "Numbers of workers.")
TRAIN = flags.DEFINE_string("train", "", "The workload to train, in a worker.")
WORKDIR = flags.DEFINE_string("run_dir", "", "The workdir, in a worker.")


def train() -> None:
    """Trains until it is asked to leave."""
    from experiments.benchmarks import with_distloop, workloads  # imports TensorFlow

    workload, saves = workloads.WORKLOADS[TRAIN.value], {"checkpoint_every": "1 s", "log_every": "0.2 s"}
    trainer = with_distloop.make_trainer(workload, 1, WORKDIR.value, eval_every=0, console="quiet", **saves)
    trainer.fit(workload.dataset(workload.batch_size), steps=10**9)


def wait_for_rows(workdir: str, name: str, count: int, process: subprocess.Popen) -> list[dict]:
    """Returns the rows of a file, once there are so many."""
    ends_at = time.monotonic() + CHANGE_SECS
    while len(rows := preemptions.read_rows(workdir, name)) < count:
        if process.poll() is not None or time.monotonic() > ends_at:
            raise SystemExit(f"{name} has {len(rows)} rows and not {count}: look at the lines above.")
        time.sleep(0.05)
    return rows


def measure(name: str, count: int) -> list[str]:
    """Returns a row of the table."""
    with tempfile.TemporaryDirectory() as directory:
        launcher = [sys.executable, "-m", "distloop.launch", f"--workers=1:{count}"]
        program = ["-m", "experiments.benchmarks.recovery", f"--train={name}", f"--run_dir={directory}"]
        process = subprocess.Popen([*launcher, *program], stdout=subprocess.DEVNULL)
        try:
            wait_for_rows(directory, "metrics.jsonl", 1, process)
            time.sleep(SETTLE_SECS)
            os.kill(preemptions.find_workers(process.pid, b"--train=")[-1], signal.SIGKILL)
            (change, *_) = wait_for_rows(directory, "incidents.jsonl", 1, process)
        finally:
            process.terminate()
            process.wait()
    phases = {key.removesuffix("_secs"): secs for key, secs in change.items() if key.endswith("_secs")}
    listed = ", ".join(f"{phase} {secs:.1f}" for phase, secs in phases.items())
    return [name, f"1:{count}", str(change["workers"]), f"{sum(phases.values()):.1f}", listed]


def main(_) -> None:
    if TRAIN.value:
        train()
        return
    rows = [measure(name, int(count)) for name in NAMES.value for count in COUNTS.value]
    print(page.table(["workload", "workers", "then", "seconds to the next step", "of it"], rows))


if __name__ == "__main__":
    app.run(main)

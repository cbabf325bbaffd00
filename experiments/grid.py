"""A grid of flags: runs an experiment with combinations of them, all or a random sample, and compares the runs.

    python -m experiments.grid --workdir=runs/grid --parallel=2 \
        --try=learning_rate=1e-3,3e-3,1e-2 --try=hidden=8,16,32 -- \
        -m experiments.regression --device=cpu --eval_every=100

After `--` come the program and the flags that all runs share. Each run has its own workdir, named after its flags, so a
grid that was stopped resumes every run. `tensorboard --logdir runs/grid` compares them under HParams, and
`distloop.report` prints a comparison at the end.

Measured on 2 cores beside other work: 9 runs, two at a time, in about 7 minutes, nearly all of it process start-up. 16
units with a learning rate of 3e-3 have the smallest test loss, 0.586; at 1e-2 all runs overfit.
"""

import itertools
import os
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

from absl import app, flags

WORKDIR = flags.DEFINE_string("workdir", "runs/grid", "Parent directory of the runs' workdirs.")
TRY = flags.DEFINE_multi_string("try", [], "NAME=VALUE,VALUE,...: a flag of the program, and the values to try.")
DRAWS = flags.DEFINE_integer("draws", 0, "How many combinations to draw at random; 0: all of them.")
PARALLEL = flags.DEFINE_integer("parallel", 1, "Runs at the same time.", lower_bound=1)
SEED = flags.DEFINE_integer("seed", 0, "Seed of the draws.")


def make_combinations():
    """Returns a list of NAME=VALUE for each run."""
    names, choices = zip(*(text.split("=", 1) for text in TRY.value), strict=True)
    values = itertools.product(*(text.split(",") for text in choices))
    combinations = [[f"{name}={value}" for name, value in zip(names, row, strict=True)] for row in values]
    if DRAWS.value:
        return random.Random(SEED.value).sample(combinations, min(DRAWS.value, len(combinations)))
    return combinations


def train(program, combination):
    """Runs the program and returns its exit code."""
    workdir = os.path.join(WORKDIR.value, ",".join(combination))
    os.makedirs(workdir, exist_ok=True)
    command = [sys.executable, *program, f"--workdir={workdir}", *(f"--{flag}" for flag in combination)]
    with open(os.path.join(workdir, "output.txt"), "ab") as output:
        code = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT).returncode
    print(f"{workdir}: {'done' if code == 0 else f'failed with code {code}, see {output.name}'}", flush=True)
    return code


def main(arguments):
    program = arguments[1:]
    if not TRY.value or not program:
        raise app.UsageError("give --try=NAME=VALUE,... and, after --, the program: -m experiments.regression.")
    with ThreadPoolExecutor(PARALLEL.value) as pool:
        codes = list(pool.map(lambda combination: train(program, combination), make_combinations()))
    subprocess.run([sys.executable, "-m", "distloop.report", WORKDIR.value])
    return max(codes, key=abs)


if __name__ == "__main__":
    app.run(main)

"""The cost of a checkpoint: distloop next to `tf.train.CheckpointManager`."""

import contextlib
import io
import os
import shutil
import statistics

import numpy as np
import tensorflow as tf

import distloop
from experiments.benchmarks import turns, with_distloop, workloads

STEPS = 6  # before and after each save
BATCH_SIZE = 16  # small: the step is not what is measured


def measure(workload: workloads.Workload, workdir: str, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Times saves and loads in turns, on the same weights and Adam slots.

    Args:
        workload: the model and its data.
        workdir: a directory for files.
        rounds: turns per system.

    Returns:
        Seconds in each round, by kind and system. `save`: until training continues; `save and after`: that plus the
        slow-down of the next steps, while the file is written; `load`: from the file to the variables.
    """
    run_dir, manager_dir = os.path.join(workdir, "run"), os.path.join(workdir, "manager")
    trainer = with_distloop.make_trainer(
        workload, 1, run_dir, log_every=1, checkpoint_every=STEPS, keep_checkpoints=1, on_nonfinite="raise"
    )
    dataset = workload.dataset(BATCH_SIZE)

    def fit() -> np.ndarray:
        """Trains with a save in the middle; returns the seconds between the ends of consecutive steps."""
        with contextlib.redirect_stdout(io.StringIO()):
            trainer.fit(dataset, steps=trainer.step + 2 * STEPS)
        return np.diff([row["time"] for row in distloop.read_metrics(run_dir)[-2 * STEPS :]])

    fit()
    variables = {v.path: v.value for v in [*trainer.model.variables, *trainer.optimizer.variables]}
    checkpoint = tf.train.Checkpoint(**{name.replace("/", "_"): v for name, v in variables.items()})
    secs_by_kind = {kind: {"manager": [], "distloop": []} for kind in ("save", "save and after", "load")}
    for _ in range(rounds):
        secs = fit()
        step = statistics.median(secs[: STEPS - 1])
        secs_by_kind["save"]["distloop"].append(secs[STEPS - 1] - step)
        secs_by_kind["save and after"]["distloop"].append(float(np.sum(secs[STEPS - 1 :] - step)))
        secs_by_kind["load"]["distloop"].append(turns.timed(trainer.restore))
        manager = tf.train.CheckpointManager(checkpoint, manager_dir, max_to_keep=1)
        saved = turns.timed(manager.save)
        secs_by_kind["save"]["manager"].append(saved)
        secs_by_kind["save and after"]["manager"].append(saved)
        secs_by_kind["load"]["manager"].append(turns.timed(manager.restore_or_initialize))
        shutil.rmtree(manager_dir)
    return secs_by_kind

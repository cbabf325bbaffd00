"""What a checkpoint costs a run: distloop next to `tf.train.CheckpointManager`."""

import contextlib
import io
import os
import shutil
import statistics

import numpy as np
import tensorflow as tf

import distloop
from experiments.benchmarks import turns, with_distloop, workloads

STEPS = 6  # between two saves, and after each
BATCH_SIZE = 16  # the step is not the point


def measure(workload: workloads.Workload, workdir: str, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Times saves and loads by turns, on the same weights and slots of Adam.

    Args:
        workload: what is trained.
        workdir: where files may be.
        rounds: turns that each one gets.

    Returns:
        Seconds in each round, by kind and system. `save`: until training goes on; `save and after`: with how much
        longer the next steps take, while the file is written; `load`: from the file to the variables.
    """
    of_run, of_manager = os.path.join(workdir, "run"), os.path.join(workdir, "manager")
    trainer = with_distloop.make_trainer(
        workload, 1, of_run, log_every=1, checkpoint_every=STEPS, keep_checkpoints=1, on_nonfinite="raise"
    )
    dataset = workload.dataset(BATCH_SIZE)

    def fit() -> np.ndarray:
        """Trains with a save in the middle; returns the seconds from each step's end to the next one's."""
        with contextlib.redirect_stdout(io.StringIO()):
            trainer.fit(dataset, steps=trainer.step + 2 * STEPS)
        return np.diff([row["time"] for row in distloop.read_metrics(of_run)[-2 * STEPS :]])

    fit()
    variables = {v.path: v.value for v in [*trainer.model.variables, *trainer.optimizer.variables]}
    checkpoint = tf.train.Checkpoint(**{name.replace("/", "_"): v for name, v in variables.items()})
    found = {kind: {"manager": [], "distloop": []} for kind in ("save", "save and after", "load")}
    for _ in range(rounds):
        secs = fit()
        step = statistics.median(secs[: STEPS - 1])
        found["save"]["distloop"].append(secs[STEPS - 1] - step)
        found["save and after"]["distloop"].append(float(np.sum(secs[STEPS - 1 :] - step)))
        found["load"]["distloop"].append(turns.timed(trainer.restore))
        manager = tf.train.CheckpointManager(checkpoint, of_manager, max_to_keep=1)
        saved = turns.timed(manager.save)
        found["save"]["manager"].append(saved)
        found["save and after"]["manager"].append(saved)
        found["load"]["manager"].append(turns.timed(manager.restore_or_initialize))
        shutil.rmtree(of_manager)
    return found

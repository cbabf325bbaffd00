"""A process that measures one cell of a table: one workload, in one place.

    python -m experiments.benchmarks.cell '{"part": "training", "workload": "tiny", "replicas": 1, ...}' result.json

`__main__` starts it, and the launcher where there are several workers.
"""

import json
import os
import sys
import tempfile
from collections.abc import Callable

from experiments.benchmarks import by_hand, places, turns, with_orbit
from experiments.benchmarks.workloads import WORKLOADS

STEPS_PER_EXECUTION = 50


def make_systems(spec: dict, workdir: str) -> dict[str, turns.System]:
    """Makes the systems that the cell is to measure, by name."""
    workload, replicas = WORKLOADS[spec["workload"]], spec["replicas"]
    batch_size = workload.global_batch_size(replicas)
    strategy = places.make_strategy(replicas)  # one: the collectives of two over the same devices would clash
    hand = by_hand.ByHand(workload, strategy, batch_size)

    def distloop_fit():
        from experiments.benchmarks import with_distloop  # here, so that the others start without it

        return with_distloop.Fit(with_distloop.make_trainer(workload, replicas, workdir), workload, batch_size)

    def keras_fit(steps_per_execution):
        from experiments.benchmarks import with_keras

        return with_keras.Fit(workload, strategy, batch_size, steps_per_execution)

    make_fns: dict[str, Callable[[], turns.System]] = {
        "bare": hand.bare,
        "handloop": hand.handloop,
        "hand": hand.hand,
        "orbit": lambda: with_orbit.Train(spec["workload"], replicas, batch_size, os.path.join(workdir, "orbit")),
        "distloop": distloop_fit,
        "keras": lambda: keras_fit(1),
        "keras50": lambda: keras_fit(STEPS_PER_EXECUTION),
    }
    return {name: make_fns[name]() for name in spec["systems"]}


def measure_training(spec: dict, workdir: str) -> dict:
    """Returns seconds of a step in each round, by system."""
    return {"times": turns.take_turns(make_systems(spec, workdir), spec["rounds"], spec["turn_secs"], float)}


PARTS = {"training": measure_training}


def main(text: str, path: str) -> None:
    spec = json.loads(text)
    with tempfile.TemporaryDirectory() as workdir:
        found = PARTS[spec["part"]](spec, workdir)
        with open(path, "w", encoding="utf-8") as file:
            json.dump(found, file)
    sys.stdout.flush()
    os._exit(0)  # a distributed iterator that is deleted may wait for its thread for half a minute


if __name__ == "__main__":
    main(*sys.argv[1:])

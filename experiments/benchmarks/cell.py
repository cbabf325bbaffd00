"""A process that measures one cell of a table: one workload in one place.

    python -m experiments.benchmarks.cell '{"part": "training", "workload": "tiny", "replicas": 1, ...}' result.json

`__main__` starts it, with several workers through the launcher. Workdirs of the systems are beside the result.
"""

import functools
import json
import os
import sys

import numpy as np
import tensorflow as tf

from experiments.benchmarks import by_hand, peers, places, turns, with_orbit
from experiments.benchmarks.workloads import EVERY

# Modules that import distloop or Keras's trainer are imported on first use: the start-up of other systems does not pay.


class Systems:
    """The systems of a cell, created on first use.

    All systems but distloop share one strategy: the collectives of two strategies over the same devices would clash.
    """

    def __init__(self, spec: dict, workdir: str):
        self.name, self.workload = spec["workload"], EVERY[spec["workload"]]
        self.replicas, self.workdir = spec["replicas"], workdir
        self.settings = spec.get("settings", {})
        tf.keras.config.set_dtype_policy(self.settings.get("precision") or "float32")  # of the other systems
        self.batch_size = self.workload.global_batch_size(self.replicas) * spec.get("batches", 1)
        if "rows" in spec:  # of each replica
            self.batch_size = spec["rows"] * self.replicas

    @functools.cached_property
    def strategy(self) -> tf.distribute.Strategy:
        return self.trainer.strategy if "TF_CONFIG" in os.environ else places.make_strategy(self.replicas)

    @functools.cached_property
    def hand(self) -> by_hand.ByHand:
        return by_hand.ByHand(self.workload, self.strategy, self.batch_size)

    @functools.cached_property
    def trainer(self):
        from experiments.benchmarks import with_distloop

        workdir = os.path.join(self.workdir, "distloop")
        return with_distloop.make_trainer(self.workload, self.replicas, workdir, **self.settings)

    def make(self, name: str) -> turns.System:
        """Returns a system by its name."""
        if name in ("bare", "handloop", "hand"):
            return getattr(self.hand, name)()
        if name == "orbit":
            return with_orbit.make(self.name, self.replicas, os.path.join(self.workdir, "orbit"))
        if name in peers.SYSTEMS:
            return peers.make(name, self.name, self.replicas, self.settings.get("device") == "gpu")
        if name == "distloop":
            from experiments.benchmarks import with_distloop

            return with_distloop.Fit(self.trainer, self.workload, self.batch_size)
        if name == "distloop_loop":
            from experiments.benchmarks import with_distloop

            workdir, settings = os.path.join(self.workdir, name), {**self.settings, "jit_compile": "loop"}
            trainer = with_distloop.make_trainer(self.workload, self.replicas, workdir, **settings)
            return with_distloop.Fit(trainer, self.workload, self.batch_size)
        from experiments.benchmarks import with_keras

        steps, is_compiled = 50 if name == "keras50" else 1, self.settings.get("jit_compile", False)
        return with_keras.Fit(self.workload, self.strategy, self.batch_size, steps, is_compiled)

    def agree(self, number: float) -> float:
        """Returns the mean over the workers, so that all make the same decision."""
        if "TF_CONFIG" not in os.environ:
            return number
        parts = self.strategy.run(lambda: tf.constant(number))
        return float(self.strategy.reduce("MEAN", parts, axis=None))


def measure_training(systems: Systems, spec: dict) -> dict:
    """Returns seconds per step in each round, by system."""
    if spec["systems"] != ["distloop"]:  # distloop sets threads when it starts TensorFlow
        _ = systems.strategy  # virtual CPUs must exist before TensorFlow starts
    made = {name: systems.make(name) for name in spec["systems"]}
    return {"times": turns.take_turns(made, spec["rounds"], spec["turn_secs"], systems.agree)}


def measure_scaling(systems: Systems, spec: dict) -> dict:
    """Returns seconds per step and per reduction in each round, and the number of trainable weights."""
    from experiments.benchmarks import scaling

    fit = systems.make("distloop")
    fit.call(1)  # makes the model and the strategy
    shapes = [variable.shape.as_list() for variable in systems.trainer.model.trainable_variables]
    made = {"distloop": fit} | (
        {"reduction": scaling.reduction(systems.trainer.strategy, shapes)} if systems.replicas > 1 else {}
    )
    times = turns.take_turns(made, spec["rounds"], spec["turn_secs"], systems.agree)
    return {"times": times, "weights": sum(int(np.prod(shape)) for shape in shapes)}


def measure_monitoring(systems: Systems, spec: dict) -> dict:
    """Returns seconds per step of distloop in each round, by monitoring level: means over several trainers.

    Of identical trainers, one may be 5 % faster than another as long as they live.
    """
    from experiments.benchmarks import with_distloop

    made = {}
    for i in range(spec["alike"]):
        for name, settings in with_distloop.MONITORING.items():
            workdir = os.path.join(systems.workdir, f"{name}-{i}")
            settings = {"workdir": workdir, "steps_per_loop": with_distloop.LOG_EVERY, **settings}
            trainer = with_distloop.make_trainer(systems.workload, systems.replicas, **settings)
            made[name, i] = with_distloop.Fit(trainer, systems.workload, systems.batch_size)
    times = turns.take_turns(made, spec["rounds"], spec["turn_secs"], systems.agree)
    alike = {name: [times[name, i] for i in range(spec["alike"])] for name in with_distloop.MONITORING}
    return {"times": {name: np.mean(times, axis=0).tolist() for name, times in alike.items()}}


def measure_calls(systems: Systems, spec: dict) -> dict:
    """Returns seconds of whole calls in each round, by kind and system."""
    from experiments.benchmarks import whole_calls

    strategy, fits = systems.strategy, [systems.make(name) for name in ("keras", "distloop")]
    place = systems.name, systems.replicas
    others = {
        kind: {name: peers.make(name, *place, kind_of_call=kind) for name in spec["systems"]}
        for kind in ("evaluate", "predict")
    }
    return whole_calls.measure(systems.workload, strategy, *fits, others, spec["rounds"], spec["turn_secs"])


def measure_saves(systems: Systems, spec: dict) -> dict:
    """Returns seconds of saves and loads in each round, by kind and system."""
    from experiments.benchmarks import saves

    return saves.measure(systems.workload, systems.workdir, spec["rounds"])


def measure_around(systems: Systems, spec: dict) -> dict:
    """Returns CPU seconds per step in each round, of loops by hand and of distloop."""
    from experiments.benchmarks import around_step

    return around_step.measure(systems.workload, systems.workdir, spec["rounds"], spec["turn_secs"])


def measure_start(systems: Systems, spec: dict) -> dict:
    """Trains the first step; the parent process takes the time."""
    systems.make(spec["systems"][0]).first_step(lambda: print("done", file=sys.__stdout__, flush=True))
    return {}


PARTS = {
    "training": measure_training,
    "peers": measure_training,
    "workers": measure_training,
    "two_workers": measure_training,
    "scaling": measure_scaling,
    "monitoring": measure_monitoring,
    "calls": measure_calls,
    "saves": measure_saves,
    "around": measure_around,
    "start": measure_start,
}


def main(text: str, path: str) -> None:
    spec = json.loads(text)
    systems = Systems(spec, os.path.dirname(path))
    results = PARTS[spec["part"]](systems, spec)
    if json.loads(os.environ.get("TF_CONFIG", "{}")).get("task", {}).get("index", 0) == 0:
        with open(path, "w", encoding="utf-8") as file:
            json.dump(results, file)
    if "TF_CONFIG" in os.environ:
        systems.agree(0.0)  # a worker that exits early would look like a crash to the others
    sys.stdout.flush()
    os._exit(0)  # deleting a distributed iterator can take half a minute


if __name__ == "__main__":
    main(*sys.argv[1:])

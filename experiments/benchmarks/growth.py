"""How costs grow: with variables, rows, devices, workers, the length of a run, evaluations and actions; GROWTH.md.

    python -m experiments.benchmarks.growth                        # all curves, 10 minutes on 2 cores; writes the page
    python -m experiments.benchmarks.growth --curves=actions       # prints one of them

Each figure is of a fresh process, taken once. A cost that is flat costs the same at the end of a curve as at its start.
"""

import datetime
import json
import os
import resource
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from absl import app, flags

from experiments.benchmarks import curves, kept, page

HEAD = """\
Written by `python -m experiments.benchmarks.growth`; do not edit. {where}. Each figure is of a fresh process, taken
once on a virtual machine, where it may be a fifth off. Models and data are small, so that what grows is distloop's.
"""

Costs = dict[str, float]  # by name and unit


class Curve(NamedTuple):
    """A cost against a size.

    Attributes:
        measure: size -> costs, in a process of its own.
        sizes: ascending.
        of: what the size counts.
        reason: why it grows, or that it does not.
    """

    measure: Callable[[int], Costs]
    sizes: Sequence[int]
    of: str
    reason: str


def megabytes() -> float:
    """Returns the largest memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def make_trainer(layers: int = 1, width: int = 8, replicas: int = 1, **settings: object):
    """Returns a trainer of a small model with Adam, and its data: an endless pass over 64 rows."""
    import keras
    import numpy as np

    import distloop

    def model_fn():
        hidden = [keras.layers.Dense(width, "tanh") for _ in range(layers)]
        model = keras.Sequential([keras.Input((8,)), *hidden, keras.layers.Dense(1)])

        def loss_fn(batch, training):
            return {"loss": (model(batch["x"], training=training)[:, 0] - batch["y"]) ** 2}

        return distloop.ModelSpec(model, keras.optimizers.Adam(), loss_fn)

    settings = {"log_every": 0, "console": "quiet", **settings}
    if "TF_CONFIG" not in os.environ:
        settings |= {"device": "cpu", "num_devices": replicas}
    trainer = distloop.Trainer(model_fn, distloop.Config(**settings))
    rng = np.random.default_rng(0)
    rows = {"x": rng.normal(size=(64, 8)).astype(np.float32), "y": np.zeros(64, np.float32)}
    return trainer, distloop.make_dataset(rows, 16)


def step_costs(trainer, data, steps: int) -> Costs:
    """Returns the time of the first step, and of a later one."""
    start = time.perf_counter()
    trainer.fit(data, steps=1)
    first = time.perf_counter() - start
    trainer.fit(data, steps=10)
    start = time.perf_counter()
    trainer.fit(data, steps=10 + steps)
    return {"first step, s": first, "step, ms": 1e3 * (time.perf_counter() - start) / steps}


def with_variables(size: int) -> Costs:
    return {**step_costs(*make_trainer(layers=size // 2 - 1), 200), "memory, MB": megabytes()}


def with_devices(size: int) -> Costs:
    return step_costs(*make_trainer(replicas=size), 2000)


def with_workers(size: int) -> Costs:
    return step_costs(*make_trainer(), 500)


def with_length(size: int) -> Costs:
    """Of a run with a workdir, rows every 100 steps and ten checkpoints."""
    import distloop

    with tempfile.TemporaryDirectory() as directory:
        trainer, data = make_trainer(workdir=directory, log_every=100, checkpoint_every=size // 10)
        trainer.fit(data, steps=1000)
        before, start = megabytes(), time.perf_counter()
        trainer.fit(data, steps=1000 + size)
        secs = time.perf_counter() - start
        costs = {"step, us": 1e6 * secs / size, "memory added, MB": megabytes() - before}
        trainer, data = make_trainer(workdir=directory)
        start = time.perf_counter()
        trainer.fit(data, steps=1000 + size + 1)
        costs["resume and a step, s"] = time.perf_counter() - start
        assert len(distloop.read_metrics(directory)) >= size // 100
    return costs


def with_calls(size: int) -> Costs:
    """Of calls of `fit` with a workdir, of a step each."""
    with tempfile.TemporaryDirectory() as directory:
        trainer, data = make_trainer(workdir=directory)
        for step in range(1, 11):
            trainer.fit(data, steps=step)
        before, start = megabytes(), time.perf_counter()
        for step in range(11, 11 + size):
            trainer.fit(data, steps=step)
        return {"call, ms": 1e3 * (time.perf_counter() - start) / size, "memory added, MB": megabytes() - before}


def with_evaluations(size: int) -> Costs:
    """Of evaluations within a run, of four batches each."""
    trainer, data = make_trainer(eval_every=1)
    trainer.fit(data, steps=10, evals={"test": data})
    before, start = megabytes(), time.perf_counter()
    trainer.fit(data, steps=10 + size, evals={"test": data})
    return {"evaluation, ms": 1e3 * (time.perf_counter() - start) / size, "memory added, MB": megabytes() - before}


def with_actions(size: int) -> Costs:
    """Of steps after each of which so many actions are due."""
    import distloop

    def make(i: int):
        def action(report: distloop.Report) -> None:
            pass

        action.every = 1
        action.__name__ = f"action_{i}"
        return action

    trainer, data = make_trainer()
    actions = [make(i) for i in range(size)]
    trainer.fit(data, steps=10, actions=actions)
    start = time.perf_counter()
    trainer.fit(data, steps=1010, actions=actions)
    return {"step, ms": 1e3 * (time.perf_counter() - start) / 1000}


def with_table_rows(size: int) -> Costs:
    """Of a step with a table of which a batch reads 64 rows of 16 numbers."""
    import keras
    import numpy as np

    import distloop

    def model_fn():
        model = keras.Sequential([keras.Input((4,), dtype="int32"), keras.layers.Embedding(size, 16)])

        def loss_fn(batch, training):
            import tensorflow as tf

            return {"loss": tf.reduce_mean(model(batch["x"], training=training) ** 2, [1, 2])}

        return distloop.ModelSpec(model, keras.optimizers.SGD(0.1), loss_fn)

    config = distloop.Config(device="cpu", num_devices=1, log_every=0, console="quiet")
    rows = {"x": np.random.default_rng(0).integers(size, size=(64, 4)).astype(np.int32)}
    return step_costs(distloop.Trainer(model_fn, config), distloop.make_dataset(rows, 16), 500)


def with_rows_of_metrics(size: int) -> Costs:
    """Of reading so many rows of twelve numbers."""
    import distloop

    with tempfile.TemporaryDirectory() as directory:
        with open(os.path.join(directory, "metrics.jsonl"), "w") as file:
            for step in range(1, size + 1):
                numbers = {f"m{i}": i / step for i in range(12)}
                file.write(json.dumps({"step": step, "time": 1e9 + step, **numbers}) + "\n")
        before, start = megabytes(), time.perf_counter()
        distloop.read_metrics(directory)
        read = time.perf_counter() - start
        costs = {"read_metrics, s": read, "memory added, MB": megabytes() - before}
        start = time.perf_counter()
        subprocess.run([sys.executable, "-m", "distloop.report", directory], check=True, stdout=subprocess.DEVNULL)
        return {**costs, "report, s": time.perf_counter() - start}


CALLS = "A checkpoint notes the numbers that each call before has returned, 0.9 KB, as a text that is quick to copy."
CURVES = {
    "variables": Curve(
        with_variables,
        (10, 30, 100, 300),
        "variables of a model of small layers",
        "Each variable adds operations to the graph; half of the first step is Adam's, a third TensorFlow's rewriting.",
    ),
    "table": Curve(
        with_table_rows, (10**3, 10**4, 10**5, 10**6), "rows of a table", "A step reads and writes few rows."
    ),
    "devices": Curve(
        with_devices, (1, 2, 4), "virtual CPUs, of 2 cores", "Each has its part of the graph; more than 2 share cores."
    ),
    "workers": Curve(with_workers, (1, 2, 4), "workers, on 2 cores", "A step waits for messages between processes."),
    "length": Curve(with_length, (10**3, 10**4, 10**5), "steps of a run", "A resume opens the newest checkpoint."),
    "calls": Curve(with_calls, (10, 100, 500), "calls of fit in a workdir, of a step each", CALLS),
    "evaluations": Curve(with_evaluations, (10, 100, 1000), "evaluations of a run", "The trace is made once."),
    "actions": Curve(with_actions, (1, 4, 16), "actions due after each step", "Each is called; a boundary is shared."),
    "metrics": Curve(
        with_rows_of_metrics,
        (10**4, 10**5, 10**6),
        "rows of metrics",
        "`read_metrics` holds all rows in memory, 1.7 KB each; the report parses few.",
    ),
}
_CURVES = flags.DEFINE_list("curves", list(CURVES), "Curves to measure.")
_SIZE = flags.DEFINE_integer("size", 0, "Measure one size, and print its costs as JSON.")


def run(name: str, size: int) -> Costs:
    """Measures a point in a process of its own; of workers, the first one's."""
    launcher = ["-m", "distloop.launch", f"--workers={size}"] if name == "workers" and size > 1 else []
    command = [sys.executable, *launcher, "-m", "experiments.benchmarks.growth", f"--curves={name}", f"--size={size}"]
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1"}
    said = subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout
    (line, *_) = [line[line.index("{") :] for line in said.splitlines() if line.endswith("}") and '"costs"' in line]
    return json.loads(line)["costs"]


def table_of(curve: Curve, points: Sequence[Costs]) -> str:
    """Returns the curve as a table, with the growth of each cost from its first size to its last."""
    names = list(points[0])
    sized = zip(curve.sizes, points, strict=True)
    rows = [[f"{size:,}", *(f"{point[name]:.3g}" for name in names)] for size, point in sized]
    growth = [f"{points[-1][name] / points[0][name]:.1f} times" if points[0][name] > 0 else "-" for name in names]
    return page.table([curve.of, *names], [*rows, [f"{curve.sizes[-1] / curve.sizes[0]:,.0f} times", *growth]])


def main(_):
    if _SIZE.value:
        (name,) = _CURVES.value
        print(json.dumps({"costs": CURVES[name].measure(_SIZE.value)}), flush=True)
        os._exit(0)  # deleting iterators can take long
    origin = kept.origin()
    where = f"{datetime.date.today()}, commit {origin['commit']}, {origin['machine']}"
    parts = [f"# What grows\n\n{textwrap.fill(HEAD.format(where=where), 120)}\n"]
    parts.append(f"\n![Each cost, in times of its first figure, against what it grows with]({curves.PICTURE})\n")
    for name in _CURVES.value:
        curve = CURVES[name]
        points = [run(name, size) for size in curve.sizes]
        parts.append(f"\n## {name.capitalize()}\n\n{curve.reason}\n\n{table_of(curve, points)}")
        print(parts[-1], flush=True)
    if not _CURVES.present:
        curves.PAGE.write_text("".join(parts), encoding="utf-8")
        curves.write(curves.PAGE)


if __name__ == "__main__":
    app.run(main)

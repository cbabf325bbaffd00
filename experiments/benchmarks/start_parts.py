"""The start of a process by its parts: imports, devices, build, trace, optimize, and the rest, for several systems.

    python -m experiments.benchmarks.start_parts --rounds=4

A small network, its data in arrays, one step. Each start is a process; the systems take turns, and of each part the
least CPU seconds of all rounds count, as other processes disturb some of them. The first round, which compiles modules,
does not count. `RESULTS.md` has the seconds by the clock of whole starts.

MEASUREMENTS.md has what was measured.
"""

import contextlib
import functools
import json
import os
import subprocess
import sys
import tempfile
import time

SYSTEMS = ("hand", "keras", "distloop", "distloop with workdir")
PARTS = ("imports", "devices", "build", "trace", "optimize and run", "rest")
ROWS, BATCH_SIZE = 640, 64


class Parts:
    """CPU seconds by part."""

    def __init__(self):
        self.secs = dict.fromkeys(PARTS, 0.0)
        self._begun = 0.0  # with the interpreter

    def end(self, part):
        """Adds the time since the last part to this one, but for what was measured within it."""
        now = time.process_time()
        self.secs[part] += now - self._begun
        self._begun = now

    def measure_within(self, part, function):
        """Returns a function whose outermost calls count as a part of their own."""
        depth = 0

        @functools.wraps(function)
        def measured(*args, **kwargs):
            nonlocal depth
            depth, begun = depth + 1, time.process_time()
            try:
                return function(*args, **kwargs)
            finally:
                depth -= 1
                if not depth:
                    secs = time.process_time() - begun
                    self.secs[part] += secs
                    self._begun += secs

        return measured


def main_of_system(system):
    """Runs a step of a system in this process, and prints the parts."""
    parts = Parts()
    import keras
    import numpy as np
    import tensorflow as tf
    from tensorflow.python.eager import context
    from tensorflow.python.framework import func_graph

    if system.startswith("distloop"):
        import distloop

        distloop.Trainer  # noqa: B018 - imports what `import distloop` leaves for later
    parts.end("imports")
    tf.zeros([1])
    parts.end("devices")
    func_graph.func_graph_from_py_func = parts.measure_within("trace", func_graph.func_graph_from_py_func)
    context.Context.call_function = parts.measure_within("optimize and run", context.Context.call_function)
    generator = np.random.default_rng(0)
    x, y = generator.normal(size=(ROWS, 16)).astype(np.float32), generator.integers(0, 10, ROWS)

    def model_of():
        layers = [keras.Input((16,)), keras.layers.Dense(32, activation="relu"), keras.layers.Dense(10)]
        return keras.Sequential(layers), keras.optimizers.Adam()

    loss = functools.partial(keras.losses.sparse_categorical_crossentropy, from_logits=True)
    if system == "hand":
        model, optimizer = model_of()
        optimizer.build(model.trainable_variables)
        parts.end("build")
        rows = iter(tf.data.Dataset.from_tensor_slices((x, y)).shuffle(ROWS).batch(BATCH_SIZE).repeat().prefetch(-1))

        @tf.function
        def step():
            features, labels = next(rows)
            with tf.GradientTape() as tape:
                value = tf.reduce_mean(loss(labels, model(features, training=True)))
            optimizer.apply(tape.gradient(value, model.trainable_variables))
            return value

        float(step())
    elif system == "keras":
        model, optimizer = model_of()
        model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
        parts.end("build")
        model.fit(x, y, batch_size=BATCH_SIZE, steps_per_epoch=1, verbose=0)
    else:

        def model_fn():
            model, optimizer = model_of()

            def loss_fn(batch, training):
                logits = model(batch["x"], training=training)
                hit = keras.metrics.sparse_categorical_accuracy(batch["y"], logits)
                return {"loss": loss(batch["y"], logits), "accuracy": hit}

            return distloop.ModelSpec(model, optimizer, loss_fn)

        with tempfile.TemporaryDirectory() if system.endswith("workdir") else contextlib.nullcontext("") as workdir:
            config = distloop.Config(device="cpu", batch_size=BATCH_SIZE, console="quiet", workdir=workdir)
            trainer = distloop.Trainer(model_fn, config)
            parts.end("build")
            trainer.fit({"x": x, "y": y}, steps=1)
    parts.end("rest")
    print(json.dumps(parts.secs))


def main(rounds):
    """Starts the systems in turns, and prints the least CPU seconds of each part."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "-1"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    least = {system: dict.fromkeys(PARTS, float("inf")) for system in SYSTEMS}
    for number in range(1 + rounds):
        for system in SYSTEMS:
            command = [sys.executable, "-m", "experiments.benchmarks.start_parts", f"--system={system}"]
            answer = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
            secs = json.loads(answer.splitlines()[-1])
            if number:
                least[system] = {part: min(least[system][part], secs[part]) for part in PARTS}
    imports = min(secs["imports"] for secs in least.values())
    print(f"{'CPU seconds':22}", *(f"{part:>16}" for part in (*PARTS, "sum", "over keras")))
    keras_sum = sum(least["keras"].values())
    for system, secs in least.items():
        total = sum(secs.values())
        shown = [*(f"{value:.3f}" for value in secs.values()), f"{total:.2f}", f"{total / keras_sum:.2f}"]
        print(f"{system:22}", *(f"{text:>16}" for text in shown))
    print(f"\nImports of distloop beside TensorFlow's and Keras's: {least['distloop']['imports'] - imports:.3f} s")


if __name__ == "__main__":
    flags = dict(argument.removeprefix("--").split("=", 1) for argument in sys.argv[1:])
    main_of_system(flags["system"]) if "system" in flags else main(int(flags.get("rounds", 4)))

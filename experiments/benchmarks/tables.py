"""Large tables: the time of a step by the rows of an embedding table, beside Keras and a loop by hand.

    python -m experiments.benchmarks.tables

Batches of 64 rows of 8 numbers: 512 lookups a step, 32,768 in the data, in a table of width 32; a dense layer of one
output, on one CPU. Each cell is a process of its own and the fastest of its turns, so that other work on the machine
counts little.
Keras and the hand loop apply `tape.gradient` as it is. LazyAdam, which Keras lacks, stands beside their Adam.
"""

import concurrent.futures
import multiprocessing
import time

from absl import app, flags

from experiments.benchmarks import page

ROWS = flags.DEFINE_list("rows", ["1e4", "1e5", "1e6", "4e6", "1e7"], "Rows of the tables.")
SYSTEMS = flags.DEFINE_list("systems", ["distloop", "keras", "handloop"], "What to measure.")
OPTIMIZERS = flags.DEFINE_list("optimizers", ["SGD", "Adagrad", "LazyAdam"], "Optimizers to train with.")
TURNS = flags.DEFINE_integer("turns", 5, "Turns of each cell.", lower_bound=1)
TURN_SECS = flags.DEFINE_float("turn_secs", 0.5, "Approximate seconds of a turn.", lower_bound=0)


def make_model(rows: int, optimizer: str):
    """Returns a compiled model that looks up 8 rows of a table."""
    import keras

    import distloop

    table = keras.layers.Embedding(rows, 32, embeddings_initializer="zeros")  # fast to draw
    layers = [keras.Input((8,), dtype="int32"), table, keras.layers.Flatten(), keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    kind = getattr(distloop if optimizer.startswith("Lazy") else keras.optimizers, optimizer)
    model.compile(kind(0.01), keras.losses.BinaryCrossentropy(from_logits=True))
    return model


def with_distloop(rows, optimizer, dataset):
    """Returns a function that trains for some steps."""
    import distloop

    config = distloop.Config(device="cpu", num_devices=1, console="quiet", log_every=0)
    trainer = distloop.Trainer(distloop.from_keras(lambda: make_model(rows, optimizer)), config)
    return lambda steps: trainer.fit(dataset, steps=trainer.step + steps)


def with_keras(rows, optimizer, dataset):
    """Returns a function that trains for some steps."""
    model = make_model(rows, optimizer.removeprefix("Lazy"))
    return lambda steps: model.fit(dataset, steps_per_epoch=steps, verbose=0)


def by_hand(rows, optimizer, dataset):
    """Returns a function that trains for some steps."""
    import tensorflow as tf

    model, batches = make_model(rows, optimizer.removeprefix("Lazy")), iter(dataset)
    model.optimizer.build(model.trainable_variables)

    @tf.function(autograph=False)
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(y[:, tf.newaxis], model(x, training=True)))
        model.optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    def train(steps):
        for _ in range(steps):
            loss = step(*next(batches))
        loss.numpy()

    return train


def step_secs(system: str, rows: int, optimizer: str, turns: int, turn_secs: float) -> float:
    """Returns the seconds of a step, without the start of a turn; in a process where TensorFlow has not started."""
    import numpy as np
    import tensorflow as tf

    import distloop

    distloop.prepare(distloop.Config(device="cpu", num_devices=1))
    random = np.random.default_rng(0)
    x, y = random.integers(0, rows, (4096, 8), np.int32), random.integers(0, 2, 4096).astype(np.float32)
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(64, drop_remainder=True).repeat()
    make = {"distloop": with_distloop, "keras": with_keras, "handloop": by_hand}[system]
    train = make(rows, optimizer, dataset)

    def secs_of(steps):
        begun = time.perf_counter()
        train(steps)
        return time.perf_counter() - begun

    secs_of(3)
    start = min(secs_of(1) for _ in range(2))
    steps = max(5, min(2_000, int(turn_secs / max(1e-4, (secs_of(11) - start) / 10))))
    return min((secs_of(steps + 1) - start) / steps for _ in range(turns))


def in_new_process(*arguments) -> float:
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(step_secs, *arguments).result()


def main(_):
    table = []
    for optimizer in OPTIMIZERS.value:
        first: dict[str, float] = {}
        for rows in ROWS.value:
            count = int(float(rows))
            secs = {s: in_new_process(s, count, optimizer, TURNS.value, TURN_SECS.value) for s in SYSTEMS.value}
            for system, value in secs.items():
                first.setdefault(system, value)
            cells = [f"{1e3 * value:.2f} ({value / first[system]:.2f})" for system, value in secs.items()]
            table.append([optimizer, f"{count:,}", *cells])
            print(*table[-1], flush=True)
    print(page.table(["optimizer", "rows", *(f"{s}: ms (over the first)" for s in SYSTEMS.value)], table))


if __name__ == "__main__":
    app.run(main)

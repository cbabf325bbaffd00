"""What the operations around a step cost: a loop by hand with the same Adam, then with one thing more each, and `fit`.

    make bench FLAGS="--only=around --workloads=tiny,deep --rounds=60 --turn_secs=0.1"

One device, one operation after another, one thread each. The systems take turns in a process, and of each the least CPU
time of a step over all turns counts, as other work on a machine only ever makes a turn slower.
"""

import os
import time

import tensorflow as tf

from experiments.benchmarks import turns, with_distloop, workloads

# What a loop by hand gets, in this order, and what that buys.
ITEMS = {
    "iterator": "data that changes",
    "means": "sums of values and of weights, in float64",
    "norm": "`gradient_norm`; one division by the sum of weights, after the reduction",
    "check": "an error at the first NaN, with finite weights",
    "count": "`step`",
    "times": "`input_wait`, `step_secs`; after an error, whether a checkpoint holds a finished step",
    "limit": "stops within a second",
}
FITS = {"fit without logs": "off", "fit": "on"}
LIMIT_SECS = 1e6


class Adam:
    """Keras's Adam on a vector of all gradients, with a vector a slot."""

    def __init__(self, model: tf.keras.Model):
        self.variables = [variable.value for variable in model.trainable_variables]
        self._sizes = [variable.shape.num_elements() for variable in self.variables]
        self._mean, self._square = (tf.Variable(tf.zeros([sum(self._sizes)])) for _ in range(2))
        self._iterations = tf.Variable(0, dtype=tf.int64)

    def apply(self, gradient: tf.Tensor) -> list[tf.Operation]:
        step = tf.cast(self._iterations + 1, tf.float32)
        rate = workloads.LEARNING_RATE * tf.sqrt(1.0 - tf.pow(0.999, step)) / (1.0 - tf.pow(0.9, step))
        self._mean.assign(self._mean + (gradient - self._mean) * (1.0 - 0.9), read_value=False)
        self._square.assign(self._square + (tf.square(gradient) - self._square) * (1.0 - 0.999), read_value=False)
        pieces = tf.split(self._mean * rate / (tf.sqrt(self._square) + 1e-7), self._sizes)
        pairs = zip(self.variables, pieces, strict=True)
        writes = [v.assign_sub(tf.reshape(piece, v.shape), read_value=False) for v, piece in pairs]
        return [*writes, self._iterations.assign_add(1, read_value=False)]


class Loop(turns.System):
    """A compiled loop by hand that has some of the items."""

    clock = staticmethod(time.process_time)

    def __init__(self, workload: workloads.Workload, items: list[str]):
        self._workload, self._items, self._model = workload, items, workload.make_model()
        self._adam = Adam(self._model)
        options = tf.data.Options()
        options.threading.private_threadpool_size = 2
        data = workload.dataset(workload.batch_size).prefetch(tf.data.AUTOTUNE)
        self._iterator = iter(data.with_options(options))
        self._batch = next(self._iterator)
        self._examples = float(self._batch[1].shape.num_elements())
        self._count = tf.Variable(0, dtype=tf.int64)
        self._begun_at, self._ended_at = (tf.Variable(tf.zeros([0], tf.float64), shape=[None]) for _ in range(2))
        self._run = tf.function(self._steps, autograph=False)

    def call(self, steps: int) -> None:
        with tf.experimental.function_executor_type("SINGLE_THREADED_EXECUTOR"):
            self._run(tf.constant(steps))[0].numpy()

    def _steps(self, count: tf.Tensor) -> list[tf.Tensor]:
        began_at = tf.timestamp()
        for times in (self._begun_at, self._ended_at):
            times.assign(tf.zeros([count], tf.float64))
        sums = [tf.zeros([6] if "norm" in self._items else [4], tf.float64)] if "means" in self._items else [0.0, 0.0]

        def body(done: tf.Tensor, sums: list[tf.Tensor]) -> tuple[tf.Tensor, list[tf.Tensor]]:
            new, is_over = self._step(done, began_at)
            done = done + 1 if is_over is None else tf.where(is_over, tf.int32.max, done + 1)
            return done, [before + each for before, each in zip(sums, new, strict=True)]

        return tf.while_loop(lambda done, _: done < count, body, [tf.constant(0), sums])[1]

    def _step(self, done: tf.Tensor, began_at: tf.Tensor) -> tuple[list[tf.Tensor], tf.Tensor | None]:
        """Trains a step; returns what it adds up, and whether the steps are over."""
        items, is_over, batch = self._items, None, self._next_batch()
        if "times" in items:
            with tf.control_dependencies(batch):
                _note(self._begun_at, done)
        with tf.GradientTape() as tape:
            values = self._workload.values(self._model, *batch, True).values()
            totals = [tf.reduce_sum(value) for value in values]
            loss = totals[0] if "norm" in items else totals[0] / self._examples
        gradients = tape.gradient(loss, self._adam.variables)
        gradient = tf.concat([tf.reshape(each, [-1]) for each in gradients], 0)
        if "means" in items:
            totals = [tf.stack([part for total in totals for part in (total, self._examples)])]
        if "norm" in items:
            scale = tf.math.divide_no_nan(1.0, totals[0][1])
            norm = tf.sqrt(2.0 * tf.nn.l2_loss(gradient)) * scale
            if "check" in items:
                is_finite = tf.math.is_finite(norm + totals[0][0])
                is_over, scale = ~is_finite, tf.where(is_finite, scale, 0.0)
            gradient = tf.math.multiply_no_nan(gradient, scale)
            totals = [tf.concat([totals[0], [norm, 1.0]], 0)]
        writes = self._adam.apply(gradient)
        if "count" in items:
            writes.append(self._count.assign_add(1, read_value=False))
        if "times" in items:
            with tf.control_dependencies(writes):
                ended_at = _note(self._ended_at, done)
        if "limit" in items:
            is_over |= tf.math.squared_difference(ended_at, began_at) >= LIMIT_SECS**2
        return [tf.cast(t, tf.float64) for t in totals] if "means" in items else totals, is_over

    def _next_batch(self) -> tuple[tf.Tensor, ...]:
        if "iterator" not in self._items:
            return self._batch
        specs = self._iterator.element_spec
        types, shapes = [spec.dtype for spec in specs], [spec.shape for spec in specs]
        resource = self._iterator._iterator_resource  # `next` would switch to another thread
        return tf.raw_ops.IteratorGetNextSync(iterator=resource, output_types=types, output_shapes=shapes)


def _note(times: tf.Variable, number: tf.Tensor) -> tf.Tensor:
    """Writes the time, and returns it."""
    now = tf.timestamp()
    tf.raw_ops.ResourceScatterUpdate(resource=times.handle, indices=number, updates=now)
    return now


def measure(workload: workloads.Workload, workdir: str, rounds: int, turn_secs: float) -> dict:
    """Returns CPU seconds per step in each round, by system."""
    systems: dict[str, turns.System] = {}
    for name, level in FITS.items():
        settings = {"workdir": os.path.join(workdir, level), "intra_op_threads": 1, **with_distloop.MONITORING[level]}
        trainer = with_distloop.make_trainer(workload, 1, **settings)
        systems[name] = with_distloop.Fit(trainer, workload, workload.batch_size)
        systems[name].clock = time.process_time
    for count in range(1 + len(ITEMS)):
        systems[", ".join(["by hand", *list(ITEMS)[:count][-1:]])] = Loop(workload, list(ITEMS)[:count])
    return {"times": turns.take_turns(systems, rounds, turn_secs, float), "buys": ITEMS}

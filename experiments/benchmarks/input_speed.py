"""Input: the speed of data by number and the cost of a resume, beside tf.data, its iterator checkpoints and Grain.

    python -m experiments.benchmarks.input_speed --rounds=5

Each source has a process, in which the systems read it in turns, and Grain after the others, as its threads read on
for a while. Each figure is the best of its turns, as other work on a machine only ever makes a turn slower. The CPU
time of an example depends least on other work. tf.data is written as its guides do it: a shuffle buffer of 10,000
examples, a parallel map, a batch, a prefetch. Grain is left out if it is not installed.
"""

import itertools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from absl import app, flags

import distloop

ROUNDS = flags.DEFINE_integer("rounds", 5, "Turns of each system.")
TURN_SECS = flags.DEFINE_float("turn_secs", 1.0, "Seconds of a turn that measures speed.")
ROWS = flags.DEFINE_integer("rows", 10_000_000, "Small rows.")
BUFFER = 10_000  # examples
RESUMES = 2  # turns with a resume, whose late one takes long where data is read again
CHECKPOINT = "tf.data, iterator checkpoint"


class Workload(NamedTuple):
    """One source, as each system reads it.

    Attributes:
        batch_size: examples of a batch.
        late: the batch from which a late resume goes on.
        by_number: the dataset of distloop.
        pipeline: the dataset of tf.data.
        grain: an iterator of Grain's at a batch; None: Grain is not installed.
    """

    batch_size: int
    late: int
    by_number: Any
    pipeline: tf.data.Dataset
    grain: Callable[[int], Iterator[Any]] | None


def make_arrays() -> Workload:
    """Returns 50,000 images of 32 x 32 x 3 bytes in memory, scaled to floats."""
    rng = np.random.default_rng(0)
    arrays = {"image": rng.integers(0, 256, [50_000, 32, 32, 3], np.uint8), "label": np.arange(50_000) % 10}

    def scale(example, seed=None):
        return {**example, "image": tf.cast(example["image"], tf.float32) / 255}

    def scale_in_numpy(row):
        return {"image": arrays["image"][row].astype(np.float32) / 255, "label": arrays["label"][row]}

    by_number = distloop.make_dataset(arrays, 64, shuffle=True).map(scale)
    pipeline = tf.data.Dataset.from_tensor_slices(arrays).shuffle(BUFFER, seed=0)
    pipeline = pipeline.map(scale, num_parallel_calls=tf.data.AUTOTUNE).batch(64).prefetch(tf.data.AUTOTUNE)
    return Workload(64, 1_000, by_number, pipeline, make_grain(range(50_000), scale_in_numpy, 64))


def make_rows() -> Workload:
    """Returns small rows in memory: four floats and a label."""
    count = ROWS.value
    arrays = {"x": np.zeros([count, 4], np.float32), "label": np.arange(count)}
    by_number = distloop.make_dataset(arrays, 1024, shuffle=True)
    pipeline = tf.data.Dataset.from_tensor_slices(arrays).shuffle(BUFFER, seed=0).batch(1024).prefetch(tf.data.AUTOTUNE)
    grain = make_grain(range(count), lambda row: {"x": arrays["x"][row], "label": arrays["label"][row]}, 1024)
    return Workload(1024, 500, by_number, pipeline, grain)


def make_records(directory: str) -> Workload:
    """Returns 4,000 JPEG images of 64 x 64 in four TFRecord files, decoded."""
    rng = np.random.default_rng(0)
    for shard in range(4):
        with tf.io.TFRecordWriter(os.path.join(directory, f"{shard}.tfrecord")) as writer:
            for _ in range(1_000):
                image = np.kron(rng.integers(0, 256, [8, 8, 3]), np.ones([8, 8, 1])).astype(np.uint8)
                writer.write(tf.io.encode_jpeg(image).numpy())

    def decode(record, seed=None):
        return tf.ensure_shape(tf.io.decode_jpeg(record, channels=3), [64, 64, 3])

    records = distloop.open_records(os.path.join(directory, "*.tfrecord"))
    by_number = distloop.make_dataset(records, 64, shuffle=True, map_fn=decode)
    files = tf.data.Dataset.list_files(os.path.join(directory, "*.tfrecord"), seed=0)
    pipeline = files.interleave(tf.data.TFRecordDataset, cycle_length=4, num_parallel_calls=tf.data.AUTOTUNE)
    pipeline = pipeline.shuffle(BUFFER, seed=0).map(decode, num_parallel_calls=tf.data.AUTOTUNE)
    pipeline = pipeline.batch(64).prefetch(tf.data.AUTOTUNE)
    return Workload(64, 200, by_number, pipeline, make_grain(records, lambda record: decode(record).numpy(), 64))


def make_grain(source: Any, read: Callable[[Any], Any], batch_size: int) -> Callable[[int], Iterator[Any]] | None:
    """Returns a function from a batch's number to Grain's iterator there; None: Grain is not installed."""
    try:
        import grain.python as grain
    except ImportError:
        return None
    dataset = grain.MapDataset.source(source).shuffle(seed=0).map(read).batch(batch_size).repeat()

    def begin(first: int) -> Iterator[Any]:
        iterator = iter(dataset.to_iter_dataset())
        iterator.set_state({**iterator.get_state(), "next_index": first})
        return iterator

    return begin


def speed(iterator: Iterator[Any], batch_size: int) -> tuple[float, float]:
    """Returns examples a second over the seconds of a turn, and the CPU time of an example in microseconds."""
    for _ in range(5):
        next(iterator)
    start, cpu_start, count = time.perf_counter(), time.process_time(), 0
    while time.perf_counter() - start < TURN_SECS.value:
        next(iterator)
        count += batch_size
    return count / (time.perf_counter() - start), 1e6 * (time.process_time() - cpu_start) / count


def first_batch_secs(begin: Callable[[], Iterator[Any]]) -> float:
    """Returns the seconds until a new iterator has given its first batch."""
    start = time.perf_counter()
    next(begin())
    return time.perf_counter() - start


def measure(workload: Workload, directory: str) -> dict[str, list[float]]:
    """Returns, by system, examples a second, their CPU time, and the seconds to a first batch, early and late."""
    size, pipeline = workload.batch_size, workload.pipeline.repeat()
    begins = {"distloop": lambda first: iter(workload.by_number.starting_at(first))}
    begins["tf.data, read again"] = lambda first: iter(pipeline.skip(first))
    if workload.grain is not None:
        begins["Grain"] = workload.grain
    restores = {first: save_at(pipeline, first, directory) for first in (10, workload.late)}
    begins[CHECKPOINT] = lambda first: restores[first]() if first else iter(pipeline)
    best = {name: [0.0, np.inf, np.inf, np.inf] for name in begins}
    for names in (begins.keys() - {"Grain"}, begins.keys() & {"Grain"}):
        for turn, name in itertools.product(range(ROUNDS.value), sorted(names)):
            begin = begins[name]
            if name != CHECKPOINT:  # the same pipeline
                rate, cpu = speed(begin(0), size)
                best[name][:2] = max(best[name][0], rate), min(best[name][1], cpu)
            for place, first in ((2, 10), (3, workload.late)) if turn < RESUMES else ():
                best[name][place] = min(best[name][place], first_batch_secs(lambda b=begin, f=first: b(f)))
    return best


def save_at(pipeline: tf.data.Dataset, first: int, directory: str) -> Callable[[], Iterator[Any]]:
    """Saves the state of TensorFlow's iterator after some batches; returns the function that restores it."""
    iterator, path = iter(pipeline), os.path.join(directory, f"iterator-{first}")
    for _ in range(first):
        next(iterator)
    tf.train.Checkpoint(iterator=iterator).write(path)

    def begin() -> Iterator[Any]:
        restored = iter(pipeline)
        tf.train.Checkpoint(iterator=restored).read(path).assert_consumed()
        return restored

    return begin


def page(name: str, workload: Workload, best: dict[str, list[float]]) -> str:
    """Returns a table in Markdown."""
    columns = ["examples/s", "ratio", "CPU us an example", "first batch at step 10", f"at step {workload.late:,}"]
    lines = [f"| {name} | {' | '.join(columns)} |", "|" + " --- |" * 6]
    base = best["tf.data, read again"][0]
    for system, (rate, cpu, early, late) in best.items():
        speeds = f"{rate:,.0f} | {rate / base:.2f} | {cpu:.2f}" if rate else "| |"
        lines.append(f"| {system} | {speeds} | {early:.2f} s | {late:.2f} s |")
    return "\n".join(lines)


def main(_):
    if not SOURCE.value:
        for source in SOURCES:
            subprocess.run([sys.executable, "-m", __spec__.name, *sys.argv[1:], f"--source={source}"], check=True)
        return
    make = SOURCES[SOURCE.value]
    with tempfile.TemporaryDirectory() as directory:
        workload = make(directory) if make is make_records else make()
        print(page(SOURCE.value, workload, measure(workload, directory)), end="\n\n", flush=True)


SOURCES: dict[str, Callable[..., Workload]] = {"arrays": make_arrays, "rows": make_rows, "records": make_records}
SOURCE = flags.DEFINE_enum("source", None, list(SOURCES), "One source alone; none: all, each in a process.")

if __name__ == "__main__":
    app.run(main)

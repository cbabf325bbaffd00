"""Rows of pure Python: threads and worker processes of `make_dataset`, beside Grain's and PyTorch's workers.

    python -m experiments.benchmarks.input_processes --rounds=9

A row costs a millisecond or two in which Python's lock is held. The systems take turns, each of the second epoch after
a start; shown are the best turn of each, and the median of its ratios to the plain loop of the same turn. Other work on
the machine changes all of them: let it do nothing else. Grain and PyTorch are left out if they are not installed.
"""

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from absl import app, flags

BATCH_SIZE, BATCHES = 32, 64
ROUNDS = flags.DEFINE_integer("rounds", 9, "Turns of each system.")
PROCESSES = flags.DEFINE_integer("processes", 2, "Worker processes.")
WORK = 20_000  # operations of a row


class PythonRows:
    """Rows of 64 x 64 x 3 bytes that pure Python computes."""

    def __init__(self, work: int = WORK):
        self.work = work

    def __len__(self) -> int:
        return BATCH_SIZE * BATCHES

    def __getitem__(self, row: int) -> np.ndarray:
        value = row
        for number in range(self.work):
            value = (value * 31 + number) % 1_000_003
        return np.full([64, 64, 3], value % 256, np.uint8)


def with_distloop(processes: int) -> Iterator[Any]:
    import distloop

    dataset = distloop.make_dataset(PythonRows(), BATCH_SIZE, shuffle=True, processes=processes)
    while True:
        yield from dataset


def with_loop() -> Iterator[Any]:
    source = PythonRows()
    while True:
        for start in range(0, len(source), BATCH_SIZE):
            yield np.stack([source[row] for row in range(start, start + BATCH_SIZE)])


def with_torch() -> Iterator[Any]:
    import torch

    settings = {"num_workers": PROCESSES.value, "persistent_workers": True, "multiprocessing_context": "spawn"}
    loader = torch.utils.data.DataLoader(PythonRows(), batch_size=BATCH_SIZE, shuffle=True, **settings)
    while True:
        yield from loader


def with_grain() -> Iterator[Any]:
    import grain.python as grain

    dataset = grain.MapDataset.source(PythonRows()).shuffle(seed=0).batch(BATCH_SIZE).repeat().to_iter_dataset()
    yield from dataset.mp_prefetch(grain.MultiprocessingOptions(num_workers=PROCESSES.value))


def secs_of_an_epoch(iterator: Iterator[Any]) -> float:
    start = time.perf_counter()
    for _ in range(BATCHES):
        next(iterator)
    return time.perf_counter() - start


def main(_):
    systems: dict[str, Callable[[], Iterator[Any]]] = {
        "a plain loop": with_loop,
        "`make_dataset`, 16 threads": lambda: with_distloop(0),
        f"`make_dataset`, processes={PROCESSES.value}": lambda: with_distloop(PROCESSES.value),
        "Grain, mp_prefetch": with_grain,
        "PyTorch, DataLoader": with_torch,
    }
    for name, begin in list(systems.items()):
        try:
            next(begin())
        except ImportError as missing:
            print(f"{name} is left out: {missing}")
            del systems[name]
    secs: dict[str, list[float]] = {name: [] for name in systems}
    for _ in range(ROUNDS.value):
        for name, begin in systems.items():
            iterator = begin()  # anew, as some read far ahead while others are timed
            secs_of_an_epoch(iterator)  # it has started
            secs[name].append(secs_of_an_epoch(iterator))
            del iterator
    plain = np.array(secs["a plain loop"])
    print("| | rows/s | times a plain loop, in the same turn |\n| --- | --- | --- |")
    for name, values in secs.items():
        print(f"| {name} | {len(PythonRows()) / min(values):,.0f} | {np.median(plain / np.array(values)):.2f} |")


if __name__ == "__main__":
    app.run(main)

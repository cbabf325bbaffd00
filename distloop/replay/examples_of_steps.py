"""Which examples were in a step of a run, and in which steps an example was, of data by number; reads no data.

    examples_in_step("runs/digits", 1_234)    # array([814, 33, ...])
    steps_of_example("runs/digits", 814)      # [7, 19, 31, ...]

The order of the examples is a function of what each start of the run has recorded of its position in the data.
"""

import dataclasses
import itertools
import os
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from distloop.data.order import Order
from distloop.replay.diff import manifests_of
from distloop.workdir import ledger, records
from distloop.workdir.directory import fetch_reports


class _Stretch(NamedTuple):
    """Steps of a run, from one start or rollback to the next one.

    Attributes:
        first, last: its steps.
        batches: the numbers of their batches.
        order: of the examples.
        is_one_epoch: whether every epoch is the first.
    """

    first: int
    last: int
    batches: list[int]
    order: Order
    is_one_epoch: bool

    def examples(self, batch: int) -> np.ndarray:
        """Returns the numbers of the examples of a batch."""
        number = batch % self.order.batches_per_epoch if self.is_one_epoch else batch
        numbers: np.ndarray = self.order.rows(tf.constant(number, tf.int64))[0].numpy()
        return numbers


def print_examples(workdir: str, step: int | None, example: int | None) -> None:
    """Prints the numbers of the examples in a step, and the steps that an example was in, as far as they are given."""
    if step is not None:
        print(*examples_in_step(workdir, step))
    if example is not None:
        print(*steps_of_example(workdir, example))


def examples_in_step(workdir: str, step: int) -> np.ndarray:
    """Returns the numbers of the examples in a step of a run, `[B]`.

    Args:
        workdir: of the run, or a URL.
        step: its number, from 1.

    Raises:
        ValueError: if the run has no such step, or its data is not by number.
    """
    stretches = list(_stretches(workdir))
    for stretch in stretches:
        if stretch.first <= step <= stretch.last:
            return stretch.examples(stretch.batches[step - stretch.first])
    first, last = stretches[0].first, stretches[-1].last
    raise ValueError(
        f"--rows={step} was given, and the run in {workdir!r} has steps from {first} to {last}: give one of them."
    )


def steps_of_example(workdir: str, example: int) -> list[int]:
    """Returns the steps of a run that an example was in; the arguments and errors are those of `examples_in_step`."""
    steps = []
    for stretch in _stretches(workdir):
        order = stretch.order
        if not 0 <= example < order.num_rows:
            raise ValueError(
                f"--steps-of={example} was given, and the data of the run in {workdir!r} has {order.num_rows} "
                f"examples: give a number from 0 to {order.num_rows - 1}."
            )
        step_of = {batch: step for step, batch in enumerate(stretch.batches, stretch.first)}
        for epoch in sorted({batch // order.batches_per_epoch for batch in step_of}):
            first = epoch * order.batches_per_epoch
            all_examples = dataclasses.replace(order, batch_size=order.num_rows, limit=0)
            of_epoch = all_examples.rows(tf.constant(0 if stretch.is_one_epoch else epoch, tf.int64))[0].numpy()
            batch = first + int(np.flatnonzero(of_epoch == example)[0]) // order.batch_size
            if batch < first + order.batches_per_epoch and batch in step_of:
                steps.append(step_of[batch])
    return steps


def _stretches(workdir: str) -> Iterator[_Stretch]:
    """Yields the stretches of a run, in order.

    Raises:
        ValueError: if a start of the run has not recorded its position in the data, or that is no data by number.
    """
    with tempfile.TemporaryDirectory(prefix="distloop_") as root:
        path = fetch_reports(workdir, root)
        all_starts, last = ledger.read_starts(path), records.last_row(os.path.join(path, "metrics.jsonl"))
        furthest = max([int((last or {}).get("step", 0)), *manifests_of(path)])
    starts: list[dict[str, Any]] = []
    for start in all_starts:
        while starts and starts[-1]["step"] >= start["step"]:
            starts.pop()  # all of its steps were done again
        starts.append(start)
    if not starts or furthest <= starts[0]["step"]:
        raise ValueError(f"The run in {workdir!r} has recorded no step: give the workdir of a run that has trained.")
    for start, end in zip(starts, [*(later["step"] for later in starts[1:]), furthest], strict=True):
        if (position := start.get("input")) is None:
            raise ValueError(
                f"Which examples the steps {start['step'] + 1} to {end} of the run in {workdir!r} had is not known, as "
                "an earlier version trained them: replay a step with --replay, which reads the data."
            )
        rest = (batch for batch in itertools.count(position["batches"]) if batch not in position["skipped"])
        batches = list(itertools.islice(rest, end - start["step"]))
        yield _Stretch(start["step"] + 1, end, batches, _order(workdir, position), bool(position.get("is_one_epoch")))


def _order(workdir: str, position: Mapping[str, Any]) -> Order:
    """Returns the order of the examples, from what a start records of the data."""
    if "order" not in position or "mixture" in position or "lengths" in position or "batch_size" not in position:
        kind = next((name for name in ("mixture", "lengths") if name in position), "a dataset without numbers")
        raise ValueError(
            f"The data of the run in {workdir!r} is {kind}, whose order is unknown: replay the step with --replay, "
            "which reads the data."
        )
    return Order(
        num_rows=position["num_rows"],
        batch_size=position["batch_size"],
        seed=position.get("seed", 0),
        is_shuffled=bool(position["order"]),
        limit=position["batches_per_epoch"],
    )

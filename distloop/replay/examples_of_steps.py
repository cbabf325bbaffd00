"""Which examples were in a step of a run, and in which steps an example was, of data by number; reads no data.

    examples_in_step("runs/digits", 1_234)    # array([814, 33, ...])
    steps_of_example("runs/digits", 814)      # [7, 19, 31, ...]

The order of the examples is a function of what each start of the run has recorded of its position in the data.
"""

import dataclasses
import itertools
import os
import tempfile
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from distloop.data.order import Order
from distloop.log import shown
from distloop.workdir import ledger, records
from distloop.workdir.directory import fetch_reports
from distloop.workdir.run_files import manifests_of

_MOST_STEPS = 10**8  # of a run


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
        return np.asarray(self.order.rows(tf.constant(number, tf.int64))[0])


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
    raise ValueError(
        f"--rows={step} was given, and the run in {workdir!r} has steps from {stretches[0].first} to "
        f"{stretches[-1].last}: give one of them."
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
            all_examples = dataclasses.replace(order, batch_size=order.num_rows, limit=0)
            number, end = 0 if stretch.is_one_epoch else epoch, order.batches_per_epoch * order.batch_size
            of_epoch = all_examples.rows(tf.constant(number, tf.int64), end=end)[0].numpy()
            batches = epoch * order.batches_per_epoch + np.flatnonzero(of_epoch == example) // order.batch_size
            steps += [step_of[batch] for batch in batches.tolist() if batch in step_of]
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
    if not starts or not starts[0]["step"] < furthest <= _MOST_STEPS:
        raise ValueError(f"The files in {workdir!r} tell of {furthest} steps: give the workdir of a trained run.")
    for start, end in zip(starts, [*(later["step"] for later in starts[1:]), furthest], strict=True):
        if (position := start.get("input")) is None:
            raise ValueError(
                f"Which examples the steps {start['step'] + 1} to {end} of the run in {workdir!r} had is not known, as "
                "an earlier version trained them: replay a step with --replay, which reads the data."
            )
        order = _order(workdir, position)
        rest = (batch for batch in itertools.count(position["batches"]) if batch not in position["skipped"])
        batches = list(itertools.islice(rest, max(0, end - start["step"])))
        yield _Stretch(start["step"] + 1, end, batches, order, bool(position.get("is_one_epoch")))


def _order(workdir: str, position: Any) -> Order:
    """Returns the order of the examples, from what a start records of the data; raises as `_stretches`."""
    known = position if isinstance(position, dict) else {"recorded": position}
    kind = next((name for name in ("mixture", "lengths") if name in known), "a dataset without numbers")
    if "order" in known and "batch_size" in known and kind not in known:
        seed, skipped = known.get("seed", 0), known.get("skipped")
        counts: list[Any] = [known.get(name) for name in ("num_rows", "batch_size", "batches_per_epoch")]
        num_rows, size, limit = counts
        counts += [known.get("batches"), seed, *(skipped if isinstance(skipped, list) else [None])]
        if all(map(records.is_count, counts)) and size and 0 < limit <= -(-num_rows // size):
            return Order(num_rows=num_rows, batch_size=size, seed=seed, is_shuffled=bool(known["order"]), limit=limit)
        kind = f"recorded as {shown(position)}"
    raise ValueError(
        f"The data of the run in {workdir!r} is {kind}, whose order is unknown: replay the step with --replay, which "
        "reads the data."
    )

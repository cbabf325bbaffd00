"""Entries of a batch that no `loss_fn` reads, as seen in the traced step: named, warned of or refused.

    reads = Reads()
    with reads.recorded(rows):                      # while the step is traced
        outputs = loss_fn(rows, training)
    report([reads], "warn", is_shown=True)          # before the first step

Such an entry costs what the dataset does for it. One that only `predict_fn` or an evaluation reads counts as unread.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from distloop.log import log
from distloop.monitoring.console import say

_MAX_NAMES = 8  # in a message


class Reads:
    """The entries of a batch that the traced calls of one `loss_fn` read.

    Attributes:
        entries: whether any call read an entry, by its path; empty if none was traced.
    """

    def __init__(self) -> None:
        """Starts without entries."""
        self.entries: dict[str, bool] = {}

    @contextlib.contextmanager
    def recorded(self, rows: Any) -> Iterator[None]:
        """Records which entries the operations that the block adds to the graph read; eagerly, nothing is recorded.

        Args:
            rows: the batch, or a part of it.
        """
        if tf.executing_eagerly():
            yield
            return
        before = _count_consumers(rows)
        yield
        for path, count in _count_consumers(rows).items():
            self.entries[path] = self.entries.get(path, False) or count > before[path]


def report(reads: Sequence[Reads], policy: str, *, is_shown: bool) -> None:
    """Reports the entries that nothing reads; does nothing if there are none.

    Args:
        reads: of each `loss_fn` of the step.
        policy: "ignore" prints which ones, "warn" logs a warning, "refuse" raises an error.
        is_shown: whether this process prints and warns.

    Raises:
        ValueError: if the policy is to refuse them.
    """
    unread = [path for path in (reads[0].entries if reads else ()) if not any(r.entries.get(path) for r in reads)]
    if not unread:
        return
    names = ", ".join([*unread[:_MAX_NAMES], *([f"{rest} more"] if (rest := len(unread) - _MAX_NAMES) > 0 else [])])
    sentence = (
        f"No loss_fn reads these entries of a batch, which are loaded, decoded and batched all the same: {names}; drop "
        "them with dataset.map(...), or give unread_entries=ignore."
    )
    if policy == "refuse":
        raise ValueError(sentence)
    if policy == "warn" and is_shown:
        log.warning("%s", sentence)
    elif is_shown:
        say(f"entries of each batch that no loss_fn reads: {names} (loaded all the same)")


def _count_consumers(rows: Any) -> dict[str, int]:
    """Returns how many operations of the graph read each entry, by its path, such as `meta/id` or `0`."""
    return {
        "/".join(map(str, path)): sum(len(part.consumers()) for part in tf.nest.flatten(entry, expand_composites=True))
        for path, entry in keras.tree.flatten_with_path(rows)
    }

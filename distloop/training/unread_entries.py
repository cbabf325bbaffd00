"""Unread entries: names entries of a batch that no `loss_fn` reads, warns of them, or refuses them.

    reads = Reads()
    with reads.recorded(rows) as returned:          # while the step is traced
        returned.append(outputs := loss_fn(rows, training))
    report([reads], "warn", is_shown=True)          # before the first step

Such an entry costs what the dataset does for it. One that only `predict_fn` or an evaluation reads counts as unread.
"""

import contextlib
from collections.abc import Collection, Iterator, Sequence
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
    def recorded(self, rows: Any) -> Iterator[list[Any]]:
        """Records which entries the operations that the block adds to the graph read; eagerly, nothing is recorded.

        Args:
            rows: the batch, or a part of it.

        Yields:
            A list for what `loss_fn` returned; an entry in it is read, too, such as the weights of `weighted`.
        """
        returned: list[Any] = []
        if tf.executing_eagerly():
            yield returned
            return
        before = _count_consumers(rows)
        yield returned
        outputs = {id(part) for part in tf.nest.flatten(returned, expand_composites=True)}
        for path, count in _count_consumers(rows, outputs).items():
            self.entries[path] = self.entries.get(path, False) or count > before[path]


def report(reads: Sequence[Reads], policy: str, *, is_shown: bool) -> None:
    """Reports the entries that nothing reads; does nothing if there are none.

    Args:
        reads: of each `loss_fn` of the step.
        policy: "name" prints which ones, "ignore" does nothing, "warn" logs a warning, "refuse" raises an error.
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
    elif policy == "name" and is_shown:
        say(f"entries of each batch that no loss_fn reads: {names} (loaded all the same)")


def _count_consumers(rows: Any, outputs: Collection[int] = ()) -> dict[str, int]:
    """Returns how many operations of the graph read each entry, by its path, such as `meta/id` or `0`.

    Args:
        rows: the batch.
        outputs: the ids of tensors that count as read once more.
    """
    parts = {path: tf.nest.flatten(entry, expand_composites=True) for path, entry in keras.tree.flatten_with_path(rows)}
    return {
        "/".join(map(str, path)): sum(len(part.consumers()) + (id(part) in outputs) for part in parts[path])
        for path in parts
    }

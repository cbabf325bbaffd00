"""Traces at run time: a warning when a function is traced for one kind of data after another, with what changed.

    traces = Traces("train step")
    traces.add((iterator, layout))      # called while tracing

Each trace takes seconds and stays in memory. It does not know what the function computes.
"""

from typing import Any

import keras
import tensorflow as tf

from distloop.data.shards import Batch
from distloop.log import log

MOST_TRACES = 5  # without a warning


class Traces:
    """The traces of one function."""

    def __init__(self, name: str):
        """Stores what the function is called in the warning."""
        self._name = name
        self._count = 0
        self._next_warning = MOST_TRACES + 1
        self._last: dict[str, str] = {}

    def add(self, arguments: tuple[Any, ...]) -> None:
        """Counts a trace; warns at the one after `MOST_TRACES`, and whenever their number has doubled since.

        Args:
            arguments: of the function: iterators, tensors, Python values.
        """
        described = {name: text for argument in arguments for name, text in describe(argument).items()}
        self._count += 1
        if self._count == self._next_warning:
            self._next_warning = 2 * self._count
            changed = [
                f"{name or 'the batch'} from {self._last.get(name, 'nothing')} to {described.get(name, 'nothing')}"
                for name in sorted(described.keys() | self._last.keys())
                if described.get(name) != self._last.get(name)
            ]
            log.warning(
                "The %s was traced %d times, which takes seconds each time. The last time changed %s. Give batches of "
                "one shape: pad them, or make one dataset of all, so that tf.data declares axes that vary as None.",
                self._name,
                self._count,
                ", ".join(changed) or "nothing but the dataset",
            )
        self._last = described


def describe(argument: Any) -> dict[str, str]:
    """Returns dtype and shape of each entry of the batches that an argument holds, by path."""
    spec = getattr(argument, "element_spec", argument)
    spec = spec.rows if isinstance(spec, Batch) else spec
    return {
        "/".join(map(str, path)): f"{leaf.dtype.name} {_shape(leaf.shape)}"
        for path, leaf in keras.tree.flatten_with_path(spec)
        if isinstance(leaf, tf.TensorSpec | tf.Tensor) and leaf.shape.rank != 0
    }


def _shape(shape: tf.TensorShape) -> list[int | None] | str:
    return "of unknown shape" if shape.rank is None else list(shape)

"""Owns what is watched of the weights: histograms of them and of their last gradients, how far they move.

    watched = WatchedSteps(state.variables_of_update, state.paths, state.step, every=500)
    watched.make_room("", packing)          # for an update's gradients, before the step is traced
    watched.keep("", segments, scale)       # in the compiled step
    found = watched(report)                 # an action: numbers and histograms

Each step leaves its packed gradients in variables, which take over the tensors without a copy; nothing that trains
reads them, so a run with and without them ends bit for bit alike. (A branch that copies at the due steps alone costs a
small step more than that, each time that it is not taken.)
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from distloop.monitoring.media import Histogram
from distloop.optimizers.gradients import Packing, scaled
from distloop.variables import tensorflow_variable

UPDATE_NORM, UPDATE_RATIO = "update_norm", "update_ratio"


class WatchedSteps:
    """Keeps the gradients of the last step, and tells of them and of the weights as an action.

    Attributes:
        every: steps.
    """

    def __init__(self, variables: Mapping[str, Sequence[Any]], paths: Mapping[int, str], step: Any, every: int):
        """Notes where the weights stand.

        Args:
            variables: by update: what it trains.
            paths: of variables, by identity.
            step: counts the steps that are done.
            every: steps, 1 or more.
        """
        self.every: int | None = every
        self._variables, self._paths = variables, paths
        self._packings: dict[str, Packing] = {}
        self._kept: dict[str, list[tf.Variable]] = {}  # by update: segments, then what they are multiplied by
        self._look = tf.function(self._read_all, autograph=False)  # many small operations, which cost more one by one
        self._before: dict[str, list[np.ndarray]] | None = None  # the weights at the last multiple of `every`
        if int(step) % every == 0:
            self._before = {update: [w.numpy() for w in weights] for update, weights in self._read().items()}

    def make_room(self, update: str, packing: Packing) -> None:
        """Makes variables for what an update leaves, on the device where its gradients are.

        Args:
            update: the update's name.
            packing: the layout of its gradients.
        """
        self._packings[update] = packing
        with tf.device(tf.identity(tensorflow_variable(self._variables[update][0])).device):
            zeros = [tf.zeros(shape, dtype) for shape, dtype in zip(packing.shapes, packing.dtypes, strict=True)]
            self._kept[update] = [tf.Variable(value, trainable=False) for value in [*zeros, tf.zeros([])]]

    def keep(self, update: str, segments: Sequence[tf.Tensor], scale: tf.Tensor) -> None:
        """Keeps the gradients of a step; in a `tf.function`, outside `strategy.run`.

        Args:
            update: the update's name.
            segments: its packed gradients, summed.
            scale: what turns them into what the optimizer gets.
        """
        for variable, value in zip(self._kept[update], [*segments, scale], strict=True):
            variable.assign(value)

    def __call__(self, report: Any) -> dict[str, Any]:
        """Tells how far the weights moved, and histograms of weights and gradients.

        How far they moved is told at multiples of `every` alone, and where they were known at the one before.
        """
        found: dict[str, Any] = {}
        looked: dict[str, Any] = {name: [t.numpy() for t in parts] for name, parts in self._look().items()}
        now = {update: looked[f"weights/{update}"] for update in self._variables}
        is_due = report.step % self.every == 0
        for update, variables in self._variables.items():
            prefix = f"{update}/" if update else ""
            if is_due and self._before is not None:
                moved = _norm([new - old for new, old in zip(now[update], self._before[update], strict=True)])
                norm = _norm(now[update])
                found[prefix + UPDATE_NORM] = moved
                found[prefix + UPDATE_RATIO] = moved / norm if norm else float("nan")
            for variable, weight, gradient in zip(variables, now[update], looked[f"gradients/{update}"], strict=True):
                found[f"weights/{self._paths[id(variable)]}"] = Histogram(weight)
                found[f"gradients/{self._paths[id(variable)]}"] = Histogram(gradient)
        if is_due:
            self._before = now
        return found

    def _read(self) -> dict[str, list[tf.Tensor]]:
        """Reads the weights of each update."""
        return {
            update: [tf.identity(tensorflow_variable(variable)) for variable in variables]
            for update, variables in self._variables.items()
        }

    def _read_all(self) -> dict[str, list[tf.Tensor]]:
        """Reads the weights and the last gradients of each update."""
        found = {f"weights/{update}": weights for update, weights in self._read().items()}
        for update, (*segments, scale) in self._kept.items():
            found[f"gradients/{update}"] = self._packings[update].unpack(scaled(segments, scale))
        return found


def _norm(arrays: Sequence[np.ndarray]) -> float:
    """Gives the Euclidean norm over all numbers of some arrays."""
    return float(np.sqrt(sum(np.sum(np.square(array, dtype=np.float64)) for array in arrays)))

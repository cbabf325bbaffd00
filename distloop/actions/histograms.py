"""`WeightHistograms`: the action that shows histograms of weights and gradients, and how far the weights move.

    histograms = WeightHistograms(state.variables_of_update, state.paths, every=500)
    histograms.allocate("", packing)           # for an update's gradients, before the step is traced
    histograms.record("", segments, scale)     # in the compiled step
    histograms.begin(step, is_restored=False)  # before the first step
    metrics_and_media = histograms(report)     # as an action

Of a large table every n-th row counts, about 10,000 of them, and of a sparse gradient the rows that it has.

Each step stores its packed gradients in variables, which take over the tensors without a copy. Nothing that trains
reads these variables, so runs with and without histograms end bit for bit alike. (A branch that copies at due steps
only costs a small step more, each time that it is not taken.)
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from distloop.actions.action import Action, Report
from distloop.graph_functions import graph_function
from distloop.monitoring.media import Histogram, Media
from distloop.optimizers.gradients import Packing, scaled
from distloop.optimizers.rows import Rows, Segment, values_of
from distloop.variables import tensorflow_variable

_MOST_ROWS = 100_000  # of a variable, up to which all count
_SAMPLED_ROWS = 10_000


class WeightHistograms(Action):
    """Records the gradients of the last step, and reports histograms and norms."""

    def __init__(self, variables: Mapping[str, Sequence[Any]], paths: Mapping[int, str], every: int | str):
        """Stores the variables, without those that get new values in place of gradients, as the scales of float8.

        Args:
            variables: the variables that each update trains, by the update's name.
            paths: names of the variables, by identity.
            every: how often; `Fit` puts steps in the place of epochs, examples and percents.
        """
        self.every = every
        self._variables = {
            update: [v for v in trained if not getattr(v, "overwrite_with_gradient", False)]
            for update, trained in variables.items()
        }
        self._paths = paths
        self._packings: dict[str, Packing] = {}
        self._gradients: dict[str, list[tf.Variable]] = {}  # by update: packed segments, then their scale
        self._sparse: dict[str, set[int]] = {}  # by update: which segments were rows when the step was traced
        self._read_all = graph_function(self._weights_and_gradients)  # faster than many small reads
        self._previous: dict[str, list[np.ndarray]] | None = None  # the weights at the last multiple of `every`

    def begin(self, step: int, *, is_restored: bool) -> None:
        """Begins or goes on with a run: reads the weights if it is at a multiple of `every`.

        Args:
            step: number of steps done.
            is_restored: whether the weights are those of a checkpoint, so that earlier ones do not count.
        """
        if self._is_multiple(step):
            self._previous = {update: [w.numpy() for w in weights] for update, weights in self._weights().items()}
        elif is_restored:
            self._previous = None

    def allocate(self, update: str, packing: Packing) -> None:
        """Creates the variables for an update's gradients, on the device of its weights, or where each is used.

        Args:
            update: the update's name.
            packing: the layout of its gradients.
        """
        self._packings[update] = packing
        first = tf.identity(tensorflow_variable(self._variables[update][0])).device
        self._gradients[update] = []
        segments = zip([*packing.shapes, ()], [*packing.dtypes, tf.float32], [*packing.devices, ""], strict=True)
        for shape, dtype, device in segments:
            with tf.device(device or first):
                zeros = tf.zeros(shape, dtype)
                self._gradients[update].append(tf.Variable(zeros, trainable=False, shape=tf.TensorShape(None)))

    def record(self, update: str, segments: Sequence[Segment], scale: tf.Tensor) -> None:
        """Stores the gradients of a step. Call in a `tf.function`, outside `strategy.run`.

        Args:
            update: the update's name.
            segments: its packed gradients, summed.
            scale: the factor that turns them into the optimizer's gradients.
        """
        self._sparse[update] = {i for i, segment in enumerate(segments) if isinstance(segment, Rows)}
        for variable, value in zip(self._gradients[update], [*map(values_of, segments), scale], strict=True):
            variable.assign(value)

    def __call__(self, report: Report) -> dict[str, float | Media]:
        """Returns histograms of weights and gradients, and how far the weights moved.

        How far they moved is reported at multiples of `every`, if the weights at the previous multiple are known.
        """
        result: dict[str, float | Media] = {}
        values: dict[str, Any] = {name: [t.numpy() for t in tensors] for name, tensors in self._read_all().items()}
        weights = {update: values[f"weights/{update}"] for update in self._variables}
        is_multiple = self._is_multiple(report.step)
        for update, variables in self._variables.items():
            prefix = f"{update}/" if update else ""
            if is_multiple and self._previous is not None:
                shares = [1 / _stride(variable) for variable in variables]
                differences = [new - old for new, old in zip(weights[update], self._previous[update], strict=True)]
                moved, norm = _norm(differences, shares), _norm(weights[update], shares)
                result[prefix + "update_norm"] = moved
                result[prefix + "update_ratio"] = moved / norm if norm else float("nan")
            gradients = values[f"gradients/{update}"]
            for variable, weight, gradient in zip(variables, weights[update], gradients, strict=True):
                result[f"weights/{self._paths[id(variable)]}"] = Histogram(weight)
                result[f"gradients/{self._paths[id(variable)]}"] = Histogram(gradient)
        if is_multiple:
            self._previous = weights
        return result

    def _is_multiple(self, step: int) -> bool:
        return isinstance(self.every, str) or step % self.every == 0

    def _weights(self) -> dict[str, list[tf.Tensor]]:
        return {update: [_sample(variable) for variable in variables] for update, variables in self._variables.items()}

    def _weights_and_gradients(self) -> dict[str, list[tf.Tensor]]:
        tensors = {f"weights/{update}": weights for update, weights in self._weights().items()}
        for update, (*segments, scale) in self._gradients.items():
            sparse, packing = self._sparse.get(update, set()), self._packings[update]
            packed = [Rows(tf.range(tf.shape(s)[0]), s) if i in sparse else s for i, s in enumerate(segments)]
            gradients = packing.unpack(scaled(packed, tf.convert_to_tensor(scale)), keeps_sparse=True)
            tensors[f"gradients/{update}"] = [values_of(gradient) for gradient in gradients]
        return tensors


def _stride(variable: Any) -> int:
    """Returns n if every n-th row of a variable counts."""
    rows = variable.shape[0] if len(variable.shape) > 1 else 0
    return -(-rows // _SAMPLED_ROWS) if rows > _MOST_ROWS else 1


def _sample(variable: Any) -> tf.Tensor:
    """Returns the rows of a variable that count."""
    plain, stride = tensorflow_variable(variable), _stride(variable)
    return tf.identity(plain) if stride == 1 else plain[::stride]


def _norm(arrays: Sequence[np.ndarray], shares: Sequence[float]) -> float:
    """Computes the Euclidean norm over all elements of variables from arrays that hold a share of each one's rows."""
    squares = [np.sum(np.square(array, dtype=np.float64)) for array in arrays]
    return float(np.sqrt(sum(square / share for square, share in zip(squares, shares, strict=True))))
